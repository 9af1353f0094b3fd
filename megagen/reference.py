"""The ground truth in PyTorch: what a launch computes, on any device, without any of its machinery.

It quantizes exactly where the kernel does. Dot products over one scale block are exact (float64 holds them)
or, on request, those of Hopper's tensor cores; transcendentals are rounded from float64, and sums have a
fixed order, so the result depends neither on the device nor on the number of ranks. What it cannot share
with hardware is, in the fast activation, the last bits of ``ex2.approx`` and ``rcp.approx``.

Tensor cores cut products off 2^-13 below the largest one, so a few in a thousand intermediate elements get
the neighbouring E4M3 number. Against exact dot products that is a relative error of 4e-3 in a large output,
and of up to several times that in an output of a few tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from megagen.errors import InputError
from megagen.formats import (
    FP8_BLOCK,
    MX_BLOCK,
    Format,
    check_format,
    dequantize_rows,
    quantize_activation,
    quantize_rows,
)
from megagen.tensor_core import hopper_fp8_partials
from megagen.weights import ExpertWeights, dequantize_fp8_block, dequantize_mxfp4

Activation = Literal["exact", "fast"]
Accumulation = Literal["exact", "hopper"]

MAX_ROWS = 4096
"""Rows of one expert that are computed at a time, to bound memory."""

MAX_HOPPER_PRODUCTS = 3e10
"""Up to so many products, ``accumulation_for_check`` chooses "hopper": 65 tokens of a large model. They move
half a terabyte through the GPU's memory. A larger output meets its tolerance without."""


def moe_forward(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights | Sequence[ExpertWeights],
    *,
    format: Format = "fp8_block",
    activation: Activation = "fast",
    clamp: float | None = None,
    sf_group: int = 128,
    quantize_intermediate: bool = True,
    accumulation: Accumulation = "exact",
) -> torch.Tensor:
    """Output of the MoE layer for the tokens of one rank (or of several: tokens do not influence each other).

    Args:
        x: [T, H] of a float dtype, or (E4M3 [T, H], SF) as ``quantize_activation`` returns them.
        topk_ids: [T, K] int32 or int64; an id outside 0..E-1 is dropped.
        topk_weights: [T, K] float32.
        weights: all E experts in checkpoint layout, or a sequence with each rank's share in order of ranks.
            They may be on another device than ``x``.
        activation: "exact" (silu rounded once) or "fast" (exp2 and a reciprocal, each rounded to float32).
        clamp: limits gate from above and up on both sides, before silu.
        sf_group: intermediate columns that share an SF, 64 or 128; only for ``fp8_block``.
        quantize_intermediate: False gives float32 arithmetic on the dequantized input and weights: neither
            the intermediate nor an expert's output is rounded.
        accumulation: of products over one scale block: "exact", or "hopper" for the bits of Hopper's tensor
            cores (``megagen.tensor_core``), which takes far longer. Only for ``fp8_block`` with a quantized
            intermediate.

    Returns:
        bfloat16 [T, H]; float32 without ``quantize_intermediate``. Zeros for a token without experts.

    Raises:
        InputError: names the argument that does not fit.
    """
    shards = [weights] if isinstance(weights, ExpertWeights) else list(weights)
    experts = sum(len(shard.w13) for shard in shards)
    hidden = shards[0].w2.shape[1]
    _check_arguments(x, topk_ids, topk_weights, hidden, format, activation, sf_group)
    _check_accumulation(accumulation, format, quantize_intermediate)
    values, scale = x if isinstance(x, tuple) else quantize_activation(x, format)
    group = sf_group if format == "fp8_block" else MX_BLOCK
    layer = _Layer(format, activation, clamp, group, quantize_intermediate, accumulation)

    ids, routing_weights = fold_topk(topk_ids, topk_weights, experts)
    tokens, top_k = ids.shape
    partial_dtype = torch.bfloat16 if quantize_intermediate else torch.float32
    # What each expert sends home, [k][token][H]: the kernel's combine buffer.
    combine = torch.zeros(top_k, tokens, hidden, dtype=partial_dtype, device=ids.device)
    for expert in ids[ids >= 0].unique().tolist():
        weight = _expert(shards, expert, ids.device)
        for rows in (ids == expert).nonzero().split(MAX_ROWS):
            token, k = rows.unbind(1)
            expert_input = (_index_rows(values, token), scale[token])
            combine[k, token] = layer.expert(expert_input, routing_weights[token, k], weight).to(
                partial_dtype
            )

    output = torch.zeros(tokens, hidden, device=ids.device)
    for k in range(top_k):
        output = torch.where(ids[:, k, None] >= 0, output + combine[k].float(), output)
    return output.to(partial_dtype)


def accumulation_for_check(
    topk_ids: torch.Tensor, weights: ExpertWeights | Sequence[ExpertWeights]
) -> Accumulation:
    """How to accumulate in a reference for the output of the GPU that holds ``topk_ids``: "hopper" if it is a
    Hopper and the output is small.
    """
    if not topk_ids.is_cuda or torch.cuda.get_device_capability(topk_ids.device)[0] != 9:
        return "exact"
    shard = weights if isinstance(weights, ExpertWeights) else weights[0]
    products = topk_ids.numel() * (shard.w13[0].numel() + shard.w2[0].numel())
    return "hopper" if products <= MAX_HOPPER_PRODUCTS else "exact"


def fold_topk(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop ids that name no expert, and fold an expert that a token names twice into its first place.

    Returns:
        int64 [T, K] with -1 for dropped and folded entries; float32 [T, K], weights of an expert added in
        order of k, 0 where there is no expert.
    """
    ids = topk_ids.long()
    valid = (ids >= 0) & (ids < experts)
    first = (ids[:, :, None] == ids[:, None, :]).int().argmax(dim=2)
    is_first = first == torch.arange(ids.shape[1], device=ids.device)
    folded = torch.zeros_like(topk_weights, dtype=torch.float32)
    for k in range(ids.shape[1]):
        folded.scatter_add_(1, first[:, k : k + 1], topk_weights[:, k : k + 1].float())
    kept = valid & is_first
    # Selected, not multiplied: a weight without an expert may be NaN.
    return torch.where(kept, ids, -1), torch.where(kept, folded, 0.0)


def pool_order(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Order in which a rank's dispatch pulls an expert's tokens, as (source rank, slot).

    Min-peeling: each round takes the smallest remaining count from every rank that still has tokens, so that
    neighbours come from different ranks. Counts (4, 1, 3) give ranks 0 1 2 0 2 0 2 0.
    """
    order: list[tuple[int, int]] = []
    taken = 0
    while remaining := [rank for rank, count in enumerate(counts) if count > taken]:
        length = min(counts[rank] for rank in remaining) - taken
        order += [(rank, slot) for slot in range(taken, taken + length) for rank in remaining]
        taken += length
    return order


class RelativeError(NamedTuple):
    """Relative Frobenius errors of the whole output and of its worst token row; infinite where NaN occurs."""

    whole: float
    worst_row: float

    def within(self, whole: float, row: float) -> bool:
        """Whether both are at most these limits."""
        return self.whole <= whole and self.worst_row <= row


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> RelativeError:
    """Error of ``actual`` [T, H] against ``expected``: |actual - expected| / |expected|, computed in float64.

    A row that is expected to be zero must be zero. NaN or infinity on either side never passes, not even
    where both have it.
    """
    if actual.shape != expected.shape:
        raise InputError(
            f"actual has shape {list(actual.shape)}, expected {list(expected.shape)}; compare equal shapes"
        )
    if actual.numel() == 0:
        return RelativeError(0.0, 0.0)
    reference = expected.double()
    difference = actual.to(reference) - reference
    return RelativeError(
        _ratio(difference.norm()[None], reference.norm()[None]),
        _ratio(difference.norm(dim=-1), reference.norm(dim=-1)),
    )


def _ratio(difference: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference / reference, with 0 / 0 = 0, and infinity for NaN."""
    exact = difference == 0
    ratio = torch.where(exact, 0.0, difference / reference)
    return ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


class _Layer(NamedTuple):
    """Options of the layer, and what one expert does with its rows."""

    format: Format
    activation: Activation
    clamp: float | None
    sf_group: int
    quantize_intermediate: bool
    accumulation: Accumulation

    def expert(
        self, x: tuple[torch.Tensor, torch.Tensor], routing_weight: torch.Tensor, weight: ExpertWeights
    ) -> torch.Tensor:
        """float32 [M, H]: L1, SwiGLU, requantization, L2 for M rows (E4M3, SF) with a routing weight each."""
        gate, up = self.gemm(x, weight.w13, weight.w13_scale).chunk(2, dim=1)
        h = swiglu(gate, up, self.activation, self.clamp) * routing_weight[:, None]
        if not self.quantize_intermediate:
            return (h.double() @ self.dequantize(weight.w2, weight.w2_scale).double().T).float()
        return self.gemm(quantize_rows(h, self.format, self.sf_group), weight.w2, weight.w2_scale)

    def gemm(
        self, a: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, weight_scale: torch.Tensor
    ) -> torch.Tensor:
        """float32 [M, N] = a [M, K] x weight [N, K]^T."""
        if self.format == "fp8_block" and self.quantize_intermediate:
            return _gemm_fp8_block(*a, weight, weight_scale, self.accumulation)
        # Power-of-two scales change no mantissa, so scaling first is what the block-scaled MMA computes.
        return (dequantize_rows(*a).double() @ self.dequantize(weight, weight_scale).double().T).float()

    def dequantize(self, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (dequantize_fp8_block if self.format == "fp8_block" else dequantize_mxfp4)(weight, scale)


def swiglu(
    gate: torch.Tensor, up: torch.Tensor, activation: Activation = "exact", clamp: float | None = None
) -> torch.Tensor:
    """silu(gate) * up in float32, with NaN kept by the clamp."""
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    if activation == "exact":
        return torch.nn.functional.silu(gate.double()).float() * up
    log2_e = 1.4426950408889634
    exp = torch.exp2((gate * -log2_e).double()).float()
    return gate * (1.0 / (1.0 + exp)) * up


def _gemm_fp8_block(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    accumulation: Accumulation,
) -> torch.Tensor:
    """acc = fma(SF of a * SF of weight, dot product, acc) per SF group along K, in float32."""
    group = a.shape[1] // a_scale.shape[1]
    partials = hopper_fp8_partials if accumulation == "hopper" else _exact_partials
    acc = torch.zeros(len(a), len(weight), device=a.device)
    for block, dot in enumerate(partials(a, weight, group)):
        column_scale = weight_scale[:, block * group // FP8_BLOCK].float().repeat_interleave(FP8_BLOCK)
        scale = a_scale[:, block, None] * column_scale
        # A fused multiply-add: the product is exact in float64. The sum is rounded twice, to float64 and to
        # float32, which differs from once only if the first rounding hits a float32 tie: about 1 in 2^29.
        acc = (scale.double() * dot + acc).float()
    return acc


def _exact_partials(a: torch.Tensor, b: torch.Tensor, group: int) -> Iterator[torch.Tensor]:
    """float32 [M, N] dot products of E4M3 [M, K] and [N, K] over each ``group`` of K, rounded once."""
    for a_block, b_block in zip(a.split(group, dim=1), b.split(group, dim=1)):
        # Exact: each product is a multiple of 2^-18, and their sum needs at most 43 bits.
        yield (a_block.double() @ b_block.double().T).float()


def _expert(shards: Sequence[ExpertWeights], expert: int, device: torch.device) -> ExpertWeights:
    """One expert's matrices, from the rank that has them."""
    for shard in shards:
        if expert < len(shard.w13):
            return ExpertWeights(*(tensor[expert].to(device) for tensor in shard))
        expert -= len(shard.w13)
    raise IndexError(expert)


def _index_rows(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """values[rows]; by bytes, since not every device indexes float8."""
    return values.view(torch.uint8)[rows].view(values.dtype)


def _check_arguments(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    hidden: int,
    format: str,
    activation: str,
    sf_group: int,
) -> None:
    check_format(format)
    if activation not in ("exact", "fast"):
        raise InputError(f"activation={activation!r} is unknown; choose exact or fast")
    if sf_group not in (64, 128):
        raise InputError(f"sf_group={sf_group} is not supported; choose 64 or 128")
    tokens = x[0] if isinstance(x, tuple) else x
    if tokens.dim() != 2 or tokens.shape[1] != hidden:
        raise InputError(f"x has shape {list(tokens.shape)}; the weights need [T, {hidden}]")
    if isinstance(x, tuple) and tokens.dtype != torch.float8_e4m3fn:
        raise InputError(f"x has dtype {tokens.dtype}; with SFs it is float8_e4m3fn")
    if topk_ids.dim() != 2 or len(topk_ids) != len(tokens):
        raise InputError(f"topk_ids has shape {list(topk_ids.shape)}; x needs [{len(tokens)}, top_k]")
    if topk_weights.shape != topk_ids.shape:
        raise InputError(
            f"topk_weights has shape {list(topk_weights.shape)}; topk_ids needs {list(topk_ids.shape)}"
        )


def _check_accumulation(accumulation: str, format: str, quantize_intermediate: bool) -> None:
    if accumulation not in ("exact", "hopper"):
        raise InputError(f"accumulation={accumulation!r} is unknown; choose exact or hopper")
    if accumulation == "hopper" and (format != "fp8_block" or not quantize_intermediate):
        raise InputError(
            f"accumulation='hopper' does not go with format={format!r}, "
            f"quantize_intermediate={quantize_intermediate}; it needs fp8_block and True, or choose exact"
        )
