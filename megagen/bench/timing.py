"""Timing calls that all ranks make together.

A sample is the time between two events around one call, on a GPU whose earlier work has ended on every rank
and whose L2 holds nothing of it. The call is queued while the GPU still sleeps, so that neither the host's
launch cost nor the ranks' different starts are measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megagen.bench.processes import Ranks

SAMPLES = 20
WARM_UP = 5
FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU at hand
SLEEP_CYCLES = 1_000_000  # half a millisecond at 2 GHz: longer than the host takes to queue a call


@dataclass(frozen=True)
class Call:
    """Something to time.

    Attributes:
        column: what it includes: "kernel" (the inputs already lie in place) or "end_to_end".
        prepare: puts its inputs in place and poisons its output; queued, not timed.
        run: queues the call on the current stream.
        output: what ``run`` writes.
        host_bound: the call itself waits for the GPU, so its launches can't be queued ahead.
    """

    column: str
    prepare: Callable[[], object]
    run: Callable[[], object]
    output: torch.Tensor
    host_bound: bool = False


class Sample(NamedTuple):
    """``late``: the GPU came to the call before it was queued, so host time was measured too."""

    us: float
    late: bool


class Timing(NamedTuple):
    """Result of one call, in microseconds."""

    us: float
    samples_us: list[float]
    late: int
    same_bits: bool


class Timer:
    """Times calls on this rank's GPU, in step with the other ranks."""

    def __init__(self, ranks: Ranks, samples: int = SAMPLES, warm_up: int = WARM_UP) -> None:
        self._ranks, self._samples, self._warm_up = ranks, samples, warm_up
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=ranks.device)
        self._meeting = torch.zeros(1, device=ranks.device)

    def measure(self, calls: Sequence[Call]) -> list[Timing]:
        """Collective: time the calls in turn, round by round, so that all of them see the same clocks."""
        samples: list[list[Sample]] = [[] for _ in calls]
        first: list[torch.Tensor] = []
        same = [True] * len(calls)
        for round_ in range(self._warm_up + self._samples):
            for index, call in enumerate(calls):
                sample = self.sample(call)
                if round_ == 0:
                    first.append(call.output.clone())
                same[index] &= same_bits(call.output, first[index])
                if round_ >= self._warm_up:
                    samples[index].append(sample)
        per_rank = self._ranks.gather((samples, same))
        return [
            summarize([one[0][index] for one in per_rank], all(one[1][index] for one in per_rank))
            for index in range(len(calls))
        ]

    def sample(self, call: Call) -> Sample:
        """Collective: one timed call."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        self._meet()  # the earlier work of all ranks has ended: no peer reads or writes here any more
        call.prepare()
        self._flush.zero_()
        torch.cuda._sleep(SLEEP_CYCLES)
        self._meet()
        start.record()
        call.run()
        end.record()
        late = start.query() and not call.host_bound
        torch.cuda.synchronize()
        return Sample(start.elapsed_time(end) * 1e3, late)

    def _meet(self) -> None:
        """Queue something that ends on all ranks at about the same time."""
        if self._ranks.world > 1:
            dist.all_reduce(self._meeting)


def summarize(per_rank: Sequence[Sequence[Sample]], same: bool) -> Timing:
    """Median over the samples of the maximum over the ranks; late samples are left out if others remain."""
    rounds = list(zip(*per_rank, strict=True))
    times = [max(sample.us for sample in one) for one in rounds]
    on_time = [time for time, one in zip(times, rounds) if not any(sample.late for sample in one)]
    return Timing(statistics.median(on_time or times), times, len(times) - len(on_time), same)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes: NaN equals itself."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
