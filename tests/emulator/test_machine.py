"""The life of a machine: its clock, the memory it holds and gives back, and modules with several kernels."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_source import ptx_kernel

from megagen.emulator import Buffer, Machine, Module
from megagen.errors import EmulatorError

WORK = 100
MEASURE = f"""
    mov.u64 %rd1, %clock64; mov.u32 %r3, %clock_hi; mov.u64 %rd4, %globaltimer;
    mov.u32 %r1, 0; {"add.u32 %r1, %r1, 1;" * WORK}
    mov.u64 %rd2, %clock64; mov.u32 %r2, %clock; mov.u64 %rd5, %globaltimer;
    sub.u64 %rd3, %rd2, %rd1; sub.u64 %rd6, %rd5, %rd4;
    st.global.u64 [%a0], %rd3; st.global.u64 [%a0+8], %rd6;
    cvt.u64.u32 %rd7, %r2; sub.u64 %rd7, %rd7, %rd2; st.global.u64 [%a0+16], %rd7;
    cvt.u64.u32 %rd8, %r3; st.global.u64 [%a0+24], %rd8;
"""


@pytest.mark.parametrize("step_clock", [True, False])
def test_the_step_clock_counts_instructions(step_clock: bool) -> None:
    with Machine("sm90", step_clock=step_clock) as machine:
        module = machine.load(ptx_kernel(MEASURE))
        out = machine.alloc(0, 4, np.uint64)
        machine.launch(module, "k", 1, 1, args=[[out]])
        report = machine.run()
        elapsed, nanoseconds, low, high = (int(v) for v in out.view)
    assert nanoseconds == high == 0
    if step_clock:
        assert WORK < elapsed < report.instructions
        assert 0 < low < 10  # read the next instruction
    else:
        assert elapsed == low == 0


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def machine_with_buffer() -> tuple[Machine, Module, Buffer]:
    machine = Machine("sm90")
    module = machine.load(ptx_kernel("st.global.u32 [%a0], 7;"))
    buffer = machine.alloc(0, 4, np.uint32)
    machine.launch(module, "k", 1, 1, args=[[buffer]])
    machine.run()
    return machine, module, buffer


def test_memory_goes_with_the_last_name(no_collector: None) -> None:
    machine, module, buffer = machine_with_buffer()
    memory = weakref.ref(machine._life.native)
    view = buffer.view
    del machine, module, buffer
    assert view[0] == 7  # a view keeps its memory
    del view
    assert memory() is None


def test_a_closed_machine_frees_its_memory_but_for_views(no_collector: None) -> None:
    machine, module, buffer = machine_with_buffer()
    memory = weakref.ref(machine._life.native)
    view = buffer.view
    machine.close()
    assert view[0] == 7
    del view
    assert memory() is None
    for use in (
        machine.run,
        machine.report,
        buffer.free,
        module.forms,
        lambda: buffer.array,
        lambda: machine.alloc(0, 1),
        lambda: machine.launch(module, "k", 1, 1, args=[[buffer]]),
    ):
        with pytest.raises(EmulatorError, match="closed"):
            use()
    machine.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_ended_warps_give_their_registers_back() -> None:
    """32 warps with 2,000 registers of 32 lanes: 8 MB and as much for undefined bits in each launch."""
    names = [f"%v{n}" for n in range(2000)]
    body = ".reg .b32 %v<2000>;" + "".join(f"mov.u32 {name}, 1;" for name in names)
    machine = Machine("sm90")
    module = machine.load(ptx_kernel(body))
    out = machine.alloc(0, 1, np.uint32)

    def run(launches: int) -> None:
        for _ in range(launches):
            machine.launch(module, "k", 1, (32, 32), args=[[out]])
            machine.run()

    run(2)
    before = resident_bytes()
    run(10)
    assert resident_bytes() - before < 50e6


ENTRIES = """
.version 8.5
.target sm_90a
.address_size 64
.func (.param .b32 out) twice(.param .b32 in);
.visible .entry first(.param .u64 p) {
    .reg .b32 %r<9>; .reg .b64 %a; .reg .pred %p<3>;
    ld.param.u64 %a, [p]; mov.u32 %r1, 5; setp.eq.u32 %p1, %r1, 5;
    { .param .b32 x; .param .b32 y; st.param.b32 [x], %r1; call (y), twice, (x); ld.param.b32 %r2, [y]; }
    add.u32 %r3, %r1, %r2; @%p1 st.global.u32 [%a], %r3; ret;
}
.func (.param .b32 out) twice(.param .b32 in) {
    .reg .b32 %r<4>; .reg .pred %p<3>;
    ld.param.b32 %r1, [in]; setp.ne.u32 %p1, %r1, %r1; add.u32 %r2, %r1, %r1; @%p1 mov.u32 %r2, 0;
    st.param.b32 [out], %r2; ret;
}
.visible .entry second(.param .u64 p) {
    .reg .b32 %r<9>; .reg .b64 %a;
    ld.param.u64 %a, [p]; mov.u32 %r7, 100;
    { .param .b32 x; .param .b32 y; st.param.b32 [x], %r7; call (y), twice, (x); ld.param.b32 %r2, [y]; }
    add.u32 %r3, %r7, %r2; st.global.u32 [%a], %r3; ret;
}
"""


def test_kernels_of_a_module_run_side_by_side() -> None:
    """Kernels share the places of their registers, and have others than the functions that they call."""
    machine = Machine("sm90", ranks=2)
    module = machine.load(ENTRIES)
    outs = [machine.alloc(rank, 1, np.uint32) for rank in range(2)]
    for rank, entry in enumerate(["first", "second"]):
        machine.launch(module, entry, 1, 32, args=[[outs[rank]]], ranks=[rank])
    machine.run()
    assert [int(out.view[0]) for out in outs] == [15, 300]
