#!/usr/bin/env python3
"""Compiles the CUDA C++ of this folder to the PTX beside it; needs nvcc of CUDA 13.

The PTX is committed, because no machine without a toolkit could make it and because other compilers' texts
are what the emulator has to read.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
WORK = Path(tempfile.gettempdir()) / "foreign"  # its name gets into the debug sections
DEBUG = {"functions"}  # with -G: no optimization, everything in local memory, debug sections


def compile_file(source: Path) -> None:
    copy = Path(shutil.copy(source, WORK))
    debug = "-G" if source.stem in DEBUG else "-lineinfo"
    command = ["nvcc", "-arch=sm_90a", "-std=c++17", debug, "-ptx", copy.name, "-o", "out.ptx"]
    subprocess.run(command, check=True, cwd=WORK)
    # Of files only their names: the folders differ from machine to machine.
    text = re.sub(r'(?m)^(\s*\.file\s+\d+ ")[^"]*/', r"\1", (WORK / "out.ptx").read_text())
    source.with_suffix(".ptx").write_text(text)


if __name__ == "__main__":
    WORK.mkdir(exist_ok=True)
    for path in sorted(FOLDER.glob("*.cu")):
        compile_file(path)
