"""Number formats: E4M3, E2M1 and UE8M0, and the scale factors (SF) of the block formats.

Everything here is elementwise PyTorch on any device, and gives the same bits on each.

Sources: OCP Microscaling Formats (MX) v1.0 for E4M3, E2M1 and UE8M0; the two SF rules are this project's own
(``SF = max(amax, 1e-10) / largest``, rounded up to a power of two for UE8M0, so that no element saturates).
"""

from typing import Literal

import torch

from megagen.contract import FORMATS
from megagen.errors import InputError

Format = Literal["fp8_block", "mxfp8_mxfp4"]
"""How activations and weights are stored: E4M3 x E4M3 with float32 SFs, or E4M3 x E2M1 with UE8M0 SFs."""

E4M3_MAX = 448.0
E2M1_MAX = 6.0
AMAX_FLOOR = 1e-10
"""Smallest amax that an SF represents: an all-zero group gets an SF that is not zero."""

FP8_BLOCK = 128
"""``fp8_block``: one SF per 128 of K (activations), per 128 x 128 (weights)."""

MX_BLOCK = 32
"""``mxfp8_mxfp4``: one SF per 32 of K."""

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of each 3-bit code; bit 3 is the sign. There is no infinity and no NaN."""


def check_format(format: str) -> None:
    """Raises:
    InputError: ``format`` is not one of ``contract.FORMATS``.
    """
    if format not in FORMATS:
        raise InputError(f"format={format!r} is unknown; choose one of {', '.join(FORMATS)}")


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to nearest even, saturating at +-448; NaN stays NaN (``cvt.rn.satfinite.e4m3x2.f32``)."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, correctly rounded: by a Python number, torch multiplies with the reciprocal on CUDA."""
    return x / torch.full((), divisor, device=x.device)


def float32_scale(amax: torch.Tensor) -> torch.Tensor:
    """float32 SF of groups of E4M3 values with this largest magnitude."""
    return _divide(amax.float().clamp(min=AMAX_FLOOR), E4M3_MAX)


def ue8m0_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """UE8M0 SF: the smallest power of two not below max(amax, 1e-10) / largest, as its byte (uint8).

    ``largest`` is 448 for E4M3, 6 for E2M1 elements. NaN and infinity give 255, which is NaN.
    """
    # The float32 quotient decides exactly: for both values of ``largest``, the next float above
    # largest * 2^n has a quotient that still rounds to something above 2^n.
    bits = _divide(amax.float().clamp(min=AMAX_FLOOR), largest).view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    has_mantissa = (bits & 0x7FFFFF) != 0
    return (exponent + has_mantissa).clamp(max=255).to(torch.uint8)


def ue8m0_to_float32(scale: torch.Tensor) -> torch.Tensor:
    """2^(byte - 127); byte 255 is NaN, byte 0 the subnormal 2^-127."""
    exponent = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, 0x0040_0000, exponent << 23)
    return torch.where(exponent == 255, torch.nan, bits.to(torch.int32).view(torch.float32))


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """4-bit codes (uint8, 0..15), rounded to nearest even, saturating at +-6; NaN becomes +6.

    As ``cvt.rn.satfinite.e2m1x2.f32`` does, but one code per byte.
    """
    x = x.float()
    magnitude = x.abs()
    # A tie goes to the even code, so thresholds are alternately open and closed. Written as negations so
    # that NaN passes each of them.
    ties_down, ties_up = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
    code = torch.zeros_like(x, dtype=torch.uint8)
    for threshold in ties_down:
        code += ~(magnitude <= threshold)
    for threshold in ties_up:
        code += ~(magnitude < threshold)
    negative = torch.signbit(x) & ~torch.isnan(x)
    return code | (negative.to(torch.uint8) << 3)


def e2m1_to_float32(codes: torch.Tensor) -> torch.Tensor:
    """Values of 4-bit codes (uint8); the upper four bits of each byte are ignored."""
    values = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), device=codes.device)
    return values[(codes & 0xF).long()]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes per byte along the last axis, the even one in the low nibble: [..., K] -> [..., K / 2]."""
    codes = codes & 0xF
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of ``pack_e2m1``: [..., K / 2] -> [..., K], one code per byte."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantize_rows(x: torch.Tensor, format: Format, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to E4M3 with one SF per row per ``group`` elements; the rule of activations and intermediate.

    Args:
        x: [..., K], any float dtype, K a multiple of ``group``.

    Returns:
        E4M3 [..., K], and SFs [..., K / group]: float32 for ``fp8_block``, uint8 (UE8M0) for ``mxfp8_mxfp4``.
    """
    groups = x.float().unflatten(-1, (-1, group))
    amax = groups.abs().amax(dim=-1)
    if format == "fp8_block":
        scale = stored = float32_scale(amax)
    else:
        stored = ue8m0_scale(amax, E4M3_MAX)
        scale = ue8m0_to_float32(stored)
    # One reciprocal per group and a multiplication per element, as the kernel does.
    values = to_e4m3(groups * (1.0 / scale).unsqueeze(-1))
    return values.flatten(-2), stored


def quantize_activation(x: torch.Tensor, format: Format = "fp8_block") -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize tokens as the layer's input wants them.

    Args:
        x: [T, H], any float dtype, H a multiple of 128.

    Returns:
        E4M3 [T, H], and SFs: float32 [T, H / 128] for ``fp8_block``; for ``mxfp8_mxfp4`` int32 [T, H / 128],
        each holding four UE8M0 bytes, the lowest K first in the lowest byte.
    """
    check_format(format)
    if x.shape[-1] % FP8_BLOCK:
        raise InputError(f"x has {x.shape[-1]} columns, no multiple of {FP8_BLOCK}; pad them with zeros")
    if format == "fp8_block":
        return quantize_rows(x, format, FP8_BLOCK)
    values, scale = quantize_rows(x, format, MX_BLOCK)
    return values, scale.view(torch.int32)


def dequantize_rows(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 of E4M3 [..., K] with SFs as ``quantize_activation`` or ``quantize_rows`` return them."""
    if scale.dtype != torch.float32:
        scale = ue8m0_to_float32(scale.contiguous().view(torch.uint8))
    group = values.shape[-1] // scale.shape[-1]
    return values.float() * scale.repeat_interleave(group, dim=-1)
