"""The unfused baseline: what a few lines of PyTorch give, NCCL all-to-all and grouped FP8 GEMMs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megagen.bench.cases import Inputs
from megagen.bench.contenders import END_TO_END, poison
from megagen.bench.processes import Ranks
from megagen.bench.timing import Call
from megagen.errors import InputError
from megagen.formats import E4M3_MAX
from megagen.shape import MoEShape
from megagen.weights import ExpertWeights, dequantize_fp8_block

GROUP_ROWS = 16  # torch's grouped GEMM wants each group to start on a multiple of so many rows


class Routes(NamedTuple):
    """Where token copies go, once the counts have come to the host.

    Attributes:
        send, receive: copies per peer rank.
        destination: [received] row of each received copy in the grouped buffer.
        ends: int32 [local experts], end of each group, the last one that of the buffer.
        rows: of the grouped buffer, each group padded to ``GROUP_ROWS``.
    """

    send: list[int]
    receive: list[int]
    destination: torch.Tensor
    ends: torch.Tensor
    rows: int


class PyTorch:
    """Sort by expert, exchange counts (through the host), exchange tokens, GEMM, SwiGLU, GEMM, send back."""

    def __init__(self, ranks: Ranks, shape: MoEShape, weights: ExpertWeights, max_tokens: int) -> None:
        self._world, self._experts, self._local = ranks.world, shape.experts, shape.experts // ranks.world
        self._w13, self._w13_scale = row_wise_weights(weights.w13, weights.w13_scale)
        self._w2, self._w2_scale = row_wise_weights(weights.w2, weights.w2_scale)

    def calls(self, inputs: Inputs) -> list[Call]:
        if not bool(((inputs.topk_ids >= 0) & (inputs.topk_ids < self._experts)).all()):
            raise InputError("topk_ids: the baseline needs top_k experts for every token")
        output = torch.empty_like(inputs.x)

        def run() -> None:
            output.copy_(self.forward(inputs.x, inputs.topk_ids, inputs.topk_weights))

        return [Call(END_TO_END, lambda: poison(output), run, output, host_bound=True)]

    def forward(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, H]; every token must have ``top_k`` experts."""
        tokens, top_k = topk_ids.shape
        order = topk_ids.flatten().argsort(stable=True)
        values, scale = compiled(row_wise)(x)
        routes = self._routes(topk_ids)
        rows, row_scale = (self._exchange(part[order // top_k], routes) for part in (as_bytes(values), scale))

        grouped = rows.new_zeros(routes.rows, rows.shape[1])
        grouped[routes.destination] = rows
        grouped_scale = scale.new_ones(routes.rows)
        grouped_scale[routes.destination] = row_scale
        hidden = grouped_gemm(
            grouped.view(values.dtype), grouped_scale, self._w13, self._w13_scale, routes.ends
        )
        hidden_q, hidden_scale = compiled(swiglu_row_wise)(hidden)
        results = grouped_gemm(hidden_q, hidden_scale, self._w2, self._w2_scale, routes.ends)

        home = self._exchange(results[routes.destination], routes, back=True)
        by_token = torch.empty_like(home)
        by_token[order] = home
        return compiled(weighted_sum)(by_token.view(tokens, top_k, -1), topk_weights)

    def _routes(self, topk_ids: torch.Tensor) -> Routes:
        flat = topk_ids.flatten().long()
        ones = torch.ones_like(flat)
        send = torch.zeros(self._experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, ones)
        receive = send
        if self._world > 1:
            receive = torch.empty_like(send)
            dist.all_to_all_single(receive, send)
        on_host = torch.stack((send, receive)).view(2, self._world, self._local).cpu()
        return plan_routes(on_host[0], on_host[1], receive)

    def _exchange(self, rows: torch.Tensor, routes: Routes, back: bool = False) -> torch.Tensor:
        """All-to-all of rows, to the experts' ranks or back to the tokens'."""
        if self._world == 1:
            return rows
        send, receive = (routes.receive, routes.send) if back else (routes.send, routes.receive)
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), receive, send)
        return received

    def check(self) -> None:
        torch.cuda.synchronize()

    def recover(self) -> None:
        """It keeps no state between calls."""

    def memory_bytes(self) -> None:
        """Allocated anew in each call."""


def plan_routes(send: torch.Tensor, receive: torch.Tensor, receive_on_device: torch.Tensor) -> Routes:
    """Routes for counts [ranks, local experts] on the host; the received ones also, flat, on the device."""
    ranks, local = receive.shape
    device = receive_on_device.device
    received = int(receive.sum())
    per_expert = receive_on_device.view(ranks, local).sum(0)
    ends = (-(-per_expert // GROUP_ROWS) * GROUP_ROWS).cumsum(0)
    start = ends - -(-per_expert // GROUP_ROWS) * GROUP_ROWS
    first = per_expert.cumsum(0) - per_expert
    # Rows come by rank, then by expert; the grouped buffer has them by expert, then by rank.
    expert = torch.arange(local, device=device).repeat(ranks)
    expert = expert.repeat_interleave(receive_on_device, output_size=received)
    by_expert = expert.argsort(stable=True)
    ordered = expert[by_expert]
    destination = torch.empty_like(expert)
    destination[by_expert] = (start - first)[ordered] + torch.arange(received, device=device)
    rows = int((-(-receive.sum(0) // GROUP_ROWS) * GROUP_ROWS).sum())
    return Routes(send.sum(1).tolist(), receive.sum(1).tolist(), destination, ends.int(), rows)


def grouped_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """bfloat16 [M, N] of E4M3 [M, K] and [E, N, K] with a scale per row, [M] and [E, N]."""
    return torch._scaled_grouped_mm(
        x,
        weight.transpose(1, 2),
        x_scale,
        weight_scale,
        offs=ends,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def row_wise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [M, K] to E4M3 with one float32 scale per row."""
    values = x.float()
    scale = values.abs().amax(dim=-1).clamp(min=1e-10) / E4M3_MAX
    return (values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def swiglu_row_wise(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of [M, 2I] (gate, then up), quantized row by row."""
    gate, up = hidden.float().chunk(2, dim=-1)
    return row_wise(torch.nn.functional.silu(gate) * up)


def weighted_sum(partial: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """bfloat16 [T, H] of [T, K, H] and weights [T, K]."""
    return (partial.float() * topk_weights.unsqueeze(-1)).sum(dim=1).bfloat16()


def row_wise_weights(weight: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [E, N, K] with 128 x 128 block scales -> E4M3 [E, N, K] with one scale per row, [E, N]."""
    values = torch.empty_like(weight)
    scales = torch.empty(weight.shape[:2], device=weight.device)
    for expert in range(len(weight)):
        values[expert], scales[expert] = row_wise(dequantize_fp8_block(weight[expert], scale[expert]))
    return values, scales


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, since not every operation takes float8."""
    return values.view(torch.uint8)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Fused by torch.compile, for any number of rows."""
    return torch.compile(function, dynamic=True)
