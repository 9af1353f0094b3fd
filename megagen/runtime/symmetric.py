"""SymmBuffer: the memory of a layer's launches, shared by all layers of a model."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megagen.contract import Contract, Region
from megagen.errors import DeviceError, InputError, MegaMoETimeout
from megagen.planning.plan import ZEROED_LOCAL, ZEROED_SYMMETRIC, KernelPlan
from megagen.planning.planner import default_format, largest_local_layout
from megagen.runtime.driver import Gpu, private_stream, require_gpu
from megagen.runtime.patience import Progress, wait_for_streams
from megagen.runtime.peers import OneProcess, Peers, agree_on, peers_of, together
from megagen.runtime.status import StatusBlock, peer_aborted
from megagen.runtime.topology import check_one_domain, place_of
from megagen.shape import MoEShape

START_MARGIN_S = 5.0
PROBE_STREAM = 0  # number of the private stream that reads progress; rank r of a local group has 1 + r

_TORCH_DTYPES = {
    "u8": torch.uint8,
    "e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "u32": torch.int32,
    "f32": torch.float32,
    "u64": torch.int64,
}


def host_limit(timeout_s: float) -> float:
    """How long the host waits for progress: clearly longer than the kernel's own waits, ``timeout_s`` each,
    so that a kernel that has reported nothing by then never started."""
    return 2 * timeout_s + START_MARGIN_S


class Inputs(NamedTuple):
    """Views of a call's inputs in the symmetric buffer: filled in place, they need no copy."""

    x: torch.Tensor
    x_sf: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


class SymmBuffer:
    """A rank's symmetric buffer, mapped into all ranks of its group, and its local workspace.

    Calls of layers that share a buffer must follow each other: on one stream, or ordered by the caller.

    Args:
        shape: of every layer that uses the buffer.
        group: the expert-parallel ranks; None is one rank alone, in plain memory. Collective otherwise.
        max_tokens: most tokens that a rank has in one call.
        format: "fp8_block" or "mxfp8_mxfp4"; default: what the GPU's architecture has kernels for.
        device: GPU of this rank; default: the current one.

    Raises:
        ShapeError: no kernel exists for the shape, or the experts can't be dealt out.
        DeviceError: no usable GPU or driver.
        NVLinkDomainError: the group's GPUs can't map each other's memory.
        ContractMismatch: ranks gave different arguments.
        PeerAborted: another rank met one of these.
    """

    def __init__(
        self,
        shape: MoEShape,
        group: dist.ProcessGroup | None = None,
        *,
        max_tokens: int,
        format: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        peers = peers_of(group)
        contracts = together(
            peers, "reading its arguments", lambda: _contract(shape, peers.ranks, max_tokens, format, device)
        )
        contract = contracts[peers.rank]
        agree_on(contract, peers)
        gpu = together(peers, "looking for its GPU", lambda: require_gpu(device))[peers.rank]
        if peers.ranks > 1:  # asking NVML takes time
            check_one_domain(together(peers, "looking where its GPU is", lambda: place_of(gpu)))
        if group is not None and peers.ranks > 1:
            memory, self._handle, offsets = _rendezvous(contract, group, peers, gpu)
        else:
            memory, offsets = _zeros(contract.symm.size, gpu), [0]
        together(
            peers, "allocating memory", lambda: self._set_up(contract, peers, gpu, memory, offsets)
        )  # also a barrier: nobody launches before everybody's memory is zero
        self._members = [self]

    @classmethod
    def local_group(
        cls,
        shape: MoEShape,
        *,
        ranks: int,
        max_tokens: int,
        format: str | None = None,
        device: torch.device | str | int | None = None,
    ) -> list[SymmBuffer]:
        """The buffers of ``ranks`` ranks that share one GPU and this process."""
        contract = _contract(shape, ranks, max_tokens, format, device)
        gpu = require_gpu(device)
        memories = [_zeros(contract.symm.size, gpu) for _ in range(ranks)]
        bases = [memory.data_ptr() for memory in memories]
        buffers: list[SymmBuffer] = []
        for rank, memory in enumerate(memories):
            buffer = cls.__new__(cls)
            offsets = [base - bases[rank] for base in bases]
            buffer._set_up(contract, OneProcess(rank, ranks), gpu, memory, offsets)
            buffer._members = buffers
            buffers.append(buffer)
        return buffers

    def _set_up(
        self, contract: Contract, peers: Peers, gpu: Gpu, memory: torch.Tensor, offsets: list[int]
    ) -> None:
        self.contract, self.peers, self.gpu = contract, peers, gpu
        self.offsets = offsets
        self._symm = memory
        self._local_layout = largest_local_layout(contract, gpu.arch.name, gpu.arch.sms)
        self._local = _zeros(self._local_layout.size, gpu)
        self.symm_address, self.local_address = memory.data_ptr(), self._local.data_ptr()
        self.status = StatusBlock()
        self.last_stream = 0  # of the last call, as the driver knows it
        probe = private_stream(gpu, PROBE_STREAM)
        self._progress = Progress(self.local_view("launch")[:1], self.symm_view("control")[:1], probe)
        self._input_views = Inputs(*(self.symm_view(name) for name in Inputs._fields))
        self.input_addresses = tuple(view.data_ptr() for view in self._input_views)
        torch.cuda.current_stream(gpu.device).synchronize()

    # -- views

    def symm_view(self, name: str) -> torch.Tensor:
        """A region of this rank's symmetric buffer (``Contract.symm``)."""
        return _view(self._symm, self.contract.symm[name])

    def local_view(self, name: str, plan: KernelPlan | None = None) -> torch.Tensor:
        """A region of the local workspace; the shapes of the tile regions depend on the plan."""
        return _view(self._local, (plan.local if plan else self._local_layout)[name])

    def inputs(self, tokens: int) -> Inputs:
        """Views for ``tokens`` tokens: E4M3 [T, H], SFs [T, H/128] (float32, or int32 that hold four UE8M0
        each), int32 [T, K], float32 [T, K]."""
        if not 0 <= tokens <= self.contract.max_tokens:
            raise InputError(f"tokens={tokens} is not within 0 to max_tokens={self.contract.max_tokens}")
        return Inputs(*(view[:tokens] for view in self._input_views))

    def memory_bytes(self) -> dict[str, int]:
        """Device memory in bytes."""
        return {"symmetric": self._symm.numel(), "local": self._local.numel()}

    def require_room(self, plan: KernelPlan) -> None:
        """InputError if the plan's kernel needs a larger local workspace than this buffer has."""
        if plan.local.size > self._local.numel():
            raise InputError(
                f"buffer: plan {plan.name} needs a local workspace of {plan.local.size} bytes, the buffer "
                f"has {self._local.numel()}; make a buffer of its own for this layer"
            )

    # -- waiting and errors

    def pending_error(self, timeout_s: float) -> Exception | None:
        """What the status block already tells, without waiting."""
        return self.status.take_error(self.peers.rank, timeout_s)

    def check(self, timeout_s: float, grid: int) -> None:
        """Wait for the streams of the last call and of this one, then raise what the status block holds.

        Args:
            timeout_s: limit of every wait inside the kernel.
            grid: CTAs of the last launch, for the message.

        Raises:
            MegaMoETimeout, PeerAborted, InputError: what the kernel reports; MegaMoETimeout also if no
                launch has made progress for twice the limit, so that it can't have started.
            DeviceError: a kernel faulted.
        """
        try:
            finished = self._wait(host_limit(timeout_s))
        except DeviceError as fault:
            raise self.pending_error(timeout_s) or fault from fault
        error = self.pending_error(timeout_s)
        if error is not None:
            raise error
        if not finished:
            raise MegaMoETimeout(
                f"rank {self.peers.rank}: nothing has finished for {host_limit(timeout_s):g} s, and "
                f"the kernel reports nothing. So launch {self._progress.launches()} has not started: a "
                f"cooperative grid starts only when all of its {grid} CTAs fit on the GPU beside what else "
                "runs there. Stop what holds SMs, or leave it room with num_sms="
            )
        aborted_by = self._progress.aborted_by()
        if aborted_by:
            raise peer_aborted(self.peers.rank, aborted_by - 1)

    def reset(self, limit_s: float = 60.0) -> None:
        """Make the buffer usable again after an error. Collective: every rank calls it.

        In a local group it resets all ranks.

        Raises:
            MegaMoETimeout: a launch is still queued or running after ``limit_s``.
        """
        for member in self._members:
            if not member._wait(limit_s):
                raise MegaMoETimeout(
                    f"rank {member.peers.rank}: a launch has not ended for {limit_s:g} s, and the buffer "
                    "can't be reset before; stop what keeps it from starting"
                )
        self.peers.gather(None)  # nobody's kernel runs any more
        for member in self._members:
            member._clear()
        torch.cuda.current_stream(self.gpu.device).synchronize()
        self.peers.gather(None)

    def _wait(self, limit_s: float) -> bool:
        """Wait for the streams of the last call and of this one; False after ``limit_s`` without progress."""
        device = self.gpu.device
        streams = [torch.cuda.current_stream(device), torch.cuda.default_stream(device)]
        if self.last_stream not in [stream.cuda_stream for stream in streams]:
            streams.append(torch.cuda.ExternalStream(self.last_stream, device=device))
        return wait_for_streams(streams, self._progress.launches, limit_s)

    def _clear(self) -> None:
        for name in ZEROED_SYMMETRIC:
            self.symm_view(name).zero_()
        for name in ZEROED_LOCAL:
            self.local_view(name).zero_()
        self.status.clear()


def _contract(
    shape: MoEShape,
    ranks: int,
    max_tokens: int,
    format: str | None,
    device: torch.device | str | int | None,
) -> Contract:
    """The buffer's contract; without a format, that of the GPU's architecture."""
    if format is None:
        Contract(shape, ranks, max_tokens)  # what is wrong with it does not depend on the GPU
        format = default_format(require_gpu(device).arch.name)
    return Contract(shape, ranks, max_tokens, format)


def _zeros(size: int, gpu: Gpu) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=gpu.device)


def _rendezvous(
    contract: Contract, group: dist.ProcessGroup, peers: Peers, gpu: Gpu
) -> tuple[torch.Tensor, Any, list[int]]:
    """Zeroed memory that all ranks of the group have mapped, what keeps it mapped, and each rank's distance
    from this one's."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # the kernel uses plain pointers only
    import torch.distributed._symmetric_memory as symm_mem

    allocated: list[torch.Tensor] = []

    def allocate() -> None:
        allocated.append(symm_mem.empty(contract.symm.size, dtype=torch.uint8, device=gpu.device))

    together(peers, "allocating symmetric memory", allocate)
    memory = allocated[0].zero_()
    handle = symm_mem.rendezvous(memory, group)
    bases = list(handle.buffer_ptrs)
    return memory, handle, [base - bases[handle.rank] for base in bases]


def _view(memory: torch.Tensor, region: Region) -> torch.Tensor:
    return memory[region.offset : region.end].view(_TORCH_DTYPES[region.dtype]).view(region.shape)
