"""Launches of the layer's kernel and of its companion, with everything prepared that can be.

A launch writes the few words that change into a parameter struct made beforehand and calls the driver.
"""

from __future__ import annotations

from typing import Any

import torch

from megagen.companion import QUANTIZE_FIELDS, THREADS, quantize_ctas
from megagen.compiler import CompiledKernel
from megagen.errors import DeviceError
from megagen.planning import KernelPlan
from megagen.protocol import TRACE_CAPACITY, Field
from megagen.runtime.arguments import RawInputs
from megagen.runtime.driver import (
    Gpu,
    bindings,
    current,
    encode_for_driver,
    expect_success,
    load_kernel,
)
from megagen.runtime.params import ParamStruct
from megagen.runtime.symmetric import SymmBuffer
from megagen.tensor_map import TensorMap


class Launcher:
    """A loaded kernel with its launch configuration and its parameters."""

    def __init__(
        self,
        kernel: CompiledKernel,
        fields: tuple[Field, ...],
        gpu: Gpu,
        *,
        threads: int,
        ctas: int = 1,
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        self.name = kernel.name
        self._gpu = gpu
        self._function = load_kernel(kernel, gpu, threads=threads, shared_bytes=shared_bytes)
        self.params = ParamStruct(fields)
        self.config = _configuration(ctas, threads, shared_bytes, cooperative)
        self._stream = 0
        self._launch = bindings().cuLaunchKernelEx

    def launch(self, stream: int) -> None:
        """Queue the kernel, with the parameters as they are now, on a stream (the driver's handle).

        Raises:
            DeviceError: the driver refuses the launch.
        """
        if stream != self._stream:
            self.config.hStream = bindings().CUstream(stream)
            self._stream = stream
        (status,) = self._launch(self.config, self._function, self.params.pointers, 0)
        if status:
            self._retry(status)

    def _retry(self, status: Any) -> None:
        """Where this thread uses another GPU, or none yet, launch again with this GPU's context."""
        errors = bindings().CUresult
        if status in (errors.CUDA_ERROR_INVALID_CONTEXT, errors.CUDA_ERROR_INVALID_HANDLE):
            with current(self._gpu):
                (status,) = self._launch(self.config, self._function, self.params.pointers, 0)
            if not status:
                return
        if status == errors.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE:
            raise DeviceError(
                f"{self.name}: {self.config.gridDimX} CTAs can't run at once on {self._gpu.name} as this "
                "process sees it; lower num_sms"
            )
        expect_success(f"launch of {self.name}", status)


class MoELauncher(Launcher):
    """The kernel of one plan on one buffer."""

    def __init__(
        self, plan: KernelPlan, kernel: CompiledKernel, buffer: SymmBuffer, *, sms: int, timeout_s: float
    ) -> None:
        buffer.require_room(plan)
        plan.require_ring_for(sms)
        super().__init__(
            kernel,
            plan.params,
            buffer.gpu,
            threads=plan.threads,
            ctas=plan.grid(sms),
            shared_bytes=plan.smem.size,
            cooperative=True,
        )
        self.plan = plan
        self.trace = self._trace_buffer(sms) if plan.trace else None
        self.params.set("symm", buffer.symm_address)
        self.params.set("local", buffer.local_address)
        self.params.set("status", buffer.status.address)
        self.params.set("timeout_ns", round(timeout_s * 1e9))
        self.params.set("rank", buffer.peers.rank)
        self.params.set("offsets", buffer.offsets)
        word = self.params.word
        self._output, self._count_pointer, self._count = (
            word[name] for name in ("output", "num_tokens_ptr", "num_tokens")
        )

    def _trace_buffer(self, sms: int) -> torch.Tensor:
        """int32 [SMs, warps, TRACE_CAPACITY, 4], what a traced kernel writes of its last launch."""
        shape = (sms, self.plan.threads // 32, TRACE_CAPACITY, 4)
        records = torch.zeros(shape, dtype=torch.int32, device=self._gpu.device)
        self.params.set("trace", records.data_ptr())
        return records

    def set_weights(self, addresses: dict[str, int]) -> None:
        """Addresses of ``w13``, ``w13_sf``, ``w2`` and ``w2_sf``."""
        for name, value in self.plan.weight_params(addresses).items():
            self.params.set(name, encode_for_driver(value) if isinstance(value, TensorMap) else value)

    def set_call(self, output: torch.Tensor, tokens: int, count_pointer: int) -> None:
        """Parameters of the next launch."""
        params = self.params
        params.u64[self._output] = output.data_ptr()
        params.u64[self._count_pointer] = count_pointer
        params.u32[self._count] = tokens


class QuantizeLauncher(Launcher):
    """The companion kernel on one buffer."""

    def __init__(self, kernel: CompiledKernel, buffer: SymmBuffer) -> None:
        super().__init__(kernel, QUANTIZE_FIELDS, buffer.gpu, threads=THREADS)
        self._hidden, self._sms = buffer.contract.shape.hidden, buffer.gpu.sms
        self._tokens = 0  # that the grid is for
        self._symm = buffer.symm_address
        self._write = self.params.writer()

    def set_call(self, inputs: RawInputs, tokens: int, count_pointer: int) -> None:
        """Parameters of the next launch, all in one step."""
        x, x_sf, ids, weights, row_bytes, wide_ids, bf16_weights = inputs
        self._write(
            x, x_sf, row_bytes, ids, weights, self._symm, count_pointer, tokens, wide_ids, bf16_weights
        )
        if tokens != self._tokens:
            self.config.gridDimX = quantize_ctas(self._hidden, tokens, self._sms)
            self._tokens = tokens


def _configuration(ctas: int, threads: int, shared_bytes: int, cooperative: bool) -> Any:
    driver = bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = ctas, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config
