"""A whole layer on the emulator: the ranks' buffers, weights and kernels, and calls of the layer.

The counterpart of ``runtime.layer`` for a machine without a GPU. What a kernel is given is as undefined as on
a real machine: only what the runtime zeroes or fills is defined, the rest is poisoned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from megagen import companion
from megagen.arch import Arch
from megagen.cache import default_cache
from megagen.contract import Contract, Layout, WeightLayout
from megagen.emulator.explain import Words, explain
from megagen.emulator.machine import Buffer, Machine, Module, Report
from megagen.errors import EmulatorError, InputError
from megagen.formats import quantize_activation
from megagen.planning import KernelPlan
from megagen.planning.plan import ZEROED_LOCAL, ZEROED_SYMMETRIC
from megagen.protocol import STATUS_FIELDS, TRACE_CAPACITY
from megagen.render import render, render_quantize
from megagen.runtime.params import ParamStruct
from megagen.tensor_map import TensorMap, encode_for_emulator
from megagen.weights import ExpertWeights, to_kernel_layout

ZEROED = {"symmetric": ZEROED_SYMMETRIC, "local": ZEROED_LOCAL}
"""Regions that the runtime zeroes before the first launch; all but the launch words are zero after each."""

_DROPPED_WORD = 2  # of the launch region: expert ids out of range so far
_POISON = 0xFF  # NaN in E4M3, bfloat16 and float32
_TIMEOUT_NS = 1_000_000_000


class Inputs(NamedTuple):
    """One rank's arguments of a call: bfloat16 [T, H], int32 [T, K], float32 [T, K]."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Kernel:
    """A plan's source and the PTX of it; a test may put another text there."""

    plan: KernelPlan
    source: str
    ptx: str
    entry: str

    @classmethod
    def of(cls, plan: KernelPlan) -> Kernel:
        """Rendered and compiled; from the cache of compiled kernels if it is there."""
        source = render(plan)
        target = Arch.get(plan.arch).compile_target
        compiled = default_cache().load_or_compile(source, target, name=f"{plan.name}.cu")
        return cls(plan, source, compiled.ptx, compiled.entry)


@dataclass(frozen=True)
class CallResult:
    """What a call left behind.

    Attributes:
        outputs: bfloat16 [T, H] of each rank.
        status: each rank's status block, by field.
        leftovers: regions that should be zero between launches and are not, in words; empty if all is well.
        report: counts of the machine since it was made.
    """

    outputs: list[torch.Tensor]
    status: list[dict[str, int]]
    leftovers: list[str]
    report: Report


class EmulatedLayer:
    """The ranks of one layer on one machine; calls follow each other on the same buffers.

    Attributes:
        symm, status: each rank's symmetric buffer and status block.

    Args:
        contract: of all ranks.
        kernels: each rank's; plans may differ.
        sms: each rank's SMs; its kernel takes as many of them as its clusters fill.
        weights: all experts, in checkpoint layout.
        bystanders: ranks that the machine has beside the layer's, for other kernels.
        machine: options of ``Machine``, such as ``seed`` and ``max_steps``.

    Raises:
        InputError: not one kernel or SM count for each rank, or a kernel of another contract.
    """

    def __init__(
        self,
        contract: Contract,
        kernels: Sequence[Kernel],
        sms: Sequence[int],
        weights: ExpertWeights,
        *,
        bystanders: int = 0,
        **machine: Any,
    ) -> None:
        for name, given in (("kernels", kernels), ("sms", sms)):
            if len(given) != contract.ranks:
                raise InputError(
                    f"{name} has {len(given)} entries, ranks={contract.ranks}; give one for each"
                )
        for kernel, count in zip(kernels, sms):
            if count < kernel.plan.cluster:
                raise InputError(
                    f"sms={list(sms)}: a tile takes {kernel.plan.cluster} SMs; give each rank as many or more"
                )
            if kernel.plan.contract != contract:
                raise InputError(f"kernel {kernel.plan.name} is for another contract than the layer's")
        for kernel, count in zip(kernels, sms, strict=True):
            kernel.plan.require_ring_for(count)
        self.contract, self.kernels = contract, tuple(kernels)
        self.sms = tuple(kernel.plan.grid(count) for kernel, count in zip(kernels, sms))
        ranks = contract.ranks + bystanders
        self.machine = Machine(kernels[0].plan.arch, ranks=ranks, sms=max(sms), **machine)
        self._modules: dict[str, Module] = {}
        self._traces: dict[int, Buffer] = {}
        self._launches = 0
        self._quantize: Kernel | None = None
        self.symm = [self._memory(rank, contract.symm, ZEROED["symmetric"]) for rank in self._ranks]
        self._local = [self._memory(r, k.plan.local, ZEROED["local"]) for r, k in enumerate(kernels)]
        self.status = [self._upload(r, np.zeros(len(STATUS_FIELDS), np.uint32)) for r in self._ranks]
        self._params = [self._rank_params(rank, weights) for rank in self._ranks]

    @property
    def _ranks(self) -> range:
        return range(self.contract.ranks)

    def call(
        self,
        inputs: Sequence[Inputs | None],
        *,
        device_counts: Mapping[int, int] | None = None,
        may_fail: bool = False,
    ) -> CallResult:
        """One launch, its inputs filled in by the host.

        Args:
            inputs: each rank's; T may differ, and be 0. A rank with None does not call.
            device_counts: ranks that read their token count from device memory, and what it says.
            may_fail: outputs may be left undefined.

        Raises:
            EmulatorError: what the machine found; it can't be used any more.
        """
        outputs = []
        for rank, own in enumerate(inputs):
            if own is None:
                outputs.append(self._output(rank, 0))
                continue
            self._fill(rank, own)
            count = (device_counts or {}).get(rank)
            pointer = 0 if count is None else self._upload(rank, np.array([count], np.uint32)).ptr
            output = self._output(rank, len(own.x))
            outputs.append(output if may_fail else output.expect_defined())
            self._queue(rank, len(own.x), output, pointer)
        return self._finish([outputs])[0]

    def call_in_a_row(self, calls: Sequence[Sequence[Inputs]]) -> list[CallResult]:
        """Several launches that no host waits between, each after the companion kernel that fills its inputs.

        A rank may be a launch ahead of its peers. Status and leftovers are those after the last.
        """
        queued = []
        for inputs in calls:
            outputs = [self._output(rank, len(own.x)).expect_defined() for rank, own in enumerate(inputs)]
            for rank, own in enumerate(inputs):
                self._queue_companion(rank, own)
                self._queue(rank, len(own.x), outputs[rank])
            queued.append(outputs)
        return self._finish(queued)

    def trace(self, rank: int) -> np.ndarray:
        """uint32 [SMs, warps, TRACE_CAPACITY, 4]: a traced rank's records; zero where there is none."""
        return self._traces[rank].view.copy()

    # -- memory

    def _upload(self, rank: int, values: np.ndarray) -> Buffer:
        buffer = self.machine.alloc(rank, values.shape, values.dtype)
        buffer.array[:] = values
        return buffer

    def _memory(self, rank: int, layout: Layout, zeroed: Sequence[str]) -> Buffer:
        """Poisoned and undefined, but for the zeroed regions."""
        buffer = self.machine.alloc(rank, layout.size)
        buffer.array[:] = _POISON
        undefined = buffer.undefined_bits
        undefined[:] = 0xFF
        for name in zeroed:
            region = layout[name]
            buffer.view[region.offset : region.end] = 0
            undefined[region.offset : region.end] = 0
        return buffer

    def _rank_params(self, rank: int, weights: ExpertWeights) -> ParamStruct:
        contract, plan = self.contract, self.kernels[rank].plan
        layout: WeightLayout = plan.weight_layout
        first = rank * contract.local_experts
        own = ExpertWeights(*(tensor[first : first + contract.local_experts] for tensor in weights))
        params = ParamStruct(plan.params)
        tensors = to_kernel_layout(own, layout)._asdict()
        addresses = {name: self._upload(rank, tensor.numpy()).ptr for name, tensor in tensors.items()}
        for name, value in plan.weight_params(addresses).items():
            params.set(name, encode_for_emulator(value) if isinstance(value, TensorMap) else value)
        bases = [buffer.ptr for buffer in self.symm]
        params.set("symm", bases[rank])
        params.set("local", self._local[rank].ptr)
        params.set("status", self.status[rank].ptr)
        params.set("timeout_ns", _TIMEOUT_NS)
        params.set("rank", rank)
        params.set("offsets", [base - bases[rank] for base in bases])
        if plan.trace:
            shape = (self.sms[rank], plan.threads // 32, TRACE_CAPACITY, 4)
            self._traces[rank] = self._upload(rank, np.zeros(shape, np.uint32))
            params.set("trace", self._traces[rank].ptr)
        return params

    def _fill(self, rank: int, inputs: Inputs) -> None:
        """Put a rank's inputs into its symmetric buffer; rows beyond them are undefined again."""
        values, scale = quantize_activation(inputs.x, self.contract.format)  # type: ignore[arg-type]
        regions = {
            "x": values.view(torch.uint8).numpy(),
            "x_sf": scale.numpy(),
            "topk_ids": inputs.topk_ids.to(torch.int32).numpy(),
            "topk_weights": inputs.topk_weights.float().numpy(),
        }
        buffer = self.symm[rank]
        for name, array in regions.items():
            region = self.contract.symm[name]
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            buffer.view[region.offset : region.end] = _POISON
            buffer.undefined_bits[region.offset : region.end] = 0xFF
            buffer.view[region.offset : region.offset + data.size] = data
            buffer.undefined_bits[region.offset : region.offset + data.size] = 0

    # -- launches

    def _load(self, kernel: Kernel) -> Module:
        if kernel.ptx not in self._modules:
            self._modules[kernel.ptx] = self.machine.load(kernel.ptx, kernel.source)
        return self._modules[kernel.ptx]

    def _output(self, rank: int, tokens: int) -> Buffer:
        return self.machine.alloc(rank, (tokens, self.contract.shape.hidden), np.uint16)

    def _queue(self, rank: int, tokens: int, output: Buffer, count_pointer: int = 0) -> None:
        kernel = self.kernels[rank]
        params = self._params[rank]
        params.set("output", output.ptr)
        params.set("num_tokens", tokens)
        params.set("num_tokens_ptr", count_pointer)
        plan = kernel.plan
        self.machine.launch(
            self._load(kernel),
            kernel.entry,
            self.sms[rank],
            plan.threads,
            plan.cluster,
            plan.smem.size,
            [[params.to_bytes()]],
            ranks=[rank],
        )

    def _queue_companion(self, rank: int, inputs: Inputs) -> None:
        kernel = self._companion()
        tokens, hidden = len(inputs.x), self.contract.shape.hidden
        params = ParamStruct(companion.QUANTIZE_FIELDS)
        sources = {
            "x": inputs.x.bfloat16().contiguous().view(torch.int16),
            "topk_ids": inputs.topk_ids.to(torch.int32),
            "topk_weights": inputs.topk_weights.float(),
        }
        for name, tensor in sources.items():
            if tokens:
                params.set(name, self._upload(rank, tensor.numpy()).ptr)
        params.set("row_bytes", hidden * 2)
        params.set("symm", self.symm[rank].ptr)
        params.set("num_tokens", tokens)
        ctas = companion.quantize_ctas(hidden, tokens, self.sms[rank])
        arguments = [[params.to_bytes()]]
        self.machine.launch(
            self._load(kernel), kernel.entry, ctas, companion.THREADS, args=arguments, ranks=[rank]
        )

    def _companion(self) -> Kernel:
        if self._quantize is None:
            plan = self.kernels[0].plan
            source = render_quantize(self.contract, plan.arch)
            name = f"{companion.quantize_name(self.contract, plan.arch)}.cu"
            target = Arch.get(plan.arch).compile_target
            compiled = default_cache().load_or_compile(source, target, name=name)
            self._quantize = Kernel(plan, source, compiled.ptx, compiled.entry)
        return self._quantize

    def _finish(self, queued: Sequence[Sequence[Buffer]]) -> list[CallResult]:
        try:
            report = self.machine.run()
        except EmulatorError as error:
            raise type(error)(explain(str(error), self._words())) from None
        self._launches += len(queued)
        status, leftovers = [self._status_of(rank) for rank in self._ranks], self._leftovers()
        return [
            CallResult([_bfloat16(buffer) for buffer in outputs], status, leftovers, report)
            for outputs in queued
        ]

    def _words(self) -> Words:
        buffers: dict[str, tuple[str, Layout]] = {}
        for rank, kernel in enumerate(self.kernels):  # the machine numbers buffers as they are made
            buffers[f"buffer {rank} of rank {rank}"] = (f"rank {rank}'s symmetric buffer", self.contract.symm)
            number = len(self.kernels) + rank
            buffers[f"buffer {number} of rank {rank}"] = (f"rank {rank}'s local workspace", kernel.plan.local)
        return Words(tuple((kernel.plan, kernel.source, kernel.ptx) for kernel in self.kernels), buffers)

    def _status_of(self, rank: int) -> dict[str, int]:
        words = self.status[rank].view
        return {field.name: int(word) for field, word in zip(STATUS_FIELDS, words)}

    def _leftovers(self) -> list[str]:
        found = []
        for rank in self._ranks:
            for kind, buffer, layout in (
                ("symmetric", self.symm[rank], self.contract.symm),
                ("local", self._local[rank], self.kernels[rank].plan.local),
            ):
                for name in ZEROED[kind]:
                    found += self._leftovers_of(rank, name, layout, buffer)
        return found

    def _leftovers_of(self, rank: int, name: str, layout: Layout, buffer: Buffer) -> list[str]:
        region = layout[name]
        words = buffer.view[region.offset : region.end].view(np.uint32)
        expected = np.zeros_like(words)
        if name == "launch":
            expected[0], expected[_DROPPED_WORD] = self._launches, words[_DROPPED_WORD]
        if name == "flags":
            expected[:] = self._launches
        wrong = np.flatnonzero(words != expected)
        if not len(wrong):
            return []
        at = int(wrong[0])
        after = f"after {self._launches} launches"
        return [f"rank {rank}: {name}[{at}] is {words[at]} {after}, not {expected[at]}"]


def _bfloat16(buffer: Buffer) -> torch.Tensor:
    return torch.from_numpy(buffer.view.view(np.int16).copy()).view(torch.bfloat16)
