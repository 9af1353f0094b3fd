"""A driver and streams that need no GPU, so that the host side of calls can be tested anywhere."""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megagen import companion
from megagen.arch import Arch
from megagen.compiler import CompiledKernel
from megagen.contract import Contract
from megagen.planning import PlanSet
from megagen.protocol import Field, params_fields, struct_offsets
from megagen.runtime import driver, kernels, launch, layer, local, symmetric
from megagen.runtime.kernels import KernelBundle

CPU = torch.device("cpu")


def good(tokens: int = 4, **changes: torch.Tensor) -> dict[str, torch.Tensor | None]:
    arguments = {
        "x": torch.zeros(tokens, 512, dtype=torch.bfloat16),
        "x_sf": None,
        "topk_ids": torch.zeros(tokens, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(tokens, 2),
    }
    return arguments | changes


def call_arguments(tokens: int) -> list[torch.Tensor]:
    return [t for t in good(tokens).values() if t is not None]


class FakeStream:
    """A stream whose work is done after some polls; never, if ``polls`` is None."""

    def __init__(self, polls: int | None) -> None:
        self.polls, self.cuda_stream = polls, 0

    def record_event(self) -> "FakeStream":
        return self

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        if self.polls is None:
            return False
        self.polls -= 1
        return self.polls < 0


class FakeDriver:
    """cuda-python's driver module with calls that need no GPU; records launches with their parameters."""

    def __init__(self) -> None:
        from cuda.bindings import driver as real

        self._real = real
        self.launches: list[SimpleNamespace] = []
        self.tensor_maps = False  # whether kernels take weights through tensor maps

    def __getattr__(self, name: str) -> object:
        if name.startswith("cu") and name != "cuuint32_t" and name != "cuuint64_t":
            return lambda *arguments: (self._real.CUresult.CUDA_SUCCESS, 1)
        return getattr(self._real, name)

    def _fields(self) -> tuple[Field, ...]:
        return params_fields(self.ranks, tensor_maps=self.tensor_maps)

    def cuLaunchKernelEx(self, config: object, function: object, pointers: int, extra: int) -> tuple[object]:
        struct = ctypes.c_uint64.from_address(pointers).value
        fields = companion.QUANTIZE_FIELDS if not config.numAttrs else self._fields()
        offsets, size = struct_offsets(fields)
        packed = ctypes.string_at(struct, size)
        values = {
            f.name: int.from_bytes(packed[offsets[f.name] :][: min(f.size, 8)], "little") for f in fields
        }
        self.launches.append(
            SimpleNamespace(
                grid=config.gridDimX,
                threads=config.blockDimX,
                shared=config.sharedMemBytes,
                stream=int(config.hStream),
                cooperative=bool(config.numAttrs),
                params=SimpleNamespace(**values),
            )
        )
        return (self._real.CUresult.CUDA_SUCCESS,)


def fake_kernel(name: str) -> CompiledKernel:
    resources = dict.fromkeys(("registers", "stack", "spill_stores", "spill_loads", "static_shared"), 0)
    return CompiledKernel(
        name, "sm_90a", "entry", b"", "", "", nvrtc="", options=(), compile_ms=0.0, **resources
    )


def fake_compile(plans: PlanSet, contract: Contract, arch: Arch) -> KernelBundle:
    return KernelBundle(plans, tuple(fake_kernel(plan.name) for plan in plans.plans), fake_kernel("quantize"))


class FakeProgress:
    def __init__(self, launches: torch.Tensor, abort: torch.Tensor, stream: FakeStream) -> None:
        self.launches, self.aborted_by = lambda: int(launches), lambda: int(abort)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver_module = FakeDriver()
    driver_module.ranks = 1

    class FakeGpu(driver.Gpu):
        device = CPU

    for module in (driver, launch):
        monkeypatch.setattr(module, "bindings", lambda: driver_module)
    for module in (symmetric, local):
        monkeypatch.setattr(module, "private_stream", lambda *_: FakeStream(0))
        monkeypatch.setattr(module, "require_gpu", lambda device: FakeGpu(0, "fake", Arch.get("sm90"), 132))
    monkeypatch.setattr(symmetric, "Progress", FakeProgress)
    monkeypatch.setattr(kernels, "_compile", fake_compile)
    monkeypatch.delenv(kernels.KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(layer, "current_stream", lambda index: 0)
    for name in ("current_stream", "default_stream", "ExternalStream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: FakeStream(0))
    driver._load.cache_clear()
    yield driver_module
    driver._load.cache_clear()
