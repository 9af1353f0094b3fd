"""Operands of tcgen05.mma for tests, worked out from the PTX ISA: number formats, layouts in shared memory,
packed elements, scale factors and descriptors."""

import numpy as np

# (exponent bits, mantissa bits); TF32 in the upper 19 bits of 32.
FORMATS = {
    "f16": (5, 10), "bf16": (8, 7), "tf32": (8, 10),
    "e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1),
}  # fmt: skip
NARROW = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
SWIZZLE_SPAN = {0: 16, 1: 128, 2: 128, 4: 64, 6: 32}
"""Bytes of a row in a swizzle atom, by the descriptor's swizzling mode."""


def decode(codes: np.ndarray, fmt: str) -> np.ndarray:
    """Values of finite codes."""
    exponent_bits, mantissa_bits = FORMATS[fmt]
    codes = codes.astype(np.int64)
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = codes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
    value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    return np.where(codes >> (exponent_bits + mantissa_bits) & 1, -value, value)


def random_codes(rng: np.random.Generator, fmt: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of moderate finite numbers."""
    exponent_bits, mantissa_bits = FORMATS[fmt]
    width = exponent_bits + mantissa_bits + 1
    codes = rng.integers(0, 1 << width, shape, np.int64)
    if exponent_bits < 4:
        return codes
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = rng.integers(bias - 3, bias + 4, shape)
    low = (1 << mantissa_bits) - 1
    return (codes & 1 << (width - 1)) | exponent << mantissa_bits | (codes & low)


def row_bytes(codes: np.ndarray, fmt: str, dense: bool = False) -> np.ndarray:
    """Rows of 32 bytes along K as shared memory holds them: 4- and 6-bit elements packed by 16, with padding
    to 16 bytes; ``dense`` (kinds mxf4 and mxf4nvf4): two 4-bit elements to a byte."""
    rows = len(codes)
    if fmt in ("f16", "bf16"):
        return codes.astype("<u2").view(np.uint8)
    if fmt == "tf32":
        return (codes << 13).astype("<u4").view(np.uint8)
    if dense:
        pairs = codes.reshape(rows, -1, 2)
        return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)
    width = 1 + sum(FORMATS[fmt]) if fmt in FORMATS else 8
    if width == 8:
        return codes.astype(np.uint8)
    out = np.full((rows, 2, 16), 0xEE, np.uint8)  # the padding holds anything
    for row, unit in np.ndindex(rows, 2):
        stream = sum(int(c) << (width * k) for k, c in enumerate(codes[row, 16 * unit : 16 * unit + 16]))
        out[row, unit, : 2 * width] = np.frombuffer(stream.to_bytes(2 * width, "little"), np.uint8)
    return out.reshape(rows, 32)


def swizzled(address: np.ndarray, mode: int) -> np.ndarray:
    """CuTe's Swizzle<B, M, S> of a byte address: the B bits from M + S on are XORed into those from M on."""
    bits, base, shift = {0: (0, 4, 3), 1: (2, 5, 2), 2: (3, 4, 3), 4: (2, 4, 3), 6: (1, 4, 3)}[mode]
    return address ^ ((address >> (base + shift) & ((1 << bits) - 1)) << base)


def k_major(rows: np.ndarray, mode: int, leading: int, stride: int) -> np.ndarray:
    """The image of rows of up to a span of bytes: canonical layout ((8,m),(T,2k)):((sT,SBO),(1,T or LBO))."""
    count, width = rows.shape
    r, b = np.indices((count, width))
    plain = r // 8 * stride + r % 8 * SWIZZLE_SPAN[mode]
    plain += b if mode else b // 16 * leading + b % 16
    image = np.zeros(1024 * (int(plain.max()) // 1024 + 1), np.uint8)
    image[swizzled(plain, mode)] = rows
    return image


def mn_major(elements: np.ndarray, mode: int, leading: int, stride: int) -> np.ndarray:
    """The image of [rows, k] elements of unsigned type, contiguous along the rows:
    ((T,s,m),(8,k)):((1,T,LBO),(sT,SBO)), without swizzle ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO)); with 32-byte
    atoms of 4 k instead of 8."""
    size = elements.dtype.itemsize
    per_unit, units, group = 16 // size, SWIZZLE_SPAN[mode] // 16, 4 if mode == 1 else 8
    r, k = np.indices(elements.shape)
    unit = r // per_unit
    if mode == 0:
        plain = unit * stride + k // 8 * leading + k % 8 * 16
    else:
        plain = unit // units * leading + unit % units * 16 + k // group * stride + k % group * 16 * units
    plain += r % per_unit * size
    image = np.zeros(1024 * (int(plain.max()) // 1024 + 1), np.uint8)
    address = swizzled(plain, mode)
    for byte in range(size):
        image[address + byte] = (elements >> (8 * byte)).astype(np.uint8)
    return image


def idesc(
    n: int, m: int, a: int, b: int, d: int = 1, *, transpose: int = 0, negate: int = 0, saturate: int = 0
) -> int:
    """Instruction descriptor without scale factors. ``transpose``, ``negate``: 1 for A, 2 for B."""
    return (
        saturate << 3
        | d << 4
        | a << 7
        | b << 10
        | negate << 13
        | transpose << 15
        | n >> 3 << 17
        | m >> 4 << 24
    )


def scaled_idesc(n: int, m: int, a: int, b: int, a_id: int = 0, b_id: int = 0, ue8m0: int = 1) -> int:
    """Instruction descriptor of the block-scaled kinds."""
    return b_id << 4 | a << 7 | b << 10 | n >> 3 << 17 | ue8m0 << 23 | m >> 7 << 27 | a_id << 29


def scale_image(codes: np.ndarray) -> np.ndarray:
    """[rows, 4] scale factor codes as tcgen05.cp.32x128b.warpx4 wants them: per 128 rows 512 bytes, in which
    lane l has the words of rows l, l + 32, l + 64 and l + 96."""
    rows = -(-len(codes) // 128) * 128
    padded = np.zeros((rows, 4), np.uint8)
    padded[: len(codes)] = codes
    return padded.reshape(-1, 4, 32, 4).swapaxes(1, 2).reshape(-1)


def ue8m0(codes: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, codes.astype(np.int64) - 127)


def rounded_sum(a: np.ndarray, b: np.ndarray, start: np.ndarray | float = 0.0) -> np.ndarray:
    """float32 of start + a @ b.T, summed in double precision."""
    return (start + a @ b.T).astype(np.float32)
