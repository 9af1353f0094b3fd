"""What is timed, and in which order: the sample itself, and the calls of the contenders, without a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch
from bench_fakes import CPU, MICRO, OneRank

from megagen.bench import deep_gemm, timing
from megagen.bench.cases import Case, make_inputs, route
from megagen.bench.contenders import end_to_end_call, kernel_call
from megagen.bench.timing import Call, Timer
from megagen.runtime.symmetric import Inputs as InputViews
from megagen.weights import random_experts

TOKENS, CAPACITY = 5, 8


@pytest.fixture
def inputs():
    return make_inputs(MICRO, route(Case("micro", MICRO, TOKENS), 1, 0), [TOKENS], 0, 0, CPU)


# The sample


@pytest.fixture
def steps(monkeypatch):
    """The names of what a sample does, in order; ``steps.late`` makes the host too slow."""
    done = SimpleNamespace(order=[], late=False)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.order.append("event")

        def query(self):
            return done.late

        def elapsed_time(self, end):
            return 0.25

    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.order.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.order.append("sleep"), raising=False)
    monkeypatch.setattr(Timer, "_meet", lambda self: done.order.append("meet"))
    return done


def a_call(steps, output=None, host_bound=False):
    output = torch.zeros(1) if output is None else output
    note = steps.order.append
    return Call("kernel", lambda: note("prepare"), lambda: note("run"), output, host_bound)


def test_a_sample_times_the_call_alone(steps):
    sample = Timer(OneRank()).sample(a_call(steps))
    before = ["synchronize", "meet", "prepare", "sleep", "meet"]
    assert steps.order == [*before, "event", "run", "event", "synchronize"]
    assert sample == (250.0, False)


def test_a_slow_host_is_noticed_unless_the_call_waits_itself(steps):
    steps.late = True
    assert Timer(OneRank()).sample(a_call(steps)).late
    assert not Timer(OneRank()).sample(a_call(steps, host_bound=True)).late


def test_calls_take_turns_and_changing_bits_are_noticed(steps):
    count = torch.zeros(1)
    steady = a_call(steps)
    changing = Call("kernel", lambda: None, lambda: count.add_(1), count)
    first, second = Timer(OneRank(), samples=3, warm_up=2).measure([steady, changing])
    assert (first.us, len(first.samples_us), first.same_bits) == (250.0, 3, True)
    assert not second.same_bits
    assert steps.order.count("run") == 5


# The calls


class FakeMegaMoE:
    """A layer that records what it was called with."""

    def __init__(self):
        self.place = InputViews(
            torch.zeros(CAPACITY, MICRO.hidden, dtype=torch.float8_e4m3fn),
            torch.zeros(CAPACITY, MICRO.hidden // 128),
            torch.zeros(CAPACITY, MICRO.top_k, dtype=torch.int32),
            torch.zeros(CAPACITY, MICRO.top_k),
        )

    def inputs(self, tokens):
        return InputViews(*(view[:tokens] for view in self.place))

    def __call__(self, x, topk_ids, topk_weights, out):
        self.called = (x, topk_ids, topk_weights, out)


def test_the_kernel_call_has_its_inputs_in_place(inputs):
    layer = FakeMegaMoE()
    call = kernel_call(layer, inputs)
    call.prepare()
    assert call.output.isnan().all()
    call.run()
    (x, x_sf), ids, weights, out = layer.called
    assert out is call.output
    for given, place, values in zip((x, x_sf, ids, weights), layer.place, inputs[1:]):
        assert given.data_ptr() == place.data_ptr()
        assert torch.equal(given.view(torch.uint8), values.view(torch.uint8))


def test_the_end_to_end_call_finds_nothing_in_place(inputs):
    layer = FakeMegaMoE()
    kernel_call(layer, inputs).prepare()
    call = end_to_end_call(layer, inputs)
    call.prepare()
    assert not layer.place.x.float().any()
    call.run()
    assert layer.called[0] is inputs.x


@pytest.fixture
def package(monkeypatch):
    """A stand-in for the peer's package with the functions that its wheel has."""
    calls = []
    buffer = SimpleNamespace(
        x=torch.ones(CAPACITY, MICRO.hidden).to(torch.float8_e4m3fn),
        x_sf=torch.zeros(CAPACITY, MICRO.hidden // 128),
        topk_idx=torch.zeros(CAPACITY, MICRO.top_k, dtype=torch.int64),
        topk_weights=torch.zeros(CAPACITY, MICRO.top_k),
        buffer=torch.zeros(77, dtype=torch.int8),
    )
    fake = SimpleNamespace(
        get_symm_buffer_for_mega_moe=lambda *arguments: calls.append(arguments[1:]) or buffer,
        transform_weights_for_mega_moe_sm90=lambda l1, l2: (("interleaved", l1[1]), l2),
        fp8_mega_moe=lambda *arguments: calls.append(("layer", *arguments)),
        mega_moe_pre_dispatch_sm90=lambda *arguments: calls.append(("quantize", *arguments)),
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", fake)
    return SimpleNamespace(calls=calls, buffer=buffer)


def test_the_peer_gets_the_same_inputs(package, inputs):
    weights = random_experts(MICRO, range(MICRO.experts))
    peer = deep_gemm.DeepGemm(OneRank(), MICRO, weights, CAPACITY)
    assert package.calls.pop() == (
        MICRO.experts,
        CAPACITY,
        MICRO.top_k,
        MICRO.hidden,
        MICRO.intermediate,
    )
    assert peer.memory_bytes() == 77
    kernel, end_to_end = peer.calls(inputs)

    kernel.prepare()
    buffer = package.buffer
    assert torch.equal(buffer.x[:TOKENS].view(torch.uint8), inputs.x_q.view(torch.uint8))
    assert torch.equal(buffer.topk_idx[:TOKENS], inputs.topk_ids.long())
    assert (buffer.topk_idx[TOKENS:] == -1).all()
    assert kernel.output.isnan().all()
    kernel.run()
    name, y, w13, w2, given = package.calls.pop()
    assert (name, y is kernel.output, given is buffer) == ("layer", True, True)
    assert w13[0] == "interleaved"
    assert w2[0] is weights.w2

    end_to_end.prepare()
    assert not buffer.x.float().any()
    end_to_end.run()
    assert [call[0] for call in package.calls] == ["quantize", "layer"]
    assert package.calls[0][1] is inputs.x
    assert package.calls[0][-1] == TOKENS
