"""Builds the emulator's C++ once per state of its sources, and loads it.

The shared object lies in the user's cache folder under a name that covers sources, compiler and processor, so
that several versions and machines can share the folder. It appears whole or not at all, and processes that
start together build it once.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from filelock import FileLock

from megagen.cache import cache_dir
from megagen.errors import CacheError, CompileError

_SOURCES = Path(__file__).with_name("csrc")
_FLAGS = ("-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-fPIC", "-pthread")
_LOCK_TIMEOUT_S = 600.0


def _translation_units() -> list[Path]:
    return sorted(path for path in _SOURCES.glob("*.cpp") if path.name != "testing_capi.cpp")


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise CompileError("the emulator needs a C++17 compiler: none of $CXX, g++, c++, clang++ is in PATH")


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def build_key() -> str:
    """SHA-256 over sources, compiler and processor."""
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join([compiler, version, *_FLAGS, _processor()]).encode())
    for path in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.hpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _ninja() -> str:
    if found := shutil.which("ninja"):
        return found
    beside = Path(sys.executable).with_name("ninja")
    if beside.exists():
        return str(beside)
    raise CompileError("the emulator is built with ninja, which isn't in PATH (pip install ninja)")


def _build(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="emulator-build-", dir=target.parent) as folder:
        build = Path(folder)
        objects = [f"{path.stem}.o" for path in _translation_units()]
        lines = [
            f"cxx = {_compiler()}",
            f"flags = {' '.join(_FLAGS)}",
            "rule compile\n  command = $cxx $flags -MD -MF $out.d -c $in -o $out\n  depfile = $out.d",
            "rule link\n  command = $cxx -shared $in -o $out",
            *(f"build {path.stem}.o: compile {path}" for path in _translation_units()),
            f"build emulator.so: link {' '.join(objects)}",
        ]
        (build / "build.ninja").write_text("\n".join(lines) + "\n")
        done = subprocess.run([_ninja(), "-C", folder], capture_output=True, text=True)
        if done.returncode != 0:
            raise CompileError(f"building the emulator failed:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
        os.replace(build / "emulator.so", target)


def shared_object() -> Path:
    """The built library; builds it if need be.

    Raises:
        CompileError: no compiler or ninja, or the build failed.
        CacheError: the cache folder can't be written.
    """
    target = cache_dir() / f"emulator-{build_key()[:24]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock", timeout=_LOCK_TIMEOUT_S):
            if not target.exists():
                _build(target)
    except OSError as error:
        raise CacheError(
            f"the cache {target.parent} can't be used ({error}); "
            "set MEGAGEN_CACHE_DIR to a folder that this user can write"
        ) from error
    return target


class TimelineRecord(ctypes.Structure):
    """``TimelineEvent`` of machine.hpp."""

    _fields_ = [
        *(
            (name, ctypes.c_uint32)
            for name in ("rank", "sm", "slot", "warp", "lanes", "wait", "line", "grid")
        ),
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
    ]


class Options(ctypes.Structure):
    """``emulator_options`` of api.cpp."""

    _fields_ = [
        ("ranks", ctypes.c_int32),
        ("sms", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("max_steps", ctypes.c_uint64),
        ("races", ctypes.c_int32),
        ("collectives_order", ctypes.c_int32),
        ("pipelined_copies", ctypes.c_int32),
        ("watchdog", ctypes.c_int32),
        ("timeline", ctypes.c_int32),
        ("step_clock", ctypes.c_int32),
        ("proxy", ctypes.c_int32),
        ("compute_capability", ctypes.c_int32),
        ("shared_per_sm", ctypes.c_uint32),
        ("shared_per_cta", ctypes.c_uint32),
        ("registers", ctypes.c_uint32),
        ("threads_per_sm", ctypes.c_uint32),
    ]


_pointer, _text, _u64, _i32 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int32
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "emulator_error": (_text, ()),
    "emulator_error_kind": (_i32, ()),
    "emulator_create": (_pointer, (ctypes.POINTER(Options),)),
    "emulator_destroy": (None, (_pointer,)),
    "emulator_load": (_pointer, (_pointer, _text, _text)),
    "emulator_parameters": (_text, (_pointer, _text)),
    "emulator_allocate": (_pointer, (_pointer, _i32, _u64, _u64, _text, _i32)),
    "emulator_address": (_u64, (_pointer,)),
    "emulator_data": (_pointer, (_pointer,)),
    "emulator_undefined": (_pointer, (_pointer,)),
    "emulator_free": (None, (_pointer,)),
    "emulator_launch": (
        _i32,
        (
            _pointer,
            _pointer,
            _text,
            _i32,
            _pointer,
            _pointer,
            _pointer,
            ctypes.c_uint32,
            _pointer,
            _u64,
            _i32,
        ),
    ),
    "emulator_run": (_i32, (_pointer, _u64, ctypes.POINTER(_i32))),
    "emulator_counters": (None, (_pointer, _pointer)),
    "emulator_timeline": (_u64, (_pointer, ctypes.POINTER(ctypes.POINTER(TimelineRecord)))),
    "emulator_ticks": (_u64, (_pointer,)),
    "emulator_describe": (_text, (_pointer, ctypes.c_uint32)),
    "emulator_output": (_text, (_pointer,)),
    "emulator_reports": (_text, (_pointer,)),
    "emulator_last_writer": (_text, (_pointer, _pointer, _u64)),
    "emulator_forms": (_text, ()),
    "emulator_module_forms": (_text, (_pointer,)),
}


@cache
def library() -> ctypes.CDLL:
    """The loaded library with its functions' types set."""
    lib = ctypes.CDLL(str(shared_object()))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = list(arguments)
    return lib
