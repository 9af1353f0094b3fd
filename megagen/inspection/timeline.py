"""What each warp of a traced kernel did and waited for, as a trace for Perfetto or ``chrome://tracing``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from megagen.planning import KernelPlan
from megagen.protocol import TraceState

Clock = Literal["ns", "sm"]
_CLOCK_WORD: dict[Clock, int] = {"ns": 0, "sm": 1}
_STATE_WORD, _ARGUMENT_WORD = 2, 3

WAITS = frozenset({TraceState.WAIT_RANKS, TraceState.WAIT_ROWS, TraceState.WAIT_TILE})
"""States in which a warp does nothing but wait."""

_ARGUMENTS = {
    TraceState.WAIT_ROWS: "pool block",
    TraceState.FILL: "weight tile",
    TraceState.L1_LOOP: "pool block",
    TraceState.L2_LOOP: "pool block",
    TraceState.L1_EPILOGUE: "weight tile",
    TraceState.L2_EPILOGUE: "weight tile",
    TraceState.SIGNAL: "pool block",
}
"""What the argument of a state's record counts."""


class RankTrace(NamedTuple):
    """One rank's plan, and its records: uint32 [SMs, warps, TRACE_CAPACITY, 4], zero where there is none."""

    plan: KernelPlan
    records: np.ndarray


def chrome_trace(ranks: Sequence[RankTrace], clock: Clock) -> dict[str, Any]:
    """The trace-event format: a process per rank, a thread per warp, an event per state.

    Args:
        clock: "ns" for the global timer of a GPU, in microseconds of the trace; "sm" for the SM's clock (on
            the emulator: warp instructions of all SMs together), a thousand ticks per microsecond.
    """
    first = _earliest([start for rank in ranks for start in _starts(rank.records, clock)])
    events: list[dict[str, Any]] = []
    for number, rank in enumerate(ranks):
        events.append(_name("process_name", number, 0, f"rank {number}"))
        sms, warps = rank.records.shape[:2]
        for sm in range(sms):
            for warp in range(warps):
                thread = sm * warps + warp
                spans = list(_spans(rank.records[sm, warp], clock, first))
                if spans:
                    name = f"SM {sm}, {_role(rank.plan, warp)} (warp {warp})"
                    events.append(_name("thread_name", number, thread, name))
                    events += [{**span, "pid": number, "tid": thread} for span in spans]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _starts(records: np.ndarray, clock: Clock) -> list[int]:
    used = records[records[..., _STATE_WORD] != 0]
    return used[..., _CLOCK_WORD[clock]].tolist()


def _earliest(starts: Sequence[int]) -> int:
    """Of times that count modulo 2^32 and lie less than 2^31 apart."""
    if not starts:
        return 0
    before = min((start - starts[0] + 2**31) % 2**32 - 2**31 for start in starts)
    return (starts[0] + before) % 2**32


def _spans(records: np.ndarray, clock: Clock, first: int) -> Iterator[dict[str, Any]]:
    """Events of one warp: a state lasts until the next record; END has no length."""
    used = records[records[:, _STATE_WORD] != 0]
    starts = [(int(start) - first) % (1 << 32) for start in used[:, _CLOCK_WORD[clock]]]
    for record, start, end in zip(used, starts, [*starts[1:], *starts[-1:]]):
        state = TraceState(int(record[_STATE_WORD]))
        if state is TraceState.END:
            continue
        event: dict[str, Any] = {
            "ph": "X",
            "name": state.name.lower().replace("_", " "),
            "cat": "wait" if state in WAITS else "work",
            "ts": start / 1e3,
            "dur": (end - start) / 1e3,
        }
        if state in _ARGUMENTS:
            event["args"] = {_ARGUMENTS[state]: int(record[_ARGUMENT_WORD])}
        yield event


def _role(plan: KernelPlan, warp: int) -> str:
    for role in plan.roles:
        if role.first_warp <= warp < role.first_warp + role.warps:
            return role.name.replace("_", " ")
    return "idle"


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
