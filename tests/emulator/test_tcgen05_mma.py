"""tcgen05.mma: kinds, types, layouts, scale factors and accumulation. Expected values come from the PTX ISA's layouts
and number formats; that the sum is rounded once is the emulator's model."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from tcgen05_kernel import run
from tcgen05_operands import (
    NARROW,
    SWIZZLE_SPAN,
    decode,
    idesc,
    k_major,
    mn_major,
    random_codes,
    rounded_sum,
    row_bytes,
    scale_image,
    scaled_idesc,
    swizzled,
    ue8m0,
)

from megagen.errors import EmulatorError, MemoryFault, ProxyViolation, UnsupportedInstruction

MMA = r"""{{ asm volatile("{{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
    "tcgen05.mma.{form} [%0], %1, %2, %3, p;\n}}" :: "r"({d}), "l"({a}), "l"({b}), "r"({idesc}), "r"({accumulate}) : "memory"); }}"""
SCALED = r"""{{ asm volatile("{{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
    "tcgen05.mma.{form} [%0], %1, %2, %3, [%5], [%6], p;\n}}" :: "r"({d}), "l"({a}), "l"({b}), "r"({idesc}), "r"({accumulate}), "r"({sfa}), "r"({sfb}) : "memory"); }}"""


def mma(form: str, a: str, b: str, idesc: int, d: str = "tm", accumulate: int = 0) -> str:
    return MMA.format(form=form, a=a, b=b, idesc=f"{idesc}u", d=d, accumulate=accumulate)


def scaled(
    form: str, a: str, b: str, idesc: int, sfa: str, sfb: str, d: str = "tm", accumulate: int = 0
) -> str:
    return SCALED.format(form=form, a=a, b=b, idesc=f"{idesc}u", sfa=sfa, sfb=sfb, d=d, accumulate=accumulate)


def copy_scales(group: int, to: str, offset: int, blocks: int = 1) -> str:
    """One tcgen05.cp per 128 rows of scale factors at ``offset`` of the image."""
    return "".join(
        f'ASM("tcgen05.cp.cta_group::{group}.32x128b.warpx4 [%0], %1;" :: "r"({to} + {4 * k}), "l"(desc(s + {offset + 512 * k}, 0, 128, 0)));'
        for k in range(blocks)
    )


def image_of(*parts: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Parts at multiples of 1024 bytes, and where."""
    padded = [np.pad(p, (0, -len(p) % 1024)) for p in parts]
    return np.concatenate(padded), [0, *np.cumsum([len(p) for p in padded])[:-1].tolist()]


def operands(fmt_a: str, fmt_b: str, m: int, n: int, k: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    return random_codes(rng, fmt_a, (m, k)), random_codes(rng, fmt_b, (n, k))


@pytest.mark.parametrize(
    ("fmt_a", "fmt_b"),
    [("e4m3", "e2m1"), ("e2m1", "e5m2"), ("e2m3", "e3m2"), ("e3m2", "e4m3"), ("e2m1", "e2m1")],
)
@pytest.mark.parametrize(("a_id", "b_id"), [(0, 0), (1, 3), (2, 1)])
def test_mxf8f6f4(fmt_a, fmt_b, a_id, b_id):
    m, n, k = 128, 40, 32
    a, b = operands(fmt_a, fmt_b, m, n, k)
    rng = np.random.default_rng(1)
    sa, sb = rng.integers(120, 134, (m, 4)), rng.integers(120, 134, (n, 4))
    image, (at_a, at_b, at_sa, at_sb) = image_of(
        k_major(row_bytes(a, fmt_a), 0, 128, 256), k_major(row_bytes(b, fmt_b), 0, 128, 256),
        scale_image(sa), scale_image(sb),
    )  # fmt: skip
    body = copy_scales(1, "tm + 64", at_sa) + copy_scales(1, "tm + 68", at_sb)
    body += scaled(
        "cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X", f"desc(s + {at_a}, 128, 256, 0)", f"desc(s + {at_b}, 128, 256, 0)",
        scaled_idesc(n, m, NARROW[fmt_a], NARROW[fmt_b], a_id, b_id), f"tm + 64 | {a_id}u << 30", f"tm + 68 | {b_id}u << 30",
    )  # fmt: skip
    out = run(body, image, columns=128)
    expected = rounded_sum(
        decode(a, fmt_a) * ue8m0(sa[:, a_id, None]), decode(b, fmt_b) * ue8m0(sb[:, b_id, None])
    )
    assert not out.undefined[:, :n].any()
    assert np.array_equal(out.words[:, :n].view(np.float32), expected)
    assert (out.undefined[:, n:64] == 0xFFFFFFFF).all()


def test_mxf8f6f4_by_two_ctas():
    """Each CTA has its half of A's rows and of B's columns, scale factors of its rows and of all columns."""
    m, n, k = 256, 64, 32
    a, b = operands("e2m1", "e4m3", m, n, k)
    rng = np.random.default_rng(2)
    sa, sb = rng.integers(120, 134, (m, 4)), rng.integers(120, 134, (n, 4))
    images = []
    for cta in range(2):
        rows, columns = slice(128 * cta, 128 * cta + 128), slice(n // 2 * cta, n // 2 * (cta + 1))
        image, (at_a, at_b, at_sa, at_sb) = image_of(
            k_major(row_bytes(a[rows], "e2m1"), 2, 0, 1024), k_major(row_bytes(b[columns], "e4m3"), 2, 0, 1024),
            scale_image(sa[rows]), scale_image(sb),
        )  # fmt: skip
        images.append(image)
    body = copy_scales(2, "tm + 64", at_sa) + copy_scales(2, "tm + 68", at_sb)
    body += scaled(
        "cta_group::2.kind::mxf8f6f4.block_scale", f"desc(s + {at_a}, 0, 1024, 2)", f"desc(s + {at_b}, 0, 1024, 2)",
        scaled_idesc(n, m, NARROW["e2m1"], NARROW["e4m3"], 3, 2), "tm + 64", "tm + 68",
    )  # fmt: skip
    out = run(body, np.stack(images), columns=128, pair=True)
    expected = rounded_sum(decode(a, "e2m1") * ue8m0(sa[:, 3:]), decode(b, "e4m3") * ue8m0(sb[:, 2:3]))
    assert not out.undefined[:, :, :n].any()
    assert np.array_equal(out.words[:, :, :n].reshape(m, n).view(np.float32), expected)


# --- The other kinds ---

KINDS = {"f16": ("kind::f16", 16), "bf16": ("kind::f16", 16), "tf32": ("kind::tf32", 8)}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, **NARROW}


def plain(fmt_a: str, fmt_b: str) -> tuple[str, int]:
    """Kind and K of a multiplication without scale factors."""
    return KINDS.get(fmt_a, ("kind::f8f6f4", 32))


def lanes_of(m: int, n: int, out: np.ndarray, path: str) -> np.ndarray:
    """D [m, n] from words [lane, column] of one CTA, by the ISA's layouts of the data path."""
    if path == "D":
        return out[:m, :n]
    if path == "F":  # 16 of every 32 lanes
        return np.concatenate([out[32 * q : 32 * q + 16, :n] for q in range(4)])
    parts = 128 // m  # B and E: halves of the columns in the lower and upper lanes; G: quarters
    return np.concatenate([out[m * p : m * p + m, : n // parts] for p in range(parts)], axis=1)


@pytest.mark.parametrize(
    ("fmt_a", "fmt_b", "m", "n", "negate"),
    [
        ("f16", "f16", 128, 256, 0), ("bf16", "bf16", 64, 8, 1), ("tf32", "tf32", 128, 24, 2), ("tf32", "tf32", 64, 16, 0),
        ("e4m3", "e5m2", 128, 64, 3), ("e2m1", "e3m2", 64, 48, 0), ("e2m3", "e4m3", 128, 16, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [0, 2, 4, 6])
def test_kinds_without_scale_factors(fmt_a, fmt_b, m, n, negate, mode):
    kind, k = plain(fmt_a, fmt_b)
    a, b = operands(fmt_a, fmt_b, m, n, k)
    leading, stride = (128, 256) if mode == 0 else (0, 8 * SWIZZLE_SPAN[mode])
    image, (at_a, at_b) = image_of(
        k_major(row_bytes(a, fmt_a), mode, leading, stride),
        k_major(row_bytes(b, fmt_b), mode, leading, stride),
    )
    start = np.random.default_rng(5).normal(size=(128, 256)).astype(np.float32)
    descriptors = (f"desc(s + {at}, {leading}, {stride}, {mode})" for at in (at_a, at_b))
    body = mma(
        f"cta_group::1.{kind}",
        *descriptors,
        idesc(n, m, CODES[fmt_a], CODES[fmt_b], negate=negate),
        accumulate=1,
    )
    out = run(body, image, columns=256, start=start.view(np.uint32))
    path = "D" if m == 128 else "F"
    sign = -1 if negate in (1, 2) else 1
    before = lanes_of(m, n, start, path).astype(np.float64)
    expected = rounded_sum(sign * decode(a, fmt_a), decode(b, fmt_b), before)
    assert np.array_equal(lanes_of(m, n, out.floats, path), expected)
    untouched = np.ones((128, 256), bool)
    untouched[:, :n] = (np.arange(128) % 32 >= 16)[:, None] if m == 64 else False
    assert np.array_equal(out.floats[untouched], start[untouched])


def test_lower_half_of_each_quarter_at_lane_16():
    a, b = operands("f16", "f16", 64, 16, 16)
    image, (at_a, at_b) = image_of(
        k_major(row_bytes(a, "f16"), 0, 128, 256), k_major(row_bytes(b, "f16"), 0, 128, 256)
    )
    body = mma(
        "cta_group::1.kind::f16",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        idesc(16, 64, 0, 0),
        d="tm + (16 << 16)",
    )
    out = run(body, image)
    rows = np.concatenate([np.arange(32 * q + 16, 32 * q + 32) for q in range(4)])
    assert np.array_equal(
        out.words[rows, :16].view(np.float32), rounded_sum(decode(a, "f16"), decode(b, "f16"))
    )
    assert (out.undefined[rows - 16, :16] == 0xFFFFFFFF).all()


def test_half_precision_accumulator():
    """One f16 per word, rounded to nearest even; the upper half of a word doesn't count."""
    a, b = operands("f16", "f16", 128, 32, 16)
    image, (at_a, at_b) = image_of(
        k_major(row_bytes(a, "f16"), 0, 128, 256), k_major(row_bytes(b, "f16"), 0, 128, 256)
    )
    start = np.random.default_rng(5).normal(size=(128, 32)).astype(np.float16)
    words = start.view(np.uint16).astype(np.uint32) | 0xABCD0000
    body = mma(
        "cta_group::1.kind::f16",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        idesc(32, 128, 0, 0, 0),
        accumulate=1,
    )
    out = run(body, image, start=words)
    expected = (start.astype(np.float64) + decode(a, "f16") @ decode(b, "f16").T).astype(np.float16)
    assert np.array_equal(out.words.astype(np.uint16).view(np.float16), expected)


@pytest.mark.parametrize(("signed", "saturate"), [(0, 0), (3, 1), (1, 0)])
def test_integers(signed, saturate):
    """tcgen05.mma.cta_group::1.kind::i8 is exact, wrapping around or saturating at 32 bits."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (128, 32)), rng.integers(0, 256, (48, 32))
    image, (at_a, at_b) = image_of(
        k_major(a.astype(np.uint8), 0, 128, 256), k_major(b.astype(np.uint8), 0, 128, 256)
    )
    start = rng.integers(2**31 - 400000, 2**31, (128, 64))
    body = mma(
        "cta_group::1.kind::i8",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        idesc(48, 128, signed & 1, signed >> 1, 2, saturate=saturate),
        accumulate=1,
    )
    out = run(body, image, columns=64, start=start.astype(np.uint32))
    values = [np.where((signed >> side & 1) & (x > 127), x - 256, x) for side, x in enumerate((a, b))]
    total = start[:, :48] + values[0] @ values[1].T
    expected = np.clip(total, -(2**31), 2**31 - 1) if saturate else (total + 2**31) % 2**32 - 2**31
    assert np.array_equal(out.words[:, :48].view(np.int32), expected)


@pytest.mark.parametrize(
    ("form", "scales", "ids", "ue8m0_type"),
    [
        ("kind::mxf4.block_scale", 2, (0, 2), 1), ("kind::mxf4.block_scale.scale_vec::2X", 2, (2, 0), 1),
        ("kind::mxf4nvf4.block_scale.block32", 2, (2, 2), 1), ("kind::mxf4nvf4.block_scale.scale_vec::4X", 4, (0, 0), 0),
        ("kind::mxf4nvf4.block_scale.block16", 4, (0, 0), 1),
    ],
)  # fmt: skip
def test_dense_fp4(form, scales, ids, ue8m0_type):
    """tcgen05.mma.cta_group::1.kind::mxf4.block_scale and tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16
    have two elements to a byte, K = 64, a scale factor per 32 or 16."""
    m, n, k = 128, 160, 64
    a, b = operands("e2m1", "e2m1", m, n, k)
    rng = np.random.default_rng(1)
    low, high = (122, 132) if ue8m0_type else (0x28, 0x48)
    sa, sb = rng.integers(low, high, (m, 4)), rng.integers(low, high, (n, 4))
    image, (at_a, at_b, at_sa, at_sb) = image_of(
        k_major(row_bytes(a, "e2m1", True), 6, 0, 256), k_major(row_bytes(b, "e2m1", True), 6, 0, 256),
        scale_image(sa), scale_image(sb),
    )  # fmt: skip
    body = copy_scales(1, "tm + 192", at_sa) + copy_scales(1, "tm + 196", at_sb, 2)
    body += scaled(
        f"cta_group::1.{form}", f"desc(s + {at_a}, 0, 256, 6)", f"desc(s + {at_b}, 0, 256, 6)",
        scaled_idesc(n, m, 1, 1, *ids, ue8m0_type), "tm + 192", "tm + 196",
    )  # fmt: skip
    out = run(body, image, columns=256)
    value = ue8m0 if ue8m0_type else lambda codes: decode(codes, "e4m3")
    factors = [np.repeat(value(s[:, i : i + scales]), k // scales, axis=1) for s, i in zip((sa, sb), ids)]
    expected = rounded_sum(decode(a, "e2m1") * factors[0], decode(b, "e2m1") * factors[1])
    assert np.array_equal(out.words[:, :n].view(np.float32), expected) and not out.undefined[:, :n].any()


def test_scale_factors_of_every_quarter_are_used():
    """Rows 32q to 32q + 31 take theirs from lanes 32q to 32q + 31, which is why all quarters need copies."""
    a, b = operands("e4m3", "e4m3", 128, 16, 32)
    image, (at_a, at_b) = image_of(
        k_major(row_bytes(a, "e4m3"), 0, 128, 256), k_major(row_bytes(b, "e4m3"), 0, 128, 256)
    )
    start = np.full((128, 64), 127 * 0x01010101, np.uint32)
    quarters = np.arange(128) // 32
    start[:, 40:44] += quarters[:, None].astype(np.uint32)  # byte 0 of the factors of B
    text = scaled(
        "cta_group::1.kind::mxf8f6f4.block_scale",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        scaled_idesc(16, 128, 0, 0),
        "tm + 32",
        "tm + 40",
    )
    out = run(text, image, columns=64, start=start)
    expected = rounded_sum(decode(a, "e4m3") * 2.0 ** quarters[:, None], decode(b, "e4m3"))
    assert np.array_equal(out.words[:, :16].view(np.float32), expected)


def test_undefined_scale_factors():
    """Of B: its column. Of A, that of one row: that row. Another byte of the word than the ID's doesn't matter."""
    a, b = operands("e4m3", "e4m3", 128, 16, 32)
    ones = scale_image(np.full((128, 4), 127))
    image, (at_a, at_b, at_sa, at_sb) = image_of(
        k_major(row_bytes(a, "e4m3"), 0, 128, 256), k_major(row_bytes(b, "e4m3"), 0, 128, 256), ones, ones
    )
    body = copy_scales(1, "tm + 64", at_sa) + copy_scales(1, "tm + 68", at_sb)
    body += scaled(
        "cta_group::1.kind::mxf8f6f4.block_scale",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        scaled_idesc(16, 128, 0, 0, 1, 2),
        "tm + 64",
        "tm + 68",
    )
    row, column = 70, 5  # row 70: lane 6, word 2
    holes = [at_sa + 6 * 16 + 2 * 4 + 1, at_sa + 7 * 16 + 2, at_sb + column * 16 + 2, at_sb + 6 * 16 + 1]
    out = run(body, image, columns=128, undefined=holes)
    expected = np.zeros((128, 16), bool)
    expected[row], expected[:, column] = True, True
    assert np.array_equal(out.undefined[:, :16] != 0, expected)


def test_special_scale_factors():
    """UE8M0 255 is NaN, 0 is 2^-127."""
    a, b = operands("e4m3", "e4m3", 128, 16, 32)
    sa, sb = np.full((128, 4), 127), np.full((16, 4), 127)
    sa[3], sa[4], sb[2] = 255, 0, 0
    image, (at_a, at_b, at_sa, at_sb) = image_of(
        k_major(row_bytes(a, "e4m3"), 0, 128, 256),
        k_major(row_bytes(b, "e4m3"), 0, 128, 256),
        scale_image(sa),
        scale_image(sb),
    )
    body = copy_scales(1, "tm + 64", at_sa) + copy_scales(1, "tm + 68", at_sb)
    body += scaled(
        "cta_group::1.kind::mxf8f6f4.block_scale.block32",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        scaled_idesc(16, 128, 0, 0),
        "tm + 64",
        "tm + 68",
    )
    out = run(body, image, columns=128).words[:, :16].view(np.float32)
    factors = np.where(sa[:, :1] == 255, np.nan, ue8m0(sa[:, :1])), ue8m0(sb[:, :1])
    expected = rounded_sum(decode(a, "e4m3") * factors[0], decode(b, "e4m3") * factors[1])
    assert np.isnan(out[3]).all() and np.array_equal(out, expected, equal_nan=True)


# --- Where operands lie ---


@pytest.mark.parametrize(
    ("fmt", "mode", "side"),
    [
        ("f16", 0, 1),
        ("f16", 2, 3),
        ("bf16", 4, 2),
        ("f16", 6, 1),
        ("e4m3", 2, 3),
        ("e5m2", 0, 3),
        ("e4m3", 4, 1),
        ("tf32", 1, 3),
    ],
)
def test_transposed_operands(fmt, mode, side):
    """A M-major (1), B N-major (2). Offsets differ from the natural ones, so that a confusion would show."""
    kind, k = plain(fmt, fmt)
    m, n = 128, 64
    a, b = operands(fmt, fmt, m, n, k)
    size = {"f16": 2, "bf16": 2, "tf32": 4}.get(fmt, 1)
    dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}[size]
    units = SWIZZLE_SPAN[mode] // 16
    group = 4 if mode == 1 else 8
    parts, descriptors = [], []
    for index, codes in enumerate((a, b)):
        if side >> index & 1:
            spans = -(-codes.shape[0] * size // (16 * units))
            if mode == 0:  # LBO: to the next 8 k, SBO: to the next unit of rows
                stride, leading = 128 + 64, (128 + 64) * spans + 128
            else:  # LBO: to the next span of rows, SBO: to the next group of k
                stride, leading = group * 16 * units, 0
                leading = stride * (k // group)
            elements = (codes << 13 if fmt == "tf32" else codes).astype(dtype)
            parts.append(mn_major(elements, mode, leading, stride))
            descriptors.append((leading, stride, mode))
        else:
            parts.append(k_major(row_bytes(codes, fmt), 2, 0, 1024))
            descriptors.append((0, 1024, 2))
    image, offsets = image_of(*parts)
    texts = [f"desc(s + {at}, {', '.join(map(str, d))})" for at, d in zip(offsets, descriptors)]
    out = run(
        mma(f"cta_group::1.{kind}", *texts, idesc(n, m, CODES[fmt], CODES[fmt], transpose=side)),
        image,
        columns=64,
    )
    assert np.array_equal(out.floats, rounded_sum(decode(a, fmt), decode(b, fmt)))


def test_advancing_within_a_swizzled_row():
    """Four steps of K = 32 in rows of 128 bytes: the descriptor's address moves by 32 bytes, the pattern stays."""
    a, b = operands("e4m3", "e4m3", 128, 32, 128)
    image, (at_a, at_b) = image_of(
        k_major(a.astype(np.uint8), 2, 0, 1024), k_major(b.astype(np.uint8), 2, 0, 1024)
    )
    body = "".join(
        mma(
            "cta_group::1.kind::f8f6f4",
            f"desc(s + {at_a + 32 * j}, 0, 1024, 2)",
            f"desc(s + {at_b + 32 * j}, 0, 1024, 2)",
            idesc(32, 128, 0, 0),
            accumulate=int(j > 0),
        )
        for j in range(4)
    )
    expected = np.zeros((128, 32), np.float32)
    for k in range(0, 128, 32):
        expected = rounded_sum(
            decode(a[:, k : k + 32], "e4m3"), decode(b[:, k : k + 32], "e4m3"), expected.astype(np.float64)
        )
    for seed in range(4):
        assert np.array_equal(run(body, image, seed=seed).floats, expected)


def test_base_offset():
    """A matrix that begins in row 4 of a 1024-byte pattern."""
    a, b = operands("e4m3", "e4m3", 128, 8, 32)
    rows = k_major(row_bytes(b, "e4m3"), 2, 0, 1024)
    shifted = np.zeros(2048, np.uint8)
    shifted[512:1536] = rows  # the pattern moves along: it starts at 512
    image, (at_a, at_b) = image_of(k_major(row_bytes(a, "e4m3"), 2, 0, 1024), shifted)
    body = mma(
        "cta_group::1.kind::f8f6f4",
        f"desc(s + {at_a}, 0, 1024, 2)",
        f"desc(s + {at_b} + 512, 0, 1024, 2) | (u64)4 << 49",
        idesc(8, 128, 0, 0),
    )
    assert np.array_equal(
        run(body, image).words[:, :8].view(np.float32), rounded_sum(decode(a, "e4m3"), decode(b, "e4m3"))
    )
    assert swizzled(np.array(0), 2) == 0


@pytest.mark.parametrize(("fmt", "m"), [("f16", 128), ("e2m1", 128), ("e3m2", 64), ("bf16", 64)])
def test_a_in_tensor_memory(fmt, m):
    """8 columns per row; 4-bit elements in bits 2 to 5 of a byte, 6-bit elements in bits 0 to 5."""
    kind, k = plain(fmt, fmt)
    n = 16
    a, b = operands(fmt, fmt, m, n, k)
    if fmt in NARROW:
        data = (a << (2 if fmt == "e2m1" else 0)).astype(np.uint8)
    else:
        data = a.astype(np.uint16).view(np.uint8)
    start = np.zeros((128, 32), np.uint32)
    lanes = np.arange(m) if m == 128 else np.concatenate([np.arange(32 * q, 32 * q + 16) for q in range(4)])
    start[lanes, 16:24] = data.view(np.uint32)
    image = k_major(row_bytes(b, fmt), 0, 128, 256)
    body = mma(
        f"cta_group::1.{kind}.collector::a::fill",
        "tm + 16",
        "desc(s, 128, 256, 0)",
        idesc(n, m, CODES[fmt], CODES[fmt]),
    )
    body = body.replace("[%0], %1,", "[%0], [%1],").replace('"l"(tm + 16)', '"r"(tm + 16)')
    out = run(body, image, start=start)
    assert np.array_equal(
        lanes_of(m, n, out.floats, "D" if m == 128 else "F"), rounded_sum(decode(a, fmt), decode(b, fmt))
    )


@pytest.mark.parametrize("m", [32, 64, 128])
def test_weight_stationary(m):
    """tcgen05.mma.ws.cta_group::1.kind::f8f6f4.collector::b1::fill and the like: halves or quarters of the columns lie
    in lanes of their own."""
    n = 64
    a, b = operands("e4m3", "e5m2", m, n, 32)
    image, (at_a, at_b) = image_of(
        k_major(row_bytes(a, "e4m3"), 0, 128, 256), k_major(row_bytes(b, "e5m2"), 0, 128, 256)
    )
    body = mma(
        "ws.cta_group::1.kind::f8f6f4.collector::b1::fill",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        idesc(n, m, 0, 1),
    )
    out = run(body, image, columns=64)
    values = lanes_of(m, n, out.words, "D" if m == 128 else "E").view(np.float32)
    assert np.array_equal(values, rounded_sum(decode(a, "e4m3"), decode(b, "e5m2")))


def test_two_ctas_with_64_rows_each():
    """M = 128 over two CTAs: each has 64 rows, the halves of their columns in the lower and the upper lanes."""
    m, n = 128, 64
    a, b = operands("f16", "f16", m, n, 16)
    images = []
    for cta in range(2):
        image, (at_a, at_b) = image_of(
            k_major(row_bytes(a[64 * cta : 64 * cta + 64], "f16"), 0, 128, 256),
            k_major(row_bytes(b[32 * cta : 32 * cta + 32], "f16"), 0, 128, 256),
        )
        images.append(image)
    body = mma(
        "cta_group::2.kind::f16",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        idesc(n, m, 0, 0),
    )
    out = run(body, np.stack(images), pair=True)
    values = np.concatenate([lanes_of(64, n, words, "B") for words in out.words]).view(np.float32)
    assert np.array_equal(values, rounded_sum(decode(a, "f16"), decode(b, "f16")))


def test_disabled_lanes_and_scaled_input():
    """disable-output-lane has 32 lanes to a register, scale-input-d divides D by a power of two."""
    a, b = operands("f16", "f16", 128, 32, 16)
    image, (at_a, at_b) = image_of(
        k_major(row_bytes(a, "f16"), 0, 128, 256), k_major(row_bytes(b, "f16"), 0, 128, 256)
    )
    start = np.random.default_rng(5).normal(size=(128, 32)).astype(np.float32)
    body = mma(
        "cta_group::1.kind::f16",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        idesc(32, 128, 0, 0),
        accumulate=1,
    )
    expected = rounded_sum(decode(a, "f16"), decode(b, "f16"), start.astype(np.float64) / 8)
    scaled_input = run(body.replace("%3, p;", "%3, p, 3;"), image, start=start.view(np.uint32))
    assert np.array_equal(scaled_input.floats, expected)
    masked = body.replace("%3, p;", "%3, {%5, %6, %7, %8}, p, 3;").replace(
        ' : "memory"', ', "r"(1), "r"(0), "r"(0x80000000), "r"(0xF0) : "memory"'
    )
    disabled = [0, 95, 100, 101, 102, 103]
    expected[disabled] = start[disabled]
    assert np.array_equal(run(masked, image, start=start.view(np.uint32)).floats, expected)


def test_undefined_operands_stay_in_their_rows_and_columns():
    """Padding of packed elements may be undefined; an undefined element concerns its row or column."""
    a, b = operands("e2m1", "e4m3", 128, 16, 32)
    image, (at_a, at_b) = image_of(
        k_major(row_bytes(a, "e2m1"), 0, 128, 256), k_major(row_bytes(b, "e4m3"), 0, 128, 256)
    )
    body = mma(
        "cta_group::1.kind::f8f6f4",
        f"desc(s + {at_a}, 128, 256, 0)",
        f"desc(s + {at_b}, 128, 256, 0)",
        idesc(16, 128, 5, 0),
    )
    padding = [16 * unit + byte for unit in range(256) for byte in range(8, 16)]
    row, column = 9, 3  # row 9: second group of 8 rows, second row
    holes = [256 + 16 + 128 + 7, at_b + 3 * 16 + 15]
    out = run(body, image, undefined=padding + holes)
    expected = np.zeros((128, 16), bool)
    expected[row], expected[:, column] = True, True
    assert np.array_equal(out.undefined[:, :16] != 0, expected)


def test_ordinary_stores_need_a_proxy_fence():
    with pytest.raises(ProxyViolation, match=r"tcgen05\.mma .* without a proxy fence"):
        run(
            "image[0] = 0;"
            + mma(
                "cta_group::1.kind::f16", "desc(s, 128, 256, 0)", "desc(s, 128, 256, 0)", idesc(8, 128, 0, 0)
            ),
            np.zeros(8192, np.uint8),
        )


# --- What is refused ---


@pytest.mark.parametrize(
    ("form", "descriptor", "match"),
    [
        ("kind::f16", idesc(32, 96, 0, 0), "M doesn't fit"),
        ("kind::f16", idesc(264, 128, 0, 0), "N must be 8 to 256"),
        ("kind::f16", idesc(32, 128, 2, 0), "no such type of A"),
        ("kind::tf32", idesc(32, 128, 2, 2, 0), "no such type of D"),
        ("kind::f16", idesc(32, 128, 1, 1, 0), "bf16 operands need an f32 accumulator"),
        ("kind::f16", idesc(32, 128, 0, 0) | 4, "sparsity"),
        ("kind::f16", idesc(32, 128, 0, 0) | 1 << 6, "bit 6 is reserved"),
        ("kind::f8f6f4", idesc(32, 128, 5, 0, transpose=1), "must be K-major"),
        ("kind::i8", idesc(40, 128, 0, 0, 2), "isn't a multiple of the step"),
        ("kind::i8", idesc(32, 128, 0, 0, 2, negate=1), "can't be negated"),
        ("kind::f16", idesc(32, 128, 0, 0) | 1 << 30, "belong to .ws"),
    ],
)  # fmt: skip
def test_instruction_descriptors_that_are_invalid(form, descriptor, match):
    with pytest.raises(EmulatorError, match=match):
        run(
            mma(f"cta_group::1.{form}", "desc(s, 128, 256, 0)", "desc(s, 128, 256, 0)", descriptor),
            np.zeros(8192, np.uint8),
        )


@pytest.mark.parametrize(
    ("a", "match"),
    [
        ("desc(s, 128, 256, 0) & ~((u64)1 << 46)", "constant 0b001"),
        ("desc(s, 128, 256, 3)", "3, 5 and 7 are invalid"),
        ("desc(s, 128, 256, 0) | (u64)1 << 52", "bit 52"),
        ("desc(s, 128, 256, 0) | (u64)1 << 14", "reserved bits"),
    ],
)  # fmt: skip
def test_matrix_descriptors_that_are_invalid(a, match):
    with pytest.raises(EmulatorError, match=match):
        run(
            mma("cta_group::1.kind::f16", a, "desc(s, 128, 256, 0)", idesc(8, 128, 0, 0)),
            np.zeros(8192, np.uint8),
        )


def test_places_that_are_invalid():
    good = ("desc(s, 128, 256, 0)", "desc(s, 128, 256, 0)", idesc(8, 128, 0, 0))
    with pytest.raises(MemoryFault, match="outside the CTA"):
        run(mma("cta_group::1.kind::f16", "desc(s + 7000, 128, 256, 0)", *good[1:]), np.zeros(8192, np.uint8))
    with pytest.raises(MemoryFault, match=r"aren't all allocated|512 columns"):
        run(mma("cta_group::1.kind::f16", *good, d="tm + 28"), np.zeros(8192, np.uint8))
    with pytest.raises(MemoryFault, match="D at lane 16"):
        run(mma("cta_group::1.kind::f16", *good, d="tm + (16 << 16)"), np.zeros(8192, np.uint8))
    with pytest.raises(UnsupportedInstruction, match="zero-column masks"):
        body = mma("ws.cta_group::1.kind::f16", *good[:2], idesc(64, 64, 0, 0)).replace(
            "%3, p;", "%3, p, %1;"
        )
        run(body, np.zeros(8192, np.uint8))
