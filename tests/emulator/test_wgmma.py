"""wgmma layouts and arithmetic against direct formulations of the PTX ISA's figures and tables."""

import itertools
from fractions import Fraction

import native
import numpy as np
import pytest
from hw import streams
from hw.wgmma_cases import ELEMENT_BYTES, SWIZZLE_FIELD, fp8_values

# Positions of eight 16-byte chunks in successive lines of 128 bytes, as the ISA prints them.
SWIZZLE_TABLES = {
    0: [[0, 1, 2, 3, 4, 5, 6, 7]],
    32: [[0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6]],
    64: [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [1, 0, 3, 2, 5, 4, 7, 6],
        [2, 3, 0, 1, 6, 7, 4, 5],
        [3, 2, 1, 0, 7, 6, 5, 4],
    ],
    128: [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [1, 0, 3, 2, 5, 4, 7, 6],
        [2, 3, 0, 1, 6, 7, 4, 5],
        [3, 2, 1, 0, 7, 6, 5, 4],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [5, 4, 7, 6, 1, 0, 3, 2],
        [6, 7, 4, 5, 2, 3, 0, 1],
        [7, 6, 5, 4, 3, 2, 1, 0],
    ],
}


def descriptor(start: int, leading: int, stride: int, swizzle: int, base_offset: int = 0) -> int:
    """Bits 0-13 start, 16-29 leading, 32-45 stride, 49-51 base offset, 62-63 swizzle."""
    fields = (start >> 4) + ((leading >> 4) << 16) + ((stride >> 4) << 32)
    return fields + (base_offset << 49) + (SWIZZLE_FIELD[swizzle] << 62)


def swizzled(address: int, swizzle: int, base_offset: int = 0) -> int:
    table = SWIZZLE_TABLES[swizzle]
    line, chunk = address // 128, address % 128 // 16
    return line * 128 + table[(line - base_offset) % len(table)].index(chunk) * 16 + address % 16


def place_k_major(
    image: np.ndarray, rows: np.ndarray, start: int, leading: int, stride: int, swizzle: int
) -> None:
    """Writes [rows, 32]-byte data: 8-row groups ``stride`` apart; K in 16-byte columns ``leading`` apart
    without swizzle, else contiguous in rows of the span."""
    for row, data in enumerate(rows):
        for k in range(32):
            if swizzle == 0:
                address = start + row // 8 * stride + row % 8 * 16 + k // 16 * leading + k % 16
            else:
                address = swizzled(start + row // 8 * stride + row % 8 * swizzle + k, swizzle)
            image[address] = data[k]


def place_mn_major(
    image: np.ndarray, rows: np.ndarray, start: int, leading: int, stride: int, swizzle: int
) -> None:
    """Writes 16-bit data with M or N contiguous: groups of ``span`` bytes along MN, groups of 8 along K."""
    halves = np.ascontiguousarray(rows).view(np.uint16)
    span = swizzle or 16
    for mn in range(len(halves)):
        for k in range(16):
            inside = mn * 2 % span + k % 8 * span
            along_mn, along_k = mn * 2 // span, k // 8
            if swizzle == 0:
                address = start + along_mn * stride + along_k * leading + inside
            else:
                address = swizzled(start + along_mn * leading + along_k * stride + inside, swizzle)
            image[address : address + 2] = halves[mn, k : k + 1].view(np.uint8)


def d_position(thread: int, i: int) -> tuple[int, int]:
    """The ISA's formulas for fragment D."""
    group, in_group = thread % 32 >> 2, thread % 4
    row = group if i % 4 < 2 else group + 8
    return thread // 32 * 16 + row, in_group * 2 + (i & 1) + 8 * (i // 4)


def a_position(thread: int, i: int, element_bytes: int) -> tuple[int, int]:
    """The ISA's formulas for fragment A: m64k16 (2 bytes), m64k8 (4 bytes), m64k32 (1 byte)."""
    group, in_group = thread % 32 >> 2, thread % 4
    if element_bytes == 2:
        row = group if i < 2 or 4 <= i < 6 else group + 8
        column = in_group * 2 + (i & 1) + (8 if i >= 4 else 0)
    elif element_bytes == 4:
        row = group if i in (0, 2) else group + 8
        column = in_group + (4 if i >= 2 else 0)
    else:
        row = group if i < 4 or 8 <= i < 12 else group + 8
        column = in_group * 4 + (i & 3) + (16 if i >= 8 else 0)
    return thread // 32 * 16 + row, column


def matrix_of(registers: np.ndarray, n: int, d: str = "f32") -> np.ndarray:
    """D [64, n] from registers [registers, 128], element by element."""
    out = np.zeros((64, n))
    for thread in range(128):
        words = np.ascontiguousarray(registers[:, thread])
        values = words.view({"f32": np.float32, "s32": np.int32, "f16": np.float16}[d])
        for i in range(n // 2):
            out[d_position(thread, i)] = values[i]
    return out


def encode_operand(values: np.ndarray, fmt: str) -> np.ndarray:
    """[rows, K] numbers as bytes [rows, 32]."""
    if fmt in ("s8", "u8"):
        return values.astype(np.int64).astype(np.uint8)
    codes = native.encode(values, fmt)
    return codes.astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[ELEMENT_BYTES[fmt]]).view(np.uint8)


def small_integers(seed: int, rows: int, depth: int, fmt: str) -> np.ndarray:
    values = streams.below(seed, rows * depth, 8) - (0 if fmt == "u8" else 3)
    return values.reshape(rows, depth).astype(np.float64)


def accumulator_of(fmt: str) -> str:
    return "s32" if fmt in ("s8", "u8") else "f32"


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "f16", "bf16", "tf32", "s8", "u8"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_k_major_layouts(fmt, swizzle):
    depth, n = 32 // ELEMENT_BYTES[fmt], 24
    a, b = small_integers(1, 64, depth, fmt), small_integers(2, n, depth, fmt)
    image = np.full(65536, 0x7E, np.uint8)
    span = swizzle or 32
    for k_offset in range(0, span, 32):
        layout_a = (1024, 2048, 4608) if swizzle == 0 else (1024 + k_offset, 16, 8 * swizzle + 1024)
        layout_b = (32768, 128, 256) if swizzle == 0 else (32768, 16, 8 * swizzle)
        if swizzle == 0:
            layout_a = (1024, 16384, 128)  # the two K columns far apart
        place_k_major(image, encode_operand(a, fmt), *layout_a, swizzle)
        place_k_major(image, encode_operand(b, fmt), *layout_b, swizzle)
        d = accumulator_of(fmt)
        result = native.wgmma(
            n,
            fmt,
            fmt,
            image,
            descriptor(*layout_a, swizzle),
            descriptor(*layout_b, swizzle),
            np.zeros((n // 2, 128)),
            d=d,
            scale_d=False,
        )
        assert np.array_equal(matrix_of(result, n, d), a @ b.T)


@pytest.mark.parametrize("fmt", ["f16", "bf16"])
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("transposed", ["a", "b", "ab"])
def test_mn_major_layouts(fmt, swizzle, transposed):
    n, span = 128, swizzle or 16
    a, b = small_integers(3, 64, 16, fmt), small_integers(4, n, 16, fmt)
    image = np.zeros(131072, np.uint8)
    layouts = {}
    for name, data, start in (("a", a, 0), ("b", b, 65536)):
        if name in transposed:
            layouts[name] = (start, 8 * span * 5, 8 * span * 2, swizzle)
            place_mn_major(image, encode_operand(data, fmt), *layouts[name])
        else:
            layouts[name] = (start, 128, 256, swizzle) if swizzle == 0 else (start, 16, 8 * swizzle, swizzle)
            place_k_major(image, encode_operand(data, fmt), *layouts[name])
    result = native.wgmma(
        n,
        fmt,
        fmt,
        image,
        descriptor(*layouts["a"]),
        descriptor(*layouts["b"]),
        np.zeros((n // 2, 128)),
        scale_d=False,
        transpose_a="a" in transposed,
        transpose_b="b" in transposed,
    )
    assert np.array_equal(matrix_of(result, n), a @ b.T)


def test_base_offset_shifts_the_pattern():
    a, b = small_integers(5, 64, 32, "e4m3"), small_integers(6, 8, 32, "e4m3")
    image = np.zeros(32768, np.uint8)
    place_k_major(image, encode_operand(b, "e4m3"), 16384, 16, 1024, 128)
    start, lines = 3 * 128, 3
    for row, data in enumerate(encode_operand(a, "e4m3")):
        for k in range(32):
            image[swizzled(start + row // 8 * 1024 + row % 8 * 128 + k, 128, lines)] = data[k]
    result = native.wgmma(
        8,
        "e4m3",
        "e4m3",
        image,
        descriptor(start, 16, 1024, 128, lines),
        descriptor(16384, 16, 1024, 128),
        np.zeros((4, 128)),
        scale_d=False,
    )
    assert np.array_equal(matrix_of(result, 8), a @ b.T)


def plain(image: np.ndarray, a: np.ndarray | None, b: np.ndarray) -> tuple[int, int]:
    """Places byte operands without swizzle; their descriptors."""
    if a is not None:
        place_k_major(image, a, 0, 128, 256, 0)
    place_k_major(image, b, 4096, 128, 256, 0)
    return descriptor(0, 128, 256, 0), descriptor(4096, 128, 256, 0)


@pytest.mark.parametrize("fmt", ["e4m3", "f16", "tf32", "u8"])
def test_a_from_registers(fmt):
    size = ELEMENT_BYTES[fmt]
    depth, n, per_register = 32 // size, 16, 4 // size
    a, b = small_integers(7, 64, depth, fmt), small_integers(8, n, depth, fmt)
    codes = encode_operand(a, fmt).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])
    fragments = np.zeros((4, 128), np.uint32)
    for thread in range(128):
        for i in range(4 * per_register):
            code = int(codes[a_position(thread, i, size)])
            fragments[i // per_register, thread] |= np.uint32(code << (i % per_register * size * 8))
    image = np.zeros(8192, np.uint8)
    _, desc_b = plain(image, None, encode_operand(b, fmt))
    d = accumulator_of(fmt)
    result = native.wgmma(
        n, fmt, fmt, image, 0, desc_b, np.zeros((n // 2, 128)), d=d, fragments=fragments, scale_d=False
    )
    assert np.array_equal(matrix_of(result, n, d), a @ b.T)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_n(n):
    a, b = small_integers(9, 64, 32, "e4m3"), small_integers(10 + n, n, 32, "e5m2")
    image = np.zeros(16384, np.uint8)
    desc_a, desc_b = plain(image, encode_operand(a, "e4m3"), encode_operand(b, "e5m2"))
    c = small_integers(11, n // 2, 128, "f32").astype(np.float32)
    result = native.wgmma(n, "e4m3", "e5m2", image, desc_a, desc_b, c.view(np.uint32))
    assert np.array_equal(matrix_of(result, n), a @ b.T + matrix_of(c.view(np.uint32), n))


def test_negation_and_f16_accumulators():
    n = 16
    a, b = small_integers(12, 64, 16, "f16"), small_integers(13, n, 16, "f16")
    image = np.zeros(8192, np.uint8)
    desc_a, desc_b = plain(image, encode_operand(a, "f16"), encode_operand(b, "f16"))
    c = (
        small_integers(14, 1, n // 2 * 128, "f16")
        .astype(np.float16)
        .reshape(128, -1)
        .view(np.uint32)
        .T.copy()
    )
    for negate_a, negate_b in ((False, False), (True, False), (False, True), (True, True)):
        result = native.wgmma(
            n, "f16", "f16", image, desc_a, desc_b, c, d="f16", negate_a=negate_a, negate_b=negate_b
        )
        sign = -1 if negate_a != negate_b else 1
        assert np.array_equal(matrix_of(result, n, "f16"), sign * (a @ b.T) + matrix_of(c, n, "f16"))


def test_integers_wrap_around_or_saturate():
    n = 8
    a, b = np.full((64, 32), 255.0), np.full((n, 32), 255.0)
    image = np.zeros(8192, np.uint8)
    desc_a, desc_b = plain(image, encode_operand(a, "u8"), encode_operand(b, "u8"))
    start = np.full((n // 2, 128), 2**31 - 10, np.uint32)
    wrapped = native.wgmma(n, "u8", "u8", image, desc_a, desc_b, start, d="s32")
    clamped = native.wgmma(n, "u8", "u8", image, desc_a, desc_b, start, d="s32", satfinite=True)
    assert (wrapped == (2**31 - 10 + 32 * 255 * 255) % 2**32).all() and (clamped == 2**31 - 1).all()
    signed = native.wgmma(n, "s8", "u8", image, desc_a, desc_b, np.zeros_like(start), d="s32")
    assert (signed.view(np.int32) == -32 * 255).all()


def test_bits_count_the_ones_of_the_conjunction():
    n = 8
    a, b = streams.uint8(15, 64 * 32).reshape(64, 32), streams.uint8(16, n * 32).reshape(n, 32)
    image = np.zeros(8192, np.uint8)
    desc_a, desc_b = plain(image, a, b)
    result = native.wgmma(
        n, "b1", "b1", image, desc_a, desc_b, np.zeros((n // 2, 128)), d="s32", scale_d=False
    )
    ones = np.unpackbits(a, axis=1).astype(int) @ np.unpackbits(b, axis=1).astype(int).T
    assert np.array_equal(matrix_of(result, n, "s32"), ones)


# --- the accumulation model --------------------------------------------------------------------------------


def nominal_exponent(value: float, min_exponent: int) -> int:
    return max(int(np.floor(np.log2(abs(value)))), min_exponent)


def truncate(value: Fraction) -> int:
    whole = abs(value.numerator) // value.denominator
    return whole if value >= 0 else -whole


def model_step(a, b, c: float, min_exponents, fraction_bits: int, result_bits: int) -> float:
    """One step by the definition of the model, with rationals."""
    terms = [
        (
            Fraction(x) * Fraction(y),
            nominal_exponent(x, min_exponents[0]) + nominal_exponent(y, min_exponents[1]),
        )
        for x, y in zip(a, b, strict=True)
        if x and y
    ]
    if c:
        terms.append((Fraction(c), nominal_exponent(c, -126)))
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(e for _, e in terms) - fraction_bits)
    total = sum(truncate(value / unit) for value, _ in terms) * unit
    if total == 0:
        return 0.0
    quantum = Fraction(2) ** (max(nominal_exponent(float(total), -126), -126) - result_bits)
    return float(truncate(total / quantum) * quantum)


MIN_EXPONENTS = {"e4m3": -6, "e5m2": -14, "f16": -14, "bf16": -126, "tf32": -126}


@pytest.mark.parametrize(
    "model", [None, native.Model(13, 13, 16), native.Model(14, 23, 32), native.Model(25, 23, 32)]
)
@pytest.mark.parametrize(("a_fmt", "b_fmt"), [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e5m2")])
@pytest.mark.parametrize("kind", ["uniform", "bell", "subnormal", "sparse", "pairs"])
def test_fp8_accumulation_by_the_model(kind, a_fmt, b_fmt, model):
    n = 8
    a, b = fp8_values(kind, a_fmt, 17, 64, 32), fp8_values(kind, b_fmt, 18, n, 32)
    image = np.zeros(8192, np.uint8)
    desc_a, desc_b = plain(image, a, b)
    scale = {"uniform": 2.0**4, "bell": 1.0, "subnormal": 2.0**-14, "sparse": 2.0**-3, "pairs": 1.0}[kind]
    c = ((streams.unit(19, n // 2 * 128) - 0.5) * scale).astype(np.float32).reshape(n // 2, 128)
    c[0, ::3] = 0
    c[1, ::5] *= np.float32(2.0**30)
    registers = native.wgmma(n, a_fmt, b_fmt, image, desc_a, desc_b, c.view(np.uint32), model=model)
    result, before = matrix_of(registers, n), matrix_of(c.view(np.uint32), n)
    a_values, b_values = native.decode(a, a_fmt), native.decode(b, b_fmt)
    used = model or native.Model(13, 13, 32)
    minima = (MIN_EXPONENTS[a_fmt], MIN_EXPONENTS[b_fmt])
    for row in range(0, 64, 3):
        for column in range(n):
            expected = float(before[row, column])
            for first in range(0, 32, used.terms):
                k = slice(first, first + used.terms)
                expected = model_step(
                    a_values[row, k],
                    b_values[column, k],
                    expected,
                    minima,
                    used.fraction_bits,
                    used.result_fraction_bits,
                )
            assert result[row, column] == expected, (row, column)


@pytest.mark.parametrize("fmt", ["f16", "bf16", "tf32"])
def test_wide_accumulation_by_the_model(fmt):
    n, depth = 8, 32 // ELEMENT_BYTES[fmt]
    spread = 2.0 ** (streams.below(20, (64 + n) * depth, 20) - 10.0)
    values = ((streams.unit(21, (64 + n) * depth) - 0.5) * spread).reshape(-1, depth)
    a, b = (native.decode(native.encode(part, fmt, "rz"), fmt) for part in (values[:64], values[64:]))
    image = np.zeros(8192, np.uint8)
    desc_a, desc_b = plain(image, encode_operand(a, fmt), encode_operand(b, fmt))
    c = ((streams.unit(22, n // 2 * 128) - 0.5) * 100).astype(np.float32).reshape(n // 2, 128)
    result = matrix_of(native.wgmma(n, fmt, fmt, image, desc_a, desc_b, c.view(np.uint32)), n)
    before = matrix_of(c.view(np.uint32), n)
    minima = (MIN_EXPONENTS[fmt],) * 2
    for row in range(0, 64, 3):
        for column in range(n):
            assert result[row, column] == model_step(
                a[row], b[column], float(before[row, column]), minima, 25, 23
            )


@pytest.mark.parametrize("fmt", ["e5m2", "f16", "bf16"])
def test_nan_and_infinity_stay_in_their_rows_and_columns(fmt):
    n, depth = 16, 32 // ELEMENT_BYTES[fmt]
    a, b = small_integers(23, 64, depth, fmt) + 4, small_integers(24, n, depth, fmt) + 4
    clean = a @ b.T
    a[5, 3], a[9, 0], b[7, 1] = np.nan, np.inf, -np.inf
    image = np.zeros(8192, np.uint8)
    desc_a, desc_b = plain(image, encode_operand(a, fmt), encode_operand(b, fmt))
    registers = native.wgmma(n, fmt, fmt, image, desc_a, desc_b, np.zeros((n // 2, 128)))
    result = matrix_of(registers, n)
    assert (
        np.isnan(result[5]).all()
        and (result[9, np.arange(n) != 7] == np.inf).all()
        and np.isnan(result[9, 7])
    )
    others = [row for row in range(64) if row not in (5, 9)]
    assert (result[others, 7] == -np.inf).all()
    columns = [column for column in range(n) if column != 7]
    assert np.array_equal(result[np.ix_(others, columns)], clean[np.ix_(others, columns)])
    assert set(registers[np.isnan(registers.view(np.float32))].tolist()) == {0x7FFFFFFF}


# --- ranges and shapes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("mn_major", [False, True])
def test_ranges_cover_exactly_what_is_read(swizzle, mn_major):
    rows, span = 64, swizzle or 16
    layout = (
        (2048, 8 * span * 5, 8 * span * 2, swizzle)
        if mn_major
        else (
            (2048, 1536, 256, 0)
            if swizzle == 0
            else (2048 + (32 if swizzle > 32 else 0), 16, 8 * swizzle + 1024, swizzle)
        )
    )
    for first, last in ((0, 64), (16, 32)):
        marked = np.zeros(65536, np.uint8)
        place = place_mn_major if mn_major else place_k_major
        data = np.zeros((rows, 32), np.uint8)
        data[first:last] = 1
        place(marked, data, *layout)
        expected = np.flatnonzero(marked)
        ranges = native.wgmma_ranges(descriptor(*layout), mn_major, first, last)
        covered = np.concatenate([np.arange(begin, end) for begin, end in ranges])
        assert np.array_equal(covered, expected)
        assert all(a_end < b_begin for (_, a_end), (b_begin, _) in itertools.pairwise(ranges))


def test_forms_outside_of_the_tables_are_named():
    assert native.wgmma_invalid(128, "e4m3", "e5m2") is None
    assert native.wgmma_invalid(24, "s8", "u8", "s32") is None
    assert native.wgmma_invalid(64, "f16", "f16", "f16", transpose_b=True) is None
    for n, a, b, d, flags, word in (
        (12, "e4m3", "e4m3", "f32", {}, "multiple of 8"),
        (264, "e4m3", "e4m3", "f32", {}, "256"),
        (40, "s8", "s8", "s32", {}, "multiple of 16"),
        (64, "e4m3", "s8", "f32", {}, "families"),
        (64, "f16", "bf16", "f32", {}, "same type"),
        (64, "s8", "s8", "f32", {}, "s32"),
        (64, "bf16", "bf16", "f16", {}, "f16 accumulators"),
        (64, "e4m3", "e4m3", "f32", {"transpose_b": True}, "MN-major"),
        (64, "s8", "s8", "s32", {"negate_a": True}, "negated"),
    ):
        message = native.wgmma_invalid(n, a, b, d, **flags)
        assert message and word in message
