"""Tensor maps: encoding, the driver's rules, and copies against an element-by-element formulation."""

import itertools

import native
import numpy as np
import pytest
from hw import streams

U8, U16, U32, S32, U64, S64, F16, F32, F64, BF16, F32_FTZ, TF32, TF32_FTZ, U4_8, U4_16, U6_16 = range(16)
WIDTH = {U8: 1, U16: 2, F16: 2, BF16: 2, U32: 4, F32: 4, TF32: 4, U64: 8, F64: 8}


def swizzle_position(address: int, swizzle: int) -> int:
    """Shared-memory position of a byte, from the ISA's tables of lines of 128 bytes."""
    line, inside = address // 128, address % 128
    if swizzle == 0:
        return address
    if swizzle in (1, 2, 3):  # 16-byte chunks; the pattern repeats every 2, 4, 8 lines
        return line * 128 + (inside // 16 ^ line % (2, 4, 8)[swizzle - 1]) * 16 + inside % 16
    if swizzle == 6:  # 64-byte chunks
        return line * 128 + (inside // 64 ^ line % 2) * 64 + inside % 64
    position = line * 128 + (inside // 32 ^ line % 4) * 32 + inside % 32
    if swizzle == 5 and line % 2:  # the halves of each 16 bytes are exchanged
        position ^= 8
    return position


SPANS = (0, 32, 64, 128, 128, 128, 128)


def expected_bytes(kind, sizes, strides, box, steps, swizzle, coordinates, shared):
    """{shared address: global address or None} per byte of the box, by looping over its elements."""
    width = WIDTH[kind]
    pitch = max(box[0] * width, SPANS[swizzle])
    counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)]
    expected = {}
    for number, reverse in enumerate(itertools.product(*[range(c) for c in reversed(counts)])):
        index = reverse[::-1]
        position = [coordinates[0] + index[0]]
        position += [c + i * s for c, i, s in zip(coordinates[1:], index[1:], steps[1:], strict=True)]
        inside = all(0 <= p < size for p, size in zip(position, sizes, strict=True))
        offset = position[0] * width + sum(p * s for p, s in zip(position[1:], strides, strict=True))
        for byte in range(width):
            row, column = divmod(number, box[0])
            at = swizzle_position(shared + row * pitch + column * width + byte, swizzle)
            assert at not in expected
            expected[at] = offset + byte if inside else None
    return expected


def covered_bytes(runs: np.ndarray) -> dict:
    covered = {}
    for address, shared, size, inside in runs.tolist():
        for byte in range(size):
            assert shared + byte not in covered, "two runs overlap"
            covered[shared + byte] = address + byte if inside else None
    return covered


COPIES = [
    (U8, (100,), (), (64,), (1,), 0, (40,)),
    (U8, (100,), (), (64,), (1,), 0, (-30,)),
    (U32, (12, 9), (64,), (8, 4), (1, 1), 0, (-3, 7)),
    (F16, (40, 9), (96,), (16, 8), (1, 3), 0, (30, -2)),
    (U8, (64, 30), (64,), (64, 16), (1, 1), 0, (0, 5)),
    (U8, (64, 30), (64,), (32, 9), (1, 1), 1, (48, 25)),
    (BF16, (64, 30), (128,), (32, 9), (1, 1), 2, (40, -3)),
    (U8, (256, 40), (256,), (128, 20), (1, 1), 3, (16, 4)),
    (U8, (256, 40), (256,), (64, 20), (1, 1), 3, (200, 30)),
    (U8, (256, 40), (256,), (128, 20), (1, 1), 4, (16, 4)),
    (U8, (256, 40), (256,), (128, 20), (1, 1), 5, (16, 4)),
    (U8, (256, 40), (256,), (128, 20), (1, 1), 6, (16, 4)),
    (F32, (8, 5, 4), (32, 160), (4, 3, 2), (1, 2, 1), 0, (4, -1, 3)),
    (U16, (8, 5, 4, 3), (16, 80, 320), (8, 2, 3, 2), (1, 1, 2, 1), 0, (0, 4, -2, 1)),
    (U8, (32, 4, 3, 3, 3), (32, 128, 384, 1152), (16, 2, 2, 2, 2), (1, 1, 1, 1, 2), 1, (16, 3, 1, 2, -1)),
]


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("shared", [0, 384, 2048])
def test_copies_element_by_element(copy, shared):
    kind, sizes, strides, box, steps, swizzle, coordinates = copy
    encoded = native.tensor_map(kind, sizes, strides, box, steps, address=0, swizzle=swizzle)
    assert native.tensor_validate(encoded) == ""
    runs = native.tensor_runs(encoded, coordinates, shared)
    assert covered_bytes(runs) == expected_bytes(
        kind, sizes, strides, box, steps, swizzle, coordinates, shared
    )
    count = int(runs[:, 2].sum())
    pitch = max(box[0] * WIDTH[kind], SPANS[swizzle])
    assert native.tensor_bytes(encoded) == (count // (box[0] * WIDTH[kind]) * pitch, count)


def test_stores_write_whole_units_of_16_bytes():
    """A row of 100 bytes: a load sees 52 bytes of the box at 48 and fills 12, a store writes all 64."""
    line = native.tensor_map(U8, (100,), (), (64,))
    assert native.tensor_runs(line, (48,)).tolist() == [[48, 0, 52, 1], [0, 52, 12, 0]]
    assert native.tensor_runs(line, (48,), store=True).tolist() == [[48, 0, 64, 1]]
    rows = native.tensor_map(F16, (33, 4), (80,), (32, 2))
    assert native.tensor_runs(rows, (24, 1), store=True).tolist() == [
        [80 + 48, 0, 32, 1], [0, 32, 32, 0], [160 + 48, 64, 32, 1], [0, 96, 32, 0],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "coordinates", "shared", "store", "word"),
    [
        (U8, (0, 0), 64, False, "shared address"),
        (U8, (8, 0), 0, False, "16 bytes"),
        (F32, (-2, 0), 0, False, "16 bytes"),
        (F16, (0, -1), 0, True, "coordinates[1] = -1"),
        (U8, (-16, 0), 128, True, "coordinates[0] = -16"),
        (U8, (-16, -3), 128, False, ""),
        (F64, (1000, 1000), 256, True, ""),
    ],
)
def test_copies_that_fault(kind, coordinates, shared, store, word):
    encoded = native.tensor_map(kind, (64, 8), (512,), (16, 4))
    violation = native.tensor_copy_violation(encoded, coordinates, shared, store)
    assert word in violation and bool(word) == bool(violation)


def test_runs_are_as_long_as_possible():
    whole = native.tensor_map(U8, (64, 30), (64,), (64, 16))
    assert native.tensor_runs(whole, (0, 5)).tolist() == [[320, 0, 1024, 1]]
    padded = native.tensor_map(U8, (64, 30), (80,), (64, 16))
    assert len(native.tensor_runs(padded, (0, 5))) == 16
    outside = native.tensor_map(U8, (64, 30), (64,), (64, 16))
    assert native.tensor_runs(outside, (64, 0)).tolist() == [[0, 0, 1024, 0]]
    swizzled = native.tensor_runs(native.tensor_map(U8, (128, 8), (128,), (128, 8), swizzle=3), (0, 0))
    # Lines 0 to 7 permute by XOR with 0 to 7: the longest runs have 128, 16, 32, 16, 64, 16, 32 and 16 bytes.
    lines = [[int(size) for _, at, size, _ in swizzled if at // 128 == line] for line in range(8)]
    assert [max(sizes) for sizes in lines] == [128, 16, 32, 16, 64, 16, 32, 16]


def test_address_offsets_every_run():
    base = 1 << 40
    encoded = native.tensor_map(U8, (64, 30), (64,), (64, 2), address=base)
    assert native.tensor_runs(encoded, (0, 3)).tolist() == [[base + 192, 0, 128, 1]]


def test_packed_four_bit_values():
    dense = native.tensor_map(U4_8, (256, 8), (128,), (64, 4))
    assert native.tensor_bytes(dense) == (128, 128)
    assert native.tensor_runs(dense, (32, 1)).tolist() == [
        [128 + 16 + 128 * row, 32 * row, 32, 1] for row in range(4)
    ]
    unpacked = native.tensor_map(U4_16, (256, 8), (128,), (128, 4))
    assert native.tensor_bytes(unpacked) == (512, 256)
    runs = native.tensor_runs(unpacked, (128, 6))
    inside, outside = runs[runs[:, 3] == 1], runs[runs[:, 3] == 0]
    expected = [
        [6 * 128 + 64 + 128 * row + 8 * unit, 128 * row + 16 * unit, 8, 1]
        for row in range(2)
        for unit in range(8)
    ]
    assert inside.tolist() == expected
    assert outside[:, 1].tolist() == [256 + 16 * unit for unit in range(16)] and (outside[:, 2] == 8).all()


def test_packed_four_bit_values_under_the_swizzle():
    encoded = native.tensor_map(U4_16, (128, 8), (64,), (128, 8), swizzle=3)
    for address, at, size, inside in native.tensor_runs(encoded, (0, 0)).tolist():
        row, unit = address // 64, address % 64 // 8
        assert (at, size, inside) == (row * 128 + (unit ^ row) * 16, 8, 1)


def test_packed_six_bit_values():
    encoded = native.tensor_map(U6_16, (128, 4), (96,), (128, 2))
    assert native.tensor_bytes(encoded) == (256, 192)
    assert native.tensor_runs(encoded, (0, 1)).tolist() == [
        [96 + 96 * row + 12 * unit, 128 * row + 16 * unit, 12, 1] for row in range(2) for unit in range(8)
    ]


def test_out_of_bounds_fill():
    zeros = native.tensor_map(F16, (64, 4), (128,), (64, 4))
    assert (native.tensor_fill(zeros, 64) == 0).all()
    for kind, view in ((F16, np.float16), (F32, np.float32), (F64, np.float64)):
        filled = native.tensor_fill(native.tensor_map(kind, (64, 4), (512,), (8, 4), fill=1), 64)
        assert np.isnan(filled.view(view)).all() and (filled.view(np.uint16) == 0x7FF7).all()


def test_types_that_convert_on_load():
    bits = streams.float32_bits(1, 2000)
    values = bits.view(np.float32)
    assert (native.tensor_convert(F32, bits) == bits).all()
    flushed = native.tensor_convert(F32_FTZ, bits)
    subnormal = (bits & 0x7F800000) == 0
    assert (flushed[~subnormal] == bits[~subnormal]).all() and (
        flushed[subnormal] == bits[subnormal] & 0x80000000
    ).all()
    rounded = native.tensor_convert(TF32, bits).view(np.float32)
    assert (rounded.view(np.uint32)[~np.isnan(values)] & 0x1FFF == 0).all()
    normal = np.isfinite(values) & (np.abs(values) >= 2.0**-126) & np.isfinite(rounded)
    exact = values[normal].astype(np.float64)
    assert (np.abs(rounded[normal] - exact) <= np.abs(exact) * 2.0**-11).all()


def test_round_trip_and_foreign_bytes():
    encoded = native.tensor_map(
        F16, (64, 5, 4), (128, 640), (32, 3, 2), (1, 2, 1), address=0x7F0012345600, swizzle=2, fill=1
    )
    assert native.tensor_round_trip(encoded) == encoded
    for foreign in (bytes(128), b"\xff" * 128, encoded[:4] + b"\x02" + encoded[5:]):
        with pytest.raises(ValueError, match="not a tensor map"):
            native.tensor_validate(foreign)


GOOD = {
    "type": F16,
    "sizes": (128, 64),
    "strides": (256,),
    "box": (64, 32),
    "element_strides": (1, 1),
    "swizzle": 3,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": 8}, ("address = 8", "multiple of 16")),
        ({"strides": (264,)}, ("stride[1] = 264", "multiple of 16")),
        ({"strides": (1 << 40,)}, ("stride[1]", "2^40")),
        ({"sizes": (0, 64)}, ("size[0] = 0", "2^32")),
        ({"sizes": (128, (1 << 32) + 1)}, ("size[1]", "2^32")),
        ({"box": (64, 257)}, ("box[1] = 257", "256")),
        ({"box": (64, 0)}, ("box[1] = 0", "256")),
        ({"box": (12, 32), "swizzle": 0}, ("box[0] = 12", "16 bytes")),
        ({"box": (128, 32)}, ("box[0] = 128", "256 bytes", "swizzle")),
        ({"element_strides": (1, 9)}, ("element_stride[1] = 9", "1 to 8")),
        ({"element_strides": (1, 0)}, ("element_stride[1] = 0", "1 to 8")),
        ({"element_strides": (9, 1)}, ("element_stride[0] = 9", "1 to 8")),
        (
            {
                "sizes": (128, 64, 64),
                "strides": (256, 16384),
                "box": (64, 64, 30),
                "element_strides": (1, 1, 1),
            },
            ("box = 245760", "233472"),
        ),
        ({"swizzle": 7}, ("swizzle = 7",)),
        ({"type": 16}, ("type = 16",)),
        ({"interleave": 1}, ("rank = 2", "interleaved")),
        ({"type": U16, "fill": 1}, ("fill = 1", "floating-point")),
        ({"type": U4_16, "box": (64, 8)}, ("box[0] = 64", "128")),
        ({"type": U4_16, "box": (128, 8), "sizes": (192, 64)}, ("size[0] = 192", "128")),
        ({"type": U4_16, "box": (128, 8), "address": 16}, ("address = 16", "32")),
        ({"type": U4_16, "box": (128, 8), "swizzle": 2}, ("swizzle",)),
        ({"type": U4_8, "sizes": (127, 64)}, ("size[0] = 127", "multiple of 2")),
        ({"type": U6_16, "box": (128, 8), "swizzle": 1}, ("swizzle",)),
    ],
)
def test_invalid_maps_are_refused_with_the_field_and_the_rule(change, words):
    message = native.tensor_validate(native.tensor_map(**{**GOOD, **change}))
    for word in words:
        assert word in message


def test_hopper_has_no_packed_types_and_no_wide_atoms():
    for change in ({"type": U4_8}, {"swizzle": 4}, {"swizzle": 5}, {"swizzle": 6}):
        encoded = native.tensor_map(**{**GOOD, **change})
        assert native.tensor_validate(encoded, 100) == ""
        assert "needs sm_100" in native.tensor_validate(encoded, 90)
    assert native.tensor_validate(native.tensor_map(**GOOD), 90) == ""


def test_limits_themselves_are_valid():
    for change in (
        {"address": 16},
        {"strides": ((1 << 40) - 16,)},
        {"sizes": (1 << 32, 1)},
        {"box": (64, 256)},
        {"element_strides": (8, 8)},
        {"fill": 1},
        {"type": U4_16, "box": (128, 8)},
        {"type": U6_16, "box": (128, 8), "swizzle": 6},
    ):
        assert native.tensor_validate(native.tensor_map(**{**GOOD, **change})) == ""
