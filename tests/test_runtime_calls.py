"""Layer calls against a fake driver: what is launched, with which parameters, and what errors do."""

import pytest
import torch
from fake_gpu import FakeDriver, FakeStream, call_arguments, fake

from megagen import companion, errors
from megagen.contract import Contract
from megagen.planning import make_plan
from megagen.protocol import STATUS_FIELDS, Awaited, RoleId
from megagen.runtime import layer, symmetric
from megagen.runtime.layer import MegaMoE
from megagen.runtime.symmetric import SymmBuffer
from megagen.shape import MoEShape
from megagen.weights import random_experts

__all__ = ["fake"]

TINY = MoEShape.preset("tiny")
CONTRACT = Contract(TINY, ranks=1, max_tokens=64)
BF16 = torch.bfloat16
STATUS_WORDS = {field.name: index for index, field in enumerate(STATUS_FIELDS)}


@pytest.fixture
def moe(fake: FakeDriver) -> MegaMoE:
    made = MegaMoE(TINY, max_tokens=64, num_sms=7, timeout=2.0)
    made.load_weights(*random_experts(TINY, range(8)))
    return made


def test_a_call_launches_companion_and_kernel(moe: MegaMoE, fake: FakeDriver) -> None:
    x, ids, weights = call_arguments(5)
    y = moe(x, ids, weights)
    quantize, kernel = fake.launches
    assert y.shape == (5, 512) and y.dtype == BF16
    assert not quantize.cooperative and quantize.grid == companion.quantize_ctas(512, 5, 132)
    q = quantize.params
    assert (q.x, q.x_sf, q.row_bytes, q.topk_ids, q.topk_weights) == (
        x.data_ptr(),
        0,
        1024,
        ids.data_ptr(),
        weights.data_ptr(),
    )
    assert (q.num_tokens, q.num_tokens_ptr, q.ids_are_int64, q.weights_are_bf16) == (5, 0, 1, 0)
    plan, p = moe.launcher_for(5).plan, kernel.params
    assert (kernel.grid, kernel.threads, kernel.shared) == (7, plan.threads, plan.smem.size)
    assert kernel.cooperative
    assert (p.output, p.num_tokens, p.num_tokens_ptr) == (y.data_ptr(), 5, 0)
    assert (p.timeout_ns, p.rank, p.offsets) == (2_000_000_000, 0, 0)
    assert p.symm == q.symm == moe.buffer.symm_address
    assert p.w13 != 0 and p.w2_sf != 0


def test_inputs_in_place_need_no_copy(moe: MegaMoE, fake: FakeDriver) -> None:
    views = moe.inputs(3)
    moe((views.x, views.x_sf), views.topk_ids, views.topk_weights)
    assert [launch.cooperative for launch in fake.launches] == [True]
    moe((views.x, views.x_sf), views.topk_ids.clone(), views.topk_weights)
    assert [launch.cooperative for launch in fake.launches] == [True, False, True]


def test_a_rank_without_tokens_still_launches(moe: MegaMoE, fake: FakeDriver) -> None:
    assert moe(*call_arguments(0)).shape == (0, 512)
    assert [launch.cooperative for launch in fake.launches] == [True]


def test_num_tokens_on_host_and_device(moe: MegaMoE, fake: FakeDriver) -> None:
    moe(*call_arguments(8), num_tokens=3)
    assert [launch.params.num_tokens for launch in fake.launches] == [3, 3]
    fake.launches.clear()
    count = torch.tensor([3], dtype=torch.int32)
    moe(*call_arguments(8), num_tokens=count)
    counts = [(launch.params.num_tokens, launch.params.num_tokens_ptr) for launch in fake.launches]
    assert counts == [(8, count.data_ptr())] * 2


def test_token_count_selects_the_plan(moe: MegaMoE, fake: FakeDriver) -> None:
    moe.prepare()
    assert len({moe.launcher_for(tokens).plan.block_m for tokens in (1, 64)}) > 1
    for tokens in (1, 64):
        moe(*call_arguments(tokens))
        assert fake.launches[-1].shared == moe.launcher_for(tokens).plan.smem.size


def test_a_call_goes_to_the_stream_that_is_current_then(
    moe: MegaMoE, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (0x50, 0x60):
        monkeypatch.setattr(layer, "current_stream", {0: stream}.get)
        moe(*call_arguments(1))
    assert [launch.stream for launch in fake.launches] == [0x50, 0x50, 0x60, 0x60]
    assert moe.buffer.last_stream == 0x60


def test_a_grid_fits_the_tokens_of_its_call(moe: MegaMoE, fake: FakeDriver) -> None:
    for tokens in (64, 1, 1, 64):
        moe(*call_arguments(tokens))
    grids = [launch.grid for launch in fake.launches if not launch.cooperative]
    assert grids == [companion.quantize_ctas(512, tokens, 132) for tokens in (64, 1, 1, 64)]


def test_compiled_graphs_take_a_call_as_one_operator(moe: MegaMoE, fake: FakeDriver) -> None:
    moe.prepare()
    compiled = torch.compile(lambda *inputs: moe(*inputs) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(*call_arguments(4)).shape == (4, 512)
    assert [launch.cooperative for launch in fake.launches] == [False, True]


def test_weights_are_loaded_in_place_again(moe: MegaMoE, fake: FakeDriver) -> None:
    moe(*call_arguments(1))
    before, first = fake.launches[-1].params.w13, moe._weights.w13.clone()
    moe.load_weights(*random_experts(TINY, range(8), seed=1))
    moe(*call_arguments(1))
    assert fake.launches[-1].params.w13 == before
    assert not torch.equal(moe._weights.w13, first)


def test_weights_in_kernel_layout_are_used_as_they_are(moe: MegaMoE, fake: FakeDriver) -> None:
    other = MegaMoE(TINY, buffer=moe.buffer)
    other.use_weights(moe._weights)
    other(*call_arguments(1))
    assert fake.launches[-1].params.w13 == moe._weights.w13.data_ptr()
    with pytest.raises(errors.InputError, match="w2 has shape"):
        other.use_weights(moe._weights._replace(w2=moe._weights.w2[:4]))


def test_errors_stop_the_next_call_until_reset(moe: MegaMoE, fake: FakeDriver) -> None:
    moe(*call_arguments(1))
    launched = len(fake.launches)
    moe.buffer.status.words[STATUS_WORDS["role"]] = RoleId.MATH
    moe.buffer.status.words[STATUS_WORDS["code"]] = Awaited.FULL_STAGE
    for act in (moe.check, lambda: moe(*call_arguments(1))):
        with pytest.raises(errors.MegaMoETimeout, match="pipeline stage"):
            act()
    assert len(fake.launches) == launched
    moe.buffer.symm_view("flags").fill_(3)
    moe.reset()
    assert moe.buffer.symm_view("flags").abs().sum() == 0
    moe.check()
    moe(*call_arguments(1))
    assert len(fake.launches) == launched + 2


def test_check_sees_a_peers_abort(moe: MegaMoE) -> None:
    moe.check()
    moe.buffer.symm_view("control")[0] = 1
    with pytest.raises(errors.PeerAborted, match="rank 0"):
        moe.check()


def test_check_notices_a_grid_that_never_starts(moe: MegaMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    moe(*call_arguments(1))
    monkeypatch.setattr(symmetric, "START_MARGIN_S", 0.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: FakeStream(None))
    moe.timeout = 0.02
    with pytest.raises(errors.MegaMoETimeout, match="7 CTAs fit"):
        moe.check()


def test_a_tuple_must_be_values_and_scale_factors(moe: MegaMoE) -> None:
    x, ids, weights = call_arguments(1)
    with pytest.raises(errors.InputError, match="x is a tuple of 1"):
        moe((x,), ids, weights)


def test_calls_before_weights_are_refused(fake: FakeDriver) -> None:
    with pytest.raises(errors.InputError, match="load_weights"):
        MegaMoE(TINY, max_tokens=8)(*call_arguments(1))


def test_layers_share_a_buffer_of_their_shape_only(fake: FakeDriver) -> None:
    buffer = SymmBuffer(TINY, max_tokens=64)
    first, second = MegaMoE(TINY, buffer=buffer), MegaMoE(TINY, buffer=buffer, clamp=7.0)
    assert first.buffer is second.buffer
    assert first.memory_bytes()["symmetric"] == buffer.contract.symm.size
    with pytest.raises(errors.InputError, match="buffer is for"):
        MegaMoE(MoEShape(512, 512, 16, 2), buffer=buffer)
    with pytest.raises(errors.InputError, match="max_tokens=8"):
        MegaMoE(TINY, buffer=buffer, max_tokens=8)


def test_a_plan_that_needs_more_workspace_is_refused(fake: FakeDriver) -> None:
    small = SymmBuffer(TINY, max_tokens=8)
    larger = make_plan(Contract(TINY, 1, 640))
    with pytest.raises(errors.InputError, match=larger.name):
        small.require_room(larger)


@pytest.mark.parametrize("num_sms", [0, 133])
def test_num_sms_is_checked(fake: FakeDriver, num_sms: int) -> None:
    with pytest.raises(errors.InputError, match=f"num_sms={num_sms}"):
        MegaMoE(TINY, max_tokens=8, num_sms=num_sms)


def test_forced_plans_serve_every_count(fake: FakeDriver) -> None:
    plan = make_plan(CONTRACT, block_m=32)
    moe = MegaMoE(TINY, max_tokens=64, plan=plan)
    assert {moe.launcher_for(tokens).plan.hash for tokens in (0, 1, 64)} == {plan.hash}
    with pytest.raises(errors.PlanError, match="contract"):
        MegaMoE(TINY, max_tokens=32, plan=plan)


def test_local_group_maps_ranks_into_each_other(fake: FakeDriver) -> None:
    fake.ranks = 4
    group = MegaMoE.local_group(TINY, ranks=4, max_tokens=16)
    group.load_weights(random_experts(TINY, range(8)))
    calls = [call_arguments(tokens) for tokens in (3, 0, 16, 1)]
    outputs = group(*zip(*calls))
    assert [len(y) for y in outputs] == [3, 0, 16, 1]
    launched = [launch for launch in fake.launches if launch.cooperative]
    assert [launch.params.rank for launch in launched] == [0, 1, 2, 3]
    assert [launch.grid for launch in launched] == [33] * 4
    bases = [buffer.symm_address for buffer in group.buffers]
    assert group.buffers[2].offsets == [base - bases[2] for base in bases]
    group.check()


def test_operator_shows_compiled_graphs_the_right_output() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megagen.runtime.ops import moe_forward

    with FakeTensorMode():
        x, ids, weights = call_arguments(4)
        y = moe_forward(x, None, ids, weights, None, None, 0)
    assert y.shape == (4, 512) and y.dtype == BF16
