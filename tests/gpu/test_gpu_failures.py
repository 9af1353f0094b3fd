"""What goes wrong gets a name, in time, and can be recovered from."""

import time

import pytest
import torch
from gpu_cases import make_inputs, run_group

from megagen import MegaMoE, MegaMoETimeout, MoEShape, PeerAborted, compiler
from megagen.protocol import Field
from megagen.runtime import symmetric
from megagen.runtime.driver import Gpu
from megagen.runtime.launch import Launcher
from megagen.runtime.local import LocalGroup
from megagen.weights import ExpertWeights, random_experts

SHAPE = MoEShape.preset("tiny")
SHORT_S = 0.3


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return random_experts(SHAPE, range(SHAPE.experts), device="cuda")


def make_group(weights: ExpertWeights, ranks: int, **options: object) -> LocalGroup:
    group = MegaMoE.local_group(SHAPE, ranks=ranks, max_tokens=64, timeout=SHORT_S, **options)
    group.load_weights(weights)
    group.prepare()
    return group


@pytest.mark.parametrize(("ranks", "stalled"), [(2, 1), (2, 0), (4, 2)])
def test_a_stalled_rank_is_named(weights: ExpertWeights, ranks: int, stalled: int) -> None:
    group = make_group(weights, ranks)
    inputs = make_inputs(SHAPE, 16 * ranks)
    parts = inputs.deal([16] * ranks)
    expected = run_group(group, parts)
    others = [rank for rank in range(ranks) if rank != stalled]
    start = time.monotonic()
    group(*zip(*parts), ranks=others)
    with pytest.raises(MegaMoETimeout, match=rf"routing counts of rank {stalled}\b"):
        group.check()
    assert time.monotonic() - start < SHORT_S + 5
    with pytest.raises((MegaMoETimeout, PeerAborted)):
        group[others[0]].check()
    with pytest.raises((MegaMoETimeout, PeerAborted)):
        group(*zip(*parts))
    with pytest.raises(PeerAborted, match="rank"):
        group[stalled].check()
    group.reset()
    assert torch.equal(run_group(group, parts), expected)


def test_a_rank_that_comes_late_but_in_time_is_waited_for(weights: ExpertWeights) -> None:
    group = MegaMoE.local_group(SHAPE, ranks=2, max_tokens=64, timeout=5.0)
    group.load_weights(weights)
    group.prepare()
    inputs = make_inputs(SHAPE, 32)
    parts = inputs.deal([16, 16])
    expected = run_group(group, parts)
    calls = [layer.check_call(*part) for layer, part in zip(group, parts)]
    for stream in group.streams:
        stream.wait_stream(torch.cuda.current_stream())
    group[0].queue(calls[0][1], group.streams[0].cuda_stream)
    time.sleep(0.5)
    group[1].queue(calls[1][1], group.streams[1].cuda_stream)
    group.check()
    for stream in group.streams:
        torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(torch.cat([output for output, _ in calls]), expected)


OCCUPY = """
struct Params {
    unsigned long long stop;  // address of an int
    unsigned long long limit_ns;
};

__device__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

extern "C" __global__ void occupy(const __grid_constant__ Params p) {
    const unsigned long long start = nanoseconds();
    while (*reinterpret_cast<volatile int*>(p.stop) == 0 && nanoseconds() - start < p.limit_ns) {
    }
}
"""


class Occupier:
    """A kernel that holds one SM inside a ``with``: our CTAs take nearly all shared memory of theirs."""

    def __init__(self, gpu: Gpu) -> None:
        fields = (Field("stop", "u64", ""), Field("limit_ns", "u64", ""))
        kernel = compiler.compile(OCCUPY, gpu.arch.compile_target, name="occupy.cu")
        self._kernel = Launcher(kernel, fields, gpu, threads=1024, shared_bytes=48 * 1024)
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._kernel.params.set("stop", self._stop.data_ptr())
        self._kernel.params.set("limit_ns", 30_000_000_000)
        self._stream = torch.cuda.Stream()

    def __enter__(self) -> None:
        self._stop.zero_()
        self._kernel.launch(self._stream.cuda_stream)
        time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._stop.fill_(1)
        self._stream.synchronize()


@pytest.fixture
def moe(weights: ExpertWeights) -> MegaMoE:
    layer = MegaMoE(SHAPE, max_tokens=64, timeout=SHORT_S)
    layer.load_weights(*weights)
    layer.prepare()
    return layer


def test_a_grid_that_cannot_start_is_noticed(moe: MegaMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of all SMs never becomes resident beside another kernel, and reports nothing."""
    monkeypatch.setattr(symmetric, "START_MARGIN_S", 0.5)
    inputs = make_inputs(SHAPE, 64)
    expected = moe(*inputs)
    moe.check()
    with Occupier(moe.buffer.gpu):
        late = moe(*inputs)
        with pytest.raises(MegaMoETimeout, match="has not started"):
            moe.check()
        with pytest.raises(MegaMoETimeout, match="can't be reset"):
            moe.reset()
    moe.check()  # it has started after all
    assert torch.equal(late, expected)


def test_num_sms_leaves_room_for_other_kernels(moe: MegaMoE) -> None:
    leaving_room = MegaMoE(SHAPE, buffer=moe.buffer, timeout=SHORT_S, num_sms=moe.num_sms - 1)
    assert moe._weights is not None
    leaving_room.use_weights(moe._weights)
    inputs = make_inputs(SHAPE, 64)
    expected = leaving_room(*inputs)
    leaving_room.check()
    occupier = Occupier(moe.buffer.gpu)
    with occupier:
        output = leaving_room(*inputs)
        event = torch.cuda.current_stream().record_event()
        deadline = time.monotonic() + 5
        while not event.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        finished = event.query()
    assert finished
    assert torch.equal(output, expected)
