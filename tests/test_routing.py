"""Routing generators and the --tokens option."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagen.errors import InputError
from megagen.routing import NO_EXPERT, ROUTING_KINDS, make_routing, parse_tokens
from megagen.shape import MoEShape

KINDS = [*(kind for kind in ROUTING_KINDS if kind.islower()), "zipf:1.0", "tile-boundary:16"]
SHAPE = MoEShape(128, 128, experts=8, top_k=3)
shapes = st.builds(
    lambda experts, top_k: MoEShape(128, 128, experts, min(top_k, experts)),
    experts=st.integers(1, 64),
    top_k=st.integers(1, 32),
)


def counts(ids, experts=SHAPE.experts):
    return np.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)


@pytest.mark.parametrize("kind", KINDS)
@given(shape=shapes, tokens=st.integers(0, 70), seed=st.integers(0, 3))
def test_every_kind_has_the_right_form(kind, shape, tokens, seed):
    routing = make_routing(kind, shape, tokens, seed)
    assert routing.topk_ids.shape == routing.topk_weights.shape == (tokens, shape.top_k)
    assert routing.topk_ids.dtype == np.int32
    assert routing.topk_weights.dtype == np.float32
    np.testing.assert_allclose(routing.topk_weights.sum(axis=1), np.ones(tokens), rtol=1e-5)
    if kind != "out-of-range":
        assert np.all((routing.topk_ids >= NO_EXPERT) & (routing.topk_ids < shape.experts))


@pytest.mark.parametrize("kind", KINDS)
def test_seed_decides(kind):
    first, again, other = (make_routing(kind, SHAPE, 64, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.topk_ids, again.topk_ids)
    np.testing.assert_array_equal(first.topk_weights, again.topk_weights)
    assert not np.array_equal(first.topk_weights, other.topk_weights)


@pytest.mark.parametrize("kind", ["uniform", "zipf:1.0"])
def test_experts_of_a_token_are_distinct(kind):
    ids = make_routing(kind, SHAPE, 200).topk_ids
    assert all(len(set(row)) == SHAPE.top_k for row in ids.tolist())


def test_zipf_is_skewed_and_uniform_is_not():
    top1 = MoEShape(128, 128, experts=8, top_k=1)
    zipf = np.sort(counts(make_routing("zipf:1.0", top1, 20_000).topk_ids))[::-1] / 20_000
    expected = 1 / np.arange(1, 9)
    np.testing.assert_allclose(zipf, expected / expected.sum(), atol=0.015)
    uniform = counts(make_routing("uniform", top1, 20_000).topk_ids) / 20_000
    np.testing.assert_allclose(uniform, 1 / 8, atol=0.015)


def test_special_kinds_do_what_they_say():
    def load(kind):
        return counts(make_routing(kind, SHAPE, 100).topk_ids)

    assert sorted(load("one-expert"))[-2:] == [0, 100]
    assert load("none").sum() == 0
    assert load("first-experts").tolist() == [100] * 3 + [0] * 5
    assert (load("empty-experts")[1::2] == 0).all()
    repeated = make_routing("repeated", SHAPE, 100).topk_ids
    assert all(len(set(row)) < SHAPE.top_k for row in repeated.tolist())
    masked = make_routing("masked", SHAPE, 100).topk_ids
    assert (masked == NO_EXPERT).all(axis=1).any()
    assert (masked != NO_EXPERT).all(axis=1).any()
    bad = make_routing("out-of-range", SHAPE, 100).topk_ids
    assert (bad >= SHAPE.experts).any() and (bad < NO_EXPERT).any()


@pytest.mark.parametrize("tile", [8, 16, 64])
def test_tile_boundary_counts(tile):
    ids = make_routing(f"tile-boundary:{tile}", SHAPE, 200).topk_ids
    assert set(counts(ids)) >= {tile - 1, tile, tile + 1}
    for row in ids.tolist():
        chosen = [expert for expert in row if expert != NO_EXPERT]
        assert len(set(chosen)) == len(chosen)


def test_deal_splits_in_order_whatever_the_rank_count():
    routing = make_routing("uniform", SHAPE, 10)
    parts = routing.deal([3, 0, 7])
    assert [len(part.topk_ids) for part in parts] == [3, 0, 7]
    np.testing.assert_array_equal(np.concatenate([part.topk_ids for part in parts]), routing.topk_ids)
    np.testing.assert_array_equal(np.concatenate([part.topk_weights for part in parts]), routing.topk_weights)
    with pytest.raises(InputError, match=r"adds up to 11"):
        routing.deal([4, 7])


def test_ids_from_a_file(tmp_path):
    path = tmp_path / "ids.npy"
    ids = make_routing("masked", SHAPE, 5).topk_ids.astype(np.int64)
    np.save(path, ids)
    np.testing.assert_array_equal(make_routing(str(path), SHAPE, 5).topk_ids, ids)
    with pytest.raises(InputError, match=r"\[6, 3\]"):
        make_routing(str(path), SHAPE, 6)
    np.save(path, ids.astype(float))
    with pytest.raises(InputError, match=r"float64"):
        make_routing(str(path), SHAPE, 5)
    ids[2, 1] = SHAPE.experts
    np.save(path, ids)
    with pytest.raises(InputError, match=r"expert 8"):
        make_routing(str(path), SHAPE, 5)
    with pytest.raises(InputError, match=r"absent"):
        make_routing(str(tmp_path / "absent.npy"), SHAPE, 5)


@pytest.mark.parametrize(
    "kind", ["", "zipf", "zipf:", "zipf:-1", "zipf:nan", "tile-boundary:0", "other", "none:1"]
)
def test_bad_kinds_are_named(kind):
    with pytest.raises(InputError, match=r"routing="):
        make_routing(kind, SHAPE, 4)


def test_negative_tokens_are_refused():
    with pytest.raises(InputError, match=r"tokens=-1"):
        make_routing("uniform", SHAPE, -1)


@pytest.mark.parametrize(
    ("text", "ranks", "cases"),
    [
        ("64", 2, [(64, 64)]),
        ("0", 1, [(0,)]),
        ("3,0,7", 3, [(3, 0, 7)]),
        ("1:8", 1, [(1,), (2,), (4,), (8,)]),
        ("0:5", 2, [(0, 0), (1, 1), (2, 2), (4, 4), (5, 5)]),
        ("7:7", 1, [(7,)]),
    ],
)
def test_parse_tokens(text, ranks, cases):
    assert parse_tokens(text, ranks) == cases


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1,2", "8:1", "1:2:3", "1:", "²"])
def test_bad_token_counts_are_named(text):
    with pytest.raises(InputError, match=r"tokens="):
        parse_tokens(text, ranks=3)
