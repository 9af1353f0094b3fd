"""Benchmarks without a GPU: cases, verdicts, the flow of a session, and the baseline's routing."""

import io
import json

import numpy as np
import pytest
import torch
from bench_fakes import CPU, MICRO, FakeTimer, OneRank, ReferenceContender, baseline_error, plain_grouped_gemm
from rich.console import Console

from megagen import DeviceError, InputError, MegaMoETimeout, MoEShape, ShapeError
from megagen.bench import baseline, contenders, measure, report, timing
from megagen.bench.cases import Case, make_cases, make_inputs, rank_loads, route
from megagen.bench.measure import Job
from megagen.bench.session import Session
from megagen.bench.timing import Sample
from megagen.routing import Routing
from megagen.weights import random_experts

CEILINGS = {"hbm_bytes_per_s": 4.40e12, "gemm_flops_per_s": 1.37e15}


def make_row(model="flash8", tokens=4096, ranks=2, ours=1000.0, peer=1710.2, routing="uniform", **changes):
    """A row as processes report it, with every expert in use and no padding."""
    shape = MoEShape.preset(model, ranks)
    load = {
        "experts": shape.experts // ranks,
        "rows": tokens * shape.top_k,
        "padded_rows": tokens * shape.top_k,
        "plan_rows": tokens * shape.top_k * 5 // 4,
    }
    errors = {"whole": 0.001, "worst_row": 0.002, "float32": 0.02}
    numbers = {"samples_us": [], "late": 0, "same_bits": True, "errors": errors, "right": True}
    results = {"megagen": {column: {"us": ours, **numbers} for column in report.COLUMNS}}
    if peer is not None:
        results["sgl-deep-gemm"] = {column: {"us": peer, **numbers} for column in report.COLUMNS}
    row = {
        "model": model,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "ranks": ranks,
        "tokens": tokens,
        "routing": routing,
        "plan": "some-plan",
        "block_m": 128,
        "load": [load] * ranks,
        "results": results,
        "failures": {},
        "memory_bytes": {"megagen": 800 << 20, "sgl-deep-gemm": 1487 << 20},
    }
    return row | changes


# Cases


def test_cases_are_models_times_counts():
    cases = make_cases("flash8, flash", "64,8,256:1024", 2)
    assert [case.tokens for case in cases] == [8, 64, 256, 512, 1024] * 2
    assert cases[0].shape == MoEShape.preset("flash8", 2)
    assert cases[-1].shape == MoEShape.preset("deepseek-v4-flash")


@pytest.mark.parametrize(
    "models, tokens, error",
    [("flash9", "8", ShapeError), ("flash8", "0", InputError), ("flash8", "8;9", InputError)],
)
def test_bad_cases_are_named(models, tokens, error):
    with pytest.raises(error, match=r"flash9|tokens="):
        make_cases(models, tokens, 1)


def test_targets_depend_on_ranks_and_hold_for_uniform_routing_only():
    shape = MoEShape.preset("deepseek-v4-flash")
    assert Case("flash", shape, 4096).target(2) == 0.68
    assert Case("flash", shape, 4096).target(1) == 0.75
    assert Case("flash", shape, 8192).target(2) is None
    assert Case("flash", shape, 4096, "zipf:1.0").target(1) is None


def test_loads_are_what_counting_gives():
    shape = MoEShape(128, 128, 4, 2)
    ids = np.array([[0, 1], [0, 0], [3, -1], [0, 9]], dtype=np.int32)
    first, second = rank_loads(Routing(ids, np.ones((4, 2), np.float32)), shape, 2, block_m=16)
    assert first == (2, 4, 128, 32)  # expert 0: tokens 0, 1 (once), 3; expert 1: token 0
    assert second == (1, 1, 64, 16)


def test_ranks_get_their_part_of_the_same_tokens():
    case = Case("micro", MICRO, 5)
    routing = route(case, 2, seed=1)
    whole = make_inputs(MICRO, routing, [10], 0, 1, CPU)
    parts = [make_inputs(MICRO, routing, [5, 5], rank, 1, CPU) for rank in (0, 1)]
    for all_rows, *of_ranks in zip(whole, *parts):
        assert torch.equal(all_rows.view(torch.uint8), torch.cat(of_ranks).view(torch.uint8))


# Timing


def test_summary_is_the_median_of_the_maxima():
    ranks = [[Sample(t, False) for t in times] for times in ([1.0, 5.0, 3.0], [2.0, 4.0, 9.0])]
    assert timing.summarize(ranks, True) == (5.0, [2.0, 5.0, 9.0], 0, True)


def test_late_samples_do_not_count_unless_all_are():
    ranks = [[Sample(1.0, False), Sample(90.0, True), Sample(3.0, False)], [Sample(2.0, False)] * 3]
    result = timing.summarize(ranks, True)
    assert (result.us, result.late) == (2.5, 1)
    assert timing.summarize([[Sample(7.0, True)]], True).us == 7.0


def test_nan_has_the_same_bits_as_itself():
    nan = torch.full((3,), torch.nan)
    assert timing.same_bits(nan, nan.clone())
    assert not timing.same_bits(torch.zeros(3), -torch.zeros(3))


# Verdicts


def test_floor_is_weights_for_few_tokens_and_flops_for_many():
    # flash8 per rank: 805 MB of weights and their scales; 1.24 TFLOP at 4,096 tokens.
    few = make_row(tokens=8)
    assert report.floor_us(few, CEILINGS) == pytest.approx(805.5e6 / 4.40e12 * 1e6, rel=1e-3)
    assert report.floor_us(make_row(), CEILINGS) == pytest.approx(1.237e12 / 1.37e15 * 1e6, rel=1e-3)


@pytest.mark.parametrize("low", [{"hbm_bytes_per_s": 4.29e12}, {"gemm_flops_per_s": 1.29e15}])
def test_low_ceilings_do_not_count(low):
    assert report.floor_us(make_row(), CEILINGS | low) is None
    assert not report.judge(make_row(ours=1300.0), "kernel", CEILINGS | low).met


def test_target_is_a_ratio_of_the_peer():
    verdict = report.judge(make_row(ours=1180.0), "kernel", CEILINGS)
    assert verdict.ratio == pytest.approx(0.69, abs=1e-3)
    assert verdict.allowed_us == pytest.approx(0.69 * 1710.2)
    assert verdict.met
    assert not report.judge(make_row(ours=1181.0), "kernel", CEILINGS).met


def test_the_floor_allows_more_where_the_target_is_out_of_reach():
    row = make_row(ours=1080.0, peer=1200.0)
    verdict = report.judge(row, "kernel", CEILINGS)
    assert verdict.allowed_us == pytest.approx(1.08 * verdict.floor_us)
    assert verdict.allowed_us > 0.69 * 1200
    assert not verdict.met
    assert report.judge(make_row(ours=970.0, peer=1200.0), "kernel", CEILINGS).met


def test_without_a_target_the_peer_is_the_limit():
    row = make_row(tokens=16, ours=199.0, peer=200.0)
    assert report.judge(row, "kernel", CEILINGS).met
    assert not report.judge(make_row(tokens=16, ours=201.0, peer=200.0), "kernel", CEILINGS).met


def test_a_wrong_result_meets_nothing():
    row = make_row(ours=500.0)
    row["results"]["megagen"]["kernel"]["right"] = False
    assert report.judge(row, "kernel", CEILINGS).met is False
    assert report.judge(row, "end_to_end", CEILINGS).met is True
    assert not report.ours_is_right({"rows": [row]})


def test_without_a_peer_nothing_is_decided():
    record = {"rows": [make_row(peer=None)], "ceilings": None, "problems": [], "ranks": 2}
    assert report.judge(record["rows"][0], "kernel", None).met is None
    assert report.summary(record)["all_met"] is False


def test_tables_show_every_row_and_every_problem():
    skewed = make_row(routing="zipf:1.0", balanced={"tokens": 5000, "us": 900.0})
    wrong = make_row("pro8", 64)
    wrong["results"]["sgl-deep-gemm"]["kernel"]["right"] = False
    failed = make_row("pro8", results={}, failures={"megagen": "rank 1: it broke"}, block_m=None)
    rows = [make_row(), skewed, failed, wrong]
    record = {"rows": rows, "ceilings": CEILINGS, "problems": ["something ended"], "ranks": 2}
    console = Console(width=200, record=True, file=io.StringIO())
    for shown in report.tables(record):
        console.print(shown)
    text = console.export_text()
    for expected in (
        "4.40 TB/s",
        "flash8, 4096 tokens, routing zipf:1.0",
        "0.585",
        "1.11",
        "54%",
        "80%",
        "rank 1: it broke",
        "pro8, 64 tokens: sgl-deep-gemm: kernel: wrong",
        "something ended",
    ):
        assert expected in text, expected
    json.dumps(report.summary(record))


# The work of a process, with contenders that compute on the CPU


@pytest.fixture
def fake_contenders(monkeypatch):
    """Contenders by name: right, wrong, broken when called, broken when made."""

    def unmakable(*_):
        raise ImportError("no such library")

    def maker(**faults):
        return lambda ranks, shape, weights, max_tokens: ReferenceContender(weights, **faults)

    made = {
        "megagen": maker(),
        "sgl-deep-gemm": maker(wrong=True),
        "stuck": maker(broken=True),
        "missing": unmakable,
    }
    monkeypatch.setattr(measure, "available_contenders", lambda: made)
    monkeypatch.setattr(measure, "Timer", FakeTimer)
    return tuple(made)


def test_one_contenders_failure_leaves_the_others(fake_contenders):
    ranks = OneRank()
    job = Job((Case("micro", MICRO, 4), Case("micro", MICRO, 9)), fake_contenders, 16, ceilings=False)
    measure.measure(ranks, job)
    rows = [message["row"] for message in ranks.of("row")]
    assert [row["tokens"] for row in rows] == [4, 9]
    for row in rows:
        assert set(row["results"]) == {"megagen", "sgl-deep-gemm"}
        assert row["results"]["megagen"]["kernel"]["right"]
        assert not row["results"]["sgl-deep-gemm"]["end_to_end"]["right"], "poison must show"
        assert "MegaMoETimeout: stuck" in row["failures"]["stuck"]
        assert "no such library" in row["failures"]["missing"]
        json.dumps(row)
    record = {"rows": rows, "ceilings": None, "problems": [], "ranks": 1}
    assert report.ours_is_right(record)
    assert len(report.tables(record)) > 4


def test_every_step_is_announced_before_it_starts(fake_contenders):
    ranks = OneRank()
    measure.measure(ranks, Job((Case("micro", MICRO, 4),), ("megagen",), 16, ceilings=False))
    steps = [message["step"] for message in ranks.of("doing")]
    assert steps == ["weights", "making megagen", "megagen", "timing", "accuracy"]


def test_excluded_contenders_are_not_made(fake_contenders):
    ranks = OneRank()
    job = Job(
        (Case("micro", MICRO, 4),),
        fake_contenders,
        16,
        frozenset({("micro", None, "megagen")}),
        ceilings=False,
    )
    measure.measure(ranks, job)
    (message,) = ranks.of("row")
    assert set(message["row"]["results"]) == {"sgl-deep-gemm"}


def test_contenders_are_chosen_by_name(monkeypatch):
    monkeypatch.setattr(contenders, "is_installed", lambda name: False)
    assert contenders.choose_contenders(None) == ("megagen", "pytorch")
    assert contenders.choose_contenders("pytorch") == ("pytorch",)
    with pytest.raises(InputError, match=r"sgl-deep-gemm.*megagen, pytorch"):
        contenders.choose_contenders("megagen,sgl-deep-gemm")


# Sessions


CASES = tuple(Case(model, MICRO, tokens) for model in ("a", "b") for tokens in (1, 2))


class FakeProcesses:
    """Runs jobs as groups of processes would; ``fatal`` steps end a group."""

    def __init__(self, *fatal, error=None):
        self.fatal, self.error, self.started = fatal, error or DeviceError("died"), 0

    def __call__(self, job):
        self.started += 1
        if job.ceilings:
            yield self.step(None, "ceilings")
            yield {"kind": "ceilings", "values": CEILINGS, "problem": ""}
        for case in job.cases:
            for name in job.contenders:
                if (case.model, None, name) not in job.excluded:
                    yield self.step(case, f"making {name}")
                if not job.leaves_out(case, name):
                    yield self.step(case, name)
            yield self.step(case, "timing")
            yield {"kind": "row", "case": case, "row": {"model": case.model, "tokens": case.tokens}}

    def step(self, case, name):
        self.last = (case and case.model, case and case.tokens, name)
        return {"kind": "doing", "case": case, "step": name}

    def ending(self, job):
        """As ``__call__``, but ends after a fatal step was announced."""
        for message in self(job):
            yield message
            if message["kind"] == "doing" and self.last in self.fatal:
                raise self.error


def run_session(processes, tmp_path, time_limit=60.0):
    session = Session(1, time_limit, tmp_path / "record.json")
    lines = list(session.run(Job(CASES, ("megagen", "peer"), 16), processes.ending))
    saved = json.loads((tmp_path / "record.json").read_text())
    assert saved["rows"] == session.rows
    return session, [(row["model"], row["tokens"]) for row in session.rows], lines


def test_a_session_without_trouble(tmp_path):
    processes = FakeProcesses()
    session, rows, lines = run_session(processes, tmp_path)
    assert rows == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert session.ceilings == CEILINGS
    assert processes.started == 1
    assert "b, 2 tokens: timing" in lines


def test_a_fatal_contender_is_left_out_of_its_row(tmp_path):
    processes = FakeProcesses(("a", 1, "peer"))
    session, rows, lines = run_session(processes, tmp_path)
    assert rows == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert processes.started == 2
    assert session.problems == ["a, 1 tokens: peer ended the processes: died"]
    assert "a, 2 tokens: peer" in lines


@pytest.mark.parametrize(
    "fatal", [[("a", 1, "making peer")], [("a", 1, "peer"), ("a", 2, "peer")]], ids=["made", "called twice"]
)
def test_a_contender_without_hope_is_left_out_of_its_model(tmp_path, fatal):
    processes = FakeProcesses(*fatal)
    _, rows, lines = run_session(processes, tmp_path)
    assert len(rows) == 4
    assert processes.started == 1 + len(fatal)
    steps = [line for line in lines if line.startswith("a, 2 tokens: ") and line.endswith("peer")]
    assert len(steps) == 2 * (len(fatal) - 1), "made and called once more only if it is not without hope"
    assert "b, 1 tokens: peer" in lines


def test_a_fatal_row_is_left_out(tmp_path):
    _, rows, _ = run_session(FakeProcesses(("b", 1, "timing")), tmp_path)
    assert rows == [("a", 1), ("a", 2), ("b", 2)]


def test_fatal_ceilings_are_left_out(tmp_path):
    session, rows, _ = run_session(FakeProcesses((None, None, "ceilings")), tmp_path)
    assert len(rows) == 4
    assert session.ceilings is None


def test_processes_that_never_start_end_the_session(tmp_path):
    def never(job):
        raise DeviceError("no GPU")
        yield

    with pytest.raises(DeviceError, match="no GPU"):
        list(Session(1, 60.0).run(Job(CASES, ("megagen",), 16), never))


def test_the_time_limit_keeps_what_there_is(tmp_path):
    processes = FakeProcesses(("b", 1, "timing"), error=MegaMoETimeout("the time limit has passed"))
    session, rows, _ = run_session(processes, tmp_path, time_limit=0.0)
    assert rows == [("a", 1), ("a", 2)]
    assert "left 2 rows out" in session.problems[0]


# The baseline


@pytest.fixture
def plain_baseline(monkeypatch):
    monkeypatch.setattr(baseline, "grouped_gemm", plain_grouped_gemm)
    monkeypatch.setattr(baseline, "compiled", lambda function: function)


@pytest.mark.parametrize("tokens", [1, 37])
def test_the_baseline_computes_the_layer(plain_baseline, tokens):
    assert baseline_error(OneRank(), tokens) < 0.08


def test_the_baseline_refuses_tokens_without_experts(plain_baseline):
    case = Case("micro", MICRO, 8, "masked")
    inputs = make_inputs(MICRO, route(case, 1, 0), [8], 0, 0, CPU)
    layer = baseline.PyTorch(OneRank(), MICRO, random_experts(MICRO, range(MICRO.experts)), 8)
    with pytest.raises(InputError, match="topk_ids"):
        layer.calls(inputs)


def test_row_wise_weights_are_the_block_scaled_ones():
    weights = random_experts(MICRO, range(1))
    values, scale = baseline.row_wise_weights(weights.w2, weights.w2_scale)
    exact = baseline.dequantize_fp8_block(weights.w2, weights.w2_scale)
    assert torch.allclose(values.float() * scale[:, :, None], exact, atol=exact.abs().max().item() / 16)
