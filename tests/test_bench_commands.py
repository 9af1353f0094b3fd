"""``megagen run``, ``bench`` and ``tune``: the work of their processes and what they print, without a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch
from bench_fakes import MICRO, FakeLayer, FakeTimer, OneRank
from test_bench import CEILINGS, make_row
from typer.testing import CliRunner

from megagen import tuning
from megagen.arch import Arch
from megagen.bench import processes, session, tune, verify
from megagen.bench.ceilings import _READ_SOURCE
from megagen.cli import app
from megagen.compiler import compile
from megagen.contract import Contract
from megagen.inspection.plot import plot_bench
from megagen.planning import make_plan

CONTRACT = Contract(MICRO, 1, 64)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Some GPU")


def invoke(*arguments, code=0):
    # The tables adapt to the terminal's width, whatever that is here.
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.output}\n{result.exception!r}"
    return result


def replay(monkeypatch, *messages, module=processes, check=lambda *arguments: None):
    """Let a command see these messages of its processes."""

    def run_ranks(work, argument, ranks, **limits):
        check(argument, ranks)
        yield from messages

    monkeypatch.setattr(module, "run_ranks", run_ranks)


@pytest.mark.parametrize("command", [["run", "--model", "micro"], ["bench"], ["tune", "--model", "micro"]])
def test_without_a_gpu_the_exit_code_is_3(command):
    assert "no GPU" in invoke(*command, code=3).output


# run


@pytest.fixture
def fake_layers(monkeypatch):
    class Group(list):
        def __init__(self, shape, *, ranks, max_tokens, **options):
            super().__init__(FakeLayer(shape, max_tokens=max_tokens, **options) for _ in range(ranks))

        def load_weights(self, weights):
            for layer in self:
                layer.load_weights(*weights)

        def prepare(self):
            pass

        def check(self):
            pass

        def __call__(self, x, ids, weights, out):
            for layer, *arguments in zip(self, x, ids, weights, out):
                layer(*arguments)

    monkeypatch.setattr(FakeLayer, "local_group", Group, raising=False)
    monkeypatch.setattr(verify, "MegaMoE", FakeLayer)
    monkeypatch.setattr(verify, "Timer", FakeTimer)


@pytest.mark.parametrize("counts, local", [((9,), False), ((0,), False), ((3, 0, 5, 8), True)])
def test_run_compares_with_the_reference(fake_layers, counts, local):
    ranks = OneRank()
    verify.verify(ranks, verify.RunJob(Contract(MICRO, len(counts), 64), (counts,), local=local))
    (message,) = ranks.of("row")
    assert message["row"]["right"]
    assert message["row"]["tokens"] == list(counts)
    assert message["row"]["us"] == 100.0
    json.dumps(message["row"])


def test_run_sees_a_wrong_result(fake_layers, monkeypatch):
    monkeypatch.setattr(FakeLayer, "__call__", lambda self, x, ids, weights, out: out.zero_())
    ranks = OneRank()
    verify.verify(ranks, verify.RunJob(CONTRACT, ((9,),)))
    (message,) = ranks.of("row")
    assert not message["row"]["right"]


RUN_ROW = {
    "tokens": [64, 64],
    "plans": ["a-plan"],
    "us": 12.5,
    "whole": 0.001,
    "worst_row": 0.002,
    "float32": 0.02,
    "same_bits": True,
    "right": True,
}


def test_run_prints_a_table_and_its_exit_code_is_the_result(two_gpus, monkeypatch):
    def check(job, ranks):
        assert ranks == job.contract.ranks == 2
        assert not job.local
        assert job.counts == ((64, 64),)

    replay(monkeypatch, {"kind": "row", "row": RUN_ROW}, check=check)
    assert "a-plan" in invoke("run", "--model", "micro", "--ranks", 2).output
    replay(monkeypatch, {"kind": "row", "row": {**RUN_ROW, "right": False}})
    record = json.loads(invoke("run", "--model", "micro", "--ranks", 2, "--json", code=1).stdout)
    assert record["rows"][0]["right"] is False


def test_more_ranks_than_gpus_share_one(two_gpus, monkeypatch):
    def check(job, ranks):
        assert (ranks, job.contract.ranks, job.local) == (1, 4, True)

    replay(monkeypatch, {"kind": "row", "row": RUN_ROW}, check=check)
    invoke("run", "--model", "micro", "--ranks", 4, "--tokens", "3,0,7,1")


def test_run_refuses_more_tokens_than_fit(two_gpus):
    assert "tokens=65" in invoke("run", "--model", "micro", "--max-tokens", 64, "--tokens", 65, code=2).output


# bench


def bench_messages(**changes):
    row = make_row(ranks=2, tokens=64, ours=160.0, peer=250.0, **changes)
    case = session.Case("flash8", None, 64)
    return (
        {"kind": "ceilings", "values": CEILINGS, "problem": ""},
        {"kind": "doing", "case": case, "step": "timing"},
        {"kind": "row", "case": case, "row": row},
    )


def test_bench_writes_json_and_plots(two_gpus, monkeypatch, tmp_path):
    replay(monkeypatch, *bench_messages(), module=session)
    monkeypatch.setattr(session.Session, "_take_row", keep_all)
    arguments = ["bench", "--shapes", "flash8", "--tokens", "64", "--contenders", "megagen,pytorch"]
    output = invoke(*arguments, "--out", tmp_path / "out").output
    assert "0.640" in output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"bench-ep2.{e}" for e in ("json", "png", "svg")
    }
    record = json.loads((tmp_path / "out" / "bench-ep2.json").read_text())
    assert record["schema_version"] == 1
    assert record["summary"]["all_met"]
    assert record["machine"]["gpu"] == "Some GPU"


def keep_all(self, job, case, row):
    """The rows that the tests replay are of no case of the job."""
    self.rows.append(row)
    return session.replace(job, cases=())


def test_bench_fails_on_wrong_results(two_gpus, monkeypatch):
    *others, last = bench_messages()
    last["row"]["results"]["megagen"]["kernel"]["right"] = False
    replay(monkeypatch, *others, last, module=session)
    monkeypatch.setattr(session.Session, "_take_row", keep_all)
    invoke("bench", "--shapes", "flash8", "--tokens", "64", "--contenders", "megagen,pytorch", code=1)


@pytest.mark.parametrize(
    "arguments, code, named",
    [
        (["--ranks", 3], 3, "ranks=3"),
        (["--tokens", "64", "--max-tokens", 63], 2, "max_tokens=63"),
        (["--contenders", "nobody"], 2, "nobody"),
        (["--samples", 0], 2, "samples=0"),
        (["--routing", "circular"], 2, "circular"),
    ],
)
def test_bench_refuses_bad_input(two_gpus, arguments, code, named):
    assert named in invoke("bench", "--shapes", "micro", *arguments, code=code).output


def test_plots_need_rows_only(tmp_path):
    rows = [make_row(tokens=tokens) for tokens in (8, 64)] + [make_row("pro8", results={})]
    for ceilings in (CEILINGS, None):
        files = plot_bench({"rows": rows, "ceilings": ceilings, "ranks": 2}, tmp_path / "a.b")
        assert [file.name for file in files] == ["a.b.png", "a.b.svg"]
        assert all(file.stat().st_size > 1000 for file in files)


def test_a_legend_names_what_was_measured_of_its_model(tmp_path, monkeypatch):
    from matplotlib import figure

    legends = []
    monkeypatch.setattr(
        figure.Figure,
        "savefig",
        lambda self, *_, **__: legends.append(
            [[text.get_text() for text in axis.legend_.get_texts()] for axis in self.axes if axis.legend_]
        ),
    )
    result = make_row()["results"]["megagen"]
    rows = [make_row("flash8", results={"megagen": result}), make_row("pro8")]
    plot_bench({"rows": rows, "ceilings": None, "ranks": 2}, tmp_path / "plot")
    alone, both = legends[0]
    assert alone == ["megagen (kernel)"]
    assert [label.split()[0] for label in both] == list(make_row()["results"])


def test_the_kernel_that_reads_memory_compiles():
    kernel = compile(_READ_SOURCE, "sm_90a", name="read_memory.cu")
    assert kernel.entry == "read_memory"
    assert kernel.ptx.count("ld.global.v4") >= 8


# tune


@pytest.fixture
def fake_buffer(monkeypatch):
    class Buffer:
        gpu = SimpleNamespace(name="Some GPU", arch=Arch.get("sm90"), sms=132)
        resets = 0

        def __init__(self, shape, group, max_tokens):
            pass

        def reset(self):
            Buffer.resets += 1

    def call_of(layer, inputs):
        output = torch.zeros(len(inputs.x), 4)
        value = float(layer.forced.block_m == 32)  # one candidate computes something else
        return verify.Call("kernel", lambda: output.fill_(torch.nan), lambda: output.fill_(value), output)

    monkeypatch.setattr(tune, "SymmBuffer", Buffer)
    monkeypatch.setattr(tune, "MegaMoE", FakeLayer)
    monkeypatch.setattr(tune, "Timer", FakeTimer)
    monkeypatch.setattr(tune, "kernel_call", call_of)
    return Buffer


def test_tune_times_every_candidate_and_drops_what_differs(fake_buffer):
    ranks = OneRank()
    tune.tune(ranks, tune.TuneJob(CONTRACT, (8, 64)))
    assert ranks.of("setup") == [{"kind": "setup", "gpu": "Some GPU", "arch": "sm90", "sms": 132}]
    for message in ranks.of("tuned"):
        assert not message["problem"]
        results = message["results"]
        assert [result["us"] for result in results] == [100.0 + i for i in range(len(results))]
        rules = make_plan(CONTRACT, "sm90", message["tokens"], sms=132)
        assert results[0]["plan"] == rules.name
        same = {result["plan"]: result["same_bits"] for result in results}
        differ = [name for name in same if ("-m32-" in name) != (rules.block_m == 32)]
        assert all(not same[name] for name in differ)
        assert any(not kept for kept in same.values())


def test_tune_goes_on_after_an_error(fake_buffer, monkeypatch):
    monkeypatch.setattr(tune.Tuner, "_compare", lambda self, tokens: 1 // (tokens - 8))
    ranks = OneRank()
    tune.tune(ranks, tune.TuneJob(CONTRACT, (8, 64)))
    assert "ZeroDivisionError" in ranks.of("tuned")[0]["problem"]
    assert fake_buffer.resets == 1
    assert len(ranks.of("tuned")) == 2


def result_of(tokens, us, same_bits=True, **choice):
    plan = make_plan(CONTRACT, "sm90", tokens, sms=132, **choice)
    return {"choice": choice, "plan": plan.name, "us": us, "same_bits": same_bits}


def test_tune_keeps_the_fastest_that_is_right(two_gpus, monkeypatch):
    wrong = result_of(64, 1.0, same_bits=False, block_m=16)
    results = [result_of(64, 50.0), wrong, result_of(64, 40.0, block_m=128)]
    setup = {"kind": "setup", "gpu": "Some GPU", "arch": "sm90", "sms": 132}
    tuned = {"kind": "tuned", "tokens": 64, "results": results, "problem": ""}
    replay(monkeypatch, setup, tuned)
    layer = ["--model", "micro", "--max-tokens", 64]
    output = invoke("tune", *layer, "--tokens", 64).output
    assert "1.250" in output
    assert "WRONG" in output
    assert tuning.load("Some GPU", CONTRACT, "sm90", 132) == {64: {"block_m": 128}}

    failed = {"kind": "tuned", "tokens": 64, "results": [], "problem": "rank 0: broke"}
    replay(monkeypatch, setup, failed)
    assert "rank 0: broke" in invoke("tune", *layer, "--tokens", 64, code=1).output
    assert tuning.load("Some GPU", CONTRACT, "sm90", 132) == {64: {"block_m": 128}}
