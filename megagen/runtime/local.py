"""Several ranks on one GPU in one process, for tests: the kernel can't tell them from GPUs of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

from megagen.errors import InputError, MegagenError, PeerAborted
from megagen.planning import KernelPlan
from megagen.runtime.driver import private_stream, require_gpu
from megagen.runtime.layer import MegaMoE, Tokens
from megagen.runtime.symmetric import PROBE_STREAM, SymmBuffer
from megagen.shape import MoEShape
from megagen.weights import ExpertWeights, KernelWeights


class LocalGroup(Sequence[MegaMoE]):
    """The layers of all ranks; each has its share of the SMs and a stream.

    The ranks' grids wait for each other, so all of them must fit on the GPU together: nothing else may run
    there meanwhile, and everything is allocated before the first launch.

    Args:
        shape: ``experts`` counts those of all ranks.
        ranks: on the current GPU.
        max_tokens: capacity per rank.
        num_sms: SMs of each rank, one number or one per rank; default: even shares.
        plan: a plan for all ranks, or one per rank.
        buffers: use these, of another local group of the same shape.
        options: of every ``MegaMoE``.
    """

    def __init__(
        self,
        shape: MoEShape,
        *,
        ranks: int,
        max_tokens: int,
        num_sms: int | Sequence[int] | None = None,
        plan: KernelPlan | Sequence[KernelPlan] | None = None,
        buffers: Sequence[SymmBuffer] | None = None,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> None:
        shape.experts_per_rank(ranks)
        # With fewer hardware queues than streams, a rank can queue behind one that waits for it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        gpu = require_gpu(device)
        shares = share_sms(num_sms, ranks, gpu.sms)
        plans = list(plan) if isinstance(plan, Sequence) else [plan] * ranks
        if buffers is None:
            buffers = SymmBuffer.local_group(shape, ranks=ranks, max_tokens=max_tokens, device=device)
        self.buffers = list(buffers)
        self.layers = [
            MegaMoE(shape, buffer=buffer, num_sms=share, plan=own_plan, **options)
            for buffer, share, own_plan in zip(self.buffers, shares, plans, strict=True)
        ]
        self.streams = [private_stream(gpu, PROBE_STREAM + 1 + rank) for rank in range(ranks)]

    @overload
    def __getitem__(self, index: int) -> MegaMoE: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[MegaMoE]: ...
    def __getitem__(self, index: int | slice) -> MegaMoE | Sequence[MegaMoE]:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[MegaMoE]:
        return iter(self.layers)

    def load_weights(self, weights: ExpertWeights | Sequence[ExpertWeights]) -> None:
        """Give each rank its experts: those of all ranks together, or one ``ExpertWeights`` per rank."""
        if isinstance(weights, ExpertWeights):
            shards = zip(*(tensor.chunk(len(self)) for tensor in weights), strict=True)
            weights = [ExpertWeights(*shard) for shard in shards]
        for layer, own in zip(self.layers, weights, strict=True):
            layer.load_weights(*own)

    def use_weights(self, weights: KernelWeights) -> None:
        """Give each rank its part of all ranks' experts in the kernel's layout, without a copy."""
        shards = zip(*(tensor.chunk(len(self)) for tensor in weights), strict=True)
        for layer, own in zip(self.layers, shards, strict=True):
            layer.use_weights(KernelWeights(*own))

    def prepare(self) -> None:
        """Prepare every rank."""
        for layer in self.layers:
            layer.prepare()

    def __call__(
        self,
        x: Sequence[Tokens],
        topk_ids: Sequence[torch.Tensor],
        topk_weights: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor | None] | None = None,
        num_tokens: Sequence[int | torch.Tensor | None] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Call all ranks, each with its own element of the arguments; the current stream waits for them.

        ``ranks`` launches only these, for tests of ranks that stall.
        """
        self.prepare()
        count = len(self)
        calls = [
            layer.check_call(*arguments)
            for layer, *arguments in zip(
                self.layers,
                x,
                topk_ids,
                topk_weights,
                out or [None] * count,
                num_tokens or [None] * count,
                strict=True,
            )
        ]
        current = torch.cuda.current_stream(self.buffers[0].gpu.device)
        ready = current.record_event()
        launched = range(count) if ranks is None else ranks
        for rank in launched:
            self.streams[rank].wait_event(ready)
            _, launchers = calls[rank]
            self.layers[rank].queue(launchers, self.streams[rank].cuda_stream)
        for rank in launched:
            current.wait_event(self.streams[rank].record_event())
        if any(layer.debug for layer in self.layers):
            self.check()
        return [output for output, _ in calls]

    def check(self) -> None:
        """Check every rank; the first error that is not merely a peer's is raised."""
        errors = []
        for layer in self.layers:
            try:
                layer.check()
            except MegagenError as error:
                errors.append(error)
        if errors:
            raise min(errors, key=lambda error: isinstance(error, PeerAborted))

    def reset(self) -> None:
        """Make all ranks usable again after an error."""
        self.layers[0].reset()


def share_sms(num_sms: int | Sequence[int] | None, ranks: int, available: int) -> list[int]:
    """SMs of each of ``ranks`` ranks.

    Raises:
        InputError: more than the GPU has, or not one number per rank.
    """
    if num_sms is None:
        num_sms = available // ranks
    shares = [num_sms] * ranks if isinstance(num_sms, int) else list(num_sms)
    if len(shares) != ranks or min(shares) < 1 or sum(shares) > available:
        raise InputError(
            f"num_sms={num_sms} for ranks={ranks}: the ranks of a local group run at the same time, so their "
            f"SMs, one or more each, must add up to at most {available}"
        )
    return shares
