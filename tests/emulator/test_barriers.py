"""Named barriers, cluster barriers, mbarriers and the register pool."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import ptx_kernel, to_ptx

from megagen.emulator import Machine
from megagen.errors import DataRace, Deadlock, EmulatorError, MemoryFault

OUT = "mul.wide.u32 %rd9, %r9, 4; add.u64 %rd9, %rd9, %a0; st.global.u32 [%rd9], %r0;"
BARRIER = ".shared .align 8 .b8 b[64];"
INIT = "mov.u32 %r9, %tid.x; mov.u32 %r1, b; setp.ne.u32 %p0, %r9, 0; @%p0 bra I; mbarrier.init.shared::cta.b64 [%r1], {}; I: bar.sync 0;"


def threads(
    body: str,
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    module: str = "",
    sms: int = 1,
    **options: object,
) -> list[int]:
    machine = Machine("sm90", sms=sms, **options)
    out = machine.alloc(0, block * grid, np.uint32)
    machine.launch(machine.load(ptx_kernel(body, module=module)), "k", grid, block, cluster, args=[[out]])
    machine.run()
    return [int(v) for v in out.view]


def test_barriers_reduce() -> None:
    start = "mov.u32 %r9, %tid.x; setp.lt.u32 %p0, %r9, 40; "
    assert threads(start + "barrier.red.popc.aligned.u32 %r0, 1, %p0;" + OUT, 64) == [40] * 64
    assert threads(start + "bar.red.or.pred %p1, 2, !%p0; selp.u32 %r0, 1, 0, %p1;" + OUT, 64) == [1] * 64
    assert threads(start + "bar.red.and.pred %p1, 2, 64, %p0; selp.u32 %r0, 1, 0, %p1;" + OUT, 64) == [0] * 64


def test_barriers_without_aligned_count_threads_one_by_one() -> None:
    # The two halves of the warp come to the barrier by different ways.
    body = """
    mov.u32 %r9, %tid.x; setp.lt.u32 %p0, %r9, 16; @%p0 bra L;
    barrier.sync 4; mov.u32 %r0, 2; bra E;
    L: barrier.sync 4; mov.u32 %r0, 1;
    E: barrier.cta.red.or.pred %p1, 5, %p0; @!%p1 mov.u32 %r0, 9; bar.red.popc.u32 %r1, 6, %p0; add.u32 %r0, %r0, %r1;
    fence.proxy.tensormap::generic.release.gpu; """
    assert threads(body + OUT) == [17] * 16 + [18] * 16


def test_arrive_and_sync_order_memory() -> None:
    # Warp 1 produces and arrives, warp 0 consumes.
    body = """
    mov.u32 %r9, %tid.x; setp.lt.u32 %p0, %r9, 32; mov.u32 %r0, 0; mov.u32 %r2, s; @%p0 bra C;
    shl.b32 %r3, %r9, 2; add.u32 %r3, %r3, %r2; st.shared.u32 [%r3], %r9; {} bra E;
    C: bar.sync 3, 64; shl.b32 %r3, %r9, 2; add.u32 %r3, %r3, %r2; ld.shared.u32 %r0, [%r3+128];
    E: """
    module = ".shared .align 4 .b8 s[256];"
    assert threads(body.format("bar.arrive 3, 64;") + OUT, 64, module=module)[:32] == list(range(32, 64))
    with pytest.raises(Deadlock, match=r"waits at named barrier 3: 32 of 64 threads have arrived"):
        threads(body.format("") + OUT, 64, module=module)


def test_barrier_counts_must_agree() -> None:
    body = (
        "mov.u32 %r9, %tid.x; shr.u32 %r1, %r9, 5; add.u32 %r1, %r1, 2; shl.b32 %r1, %r1, 5; bar.sync 1, %r1;"
    )
    with pytest.raises(EmulatorError, match=r"expects .* threads, earlier ones"):
        threads(body, 128)
    with pytest.raises(EmulatorError, match=r"isn't a positive multiple of 32"):
        threads("bar.sync 1, 48;", 64)
    with pytest.raises(EmulatorError, match=r"barrier 16: there are 16"):
        threads("bar.sync 16;", 64)


def test_an_aligned_barrier_waits_for_the_whole_warp() -> None:
    body = "mov.u32 %r9, %tid.x; setp.eq.u32 %p0, %r9, 0; @%p0 bra L; bar.sync 0; bra E; L: bar.sync 0; E: mov.u32 %r0, 0;"
    with pytest.raises(Deadlock, match=r"at an .aligned instruction"):
        threads(body + OUT)


def test_cluster_barrier_and_distributed_shared_memory() -> None:
    source = r"""
    extern "C" __global__ void __cluster_dims__(4) k(u32* out) {
        __shared__ u32 value[32];
        u32 rank, t = threadIdx.x, remote, got;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        value[t] = 100 * rank + t;
        asm volatile("barrier.cluster.arrive.ARRIVE;\n barrier.cluster.wait.aligned;" ::: "memory");
        u32 own = (u32)__cvta_generic_to_shared(&value[t]);
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"((rank + 1) % 4));
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(got) : "r"(remote) : "memory");
        out[blockIdx.x * 32 + t] = got;
        asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
    }
    """

    def run(arrive: str) -> list[int]:
        machine = Machine("sm90", sms=4)
        out = machine.alloc(0, 256, np.uint32)
        machine.launch(machine.load(to_ptx(source.replace("ARRIVE", arrive))), "k", 8, 32, args=[[out]])
        machine.run()
        return list(out.view)

    assert run("release.aligned") == [100 * ((cta + 1) % 4) + t for cta in range(8) for t in range(32)]
    with pytest.raises(DataRace):
        run("relaxed.aligned")


def test_shared_memory_of_a_cta_that_has_exited() -> None:
    source = r"""
    extern "C" __global__ void __cluster_dims__(2) k(u32* out) {
        __shared__ u32 value;
        u32 rank, remote, got;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        value = rank;
        asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
        if (rank == 1) return;
        asm volatile("nanosleep.u32 1000;");
        asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(remote) : "r"((u32)__cvta_generic_to_shared(&value)));
        asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(got) : "r"(remote) : "memory");
        out[0] = got;
    }
    """
    machine = Machine("sm90", sms=2)
    out = machine.alloc(0, 1, np.uint32)
    machine.launch(machine.load(to_ptx(source)), "k", 2, 1, args=[[out]])
    with pytest.raises(MemoryFault, match=r"that CTA has exited"):
        machine.run()


# --- mbarrier ---------------------------------------------------------------------------------------------------------


def test_phases_alternate_and_wrap() -> None:
    # 64 arrivals end each of five phases; the parity waited for is that of the phase's number.
    body = (
        INIT.format(64)
        + """
    mov.u32 %r4, 0;
    L: mbarrier.arrive.shared::cta.b64 %rd1, [%r1];
    and.b32 %r5, %r4, 1;
    W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r5; @!%p1 bra W;
    add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 5; @%p2 bra L;
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r1], 0; selp.u32 %r0, 1, 0, %p3; """
    )
    for seed in range(4):
        assert threads(body + OUT, 64, module=BARRIER, seed=seed) == [1] * 64


def test_states_counts_and_drops() -> None:
    body = (
        INIT.format(4)
        + """
    @%p0 bra E;
    mbarrier.arrive.shared::cta.b64 %rd1, [%r1];
    mbarrier.pending_count.b64 %r4, %rd1;
    mbarrier.arrive.noComplete.shared::cta.b64 %rd2, [%r1], 2; mbarrier.pending_count.b64 %r5, %rd2;
    mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %rd1; selp.u32 %r6, 1, 0, %p1;
    mbarrier.arrive_drop.shared::cta.b64 %rd3, [%r1];
    mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %rd1; selp.u32 %r7, 1, 0, %p1;
    mbarrier.arrive.shared::cta.b64 %rd4, [%r1], 3;
    mbarrier.test_wait.shared::cta.b64 %p1, [%r1], %rd4; selp.u32 %r8, 1, 0, %p1;
    st.global.v4.u32 [%a0], {%r4, %r5, %r6, %r7}; st.global.u32 [%a0+16], %r8;
    mbarrier.inval.shared::cta.b64 [%r1];
    E: ret; """
    )
    # Pending before: 4, then 3; the fourth arrival ends the phase and lowers the expected count to 3.
    assert threads(body, 32, module=BARRIER)[:5] == [4, 3, 0, 1, 1]


def test_transactions_hold_a_phase_open() -> None:
    body = (
        INIT.format(1)
        + """
    @%p0 bra E;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 48;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 16;
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 0; selp.u32 %r4, 1, 0, %p1;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 60;
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 0; selp.u32 %r5, 1, 0, %p1;
    mbarrier.complete_tx.shared::cta.b64 [%r1], 4;
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], 0; selp.u32 %r6, 1, 0, %p1;
    st.global.v2.u32 [%a0], {%r4, %r5}; st.global.u32 [%a0+8], %r6;
    E: ret; """
    )
    assert threads(body, 32, module=BARRIER)[:3] == [0, 0, 1]


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("mbarrier.arrive.shared::cta.b64 _, [%r1], 3;", MemoryFault, "3 arrivals on .* more than are pending"),
        ("mbarrier.arrive.noComplete.shared::cta.b64 %rd0, [%r1], 2;", EmulatorError, "noComplete completes the phase"),
        ("mbarrier.expect_tx.shared::cta.b64 [%r1], 1048576;", MemoryFault, "transaction count overflows its 20 bits"),
        ("mbarrier.arrive.shared::cta.b64 _, [%r1+8];", MemoryFault, "no initialized mbarrier"),
        ("mbarrier.inval.shared::cta.b64 [%r1]; mbarrier.arrive.shared::cta.b64 _, [%r1];", MemoryFault, "no initialized mbarrier"),
        ("st.shared.u32 [%r1+4], 1;", MemoryFault, "a write over the mbarrier"),
        ("mbarrier.init.shared::cta.b64 [%r1+8], 0;", EmulatorError, "count 0: must be 1 to 1048575"),
        ("mbarrier.init.shared::cta.b64 [%r1+4], 1;", MemoryFault, "not aligned to 8 bytes"),
    ],
)  # fmt: skip
def test_misuse_of_mbarriers(body: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        threads(INIT.format(2) + "@%p0 bra E; " + body + " E: ret;", module=BARRIER)


def test_an_mbarrier_must_be_initialized_before_others_use_it() -> None:
    body = (
        INIT.replace("I: bar.sync 0;", "I: nanosleep.u32 100;").format(64)
        + "mbarrier.arrive.shared::cta.b64 _, [%r1];"
    )
    with pytest.raises(DataRace, match=r"isn't ordered after its initialization"):
        threads(body, 64, module=BARRIER)


def test_a_phase_that_never_ends_is_a_deadlock_with_its_counts() -> None:
    body = (
        INIT.format(33)
        + "mbarrier.arrive.shared::cta.b64 _, [%r1]; W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0; @!%p1 bra W;"
    )
    with pytest.raises(
        Deadlock,
        match=r"waits for phase parity 0 of mbarrier at shared address 0x400 \(phase 0, pending 1 of 33 arrivals, 0 bytes",
    ):
        threads(body, module=BARRIER)


def test_remote_arrivals() -> None:
    source = r"""
    extern "C" __global__ void __cluster_dims__(2) k(u32* out) {
        __shared__ u64 barrier; __shared__ u32 value;
        u32 rank, b = (u32)__cvta_generic_to_shared(&barrier), v = (u32)__cvta_generic_to_shared(&value), rb, rv;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" :: "r"(b));
        asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(rb) : "r"(b), "r"(rank ^ 1));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(rv) : "r"(v), "r"(rank ^ 1));
        asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(rv), "r"(rank + 7) : "memory");
        asm volatile("mbarrier.arrive.SEM.shared::cluster.b64 _, [%0];" :: "r"(rb) : "memory");
        asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; @!p bra W;}" :: "r"(b) : "memory");
        out[rank] = value;
        asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory");
    }
    """

    def run(sem: str) -> list[int]:
        machine = Machine("sm90", sms=2)
        out = machine.alloc(0, 2, np.uint32)
        machine.launch(machine.load(to_ptx(source.replace("SEM", sem))), "k", 2, 1, args=[[out]])
        machine.run()
        return list(out.view)

    assert run("release.cluster") == [8, 7]
    with pytest.raises(DataRace):
        run("relaxed.cluster")


# --- setmaxnreg ---------------------------------------------------------------------------------------------------------


def test_registers_come_from_a_pool() -> None:
    # 512 threads start with 128 registers each: 384 x 32 given back feed 128 x 96 more.
    body = """
    mov.u32 %r9, %tid.x; setp.ge.u32 %p0, %r9, 128; @%p0 bra D;
    setmaxnreg.inc.sync.aligned.u32 {}; bra E;
    D: setmaxnreg.dec.sync.aligned.u32 96;
    E: mov.u32 %r0, 1; """
    assert threads(body.format(224) + OUT, 512) == [1] * 512
    with pytest.raises(Deadlock, match=r"setmaxnreg waits for registers: has 128, wants 232"):
        threads(body.format(232) + OUT, 512)
    with pytest.raises(EmulatorError, match=r"setmaxnreg.inc to 96, but the warp has 128"):
        threads(body.format(96) + OUT, 512)
