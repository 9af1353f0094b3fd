"""The cost model: a plan's time, predicted from its bytes and operations and the rates of its GPU.

It says what bounds a plan before it runs, and what to expect at rank counts that can't be measured. Routing
is taken as uniform, equal on all ranks. HBM, tensor cores and NVLink work at the same time, so the slowest of
them counts; starting, waiting for peers and combining come on top. Rates: `arch.Rates`, measured on the H200,
assumed for Blackwell.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from megagen.arch import Arch
from megagen.contract import SF_BLOCK
from megagen.planning.plan import KernelPlan
from megagen.planning.workload import blocks_per_expert, experts_reached, rows_per_expert

START_AND_END_S = 35e-6
"""Launch, counting, publishing, the first rows, the pipeline's fill and drain.

What flash8 on one H200 took beyond HBM and combine at 8, 64 and 256 tokens (188, 214 and 236 us), on average.
Assumed to be the same on Blackwell.
"""

MAIN_LOOP_GAIN = 1.02
"""Main loop alone against `Rates.fp8_flops_per_s`: 1,274 and 1,250 TFLOP/s in H200 prototypes."""

EPILOGUE_K_BLOCKS = 2.5
"""An epilogue that the tensor cores wait for: 3,000 to 3,400 cycles, a K block takes 1,250.

With accumulators in tensor memory it runs under the next tile's main loop.
"""

# Dependent accesses to peers.
BARRIER_ACCESSES = 3  # drain one's stores, release the flag, see the peer's
FIRST_ROW_ACCESSES = 2  # the row's index is local by then; its data and scale factors are not
LAST_ROW_ACCESSES = 2  # push the row, count it as home


@dataclass(frozen=True)
class CostPart:
    """One part of a predicted time; of the parts that overlap, only the longest counts."""

    name: str
    seconds: float
    overlaps: bool
    reason: str


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one launch with `tokens` tokens per rank on `sms` SMs of each."""

    tokens: int
    sms: int
    rates: str
    parts: tuple[CostPart, ...]

    @property
    def bound(self) -> CostPart:
        """The longest of the overlapping parts."""
        return max((part for part in self.parts if part.overlaps), key=lambda part: part.seconds)

    @property
    def seconds(self) -> float:
        return self.bound.seconds + sum(part.seconds for part in self.parts if not part.overlaps)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "seconds": self.seconds, "bound": self.bound.name}


def predict(plan: KernelPlan, tokens: int | None = None, *, sms: int | None = None) -> Prediction:
    """The time of a launch.

    `tokens`: per rank, default those that the plan is for. `sms`: default the GPU's; HBM and NVLink are taken
    to be saturated whatever it is.
    """
    arch = Arch.get(plan.arch)
    tokens = plan.expected_tokens if tokens is None else tokens
    sms = sms or arch.sms
    parts = (
        _memory(plan, arch, tokens),
        _tensor_cores(plan, arch, tokens, sms),
        _nvlink(plan, arch, tokens),
        CostPart(
            "start and end", START_AND_END_S, False, "launch, routing, first rows; fitted to measured times"
        ),
        _peers(plan, arch),
        _combine(plan, arch, tokens),
    )
    return Prediction(tokens, sms, arch.rates.source, parts)


def _memory(plan: KernelPlan, arch: Arch, tokens: int) -> CostPart:
    """Weights of the experts reached, once (an expert's tiles share them through L2), and rows in and out."""
    contract, shape = plan.contract, plan.contract.shape
    reached = experts_reached(contract, tokens)
    weights = (
        reached * sum(region.size for region in plan.weight_layout.regions.regions) / contract.local_experts
    )
    rows = contract.local_experts * rows_per_expert(contract, tokens)
    # E4M3 rows and intermediate rows are written and read, bfloat16 results written.
    activations = rows * (2 * shape.hidden + 2 * shape.intermediate + 2 * shape.hidden)
    return CostPart(
        "HBM",
        (weights + activations) / arch.rates.hbm_bytes_per_s,
        True,
        f"{weights / 1e6:,.0f} MB of weights ({reached:.1f} of {contract.local_experts} experts reached) and "
        f"{activations / 1e6:,.0f} MB of rows at {arch.rates.hbm_bytes_per_s / 1e12:.2f} TB/s",
    )


def _tensor_cores(plan: KernelPlan, arch: Arch, tokens: int, sms: int) -> CostPart:
    """Tiles, each as costly as its rows make it, in whole rounds over the SMs."""
    contract, shape, layout = plan.contract, plan.contract.shape, plan.weight_layout
    blocks = contract.local_experts * blocks_per_expert(contract, tokens, plan.block_m)
    full_blocks = contract.local_experts * plan.expert_cost(tokens)  # that take as long
    waited_for = 0.0 if arch.tmem_columns else EPILOGUE_K_BLOCKS
    k_blocks = layout.n_tiles13 * (shape.hidden / SF_BLOCK + waited_for)
    k_blocks += layout.n_tiles2 * (shape.intermediate / SF_BLOCK + waited_for)
    flops_per_row = layout.block_n * SF_BLOCK * 2 * k_blocks
    rate = arch.rates.fp8_flops_per_s * MAIN_LOOP_GAIN * sms / arch.sms
    n_tiles = layout.n_tiles13 + layout.n_tiles2
    tiles, full_tiles, workers = blocks * n_tiles, full_blocks * n_tiles, sms // plan.cluster
    rounds = math.ceil(tiles / workers)
    idle = rounds * workers / tiles if tiles else 1.0
    return CostPart(
        "tensor cores",
        full_blocks * plan.rated_block_m * flops_per_row / rate * idle,
        True,
        f"{blocks * plan.block_m * flops_per_row / 1e12:.3f} TFLOP, padding and epilogues included, in "
        f"{tiles:,.0f} tiles, {rounds} rounds; they take as long as {full_tiles:,.0f} of "
        f"{plan.rated_block_m} rows at {rate / 1e12:,.0f} TFLOP/s",
    )


def _nvlink(plan: KernelPlan, arch: Arch, tokens: int) -> CostPart:
    """One direction: rows pulled from peers with their scale factors, bfloat16 results that peers push."""
    contract, shape = plan.contract, plan.contract.shape
    from_peers = tokens * shape.top_k * (contract.ranks - 1) / contract.ranks
    moved = from_peers * (shape.hidden + shape.hidden // SF_BLOCK * 4 + 2 * shape.hidden)
    return CostPart(
        "NVLink",
        moved / arch.rates.nvlink_bytes_per_s,
        True,
        f"{moved / 1e6:,.0f} MB, {from_peers:,.0f} rows, at {arch.rates.nvlink_bytes_per_s / 1e9:.0f} GB/s",
    )


def _peers(plan: KernelPlan, arch: Arch) -> CostPart:
    """The cross-rank barrier, whose warp polls 32 ranks at a time, and the ways of the first and last row."""
    ranks = plan.contract.ranks
    if ranks == 1:
        return CostPart("peers", 0.0, False, "one rank")
    accesses = BARRIER_ACCESSES + math.ceil(ranks / 32) - 1 + FIRST_ROW_ACCESSES + LAST_ROW_ACCESSES
    return CostPart(
        "peers",
        accesses * arch.rates.peer_latency_s,
        False,
        f"{accesses} dependent accesses to peers of {arch.rates.peer_latency_s * 1e9:.0f} ns",
    )


def _combine(plan: KernelPlan, arch: Arch, tokens: int) -> CostPart:
    """K rows of bfloat16 read and one written per token, as if none were combined before the last tile."""
    shape = plan.contract.shape
    moved = tokens * (shape.top_k + 1) * shape.hidden * 2
    return CostPart(
        "combine", moved / arch.rates.hbm_bytes_per_s, False, f"{moved / 1e6:,.0f} MB read and written"
    )
