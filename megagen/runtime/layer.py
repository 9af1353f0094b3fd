"""MegaMoE: one mixture-of-experts layer on one rank, a call being one launch of its kernel."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from megagen.contract import DTYPE_BYTES, Contract, WeightLayout
from megagen.errors import InputError
from megagen.planning import KernelPlan
from megagen.runtime import ops
from megagen.runtime.arguments import ArgumentCheck
from megagen.runtime.driver import current_stream, fast_empty
from megagen.runtime.kernels import bundle_kernels, check_forced_plan
from megagen.runtime.launch import Launcher, MoELauncher, QuantizeLauncher
from megagen.runtime.peers import agree_on, together
from megagen.runtime.symmetric import Inputs, SymmBuffer, host_limit
from megagen.shape import MoEShape
from megagen.weights import (
    ExpertWeights,
    KernelWeights,
    check_experts,
    empty_kernel_weights,
    to_kernel_layout,
)

if TYPE_CHECKING:
    from megagen.runtime.local import LocalGroup

DEFAULT_TIMEOUT_S = 30.0

Tokens = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class MegaMoE:
    """A MoE layer: ``y = moe(x, topk_ids, topk_weights)`` on every rank of its group.

    Args:
        shape: the layer; ``experts`` counts those of all ranks, rank r owns [r * E/R, (r + 1) * E/R).
        buffer: memory that layers share. Or else:
        group, max_tokens: make a buffer for this layer alone; group None is one rank alone.
        num_sms: SMs that the kernel takes; default: all of the GPU. May differ between ranks.
        plan: use this plan for every number of tokens, instead of the planner's choice.
        kernels: folder of kernels built ahead of time; default: ``MEGAGEN_KERNELS``, else they are compiled.
        jit: compile what the folder lacks.
        activation: "fast" or "exact" SiLU.
        clamp: limits gate from above and up on both sides, before SiLU.
        timeout: seconds that a wait inside the kernel may take. Ranks that call later than that after each
            other get MegaMoETimeout.
        debug: check after every call.
        device: GPU of this rank, if the layer makes its buffer; default: the current one.

    Raises:
        ShapeError, PlanError: the shape, or a forced plan, does not fit.
        InputError: arguments that contradict each other.
        Further what ``SymmBuffer`` raises.
    """

    def __init__(
        self,
        shape: MoEShape,
        *,
        buffer: SymmBuffer | None = None,
        group: dist.ProcessGroup | None = None,
        max_tokens: int | None = None,
        num_sms: int | None = None,
        plan: KernelPlan | None = None,
        kernels: str | Path | None = None,
        jit: bool | None = None,
        activation: str = "fast",
        clamp: float | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        debug: bool = False,
        device: torch.device | str | int | None = None,
    ) -> None:
        if timeout <= 0:
            raise InputError(f"timeout={timeout} is not positive; give seconds")
        if buffer is None:
            if max_tokens is None:
                raise InputError("give buffer=, or max_tokens= (and group=) for a buffer of the layer's own")
            buffer = SymmBuffer(shape, group, max_tokens=max_tokens, device=device)
        check_buffer(buffer, shape, group, max_tokens)
        base = buffer.contract
        self.shape, self.buffer = shape, buffer
        self.contract = Contract(
            shape, base.ranks, base.max_tokens, base.format, activation=activation, clamp=clamp
        )
        self.num_sms = check_num_sms(num_sms, buffer.gpu.sms)
        if plan is not None:
            check_forced_plan(plan, self.contract, buffer.gpu.arch)
        self.timeout, self.debug = timeout, debug
        self._source: dict[str, Any] = {"plan": plan, "directory": kernels, "jit": jit}
        self._weights: KernelWeights | None = None
        self._launchers: list[MoELauncher] = []
        self._limits: tuple[int, ...] = ()
        self._quantize: QuantizeLauncher | None = None
        self.weight_layout = WeightLayout(shape, self.contract.local_experts, base.format)
        self._arguments = ArgumentCheck(self.contract, buffer.gpu.device)
        self._gpu_index = buffer.gpu.index
        self._new_output = output_allocator(buffer.gpu.device, shape.hidden)
        self._ready = False
        self.handle = ops.register(self)

    @classmethod
    def local_group(cls, shape: MoEShape, *, ranks: int, max_tokens: int, **options: Any) -> LocalGroup:
        """``ranks`` ranks on one GPU in this process, for tests: see ``LocalGroup``."""
        from megagen.runtime.local import LocalGroup

        return LocalGroup(shape, ranks=ranks, max_tokens=max_tokens, **options)

    # -- setting up

    def load_weights(
        self,
        w13: torch.Tensor,
        w13_scale: torch.Tensor,
        w2: torch.Tensor,
        w2_scale: torch.Tensor,
    ) -> None:
        """Take over this rank's experts from checkpoint tensors (``weights.ExpertWeights``), on any device.

        Calling it again writes to the same memory, in the order of the current stream.

        Raises:
            InputError: names the tensor that does not fit.
        """
        weights = ExpertWeights(w13, w13_scale, w2, w2_scale)
        check_experts(weights, self.weight_layout)
        if self._weights is None:
            self._weights = empty_kernel_weights(self.weight_layout, self.buffer.gpu.device)
        to_kernel_layout(weights, self.weight_layout, self._weights)
        self._connect()

    def use_weights(self, weights: KernelWeights) -> None:
        """Take over this rank's experts in the kernel's layout, without a copy: layers may share them.

        Args:
            weights: as ``weights.to_kernel_layout`` makes them, on the layer's GPU.

        Raises:
            InputError: names the tensor that does not fit.
        """
        for tensor, region in zip(weights, self.weight_layout.regions.regions, strict=True):
            if tensor.shape != region.shape or tensor.device != self.buffer.gpu.device:
                raise InputError(
                    f"{region.name} has shape {list(tensor.shape)} on {tensor.device}; the layout "
                    f"{self.weight_layout.name} needs {list(region.shape)} on {self.buffer.gpu.device}"
                )
            if not tensor.is_contiguous() or tensor.element_size() != DTYPE_BYTES[region.dtype]:
                raise InputError(f"{region.name} must be contiguous and hold {region.dtype}")
        self._weights = weights
        self._connect()

    def prepare(self) -> None:
        """Compile (or read) and load the kernels of all token buckets. Collective; the first call does it.

        All ranks have finished before any of them returns, so that none waits in a kernel for a compiler.

        Raises:
            ContractMismatch: ranks have different options.
            CompileError, CacheError, DeviceError, PlanError: there is no kernel to run.
            PeerAborted: another rank has no kernel.
        """
        if self._launchers:
            return
        peers = self.buffer.peers
        agree_on(self.contract, peers)
        try:
            together(peers, "preparing its kernels", self._load_kernels)
        except Exception:
            self._launchers, self._quantize = [], None
            raise
        self._connect()

    def _load_kernels(self) -> None:
        gpu = self.buffer.gpu
        bundle = bundle_kernels(self.contract, gpu.arch, sms=self.num_sms, **self._source)
        self._launchers = [
            MoELauncher(plan, kernel, self.buffer, sms=self.num_sms, timeout_s=self.timeout)
            for plan, kernel in zip(bundle.plans.plans, bundle.kernels, strict=True)
        ]
        self._limits = bundle.plans.limits
        self._quantize = QuantizeLauncher(bundle.quantize, self.buffer)

    def _connect(self) -> None:
        """Tell the loaded kernels where the weights are, as soon as both are there."""
        if self._weights is None or not self._launchers:
            return
        addresses = {name: tensor.data_ptr() for name, tensor in self._weights._asdict().items()}
        for launcher in self._launchers:
            launcher.set_weights(addresses)
        self._ready = True

    # -- calls

    def __call__(
        self,
        x: Tokens,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
        num_tokens: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Queue the layer on the current stream. Every rank of the group calls, also one without tokens.

        Args:
            x: bfloat16 [T, H], or (E4M3 [T, H], scale factors [T, H/128]) as ``formats.quantize_activation``
                makes them; 0 <= T <= max_tokens.
            topk_ids: int32 or int64 [T, K], -1 for none.
            topk_weights: float32 or bfloat16 [T, K].
            out: bfloat16 [T, H] for the result.
            num_tokens: use the first so many rows only. A device int32 is read when the kernel runs, so that
                a captured graph replays with other counts.

        Returns:
            bfloat16 [T, H]; rows from ``num_tokens`` on are not written.

        Raises:
            InputError: an argument that does not fit, or ids that an earlier call dropped.
            MegaMoETimeout, PeerAborted: an earlier call failed; nothing is launched until ``reset``.
        """
        if is_compiling():
            return ops.forward(self.handle, x, topk_ids, topk_weights, out, num_tokens)
        output, launchers = self.check_call(x, topk_ids, topk_weights, out, num_tokens)
        self.queue(launchers, current_stream(self._gpu_index))
        if self.debug and not torch.cuda.is_current_stream_capturing():
            self.check()
        return output

    def check_call(
        self,
        x: Tokens,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
        num_tokens: int | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[Launcher, ...]]:
        """The first half of a call: everything that can go wrong or wait, without a launch.

        Returns:
            The result's tensor, and what to launch: its parameters point to the arguments.
        """
        if not self._ready:
            self._make_ready()
        status = self.buffer.status
        if status.words.tobytes() != status.quiet:
            self._raise_pending()
        x_sf = None
        if isinstance(x, tuple):
            if len(x) != 2:
                raise InputError(f"x is a tuple of {len(x)}; give a tensor or (values, scale factors)")
            x, x_sf = x
        tokens, inputs = self._arguments.inputs(x, x_sf, topk_ids, topk_weights)
        count_pointer = 0
        if out is None:
            out = self._new_output(tokens)
        else:
            self._arguments.output(out, tokens)
        if num_tokens is not None:
            tokens, count_pointer = self._arguments.count(num_tokens, tokens)
        launcher = self._launchers[bisect_left(self._limits, tokens)]
        launcher.set_call(out, tokens, count_pointer)
        if not tokens or (x_sf is not None and inputs[:4] == self.buffer.input_addresses):  # no copy
            return out, (launcher,)
        quantize = self._quantize
        assert quantize is not None
        quantize.set_call(inputs, tokens, count_pointer)
        return out, (quantize, launcher)

    def queue(self, launchers: tuple[Launcher, ...], stream: int) -> None:
        """The second half: launches only, on a stream given by the driver's handle."""
        for launcher in launchers:
            launcher.launch(stream)
        self.buffer.last_stream = stream

    def inputs(self, tokens: int) -> Inputs:
        """Views of the call's inputs in the symmetric buffer, to fill in place: no copy is made of them then.

        Fill them on the stream of the calls; they stay valid as long as the buffer.
        """
        return self.buffer.inputs(tokens)

    def check(self) -> None:
        """Wait for the calls so far, and raise what went wrong in them; never blocks for ever.

        Raises:
            MegaMoETimeout: a wait took too long (says who waited for whom), or a kernel could not start.
            PeerAborted: another rank stopped.
            InputError: ids that name no expert were dropped, or a device ``num_tokens`` was too large.
            DeviceError: a kernel faulted.
        """
        self.buffer.check(self.timeout, self.num_sms)

    def reset(self) -> None:
        """Make the layer usable again after an error. Collective; see ``SymmBuffer.reset``."""
        self.buffer.reset(host_limit(self.timeout))

    def memory_bytes(self) -> dict[str, int]:
        """Device memory in bytes: the buffer's (shared with other layers), the weights', and in all."""
        sizes = self.buffer.memory_bytes()
        sizes["weights"] = sum(tensor.nbytes for tensor in self._weights or ())
        return {**sizes, "total": sum(sizes.values())}

    def launcher_for(self, tokens: int) -> MoELauncher:
        """What a call with ``tokens`` tokens launches (its ``plan``, its ``trace``); prepares the layer."""
        self.prepare()
        return self._launchers[bisect_left(self._limits, tokens)]

    def _make_ready(self) -> None:
        if self._weights is None:
            raise InputError("the layer has no weights; call load_weights first")
        self.prepare()

    def _raise_pending(self) -> None:
        error = self.buffer.pending_error(self.timeout)
        if error is not None:
            raise error


def output_allocator(device: torch.device, hidden: int) -> Callable[[int], torch.Tensor]:
    """Makes uninitialized bfloat16 [T, H] tensors; a large part of a call's host time goes into that."""
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    index = device.index

    def on_any_device(tokens: int) -> torch.Tensor:
        return like.new_empty(tokens, hidden)  # takes less time than torch.empty

    if device.type != "cuda" or fast_empty is None:
        return on_any_device

    def on_current_device(tokens: int) -> torch.Tensor:
        if torch.cuda.current_device() != index:
            return on_any_device(tokens)
        return fast_empty((tokens, hidden), (hidden, 1), torch.bfloat16)

    return on_current_device


def check_num_sms(num_sms: int | None, available: int) -> int:
    """``num_sms``, by default all of the GPU's.

    Raises:
        InputError: not within 1 and ``available``.
    """
    if num_sms is None:
        return available
    if not 1 <= num_sms <= available:
        raise InputError(f"num_sms={num_sms} is not within 1 and the {available} SMs of the GPU")
    return num_sms


def check_buffer(
    buffer: SymmBuffer, shape: MoEShape, group: dist.ProcessGroup | None, max_tokens: int | None
) -> None:
    """InputError unless the buffer was made for these arguments."""
    if buffer.contract.shape != shape:
        raise InputError(
            f"shape={shape}, but the buffer is for {buffer.contract.shape}; layers share a buffer if they "
            "have one shape"
        )
    if max_tokens is not None and max_tokens != buffer.contract.max_tokens:
        raise InputError(
            f"max_tokens={max_tokens}, but the buffer holds {buffer.contract.max_tokens}; leave it out"
        )
    if group is not None and dist.get_world_size(group) != buffer.contract.ranks:
        raise InputError(
            f"group has {dist.get_world_size(group)} ranks, but the buffer is for {buffer.contract.ranks}; "
            "leave it out"
        )
