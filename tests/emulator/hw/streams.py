"""Deterministic input data: the same bits for the same seed on every machine and numpy version."""

import numpy as np


def words(seed: int, count: int) -> np.ndarray:
    """``count`` uint64 of a SplitMix64 sequence (Steele, Lea and Flood 2014) that starts at ``seed``."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(seed) * np.uint64(0xD1B54A32D192ED03)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uint32(seed: int, count: int) -> np.ndarray:
    return words(seed, (count + 1) // 2).view(np.uint32)[:count].copy()


def uint8(seed: int, count: int) -> np.ndarray:
    return words(seed, (count + 7) // 8).view(np.uint8)[:count].copy()


def below(seed: int, count: int, bound: int) -> np.ndarray:
    """``count`` int64 in [0, bound)."""
    return (words(seed, count) % np.uint64(bound)).astype(np.int64)


def unit(seed: int, count: int) -> np.ndarray:
    """``count`` float64 in [0, 1)."""
    return (words(seed, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


SPECIAL_F32 = np.array(
    [
        0x00000000,
        0x80000000,
        0x00000001,
        0x80000001,
        0x007FFFFF,
        0x00800000,
        0x3F800000,
        0xBF800000,
        0x3F7FFFFF,
        0x3F800001,
        0x7F7FFFFF,
        0xFF7FFFFF,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0xFFC00000,
        0x7F800001,
        0xFFFFFFFF,
    ],
    np.uint32,
)


def float32_bits(seed: int, count: int, exponents: tuple[int, int] = (0, 255)) -> np.ndarray:
    """Bit patterns of float32 values: the special values first, then random ones with biased exponents in
    the closed range. Half of the random ones lie at or next to a rounding boundary of a narrower format.
    """
    low, high = exponents
    sign = uint32(seed, count) & np.uint32(0x80000000)
    exponent = (low + below(seed + 1, count, high - low + 1)).astype(np.uint32) << np.uint32(23)
    mantissa = uint32(seed + 2, count) & np.uint32(0x7FFFFF)
    kept = below(seed + 3, count, 13).astype(np.uint32)  # mantissa bits of the narrower format
    boundary = (mantissa >> (np.uint32(23) - kept) << (np.uint32(23) - kept)) | (
        np.uint32(1) << (np.uint32(22) - kept)
    )
    offset = (below(seed + 4, count, 3) - 1).astype(np.int64)
    boundary = ((boundary.astype(np.int64) + offset) & 0x7FFFFF).astype(np.uint32)
    mantissa = np.where(below(seed + 5, count, 2) == 0, mantissa, boundary)
    bits = sign | exponent | mantissa
    bits[: len(SPECIAL_F32)] = SPECIAL_F32[:count]
    return bits
