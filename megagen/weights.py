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
from megagen.planning.sm100 import SF_ATOM_ROWS, SF_BYTES, sf_offset
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
    """The same weights in a kernel's layout (``contract.WeightLayout.regions``): uint8, and SFs as float32 or
    int32 words of four UE8M0."""

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


# Kernel layouts (described in contract.WeightLayout)

GATE_UP_INTERLEAVE = 8
SWIZZLE_ROWS = 8
SWIZZLE_CHUNK = 16

_UE8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
_DTYPES = {
    "fp8_block": ((torch.float8_e4m3fn,), (torch.float32, torch.float8_e8m0fnu)),
    "mxfp8_mxfp4": ((torch.uint8, torch.float4_e2m1fn_x2), _UE8M0_DTYPES),
}
"""Of the values and of the SFs of checkpoint weights."""


def check_experts(weights: ExpertWeights, layout: WeightLayout) -> None:
    """Checks a rank's checkpoint tensors (``ExpertWeights``) against its layout.

    Raises:
        InputError: names the tensor whose dtype, shape or device does not fit.
    """
    for name, tensor in weights._asdict().items():
        values, scales = _DTYPES[layout.format]
        dtypes = scales if name.endswith("scale") else values
        if tensor.dtype not in dtypes:
            raise InputError(
                f"{name} has dtype {tensor.dtype}; give {' or '.join(map(str, dtypes))}, "
                f"or quantize bfloat16 weights with megagen.weights.quantize_experts"
            )
        shapes = _checkpoint_shapes(name, layout)
        if tuple(tensor.shape) not in shapes:
            raise InputError(
                f"{name} has shape {list(tensor.shape)}; {layout.shape} with {layout.local_experts} local "
                f"experts needs {' or '.join(str(list(shape)) for shape in shapes)}"
            )
        if tensor.device != weights.w13.device:
            raise InputError(
                f"{name} is on {tensor.device}, but w13 on {weights.w13.device}; put all four on one device"
            )


def _checkpoint_shapes(name: str, layout: WeightLayout) -> list[tuple[int, int, int]]:
    """What a field of ``ExpertWeights`` may have as its shape."""
    h, i, e = layout.shape.hidden, layout.shape.intermediate, layout.local_experts
    n, k = (2 * i, h) if name.startswith("w13") else (h, i)
    if layout.format == "fp8_block":
        return [(e, n // FP8_BLOCK, k // FP8_BLOCK) if name.endswith("scale") else (e, n, k)]
    if name.endswith("scale"):
        return [(e, n, k // MX_BLOCK), (e, n // MX_BLOCK, k // MX_BLOCK)]
    return [(e, n, k // 2)]


def empty_kernel_weights(layout: WeightLayout, device: torch.device | str = "cpu") -> KernelWeights:
    """Uninitialized tensors for a layout: bytes for values, float32 or int32 (four packed UE8M0) for SFs."""
    dtypes = {"e4m3": torch.uint8, "u8": torch.uint8, "f32": torch.float32, "u32": torch.int32}
    return KernelWeights(
        **{r.name: torch.empty(r.shape, dtype=dtypes[r.dtype], device=device) for r in layout.regions.regions}
    )


def to_kernel_layout(
    weights: ExpertWeights, layout: WeightLayout, out: KernelWeights | None = None
) -> KernelWeights:
    """Transform checkpoint weights to the kernel's layout, expert by expert.

    Args:
        weights: a rank's experts, of the layout's format; SFs of ``fp8_block`` may also be
            ``float8_e8m0fnu``, those of ``mxfp8_mxfp4`` one per row and 32 of K, or per 32 x 32 block.
        out: tensors to write to, such as those of an earlier call; by default new ones on the same device.

    Raises:
        InputError: weights that do not fit the layout.
    """
    check_experts(weights, layout)
    if out is None:
        out = empty_kernel_weights(layout, weights.w13.device)
    transform = _fp8_block_expert if layout.format == "fp8_block" else _mxfp4_expert
    for expert in range(layout.local_experts):
        transform(ExpertWeights(*(tensor[expert] for tensor in weights)), layout, out, expert)
    return out


def _fp8_block_expert(weights: ExpertWeights, layout: WeightLayout, out: KernelWeights, expert: int) -> None:
    w13, w2 = _bytes(weights.w13), _bytes(weights.w2)
    out.w13[expert] = _tile(_interleave(w13), layout.block_n)
    out.w2[expert] = _tile(_pad_rows(w2, layout.block_n), layout.block_n)
    # A w13 tile of 256 rows holds 128 of gate and 128 of up: the pair of block rows t and t + I / 128.
    gate, up = weights.w13_scale.float().chunk(2)
    out.w13_sf[expert] = torch.stack((gate, up), dim=-1)
    w2_scale = _pad_rows(weights.w2_scale.float(), layout.block_n // FP8_BLOCK)
    out.w2_sf[expert] = w2_scale.unflatten(0, (layout.n_tiles2, -1)).transpose(1, 2)


def _mxfp4_expert(weights: ExpertWeights, layout: WeightLayout, out: KernelWeights, expert: int) -> None:
    w13, w2 = _bytes(weights.w13), _bytes(weights.w2)
    out.w13[expert] = _interleave(w13)
    out.w2[expert] = _pad_rows(w2, layout.block_n)
    w13_scale = _interleave(expand_mxfp4_scale(weights.w13_scale, len(w13)))
    out.w13_sf[expert] = _pack_sf(w13_scale, layout.block_n)
    w2_scale = _pad_rows(expand_mxfp4_scale(weights.w2_scale, len(w2)), layout.block_n)
    out.w2_sf[expert] = _pack_sf(w2_scale, layout.block_n)


def from_kernel_layout(weights: KernelWeights, layout: WeightLayout) -> ExpertWeights:
    """Inverse of ``to_kernel_layout``, expert by expert; SFs come back as float32, or one UE8M0 per row."""
    back = _fp8_block_checkpoint if layout.format == "fp8_block" else _mxfp4_checkpoint
    out: ExpertWeights | None = None
    for expert in range(layout.local_experts):
        own = back(KernelWeights(*(tensor[expert] for tensor in weights)), layout)
        if out is None:
            out = ExpertWeights(*(part.new_empty(layout.local_experts, *part.shape) for part in own))
        for whole, part in zip(out, own, strict=True):
            whole[expert] = part
    assert out is not None  # a rank has an expert or more
    return out


def _fp8_block_checkpoint(weights: KernelWeights, layout: WeightLayout) -> ExpertWeights:
    hidden, e4m3 = layout.shape.hidden, torch.float8_e4m3fn
    return ExpertWeights(
        w13=_deinterleave(_untile(weights.w13)).contiguous().view(e4m3),
        w13_scale=torch.cat(weights.w13_sf.unbind(-1)),
        w2=_untile(weights.w2)[:hidden].contiguous().view(e4m3),
        w2_scale=weights.w2_sf.transpose(1, 2).flatten(0, 1)[: hidden // FP8_BLOCK],
    )


def _mxfp4_checkpoint(weights: KernelWeights, layout: WeightLayout) -> ExpertWeights:
    hidden = layout.shape.hidden
    return ExpertWeights(
        w13=_deinterleave(weights.w13),
        w13_scale=_deinterleave(_unpack_sf(weights.w13_sf)),
        w2=weights.w2[:hidden],
        w2_scale=_unpack_sf(weights.w2_sf)[:hidden],
    )


def _pack_sf(scale: torch.Tensor, tile_n: int) -> torch.Tensor:
    """UE8M0 [N, K / 32] -> int32 [N / tile_n, K / 128, tile_n / 128, 128]: the four SFs of a row and 128 of K
    in a word, the words of 128 rows in the order of ``planning.sm100.sf_offset``."""
    words = scale.contiguous().view(torch.int32)
    tiles = words.reshape(len(words) // tile_n, tile_n // SF_ATOM_ROWS, SF_ATOM_ROWS, -1)
    packed = torch.empty_like(tiles)
    packed[:, :, _sf_places(scale.device)] = tiles
    return packed.permute(0, 3, 1, 2)


def _unpack_sf(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of ``_pack_sf``."""
    words = packed[..., _sf_places(packed.device)].permute(0, 2, 3, 1).flatten(0, 2)
    return words.flatten().view(torch.uint8).view(len(words), -1)


def _sf_places(device: torch.device) -> torch.Tensor:
    """Place of each row's word among those of its 128 rows."""
    return torch.tensor([sf_offset(row) // SF_BYTES for row in range(SF_ATOM_ROWS)], device=device)


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
