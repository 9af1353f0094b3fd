"""Cases of a layer on the emulator: what is run, and what makes its result right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from megagen.contract import Contract, ceil_div
from megagen.emulator.layer import CallResult, EmulatedLayer, Inputs, Kernel
from megagen.errors import EmulatorError
from megagen.formats import quantize_activation
from megagen.planning import KernelPlan, make_plan
from megagen.planning.plan import BLOCK_K
from megagen.planning.sm90 import FULL_BLOCK_M, MATH_WARPS, WGMMA_M, Sm90Plan
from megagen.planning.sm100 import Sm100Plan
from megagen.reference import fold_topk, moe_forward, relative_error
from megagen.routing import make_routing
from megagen.shape import MoEShape
from megagen.weights import ExpertWeights, random_experts

WEIGHT_SEED = 0
TWIN_BLOCK_M = 64
WGMMA_K = 32


LIMITS = (6e-3, 3e-2)
"""Largest relative Frobenius errors of the whole output and of a token's row. The reference has the tensor
cores' own sums, so only ``ex2.approx`` and ``rcp.approx`` differ, and most outputs are equal bit by bit."""


@dataclass(frozen=True)
class Case:
    """A layer, the tokens of its ranks, and one interleaving.

    Attributes:
        plans: each rank's, all of one contract.
        sms: each rank's SMs.
        tokens: each rank's tokens.
        seed: of tokens, routing and interleaving. Expert weights are the same for all seeds.
        launches: calls in a row on the same buffers, each with tokens of its own.
    """

    plans: tuple[KernelPlan, ...]
    sms: tuple[int, ...]
    tokens: tuple[int, ...]
    routing: str = "uniform"
    seed: int = 0
    launches: int = 1

    @property
    def contract(self) -> Contract:
        return self.plans[0].contract

    @property
    def shape(self) -> MoEShape:
        return self.contract.shape

    def inputs(self, launch: int = 0) -> list[Inputs]:
        """Each rank's arguments; what all ranks have together does not depend on how they share it."""
        total = sum(self.tokens)
        seed = self.seed + 1_000_003 * launch
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(total, self.shape.hidden, generator=generator)
        x *= 4 ** torch.rand(total, 1, generator=generator)  # an SF of another row shows
        ids, weights = (torch.from_numpy(a) for a in make_routing(self.routing, self.shape, total, seed))
        parts = (tensor.split(self.tokens) for tensor in (x.bfloat16(), ids, weights))
        return [Inputs(*part) for part in zip(*parts)]

    def twin(self) -> Case:
        """The same tokens on one rank with one SM, or one pair of them: by the contract, the same bits."""
        capacity = self.contract.ranks * self.contract.max_tokens
        alone = replace(self.contract, ranks=1, max_tokens=capacity)
        sms = self.plans[0].cluster
        plan = make_plan(alone, self.plans[0].arch, sum(self.tokens), sms=sms, block_m=TWIN_BLOCK_M)
        return replace(self, plans=(plan,), sms=(sms,), tokens=(sum(self.tokens),))

    def describe(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "shape": str(self.shape),
            "ranks": len(self.tokens),
            "tokens": list(self.tokens),
            "sms": list(self.sms),
            "block_m": [plan.block_m for plan in self.plans],
            "plans": [plan.name for plan in self.plans],
            "routing": self.routing,
            "seed": self.seed,
            "launches": self.launches,
        }


@dataclass(frozen=True)
class Verdict:
    """Whether a case came out right, and why not.

    Attributes:
        whole, row: largest relative errors over its launches; None if it did not end.
        equal: whether every output has the bits of the reference.
        error: what the emulator raised, if it did.
        wrong: everything else that is not as it should be.
        instructions: warp instructions executed.
    """

    whole: float | None
    row: float | None
    equal: bool
    error: EmulatorError | None
    wrong: tuple[str, ...]
    instructions: int

    @property
    def right(self) -> bool:
        return self.error is None and not self.wrong

    def describe(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "right": self.right,
            "whole": self.whole,
            "worst_row": self.row,
            "equal_bits": self.equal,
            "error": None if self.error is None else type(self.error).__name__,
            "message": None if self.error is None else str(self.error),
            "wrong": list(self.wrong),
            "instructions": self.instructions,
        }


def prepare(case: Case, kernels: Sequence[Kernel] | None = None, **machine: Any) -> EmulatedLayer:
    """The layer of a case, ready to run.

    Args:
        kernels: each rank's; by default what its plan renders to.
        machine: options of ``Machine``.
    """
    kernels = kernels or [Kernel.of(plan) for plan in case.plans]
    options = {"seed": case.seed, **machine}
    return EmulatedLayer(
        case.contract, kernels, case.sms, expert_weights(case.shape, case.contract.format), **options
    )


def run(case: Case, layer: EmulatedLayer) -> list[CallResult]:
    """Run all launches of a case.

    Raises:
        EmulatorError: what the machine found.
    """
    if case.launches == 1:
        return [layer.call(case.inputs())]
    return layer.call_in_a_row([case.inputs(launch) for launch in range(case.launches)])


def judge(case: Case, results: Sequence[CallResult], instructions: int) -> Verdict:
    """Compare the outputs of a run with the reference, and look at what it left behind."""
    wrong: list[str] = []
    whole = row = 0.0
    equal = True
    for launch, result in enumerate(results):
        output, expected = torch.cat(result.outputs), _expected(case, launch)
        equal &= torch.equal(output.view(torch.int16), expected.view(torch.int16))
        error = relative_error(output, expected)
        if not error.within(*LIMITS):
            wrong.append(
                f"launch {launch}: relative error {error.whole:.1e}, worst row {error.worst_row:.1e}; "
                f"the limits are {LIMITS[0]:g} and {LIMITS[1]:g}"
            )
        whole, row = max(whole, error.whole), max(row, error.worst_row)
    wrong += results[-1].leftovers
    wrong += [
        f"rank {rank} reports a failure: {status}"
        for rank, status in enumerate(results[-1].status)
        if status["code"] or status["aborted_by"]
    ]
    return Verdict(whole, row, equal, None, tuple(wrong), instructions)


def check(case: Case, layer: EmulatedLayer | None = None, *, compare_bits: bool = False) -> Verdict:
    """Run a case and judge it.

    Args:
        layer: what ``prepare`` made of it; by default made here.
        compare_bits: where the bits are not those of the reference, also run the twin, which must have them.
    """
    layer = layer or prepare(case)
    try:
        results = run(case, layer)
    except EmulatorError as error:
        error = error.with_traceback(None)  # which would keep the machine's memory
        return Verdict(None, None, False, error, (), layer.machine.report().instructions)
    verdict = judge(case, results, layer.machine.report().instructions)
    if compare_bits and not verdict.equal:
        verdict = replace(verdict, wrong=(*verdict.wrong, *_other_bits(case, results)))
    return verdict


def _expected(case: Case, launch: int) -> torch.Tensor:
    """bfloat16 [tokens of all ranks, H]: the reference's output."""
    contract = case.contract
    x, ids, weights = (torch.cat(parts) for parts in zip(*case.inputs(launch)))
    return moe_forward(
        quantize_activation(x, contract.format),  # type: ignore[arg-type]
        ids,
        weights,
        expert_weights(case.shape, contract.format),
        format=contract.format,  # type: ignore[arg-type]
        activation=contract.activation,  # type: ignore[arg-type]
        clamp=contract.clamp,
        accumulation="hopper" if contract.format == "fp8_block" else "exact",
    )


def _other_bits(case: Case, results: Sequence[CallResult]) -> list[str]:
    """Where the outputs differ from those of the case's twin."""
    twin = case.twin()
    expected = run(twin, prepare(twin, races=False, proxy="off"))
    wrong = []
    for launch, (own, other) in enumerate(zip(results, expected)):
        mine, theirs = (torch.cat(result.outputs).view(torch.int16) for result in (own, other))
        differ = (mine != theirs).any(dim=1).nonzero().flatten().tolist()
        if differ:
            wrong.append(
                f"launch {launch}: {len(differ)} of {len(mine)} tokens have other bits than on one rank with "
                f"one SM, the first is token {differ[0]} of all ranks together"
            )
    return wrong


@lru_cache(maxsize=4)
def expert_weights(shape: MoEShape, format: str = "fp8_block") -> ExpertWeights:
    """The random experts of every case of this shape and format."""
    return random_experts(shape, range(shape.experts), WEIGHT_SEED, format=format)  # type: ignore[arg-type]


def expected_matrix_operations(case: Case) -> int:
    """MMA instructions of all launches of a case, WGMMAs per warpgroup: the measure of its progress."""
    total = 0
    for launch in range(case.launches):
        ids, weights = (torch.cat(parts) for parts in list(zip(*case.inputs(launch)))[1:])
        folded, _ = fold_topk(ids, weights, case.shape.experts)
        counts = torch.bincount(folded[folded >= 0].flatten(), minlength=case.shape.experts)
        for plan, own in zip(case.plans, counts.chunk(len(case.plans))):
            total += sum(_matrix_operations(plan, rows) for rows in own.tolist())
    return total


def _matrix_operations(plan: KernelPlan, rows: int) -> int:
    """Of one expert with this many rows: per K block, both halves of a warpgroup's part in WGMMA_K steps, or
    on Blackwell one instruction per UMMA_K for both CTAs of a pair."""
    shape, layout = plan.contract.shape, plan.weight_layout
    k_blocks = (layout.n_tiles13 * shape.hidden + layout.n_tiles2 * shape.intermediate) // BLOCK_K
    if isinstance(plan, Sm100Plan):
        return ceil_div(rows, plan.block_m) * k_blocks * plan.mmas_per_stage
    assert isinstance(plan, Sm90Plan)
    groups = MATH_WARPS // 4
    if plan.operand_order == "tokens_on_m":  # a warpgroup none of whose rows are in use passes
        tiles, rest = divmod(rows, plan.block_m)
        working = tiles * groups + min(groups, ceil_div(rest, WGMMA_M))
        if plan.surplus_rows:  # which both compute, too
            working += groups * (tiles + (rest > FULL_BLOCK_M))
    else:
        working = ceil_div(rows, plan.block_m) * groups
    return working * k_blocks * 2 * (BLOCK_K // WGMMA_K)
