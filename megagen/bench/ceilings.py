"""What the machine can do at all, measured in the run that its floors are computed in."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from megagen.bench.processes import Ranks
from megagen.bench.timing import Call, Timer
from megagen.cache import default_cache
from megagen.formats import E4M3_MAX
from megagen.runtime.driver import call, load_kernel, require_gpu

READ_BYTES = 4 << 30
GEMM_SIZE = 8192

_THREADS = 512
_READ_SOURCE = """
// Reads 16 bytes per thread and load, eight loads in flight, and keeps nothing.
extern "C" __global__ void __launch_bounds__(512, 2)
read_memory(const uint4* data, unsigned long long count, unsigned* sink) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned folded = 0;
    for (; i + 7 * step < count; i += 8 * step) {
        uint4 v[8];
        #pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = data[i + j * step];
        #pragma unroll
        for (int j = 0; j < 8; ++j) folded ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < count; i += step) folded ^= data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
    if (folded == 0x12345678u) *sink = folded;  // hardly ever, but the compiler must keep the loads
}
"""


class Ceilings(NamedTuple):
    """Rates of the slowest rank.

    Attributes:
        hbm_bytes_per_s: reading device memory: the better of a plain kernel and of ``torch.sum``.
        gemm_flops_per_s: ``torch._scaled_mm``, E4M3, row-wise scales, 8192 x 8192 x 8192.
    """

    hbm_bytes_per_s: float
    gemm_flops_per_s: float


def measure_ceilings(ranks: Ranks, timer: Timer) -> Ceilings:
    """Collective. Takes ``READ_BYTES`` of device memory for as long as it runs."""
    *reads, gemm = timer.measure([*_reads(ranks.device), _gemm(ranks.device)])
    seconds = min(read.us for read in reads) * 1e-6
    return Ceilings(READ_BYTES / seconds, 2 * GEMM_SIZE**3 / (gemm.us * 1e-6))


def _reads(device: torch.device) -> list[Call]:
    data = torch.rand(READ_BYTES // 4, device=device)
    total, sink = torch.empty(1, device=device), torch.zeros(1, device=device)
    gpu = require_gpu(device)
    kernel = default_cache().load_or_compile(_READ_SOURCE, gpu.arch.compile_target, name="read_memory.cu")
    function = load_kernel(kernel, gpu, threads=_THREADS)
    arguments = (
        (data.data_ptr(), READ_BYTES // 16, sink.data_ptr()),
        (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p),
    )

    def plain_kernel() -> None:
        stream = torch.cuda.current_stream(device).cuda_stream
        call("cuLaunchKernel", function, 2 * gpu.sms, 1, 1, _THREADS, 1, 1, 0, stream, arguments, 0)

    return [
        Call("kernel", _nothing, plain_kernel, sink),
        Call("kernel", _nothing, lambda: torch.sum(data, dim=0, keepdim=True, out=total), total),
    ]


def _gemm(device: torch.device) -> Call:
    generator = torch.Generator(device).manual_seed(0)

    def operand() -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randn(GEMM_SIZE, GEMM_SIZE, generator=generator, device=device)
        scale = values.abs().amax(dim=1, keepdim=True) / E4M3_MAX
        return (values / scale).to(torch.float8_e4m3fn), scale

    (a, a_scale), (b, b_scale) = operand(), operand()
    out = torch.empty(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device)
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True, "out": out}
    return Call("kernel", _nothing, lambda: torch._scaled_mm(a, b.t(), a_scale, b_scale.t(), **options), out)


def _nothing() -> None:
    """Nothing to prepare: the inputs stay as they are."""
