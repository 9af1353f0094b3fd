"""What Hopper's tensor cores make of E4M3 dot products, in PyTorch on any device, bit for bit.

One ``wgmma.mma_async...k32.f32.e4m3.e4m3`` takes 32 products and the accumulator, cuts each off 13 bits below
the largest nominal exponent among them (a product's is the sum of its factors' exponents; zeros have none),
adds the rest exactly, and cuts the sum to 13 fraction bits. ``wgmma.hpp`` of the emulator holds the same
model, its sources, and how it was checked on an H200.

float32 suffices: a product has 8 significant bits, and 33 terms below 4 * 2^13 units add up to less than
2^24. The largest exponent comes out of a matrix product: with e the exponents of 32 products,
2^(6 max) <= sum of 2^(6 e) < 2^(6 max + 6).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

FRACTION_BITS = 13
"""Bits kept below the largest nominal exponent, and below the leading bit of a result."""

TERMS = 32
"""Products of one step: K of the instruction."""

CHUNK_BYTES = {"cpu": 8 << 20, "gpu": 64 << 20}
"""Bytes of a step's products, the largest temporary: what a cache holds, and what keeps a GPU busy for longer
than a launch takes. All temporaries together take less than four times that."""

_SPACING = 6
"""Bits between two exponents in a sum of powers: log2(TERMS), and one."""


def hopper_fp8_partials(a: torch.Tensor, b: torch.Tensor, group: int = 128) -> Iterator[torch.Tensor]:
    """Dot products over each ``group`` of K: a chain of WGMMAs, the first without an accumulator.

    Args:
        a: E4M3 [M, K], K a multiple of ``group``.
        b: E4M3 [N, K], on the same device.
        group: a multiple of 32.

    Yields:
        float32 [M, N] per group, in order of K. NaN where an operand is NaN.
    """
    chunk_bytes = CHUNK_BYTES["cpu" if a.device.type == "cpu" else "gpu"]
    rows = max(1, chunk_bytes // (4 * TERMS * max(1, len(b))))
    # With few rows the operands take more memory than the products.
    groups = max(1, rows // max(len(a), 2 * group // TERMS))
    for a_chunk, b_chunk in zip(a.split(groups * group, dim=1), b.split(groups * group, dim=1)):
        b_operand = _Operand.load(b_chunk, group)
        parts = [_chain(_Operand.load(part, group), b_operand) for part in a_chunk.split(rows)]
        yield from torch.cat(parts, dim=1)


class _Operand(NamedTuple):
    """Values and 2^(_SPACING * nominal exponent), float32 [groups, group, rows]."""

    values: torch.Tensor
    powers: torch.Tensor

    @classmethod
    def load(cls, x: torch.Tensor, group: int) -> "_Operand":
        """Of E4M3 [rows, groups * group]."""
        # Contiguous first: a slice of columns is transposed much more slowly.
        codes = x.view(torch.uint8).contiguous().t().contiguous().unflatten(0, (-1, group))
        # Exponents are biased by 7 in E4M3, where subnormals (field 0) have that of field 1, and by 127 here.
        exponent = (codes >> 3 & 0xF).clamp(min=1) * _SPACING + (127 - 7 * _SPACING)
        exponent.masked_fill_(codes & 0x7F == 0, 0)
        return cls(codes.view(torch.float8_e4m3fn).float(), (exponent.int() << 23).view(torch.float32))

    def step(self, k: int) -> "_Operand":
        """The ``TERMS`` values from ``k`` of each group."""
        return _Operand(*(part[:, k : k + TERMS] for part in self))


def _chain(a: _Operand, b: _Operand) -> torch.Tensor:
    """float32 [groups, M, N]: the steps of each group, one after the other."""
    groups, group, m = a.values.shape
    n = b.values.shape[2]
    accumulator = a.values.new_zeros(groups, m, n)
    products = a.values.new_empty(groups, TERMS, m, n)
    for k in range(0, group, TERMS):
        accumulator = _step(a.step(k), b.step(k), accumulator, products)
    return accumulator


def _step(a: _Operand, b: _Operand, accumulator: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """One instruction; ``products`` [groups, TERMS, M, N] is scratch memory."""
    # Where all products are zero this gives -22: low enough, since accumulators are multiples of 2^-25.
    largest = _exponent(a.powers.transpose(1, 2) @ b.powers) // _SPACING
    largest = torch.maximum(largest, _exponent(accumulator))
    unit = _power_of_two(largest - FRACTION_BITS)
    torch.mul(a.values.unsqueeze(3), b.values.unsqueeze(2), out=products)
    torch.div(products, unit.unsqueeze(1), rounding_mode="trunc", out=products)
    total = products.sum(dim=1) + torch.div(accumulator, unit, rounding_mode="trunc")
    kept = total.view(torch.int32) & (-1 << (23 - FRACTION_BITS))
    return kept.view(torch.float32) * unit


def _exponent(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|), int32, of normal float32 numbers; -127 of zero."""
    return (x.view(torch.int32) >> 23 & 0xFF) - 127


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float32 2^exponent of an int32 exponent."""
    return (exponent + 127 << 23).view(torch.float32)
