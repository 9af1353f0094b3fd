"""What each process of ``megagen bench`` does: weights once per model, then one row after the other."""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch

from megagen.bench.accuracy import LIMITS, Accuracy, Errors, worst
from megagen.bench.cases import Case, Inputs, make_inputs, rank_loads, route
from megagen.bench.ceilings import measure_ceilings
from megagen.bench.contenders import MEGAGEN, Contender, Megagen, available_contenders, kernel_call
from megagen.bench.processes import Ranks
from megagen.bench.timing import Call, Timer, Timing
from megagen.weights import ExpertWeights, random_experts

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a group of processes is to measure.

    Attributes:
        cases: rows, those of one model next to each other.
        contenders: names, in the order in which they take turns.
        excluded: (model, tokens, contender) to leave out, since it ended an earlier group of processes; with
            None for tokens, in all rows of the model.
        ceilings: measure them first.
    """

    cases: tuple[Case, ...]
    contenders: tuple[str, ...]
    max_tokens: int
    excluded: frozenset[tuple[str, int | None, str]] = frozenset()
    ceilings: bool = True
    samples: int = 20
    seed: int = 0

    def leaves_out(self, case: Case, contender: str) -> bool:
        """Whether a contender is excluded from a row."""
        return not self.excluded.isdisjoint(
            {(case.model, case.tokens, contender), (case.model, None, contender)}
        )


MAKING = "making "
"""Prefix of the step in which a contender is made, before it is called by the step of its name."""


def measure(ranks: Ranks, job: Job) -> None:
    """Reports "ceilings", then per case "doing" (a step is about to start) and "row"."""
    timer = Timer(ranks, job.samples)
    if job.ceilings:
        ranks.report("doing", case=None, step="ceilings")
        ceilings, problem = ranks.attempt(lambda: measure_ceilings(ranks, timer))
        ranks.report("ceilings", values=ceilings._asdict() if ceilings else None, problem=problem)
        torch.cuda.empty_cache()
    for _, cases in groupby(job.cases, key=lambda case: case.model):
        _measure_model(ranks, job, timer, list(cases))
        gc.collect()
        torch.cuda.empty_cache()


def _measure_model(ranks: Ranks, job: Job, timer: Timer, cases: list[Case]) -> None:
    bench = ModelBench(ranks, job, timer, cases[0])
    for case in cases:
        ranks.report("row", case=case, row=bench.row(case))


class ModelBench:
    """One model: its weights, and the contenders that could be made of them."""

    def __init__(self, ranks: Ranks, job: Job, timer: Timer, first: Case) -> None:
        self._ranks, self._job, self._timer = ranks, job, timer
        ranks.report("doing", case=first, step="weights")
        shape = first.shape
        self._weights = random_experts(shape, range(shape.experts), job.seed, ranks.device)
        own = ExpertWeights(*(tensor.chunk(ranks.world)[ranks.rank] for tensor in self._weights))
        self._contenders: dict[str, Contender] = {}
        self._unmade: dict[str, str] = {}
        for name in job.contenders:
            if (first.model, None, name) in job.excluded:
                continue
            ranks.report("doing", case=first, step=MAKING + name)
            make = available_contenders()[name]
            made, problem = ranks.attempt(partial(make, ranks, shape, own, job.max_tokens))
            if made is None:
                self._unmade[name] = problem
            else:
                self._contenders[name] = made

    def row(self, case: Case) -> Row:
        """Measure one case: every contender once to warm up, then all in turn, then their outputs."""
        ranks = self._ranks
        routing = route(case, ranks.world, self._job.seed)
        counts = [case.tokens] * ranks.world
        inputs = make_inputs(case.shape, routing, counts, ranks.rank, self._job.seed, ranks.device)
        failures = dict(self._unmade)
        calls: dict[str, list[Call]] = {}
        for name, contender in self._contenders.items():
            if self._job.leaves_out(case, name):
                continue
            ranks.report("doing", case=case, step=name)
            made, problem = ranks.attempt(partial(_first_calls, contender, inputs))
            if made is None:
                failures[name] = problem
                ranks.attempt(contender.recover)
            else:
                calls[name] = made
        row = self._head(case, routing)
        row["results"], problem = self._results(case, inputs, calls)
        if problem:
            failures["measuring"] = problem
        if case.routing != "uniform" and MEGAGEN in row["results"]:
            row["balanced"] = self._balanced(case, max(load["rows"] for load in row["load"]))
        row["failures"] = failures
        row["memory_bytes"] = {name: one.memory_bytes() for name, one in self._contenders.items()}
        return row

    def _head(self, case: Case, routing: Any) -> Row:
        """What is known of a case before it is measured."""
        ours = self._contenders.get(MEGAGEN)
        plan = ours.plan(case.tokens) if isinstance(ours, Megagen) else None
        loads = rank_loads(routing, case.shape, self._ranks.world, plan.block_m if plan else 1)
        return {
            "model": case.model,
            **asdict(case.shape),
            "ranks": self._ranks.world,
            "tokens": case.tokens,
            "routing": case.routing,
            "plan": plan.name if plan else None,
            "block_m": plan.block_m if plan else None,
            "load": [load._asdict() for load in loads],
        }

    def _results(
        self, case: Case, inputs: Inputs, calls: dict[str, list[Call]]
    ) -> tuple[dict[str, Any], str]:
        """Time and accuracy of every call: contender -> column -> numbers; and what went wrong."""
        ranks = self._ranks
        flat = [(name, call) for name, own in calls.items() for call in own]
        if not flat:
            return {}, ""
        ranks.report("doing", case=case, step="timing")
        timings, problem = ranks.attempt(lambda: self._time([call for _, call in flat], list(calls)))
        if timings is None:
            for name in calls:
                ranks.attempt(self._contenders[name].recover)
            return {}, problem
        ranks.report("doing", case=case, step="accuracy")
        own, problem = ranks.attempt(lambda: self._errors(inputs, [call for _, call in flat]))
        if own is None:
            return {}, problem
        errors = [worst(list(of_ranks)) for of_ranks in zip(*ranks.gather(own), strict=True)]
        results: dict[str, Any] = {name: {} for name in calls}
        for (name, call), timing, error in zip(flat, timings, errors, strict=True):
            results[name][call.column] = _numbers(timing, error, LIMITS[name])
        return results, ""

    def _errors(self, inputs: Inputs, calls: list[Call]) -> list[Errors]:
        """This rank's errors of what the calls wrote last."""
        accuracy = Accuracy(inputs, self._weights)
        return [accuracy.errors(call.output) for call in calls]

    def _time(self, calls: list[Call], names: list[str]) -> list[Timing]:
        timings = self._timer.measure(calls)
        for name in names:
            self._contenders[name].check()
        return timings

    def _balanced(self, case: Case, rows: int) -> Row | None:
        """Our own time with uniform routing and as many token copies per rank as the busiest one has here."""
        tokens = -(-rows // case.shape.top_k)
        ours = self._contenders[MEGAGEN]
        if tokens > self._job.max_tokens or not isinstance(ours, Megagen):
            return None
        ranks = self._ranks
        even = Case(case.model, case.shape, tokens)
        routing = route(even, ranks.world, self._job.seed)
        counts = [tokens] * ranks.world
        inputs = make_inputs(case.shape, routing, counts, ranks.rank, self._job.seed, ranks.device)
        ranks.report("doing", case=case, step="balanced")
        timings, problem = ranks.attempt(lambda: self._time([kernel_call(ours.layer, inputs)], [MEGAGEN]))
        return {"tokens": tokens, "us": timings[0].us} if timings else {"tokens": tokens, "problem": problem}


def _first_calls(contender: Contender, inputs: Inputs) -> list[Call]:
    """The contender's calls, each made once: this compiles what is compiled at first use."""
    calls = contender.calls(inputs)
    for call in calls:
        call.prepare()
        call.run()
        contender.check()
    return calls


def _numbers(timing: Timing, errors: Errors, limits: Errors) -> dict[str, Any]:
    return {
        **timing._asdict(),
        "errors": errors._asdict(),
        "right": errors.within(limits) and timing.same_bits,
    }
