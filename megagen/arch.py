"""Arch: what a GPU offers to one kernel, and the rates that the cost model assumes of it."""

from dataclasses import dataclass
from typing import Literal

from megagen.errors import DeviceError, PlanError

WARP_THREADS = 32
WARPGROUP_THREADS = 128


@dataclass(frozen=True, slots=True)
class MmaForm:
    """One tensor-core instruction form for 8-bit operands: M x N x K with N from a range.

    Attributes:
        instruction: PTX mnemonic up to its shape.
        m: rows that one instruction computes (over both CTAs for ``cta_group::2``).
        k: depth in elements.
        n_step, n_max: N is a multiple of ``n_step`` from ``n_step`` to ``n_max``.
        ctas: CTAs that take part.
    """

    instruction: str
    m: int
    k: int
    n_step: int
    n_max: int
    ctas: int = 1

    def allows_n(self, n: int) -> bool:
        """Whether the instruction exists with this N."""
        return n % self.n_step == 0 and self.n_step <= n <= self.n_max


@dataclass(frozen=True, slots=True)
class Rates:
    """Sustained rates and latencies of one GPU, for the cost model.

    Attributes:
        hbm_bytes_per_s: reading weights with bulk copies.
        fp8_flops_per_s: main loop with block scaling and epilogue, counting padded rows.
        nvlink_bytes_per_s: one direction, rows pulled by SMs.
        local_latency_s, peer_latency_s: one dependent load from this GPU's memory and from a peer's.
        source: "measured", or "assumed" for published peaks lowered by what the H200 reaches of its own.
    """

    hbm_bytes_per_s: float
    fp8_flops_per_s: float
    nvlink_bytes_per_s: float
    local_latency_s: float
    peer_latency_s: float
    source: Literal["measured", "assumed"]


@dataclass(frozen=True, slots=True)
class Arch:
    """Limits of one GPU architecture; sizes in bytes, per SM unless said otherwise.

    Attributes:
        name: "sm90", "sm100" or "sm103".
        compile_target: NVRTC's ``--gpu-architecture`` value, with the architecture-specific features.
        compute_capability: what the driver reports.
        gpu: the product whose numbers these are.
        sms: SMs of that product (a persistent grid is sized from the device at hand, this is for planning).
        max_shared_bytes_per_block: dynamic shared memory after opting in.
        registers: 32-bit registers.
        max_registers_per_thread, register_step: ``setmaxnreg`` takes multiples of the step, from
            ``min_setmaxnreg`` to ``max_setmaxnreg``.
        max_threads_per_block: threads of a CTA.
        named_barriers: hardware barriers of a CTA, barrier 0 (``__syncthreads``) included.
        tmem_columns: tensor-memory columns of 128 lanes x 4 bytes, 0 where there is none.
        cluster_sms: (cluster size, SMs that a grid of such clusters can fill), sizes in ascending order.
        mma: the 8-bit MMA forms in use.
    """

    name: str
    compile_target: str
    compute_capability: tuple[int, int]
    gpu: str
    sms: int
    max_shared_bytes_per_block: int
    registers: int
    max_registers_per_thread: int
    register_step: int
    min_setmaxnreg: int
    max_setmaxnreg: int
    max_threads_per_block: int
    named_barriers: int
    tmem_columns: int
    cluster_sms: tuple[tuple[int, int], ...]
    mma: tuple[MmaForm, ...]
    rates: Rates

    @classmethod
    def get(cls, name: str) -> "Arch":
        """The architecture of that name.

        Raises:
            PlanError: an unknown name.
        """
        try:
            return ARCHS[name]
        except KeyError:
            raise PlanError(f"arch={name!r} is unknown; choose one of {', '.join(ARCHS)}") from None

    @classmethod
    def of_capability(cls, major: int, minor: int) -> "Arch":
        """The architecture of a GPU's compute capability.

        Raises:
            DeviceError: no kernels exist for that GPU.
        """
        for arch in ARCHS.values():
            if arch.compute_capability == (major, minor):
                return arch
        known = ", ".join(
            f"{a.compute_capability[0]}.{a.compute_capability[1]} ({a.gpu})" for a in ARCHS.values()
        )
        raise DeviceError(f"compute capability {major}.{minor} is not supported; use a GPU of {known}")

    @property
    def warpgroup_m(self) -> int:
        """Rows of one single-CTA MMA: the unit of a warpgroup's tile."""
        return self.mma[0].m

    @property
    def cluster_sizes(self) -> tuple[int, ...]:
        return tuple(size for size, _ in self.cluster_sms)

    def launch_registers(self, threads: int) -> int:
        """Registers per thread that a one-CTA-per-SM launch of ``threads`` threads allocates at most.

        Raises:
            PlanError: not a whole number of warps, or more threads than a block can have.
        """
        if threads % WARP_THREADS or not 0 < threads <= self.max_threads_per_block:
            raise PlanError(
                f"threads={threads} is no multiple of {WARP_THREADS} up to {self.max_threads_per_block}, "
                f"the block limit of {self.name}; change the number of warps"
            )
        even_share = self.registers // threads // self.register_step * self.register_step
        return min(even_share, self.max_registers_per_thread)


# H200 SXM with 132 SMs: see docs/performance.md for how each rate was measured. Its published peaks are
# 4.8 TB/s of HBM, 1,979 TFLOP/s of dense FP8 and 450 GB/s of NVLink in one direction.
_H200_CLOCK_HZ = 1.98e9
_H200 = Rates(
    hbm_bytes_per_s=4.40e12,
    fp8_flops_per_s=1.25e15,
    nvlink_bytes_per_s=334e9,
    local_latency_s=302 / _H200_CLOCK_HZ,
    peer_latency_s=1937 / _H200_CLOCK_HZ,
    source="measured",
)


def _assumed_rates(peak_hbm: float, peak_fp8: float, peak_nvlink: float) -> Rates:
    """Rates of a GPU that reaches the same share of its published peaks as the H200."""
    return Rates(
        hbm_bytes_per_s=peak_hbm * _H200.hbm_bytes_per_s / 4.8e12,
        fp8_flops_per_s=peak_fp8 * _H200.fp8_flops_per_s / 1.979e15,
        nvlink_bytes_per_s=peak_nvlink * _H200.nvlink_bytes_per_s / 450e9,
        local_latency_s=_H200.local_latency_s,
        peer_latency_s=_H200.peer_latency_s,
        source="assumed",
    )


_HOPPER_MMA = (MmaForm("wgmma.mma_async.sync.aligned", m=64, k=32, n_step=8, n_max=256),)
_BLACKWELL_MMA = (
    MmaForm("tcgen05.mma.cta_group::1.kind::mxf8f6f4", m=128, k=32, n_step=8, n_max=256),
    MmaForm("tcgen05.mma.cta_group::2.kind::mxf8f6f4", m=256, k=32, n_step=16, n_max=256, ctas=2),
)

_SM90 = Arch(
    name="sm90",
    compile_target="sm_90a",
    compute_capability=(9, 0),
    gpu="H200",
    sms=132,
    max_shared_bytes_per_block=232_448,
    registers=65_536,
    max_registers_per_thread=255,
    register_step=8,
    min_setmaxnreg=24,
    max_setmaxnreg=256,
    max_threads_per_block=1024,
    named_barriers=16,
    tmem_columns=0,
    # Measured: GPCs of uneven size leave 12 SMs to no cluster of four or eight.
    cluster_sms=((1, 132), (2, 132), (4, 120), (8, 120)),
    mma=_HOPPER_MMA,
    rates=_H200,
)


def _blackwell(
    name: str, compile_target: str, compute_capability: tuple[int, int], gpu: str, rates: Rates
) -> Arch:
    """A data-center Blackwell: 148 SMs, TMEM, and pairs of CTAs."""
    return Arch(
        name=name,
        compile_target=compile_target,
        compute_capability=compute_capability,
        gpu=gpu,
        sms=148,
        max_shared_bytes_per_block=232_448,
        registers=65_536,
        max_registers_per_thread=255,
        register_step=8,
        min_setmaxnreg=24,
        max_setmaxnreg=256,
        max_threads_per_block=1024,
        named_barriers=16,
        tmem_columns=512,
        cluster_sms=((1, 148), (2, 148)),
        mma=_BLACKWELL_MMA,
        rates=rates,
    )


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        _SM90,
        _blackwell("sm100", "sm_100a", (10, 0), "B200", _assumed_rates(7.7e12, 4.5e15, 900e9)),
        _blackwell("sm103", "sm_103a", (10, 3), "B300", _assumed_rates(8.0e12, 4.5e15, 900e9)),
    )
}
