"""The real kernels on the emulator: stratified seeds, and the corners that no seed reaches.

``megagen emulate --seeds 0:100`` runs a hundred.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from judged import require_right

from megagen.contract import Contract
from megagen.emulator.cases import Case, check
from megagen.emulator.exploration import TOKENS, Exploration
from megagen.planning import make_plan
from megagen.shape import MoEShape

CI_SEEDS = range(33)
MICRO = MoEShape.preset("micro")
EXPLORATION = Exploration()


@pytest.mark.parametrize("seed", CI_SEEDS)
def test_seed(seed: int) -> None:
    require_right(EXPLORATION.case(seed))


def test_ci_seeds_meet_every_value() -> None:
    points = [EXPLORATION.point(seed) for seed in CI_SEEDS]
    for axis in ("ranks", "routings", "tiles", "tokens", "sms", "shapes", "launches"):
        name = {"routings": "routing", "tiles": "tile", "shapes": "shape"}.get(axis, axis)
        assert {getattr(point, name) for point in points} == set(getattr(EXPLORATION, axis)), axis


@pytest.mark.parametrize("first", [0, EXPLORATION.block_size])
def test_a_block_of_seeds_meets_every_pair(first: int) -> None:
    points = [EXPLORATION.point(first + place) for place in range(EXPLORATION.block_size)]
    ranks, routings, tiles = (
        len(axis) for axis in (EXPLORATION.ranks, EXPLORATION.routings, EXPLORATION.tiles)
    )
    assert len({(p.ranks, p.routing) for p in points}) == ranks * routings
    assert len({(p.ranks, p.tile) for p in points}) == ranks * tiles
    assert len({(p.routing, p.tile) for p in points}) == routings * tiles


def test_a_seed_is_one_case() -> None:
    assert EXPLORATION.case(7) == Exploration().case(7)
    fixed = Exploration(ranks=(2,), routings=("none",), tokens=("one",))
    assert [sum(fixed.case(seed).tokens) for seed in range(3)] == [1, 1, 1]


def test_token_counts_fit() -> None:
    for seed in range(200):
        case = EXPLORATION.case(seed)
        assert max(case.tokens) <= case.contract.max_tokens
    assert set(TOKENS) == {EXPLORATION.point(seed).tokens for seed in range(len(TOKENS))}


@pytest.mark.parametrize("ranks", [33, 72])
def test_many_ranks(ranks: int) -> None:
    """More ranks than a warp has lanes, one SM each."""
    shape = MoEShape(hidden=128, intermediate=128, experts=ranks, top_k=2)
    plan = make_plan(Contract(shape, ranks, 3), tokens=3, sms=1)
    tokens = tuple((0, 1, 3)[rank % 3] for rank in range(ranks))
    require_right(Case((plan,) * ranks, (1,) * ranks, tokens))


@pytest.mark.parametrize("top_k", [1, 32])
def test_top_k(top_k: int) -> None:
    shape = MoEShape(hidden=128, intermediate=128, experts=32, top_k=top_k)
    plan = make_plan(Contract(shape, 2, 16), tokens=9, sms=2)
    require_right(Case((plan,) * 2, (2, 1), (9, 5)))


@pytest.mark.parametrize("routing", ["repeated", "none", "one-expert", "out-of-range"])
def test_routing(routing: str) -> None:
    plan = make_plan(Contract(MICRO, 2, 16), tokens=16, sms=2)
    require_right(Case((plan,) * 2, (2, 2), (16, 7), routing))


def test_each_rank_another_plan_and_three_launches_on_one_buffer() -> None:
    contract = Contract(replace(MICRO, experts=10), 5, 24)
    plans = tuple(make_plan(contract, tokens=24, sms=2, block_m=tile) for tile in (128, 16, 64, 32, 144))
    require_right(Case(plans, (1, 3, 2, 2, 1), (24, 0, 7, 13, 5), launches=3))


@pytest.mark.parametrize("rows", [128, 129, 137, 144, 145, 273])
def test_rows_around_a_tile_with_surplus_rows(rows: int) -> None:
    shape = MoEShape(hidden=256, intermediate=256, experts=2, top_k=1)
    plan = make_plan(Contract(shape, 2, 256), tokens=256, sms=2, block_m=144)
    require_right(Case((plan,) * 2, (2, 1), (rows - 60, 60), routing="one-expert", seed=rows))


@pytest.mark.parametrize("rows", [(144, 60, 136, 1), (64, 145, 129, 65)])
def test_half_tiles_beside_tiles_with_surplus_rows(rows: tuple[int, ...], tmp_path: Path) -> None:
    """Expert by expert on one SM, so that warps that are done meet slow ones in either kind of epilogue."""
    np.save(tmp_path / "ids.npy", np.repeat(np.arange(len(rows)), rows)[:, None])
    shape = MoEShape(hidden=384, intermediate=128, experts=len(rows), top_k=1)
    plan = make_plan(Contract(shape, 1, 512), tokens=512, sms=1, block_m=144)
    case = Case((replace(plan, experts_per_wave=1),), (1,), (sum(rows),), str(tmp_path / "ids.npy"))
    for seed in range(3):
        require_right(replace(case, seed=seed))


@pytest.mark.parametrize("clamp, activation", [(0.5, "fast"), (None, "exact")])
def test_activation(clamp: float | None, activation: str) -> None:
    contract = Contract(MICRO, 2, 16, clamp=clamp, activation=activation)
    plan = make_plan(contract, tokens=16, sms=2)
    require_right(Case((plan,) * 2, (2, 2), (16, 7)))


def test_a_rank_that_does_not_fit_is_refused_by_name() -> None:
    plan = make_plan(Contract(MICRO, 2, 16), tokens=16, sms=2)
    with pytest.raises(Exception, match="kernels has 1 entries, ranks=2"):
        check(Case((plan,), (2, 2), (16, 7)))


def test_rows_wait_for_their_place_in_a_ring() -> None:
    contract = Contract(MoEShape(hidden=128, intermediate=128, experts=24, top_k=24), ranks=1, max_tokens=40)
    plan = make_plan(contract, "sm90", contract.max_tokens, sms=2, block_m=16)
    ring = replace(plan, l1_ring_blocks=contract.local_experts + 1)
    ring.validate()
    assert 2 * ring.l1_ring_blocks < contract.local_experts * 3, "every expert receives three blocks"
    require_right(Case((ring,), sms=(2,), tokens=(40,), routing="uniform", seed=3, launches=2))
