"""Weights: quantization, and the kernel layout against a slow formulation of it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megagen.contract import WeightLayout
from megagen.errors import InputError
from megagen.formats import unpack_e2m1
from megagen.shape import MoEShape
from megagen.weights import (
    ExpertWeights,
    dequantize_fp8_block,
    dequantize_mxfp4,
    empty_kernel_weights,
    expand_mxfp4_scale,
    from_kernel_layout,
    quantize_experts,
    quantize_fp8_block,
    quantize_mxfp4,
    random_experts,
    to_kernel_layout,
)

SHAPES = st.builds(
    MoEShape,
    hidden=st.integers(1, 5).map(lambda n: 128 * n),
    intermediate=st.integers(1, 4).map(lambda n: 128 * n),
    experts=st.integers(1, 2),
    top_k=st.just(1),
)


def gaussian(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def random_bytes_as_weights(shape: MoEShape, seed: int = 0) -> ExpertWeights:
    """All bit patterns and unrelated SFs: a layout must not look at the values."""
    generator = torch.Generator().manual_seed(seed)
    h, i, e = shape.hidden, shape.intermediate, shape.experts

    def matrix(n, k):
        return torch.randint(256, (e, n, k), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)

    def scale(n, k):
        return torch.rand(e, n // 128, k // 128, generator=generator)

    return ExpertWeights(matrix(2 * i, h), scale(2 * i, h), matrix(h, i), scale(h, i))


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_fp8_block_scales_each_block_by_its_own_amax():
    weight = torch.ones(256, 384)
    weight[130, 260] = 7.0
    values, scale = quantize_fp8_block(weight)
    assert values.dtype == torch.float8_e4m3fn and scale.shape == (2, 3)
    expected = torch.full((2, 3), 1.0)
    expected[1, 2] = 7.0
    torch.testing.assert_close(scale, expected / 448)
    assert values.float().max() == 448


@settings(deadline=None)  # torch's first call takes its time
@given(rows=st.integers(1, 3), columns=st.integers(1, 3), seed=st.integers(0, 50))
def test_fp8_block_round_trip_is_close(rows, columns, seed):
    weight = gaussian(128 * rows, 128 * columns, seed=seed)
    values, scale = quantize_fp8_block(weight)
    error = (dequantize_fp8_block(values, scale) - weight).abs()
    block_step = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) * 2**-10
    assert (error <= weight.abs() / 16 * 1.001 + block_step).all()
    # What was dequantized quantizes to itself.
    again, scale_again = quantize_fp8_block(dequantize_fp8_block(values, scale))
    assert equal_bits(again, values)
    torch.testing.assert_close(scale_again, scale)


@pytest.mark.parametrize("block_rows", [1, 32])
@given(rows=st.integers(1, 3), columns=st.integers(1, 4), seed=st.integers(0, 50))
def test_mxfp4_round_trip(block_rows, rows, columns, seed):
    weight = gaussian(32 * rows, 32 * columns, seed=seed)
    packed, scale = quantize_mxfp4(weight, block_rows)
    assert packed.shape == (32 * rows, 16 * columns)
    assert scale.shape == (32 * rows // block_rows, columns)
    restored = dequantize_mxfp4(packed, scale)
    full_scale = torch.pow(2.0, scale.float() - 127).repeat_interleave(block_rows, 0).repeat_interleave(32, 1)
    # The widest gap is between 4 and 6; an SF is at most twice what amax / 6 asks for.
    assert ((restored - weight).abs() <= full_scale).all()
    assert (restored.abs() <= 6 * full_scale).all()
    again, _ = quantize_mxfp4(restored, block_rows)
    torch.testing.assert_close(dequantize_mxfp4(again, _), restored)


def test_mxfp4_known_block():
    weight = torch.zeros(1, 32)
    weight[0, :8] = torch.tensor([0.0, 0.5, -1.0, 1.5, 2.0, -3.0, 4.0, 6.0])
    packed, scale = quantize_mxfp4(weight * 4)
    assert scale.tolist() == [[127 + 2]]
    assert unpack_e2m1(packed)[0, :8].tolist() == [0, 1, 10, 3, 4, 13, 6, 7]
    assert packed[0, :4].tolist() == [0x10, 0x3A, 0xD4, 0x76]


def test_mxfp4_scales_expand_rows():
    scale = torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8)
    expanded = expand_mxfp4_scale(scale, 64)
    assert expanded.shape == (64, 2)
    assert expanded[31].tolist() == [1, 2] and expanded[32].tolist() == [3, 4]
    assert torch.equal(expand_mxfp4_scale(expanded, 64), expanded)


def test_quantize_experts_is_the_matrix_rule_per_expert():
    w13, w2 = gaussian(3, 256, 128).bfloat16(), gaussian(3, 128, 128, seed=1).bfloat16()
    weights = quantize_experts(w13, w2)
    for expert in range(3):
        values, scale = quantize_fp8_block(w13[expert])
        assert equal_bits(weights.w13[expert], values) and torch.equal(weights.w13_scale[expert], scale)
        values, scale = quantize_fp8_block(w2[expert])
        assert equal_bits(weights.w2[expert], values) and torch.equal(weights.w2_scale[expert], scale)
    packed = quantize_experts(w13, w2, "mxfp8_mxfp4", mx_block_rows=32)
    assert packed.w13.shape == (3, 256, 64) and packed.w13_scale.shape == (3, 8, 4)


def test_bad_weights_are_named():
    with pytest.raises(InputError, match=r"\[100, 128\].*128 x 128"):
        quantize_fp8_block(torch.zeros(100, 128))
    with pytest.raises(InputError, match=r"\[33, 32\].*32 x 32"):
        quantize_mxfp4(torch.zeros(33, 32), block_rows=32)
    for bad in (math.nan, math.inf):
        weight = torch.zeros(128, 128)
        weight[5, 5] = bad
        with pytest.raises(InputError, match=r"NaN or infinite"):
            quantize_fp8_block(weight)
        with pytest.raises(InputError, match=r"NaN or infinite"):
            quantize_mxfp4(weight)
    with pytest.raises(InputError, match=r"\[0, 128, 128\]"):
        quantize_experts(torch.zeros(0, 128, 128), torch.zeros(0, 128, 128))


def test_random_experts_do_not_depend_on_who_makes_them():
    shape = MoEShape.preset("micro")
    everything = random_experts(shape, range(4), seed=7)
    share = random_experts(shape, range(2, 4), seed=7)
    for whole, part in zip(everything, share):
        assert equal_bits(whole[2:].contiguous(), part)
    assert not equal_bits(everything.w13, random_experts(shape, range(4), seed=8).w13)
    with pytest.raises(InputError, match=r"experts is empty"):
        random_experts(shape, [])


@settings(deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 10))
def test_kernel_layout_round_trip(shape, seed):
    weights = random_bytes_as_weights(shape, seed)
    layout = WeightLayout(shape, shape.experts)
    restored = from_kernel_layout(to_kernel_layout(weights, layout), layout)
    assert all(equal_bits(a, b) for a, b in zip(weights, restored))


@pytest.mark.parametrize("hidden", [128, 384, 512])
@pytest.mark.parametrize("intermediate", [128, 256])
def test_kernel_layout_element_by_element(hidden, intermediate):
    """Where the kernel looks for an element, byte offset by byte offset."""
    shape = MoEShape(hidden, intermediate, experts=2, top_k=1)
    weights = random_bytes_as_weights(shape)
    kernel = to_kernel_layout(weights, WeightLayout(shape, 2))
    generator = torch.Generator().manual_seed(0)

    def offset(expert, n, k, rows, columns):
        tile, row = divmod(n, 256)
        k_block, column = divmod(k, 128)
        tiles, k_blocks = -(-rows // 256), columns // 128
        chunk = (column // 16) ^ (row % 8)
        tile_start = ((expert * tiles + tile) * k_blocks + k_block) * 256 * 128
        return tile_start + row * 128 + chunk * 16 + column % 16

    def draw(limit):
        return int(torch.randint(limit, (1,), generator=generator))

    flat13, flat2 = kernel.w13.flatten(), kernel.w2.flatten()
    w13, w2 = weights.w13.view(torch.uint8), weights.w2.view(torch.uint8)
    for _ in range(500):
        expert, column, up = draw(2), draw(intermediate), draw(2)
        k = draw(hidden)
        interleaved = column // 8 * 16 + up * 8 + column % 8
        found = flat13[offset(expert, interleaved, k, 2 * intermediate, hidden)]
        assert found == w13[expert, up * intermediate + column, k]
        # The scale factor that belongs to it: a (gate, up) pair per 256 interleaved rows and K block.
        pair = kernel.w13_sf[expert, interleaved // 256, k // 128]
        assert pair[up] == weights.w13_scale[expert, (up * intermediate + column) // 128, k // 128]

        n, k = draw(hidden), draw(intermediate)
        assert flat2[offset(expert, n, k, hidden, intermediate)] == w2[expert, n, k]
        pair = kernel.w2_sf[expert, n // 256, k // 128]
        assert pair[n % 256 // 128] == weights.w2_scale[expert, n // 128, k // 128]


def test_rows_beyond_hidden_are_zero():
    shape = MoEShape(384, 128, experts=1, top_k=1)
    kernel = to_kernel_layout(random_bytes_as_weights(shape), WeightLayout(shape, 1))
    assert kernel.w2.shape == (1, 2, 1, 256, 128)
    assert not kernel.w2[0, 1, :, 128:].any()
    assert not kernel.w2_sf[0, 1, :, 1].any()


def test_transform_writes_in_place_of_an_earlier_result():
    shape = MoEShape.preset("micro")
    layout = WeightLayout(shape, 4)
    out = empty_kernel_weights(layout)
    pointers = [tensor.data_ptr() for tensor in out]
    result = to_kernel_layout(random_bytes_as_weights(shape, seed=1), layout, out)
    fresh = to_kernel_layout(random_bytes_as_weights(shape, seed=1), layout)
    assert [tensor.data_ptr() for tensor in result] == pointers
    assert all(torch.equal(a, b) for a, b in zip(result, fresh))


def test_power_of_two_scales_of_a_checkpoint_are_taken():
    shape = MoEShape.preset("micro")
    weights = random_bytes_as_weights(shape)
    exponents = torch.randint(100, 150, weights.w13_scale.shape, dtype=torch.uint8)
    weights = weights._replace(w13_scale=exponents.view(torch.float8_e8m0fnu))
    layout = WeightLayout(shape, 4)
    restored = from_kernel_layout(to_kernel_layout(weights, layout), layout)
    assert torch.equal(restored.w13_scale, torch.pow(2.0, exponents.float() - 127))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("w13", torch.zeros(4, 256, 128), r"w13 has dtype torch.float32.*quantize_experts"),
        (
            "w13",
            torch.zeros(4, 128, 128).to(torch.float8_e4m3fn),
            r"w13 has shape \[4, 128, 128\].*\[4, 256, 128\]",
        ),
        ("w2_scale", torch.zeros(4, 1, 1).half(), r"w2_scale has dtype torch.float16"),
        ("w2_scale", torch.zeros(3, 1, 1), r"w2_scale has shape \[3, 1, 1\]"),
        ("w13_scale", torch.zeros(4, 2, 1, device="meta"), r"w13_scale is on meta"),
    ],
)
def test_checkpoint_tensors_that_do_not_fit_are_named(field, value, words):
    shape = MoEShape.preset("micro")
    weights = random_bytes_as_weights(shape)._replace(**{field: value})
    with pytest.raises(InputError, match=words):
        to_kernel_layout(weights, WeightLayout(shape, 4))


def test_other_formats_are_refused():
    shape = MoEShape.preset("micro")
    with pytest.raises(InputError, match=r"w13 has dtype torch.float8_e4m3fn; give torch.uint8"):
        to_kernel_layout(random_bytes_as_weights(shape), WeightLayout(shape, 4, format="mxfp8_mxfp4"))


# The layout of Blackwell's kernels


def random_mxfp4(shape: MoEShape, block_rows: int = 1) -> ExpertWeights:
    """Any codes, any scale factors."""
    h, i, e = shape.hidden, shape.intermediate, shape.experts
    generator = torch.Generator().manual_seed(block_rows)

    def draw(*size: int) -> torch.Tensor:
        return torch.randint(256, size, dtype=torch.uint8, generator=generator)

    rows = 2 * i // block_rows
    return ExpertWeights(
        draw(e, 2 * i, h // 2), draw(e, rows, h // 32), draw(e, h, i // 2), draw(e, h // block_rows, i // 32)
    )


@pytest.mark.parametrize("block_rows", [1, 32])
@pytest.mark.parametrize("hidden", [128, 384, 512])
def test_mxfp4_layout_round_trip(hidden, block_rows):
    shape = MoEShape(hidden, 256, experts=2, top_k=1)
    layout = WeightLayout(shape, 2, "mxfp8_mxfp4")
    weights = random_mxfp4(shape, block_rows)
    restored = from_kernel_layout(to_kernel_layout(weights, layout), layout)
    assert torch.equal(restored.w13, weights.w13) and torch.equal(restored.w2, weights.w2)
    assert torch.equal(restored.w13_scale, expand_mxfp4_scale(weights.w13_scale, 512))
    assert torch.equal(restored.w2_scale, expand_mxfp4_scale(weights.w2_scale, hidden))


def test_mxfp4_layout_element_by_element():
    """Where the kernel looks for a value and for its scale factor."""
    shape = MoEShape(384, 256, experts=2, top_k=1)
    weights = random_mxfp4(shape)
    kernel = to_kernel_layout(weights, WeightLayout(shape, 2, "mxfp8_mxfp4"))
    generator = torch.Generator().manual_seed(0)

    def draw(limit):
        return int(torch.randint(limit, (1,), generator=generator))

    def sf(packed, expert, row, k):
        """Its byte in the words of the row's CTA, 512 bytes per tile, K block and CTA."""
        words = packed[expert, row // 256, k // 128, row % 256 // 128]
        line, word = row % 32, row % 128 // 32
        return words.view(torch.uint8)[line * 16 + word * 4 + k % 128 // 32]

    for _ in range(500):
        expert, column, up, k = draw(2), draw(256), draw(2), draw(384)
        row, source = column // 8 * 16 + up * 8 + column % 8, up * 256 + column
        assert kernel.w13[expert, row, k // 2] == weights.w13[expert, source, k // 2]
        assert sf(kernel.w13_sf, expert, row, k) == weights.w13_scale[expert, source, k // 32]
        row, k = draw(384), draw(256)
        assert kernel.w2[expert, row, k // 2] == weights.w2[expert, row, k // 2]
        assert sf(kernel.w2_sf, expert, row, k) == weights.w2_scale[expert, row, k // 32]
    assert not kernel.w2[:, 384:].any() and kernel.w2.shape[1] == 512


def test_mxfp4_checkpoints_with_torch_dtypes_are_taken():
    shape = MoEShape.preset("micro")
    layout = WeightLayout(shape, 4, "mxfp8_mxfp4")
    weights = random_mxfp4(shape)
    typed = ExpertWeights(
        weights.w13.view(torch.float4_e2m1fn_x2),
        weights.w13_scale.view(torch.float8_e8m0fnu),
        weights.w2.view(torch.float4_e2m1fn_x2),
        weights.w2_scale.view(torch.float8_e8m0fnu),
    )
    pairs = zip(to_kernel_layout(typed, layout), to_kernel_layout(weights, layout))
    assert all(torch.equal(a, b) for a, b in pairs)


def test_mxfp4_tensors_that_do_not_fit_are_named():
    shape = MoEShape.preset("micro")
    layout = WeightLayout(shape, 4, "mxfp8_mxfp4")
    weights = random_mxfp4(shape)
    with pytest.raises(InputError, match=r"w2_scale has shape \[4, 2, 4\].*\[4, 128, 4\] or \[4, 4, 4\]"):
        to_kernel_layout(weights._replace(w2_scale=weights.w2_scale[:, :2]), layout)
    with pytest.raises(InputError, match=r"w13_scale has dtype torch.float32"):
        to_kernel_layout(weights._replace(w13_scale=weights.w13_scale.float()), layout)
