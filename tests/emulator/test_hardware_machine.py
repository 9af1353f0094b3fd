"""The hardware cases as whole kernels on the emulator, against the outputs recorded on a real GPU.

test_hardware.py checks the libraries; here the kernels go through parser, decoder, memory and asynchrony.
"""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from cuda_source import ptx_kernel, to_ptx
from hw import corpus, records, replay
from hw.cases import APPROXIMATE, STATUS, Case, Output, TensorMapSpec

from megagen.emulator import Machine
from megagen.errors import EmulatorError, MemoryFault

SMS = 8  # the largest grid with clusters has 8 CTAs
BATCH = 16
"""Kernels in one module: compiling many at once is quick, but a warp has the registers of all of them."""

SAMPLE = {"wgmma_fp8": 12, "wgmma_other": 4, "wgmma_layout": 3}
"""Of these groups every n-th case runs: test_hardware.py runs all of them through the same arithmetic."""


def sampled() -> Iterator[Case]:
    for group, build in corpus.recorded_groups().items():
        yield from build()[:: SAMPLE.get(group, 1)]


CASES = {case.name: case for case in sampled()}
GROUP_OF = {case.name: group for group, build in corpus.recorded_groups().items() for case in build()}
BATCH_OF = {source: i // BATCH for i, source in enumerate(dict.fromkeys(c.source for c in CASES.values()))}
recorded = cache(records.load)


@cache
def batch_ptx(batch: int) -> str:
    """PTX of a batch's kernels; a namespace each keeps their helper functions apart."""
    sources = [source for source, number in BATCH_OF.items() if number == batch]
    joined = "\n".join(f"namespace case_{i} {{\n{source}\n}}" for i, source in enumerate(sources))
    return to_ptx(joined, "sm_90a", "--fmad=false")


class Session:
    """A machine that runs case after case of one batch, until an error ends its life."""

    def __init__(self, batch: int) -> None:
        self.machine = Machine("sm90", sms=SMS)
        self.module = self.machine.load(batch_ptx(batch))

    def run(self, case: Case) -> list[np.ndarray]:
        """Launches a case; its outputs in order."""
        arguments = case.arguments()
        buffers = {i: self.buffer(a) for i, a in enumerate(arguments) if isinstance(a, np.ndarray | Output)}
        values = []
        for position, argument in enumerate(arguments):
            if isinstance(argument, TensorMapSpec):
                values.append(replay.encoded_map(argument, buffers[argument.argument].ptr))
            else:
                values.append(buffers.get(position, argument))
        self.machine.launch(
            self.module, case.entry, case.grid, case.block, smem=case.shared_bytes, args=[values]
        )
        self.machine.run()
        outputs = [buffers[i].view.copy() for i, a in enumerate(arguments) if isinstance(a, Output)]
        for buffer in buffers.values():
            buffer.free()
        return outputs

    def buffer(self, argument: np.ndarray | Output):
        data = argument
        if isinstance(argument, Output):
            zeros = np.zeros(argument.shape, argument.dtype)
            data = zeros if argument.initial is None else argument.initial
        buffer = self.machine.alloc(0, data.shape, data.dtype)
        buffer.array[:] = data
        return buffer


@pytest.fixture(scope="module")
def emulate():
    """Runs a case on its batch's machine, and a new one after an error."""
    sessions: dict[int, Session] = {}

    def run(case: Case) -> list[np.ndarray]:
        batch = BATCH_OF[case.source]
        if batch not in sessions:
            sessions.clear()
            sessions[batch] = Session(batch)
        try:
            return sessions[batch].run(case)
        except EmulatorError:
            sessions.clear()
            raise

    return run


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Bitwise equality, except that any NaN equals any other."""
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    bits = f"u{ours.itemsize}"
    equal = ours.view(bits) == theirs.view(bits)
    return bool(np.all(equal | (np.isnan(ours) & np.isnan(theirs)) if ours.dtype.kind == "f" else equal))


def names(*, faults: bool = False, approximate: bool = False) -> list[str]:
    return [
        name
        for name, case in CASES.items()
        if (case.keep == STATUS) == faults and (case.agreement == APPROXIMATE) == approximate
    ]


@pytest.mark.parametrize("name", names())
def test_kernel_gives_the_bits_of_the_gpu(name, emulate):
    case = CASES[name]
    theirs = recorded(GROUP_OF[name])[0][name]
    ours = [records.condense(case, output) for output in emulate(case)]
    for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        different = np.argwhere(one != other)[:5].tolist()
        assert same(one, other), f"output {position} of {name}, at {different}"


@pytest.mark.parametrize("name", names(approximate=True))
def test_approximate_instruction_is_the_one_that_was_bounded(name, emulate):
    """test_hardware.py holds the library's results within the ISA's bound of the GPU's; these must be its."""
    case = CASES[name]
    (ours,) = emulate(case)
    assert same(ours, replay.replay(case))


@pytest.mark.parametrize("name", names(faults=True))
def test_copy_faults_where_the_gpu_does(name, emulate):
    case = CASES[name]
    if recorded(GROUP_OF[name])[0][name][0]:
        with pytest.raises(MemoryFault):
            emulate(case)
    else:
        emulate(case)


@pytest.mark.parametrize("kind", ["u16", "b32", "u32", "s32", "b64", "v2.u32"])
def test_misaligned_access_faults(kind):
    """An H200 ends such a kernel with "misaligned address"."""
    registers = {"u16": "%h1", "b64": "%rd1", "v2.u32": "{%r1, %r2}"}.get(kind, "%r1")
    source = f"ld.global.{kind} {registers}, [%a0+1];"
    machine = Machine("sm90")
    module = machine.load(ptx_kernel(source))
    buffer = machine.alloc(0, 64, np.uint32)
    buffer.array[:] = 0
    machine.launch(module, "k", 1, 1, args=[[buffer]])
    with pytest.raises(MemoryFault):
        machine.run()
