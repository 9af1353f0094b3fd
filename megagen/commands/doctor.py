"""``megagen doctor``: what this machine has, and what that allows."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tempfile
from dataclasses import asdict, dataclass
from typing import Any, Literal

import typer

from megagen import compiler
from megagen.arch import Arch
from megagen.cache import cache_dir
from megagen.commands.output import Json, emit
from megagen.errors import DeviceError
from megagen.inspection.sass import find_nvdisasm
from megagen.inspection.tables import rows_table

State = Literal["ok", "missing", "unusable"]


@dataclass(frozen=True)
class Finding:
    """One part of the machine: its state, what was found, and what that allows or forbids."""

    part: str
    state: State
    found: str
    allows: str


MIN_DRIVER_CUDA = 13000
"""What the driver must support, as ``cuDriverGetVersion`` counts: CUDA 13.0, driver branch 580."""

_NO_GPU = Finding("GPU", "missing", "none", "the emulator and the reference only")


def doctor(as_json: Json = False) -> None:
    """Show GPU, driver, NVRTC, NVLink, torch and tools, and what they allow; exit 3 if no kernel can run."""
    gpus = _gpus()
    usable_gpus = [index for index, gpu in enumerate(gpus) if gpu.state == "ok"]
    findings = [_driver(), *gpus, _nvlink(usable_gpus), _nvrtc(), _torch(), _ninja(), _nvdisasm(), _cache()]
    abilities = _abilities(findings)
    allowed = [{"this machine can": name, "": "yes" if able else "no"} for name, able in abilities.items()]
    record = {"findings": [asdict(finding) for finding in findings], "can": abilities}
    emit(
        as_json,
        record,
        rows_table("what is there", [asdict(finding) for finding in findings]),
        rows_table("what that allows", allowed),
    )
    if not abilities["run kernels"]:
        raise typer.Exit(3)


def _abilities(findings: list[Finding]) -> dict[str, bool]:
    """What the machine can do, from the states of its parts."""
    usable = {finding.part.split()[0] for finding in findings if finding.state == "ok"}
    needs = {
        "plan and generate": set(),
        "compile kernels": {"NVRTC", "cache"},
        "build ahead of time": {"NVRTC", "ninja"},
        "run kernels": {"driver", "GPU", "torch"},
        "run several ranks": {"driver", "GPU", "torch", "NVLink"},
        "show the instruction mix": {"nvdisasm"},
    }
    return {ability: parts <= usable for ability, parts in needs.items()}


def _driver() -> Finding:
    try:
        version = _cuda("cuDriverGetVersion")
    except DeviceError as error:
        return Finding("driver", "missing", str(error), "nothing can be run on a GPU")
    found = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if version < MIN_DRIVER_CUDA:
        return Finding(
            "driver", "unusable", found, f"kernels need CUDA {MIN_DRIVER_CUDA // 1000}.0: update it"
        )
    return Finding("driver", "ok", found, "loads the kernels of this megagen")


def _gpus() -> list[Finding]:
    """One finding per GPU, or one that says that there is none."""
    try:
        _cuda("cuInit", 0)
        return [_gpu(_cuda("cuDeviceGet", index), index) for index in range(_cuda("cuDeviceGetCount"))] or [
            _NO_GPU
        ]
    except DeviceError:
        return [_NO_GPU]


def _gpu(device: Any, index: int) -> Finding:
    from cuda.bindings import driver

    name = _cuda("cuDeviceGetName", 256, device).split(b"\0")[0].decode()  # spaces follow the zero
    kinds = driver.CUdevice_attribute
    major, minor, sms = (
        _cuda("cuDeviceGetAttribute", kind, device)
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            kinds.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    memory_gib = _cuda("cuDeviceTotalMem", device) >> 30
    found = f"{name}, compute capability {major}.{minor}, {sms} SMs, {memory_gib} GiB"
    try:
        arch = Arch.of_capability(major, minor)
    except DeviceError as error:
        return Finding(f"GPU {index}", "unusable", found, str(error))
    return Finding(f"GPU {index}", "ok", found, f"runs kernels generated with --arch {arch.name}")


def _nvlink(gpus: list[int]) -> Finding:
    """Whether each of these GPUs reaches every other with native atomics, which only NVLink gives."""
    count = len(gpus)
    if count < 2:
        found = "1 GPU" if count else "no GPU"
        return Finding("NVLink", "missing", found, "one rank only, or several on one GPU (local_group)")
    from cuda.bindings import driver

    attribute = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    apart = [
        f"{a}-{b}"
        for a in gpus
        for b in gpus
        if a != b and not _cuda("cuDeviceGetP2PAttribute", attribute, a, b)
    ]
    if apart:
        return Finding(
            "NVLink", "unusable", f"not between GPUs {', '.join(apart)}", "ranks must be NVLink peers"
        )
    return Finding("NVLink", "ok", f"between all {count} GPUs", f"up to {count} ranks on this host")


def _nvrtc() -> Finding:
    try:
        version = compiler.nvrtc_version()
    except DeviceError as error:
        return Finding("NVRTC", "missing", str(error), "only kernels built ahead of time can be run")
    if tuple(map(int, version.split("."))) < (13, 0):
        return Finding(
            "NVRTC", "unusable", version, "needs 13.0 or newer: `pip install -U nvidia-cuda-nvrtc`"
        )
    return Finding("NVRTC", "ok", version, f"compiles for {', '.join(compiler.TARGETS)}")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "missing", "not installed", "plans and compiles only")
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "unusable", str(error), "plans and compiles only: install it again")
    if torch.version.cuda is None:
        found = f"{torch.__version__}, a build without CUDA"
        return Finding("torch", "unusable", found, "weights and the reference only: install a CUDA build")
    return Finding("torch", "ok", torch.__version__, "layers, weights and the reference")


def _ninja() -> Finding:
    if importlib.util.find_spec("ninja") is None:
        return Finding("ninja", "missing", "not installed", "no `generate --compile`: `pip install ninja`")
    return Finding("ninja", "ok", importlib.metadata.version("ninja"), "`generate --compile`")


def _nvdisasm() -> Finding:
    path = find_nvdisasm()
    if path is None:
        return Finding(
            "nvdisasm", "missing", "not found", "no instruction mix: `pip install nvidia-cuda-nvdisasm`"
        )
    return Finding("nvdisasm", "ok", path, "instruction mix of `inspect`")


def _cache() -> Finding:
    directory = cache_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        return Finding(
            "cache", "unusable", str(error), "set MEGAGEN_CACHE_DIR to a folder that can be written"
        )
    return Finding("cache", "ok", str(directory), "keeps compiled kernels")


def _cuda(call: str, *arguments: Any) -> Any:
    """Result of a driver call.

    Raises:
        DeviceError: no driver, or the call failed.
    """
    try:
        from cuda.bindings import driver

        status, *result = getattr(driver, call)(*arguments)
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(f"no CUDA driver ({error})") from error
    if status.value:
        raise DeviceError(f"{call} failed: {status.name}")
    return result[0] if result else None
