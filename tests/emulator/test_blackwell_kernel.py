"""The Blackwell kernels on the emulator: stratified seeds, and the corners that no seed reaches.

They have run nowhere else. ``megagen emulate --arch sm100 --seeds 0:60`` runs more.
"""

from dataclasses import replace

import pytest
import torch
from judged import judge_changed, require_right

from megagen.contract import Contract
from megagen.emulator.cases import Case, expert_weights, prepare, run
from megagen.emulator.exploration import Exploration
from megagen.emulator.layer import EmulatedLayer, Kernel
from megagen.errors import DataRace, EmulatorError, InputError
from megagen.planning import make_plan
from megagen.planning.sm100 import LADDER, Sm100Plan
from megagen.render import render
from megagen.shape import MoEShape
from scripts.mutants import SCENARIOS, Bench, Scenario, variants

CI_SEEDS = range(14)
RING_SEEDS = (364, 464)  # their pulled rows go around a ring several times
MICRO = MoEShape.preset("micro")
EXPLORATION = Exploration.of("sm100")


def contract(shape: MoEShape = MICRO, ranks: int = 2, max_tokens: int = 16, **options) -> Contract:
    return Contract(shape, ranks, max_tokens, "mxfp8_mxfp4", **options)


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_seed(seed: int) -> None:
    require_right(EXPLORATION.case(seed))


@pytest.mark.parametrize("seed", RING_SEEDS)
def test_seed_with_a_ring_in_one_launch(seed: int) -> None:
    case = EXPLORATION.case(seed)
    assert all(plan.is_ring for plan in case.plans)
    require_right(replace(case, launches=1))


def test_seeds_meet_every_tile_and_odd_sm_counts() -> None:
    points = [EXPLORATION.case(seed) for seed in range(EXPLORATION.block_size)]
    assert {plan.block_m for case in points for plan in case.plans} == set(LADDER)
    assert {sms % 2 for case in points for sms in case.sms} == {0, 1}


@pytest.mark.parametrize("block_m", LADDER)
def test_the_same_bits_whatever_tile_sms_and_ranks(block_m: int) -> None:
    """Outputs of the same tokens: one rank with a pair, against three ranks with this tile."""
    shape = MoEShape(hidden=384, intermediate=256, experts=6, top_k=3)
    tokens = (11, 0, 9)
    alone = make_plan(contract(shape, 1, 20), "sm100", 20, sms=2, block_m=64)
    plans = tuple(make_plan(contract(shape, 3, 16), "sm100", 16, sms=4, block_m=block_m) for _ in tokens)
    cases = (Case((alone,), (2,), (20,), seed=5), Case(plans, (4, 2, 3), tokens, seed=5))
    one, three = ([torch.cat(result.outputs) for result in run(case, prepare(case))] for case in cases)
    assert torch.equal(one[0].view(torch.int16), three[0].view(torch.int16))


@pytest.mark.parametrize("routing", ["repeated", "none", "one-expert", "out-of-range", "empty-experts"])
def test_routing(routing: str) -> None:
    plan = make_plan(contract(), "sm100", 16, sms=4)
    require_right(Case((plan,) * 2, (4, 4), (16, 7), routing))


@pytest.mark.parametrize("clamp, activation", [(0.5, "fast"), (None, "exact")])
def test_activation(clamp: float | None, activation: str) -> None:
    plan = make_plan(contract(clamp=clamp, activation=activation), "sm100", 16, sms=2)
    require_right(Case((plan,) * 2, (2, 2), (16, 7)))


def test_each_rank_another_plan_and_three_launches_on_one_buffer() -> None:
    shape = replace(MICRO, experts=8)
    plans = tuple(
        make_plan(contract(shape, 4, 24), "sm100", 24, sms=4, block_m=tile) for tile in (192, 16, 96, 32)
    )
    require_right(Case(plans, (2, 6, 4, 5), (24, 0, 7, 13), launches=3))


def test_more_k_blocks_than_stages_and_more_tiles_than_slots() -> None:
    shape = MoEShape(hidden=640, intermediate=512, experts=2, top_k=1)
    plan = make_plan(contract(shape, 1, 40), "sm100", 40, sms=2, block_m=16)
    require_right(Case((replace(plan, stages=2),), (2,), (40,), "one-expert"))


def test_a_b300_runs_the_same_kernel() -> None:
    plan = make_plan(contract(), "sm103", 16, sms=2)
    require_right(Case((plan,) * 2, (2, 2), (5, 6)))


@pytest.mark.parametrize("top_k", [1, 32])
def test_top_k(top_k: int) -> None:
    shape = MoEShape(hidden=128, intermediate=128, experts=32, top_k=top_k)
    plan = make_plan(contract(shape, 2, 16), "sm100", 9, sms=2)
    require_right(Case((plan,) * 2, (2, 2), (9, 5)))


def several_rounds() -> Case:
    """All rows of a token's experts don't fit into the warp's part of two stages: two at a time do."""
    shape = MoEShape(hidden=1024, intermediate=128, experts=8, top_k=6)
    plan = make_plan(contract(shape, 1, 8), "sm100", 8, sms=2, block_m=16)
    plan = replace(plan, stages=2, combine_columns=1024)
    assert isinstance(plan, Sm100Plan) and plan.combine_rows == 2
    return Case((plan,), (2,), (5,))


def test_combine_in_several_rounds() -> None:
    require_right(several_rounds())


def test_a_round_of_the_combine_that_overwrites_the_one_before_is_caught() -> None:
    case = several_rounds()
    intact = render(case.plans[0])
    wait = "        __syncwarp();  // the buffer may be filled again\n"
    place = intact.index(wait, intact.index("void combine_unit("))
    verdict = judge_changed(case, intact[:place] + intact[place + len(wait) :], "sm_100a")
    assert type(verdict.error) is DataRace


def test_one_sm_is_refused_by_name() -> None:
    plan = make_plan(contract(), "sm100", 16, sms=2)
    with pytest.raises(InputError, match=r"sms=\[2, 1\]: a tile takes 2 SMs"):
        prepare(Case((plan,) * 2, (2, 1), (1, 1)))


def test_a_device_count_is_used() -> None:
    plan = make_plan(contract(ranks=1), "sm100", 16, sms=2)
    case = Case((plan,), (2,), (9,))
    layer = prepare(case)
    (inputs,) = case.inputs()
    (whole,) = layer.call([inputs]).outputs
    (part,) = layer.call([inputs], device_counts={0: 4}, may_fail=True).outputs
    assert torch.equal(whole[:4], part[:4])


# Launches that fail


FAILURES = [scenario for scenario in SCENARIOS if scenario.fails] + [
    Scenario(f"aborted after {n} steps, one pair", (9, 14), (1, 1), n, aborted_after=n)
    for n in range(1500, 12000, 1500)
]


@pytest.fixture(scope="module", params=[0, 1], ids=["16 rows", "128 rows"])
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(variants("sm100")[request.param], ())


@pytest.mark.parametrize("scenario", FAILURES, ids=lambda scenario: scenario.name)
def test_a_launch_that_fails_drains(bench: Bench, scenario: Scenario) -> None:
    """A peer that refuses, is absent, or aborts at any moment."""
    problem, _, status = bench._run(bench.kernel(bench.source), scenario, 0)
    assert problem is None
    assert scenario.reporter is None or status[scenario.reporter]["code"]
    assert not any(block["stuck"] for block in status)


# That these tests can fail: broken kernels are caught


BROKEN = [
    ("return silu * up * routing_weight;", "return silu * up;", None, ""),
    ("INSTRUCTION + step * INSTRUCTION_SF_STEP", "INSTRUCTION", None, ""),
    ("!first_of_tile || step > 0", "step > 0", None, ""),
    ("(cta * L1_CHUNKS + i % L1_CHUNKS) ^ (row & 7);", "cta * L1_CHUNKS + i % L1_CHUNKS;", None, ""),
    ("    fence_acq_rel_cluster();\n    for", "    for", "DataRace", "tmem_copy_sf"),
    ("        tcgen05_commit(empty_barrier(smem, stage.index));\n", "", "Deadlock", "empty"),
    ("if (lane == 0) mbarrier_arrive_cluster_relaxed(map_to_cta(empty, LEADER));", "", "Deadlock", ""),
]


@pytest.mark.parametrize("old, new, error, words", BROKEN, ids=lambda value: str(value)[:24])
def test_a_broken_kernel_is_caught(old: str, new: str, error: str | None, words: str) -> None:
    shape = MoEShape(hidden=640, intermediate=256, experts=4, top_k=2)
    plan = replace(make_plan(contract(shape, 1, 40), "sm100", 40, sms=2, block_m=32), stages=2)
    intact = render(plan)
    assert intact.count(old) == 1
    verdict = judge_changed(Case((plan,), (2,), (40,), "one-expert"), intact.replace(old, new), "sm_100a")
    assert not verdict.right
    assert (None if verdict.error is None else type(verdict.error).__name__) == error
    assert words in str(verdict.error)


def test_plans_of_ranks_agree_on_the_workspace() -> None:
    """Counters outlive a launch, so they lie at the same place whatever the plan."""
    plans = [make_plan(contract(), "sm100", 16, sms=2, block_m=m) for m in LADDER]
    assert all(isinstance(plan, Sm100Plan) for plan in plans)
    names = ("launch", "send_count", "l1_arrival", "l2_arrival", "l2_finished", "row_source", "row_weight")
    assert len({tuple(plan.local[name].offset for name in names) for plan in plans}) == 1


def test_other_formats_need_other_weights() -> None:
    plan = make_plan(contract(ranks=1), "sm100", 16, sms=2)
    with pytest.raises((InputError, EmulatorError), match=r"w13 has dtype torch\.float8_e4m3fn"):
        EmulatedLayer(plan.contract, [Kernel.of(plan)], [2], expert_weights(MICRO))
