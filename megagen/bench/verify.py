"""What each process of ``megagen run`` does: runs one layer, and holds it against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from megagen.bench.accuracy import LIMITS, Accuracy, worst
from megagen.bench.cases import Inputs, make_inputs
from megagen.bench.contenders import END_TO_END, MEGAGEN, poison
from megagen.bench.processes import Ranks
from megagen.bench.timing import Call, Timer
from megagen.contract import Contract
from megagen.formats import Format
from megagen.planning import KernelPlan
from megagen.routing import make_routing
from megagen.runtime.layer import MegaMoE
from megagen.weights import random_experts


@dataclass(frozen=True)
class RunJob:
    """A layer, and the calls to make of it.

    Attributes:
        counts: per call, the tokens of each rank.
        plan: the plan to use; None for the planner's choices.
        local: all ranks share one GPU in one process.
        timeout: seconds that a wait in the kernel may take.
    """

    contract: Contract
    counts: tuple[tuple[int, ...], ...]
    routing: str = "uniform"
    plan: KernelPlan | None = None
    local: bool = False
    num_sms: int | None = None
    timeout: float = 10.0
    samples: int = 5
    seed: int = 0


def verify(ranks: Ranks, job: RunJob) -> None:
    """Reports a "row" per call."""
    runner = Runner(ranks, job)
    for counts in job.counts:
        ranks.report("row", row=runner.row(counts))


class Runner:
    """The layers of the ranks that this process hosts: its own, or all of them."""

    def __init__(self, ranks: Ranks, job: RunJob) -> None:
        self._ranks, self._job = ranks, job
        contract = job.contract
        options: dict[str, Any] = {
            "max_tokens": contract.max_tokens,
            "plan": job.plan,
            "num_sms": job.num_sms,
            "activation": contract.activation,
            "clamp": contract.clamp,
            "timeout": job.timeout,
        }
        self._format = cast(Format, contract.format)
        experts = range(contract.shape.experts)
        self._weights = random_experts(contract.shape, experts, job.seed, ranks.device, self._format)
        if job.local:
            self._group = MegaMoE.local_group(contract.shape, ranks=contract.ranks, **options)
            self._group.load_weights(self._weights)
            self._group.prepare()
            self._layers: Sequence[MegaMoE] = self._group
        else:
            layer = MegaMoE(contract.shape, group=ranks.group, **options)
            layer.load_weights(*(tensor.chunk(ranks.world)[ranks.rank] for tensor in self._weights))
            layer.prepare()
            self._layers = [layer]
        self._timer = Timer(ranks, job.samples, warm_up=1)

    def row(self, counts: tuple[int, ...]) -> dict[str, Any]:
        """Make the call several times, end to end, and compare its output."""
        job, ranks = self._job, self._ranks
        inputs, hosted = self._inputs(counts)
        call = self._call(inputs, hosted)
        (timing,) = self._timer.measure([call])
        self._check()
        accuracy = Accuracy(inputs, self._weights, job.contract.activation, job.contract.clamp, self._format)
        errors = worst(ranks.gather(accuracy.errors(call.output)))
        return {
            "tokens": list(counts),
            "plans": sorted({layer.launcher_for(n).plan.name for layer, n in zip(self._layers, hosted)}),
            "us": timing.us,
            **errors._asdict(),
            "same_bits": timing.same_bits,
            "right": errors.within(LIMITS[MEGAGEN]) and timing.same_bits,
        }

    def _inputs(self, counts: tuple[int, ...]) -> tuple[Inputs, list[int]]:
        """Arguments of the hosted ranks, one below the other, and how many tokens each of them has."""
        job, ranks, shape = self._job, self._ranks, self._job.contract.shape
        routing = make_routing(job.routing, shape, sum(counts), job.seed)
        parts, rank = ([sum(counts)], 0) if job.local else (list(counts), ranks.rank)
        inputs = make_inputs(shape, routing, parts, rank, job.seed, ranks.device, self._format)
        return inputs, list(counts) if job.local else [counts[ranks.rank]]

    def _call(self, inputs: Inputs, hosted: list[int]) -> Call:
        output = torch.empty_like(inputs.x)
        outputs = output.split(hosted)
        x, ids, weights = (part.split(hosted) for part in (inputs.x, inputs.topk_ids, inputs.topk_weights))

        def run() -> None:
            if self._job.local:
                self._group(x, ids, weights, out=outputs)
            else:
                self._layers[0](x[0], ids[0], weights[0], out=outputs[0])

        return Call(END_TO_END, lambda: poison(output), run, output)

    def _check(self) -> None:
        if self._job.local:
            self._group.check()
        else:
            self._layers[0].check()
