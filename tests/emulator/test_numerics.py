"""Conversions and arithmetic against formulations with exact rational numbers, written from the PTX ISA."""

from fractions import Fraction

import native
import numpy as np
import pytest
from hw import streams

# exponent bits, mantissa bits, largest finite value, has infinity
FORMATS = {
    "f32": (8, 23, Fraction((2**24 - 1) * 2**104), True),
    "tf32": (8, 10, Fraction((2**11 - 1) * 2**117), True),
    "f16": (5, 10, Fraction(65504), True),
    "bf16": (8, 7, Fraction((2**8 - 1) * 2**120), True),
    "e4m3": (4, 3, Fraction(448), False),
    "e5m2": (5, 2, Fraction(57344), True),
    "e3m2": (3, 2, Fraction(28), False),
    "e2m3": (2, 3, Fraction(15, 2), False),
    "e2m1": (2, 1, Fraction(6), False),
}
SMALL = ("f16", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1")


def floats(seed: int, count: int, low: int = 0, high: int = 255) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return streams.float32_bits(seed, count, (low, high)).view(np.float32).astype(np.float64)


def round_fraction(value: Fraction, rounding: str) -> int:
    """Rounds to an integer."""
    below = value.numerator // value.denominator
    rest = value - below
    if rest == 0 or rounding == "rm":
        return below
    if rounding == "rp":
        return below + 1
    if rounding == "rz":
        return below if value > 0 else below + 1
    if rest != Fraction(1, 2):
        return below + (rest > Fraction(1, 2))
    return below + (below % 2 if rounding == "rn" else value > 0)  # rna: away from zero


def exponent_of(value: Fraction, smallest: int) -> int:
    """The exponent e with 2^e <= |value| < 2^(e + 1), or ``smallest`` if that is larger."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    return max(exponent, smallest)


def round_to(value: float, fmt: str, rounding: str) -> Fraction | str:
    """The rounded value by definition, or "overflow": scale to units in the last place, round, scale back."""
    exponent_bits, mantissa_bits, largest, _ = FORMATS[fmt]
    exact = Fraction(value)
    unit = Fraction(2) ** (exponent_of(exact, 2 - 2 ** (exponent_bits - 1)) - mantissa_bits)
    rounded = round_fraction(exact / unit, rounding) * unit
    return rounded if abs(rounded) <= largest else "overflow"


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f not in ("f32", "tf32")])
def test_decode_by_the_definition_of_the_format(fmt):
    exponent_bits, mantissa_bits, largest, has_infinity = FORMATS[fmt]
    width = 1 + exponent_bits + mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    codes = np.arange(2**width)
    values = native.decode(codes, fmt)
    for code, value in zip(codes.tolist(), values.tolist(), strict=True):
        sign = -1 if code >> (width - 1) else 1
        field = code >> mantissa_bits & (2**exponent_bits - 1)
        mantissa = code & (2**mantissa_bits - 1)
        if has_infinity and field == 2**exponent_bits - 1:
            assert value == sign * np.inf if mantissa == 0 else np.isnan(value)
        elif fmt == "e4m3" and code & 0x7F == 0x7F:
            assert np.isnan(value)
        else:
            scale = Fraction(2) ** ((field or 1) - bias - mantissa_bits)
            assert Fraction(value) == sign * (mantissa + (2**mantissa_bits if field else 0)) * scale
            assert abs(Fraction(value)) <= largest


@pytest.mark.parametrize("fmt", (*SMALL, "bf16"))
def test_every_code_survives_a_round_trip(fmt):
    width = 1 + sum(FORMATS[fmt][:2])
    codes = np.arange(2**width, dtype=np.uint64)
    values = native.decode(codes, fmt)
    finite = ~np.isnan(values)
    for rounding in ("rn", "rz", "rm", "rp"):
        assert (native.encode(values[finite], fmt, rounding) == codes[finite]).all()


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp", "rna"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_encode_rounds_as_defined(fmt, rounding):
    exponent_bits, _mantissa_bits, largest, has_infinity = FORMATS[fmt]
    bias = 2 ** (exponent_bits - 1) - 1
    centre = min(bias + 2, 30) if fmt not in ("f32", "tf32", "bf16") else 126
    values = floats(11, 1000, 127 - centre - 6, 127 + centre)
    values = values[np.isfinite(values)]
    if fmt == "f32":  # float32 inputs would be exact
        values = values * (1 + streams.unit(3, len(values)) * 2.0**-20)
    got = native.decode(native.encode(values, fmt, rounding), fmt)
    for value, result in zip(values.tolist(), got.tolist(), strict=True):
        expected = round_to(value, fmt, rounding)
        if expected != "overflow":
            assert Fraction(result) == expected, (value, result)
            assert np.signbit(result) == np.signbit(value)
            continue
        towards_zero = rounding == "rz" or rounding == ("rp" if value < 0 else "rm")
        if towards_zero or fmt in ("e3m2", "e2m3", "e2m1"):
            assert result == np.copysign(float(largest), value)
        else:
            assert result == np.copysign(np.inf, value) if has_infinity else np.isnan(result)


@pytest.mark.parametrize("fmt", ["f16", "bf16", "tf32", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_satfinite_and_relu(fmt):
    largest = float(FORMATS[fmt][2])
    values = np.array([np.inf, -np.inf, largest * 1.9, -largest * 1.9, 1.0, -1.0, -0.0, 0.0])
    saturated = native.decode(native.encode(values, fmt, satfinite=True), fmt)
    assert saturated.tolist() == [largest, -largest, largest, -largest, 1.0, -1.0, 0.0, 0.0]
    clamped = native.encode(values, fmt, satfinite=True, relu=True)
    assert native.decode(clamped, fmt).tolist() == [largest, 0, largest, 0, 1, 0, 0, 0]
    assert (clamped[[1, 3, 5, 6]] == 0).all()


def test_nan_becomes_the_canonical_nan_of_the_format():
    nans = np.array([np.nan, -np.nan])
    expected = {
        "f32": 0x7FFFFFFF,
        "tf32": 0x7FFFE000,
        "f16": 0x7FFF,
        "bf16": 0x7FFF,
        "e4m3": 0x7F,
        "e5m2": 0x7F,
        "e3m2": 0x1F,
        "e2m3": 0x1F,
        "e2m1": 0x7,
        "ue8m0": 0xFF,
    }
    for fmt, code in expected.items():
        for satfinite in (False, True):
            for relu in (False, True):
                assert (native.encode(nans, fmt, "rz", satfinite, relu) == code).all(), fmt


def test_tf32_registers():
    bits = streams.float32_bits(90, 2000)
    values = bits.view(np.float32)
    number = ~np.isnan(values)
    for rounding in ("rn", "rz", "rna"):
        for satfinite in (False, True):
            got = native.to_tf32(bits, rounding, satfinite)
            with np.errstate(invalid="ignore"):
                assert (got == native.encode(values.astype(np.float64), "tf32", rounding, satfinite))[
                    number
                ].all()
    assert native.to_tf32([0x7F800001, 0xFFCF1324], "rn").tolist() == [0x7FFFE000, 0x7FFFE000]
    # What an H200 does: the payload is cut, and satfinite steps down.
    assert native.to_tf32([0x7F800001, 0xFFCF1324], "rna").tolist() == [0x7F800000, 0xFFCF0000]
    assert native.to_tf32([0x7F800001, 0xFFCF1324], "rna", True).tolist() == [0x7F7FE000, 0xFFCEE000]


def test_ue8m0_is_a_power_of_two_rounded_up_or_down():
    assert native.decode(np.arange(255), "ue8m0").tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert np.isnan(native.decode(np.array([255]), "ue8m0")[0])
    values = np.array(
        [1.0, 1.0000001, 1.9999, 2.0, 0.3, -3.0, 0.0, 2.0**-127, 2.0**-149, 2.0**127, 1.5 * 2.0**127]
    )
    assert native.encode(values, "ue8m0", "rz").tolist() == [127, 127, 127, 128, 125, 128, 0, 0, 0, 254, 254]
    assert native.encode(values, "ue8m0", "rp").tolist() == [127, 128, 128, 128, 126, 129, 0, 0, 0, 254, 255]
    assert native.encode(values, "ue8m0", "rp", satfinite=True)[-1] == 254
    infinite = np.array([np.inf])
    assert native.encode(infinite, "ue8m0", "rz")[0] == 255
    assert native.encode(infinite, "ue8m0", "rz", satfinite=True)[0] == 254


@pytest.mark.parametrize(
    ("fmt", "width"),
    [
        ("f16", 16),
        ("bf16", 16),
        ("e4m3", 8),
        ("e5m2", 8),
        ("e3m2", 8),
        ("e2m3", 8),
        ("e2m1", 4),
        ("ue8m0", 8),
    ],
)
def test_packed_pairs_have_the_first_operand_on_top(fmt, width):
    high, low = np.array([1.0, 4.0]), np.array([2.0, 0.5])
    packed = native.encode_x2(high, low, fmt)
    assert (packed >> width == native.encode(high, fmt)).all()
    assert (packed & (2**width - 1) == native.encode(low, fmt)).all()


def test_conversion_between_pairs():
    every = np.arange(65536, dtype=np.uint32)
    halves = native.convert_x2(every, "e4m3", "f16")
    for shift_in, shift_out in ((0, 0), (8, 16)):
        values = native.decode(every >> shift_in & 0xFF, "e4m3")
        assert np.array_equal(native.decode(halves >> shift_out & 0xFFFF, "f16"), values, equal_nan=True)
    scales = native.convert_x2(every, "ue8m0", "bf16")
    assert np.array_equal(
        native.decode(scales & 0xFFFF, "bf16"), native.decode(every & 0xFF, "ue8m0"), equal_nan=True
    )


# --- arithmetic --------------------------------------------------------------------------------------------


def exact_result(operation: str, a: float, b: float, c: float) -> Fraction | None:
    """The unrounded result of finite operands; None where it isn't rational or finite."""
    x, y, z = Fraction(a), Fraction(b), Fraction(c)
    if operation in ("div", "rcp"):
        x, y = (x, y) if operation == "div" else (Fraction(1), x)
        return x / y if y else None
    return {"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}[operation]


def operands(seed: int, count: int) -> list[np.ndarray]:
    """Finite operands; half of the addends nearly cancel the product."""
    arrays = [floats(seed + i, count, 100, 150).astype(np.float32) for i in range(3)]
    arrays = [np.where(np.isfinite(x), x, np.float32(3.25)) for x in arrays]
    a, b, c = arrays
    with np.errstate(over="ignore", invalid="ignore"):
        cancelling = np.where(np.isfinite(a * b), -(a * b), c)
    return [a, b, np.where(np.arange(count) % 2 == 0, c, cancelling).astype(np.float32)]


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("operation", ["add", "sub", "mul", "fma", "div", "rcp"])
def test_arithmetic_rounds_the_exact_result_once(operation, rounding):
    a, b, c = operands(20, 1000)
    if operation in ("add", "sub"):
        b = np.where(np.arange(len(a)) % 3 == 0, np.nextafter(-a, np.float32(0)), b).astype(np.float32)
    results = native.arithmetic(operation, [a, b, c], rounding)
    checked = 0
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), results.tolist(), strict=True):
        exact = exact_result(operation, x, y, z)
        if exact is None or exact == 0:
            continue
        checked += 1
        expected = round_to_f32(exact, rounding)
        assert result == expected, (operation, rounding, x, y, z)
    assert checked > 800


def round_to_f32(exact: Fraction, rounding: str) -> float:
    """Rounds a rational to float32; overflow gives infinity or the largest value by direction."""
    unit = Fraction(2) ** (exponent_of(exact, -126) - 23)
    rounded = round_fraction(exact / unit, rounding) * unit
    largest = FORMATS["f32"][2]
    if abs(rounded) <= largest:
        return float(rounded)
    stays = rounding == "rz" or rounding == ("rp" if exact < 0 else "rm")
    return float(largest if exact > 0 else -largest) if stays else float("inf") * (1 if exact > 0 else -1)


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_square_root(rounding):
    values = np.abs(operands(31, 500)[0])
    values = values[values > 0]
    for value, root in zip(
        values.tolist(), native.arithmetic("sqrt", [values], rounding).tolist(), strict=True
    ):
        x, r = Fraction(value), Fraction(root)
        up, down = (Fraction(float(np.nextafter(np.float32(root), np.float32(d)))) for d in (np.inf, 0))
        if rounding == "rp":
            assert r * r >= x and down * down < x
        elif rounding == "rn":
            assert ((r + down) / 2) ** 2 <= x <= ((r + up) / 2) ** 2
        else:
            assert r * r <= x < up * up


def test_signs_of_zero_sums():
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    for rounding in ("rn", "rz", "rp", "rm"):
        for result in (
            native.arithmetic("add", [one, -one], rounding),
            native.arithmetic("fma", [one, one, -one], rounding),
        ):
            assert result[0] == 0 and np.signbit(result[0]) == (rounding == "rm")
        assert np.signbit(native.arithmetic("add", [-zero, -zero], rounding)[0])
        assert np.signbit(native.arithmetic("add", [zero, -zero], rounding)[0]) == (rounding == "rm")


@pytest.mark.parametrize("rounding", ["rn", "rz"])
def test_nan_results_are_canonical(rounding):
    infinity, zero = np.array([np.inf], np.float32), np.zeros(1, np.float32)
    payload = np.array([0xFFC12345], np.uint32).view(np.float32)
    results = [
        native.arithmetic("add", [infinity, -infinity], rounding),
        native.arithmetic("mul", [infinity, zero], rounding),
        native.arithmetic("fma", [payload, zero, zero], rounding),
        native.arithmetic("div", [zero, zero], rounding),
        native.arithmetic("sqrt", [-infinity], rounding),
    ]
    assert all(r.view(np.uint32)[0] == 0x7FFFFFFF for r in results)


def test_flush_to_zero_and_saturation():
    tiny = np.array([2.0**-127, -(2.0**-127)], np.float32)
    one = np.ones(2, np.float32)
    flushed = native.arithmetic("mul", [tiny, one], ftz=True)
    assert flushed.tolist() == [0, 0] and np.signbit(flushed).tolist() == [False, True]
    assert native.arithmetic("mul", [tiny, one]).tolist() == tiny.tolist()
    small = np.array([2.0**-100] * 2, np.float32)  # the result, not an operand, is subnormal
    assert native.arithmetic(
        "mul", [small, np.array([2.0**-30, -(2.0**-30)], np.float32)], ftz=True
    ).tolist() == [0, 0]
    values = np.array([-1.5, 0.25, 7.0, np.nan, np.inf, -0.0], np.float32)
    saturated = native.arithmetic("mul", [values, np.ones(6, np.float32)], sat=True)
    assert saturated.tolist() == [0, 0.25, 1, 0, 1, 0] and not np.signbit(saturated).any()


def test_min_and_max():
    nan, zero = np.float32(np.nan), np.float32(0)
    a = np.array([1, nan, nan, zero, -zero, -3], np.float32)
    b = np.array([2, 5, nan, -zero, zero, 2], np.float32)
    largest, least = native.extremum("max", a, b), native.extremum("min", a, b)
    assert largest[:2].tolist() == [2, 5] and np.isnan(largest[2]) and largest[5] == 2
    assert np.signbit(largest[3:5]).tolist() == [False, False] and np.signbit(least[3:5]).tolist() == [
        True,
        True,
    ]
    assert np.isnan(native.extremum("max", a, b, nan=True)[1])
    assert native.extremum("max", a, b, xorsign=True)[5] == -3
    assert native.extremum("min", a, b, xorsign=True)[5] == -2


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_half_arithmetic_rounds_once(fmt):
    codes = [streams.uint32(40 + i, 1500).astype(np.uint16) for i in range(3)]
    a, b, c = (native.decode(x, fmt) for x in codes)
    finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    codes = [x[finite] for x in codes]
    for operation in ("add", "sub", "mul", "fma"):
        results = native.decode(native.half(operation, fmt, codes), fmt)
        for x, y, z, result in zip(a[finite], b[finite], c[finite], results, strict=True):
            exact = exact_result(operation, float(x), float(y), float(z))
            if exact == 0:
                assert result == 0
                continue
            exponent_bits, mantissa_bits, largest, _ = FORMATS[fmt]
            unit = Fraction(2) ** (exponent_of(exact, 2 - 2 ** (exponent_bits - 1)) - mantissa_bits)
            rounded = round_fraction(exact / unit, "rn") * unit
            assert np.isinf(result) if abs(rounded) > largest else Fraction(float(result)) == rounded


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_integers(rounding):
    values = floats(50, 800, 100, 200)
    values = values[~np.isnan(values)]
    for bits in (32, 64):
        for signed in (False, True):
            low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
            got = native.to_integer(values, rounding, bits, signed)
            for value, result in zip(values.tolist(), got.tolist(), strict=True):
                if np.isinf(value):
                    expected = high if value > 0 else low
                else:
                    expected = min(max(round_fraction(Fraction(value), rounding), low), high)
                assert result == (expected if signed or expected < 2**63 else expected - 2**64)
    assert native.to_integer([np.nan], rounding, 32, True)[0] == 0
    assert native.to_integer([np.nan], rounding, 64, True)[0] == -(2**63)
    magnitudes = streams.words(60, 500) >> streams.below(61, 500, 64).astype(np.uint64)
    for negative in (0, 1):
        got = native.decode(native.from_integer(magnitudes, np.full(500, negative), "f32", rounding), "f32")
        for magnitude, result in zip(magnitudes.tolist(), got.tolist(), strict=True):
            if magnitude:
                assert result == round_to_f32(Fraction(-magnitude if negative else magnitude), rounding)


@pytest.mark.parametrize(
    ("rounding", "numpy_function"), [("rn", np.rint), ("rz", np.trunc), ("rm", np.floor), ("rp", np.ceil)]
)
def test_round_to_integral(rounding, numpy_function):
    values = floats(70, 3000, 110, 190)
    assert np.array_equal(native.round_to_integral(values, rounding), numpy_function(values), equal_nan=True)


def test_approximate_functions_are_correctly_rounded():
    values = floats(80, 2000, 110, 133).astype(np.float32)
    values = values[np.isfinite(values)]
    wide = values.astype(np.float64)
    references = {
        "ex2": np.exp2,
        "sin": np.sin,
        "cos": np.cos,
        "tanh": np.tanh,
        "lg2": np.log2,
        "sqrt": np.sqrt,
        "rcp": np.reciprocal,
        "rsqrt": lambda x: 1 / np.sqrt(x),
    }
    for name, reference in references.items():
        with np.errstate(all="ignore"):
            expected = reference(wide).astype(np.float32)
        got = native.approximate(name, [values])
        close = np.abs(got.view(np.int32).astype(np.int64) - expected.view(np.int32)) <= 1
        assert (close | (np.isnan(got) & np.isnan(expected))).all(), name


def test_special_values_of_approximate_functions():
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-140], np.float32)
    infinity, nan = np.inf, np.nan
    expected = {
        "ex2": [1, 1, infinity, 0, nan, 1],
        "rcp": [infinity, -infinity, 0, -0.0, nan, infinity],
        "rsqrt": [infinity, -infinity, 0, nan, nan, 2.0**70],
        "lg2": [-infinity, -infinity, infinity, nan, nan, -140],
        "sin": [0, -0.0, nan, nan, nan, 2.0**-140],
        "tanh": [0, -0.0, 1, -1, nan, 2.0**-140],
    }
    for name, results in expected.items():
        assert np.array_equal(
            native.approximate(name, [values]), np.array(results, np.float32), equal_nan=True
        ), name
    assert native.approximate("rcp", [np.array([2.0**127], np.float32)], ftz=True)[0] == 0
    assert np.isinf(native.approximate("rcp", [values], ftz=True)[5])
    assert native.approximate("ex2", [np.array([-130.0], np.float32)], ftz=True)[0] == 0
    assert native.approximate("ex2", [np.array([-130.0], np.float32)])[0] == np.float32(2.0**-130)


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
def test_half_approximate_functions(fmt):
    codes = np.arange(65536, dtype=np.uint16)
    values = native.decode(codes, fmt)
    with np.errstate(all="ignore"):
        for name, reference in (("ex2", np.exp2), ("tanh", np.tanh)):
            expected = native.encode(reference(values), fmt)
            assert (native.half_approximate(name, fmt, codes) == expected).all()
