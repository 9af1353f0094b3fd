"""What orders tcgen05 operations: pipelined pairs, waits, commits and fences; and what is reported without them."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import to_ptx
from tcgen05_kernel import DEVICE
from tcgen05_operands import idesc

from megagen.emulator import Machine
from megagen.errors import DataRace, Deadlock, MemoryFault, ProxyViolation, UninitializedUse

KERNEL = r"""
__device__ void mma(u32 d, u64 a, u64 b, u32 id, u32 accumulate) {
    ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\ntcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" :: "r"(d), "l"(a), "l"(b), "r"(id), "r"(accumulate));
}
__device__ void mma_a(u32 d, u32 a, u64 b, u32 id) {
    ASM("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\ntcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n}" :: "r"(d), "r"(a), "l"(b), "r"(id));
}
__device__ void cp(u32 to, u64 from) { ASM("tcgen05.cp.cta_group::1.128x256b [%0], %1;" :: "r"(to), "l"(from)); }
__device__ void cp4(u32 to, u64 from) { ASM("tcgen05.cp.cta_group::1.4x256b [%0], %1;" :: "r"(to), "l"(from)); }
__device__ void shift(u32 at) { ASM("tcgen05.shift.cta_group::1.down [%0];" :: "r"(at)); }
extern __shared__ __align__(1024) u32 image[];
extern "C" __global__ void k(u32* out) {
    __shared__ u64 done, ready; __shared__ u32 base;
    const u32 t = threadIdx.x, warp = t / 32;
    for (u32 i = t; i < 2048; i += 64) image[i] = 0;
    if (t == 0) { init(&done, 1); init(&ready, 1); }
    fence_async();
    if (warp == 0) alloc(&base, 128);
    __syncthreads();
    const u32 tm = base, own = tm + (warp * 32 << 16);
    const u64 d = desc(shared(image), 128, 256, 0);
    u32 r[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    BODY
    END
    __syncthreads();
    if (warp == 0) dealloc(tm, 128);
}
"""
SMALL, LARGE = idesc(16, 128, 0, 0), idesc(32, 128, 0, 0)
END = "__syncwarp(); if (t == 0) commit(&done); wait(&done, 0);"
STORE = "for (u32 i = 0; i < 8; ++i) out[t * 8 + i] = r[i];"


def launch(body: str, end: str = END, seed: int = 0, **options: object) -> np.ndarray:
    text = (
        KERNEL.replace("BODY", body)
        .replace("END", end)
        .replace("SMALL", f"{SMALL}u")
        .replace("LARGE", f"{LARGE}u")
    )
    machine = Machine("sm100", seed=seed, **options)
    out = machine.alloc(0, 512, np.uint32).expect_defined()
    out.array[:] = 0
    machine.launch(machine.load(to_ptx(DEVICE + text, "sm_100a")), "k", 1, 64, smem=8192, args=[[out]])
    machine.run()
    return out.view.copy()


ORDERED = {
    "store, load": "st8(own, r); wait_st(); ld8(own, r); wait_ld();" + STORE,
    "load, store": "st8(own, r); wait_st(); ld8(own, r); wait_ld(); st8(own, r); wait_st();" + STORE,
    "multiplication, load": "if (t == 0) { mma(tm, d, d, SMALL, 0); commit(&ready); } __syncwarp(); wait(&ready, 0); after(); ld8(own, r); wait_ld();"
    + STORE,
    "multiplication, load by relaxed synchronization": "if (t == 0) { mma(tm, d, d, SMALL, 0); commit(&ready); } __syncwarp(); wait_relaxed(&ready, 0); after(); ld8(own, r); wait_ld();"
    + STORE,
    "load, multiplication by another thread": "st8(own, r); wait_st(); ld8(own, r); wait_ld(); before(); __syncthreads(); after(); if (t == 0) mma(tm, d, d, SMALL, 0);"
    + STORE,
    "copy, multiplication": "if (t == 0) { cp(tm + 64, d); mma_a(tm, tm + 64, d, SMALL); }",
    "copy, multiplication by another thread": "if (t == 0) { cp(tm + 64, d); commit(&done); before(); arrive(&ready); } if (t == 32) { wait(&ready, 0); after(); mma_a(tm, tm + 64, d, SMALL); } __syncthreads(); after(); if (t == 32) { init(&ready, 1); mma_a(tm, tm + 64, d, SMALL); commit(&ready); wait(&ready, 0); }",
    "multiplications with one accumulator": "if (t == 0) { mma(tm, d, d, SMALL, 0); mma(tm, d, d, SMALL, 1); mma(tm, d, d, SMALL, 1); }",
    "multiplications of two shapes": "if (t == 0) { mma(tm, d, d, SMALL, 0); commit(&ready); wait(&ready, 0); after(); mma(tm, d, d, LARGE, 1); }",
    "shift and multiplication": "if (t == 0) { cp(tm + 64, d); mma_a(tm, tm + 64, d, SMALL); shift(tm + 64); mma_a(tm, tm + 64, d, SMALL); }",
    "shift, copy of 4 rows": "st8(own, r); wait_st(); before(); __syncthreads(); after(); if (t == 0) { shift(tm); cp4(tm, d); }",
    "shared memory after a commit": "if (t == 0) { mma(tm, d, d, SMALL, 0); commit(&ready); } wait(&ready, 0); image[t] = 1;",
}


@pytest.mark.parametrize("name", ORDERED)
def test_ordered(name):
    end = END.replace("wait(&done, 0);", "wait(&done, 0); after(); __syncwarp();")
    if "copy, multiplication by another" in name:
        end = "wait(&done, 0);"
    for seed in range(5):
        launch(ORDERED[name], end, seed)


UNORDERED = [
    ("store, load", "wait_st();", "", r"tcgen05\.(ld|st).* isn't ordered after .*tcgen05\.(ld|st).*: its completion|dealloc.* isn't ordered after .*tcgen05\.st"),
    ("load, store", "wait_ld(); st8", "st8", r"tcgen05\.(ld|st) .* isn't ordered after .* tcgen05\.(ld|st) .*: its completion"),
    ("multiplication, load", "wait(&ready, 0);", "", r"tcgen05\.(ld|mma) .* isn't ordered after .* tcgen05\.(mma|ld) .*: its completion"),
    ("multiplication, load", "after();", "", r"tcgen05\.ld .* isn't ordered after .* tcgen05\.mma .*: .*fence::after_thread_sync is missing"),
    ("load, multiplication by another thread", "wait_ld();", "", r"tcgen05\.(ld|mma) .* isn't ordered after .* tcgen05\.(mma|ld) .*: its completion"),
    ("load, multiplication by another thread", "before();", "", r"tcgen05\.mma .* isn't ordered after .* tcgen05\.(ld|st) .*: .*fence::before_thread_sync is missing"),
    ("load, multiplication by another thread", "after();", "", r"tcgen05\.mma .* isn't ordered after .* tcgen05\.(ld|st) .*: .*fence::after_thread_sync is missing"),
    ("copy, multiplication by another thread", "before();", "", r"tcgen05\.(mma|cp) .* isn't ordered after .* tcgen05\.(cp|mma)"),
    ("copy, multiplication by another thread", "wait(&ready, 0); after();", "wait(&ready, 0);", r"tcgen05\.(mma|cp) .* isn't ordered after .* tcgen05\.(cp|mma)"),
    ("multiplications of two shapes", "commit(&ready); wait(&ready, 0);", "", r"tcgen05\.mma .* isn't ordered after .* tcgen05\.mma .*: its completion"),
    ("shift, copy of 4 rows", "cp4(tm, d);", "cp(tm, d);", r"tcgen05\.(cp|shift) .* isn't ordered after .* tcgen05\.(shift|cp)"),
    ("shared memory after a commit", "wait(&ready, 0);", "", r"(st\.shared|tcgen05\.mma)"),
]  # fmt: skip
"""Name, what is replaced, by what, and the report."""


@pytest.mark.parametrize(("name", "old", "new", "report"), UNORDERED)
def test_a_step_is_missing(name, old, new, report):
    body = ORDERED[name]
    assert old in body
    end = "wait(&done, 0);" if "copy, multiplication by another" in name else END
    for seed in range(5):  # not a matter of luck
        with pytest.raises((DataRace, ProxyViolation), match=report):
            launch(body.replace(old, new), end, seed)


def test_results_of_a_multiplication_as_operand_need_a_commit():
    for seed in range(5):
        with pytest.raises(DataRace, match=r"tcgen05\.mma"):
            launch("if (t == 0) { mma(tm, d, d, SMALL, 0); mma_a(tm + 64, tm, d, SMALL); }", seed=seed)


def test_a_copy_over_what_a_multiplication_reads():
    """No pipelined pair of the ISA; public kernels take it for one."""
    body = "if (t == 0) { cp(tm + 64, d); mma_a(tm, tm + 64, d, SMALL); cp(tm + 64, d); mma_a(tm, tm + 64, d, SMALL); }"
    for seed in range(5):
        with pytest.raises(DataRace, match=r"tcgen05\.cp .* isn't ordered after .* tcgen05\.(mma|cp)"):
            launch(body, seed=seed)
        launch(body, seed=seed, pipelined_copies=True)


def test_registers_before_the_wait_are_undefined():
    body = "st8(own, r); wait_st(); ld8(own, r);" + STORE + "wait_ld();"
    for seed in range(5):
        with pytest.raises(UninitializedUse):
            launch(body, seed=seed)


def test_registers_hold_what_was_loaded():
    out = launch("r[3] += t; st8(own, r); wait_st(); ld8(own, r); wait_ld();" + STORE).reshape(64, 8)
    assert np.array_equal(out[:, 3], 4 + np.arange(64)) and (out[:, 7] == 8).all()


@pytest.mark.parametrize(
    ("body", "end", "error", "match"),
    [
        ("if (t == 0) commit((u64*)image);", END, MemoryFault, "no initialized mbarrier"),
        ("if (t == 0) init((u64*)image + 1, 1); if (t == 32) commit((u64*)image + 1);", END, (DataRace, MemoryFault), "isn't ordered after its initialization|no initialized mbarrier"),
        ("if (t == 0) mma(tm, d, d, SMALL, 0);", "", DataRace, r"dealloc.* isn't ordered after .*tcgen05\.mma"),
        ("st8(own, r); wait_st(); ld8(own, r);", "", DataRace, r"dealloc.* isn't ordered after .*tcgen05\.ld"),
    ],
)  # fmt: skip
def test_what_else_is_reported(body, end, error, match):
    for seed in range(5):
        with pytest.raises(error, match=match):
            launch(body, end, seed)


def test_copies_of_registers_before_the_wait_follow_the_load():
    """Compilers move registers about; the assembler removes such copies."""
    body = """r[3] += t; st8(own, r); wait_st(); ld8(own, r);
        u32 first, second; ASM("mov.b32 %0, %1;" : "=r"(first) : "r"(r[3])); ASM("mov.b32 %0, %1;" : "=r"(second) : "r"(first));
        wait_ld(); for (u32 i = 0; i < 8; ++i) r[i] = second;"""
    out = launch(body + STORE).reshape(64, 8)
    assert np.array_equal(out[:, 5], 4 + np.arange(64))


def test_a_cta_may_not_end_before_its_operations():
    """The commit arrives on an mbarrier of a CTA that has ended."""
    with pytest.raises((MemoryFault, DataRace), match=r"still use its shared memory|dealloc.* isn't ordered"):
        for seed in range(10):
            launch("if (t == 0) { mma(tm, d, d, SMALL, 0); commit(&done); }", "", seed)


CLUSTER = r"""
extern "C" __global__ void k(u32* out) {
    __shared__ u64 done; __shared__ u32 base;
    const u32 t = threadIdx.x, cta = rank(), own = t / 32 * 32 << 16;
    if (t == 0) init(&done, ARRIVALS);
    if (t < 32) alloc(&base, 32);
    cluster_sync();
    u32 r[8] = {1, 2, 3, 4, 5, 6, 7, cta};
    BODY
    for (u32 i = 0; i < 8; ++i) out[(cta * THREADS + t) * 8 + i] = r[i];
    cluster_sync();
    if (t < 32) dealloc(base, 32);
}
"""
COMMIT_TO = 'ASM("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(peer(shared(&done), cta ^ 1)));'
COMMIT_ALL = 'ASM("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" :: "r"(shared(&done)), "h"((u16)MASK));'
RELAXED = 'ASM("barrier.cluster.arrive.relaxed.aligned;" ::); ASM("barrier.cluster.wait.aligned;" ::);'


def in_cluster(body: str, arrivals: int = 1, ctas: int = 2, seed: int = 0, threads: int = 64) -> np.ndarray:
    source = DEVICE + CLUSTER.replace("BODY", body).replace("ARRIVALS", str(arrivals)).replace(
        "THREADS", str(threads)
    )
    machine = Machine("sm100", sms=ctas, seed=seed)
    out = machine.alloc(0, (ctas, threads, 8), np.uint32).expect_defined()
    machine.launch(machine.load(to_ptx(source, "sm_100a")), "k", ctas, threads, cluster=ctas, args=[[out]])
    machine.run()
    return out.view.copy()


def test_commits_to_other_ctas():
    """To the peer's mbarrier by its address; to those of a mask, one arrival each."""
    for seed in range(4):
        out = in_cluster(f"if (t == 0) {{ {COMMIT_TO} }} wait(&done, 0);", seed=seed)
        assert (out[1, :, 7] == 1).all()
        commit = COMMIT_ALL.replace("MASK", "0b1010")
        in_cluster(f"if (t == 0) {{ {commit} }} if (cta & 1) wait(&done, 0);", 4, 4, seed)
    with pytest.raises(Deadlock, match=r"pending 1 of 4"):
        in_cluster(f"if (t == 0 && cta) {{ {COMMIT_ALL.replace('MASK', '0b1111')} }} wait(&done, 0);", 4, 4)
    with pytest.raises(MemoryFault, match="multicast to CTA 3 of a cluster of 2"):
        in_cluster(f"if (t == 0) {{ {COMMIT_ALL.replace('MASK', '0b1001')} }}")


def test_commits_to_other_ctas_are_waited_for_there():
    """A wait on what the same thread commits later doesn't say that this one has arrived."""
    both = (
        "if (t == 0) init(&late, 1); cluster_sync(); if (t == 0 && !cta) { TO_DONE TO_LATE } wait(&late, 0);"
    )
    both = both.replace("TO_DONE", COMMIT_ALL.replace("MASK", "0b11"))
    both = both.replace("TO_LATE", COMMIT_ALL.replace("MASK", "0b11").replace("&done", "&late"))
    for seed in range(4):
        in_cluster("__shared__ u64 late; " + both + " wait(&done, 0);", seed=seed)
        in_cluster("__shared__ u64 late; " + both + " if (cta == 1 && t == 40) wait(&done, 0);", seed=seed)
        with pytest.raises(MemoryFault, match=r"waited for another CTA's tcgen05\.commit .*phase 1"):
            in_cluster("__shared__ u64 late; " + both, seed=seed)


def test_a_relaxed_cluster_barrier_orders_tensor_memory():
    """Execution order is enough for tcgen05 operations, with their fences around it. Warps 0 and 4 have one quarter."""
    store, load = (
        "if (t < 32) { st8(base, r); wait_st(); before(); }",
        "if (t >= 128) { after(); ld8(base, r); wait_ld(); }",
    )
    for seed in range(4):
        out = in_cluster(f"r[0] = t < 32 ? t : 99; {store} {RELAXED} {load}", seed=seed, threads=160)
        assert np.array_equal(out[1, 128:, 0], np.arange(32))
        with pytest.raises(DataRace, match=r"before_thread_sync is missing|its completion"):
            in_cluster(f"{store.replace('before();', '')} {RELAXED} {load}", seed=seed, threads=160)
