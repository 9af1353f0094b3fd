"""``megagen emulate``, its journal and its timeline."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from megagen import compiler
from megagen.cli import app
from megagen.contract import Contract
from megagen.emulator import cases
from megagen.emulator.journal import Journal
from megagen.emulator.layer import Kernel
from megagen.errors import InputError
from megagen.inspection.timeline import RankTrace, chrome_trace
from megagen.planning import make_plan
from megagen.protocol import TraceState
from megagen.shape import MoEShape

MICRO = ["--model", "micro", "--ranks", "2", "--sms", "2"]


def emulate(*arguments: str, expect: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["emulate", *arguments, "--json"])
    assert result.exit_code == expect, result.output
    return json.loads(result.stdout) if result.stdout.startswith("{") else {}


def test_one_layer() -> None:
    record = emulate(*MICRO, "--tokens", "9,4", "--seed", "3", "--routing", "masked")
    assert record["schema_version"] == 1
    (row,) = record["rows"]
    assert row["right"] and row["equal_bits"] and row["error"] is None
    assert (row["tokens"], row["sms"], row["routing"], row["seed"]) == ([9, 4], [2, 2], "masked", 3)


def test_a_range_of_token_counts_and_launches_in_a_row() -> None:
    rows = emulate(*MICRO, "--tokens", "1:4", "--launches", "2")["rows"]
    assert [row["tokens"] for row in rows] == [[1, 1], [2, 2], [4, 4]]
    assert all(row["right"] and row["launches"] == 2 for row in rows)


def test_four_sms_unless_given() -> None:
    assert emulate("--model", "micro", "--tokens", "3")["rows"][0]["sms"] == [4]


@pytest.mark.parametrize(
    "options",
    [
        ["--tokens", "9,4,1"],
        ["--routing", "nonsense"],
        ["--launches", "0"],
        ["--seeds", "5"],
        ["--seeds", "0:2", "--tokens", "3"],
        ["--seeds", "0:2", "--timeline", "t.json"],
        ["--journal", "j.jsonl"],
        ["--tokens", "64", "--max-tokens", "16"],
        ["--tokens", "1:2", "--timeline", "t.json"],
    ],
)
def test_bad_input(options: list[str]) -> None:
    emulate(*MICRO, *options, expect=2)


@pytest.mark.parametrize(
    "old, new, code, error",
    [
        ("mbarrier_arrive(smem + SMEM_ORDER_EMPTY + offset);", "", 4, "Deadlock"),
        ("return silu * up * routing_weight;", "return silu * up;", 1, None),
        ("    fence_acq_rel_sys();\n    for", "    for", 1, "DataRace"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str, code: int, error: str | None
) -> None:
    intact = Kernel.of

    def broken(plan: Any) -> Kernel:
        source = intact(plan).source
        assert source.count(old) == 1
        source = source.replace(old, new)
        return Kernel(
            plan, source, compiler.compile(source, "sm_90a", name="k.cu", strict=False).ptx, "megamoe"
        )

    monkeypatch.setattr(cases.Kernel, "of", broken)
    (row,) = emulate(*MICRO, "--tokens", "9,4", expect=code)["rows"]
    assert (row["right"], row["error"]) == (False, error)
    assert error is not None or "relative error" in row["wrong"][0]


def test_an_exploration_goes_on_where_it_stopped(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    options = [
        "--model",
        "micro",
        "--ranks",
        "2",
        "--sms",
        "1",
        "--routing",
        "uniform",
        "--journal",
        str(journal),
    ]
    first = emulate(*options, "--seeds", "0:2")["rows"]
    journal.write_text(journal.read_text() + '{"seed": 2, "row": {"to')  # killed while it wrote
    both = emulate(*options, "--seeds", "0:3")["rows"]
    assert both[:2] == first and len(both) == 3
    assert [row["ranks"] for row in both] == [2, 2, 2]
    emulate(*options, "--routing", "none", "--seeds", "0:1", expect=2)


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, {"a": 1}).add(3, {"right": True})
    assert Journal(path, {"a": 1}).rows == {3: {"right": True}}
    with pytest.raises(InputError, match="another exploration"):
        Journal(path, {"a": 2})
    with pytest.raises(InputError, match="can't be used"):
        Journal(tmp_path, {"a": 1})


def test_timeline(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    emulate(*MICRO, "--tokens", "9,4", "--timeline", str(path))
    events = json.loads(path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == {0, 1}
    assert {"publish", "wait ranks", "pull", "l1 loop", "l2 epilogue"} <= {span["name"] for span in spans}
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"SM 0, dispatch (warp 2)", "SM 1, math (warp 4)"} <= names
    assert {span["cat"] for span in spans} == {"wait", "work"}
    assert sum(span["dur"] for span in spans) > 0


def test_a_state_lasts_until_the_next_record() -> None:
    plan = make_plan(Contract(MoEShape.preset("micro"), 1, 16), tokens=16, sms=1)
    records = np.zeros((1, plan.threads // 32, 4, 4), np.uint32)
    states = (TraceState.WAIT_ROWS, TraceState.FILL, TraceState.END)
    for place, (at, state, argument) in enumerate(zip((2**32 - 10, 990, 2990), states, (5, 7, 0))):
        records[0, 0, place] = (at, 0, state, argument)
    trace = chrome_trace([RankTrace(plan, records)], clock="ns")
    waits, fills = (event for event in trace["traceEvents"] if event["ph"] == "X")
    assert (waits["dur"], waits["cat"], waits["args"]) == (1.0, "wait", {"pool block": 5})
    assert (fills["dur"], fills["cat"], fills["args"]) == (2.0, "work", {"weight tile": 7})
