"""What the GPU tests share: models, their inputs and references, kept while tests of one model run."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from megagen import MegaMoE, MoEShape, SymmBuffer
from megagen.contract import Contract, WeightLayout
from megagen.planning import KernelPlan, PlanSet, make_plan, plan_set
from megagen.planning.sm90 import BLOCK_N, LADDER
from megagen.reference import accumulation_for_check, moe_forward, relative_error
from megagen.routing import make_routing
from megagen.runtime.local import LocalGroup
from megagen.weights import ExpertWeights, KernelWeights, random_experts, to_kernel_layout

TOKENS = (0, 1, 7, 64, 65, 257, 1024, 4096)
MAX_TOKENS = max(TOKENS)
RANK_COUNTS = (2, 4, 8)
SM_COUNTS = (131, 64, 13)
BLOCKS = LADDER
TIMEOUT_S = 10.0
H200_SMS = 132

MODELS = {
    "tiny": MoEShape.preset("tiny"),
    "qwen3-30b-a3b": MoEShape.preset("qwen3-30b-a3b"),
    "mixtral-8x7b": MoEShape.preset("mixtral-8x7b"),
    "flash8": MoEShape.preset("flash8", ranks=2),
    "pro8": MoEShape.preset("pro8", ranks=2),
}

WHOLE, ROW, FLOAT32 = 6e-3, 3e-2, 4e-2
"""Limits of the relative Frobenius error: whole output, worst row; whole output against float32."""


class Inputs(NamedTuple):
    """Arguments of a layer call."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    def deal(self, counts: Sequence[int]) -> list["Inputs"]:
        """Split into consecutive parts, one per rank."""
        return [Inputs(*parts) for parts in zip(*(tensor.split(list(counts)) for tensor in self))]


def make_inputs(shape: MoEShape, tokens: int, routing: str = "uniform", seed: int = 0) -> Inputs:
    """Gaussian tokens of different sizes, and a routing of ``megagen.routing``, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=generator, device="cuda")
    x *= 4 ** torch.rand(tokens, 1, generator=generator, device="cuda")
    routed = make_routing(routing, shape, tokens, seed)
    return Inputs(x.bfloat16(), *(torch.from_numpy(array).cuda() for array in routed))


def even_counts(tokens: int, ranks: int) -> list[int]:
    """Token counts per rank that differ by at most one."""
    return [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]


def contract_of(shape: MoEShape, ranks: int) -> Contract:
    """The contract with which MAX_TOKENS tokens are dealt out over ``ranks`` ranks."""
    return Contract(shape, ranks, -(-MAX_TOKENS // ranks))


class Model:
    """A shape with random weights, and what is computed once for all of its tests."""

    def __init__(self, shape: MoEShape) -> None:
        self.shape = shape
        self.weights = random_experts(shape, range(shape.experts), device="cuda")
        layout = WeightLayout(shape, shape.experts, "fp8_block", BLOCK_N)
        self.kernel_weights: KernelWeights = to_kernel_layout(self.weights, layout)
        self._inputs: dict[int, Inputs] = {}
        self._outputs: dict[int, torch.Tensor] = {}

    @cached_property
    def buffer(self) -> SymmBuffer:
        """Of one rank."""
        return SymmBuffer(self.shape, max_tokens=MAX_TOKENS)

    @cached_property
    def one_rank(self) -> MegaMoE:
        """The layer with the planner's choices on all SMs."""
        return self.layer()

    def layer(self, **options: object) -> MegaMoE:
        """Another layer on the same buffer and weights."""
        layer = MegaMoE(self.shape, buffer=self.buffer, timeout=TIMEOUT_S, **options)
        layer.use_weights(self.kernel_weights)
        layer.prepare()
        return layer

    def group(self, ranks: int, **options: object) -> LocalGroup:
        max_tokens = contract_of(self.shape, ranks).max_tokens
        group = MegaMoE.local_group(
            self.shape, ranks=ranks, max_tokens=max_tokens, timeout=TIMEOUT_S, **options
        )
        group.use_weights(self.kernel_weights)
        group.prepare()
        return group

    def inputs(self, tokens: int) -> Inputs:
        if tokens not in self._inputs:
            self._inputs[tokens] = make_inputs(self.shape, tokens, seed=tokens)
        return self._inputs[tokens]

    def output(self, tokens: int) -> torch.Tensor:
        """Of ``one_rank``: what every other arrangement must give, bit by bit."""
        if tokens not in self._outputs:
            self._outputs[tokens] = self.one_rank(*self.inputs(tokens))
            self.one_rank.check()
        return self._outputs[tokens]


def check_close(actual: torch.Tensor, inputs: Inputs, weights: ExpertWeights, **options: object) -> None:
    """Assert the tolerances against the reference that quantizes where the kernel does."""
    accumulation = accumulation_for_check(inputs.topk_ids, weights)
    error = relative_error(actual, moe_forward(*inputs, weights, accumulation=accumulation, **options))
    assert error.within(WHOLE, ROW), error


def run_group(group: LocalGroup, parts: Sequence[Inputs], **options: object) -> torch.Tensor:
    """Output of all ranks, one below the other."""
    outputs = group(*zip(*parts), **options)
    group.check()
    return torch.cat(outputs)


def all_plans() -> list[KernelPlan]:
    """The plans of the models' tests, for ``warm_cache``."""
    sets: list[PlanSet] = []
    plans: list[KernelPlan] = []
    for shape in MODELS.values():
        one = contract_of(shape, 1)
        plans += [make_plan(one, block_m=block_m) for block_m in BLOCKS]
        sets += [plan_set(one, sms=sms) for sms in (H200_SMS, *SM_COUNTS)]
        sets += [plan_set(contract_of(shape, ranks), sms=H200_SMS // ranks) for ranks in RANK_COUNTS]
    plans += [plan for plan_set_ in sets for plan in plan_set_.plans]
    return list({plan.hash: plan for plan in plans}.values())
