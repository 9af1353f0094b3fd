"""Instruction mix of a cubin, through NVIDIA's disassembler ``nvdisasm``."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megagen.errors import DeviceError, InputError

CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "tensor core": (
        "HGMMA",
        "QGMMA",
        "IGMMA",
        "UTCHMMA",
        "UTCQMMA",
        "UTCIMMA",
        "UTCOMMA",
        "HMMA",
        "QMMA",
        "IMMA",
    ),
    "tensor memory": ("UTCATOMSWS", "UTCCP", "UTCBAR", "UTCSHIFT", "LDTM", "STTM", "LDT", "STT"),
    "bulk copy": ("UBLKCP", "UBLKRED", "UBLKPF", "UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF", "UTMACMDFLUSH"),
    "mbarrier": ("SYNCS",),
    "barrier, fence": (
        "BAR",
        "WARPSYNC",
        "WARPGROUP",
        "MEMBAR",
        "FENCE",
        "ERRBAR",
        "DEPBAR",
        "CCTL",
        "UCGABAR_ARV",
    ),
    "shared memory": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "global memory": ("LDG", "STG", "LD", "ST", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS"),
    "local memory": ("LDL", "STL"),
    "registers per warp": ("USETMAXREG",),
    "control": (
        "BRA",
        "BRX",
        "EXIT",
        "CALL",
        "RET",
        "BSSY",
        "BSYNC",
        "BREAK",
        "NANOSLEEP",
        "WARPSYNC",
        "NOP",
        "YIELD",
    ),
}
"""Opcodes by what they do, without their suffixes; everything else is "arithmetic, moves"."""

OTHER = "arithmetic, moves"
_TIMEOUT_S = 60
_TOOLKIT = "/usr/local/cuda/bin"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)[^;]*;(.*)")
_LINE = re.compile(r'//## File "[^"]*", line (\d+)')


@dataclass(frozen=True)
class InstructionMix:
    """Static instruction counts of a cubin.

    Attributes:
        opcodes: opcode without suffixes -> instructions, most frequent first.
        spill_lines: source line -> loads and stores of local memory that come from it.
    """

    opcodes: Mapping[str, int]
    spill_lines: Mapping[int, int]

    @property
    def total(self) -> int:
        return sum(self.opcodes.values())

    def by_category(self) -> dict[str, int]:
        """Category -> instructions, without those that do not occur."""
        category_of = {opcode: category for category, opcodes in CATEGORIES.items() for opcode in opcodes}
        counts: Counter[str] = Counter()
        for opcode, count in self.opcodes.items():
            counts[category_of.get(opcode, OTHER)] += count
        return dict(counts.most_common())


@cache
def find_nvdisasm() -> str | None:
    """Path of nvdisasm, from the package ``nvidia-cuda-nvdisasm``, a CUDA toolkit or PATH; None without."""
    spec = importlib.util.find_spec("nvidia")
    installed = (
        tool
        for folder in (spec.submodule_search_locations or () if spec else ())
        for tool in Path(folder).glob("cu*/bin/nvdisasm")
    )
    found = next(installed, None) or shutil.which("nvdisasm") or shutil.which("nvdisasm", path=_TOOLKIT)
    return str(found) if found else None


def instruction_mix(cubin: bytes) -> InstructionMix:
    """Disassemble a cubin and count; raises what ``disassemble`` raises."""
    return _count(disassemble(cubin, "-g"))


def disassemble(cubin: bytes, option: str) -> str:
    """A cubin's instructions, with what the option of nvdisasm adds: -g source lines, -plr registers in use.

    Raises:
        DeviceError: nvdisasm is missing.
        InputError: nvdisasm does not take the cubin.
    """
    nvdisasm = find_nvdisasm()
    if nvdisasm is None:
        raise DeviceError("the instruction mix needs nvdisasm; `pip install nvidia-cuda-nvdisasm`")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [nvdisasm, "-c", option, str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if ran.returncode:
        raise InputError(f"nvdisasm refuses the cubin: {ran.stderr.strip()}")
    return ran.stdout


def _count(disassembly: str) -> InstructionMix:
    opcodes: Counter[str] = Counter()
    spill_lines: Counter[int] = Counter()
    source_line = 0
    for text in disassembly.splitlines():
        if place := _LINE.search(text):
            source_line = int(place[1])
        elif instruction := _INSTRUCTION.search(text):
            opcodes[instruction[1]] += 1
            if instruction[1] in CATEGORIES["local memory"]:
                spill_lines[source_line] += 1
    return InstructionMix(dict(opcodes.most_common()), dict(sorted(spill_lines.items())))
