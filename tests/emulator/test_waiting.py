"""Polling, virtual time, deadlocks, watchdogs, step limits and determinism."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import ptx_kernel, to_ptx

from megagen.emulator import Machine
from megagen.errors import Deadlock, EmulatorError, StepLimit, Trap

FLAGS = r"""
__device__ u32 acquire(const u32* p) { u32 v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ void release(u32* p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
__device__ u64 now() { u64 v; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)); return v; }
extern "C" __global__ void ring(u32** flags, u32* out, u32 rank, u32 ranks, u32 rounds) {
    for (u32 round = 1; round <= rounds; round++) {
        if (rank != 0 || round > 1)
            while (acquire(flags[rank]) < round - (rank == 0)) {}
        *out += 1;
        release(flags[(rank + 1) % ranks], round);
    }
}
extern "C" __global__ void watchdog(u32* flag, u32* out, u64 limit) {
    const u64 start = now();
    while (acquire(flag) == 0) {
        if (now() - start > limit) { out[0] = 77; return; }
    }
    out[0] = 1;
}
extern "C" __global__ void backoff(u32* flag, u32* out) {
    u32 pause = 16;
    while (acquire(flag) == 0) { asm volatile("nanosleep.u32 %0;" :: "r"(pause)); pause = pause < 1000 ? pause * 2 : pause; }
    out[0] = 1;
}
extern "C" __global__ void delay(u32* out, u32 ns) {
    const u64 start = now();
    while (now() - start < ns) {}
    out[0] = 5;
}
"""


def test_a_ring_of_ranks_hands_a_token_on() -> None:
    ranks, rounds = 5, 20
    machine = Machine("sm90", ranks=ranks, seed=3)
    module = machine.load(to_ptx(FLAGS))
    flags = [machine.alloc(rank, 1, np.uint32) for rank in range(ranks)]
    outs = [machine.alloc(rank, 1, np.uint32) for rank in range(ranks)]
    for buffer in flags + outs:
        buffer.array[:] = 0
    tables = []
    for rank in range(ranks):
        table = machine.alloc(rank, ranks, np.uint64)
        table.array[:] = [flag.ptr for flag in flags]
        tables.append(table)
    machine.launch(module, "ring", 1, 1, args=[[tables[r], outs[r], r, ranks, rounds] for r in range(ranks)])
    report = machine.run()
    assert [int(out.view[0]) for out in outs] == [rounds] * ranks
    assert report.polls > 0
    assert report.instructions < 40 * ranks * rounds * 4  # waiting costs next to nothing


def _single(entry: str, *arguments: int, **options: object):
    machine = Machine("sm90", **options)
    flag, out = machine.alloc(0, 1, np.uint32), machine.alloc(0, 1, np.uint32)
    flag.array[:] = out.array[:] = 0
    first = [out] if entry == "delay" else [flag, out]
    machine.launch(machine.load(to_ptx(FLAGS), FLAGS), entry, 1, 1, args=[[*first, *arguments]])
    return machine.run(), int(out.view[0])


def test_a_deadlock_comes_before_the_kernels_own_watchdog() -> None:
    with pytest.raises(
        Deadlock, match=r"polls unchanged memory: buffer 0 of rank 0 \(uint32\[1\]\) \+ 0 = 0"
    ):
        _single("watchdog", 10**9)
    with pytest.raises(Deadlock, match=r"polls unchanged memory"):
        _single("backoff")


def test_a_deadlock_names_the_source_line() -> None:
    with pytest.raises(Deadlock, match=r"test\.cu:\d+: .*ld\.acquire\.sys"):
        _single("watchdog", 10**9)


def test_the_watchdog_may_run_on_request() -> None:
    report, value = _single("watchdog", 10**9, watchdog=True)
    assert value == 77
    assert report.virtual_ns > 10**9
    assert report.instructions < 100_000


def test_waiting_for_time_alone_ends() -> None:
    report, value = _single("delay", 10**6)
    assert value == 5
    assert report.virtual_ns >= 2 * 10**6


def test_a_step_limit() -> None:
    with pytest.raises(StepLimit, match=r"max_steps=1000"):
        machine = Machine("sm90", max_steps=1000)
        out = machine.alloc(0, 1, np.uint32)
        out.array[:] = 0
        body = "mov.u32 %r0, 0; L: add.u32 %r0, %r0, 1; st.global.u32 [%a0], %r0; setp.lt.u32 %p0, %r0, 100000; @%p0 bra L;"
        machine.launch(machine.load(ptx_kernel(body)), "k", 1, 1, args=[[out]])
        machine.run()


def test_a_loop_that_repeats_strong_reads_for_long_still_ends() -> None:
    body = "mov.u32 %r0, 0; L: ld.volatile.global.u32 %r1, [%a0]; add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 200; @%p0 bra L; st.global.u32 [%a0], %r0;"
    machine = Machine("sm90")
    out = machine.alloc(0, 1, np.uint32)
    out.array[:] = 0
    machine.launch(machine.load(ptx_kernel(body)), "k", 1, 1, args=[[out]])
    machine.run()
    assert out.view[0] == 200


def test_grids_of_a_rank_run_in_order_and_see_each_other() -> None:
    body = "ld.global.u32 %r0, [%a0]; mad.lo.u32 %r0, %r0, 3, 1; st.global.u32 [%a0], %r0;"
    machine = Machine("sm90")
    out = machine.alloc(0, 1, np.uint32)
    out.array[:] = 1
    module = machine.load(ptx_kernel(body))
    for _ in range(3):
        machine.launch(module, "k", 1, 1, args=[[out]])
    machine.run()
    machine.launch(module, "k", 1, 1, args=[[out]])
    machine.run()
    assert out.view[0] == ((1 * 3 + 1) * 3 + 1) * 9 + 4


def test_programmatic_dependent_launch() -> None:
    first = "griddepcontrol.launch_dependents; nanosleep.u32 1000; st.global.u32 [%a0], 7;"
    second = "{} ld.global.u32 %r0, [%a0]; st.global.u32 [%a0+4], %r0;"
    from megagen.errors import DataRace

    def run(wait: str) -> int:
        machine = Machine("sm90", sms=2)
        out = machine.alloc(0, 2, np.uint32)
        out.array[:] = 0
        machine.launch(machine.load(ptx_kernel(first)), "k", 1, 1, args=[[out]])
        machine.launch(
            machine.load(ptx_kernel(second.format(wait))), "k", 1, 1, args=[[out]], programmatic=True
        )
        machine.run()
        return int(out.view[1])

    assert run("griddepcontrol.wait;") == 7
    with pytest.raises(DataRace):
        run("")


def test_a_run_is_a_function_of_its_seed() -> None:
    # Order of arrival at a counter: the same for a seed, different among seeds.
    body = "mov.u32 %r0, %ctaid.x; mov.u32 %r1, %tid.x; and.b32 %r1, %r1, 31; setp.ne.u32 %p0, %r1, 0; @%p0 bra E; atom.global.add.u32 %r2, [%a0], 1; mul.wide.u32 %rd0, %r0, 4; add.u64 %rd0, %rd0, %a0; st.global.u32 [%rd0+4], %r2; E: ret;"

    def order(seed: int) -> list[int]:
        machine = Machine("sm90", sms=8, seed=seed)
        out = machine.alloc(0, 9, np.uint32)
        out.array[:] = 0
        machine.launch(machine.load(ptx_kernel(body)), "k", 8, 32, args=[[out]])
        machine.run()
        return list(out.view[1:])

    orders = [order(seed) for seed in range(6)]
    assert orders == [order(seed) for seed in range(6)]
    assert len({tuple(o) for o in orders}) > 3


def test_a_timeline_has_every_wait_that_ended() -> None:
    body = """
    mov.u32 %r9, %tid.x; setp.lt.u32 %p0, %r9, 32; @%p0 bra C; nanosleep.u32 500; bar.sync 1, 64; bra E;
    C: bar.sync 1, 64; E: ret; """
    machine = Machine("sm90", timeline=True)
    module = machine.load(ptx_kernel(body))
    machine.launch(module, "k", 1, 64, args=[[0]])
    machine.run()
    waits = machine.timeline()
    assert {(w.warp, w.kind) for w in waits} >= {(0, "barrier"), (1, "time")}
    assert all(0 < w.begin <= w.end <= machine.ticks for w in waits)
    barrier = next(w for w in waits if w.kind == "barrier" and w.warp == 0)
    assert module.describe(barrier.line)[1].startswith("bar.sync 1, 64")


def test_a_machine_that_failed_cannot_go_on() -> None:
    machine = Machine("sm90")
    machine.launch(machine.load(ptx_kernel("trap;")), "k", 1, 1, args=[[0]])
    with pytest.raises(Trap):
        machine.run()
    with pytest.raises(EmulatorError, match=r"has failed in an earlier run"):
        machine.run()


def test_views_outlive_their_machine() -> None:
    view = Machine("sm90").alloc(0, 8, np.uint32).array
    view[:] = 3
    assert view.sum() == 24


TABLE = ".const .align 4 .b32 table[1024];"
POLL = "mov.u32 %r0, 0; L: ld.relaxed.gpu.global.u32 %r1, [%a0]; {} add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, {}; @%p0 bra L;"


def loop(read: str, rounds: int) -> int:
    """Reads one flag, and something else, round after round; how many there were."""
    machine = Machine("sm90", max_steps=100_000)
    data = machine.alloc(0, 1024, np.uint32)
    data.array[:] = 0
    body = (
        POLL.format(read, rounds)
        + "mov.u32 %r9, %tid.x; setp.eq.u32 %p1, %r9, 0; @%p1 st.global.u32 [%a0+4092], %r0;"
    )
    machine.launch(machine.load(ptx_kernel(body, module=TABLE)), "k", 1, 32, args=[[data]])
    machine.run()
    return int(data.view[-1])


def test_polling_may_read_constants_and_local_memory() -> None:
    local = ".local .align 4 .b32 own; st.local.u32 [own], %r0; ld.local.u32 %r2, [own];"
    for read in ("ld.const.u32 %r2, [table];", "ld.param.u64 %rd0, [p0];", "{" + local + "}"):
        with pytest.raises(Deadlock):
            loop(read, 1_000_000)


def test_going_through_memory_is_not_polling() -> None:
    offset = "mul.wide.u32 %rd1, %r0, 4;"
    assert (
        loop(offset + "mov.u64 %rd0, table; add.u64 %rd0, %rd0, %rd1; ld.const.u32 %r2, [%rd0];", 600) == 600
    )
    assert loop(offset + "add.u64 %rd0, %a0, %rd1; ld.global.u32 %r2, [%rd0+4];", 600) == 600
