"""Install what pyproject.toml asks for and this interpreter can't import; nothing that is there is touched.

    python scripts/install_missing.py [--check] [EXTRA ...]

With --check nothing is installed, and the exit code is 1 if anything is missing.
"""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

MODULES = {
    "cuda-bindings": "cuda.bindings.nvrtc",
    "cuda-core": "cuda.core",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
}
"""Distribution -> module, where the names differ by more than case and dashes."""

PINS = {"torch": "torch==2.13.0"}
"""What to install in place of the range in pyproject.toml."""


def requirements(extras: list[str]) -> list[str]:
    """The project's requirements, with those of the extras."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        *(r for extra in extras for r in project["optional-dependencies"][extra]),
    ]


def is_there(name: str) -> bool:
    """Whether a distribution's module can be found, or its library or tool."""
    if name == "nvidia-cuda-nvrtc":
        return _runs("from cuda.bindings import nvrtc; nvrtc.nvrtcVersion()")
    if name == "nvidia-cuda-nvdisasm":
        return _runs("from megagen.inspection import sass; assert sass.find_nvdisasm()")
    try:
        return importlib.util.find_spec(MODULES.get(name, name.lower().replace("-", "_"))) is not None
    except ModuleNotFoundError:
        return False


def _runs(code: str) -> bool:
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def main() -> int:
    arguments = sys.argv[1:]
    check = "--check" in arguments
    wanted = {}
    for requirement in requirements([argument for argument in arguments if argument != "--check"]):
        name = re.split(r"[^A-Za-z0-9_.-]", requirement, maxsplit=1)[0]
        wanted[name] = PINS.get(name, requirement)
    missing = [requirement for name, requirement in wanted.items() if not is_there(name)]
    if check or not missing:
        return int(bool(missing))
    print(f"installing {' '.join(missing)}", flush=True)
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *missing]).returncode


if __name__ == "__main__":
    sys.exit(main())
