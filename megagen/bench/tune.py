"""What each process of ``megagen tune`` does: times the planner's candidates for each token count."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from megagen.bench.cases import Case, make_inputs, route
from megagen.bench.contenders import kernel_call
from megagen.bench.processes import Ranks
from megagen.bench.timing import Call, Timer, same_bits
from megagen.contract import Contract
from megagen.formats import Format
from megagen.planning import KernelPlan, make_plan
from megagen.runtime.layer import MegaMoE
from megagen.runtime.symmetric import SymmBuffer
from megagen.tuning import candidate_choices
from megagen.weights import KernelWeights, random_experts, to_kernel_layout


@dataclass(frozen=True)
class TuneJob:
    """Token counts of one contract to tune for, on so many SMs (None: all)."""

    contract: Contract
    tokens: tuple[int, ...]
    num_sms: int | None = None
    samples: int = 20
    seed: int = 0


def tune(ranks: Ranks, job: TuneJob) -> None:
    """Reports "setup" (the GPU's name and the SMs in use), then per token count "tuned" with its results."""
    Tuner(ranks, job).run()


class Tuner:
    """One buffer and one set of weights, shared by the layers of all candidates."""

    def __init__(self, ranks: Ranks, job: TuneJob) -> None:
        self._ranks, self._job = ranks, job
        contract = job.contract
        self._timer = Timer(ranks, job.samples)
        self._buffer = SymmBuffer(contract.shape, ranks.group, max_tokens=contract.max_tokens)
        self._sms = job.num_sms or self._buffer.gpu.sms
        self._weights = self._own_weights()
        self._layers: dict[str, MegaMoE] = {}

    def run(self) -> None:
        gpu = self._buffer.gpu
        self._ranks.report("setup", gpu=gpu.name, arch=gpu.arch.name, sms=self._sms)
        for tokens in self._job.tokens:
            results, problem = self._ranks.attempt(partial(self._compare, tokens))
            self._ranks.report("tuned", tokens=tokens, results=results or [], problem=problem)
            if problem:
                self._buffer.reset()

    def _compare(self, tokens: int) -> list[dict[str, Any]]:
        """Time of each candidate that gives the same bits as the first, in order of ``candidate_choices``."""
        job, gpu = self._job, self._buffer.gpu
        choices = candidate_choices(job.contract, gpu.arch.name, tokens, self._sms)
        plans = [make_plan(job.contract, gpu.arch.name, tokens, sms=self._sms, **one) for one in choices]
        calls = self._calls(plans, tokens)
        timings = self._timer.measure(calls)
        self._layers[plans[0].hash].check()
        same = [same_bits(call.output, calls[0].output) for call in calls]
        same = [all(of_ranks) for of_ranks in zip(*self._ranks.gather(same), strict=True)]
        return [
            {"choice": choice, "plan": plan.name, "us": timing.us, "same_bits": bits and timing.same_bits}
            for choice, plan, timing, bits in zip(choices, plans, timings, same, strict=True)
        ]

    def _calls(self, plans: list[KernelPlan], tokens: int) -> list[Call]:
        job, ranks = self._job, self._ranks
        case = Case("tuned", job.contract.shape, tokens)
        routing = route(case, ranks.world, job.seed)
        counts = [tokens] * ranks.world
        inputs = make_inputs(case.shape, routing, counts, ranks.rank, job.seed, ranks.device)
        return [kernel_call(self._layer(plan), inputs) for plan in plans]

    def _layer(self, plan: KernelPlan) -> MegaMoE:
        """The layer that uses a plan, made once: neighbouring token counts share candidates."""
        if plan.hash not in self._layers:
            contract = self._job.contract
            layer = MegaMoE(
                contract.shape,
                buffer=self._buffer,
                num_sms=self._sms,
                plan=plan,
                activation=contract.activation,
                clamp=contract.clamp,
            )
            layer.use_weights(self._weights)
            layer.prepare()
            self._layers[plan.hash] = layer
        return self._layers[plan.hash]

    def _own_weights(self) -> KernelWeights:
        contract, rank = self._job.contract, self._ranks.rank
        experts = range(rank * contract.local_experts, (rank + 1) * contract.local_experts)
        weights = random_experts(
            contract.shape,
            experts,
            self._job.seed,
            self._ranks.device,
            cast(Format, contract.format),
        )
        return to_kernel_layout(weights, make_plan(contract, self._buffer.gpu.arch.name).weight_layout)


def winner(results: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The fastest of the results that are right; None if there is none."""
    right = [result for result in results if result["same_bits"]]
    return min(right, key=lambda result: result["us"], default=None)
