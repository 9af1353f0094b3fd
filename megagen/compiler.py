"""Source -> cubin and PTX through NVRTC.

Needs no GPU, no driver, no CUDA toolkit and no torch: a generated kernel includes no header. One compilation
gives both the cubin that is launched and the PTX that the emulator runs, whose ``.loc`` lines lead back to
the source.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from megagen.arch import ARCHS
from megagen.errors import CompileError, DeviceError

TARGETS = tuple(arch.compile_target for arch in ARCHS.values())
"""What ``compile`` takes as ``arch``: ``sm_90a``, ``sm_100a``, ``sm_103a``."""

REFUSED_NOTES = {
    "C7508": "ptxas ignored setmaxnreg: __launch_bounds__ makes the register count at entry known",
    "C7514": "ptxas serialized WGMMA: an accumulator is touched while a WGMMA that writes it is in flight",
    "C7517": "ptxas injected a WGMMA wait: wait for the group before its accumulators are used",
}
"""ptxas notes that mean a slow kernel, by number; NVRTC's log carries them without any flag."""

_CONTEXT_LINES = 2

# NVRTC would put the current folder before a relative name, and so into PTX and cubin.
_SOURCE_FOLDER = "/megagen/"


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled kernel and what ptxas says of it.

    Attributes:
        name: what messages, line information and debuggers call the source.
        arch: the compile target, one of ``TARGETS``.
        entry: name of the ``__global__`` function.
        cubin, ptx, log: what NVRTC made.
        registers: per thread at entry; ``setmaxnreg`` moves them between warpgroups afterwards.
        stack, spill_stores, spill_loads: bytes per thread, summed over the kernel and the functions it calls.
        static_shared: bytes per CTA, without dynamic shared memory.
        nvrtc: version of the compiler, with its patch level.
        options: what NVRTC was given.
        compile_ms: wall time.
    """

    name: str
    arch: str
    entry: str
    cubin: bytes
    ptx: str
    log: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    nvrtc: str
    options: tuple[str, ...]
    compile_ms: float

    def problems(self) -> tuple[str, ...]:
        """Why this kernel must not be shipped: refused ptxas notes, spills, stack. Empty if it is clean."""
        found = [
            f"{meaning} [{line.strip()}]"
            for note, meaning in REFUSED_NOTES.items()
            for line in self.log.splitlines()
            if f"({note})" in line
        ]
        if self.stack or self.spill_stores or self.spill_loads:
            found.append(
                f"{self.entry} uses {self.stack} bytes of stack, {self.spill_stores} bytes of spill stores "
                f"and {self.spill_loads} bytes of spill loads per thread, where 0 of each are allowed "
                f"({self.registers} registers at entry)"
            )
        return tuple(found)

    def resources(self) -> dict[str, Any]:
        """Every attribute but the cubin, the PTX and the log, ready for JSON."""
        bulky = ("cubin", "ptx", "log")
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in bulky}

    @classmethod
    def from_parts(cls, resources: Mapping[str, Any], cubin: bytes, ptx: str, log: str) -> CompiledKernel:
        """Inverse of ``resources``; ValueError if those come from a megagen that kept other attributes."""
        try:
            return cls(cubin=cubin, ptx=ptx, log=log, **{**resources, "options": tuple(resources["options"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"written by another version of megagen ({error})") from error


def options_for(arch: str) -> tuple[str, ...]:
    """The NVRTC options that megagen compiles with; they are part of the cache key.

    Raises:
        CompileError: an unknown target.
    """
    if arch not in TARGETS:
        raise CompileError(f"arch={arch!r} is no compile target; use one of {', '.join(TARGETS)}")
    # NVRTC has a cache of its own where a driver is present; a kernel out of it comes without ptxas's report.
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        "--generate-line-info",
        "--no-cache",
    )


@cache
def nvrtc_version() -> str:
    """``major.minor`` of the NVRTC library in use.

    Raises:
        DeviceError: NVRTC can't be loaded.
    """
    _, major, minor = _nvrtc().nvrtcVersion()
    return f"{major}.{minor}"


@cache
def packaged_nvrtc() -> str:
    """Version of the installed NVRTC package, without the time that loading the library takes; where there is
    no package, ``nvrtc_version()``.

    Raises:
        DeviceError: no package, and NVRTC can't be loaded.
    """
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:
        return nvrtc_version()


def compile(source: str, arch: str, *, name: str, strict: bool = True) -> CompiledKernel:
    """Compile a source that holds exactly one ``__global__`` function.

    Args:
        source: CUDA C++ that includes no header.
        arch: one of ``TARGETS``.
        name: what messages and line information call the source.
        strict: refuse a kernel that has ``problems()``; without it such a kernel is returned, for inspection.

    Raises:
        CompileError: NVRTC rejects the source (the message shows the lines around the first error), or
            ``strict`` and the kernel has problems.
        DeviceError: NVRTC can't be loaded.
    """
    options = options_for(arch)
    nvrtc = _nvrtc()
    start = time.perf_counter()
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{_SOURCE_FOLDER}{name}".encode(), 0, [], [])
    _expect_success(status, "nvrtcCreateProgram")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        raw_log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = raw_log.rstrip(b"\0").decode(errors="replace").replace(_SOURCE_FOLDER, "")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(
                f"{name} for {arch}: {status.name}\n{log.strip()}{_excerpt(source, name, log)}"
            )
        cubin = _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        ptx = _fetch(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)

    kernel = CompiledKernel(
        name=name,
        arch=arch,
        cubin=cubin,
        ptx=ptx,
        log=log,
        nvrtc=_full_version(ptx),
        options=options,
        compile_ms=round((time.perf_counter() - start) * 1e3, 1),
        **_read_log(log, name),
    )
    if strict and (problems := kernel.problems()):
        raise CompileError(f"{name} for {arch}: {'; '.join(problems)}")
    return kernel


def _read_log(log: str, name: str) -> dict[str, Any]:
    """Entry name and resources out of the log that ``--ptxas-options=-v`` writes."""
    entries = re.findall(r"Compiling entry function '([^']+)'", log)
    if len(entries) != 1:
        raise CompileError(
            f"{name} holds {len(entries)} __global__ functions ({', '.join(entries) or 'none'}); "
            "a source must hold exactly one"
        )
    used = re.search(r"Used (\d+) registers.*", log)
    if used is None:
        raise CompileError(f"{name}: NVRTC's log names no registers, so its form is unknown here:\n{log}")
    shared = re.search(r"(\d+) bytes smem", used[0])
    cumulative_stack = re.search(r"(\d+) bytes cumulative stack size", used[0])
    # One line per function that was not inlined.
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    stack, stores, loads = (sum(int(frame[i]) for frame in frames) for i in range(3))
    return {
        "entry": entries[0],
        "registers": int(used[1]),
        "static_shared": int(shared[1]) if shared else 0,
        "stack": max(stack, int(cumulative_stack[1]) if cumulative_stack else 0),
        "spill_stores": stores,
        "spill_loads": loads,
    }


def _full_version(ptx: str) -> str:
    """NVRTC's version with its patch level, which only the head of the PTX tells."""
    found = re.search(r"release [\d.]+, V([\d.]+)", ptx)
    return found[1] if found else nvrtc_version()


def _excerpt(source: str, name: str, log: str) -> str:
    """The source lines around the first error of a failed compilation; empty if the log names no line."""
    place = re.search(rf"^{re.escape(name)}\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE)
    if place is None:
        return ""
    at = int(place[1])
    lines = source.splitlines()
    shown = range(max(at - _CONTEXT_LINES, 1), min(at + _CONTEXT_LINES, len(lines)) + 1)
    return "".join(f"\n{'>' if n == at else ' '}{n:6d} | {lines[n - 1]}" for n in shown)


def _fetch(size_of: Any, read: Any, program: Any) -> bytes:
    status, size = size_of(program)
    _expect_success(status, size_of.__name__)
    buffer = bytearray(size)
    (status,) = read(program, buffer)
    _expect_success(status, read.__name__)
    return bytes(buffer)


def _expect_success(status: Any, call: str) -> None:
    if status.value:
        raise CompileError(f"{call} failed: {status.name}")


@cache
def _nvrtc() -> Any:
    """cuda-python's NVRTC module with its library loaded; imported late, since users of ahead-of-time kernels
    need neither."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(
            f"NVRTC can't be loaded ({error}); install it with `pip install cuda-bindings "
            "nvidia-cuda-nvrtc`, or run kernels built ahead of time (MEGAGEN_KERNELS), which don't need it"
        ) from error
    return nvrtc


def main() -> None:
    """Compile one file and print its resources and problems."""
    import argparse
    import json
    from pathlib import Path

    parser = argparse.ArgumentParser(prog="python -m megagen.compiler", description=main.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--arch", default="sm_90a", choices=TARGETS)
    parser.add_argument("--out", type=Path, help="write FILE.ptx and FILE.cubin into this folder")
    args = parser.parse_args()
    kernel = compile(args.file.read_text(), args.arch, name=args.file.name, strict=False)
    print(json.dumps(kernel.resources(), indent=1))
    print("\n".join(kernel.problems()) or "clean")
    if args.out:
        args.out.joinpath(f"{args.file.stem}.ptx").write_text(kernel.ptx)
        args.out.joinpath(f"{args.file.stem}.cubin").write_bytes(kernel.cubin)


if __name__ == "__main__":
    main()
