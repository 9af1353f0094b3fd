"""Expert weights: quantize bfloat16 checkpoints, and transform the checkpoint layout to a kernel's and back.

Everything goes expert by expert: besides its input and its result it needs memory for one expert only.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from megagen.contract import WeightLayout
from megagen.errors import InputError
from megagen.formats import (
    E2M1_MAX,
    FP8_BLOCK,
    MX_BLOCK,
    Format,
    check_format,
    e2m1_to_float32,
    float32_scale,
    pack_e2m1,
    to_e2m1,
    to_e4m3,
    ue8m0_scale,
    ue8m0_to_float32,
    unpack_e2m1,
)
from megagen.shape import MoEShape


class ExpertWeights(NamedTuple):
    """Weights of E experts in checkpoint layout; W13 has the 2I rows gate 0..I-1, then up 0..I-1.

    ============  ============================  ==========================================================
    field         ``fp8_block``                 ``mxfp8_mxfp4``
    ============  ============================  ==========================================================
    w13           E4M3 [E, 2I, H]               uint8 [E, 2I, H / 2], two E2M1 codes per byte
    w13_scale     float32 [E, 2I/128, H/128]    uint8 (UE8M0) [E, 2I, H/32], or [E, 2I/32, H/32]
    w2            E4M3 [E, H, I]                uint8 [E, H, I / 2]
    w2_scale      float32 [E, H/128, I/128]     uint8 [E, H, I/32], or [E, H/32, I/32]
    ============  ============================  ==========================================================
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


class KernelWeights(NamedTuple):
    """The same weights in a kernel's layout (``contract.WeightLayout.regions``): uint8, and float32 SFs."""

    w13: torch.Tensor
    w13_sf: torch.Tensor
    w2: torch.Tensor
    w2_sf: torch.Tensor


# Quantization


def quantize_fp8_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix [N, K] to E4M3 with one float32 SF per 128 x 128 block.

    Returns:
        E4M3 [N, K], float32 [N / 128, K / 128].

    Raises:
        InputError: N or K is no multiple of 128, or a value is NaN or infinite.
    """
    blocks = _split_blocks(weight, FP8_BLOCK, FP8_BLOCK)
    scale = float32_scale(_finite_amax(blocks))
    return to_e4m3(blocks / scale[:, None, :, None]).view(weight.shape), scale


def dequantize_fp8_block(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., N, K] of E4M3 [..., N, K] with SFs [..., N / 128, K / 128]."""
    return weight.float() * _expand(scale.float(), FP8_BLOCK, FP8_BLOCK)


def quantize_mxfp4(weight: torch.Tensor, block_rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a matrix [N, K] to E2M1 with one UE8M0 SF per ``block_rows`` x 32 block (1 or 32 rows).

    Returns:
        uint8 [N, K / 2], two codes per byte, the lower K in the low nibble; uint8 [N / block_rows, K / 32].

    Raises:
        InputError: N or K does not divide into blocks, or a value is NaN or infinite.
    """
    blocks = _split_blocks(weight, block_rows, MX_BLOCK)
    scale = ue8m0_scale(_finite_amax(blocks), E2M1_MAX)
    codes = to_e2m1(blocks / ue8m0_to_float32(scale)[:, None, :, None]).view(weight.shape)
    return pack_e2m1(codes), scale


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., N, K] of packed E2M1 [..., N, K / 2], SFs [..., N, K / 32] or [..., N / 32, K / 32]."""
    values = e2m1_to_float32(unpack_e2m1(packed))
    scale = expand_mxfp4_scale(scale, values.shape[-2])
    return values * _expand(ue8m0_to_float32(scale), 1, MX_BLOCK)


def expand_mxfp4_scale(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """One UE8M0 SF per row: [..., rows / 32, K / 32] or [..., rows, K / 32] -> uint8 [..., rows, K / 32]."""
    return scale.view(torch.uint8).repeat_interleave(rows // scale.shape[-2], dim=-2)


def quantize_experts(
    w13: torch.Tensor, w2: torch.Tensor, format: Format = "fp8_block", mx_block_rows: int = 1
) -> ExpertWeights:
    """Quantize a checkpoint's experts, one at a time.

    Args:
        w13: [E, 2I, H], any float dtype; gate rows, then up rows.
        w2: [E, H, I].
        mx_block_rows: rows that share an SF in ``mxfp8_mxfp4``, 1 or 32.

    Raises:
        InputError: sizes that don't fit, or a value that is NaN or infinite.
    """
    check_format(format)

    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_fp8_block(weight) if format == "fp8_block" else quantize_mxfp4(weight, mx_block_rows)

    return ExpertWeights(*_map_experts(w13, quantize), *_map_experts(w2, quantize))


def random_experts(
    shape: MoEShape,
    experts: Iterable[int],
    seed: int = 0,
    device: torch.device | str = "cpu",
    format: Format = "fp8_block",
) -> ExpertWeights:
    """Gaussian weights of these experts, for tests and benchmarks.

    Expert e has the same weights whoever makes it, so a rank makes only its own (on one kind of device).
    Blocks of 128 x 128 differ in size by up to 4, so that an SF applied to the wrong block shows.
    """
    check_format(format)
    made = [_random_expert(shape, expert, seed, torch.device(device), format) for expert in experts]
    if not made:
        raise InputError("experts is empty; name at least one expert")
    return ExpertWeights(*(torch.cat(field) for field in zip(*made, strict=True)))


def _random_expert(
    shape: MoEShape, expert: int, seed: int, device: torch.device, format: Format
) -> ExpertWeights:
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + expert)

    def draw(n: int, k: int) -> torch.Tensor:
        weight = torch.randn(n, k, generator=generator, device=device) / k**0.5
        gain = torch.rand(n // FP8_BLOCK, k // FP8_BLOCK, generator=generator, device=device)
        return (weight * _expand(2 ** (2 * gain - 1), FP8_BLOCK, FP8_BLOCK)).bfloat16()[None]

    return quantize_experts(
        draw(2 * shape.intermediate, shape.hidden), draw(shape.hidden, shape.intermediate), format
    )


def _map_experts(
    weight: torch.Tensor, quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply ``quantize`` to each expert of [E, N, K] into results allocated once."""
    if weight.dim() != 3 or len(weight) == 0:
        raise InputError(
            f"weights have shape {list(weight.shape)}; give [experts, N, K] with one expert or more"
        )
    first = quantize(weight[0])
    values, scales = (part.new_empty(len(weight), *part.shape) for part in first)
    values[0], scales[0] = first
    for expert in range(1, len(weight)):
        values[expert], scales[expert] = quantize(weight[expert])
    return values, scales


def _split_blocks(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """float32 [N / rows, rows, K / columns, columns] of [N, K]."""
    n, k = weight.shape
    if n % rows or k % columns:
        raise InputError(
            f"weight [{n}, {k}] does not divide into blocks of {rows} x {columns}; pad it with zeros"
        )
    return weight.float().reshape(n // rows, rows, k // columns, columns)


def _finite_amax(blocks: torch.Tensor) -> torch.Tensor:
    amax = blocks.abs().amax(dim=(1, 3))
    if not torch.isfinite(amax).all():
        raise InputError("a weight is NaN or infinite; quantize finite weights")
    return amax


def _expand(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scale.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)


# Kernel layout of sm90 (described in contract.WeightLayout)

GATE_UP_INTERLEAVE = 8
SWIZZLE_ROWS = 8
SWIZZLE_CHUNK = 16


def check_fp8_block(weights: ExpertWeights, layout: WeightLayout) -> None:
    """Checks a rank's ``fp8_block`` checkpoint tensors against its layout.

    Raises:
        InputError: names the tensor whose dtype, shape or device does not fit.
    """
    h, i, e = layout.shape.hidden, layout.shape.intermediate, layout.local_experts
    block = FP8_BLOCK
    expected = {
        "w13": (e, 2 * i, h),
        "w13_scale": (e, 2 * i // block, h // block),
        "w2": (e, h, i),
        "w2_scale": (e, h // block, i // block),
    }
    for (name, shape), tensor in zip(expected.items(), weights):
        dtypes = _SCALE_DTYPES if name.endswith("scale") else (torch.float8_e4m3fn,)
        if tensor.dtype not in dtypes:
            raise InputError(
                f"{name} has dtype {tensor.dtype}; give {' or '.join(map(str, dtypes))}, "
                f"or quantize bfloat16 weights with megagen.weights.quantize_experts"
            )
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"{name} has shape {list(tensor.shape)}; "
                f"{layout.shape} with {e} local experts needs {list(shape)}"
            )
        if tensor.device != weights.w13.device:
            raise InputError(
                f"{name} is on {tensor.device}, but w13 on {weights.w13.device}; put all four on one device"
            )


_SCALE_DTYPES = (torch.float32, torch.float8_e8m0fnu)


def empty_kernel_weights(layout: WeightLayout, device: torch.device | str = "cpu") -> KernelWeights:
    """Uninitialized tensors for a layout: bytes for E4M3, float32 for SFs."""
    dtypes = {"e4m3": torch.uint8, "f32": torch.float32}
    return KernelWeights(
        **{r.name: torch.empty(r.shape, dtype=dtypes[r.dtype], device=device) for r in layout.regions.regions}
    )


def to_kernel_layout(
    weights: ExpertWeights, layout: WeightLayout, out: KernelWeights | None = None
) -> KernelWeights:
    """Transform ``fp8_block`` checkpoint weights to the kernel's layout, expert by expert.

    Args:
        weights: a rank's experts; SFs may also be ``float8_e8m0fnu``.
        out: tensors to write to, such as those of an earlier call; by default new ones on the same device.

    Raises:
        InputError: weights that do not fit the layout, or a format other than ``fp8_block``.
    """
    if layout.format != "fp8_block":
        raise InputError(f"format={layout.format!r} has another layout; to_kernel_layout makes fp8_block")
    check_fp8_block(weights, layout)
    if out is None:
        out = empty_kernel_weights(layout, weights.w13.device)
    for expert in range(layout.local_experts):
        w13, w2 = (_bytes(matrix[expert]) for matrix in (weights.w13, weights.w2))
        out.w13[expert] = _tile(_interleave(w13), layout.block_n)
        out.w2[expert] = _tile(_pad_rows(w2, layout.block_n), layout.block_n)
        # A w13 tile of 256 rows holds 128 of gate and 128 of up: the pair of block rows t and t + I / 128.
        gate, up = weights.w13_scale[expert].float().chunk(2)
        out.w13_sf[expert] = torch.stack((gate, up), dim=-1)
        w2_scale = _pad_rows(weights.w2_scale[expert].float(), layout.block_n // FP8_BLOCK)
        out.w2_sf[expert] = w2_scale.unflatten(0, (layout.n_tiles2, -1)).transpose(1, 2)
    return out


def from_kernel_layout(weights: KernelWeights, layout: WeightLayout) -> ExpertWeights:
    """Inverse of ``to_kernel_layout``, expert by expert; SFs come back as float32."""
    h, i, e = layout.shape.hidden, layout.shape.intermediate, layout.local_experts
    block, device = FP8_BLOCK, weights.w13.device
    out = ExpertWeights(
        w13=torch.empty(e, 2 * i, h, dtype=torch.float8_e4m3fn, device=device),
        w13_scale=torch.empty(e, 2 * i // block, h // block, device=device),
        w2=torch.empty(e, h, i, dtype=torch.float8_e4m3fn, device=device),
        w2_scale=torch.empty(e, h // block, i // block, device=device),
    )
    for expert in range(e):
        _bytes(out.w13[expert]).copy_(_deinterleave(_untile(weights.w13[expert])))
        _bytes(out.w2[expert]).copy_(_untile(weights.w2[expert])[:h])
        out.w13_scale[expert] = torch.cat(weights.w13_sf[expert].unbind(-1))
        out.w2_scale[expert] = weights.w2_sf[expert].transpose(1, 2).flatten(0, 1)[: h // block]
    return out


def _bytes(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(torch.uint8)


def _interleave(w13: torch.Tensor) -> torch.Tensor:
    """[2I, H] with gate rows, then up rows -> gate 0..7, up 0..7, gate 8..15, ..."""
    return w13.unflatten(0, (2, -1, GATE_UP_INTERLEAVE)).transpose(0, 1).reshape(w13.shape)


def _deinterleave(w13: torch.Tensor) -> torch.Tensor:
    return w13.unflatten(0, (-1, 2, GATE_UP_INTERLEAVE)).transpose(0, 1).reshape(w13.shape)


def _pad_rows(matrix: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zero rows at the end, up to a multiple."""
    return torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % multiple))


def _tile(matrix: torch.Tensor, tile_n: int) -> torch.Tensor:
    """Bytes [N, K] -> swizzled tiles [N / tile_n, K / 128, tile_n, 128]."""
    n, k = matrix.shape
    tiles = matrix.reshape(n // tile_n, tile_n, k // FP8_BLOCK, FP8_BLOCK).transpose(1, 2)
    return _swizzle(tiles)


def _untile(tiles: torch.Tensor) -> torch.Tensor:
    """Inverse of ``_tile``."""
    return _swizzle(tiles).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _swizzle(tiles: torch.Tensor) -> torch.Tensor:
    """Move 16-byte chunk c of each 128-byte row r to position c XOR (r mod 8); its own inverse."""
    atoms = tiles.unflatten(-1, (-1, SWIZZLE_CHUNK)).unflatten(-3, (-1, SWIZZLE_ROWS))
    row = torch.arange(SWIZZLE_ROWS, device=tiles.device)[:, None]
    chunk = torch.arange(FP8_BLOCK // SWIZZLE_CHUNK, device=tiles.device)
    return atoms[..., row, row ^ chunk, :].reshape(tiles.shape)
