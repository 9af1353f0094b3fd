"""Number formats, checked against their definitions value by value."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megagen.errors import InputError
from megagen.formats import (
    E2M1_VALUES,
    dequantize_rows,
    e2m1_to_float32,
    float32_scale,
    pack_e2m1,
    quantize_activation,
    quantize_rows,
    to_e2m1,
    to_e4m3,
    ue8m0_scale,
    ue8m0_to_float32,
    unpack_e2m1,
)

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
NAN, INF = math.nan, math.inf


def e4m3_value(code: int) -> float:
    """OCP E4M3: bias 7, no infinity, S.1111.111 is NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    magnitude = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 0x80 else magnitude


def nearest_even_code(x: float, values: list[float]) -> int:
    """Code of the value nearest to |x|, which saturates; the even code in a tie."""
    magnitude = min(abs(x), values[-1])
    return min(range(len(values)), key=lambda code: (abs(values[code] - magnitude), code % 2))


POSITIVE_E4M3 = [e4m3_value(code) for code in range(127)]


@given(st.one_of(floats, st.floats(-500, 500, width=32), st.floats(-(2**-6), 2**-6, width=32)))
def test_e4m3_rounds_to_nearest_even_and_saturates(x):
    code = to_e4m3(torch.tensor([x])).view(torch.uint8).item()
    assert code & 0x7F == nearest_even_code(x, POSITIVE_E4M3)
    assert code >> 7 == (math.copysign(1, x) < 0)


def test_e4m3_ties_and_specials():
    midpoints = [(a + b) / 2 for a, b in pairwise(POSITIVE_E4M3)]
    codes = to_e4m3(torch.tensor(midpoints)).view(torch.uint8).tolist()
    assert codes == [code + code % 2 for code in range(126)]
    assert to_e4m3(torch.tensor([INF, -INF, 1e30])).float().tolist() == [448, -448, 448]
    assert to_e4m3(torch.tensor([NAN])).isnan().all()


@given(st.one_of(floats, st.floats(-8, 8, width=32)))
def test_e2m1_rounds_to_nearest_even_and_saturates(x):
    code = to_e2m1(torch.tensor([x])).item()
    assert code & 7 == nearest_even_code(x, list(E2M1_VALUES))
    assert code >> 3 == (math.copysign(1, x) < 0)


def test_e2m1_ties_and_specials():
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    assert to_e2m1(torch.tensor(midpoints)).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert to_e2m1(torch.tensor([NAN, -NAN, INF, -INF])).tolist() == [7, 7, 7, 15]
    codes = torch.arange(16, dtype=torch.uint8)
    assert to_e2m1(e2m1_to_float32(codes)).tolist() == codes.tolist()


def test_e2m1_packing():
    codes = torch.arange(16, dtype=torch.uint8)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert unpack_e2m1(packed).tolist() == codes.tolist()
    # Stray upper bits of a code reach neither its neighbour nor its value.
    dirty = codes | 0xA0
    assert pack_e2m1(dirty).tolist() == packed.tolist()
    assert e2m1_to_float32(dirty).tolist() == e2m1_to_float32(codes).tolist()


def test_ue8m0_values():
    values = ue8m0_to_float32(torch.arange(256, dtype=torch.uint8))
    assert values[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert values[255].isnan()


@pytest.mark.parametrize("largest", [448.0, 6.0])
@given(amax=st.floats(0, 2**127, width=32))
def test_ue8m0_scale_is_the_smallest_power_not_below(largest, amax):
    byte = ue8m0_scale(torch.tensor([amax]), largest).item()
    target = max(amax, torch.tensor(1e-10).item()) / largest
    assert 2.0 ** (byte - 127) >= target > 2.0 ** (byte - 128)


@pytest.mark.parametrize("largest", [448.0, 6.0])
@pytest.mark.parametrize("power", [-20, 0, 3])
def test_ue8m0_scale_around_powers_of_two(largest, power):
    exact = torch.tensor(largest * 2.0**power)
    above = torch.nextafter(exact, torch.tensor(INF))
    below = torch.nextafter(exact, torch.tensor(0.0))
    bytes_ = ue8m0_scale(torch.stack((below, exact, above)), largest)
    assert bytes_.tolist() == [127 + power, 127 + power, 128 + power]


def test_scales_of_zero_nan_and_infinity():
    assert float32_scale(torch.zeros(1)).item() == (torch.tensor(1e-10) / 448).item()
    assert float32_scale(torch.tensor([NAN])).isnan().all()
    assert ue8m0_scale(torch.tensor([NAN, INF]), 448.0).tolist() == [255, 255]


@pytest.mark.parametrize("format", ["fp8_block", "mxfp8_mxfp4"])
@given(
    scale=st.floats(2**-20, 2**20, width=32),
    seed=st.integers(0, 100),
    tokens=st.integers(0, 3),
    blocks=st.integers(1, 3),
)
def test_quantized_rows_are_close_and_use_the_range(format, scale, seed, tokens, blocks):
    x = torch.randn(tokens, 128 * blocks, generator=torch.Generator().manual_seed(seed)) * scale
    values, sf = quantize_activation(x, format)
    assert values.shape == x.shape and sf.shape == (tokens, blocks)
    restored = dequantize_rows(values, sf)
    # Half an ulp of a 3-bit mantissa relative, and half of the smallest E4M3 step times the SF absolute.
    group_amax = x.unflatten(-1, (-1, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1)
    assert ((restored - x).abs() <= x.abs() / 16 * 1.001 + group_amax / 448 * 2**-9).all()
    largest = values.float().abs().unflatten(-1, (-1, 128 if format == "fp8_block" else 32)).amax(-1)
    assert (largest == 448).all() if format == "fp8_block" else (largest >= 224).all()


def test_mx_scales_are_packed_lowest_k_first():
    x = torch.zeros(1, 256)
    for group in range(8):
        x[0, 32 * group] = 448.0 * 2**group
    _, packed = quantize_activation(x, "mxfp8_mxfp4")
    words = [word & 0xFFFF_FFFF for word in packed[0].tolist()]
    assert words == [0x8281807F, 0x86858483]


def test_nan_stays_in_its_group():
    x = torch.ones(2, 256)
    x[1, 3] = NAN
    values, scale = quantize_rows(x, "fp8_block", 128)
    restored = dequantize_rows(values, scale)
    assert restored[1, 3].isnan()
    assert not restored[0].isnan().any() and not restored[1, 128:].isnan().any()


def test_bad_activations_are_named():
    with pytest.raises(InputError, match=r"100 columns.*128"):
        quantize_activation(torch.zeros(1, 100))
    with pytest.raises(InputError, match=r"format='int8'"):
        quantize_activation(torch.zeros(1, 128), "int8")
