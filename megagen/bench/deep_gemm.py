"""The peer: the SM90 FP8 mega-MoE kernel of the package sgl-deep-gemm, through its public functions."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megagen.bench.cases import Inputs
from megagen.bench.contenders import END_TO_END, KERNEL, clear, poison
from megagen.bench.processes import Ranks
from megagen.bench.timing import Call
from megagen.shape import MoEShape
from megagen.weights import ExpertWeights


class DeepGemm:
    """One fused kernel per call; bfloat16 input goes through the package's own quantizing kernel first."""

    def __init__(self, ranks: Ranks, shape: MoEShape, weights: ExpertWeights, max_tokens: int) -> None:
        import deep_gemm

        self._package = deep_gemm
        self._buffer = deep_gemm.get_symm_buffer_for_mega_moe(
            dist.group.WORLD, shape.experts, max_tokens, shape.top_k, shape.hidden, shape.intermediate
        )
        self._w13, self._w2 = deep_gemm.transform_weights_for_mega_moe_sm90(
            (weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)
        )

    def calls(self, inputs: Inputs) -> list[Call]:
        return [self._kernel(inputs), self._end_to_end(inputs)]

    def _kernel(self, inputs: Inputs) -> Call:
        buffer, tokens = self._buffer, len(inputs.x)
        output = torch.empty_like(inputs.x)

        def prepare() -> None:
            buffer.topk_idx.fill_(-1)
            views = (buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights)
            for view, values in zip(views, inputs[1:], strict=True):
                view[:tokens].copy_(values)
            poison(output)

        def run() -> None:
            self._package.fp8_mega_moe(output, self._w13, self._w2, buffer)

        return Call(KERNEL, prepare, run, output)

    def _end_to_end(self, inputs: Inputs) -> Call:
        buffer, tokens = self._buffer, len(inputs.x)
        output = torch.empty_like(inputs.x)

        def prepare() -> None:
            clear(buffer.x)
            poison(output)

        def run() -> None:
            self._package.mega_moe_pre_dispatch_sm90(
                inputs.x,
                inputs.topk_ids,
                inputs.topk_weights,
                buffer.x,
                buffer.x_sf,
                buffer.topk_idx,
                buffer.topk_weights,
                tokens,
            )
            self._package.fp8_mega_moe(output, self._w13, self._w2, buffer)

        return Call(END_TO_END, prepare, run, output)

    def check(self) -> None:
        torch.cuda.synchronize()

    def recover(self) -> None:
        """Nothing that its interface offers."""

    def memory_bytes(self) -> int:
        return int(self._buffer.buffer.nbytes)
