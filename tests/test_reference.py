"""The reference against a scalar formulation, and the semantics that the kernel shares with it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagen.errors import InputError
from megagen.formats import dequantize_rows, quantize_activation
from megagen.reference import (
    accumulation_for_check,
    fold_topk,
    moe_forward,
    pool_order,
    relative_error,
    swiglu,
)
from megagen.routing import make_routing
from megagen.shape import MoEShape
from megagen.weights import ExpertWeights, dequantize_fp8_block, dequantize_mxfp4, random_experts

MICRO = MoEShape.preset("micro")
TINY = MoEShape.preset("tiny")
FORMATS = ["fp8_block", "mxfp8_mxfp4"]


def inputs(shape, tokens, kind="uniform", seed=0, format="fp8_block"):
    """Arguments of moe_forward: x, ids, routing weights, expert weights."""
    x = torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()
    routing = make_routing(kind, shape, tokens, seed)
    weights = random_experts(shape, range(shape.experts), seed, format=format)
    return x, torch.from_numpy(routing.topk_ids), torch.from_numpy(routing.topk_weights), weights


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.int16), b.view(torch.int16))


def scalar_moe(x, ids, routing_weights, weights, clamp=None):
    """One token, one choice, one block at a time, in NumPy float32."""
    f32 = np.float32
    x_q, x_sf = (t.float().numpy() for t in quantize_activation(x))
    w13, s13, w2, s2 = (t.float().numpy() for t in weights)
    output = np.zeros(x.shape, dtype=f32)

    def linear(row, row_sf, w, w_sf):
        result = np.zeros(len(w), dtype=f32)
        for n in range(len(w)):
            for block in range(len(row_sf)):
                columns = slice(128 * block, 128 * block + 128)
                dot = f32(np.dot(row[columns].astype(np.float64), w[n, columns].astype(np.float64)))
                scale = f32(row_sf[block] * w_sf[n // 128, block])
                result[n] = f32(np.float64(scale) * np.float64(dot) + np.float64(result[n]))
        return result

    for token in range(len(x)):
        chosen: dict[int, np.float32] = {}
        for expert, weight in zip(ids[token].tolist(), routing_weights[token].numpy()):
            if 0 <= expert < len(w13):
                chosen[expert] = f32(chosen.get(expert, f32(0)) + weight)
        for expert, weight in chosen.items():
            gate, up = np.split(linear(x_q[token], x_sf[token], w13[expert], s13[expert]), 2)
            if clamp is not None:
                gate, up = np.minimum(gate, f32(clamp)), np.clip(up, f32(-clamp), f32(clamp))
            wide = gate.astype(np.float64)
            h = (wide / (1 + np.exp(-wide))).astype(f32) * up * weight
            groups = h.reshape(-1, 128)
            sf = np.maximum(np.abs(groups).max(axis=1), f32(1e-10)) / f32(448)
            scaled = torch.from_numpy(groups * (f32(1) / sf)[:, None]).clamp(-448, 448)
            h_q = scaled.to(torch.float8_e4m3fn).float().numpy().reshape(-1)
            sent = torch.from_numpy(linear(h_q, sf, w2[expert], s2[expert])).bfloat16().float().numpy()
            output[token] += sent
    return torch.from_numpy(output).bfloat16()


@pytest.mark.parametrize("kind", ["uniform", "repeated", "out-of-range"])
@pytest.mark.parametrize("clamp", [None, 0.5])
def test_matches_the_scalar_formulation(kind, clamp):
    shape = MoEShape(256, 128, experts=3, top_k=3)
    args = inputs(shape, 5, kind)
    actual = moe_forward(*args, activation="exact", clamp=clamp)
    error = relative_error(actual, scalar_moe(*args, clamp=clamp))
    # Equal but for a silu that libm rounds otherwise, which may move one bfloat16.
    assert error.within(whole=1e-4, row=1e-3), error


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["uniform", "zipf:1.0", "one-expert", "repeated", "masked"])
def test_quantization_error_is_within_tolerance(format, kind):
    args = inputs(TINY, 33, kind, format=format)
    quantized = moe_forward(*args, format=format)
    plain = moe_forward(*args, format=format, quantize_intermediate=False)
    assert quantized.dtype == torch.bfloat16 and plain.dtype == torch.float32
    assert relative_error(quantized, plain).whole <= 4e-2


@pytest.mark.parametrize("format", FORMATS)
def test_unquantized_variant_is_plain_arithmetic(format):
    """Against an einsum over all experts, weighted by a dense routing matrix."""
    x, ids, routing_weights, weights = inputs(TINY, 9, "masked", format=format)
    dequantize = dequantize_fp8_block if format == "fp8_block" else dequantize_mxfp4
    w13 = dequantize(weights.w13, weights.w13_scale).double()
    w2 = dequantize(weights.w2, weights.w2_scale).double()
    tokens = dequantize_rows(*quantize_activation(x, format)).double()
    dense = torch.zeros(9, TINY.experts + 1, dtype=torch.float64)
    dense.scatter_add_(1, ids.long() % (TINY.experts + 1), routing_weights.double())
    gate, up = torch.einsum("th,enh->etn", tokens, w13).chunk(2, dim=2)
    expected = torch.einsum("etn,ehn,te->th", gate * gate.sigmoid() * up, w2, dense[:, :-1])
    actual = moe_forward(x, ids, routing_weights, weights, format=format, quantize_intermediate=False)
    assert relative_error(actual, expected.float()).within(whole=1e-5, row=1e-5)


def test_activations_and_sf_groups_agree_closely():
    args = inputs(TINY, 33)
    exact = moe_forward(*args, activation="exact")
    assert relative_error(moe_forward(*args, activation="fast"), exact).within(whole=6e-3, row=3e-2)
    assert relative_error(moe_forward(*args, sf_group=64), exact).whole <= 4e-2
    assert not same_bits(moe_forward(*args, sf_group=64), exact)


@pytest.mark.parametrize("sf_group", [64, 128])
def test_hopper_accumulation_moves_few_of_the_intermediate_codes(sf_group):
    args = inputs(TINY, 33)
    exact = moe_forward(*args, sf_group=sf_group)
    hopper = moe_forward(*args, sf_group=sf_group, accumulation="hopper")
    assert relative_error(hopper, exact).within(whole=1e-2, row=3e-2)
    assert not same_bits(hopper, exact)
    # tests/emulator/test_tensor_core.py has the bits.


def test_hopper_accumulation_of_sums_without_truncation_is_exact():
    x, ids, routing_weights, weights = inputs(MICRO, 9)
    ones = [torch.ones_like(w.float()).to(w.dtype) for w in (weights.w13, weights.w2)]
    weights = weights._replace(w13=ones[0], w2=ones[1])
    args = (torch.ones_like(x), ids, routing_weights, weights)
    assert same_bits(moe_forward(*args, accumulation="hopper"), moe_forward(*args))


def test_only_a_hopper_is_checked_with_its_accumulation():
    _, ids, _, weights = inputs(MICRO, 2)
    assert accumulation_for_check(ids, weights) == "exact"


def test_prequantized_input_is_the_same_input():
    for format in FORMATS:
        x, *rest = inputs(TINY, 9, format=format)
        quantized = quantize_activation(x, format)
        assert same_bits(moe_forward(quantized, *rest, format=format), moe_forward(x, *rest, format=format))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bits_do_not_depend_on_how_experts_and_tokens_are_dealt_out(ranks):
    x, ids, routing_weights, weights = inputs(TINY, 24, "repeated")
    whole = moe_forward(x, ids, routing_weights, weights)
    share = TINY.experts_per_rank(ranks)
    shards = [ExpertWeights(*(t[r * share : (r + 1) * share] for t in weights)) for r in range(ranks)]
    parts = [
        moe_forward(*tokens, shards)
        for tokens in zip(x.chunk(ranks), ids.chunk(ranks), routing_weights.chunk(ranks))
    ]
    assert same_bits(torch.cat(parts), whole)


def test_int64_ids_and_no_tokens():
    x, ids, routing_weights, weights = inputs(MICRO, 4)
    expected = moe_forward(x, ids, routing_weights, weights)
    assert same_bits(moe_forward(x, ids.long(), routing_weights, weights), expected)
    empty = moe_forward(x[:0], ids[:0], routing_weights[:0], weights)
    assert empty.shape == (0, MICRO.hidden) and empty.dtype == torch.bfloat16


def test_tokens_without_an_expert_are_zero():
    x, ids, routing_weights, weights = inputs(MICRO, 4)
    ids[1] = torch.tensor([-1, MICRO.experts])
    output = moe_forward(x, ids, routing_weights, weights)
    assert not output[1].any()
    assert output[0].any() and output[2].any()


def test_nan_of_one_token_reaches_no_other():
    x, ids, routing_weights, weights = inputs(TINY, 16)
    clean = moe_forward(x, ids, routing_weights, weights)
    x[3, 17] = math.nan
    x[5, 0] = math.inf
    routing_weights[7, 1] = math.nan
    output = moe_forward(x, ids, routing_weights, weights)
    dirty = [3, 5, 7]
    assert output[dirty].isnan().any(dim=1).all()
    others = [t for t in range(16) if t not in dirty]
    assert same_bits(output[others], clean[others])


def test_nan_weight_without_expert_is_ignored():
    x, ids, routing_weights, weights = inputs(MICRO, 4)
    ids[:, 1] = -1
    clean = moe_forward(x, ids, routing_weights, weights)
    routing_weights[:, 1] = math.nan
    assert not fold_topk(ids, routing_weights, MICRO.experts)[1][:, 1].any()
    assert same_bits(moe_forward(x, ids, routing_weights, weights), clean)


@given(
    ids=st.lists(st.lists(st.integers(-2, 5), min_size=4, max_size=4), min_size=1, max_size=6),
    seed=st.integers(0, 20),
)
def test_fold_adds_weights_in_order_of_k(ids, seed):
    experts = 4
    weights = torch.randn(len(ids), 4, generator=torch.Generator().manual_seed(seed))
    folded_ids, folded = fold_topk(torch.tensor(ids, dtype=torch.int32), weights, experts)
    for row, new_ids, new_weights, old in zip(ids, folded_ids.tolist(), folded, weights):
        for k, expert in enumerate(row):
            if not 0 <= expert < experts or expert in row[:k]:
                assert new_ids[k] == -1 and new_weights[k] == 0
                continue
            total = torch.tensor(0.0)
            for later in range(4):
                if row[later] == expert:
                    total = total + old[later]
            assert new_ids[k] == expert and new_weights[k] == total


def test_repeating_an_expert_equals_naming_it_once():
    x, _, _, weights = inputs(MICRO, 2)
    twice = moe_forward(x, torch.tensor([[1, 1]] * 2), torch.tensor([[0.25, 0.5]] * 2), weights)
    once = moe_forward(x, torch.tensor([[1, -1]] * 2), torch.tensor([[0.75, 9.0]] * 2), weights)
    assert same_bits(twice, once)


def test_clamp_limits_gate_above_and_up_on_both_sides_and_keeps_nan():
    gate = torch.tensor([5.0, -5.0, 1.0, 1.0, math.nan, 1.0])
    up = torch.tensor([1.0, 1.0, 5.0, -5.0, 1.0, math.nan])
    clamped = swiglu(gate, up, clamp=2.0)
    expected = swiglu(torch.tensor([2.0, -5.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 2.0, -2.0]))
    assert torch.equal(clamped[:4], expected)
    assert clamped[4:].isnan().all()


@pytest.mark.parametrize("activation", ["exact", "fast"])
def test_silu_at_extremes(activation):
    gate = torch.tensor([0.0, 1.0, 100.0, -100.0, -1e4, 1e4])
    expected = torch.tensor([0.0, 0.7310586, 100.0, 0.0, 0.0, 1e4])
    torch.testing.assert_close(swiglu(gate, torch.ones(6), activation), expected)


def test_pool_order_of_the_worked_example():
    assert [rank for rank, _ in pool_order((4, 1, 3))] == [0, 1, 2, 0, 2, 0, 2, 0]


@given(st.lists(st.integers(0, 9), max_size=40))
def test_pool_order_takes_each_token_once_in_order_of_slots(counts):
    order = pool_order(counts)
    assert sorted(order) == [(rank, slot) for rank, count in enumerate(counts) for slot in range(count)]
    assert [slot for _, slot in order] == sorted(slot for _, slot in order)


def test_relative_error():
    expected = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 10.0]])
    actual = expected.clone()
    assert relative_error(actual, expected) == (0.0, 0.0)
    actual[0, 0] = 3.5
    error = relative_error(actual, expected)
    assert error.worst_row == pytest.approx(0.1)
    assert error.whole == pytest.approx(0.5 / math.sqrt(125))
    assert error.within(whole=0.05, row=0.1) and not error.within(whole=0.05, row=0.09)
    assert relative_error(expected[:0], expected[:0]) == (0.0, 0.0)
    with pytest.raises(InputError, match=r"\[2, 2\].*\[3, 2\]"):
        relative_error(actual[:2], expected)


def test_relative_error_never_passes_what_is_not_a_number():
    expected = torch.ones(2, 4)
    for bad in (math.nan, math.inf, -math.inf):
        actual = expected.clone()
        actual[1, 2] = bad
        for pair in ((actual, expected), (expected, actual), (actual, actual)):
            error = relative_error(*pair)
            assert error == (math.inf, math.inf)
            assert not error.within(whole=1e9, row=1e9)
    nonzero = torch.zeros(2, 4)
    nonzero[0, 0] = 1e-6
    assert relative_error(nonzero, torch.zeros(2, 4)) == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 256)}, r"x has shape \[2, 256\]"),
        ({"x": (torch.zeros(2, 128), torch.zeros(2, 1))}, r"x has dtype torch.float32"),
        ({"topk_ids": torch.zeros(3, 2)}, r"topk_ids has shape \[3, 2\]"),
        ({"topk_weights": torch.zeros(2, 3)}, r"topk_weights has shape \[2, 3\]"),
        ({"format": "int8"}, r"format='int8'"),
        ({"activation": "gelu"}, r"activation='gelu'"),
        ({"sf_group": 32}, r"sf_group=32"),
        ({"accumulation": "blackwell"}, r"accumulation='blackwell'"),
        ({"accumulation": "hopper", "quantize_intermediate": False}, r"quantize_intermediate=False"),
        ({"accumulation": "hopper", "format": "mxfp8_mxfp4"}, r"format='mxfp8_mxfp4'"),
    ],
)
def test_bad_arguments_are_named(change, words):
    x, ids, routing_weights, weights = inputs(MICRO, 2)
    arguments = {"x": x, "topk_ids": ids, "topk_weights": routing_weights, "weights": weights}
    with pytest.raises(InputError, match=words):
        moe_forward(**(arguments | change))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("format", FORMATS)
def test_gpu_and_cpu_agree(format):
    args = inputs(TINY, 65, "repeated", format=format)
    on_cpu = moe_forward(*args, format=format)
    x, ids, routing_weights, weights = args
    # Weights may stay on the CPU.
    on_gpu = moe_forward(x.cuda(), ids.cuda(), routing_weights.cuda(), weights, format=format)
    assert relative_error(on_gpu.cpu(), on_cpu).within(whole=1e-4, row=1e-3)
