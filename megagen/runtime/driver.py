"""The CUDA driver through cuda-python: what GPU there is, and kernels loaded on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C._dynamo import guards

from megagen.arch import Arch
from megagen.compiler import CompiledKernel
from megagen.errors import DeviceError
from megagen.tensor_map import ELEMENT_TYPES, L2_PROMOTIONS, SWIZZLES, TensorMap

MIN_DRIVER = 13000
"""Oldest driver that loads what NVRTC 13 makes, as ``cuDriverGetVersion`` counts: CUDA 13.0, branch 580."""


_STREAM_BATCH = 16


@cache
def bindings() -> Any:
    """cuda-python's driver module; imported late, since checks come first."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(f"cuda-python is missing ({error}); `pip install cuda-bindings`") from error
    return driver


def call(function: str, *arguments: Any) -> Any:
    """Result of a driver function, such as ``call("cuInit", 0)``.

    Raises:
        DeviceError: there is no driver, or the call failed.
    """
    try:
        status, *result = getattr(bindings(), function)(*arguments)
    except (RuntimeError, OSError) as error:
        raise DeviceError(f"no GPU: no CUDA driver ({error}); install one of branch 580 or newer") from error
    expect_success(function, status)
    return result[0] if len(result) == 1 else tuple(result) or None


def expect_success(function: str, status: Any) -> None:
    """DeviceError that names the driver function and its error, unless it succeeded."""
    if int(status):
        raise DeviceError(f"{function} failed: {status.name}")


@dataclass(frozen=True)
class Gpu:
    """A GPU that kernels exist for; ``index`` is torch's."""

    index: int
    name: str
    arch: Arch
    sms: int

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)


def require_gpu(device: torch.device | str | int | None = None) -> Gpu:
    """The GPU of a torch device (default: the current one), with a CUDA context on it.

    Raises:
        DeviceError: no GPU or driver, a driver that is too old, or a GPU that no kernel exists for.
    """
    check_driver(call("cuDriverGetVersion"))
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU: torch.cuda.is_available() is False; run on a machine with an NVIDIA GPU, its driver "
            "and a CUDA build of torch (`megagen doctor` says what is missing)"
        )
    index = torch.cuda.current_device() if device is None else _index_of(device)
    properties = torch.cuda.get_device_properties(index)
    arch = Arch.of_capability(properties.major, properties.minor)
    torch.empty(1, device=f"cuda:{index}")  # makes the context
    return Gpu(index, properties.name, arch, properties.multi_processor_count)


def check_driver(version: int) -> None:
    """DeviceError if the driver (as ``cuDriverGetVersion`` counts) can't load what NVRTC 13 makes."""
    if version < MIN_DRIVER:
        raise DeviceError(
            f"the driver supports CUDA {version // 1000}.{version % 1000 // 10}, kernels need "
            f"{MIN_DRIVER // 1000}.{MIN_DRIVER % 1000 // 10}; install driver branch 580 or newer"
        )


def _index_of(device: torch.device | str | int) -> int:
    chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type != "cuda":
        raise DeviceError(f"device={device!r} is no GPU; give cuda or cuda:N")
    return torch.cuda.current_device() if chosen.index is None else chosen.index


@contextmanager
def current(gpu: Gpu) -> Iterator[None]:
    """Makes the GPU's context, the one that torch uses, current in this thread; afterwards what was before is
    current again, since torch's current device follows it."""
    before = call("cuCtxGetCurrent")
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", gpu.index)))
    try:
        yield
    finally:
        if int(before):
            call("cuCtxSetCurrent", before)


def _no_cuda(index: int) -> int:
    raise DeviceError("this build of torch has no CUDA; install one that has")


current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
"""The driver's handle of a GPU's current stream, by torch's index: a tenth of the time that it takes to make
a ``torch.cuda.Stream``. What torch.compile generates gets its streams here, too."""


fast_empty: Callable[..., torch.Tensor] | None = getattr(guards, "_empty_strided_cuda", None)
"""(size, stride, dtype) -> an uninitialized tensor on the current GPU, in half the time of ``torch.empty``.
What torch.compile generates allocates with it; None where torch has no such function."""


def private_stream(gpu: Gpu, index: int) -> torch.cuda.Stream:
    """Stream number ``index`` of those that this package has for itself on a GPU, always the same one.

    They are made in batches: hardware queues are dealt out in the order of creation, and grids that wait for
    each other must not share one.
    """
    return _stream_batch(gpu, index // _STREAM_BATCH)[index % _STREAM_BATCH]


@cache
def _stream_batch(gpu: Gpu, batch: int) -> tuple[torch.cuda.Stream, ...]:
    with current(gpu):
        flag = bindings().CUstream_flags.CU_STREAM_NON_BLOCKING
        handles = [int(call("cuStreamCreate", int(flag))) for _ in range(_STREAM_BATCH)]
    return tuple(torch.cuda.ExternalStream(handle, device=gpu.device) for handle in handles)


def load_kernel(kernel: CompiledKernel, gpu: Gpu, *, threads: int, shared_bytes: int = 0) -> Any:
    """The kernel as a driver function, loaded at most once per GPU, and ready to launch.

    Args:
        threads: per CTA, as it will be launched.
        shared_bytes: dynamic shared memory per CTA.

    Raises:
        DeviceError: it is for another GPU, or not even one CTA fits on an SM.
    """
    if kernel.arch != gpu.arch.compile_target:
        raise DeviceError(
            f"{kernel.name} is compiled for {kernel.arch}, but {gpu.name} needs {gpu.arch.compile_target}; "
            f"generate it with --arch {gpu.arch.name}"
        )
    return _load(kernel.cubin, kernel.entry, kernel.name, gpu, threads, shared_bytes)


def encode_for_driver(tensor_map: TensorMap) -> bytes:
    """The 128 bytes that copies on a GPU read.

    Raises:
        DeviceError: the driver refuses the map.
    """
    driver = bindings()
    steps = tensor_map.element_strides or (1,) * tensor_map.rank
    fills = driver.CUtensorMapFloatOOBfill
    encoded = call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType(ELEMENT_TYPES.index(tensor_map.element)),
        tensor_map.rank,
        tensor_map.address,
        [driver.cuuint64_t(extent) for extent in tensor_map.dims],
        [driver.cuuint64_t(stride) for stride in tensor_map.strides],
        [driver.cuuint32_t(extent) for extent in tensor_map.box],
        [driver.cuuint32_t(step) for step in steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(SWIZZLES.index(tensor_map.swizzle)),
        driver.CUtensorMapL2promotion(L2_PROMOTIONS.index(tensor_map.l2_promotion)),
        fills(1 if tensor_map.nan_fill else 0),
    )
    return b"".join(int(word).to_bytes(8, "little") for word in encoded.opaque)


@cache
def _load(cubin: bytes, entry: str, name: str, gpu: Gpu, threads: int, shared_bytes: int) -> Any:
    with current(gpu):
        function = call("cuModuleGetFunction", call("cuModuleLoadData", cubin), entry.encode())
        # With lazy loading the first launch would load the code, which may wait for kernels that wait for it.
        call("cuFuncLoad", function)
        attribute = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, attribute, shared_bytes)
        ctas = call("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared_bytes)
    if ctas < 1:
        raise DeviceError(
            f"{name}: no CTA of {threads} threads with {shared_bytes} bytes of shared memory fits on an SM "
            f"of {gpu.name}"
        )
    return function
