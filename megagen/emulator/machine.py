"""The emulator's Python interface: a machine of ranks and SMs, modules, buffers, launches and runs.

machine = Machine("sm90", ranks=2, sms=4)
module = machine.load(ptx)
buffer = machine.alloc(0, (128,), np.float32)
machine.launch(module, "kernel", grid=4, block=128, args=[[buffer, 128], [buffer, 128]])
report = machine.run()
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megagen.arch import ARCHS, Arch
from megagen.emulator import native
from megagen.errors import (
    DataRace,
    Deadlock,
    EmulatorError,
    InputError,
    MemoryFault,
    ProxyViolation,
    StepLimit,
    Trap,
    UninitializedUse,
    UnsupportedInstruction,
)
from megagen.tensor_map import TensorMap, encode_for_emulator

_ERRORS: tuple[type[EmulatorError], ...] = (
    EmulatorError,
    Deadlock,
    DataRace,
    MemoryFault,
    ProxyViolation,
    UninitializedUse,
    Trap,
    UnsupportedInstruction,
    StepLimit,
)
_WAITS = (
    "ready", "exited", "converge", "warp", "barrier", "cluster", "mbarrier", "async", "registers", "time",
    "poll", "grid", "tensor",
)  # fmt: skip
_PROXY = {"off": 0, "report": 1, "error": 2}

_STEPS_PER_CALL = 4000

Dimensions = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run did.

    Attributes:
        instructions: warp instructions executed.
        async_operations: copies, asynchronous stores and reductions.
        matrix_operations: warpgroup and tcgen05 matrix operations.
        events: steps of asynchronous operations.
        polls: times that a polling loop was put to sleep.
        virtual_ns: virtual time that has passed since the machine was made.
        output: what the kernels printed.
        violations: proxy violations, if ``proxy="report"``.
    """

    instructions: int
    async_operations: int
    matrix_operations: int
    events: int
    polls: int
    virtual_ns: int
    output: str
    violations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of some lanes of a warp.

    Attributes:
        rank, sm, slot, warp: who; ``slot`` numbers the places for CTAs of the whole machine.
        lanes: mask of the lanes that waited.
        kind: what for: "converge", "warp", "barrier", "cluster", "mbarrier", "async", "registers", "time",
            "poll", "grid" or "tensor".
        line: PTX line of the waiting instruction; ``Module.describe`` gives its source line.
        begin, end: scheduler steps.
    """

    rank: int
    sm: int
    slot: int
    warp: int
    lanes: int
    kind: str
    line: int
    begin: int
    end: int


class _Native:
    """The C++ machine with all its memory. Host views refer to it too, so that none outlives its memory."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self) -> None:
        native.library().emulator_destroy(self.handle)


class _Life:
    """What a machine shares with its buffers and modules: the C++ machine, until it is closed."""

    def __init__(self, handle: int) -> None:
        self._native: _Native | None = _Native(handle)

    @property
    def native(self) -> _Native:
        if self._native is None:
            raise EmulatorError("this machine has been closed; make a new one")
        return self._native

    @property
    def handle(self) -> int:
        return self.native.handle

    def end(self) -> None:
        self._native = None


class Buffer:
    """Global memory of one rank, guarded on both sides.

    Its contents count as undefined until a kernel writes them or the host takes ``array``.
    """

    def __init__(
        self, life: _Life, handle: int, rank: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._life, self._handle = life, handle
        self.rank, self.shape, self.dtype = rank, shape, dtype
        self.ptr: int = native.library().emulator_address(self._region)
        """Address, valid on every rank."""
        self.nbytes = math.prod(shape) * dtype.itemsize
        self._must_be_defined = False

    @property
    def _region(self) -> int:
        assert self._life.native  # raises if the machine is closed
        return self._handle

    def _bytes(self, address: int) -> NDArray[np.uint8]:
        memory = (ctypes.c_uint8 * self.nbytes).from_address(address)
        setattr(memory, "native", self._life.native)  # noqa: B010 (a view keeps its memory alive)
        return np.ctypeslib.as_array(memory)

    @property
    def array(self) -> NDArray[Any]:
        """The contents as a writable numpy view. Taking it declares all of the buffer defined from now on."""
        self.undefined_bits[:] = 0
        return self.view

    @property
    def view(self) -> NDArray[Any]:
        """The contents, for reading: what is undefined stays undefined."""
        return self._bytes(native.library().emulator_data(self._region)).view(self.dtype).reshape(self.shape)

    @property
    def undefined_bits(self) -> NDArray[np.uint8]:
        """Per byte of the buffer, a mask of its undefined bits."""
        return self._bytes(native.library().emulator_undefined(self._region))

    def expect_defined(self) -> Buffer:
        """Declare this an output: after every run, an undefined byte in it is an UninitializedUse."""
        self._must_be_defined = True
        return self

    def free(self) -> None:
        """Later accesses by kernels are faults; the host's views stay valid."""
        native.library().emulator_free(self._region)

    def _check_defined(self) -> None:
        undefined = np.flatnonzero(self.undefined_bits)
        if not len(undefined):
            return
        first = int(undefined[0])
        index = np.unravel_index(first // self.dtype.itemsize, self.shape)
        writer = native.library().emulator_last_writer(self._life.handle, self._handle, first).decode()
        raise UninitializedUse(
            f"the output buffer of rank {self.rank}, shape {self.shape}: {len(undefined)} bytes are "
            f"undefined after the run, the first in element {tuple(int(i) for i in index)}, "
            f"last written by {writer}"
        )


@dataclass(frozen=True, slots=True)
class _Parameter:
    offset: int
    nbytes: int
    type: str


class Module:
    """A loaded PTX module. Every rank has its own copy of the module's variables."""

    def __init__(self, life: _Life, handle: int) -> None:
        self._life, self._module = life, handle

    @property
    def _handle(self) -> int:
        assert self._life.native  # raises if the machine is closed
        return self._module

    def _parameters(self, entry: str) -> list[_Parameter]:
        lib = native.library()
        text = lib.emulator_parameters(self._handle, entry.encode())
        if text is None:
            raise InputError(lib.emulator_error().decode())
        rows = (line.split() for line in text.decode().splitlines())
        return [_Parameter(int(offset), int(nbytes), type_) for offset, nbytes, type_ in rows]

    def describe(self, line: int) -> tuple[str, str]:
        """Source place ("kernel.cu:123") and text of what is at a PTX line, empty if nothing is."""
        text = native.library().emulator_describe(self._handle, line).decode(errors="replace")
        place, _, instruction = text.partition("\t")
        return place, instruction

    def forms(self) -> list[str]:
        """The decoder's rows that this module's instructions use, as their patterns."""
        return native.library().emulator_module_forms(self._handle).decode().splitlines()


class Machine:
    """R ranks x n SMs in one address space.

    Args:
        arch: name or ``Arch`` of the SMs.
        ranks, sms: how many ranks, and SMs of each.
        seed: of the interleaving; a run is a function of it.
        max_steps: limit of warp instructions (0: none); StepLimit beyond it.
        races: check that conflicting accesses are ordered.
        proxy: what an async-proxy access that lacks a proxy fence is: "error", "report" or "off".
        collectives_order: take shfl, vote, elect and the other warp-synchronous instructions for memory
            barriers among their lanes. The ISA gives that to bar.warp.sync alone; hardware and many public
            kernels don't mind.
        pipelined_copies: execute a ``tcgen05.cp`` after the ``tcgen05.mma`` that its thread has issued
            before. The ISA doesn't list this pair as pipelined, so that a copy over scale factors that an
            uncompleted multiplication reads is a race; public kernels rely on it.
        watchdog: let virtual time pass in waits that look at a clock, so that a kernel's own watchdog fires,
            instead of reporting a Deadlock at once.
        timeline: record every wait, for ``timeline()``.
        step_clock: ``%clock``, ``%clock_hi`` and ``%clock64`` count the machine's warp instructions, so that
            what a kernel measures with them is work; otherwise they are virtual nanoseconds, which pass
            only while everybody waits. ``%globaltimer`` is the latter always.

    A machine is also a context manager that closes it.
    """

    def __init__(
        self,
        arch: str | Arch = "sm90",
        *,
        ranks: int = 1,
        sms: int = 1,
        seed: int = 0,
        max_steps: int = 0,
        races: bool = True,
        proxy: Literal["error", "report", "off"] = "error",
        collectives_order: bool = False,
        pipelined_copies: bool = False,
        watchdog: bool = False,
        timeline: bool = False,
        step_clock: bool = False,
    ) -> None:
        self.arch = ARCHS[arch] if isinstance(arch, str) else arch
        self.ranks, self.sms = ranks, sms
        if proxy not in _PROXY:
            raise InputError(f"proxy={proxy!r} must be one of {', '.join(_PROXY)}")
        self._lib = native.library()
        self._buffers: list[Buffer] = []
        self._failed = False
        options = native.Options(
            ranks=ranks,
            sms=sms,
            seed=seed,
            max_steps=max_steps,
            races=races,
            collectives_order=collectives_order,
            pipelined_copies=pipelined_copies,
            watchdog=watchdog,
            timeline=timeline,
            step_clock=step_clock,
            proxy=_PROXY[proxy],
            compute_capability=10 * self.arch.compute_capability[0] + self.arch.compute_capability[1],
            shared_per_sm=233472,
            shared_per_cta=self.arch.max_shared_bytes_per_block,
            registers=self.arch.registers,
            threads_per_sm=2048,
        )
        self._life = _Life(self._checked(self._lib.emulator_create(ctypes.byref(options))))

    @property
    def _handle(self) -> int:
        return self._life.handle

    def close(self) -> None:
        """Free the machine's memory now, but for what host views of its buffers still show.

        Its buffers and modules can't be used any more.
        """
        self._life.end()
        self._buffers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise(self) -> None:
        raise _ERRORS[max(0, self._lib.emulator_error_kind())](
            self._lib.emulator_error().decode(errors="replace")
        )

    def _checked(self, handle: int | None) -> int:
        if not handle:
            self._raise()
            raise AssertionError
        return handle

    def load(self, ptx: str, source: str | None = None) -> Module:
        """Parse and decode a PTX module; ``source`` is what its .loc lines mean, quoted in errors.

        Raises:
            UnsupportedInstruction: a form that isn't implemented, with its line and PTX ISA section.
            EmulatorError: text that can't be parsed.
        """
        handle = self._lib.emulator_load(self._handle, ptx.encode(), (source or "").encode())
        return Module(self._life, self._checked(handle))

    def alloc(self, rank: int, shape: Dimensions, dtype: DTypeLike = np.uint8, align: int = 256) -> Buffer:
        """Global memory on a rank; undefined until written.

        Raises:
            InputError: a rank that the machine doesn't have, or no power of two up to 65,536 as ``align``.
        """
        if not 0 <= rank < self.ranks:
            raise InputError(f"rank={rank}: the machine has ranks 0 to {self.ranks - 1}")
        if align <= 0 or align & (align - 1) or align > 65536:
            raise InputError(f"align={align} must be a power of two up to 65536")
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        kind = np.dtype(dtype)
        name = f"buffer {len(self._buffers)} of rank {rank} ({kind}{list(dims)})"
        nbytes = math.prod(dims) * kind.itemsize
        handle = self._checked(
            self._lib.emulator_allocate(self._handle, rank, nbytes, align, name.encode(), 0)
        )
        buffer = Buffer(self._life, handle, rank, dims, kind)
        self._buffers.append(buffer)
        return buffer

    def launch(
        self,
        module: Module,
        entry: str,
        grid: Dimensions,
        block: Dimensions,
        cluster: Dimensions = 1,
        smem: int = 0,
        args: Sequence[Sequence[Any]] = (),
        *,
        ranks: Sequence[int] | None = None,
        programmatic: bool = False,
    ) -> None:
        """Queue a grid on ranks; grids of one rank run in order, those of different ranks together.

        Args:
            grid, block, cluster: up to three dimensions each; grid counts CTAs.
            smem: bytes of dynamic shared memory.
            args: per rank, the kernel's arguments: int, float, bytes, Buffer (its address) or TensorMap.
            ranks: which ranks; all by default. ``args`` has one entry for each.
            programmatic: may start when the previous grid of its rank has launched its dependents.

        Raises:
            InputError: arguments that don't fit the kernel's parameters.
            EmulatorError: dimensions or shared memory that no launch may have.
        """
        where = range(self.ranks) if ranks is None else ranks
        if len(args) != len(where):
            raise InputError(f"args has {len(args)} entries, one for each of {len(where)} ranks is needed")
        parameters = module._parameters(entry)
        for rank, values in zip(where, args):
            block_of_bytes = _pack(entry, parameters, values)
            status = self._lib.emulator_launch(
                self._handle, module._handle, entry.encode(), rank, _triple(grid), _triple(block),
                _triple(cluster), smem, block_of_bytes, len(block_of_bytes), programmatic,
            )  # fmt: skip
            if status >= 0:
                self._raise()

    def run(self, progress: Callable[[Report], None] | None = None) -> Report:
        """Run everything that was launched to its end.

        Args:
            progress: called now and then with the counts so far.

        Raises:
            EmulatorError: one of its subclasses says what went wrong; the machine can't be used any more.
        """
        if self._failed:
            raise EmulatorError("this machine has failed in an earlier run; make a new one")
        self._failed = True  # until it has succeeded: an interrupted run can't go on either
        finished = ctypes.c_int32(0)
        while not finished.value:  # in pieces, so that Ctrl-C gets through
            if self._lib.emulator_run(self._handle, _STEPS_PER_CALL, ctypes.byref(finished)) >= 0:
                self._raise()
            if progress:
                progress(self.report())
        self._failed = False
        for buffer in self._buffers:
            if buffer._must_be_defined:
                buffer._check_defined()
        return self.report()

    def timeline(self) -> list[Wait]:
        """Every wait that has ended, if the machine was made with ``timeline=True``."""
        records = ctypes.POINTER(native.TimelineRecord)()
        count = self._lib.emulator_timeline(self._handle, ctypes.byref(records))
        return [
            Wait(r.rank, r.sm, r.slot, r.warp, r.lanes, _WAITS[r.wait], r.line, r.begin, r.end)
            for r in records[:count]
        ]

    @property
    def ticks(self) -> int:
        """Scheduler steps so far: the time base of ``timeline``."""
        return self._lib.emulator_ticks(self._handle)

    def report(self) -> Report:
        """Counts so far, also after an error."""
        counters = (ctypes.c_uint64 * 6)()
        self._lib.emulator_counters(self._handle, counters)
        instructions, async_operations, events, matrix, polls, time_ns = counters
        return Report(
            instructions=instructions,
            async_operations=async_operations,
            matrix_operations=matrix,
            events=events,
            polls=polls,
            virtual_ns=time_ns,
            output=self._lib.emulator_output(self._handle).decode(errors="replace"),
            violations=tuple(self._lib.emulator_reports(self._handle).decode().splitlines()),
        )


def supported_forms() -> list[tuple[str, str]]:
    """The decoder's table: (pattern in the ISA's syntax, section of the PTX ISA).

    In a pattern, ``(.a|.b)`` stands for one of its modifiers, ``{.a|.b}`` for one or none.
    """
    rows = native.library().emulator_forms().decode().splitlines()
    return [(pattern, section) for pattern, section in (row.split("\t") for row in rows)]


def _triple(dims: Dimensions) -> Any:
    values = (dims,) if isinstance(dims, int) else tuple(dims)
    if not 1 <= len(values) <= 3:
        raise InputError(f"{dims!r}: one to three dimensions")
    return (ctypes.c_uint32 * 3)(*values, *(1,) * (3 - len(values)))


def _pack(entry: str, parameters: Sequence[_Parameter], values: Sequence[Any]) -> bytes:
    if len(values) != len(parameters):
        raise InputError(f"{entry} takes {len(parameters)} parameters, {len(values)} were given")
    total = max((p.offset + p.nbytes for p in parameters), default=0)
    block = bytearray(total)
    for index, (parameter, value) in enumerate(zip(parameters, values)):
        data = _encode(value, parameter)
        if len(data) != parameter.nbytes:
            raise InputError(
                f"{entry}: argument {index} has {len(data)} bytes, its parameter {parameter.nbytes}"
            )
        block[parameter.offset : parameter.offset + parameter.nbytes] = data
    return bytes(block)


def _encode(value: Any, parameter: _Parameter) -> bytes:
    if isinstance(value, Buffer):
        value = value.ptr
    if isinstance(value, TensorMap):
        return encode_for_emulator(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tobytes()
    if isinstance(value, float) or parameter.type in ("f32", "f64"):
        return struct.pack("<d" if parameter.nbytes == 8 else "<f", value)
    if isinstance(value, int):
        return (value % (1 << (8 * parameter.nbytes))).to_bytes(parameter.nbytes, "little")
    raise InputError(
        f"an argument of type {type(value).__name__}: pass int, float, bytes, Buffer or TensorMap"
    )
