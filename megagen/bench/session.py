"""The parent of ``megagen bench``: collects rows, and goes on without what made a group of processes end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megagen.bench.cases import Case
from megagen.bench.measure import MAKING, Job, Row, measure
from megagen.bench.processes import Message, run_ranks
from megagen.errors import MegagenError
from megagen.files import to_json, write_atomically

Start = Callable[[Job], Iterable[Message]]


@dataclass
class Session:
    """Measures a job, in as many groups of processes as it takes.

    Attributes:
        ranks: GPUs.
        time_limit_s: for all of it; what is not measured by then is left out.
        record: file that holds, after every row, what is known so far.
        machine: facts for the record.
    """

    ranks: int
    time_limit_s: float
    record: Path | None = None
    machine: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] | None = None
    rows: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def run(self, job: Job, start: Start | None = None) -> Iterator[str]:
        """Measure; yields a line about each step. ``start`` runs a job in processes (for tests)."""
        deadline = time.monotonic() + self.time_limit_s

        def start_processes(job: Job) -> Iterable[Message]:
            return run_ranks(measure, job, self.ranks, deadline=deadline)

        while job.cases:
            step: Message = {"case": None, "step": "start"}
            try:
                for message in (start or start_processes)(job):
                    if message["kind"] == "doing":
                        step = message
                        yield f"{message['case'] or 'machine'}: {message['step']}"
                    elif message["kind"] == "ceilings":
                        job = self._take_ceilings(job, message)
                    else:
                        job = self._take_row(job, message["case"], message["row"])
                return
            except MegagenError as error:
                yield f"{step['case'] or 'machine'}: {step['step']} failed: {error}"
                if time.monotonic() >= deadline:
                    self._note(f"the time limit of {self.time_limit_s:g} s left {len(job.cases)} rows out")
                    return
                job = self._go_on(job, step["case"], step["step"], error)

    def to_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        return {
            "machine": self.machine,
            "ranks": self.ranks,
            "ceilings": self.ceilings,
            "rows": self.rows,
            "problems": self.problems,
        }

    def _take_ceilings(self, job: Job, message: Message) -> Job:
        self.ceilings = message["values"]
        if message["problem"]:
            self._note(f"no ceilings: {message['problem']}")
        self._save()
        return replace(job, ceilings=False)

    def _take_row(self, job: Job, case: Case, row: Row) -> Job:
        self.rows.append(row)
        self._save()
        return replace(job, cases=tuple(one for one in job.cases if one != case))

    def _go_on(self, job: Job, case: Case | None, step: str, error: MegagenError) -> Job:
        """The job without what ended the group: a contender, a row, or the ceilings.

        Raises:
            MegagenError: the same, if there is nothing to leave out.
        """
        self._note(f"{case or 'machine'}: {step} ended the processes: {error}")
        if step == "ceilings":
            return replace(job, ceilings=False)
        if case is None:
            raise error
        name = step.removeprefix(MAKING)
        if name in job.contenders:
            # One that can't be made, or ended the processes before, is left out of all rows of the model.
            hopeless = name != step or any(one[::2] == (case.model, name) for one in job.excluded)
            tokens = None if hopeless else case.tokens
            return replace(job, excluded=job.excluded | {(case.model, tokens, name)})
        return replace(job, cases=tuple(one for one in job.cases if one != case))

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        self._save()

    def _save(self) -> None:
        if self.record is not None:
            write_atomically(self.record, to_json(self.to_dict()).encode())
