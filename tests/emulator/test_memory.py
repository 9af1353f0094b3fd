"""Loads, stores, atomics, faults and undefined values."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import ptx_kernel, to_ptx

from megagen.emulator import Machine
from megagen.errors import MemoryFault, UninitializedUse


def run(
    body: str,
    *buffers: np.ndarray,
    block: int = 32,
    smem: int = 0,
    ranks: int = 1,
    module: str = "",
    **options: object,
):
    """Runs kernel ``k`` on rank 0 (or all ranks) with the arrays as buffers; returns what they hold afterwards."""
    machine = Machine("sm90", ranks=ranks, **options)
    held = []
    for array in buffers:
        buffer = machine.alloc(0, array.shape, array.dtype)
        buffer.array[:] = array
        held.append(buffer)
    loaded = machine.load(ptx_kernel(body, max(1, len(held)), module=module))
    machine.launch(loaded, "k", 1, block, smem=smem, args=[held or [0]] * ranks)
    machine.run()
    return [buffer.view.copy() for buffer in held]


def test_loads_extend_to_the_register() -> None:
    body = """
    ld.global.s8 %r0, [%a0]; ld.global.u8 %r1, [%a0]; ld.global.s16 %rd2, [%a0]; ld.global.u16 %r3, [%a0];
    st.global.u32 [%a0+8], %r0; st.global.u32 [%a0+12], %r1; st.global.u64 [%a0+16], %rd2; st.global.u32 [%a0+24], %r3;
    """
    (out,) = run(body, np.array([0x80FE, 0, 0, 0], np.uint64), block=1)
    assert out[1] == (0xFE << 32 | 0xFFFFFFFE)
    assert out[2] == 0xFFFFFFFFFFFF80FE
    assert out[3] & 0xFFFFFFFF == 0x80FE


def test_vectors_caches_and_wide_accesses() -> None:
    body = """
    .reg .b128 %q;
    ld.global.L1::no_allocate.v4.u32 {%r0, %r1, %r2, %r3}, [%a0]; ld.global.nc.L2::128B.v2.u64 {%rd4, %rd5}, [%a0+16];
    st.global.cs.v4.u32 [%a1], {%r3, %r2, %r1, %r0}; st.global.v2.b64 [%a1+16], {%rd5, %rd4};
    ld.global.b128 %q, [%a0]; st.global.b128 [%a1+32], %q;
    ld.volatile.global.v2.f32 {%f0, %f1}, [%a0]; st.volatile.global.v2.f32 [%a1+48], {%f1, %f0};
    ld.relaxed.gpu.global.u16 %h0, [%a0+4]; st.relaxed.sys.global.u16 [%a1+56], %h0;
    """
    data = np.arange(1, 9, dtype=np.uint32)
    _, out = run(body, data, np.zeros(16, np.uint32), block=1)
    assert list(out) == [4, 3, 2, 1, 7, 8, 5, 6, 1, 2, 3, 4, 2, 1, 2, 0]


def test_shared_memory_static_dynamic_and_generic() -> None:
    source = r"""
    extern "C" __global__ void k(int* out) {
        __shared__ int fixed[32];
        extern __shared__ __align__(1024) int dynamic[];
        int t = threadIdx.x;
        fixed[t] = t; dynamic[t] = 100 + t;
        __syncthreads();
        int* p = (t & 1) ? fixed : dynamic;
        out[t] = p[31 - t] + ((unsigned long long)__cvta_generic_to_shared(dynamic) % 1024 ? 1000000 : 0);
    }
    """
    machine = Machine("sm90")
    out = machine.alloc(0, 32, np.int32)
    machine.launch(machine.load(to_ptx(source)), "k", 1, 32, smem=128, args=[[out]])
    machine.run()
    assert list(out.view) == [31 - t + (0 if t & 1 else 100) for t in range(32)]


@pytest.mark.parametrize(
    ("operation", "start", "operand", "expected"),
    [
        ("add.u32", 5, 2, 5 + 64),
        ("add.f32", 0, 0x3F800000, 0x42000000),
        ("and.b32", 0xFF, 0xF0, 0xF0),
        ("or.b32", 1, 6, 7),
        ("xor.b32", 3, 1, 3),
        ("min.s32", 5, 0xFFFFFFFE, 0xFFFFFFFE),
        ("max.u32", 5, 7, 7),
        ("inc.u32", 0, 9, 2),
        ("dec.u32", 0, 9, 8),
        ("exch.b32", 5, 9, 9),
    ],
)
def test_atomics_of_a_warp(operation: str, start: int, operand: int, expected: int) -> None:
    # inc counts 0 to 9 and wraps: 32 steps from 0 end at 2; dec from 0 goes 9, 8, ... and ends at 8.
    body = f"atom.global.{operation} %r0, [%a0], {operand};"
    (out,) = run(
        body.replace("add.f32 %r0", "add.f32 %f0").replace(", 1065353216", ", 0f3F800000"),
        np.array([start], np.uint32),
    )
    assert out[0] == expected


def test_reductions_compare_and_swap_and_halves() -> None:
    body = """
    mov.u32 %r9, %laneid;
    atom.acq_rel.gpu.global.cas.b32 %r0, [%a0], 7, %r9;
    red.add.relaxed.sys.global.u64 [%a0+8], 3;
    red.global.add.noftz.f16x2 [%a0+16], 0x3C003C00;
    red.global.max.s32 [%a0+20], %r9;
    atom.global.add.f64 %fd0, [%a0+24], 0d3FE0000000000000;
    red.global.add.v2.f32 [%a0+32], {0f3F800000, 0f40000000};
    """
    data = np.zeros(10, np.uint32)
    data[0] = 7
    (out,) = run(
        body.replace(
            "red.global.add.noftz.f16x2 [%a0+16], 0x3C003C00",
            "mov.u32 %r8, 0x3C003C00; red.global.add.noftz.f16x2 [%a0+16], %r8",
        ),
        data,
    )
    assert out[0] == 0
    assert out[2:4].view(np.uint64)[0] == 96
    assert list(out[4:5].view(np.float16)) == [32, 32]
    assert out[5] == 31
    assert out[6:8].view(np.float64)[0] == 16
    assert list(out[8:10].view(np.float32)) == [32, 64]


def test_hints_policies_and_mmio_leave_values_alone() -> None:
    body = """
    createpolicy.fractional.L2::evict_last.b64 %rd1, 0.5; createpolicy.cvt.L2.b64 %rd2, 0x14F0000000000000;
    createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %rd3, [%a0], 64, 128;
    prefetch.global.L2 [%a0]; prefetchu.L1 [%a0]; applypriority.global.L2::evict_normal [%a0], 128;
    cp.async.bulk.prefetch.L2.global [%a0], 32;
    fence.proxy.alias; pmevent 1;
    ld.mmio.relaxed.sys.global.u32 %r0, [%a0]; st.mmio.relaxed.sys.global.u32 [%a0+4], %r0; ldu.global.u32 %r1, [%a0];
    ld.global.L2::cache_hint.u32 %r2, [%a0], %rd1; st.global.L2::cache_hint.u32 [%a0+8], %r2, %rd2;
    isspacep.global %p0, %a0; isspacep.shared %p1, %a0; selp.u32 %r3, 1, 0, %p0; selp.u32 %r4, 1, 0, %p1;
    st.global.v2.u32 [%a0+16], {%r3, %r4};
    mov.u32 %r5, s; getctarank.shared::cluster.u32 %r6, %r5; st.global.u32 [%a0+24], %r6;
    exit;
    """
    (out,) = run(body, np.array([7] + [9] * 7, np.uint32), block=1, module=".shared .align 4 .u32 s;")
    assert list(out) == [7, 7, 7, 9, 1, 0, 0, 9]


def test_more_atomics() -> None:
    body = """
    .reg .b128 %q<4>;
    mov.b128 %q0, {%rd1, %rd2};
    red.global.inc.u32 [%a0], 100;
    atom.global.exch.b32 %r0, [%a0+4], 5;
    atom.global.add.noftz.bf16x2 %r1, [%a0+8], %r9;
    atom.global.add.v2.f32 {%f0, %f1}, [%a0+16], {0f3F800000, 0f40000000};
    atom.global.max.noftz.v2.f16 {%h0, %h1}, [%a0+24], {%h2, %h3};
    red.global.add.noftz.v4.f16x2 [%a0+32], {%r8, %r8, %r8, %r8};
    atom.global.exch.b128 %q1, [%a0+48], %q0;
    st.global.b128 [%a0+64], %q1;
    st.global.v2.f32 [%a0+80], {%f0, %f1}; st.global.u32 [%a0+88], %r0;
    """
    setup = "mov.u32 %r9, 0x3F803F80; mov.u32 %r8, 0x3C003C00; mov.u64 %rd1, 11; mov.u64 %rd2, 22; mov.b16 %h2, 0x4000; mov.b16 %h3, 0x3C00;"
    data = np.zeros(24, np.uint32)
    data[0], data[1], data[6] = 7, 8, 0x42003800
    data[12:16] = [1, 2, 3, 4]
    (out,) = run(setup + body, data, block=1)
    assert out[0] == 8
    assert (out[1], out[22]) == (5, 8)
    assert out[2] == 0x3F803F80
    assert list(out[4:6].view(np.float32)) == [1, 2]
    assert out[6] == 0x42004000
    assert list(out[8:12]) == [0x3C003C00] * 4
    assert list(out[12:20]) == [11, 0, 22, 0, 1, 2, 3, 4]
    assert list(out[20:22].view(np.float32)) == [0, 0]


def test_scalar_noftz_atomics() -> None:
    (out,) = run("mov.b16 %h1, 0x3C00; atom.global.add.noftz.f16 %h0, [%a0], %h1;", np.zeros(2, np.uint16))
    assert out.view(np.float16)[0] == 32


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.u32 %r0, [%a0+128];", "4 bytes past the end of buffer 0"),
        ("ld.global.u32 %r0, [%a0+2];", "not aligned to 4 bytes"),
        ("mov.u64 %rd0, 16; ld.u32 %r0, [%rd0];", "outside every allocation"),
        ("mov.u32 %r1, 0; ld.shared.u32 %r0, [%r1];", "outside the CTA's shared memory"),
        ("mov.u32 %r1, 0x1000400; ld.shared::cluster.u32 %r0, [%r1];", "no CTA 1 in a cluster of 1"),
        ("mov.u64 %rd0, 4096; st.local.u32 [%rd0], 1;", "outside the thread's local memory"),
        ("ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%a0+8];", "not aligned to 16 bytes"),
    ],
)
def test_faults_name_address_and_reason(body: str, message: str) -> None:
    with pytest.raises(MemoryFault, match=message):
        run(body, np.zeros(32, np.uint32), block=1)


def test_local_memory_through_generic_addresses() -> None:
    # Every thread's stack looks alike: equal addresses, different memory.
    body = """
    .local .align 8 .b8 stack[16];
    mov.u32 %r9, %tid.x; mov.u64 %rd0, stack; cvta.local.u64 %rd0, %rd0;
    st.u32 [%rd0+4], %r9; st.volatile.u32 [%rd0+8], %r9; ld.u32 %r1, [%rd0+4]; ld.volatile.u32 %r2, [%rd0+8];
    add.u32 %r1, %r1, %r2; mul.wide.u32 %rd1, %r9, 4; add.u64 %rd1, %rd1, %a0; st.global.u32 [%rd1], %r1;
    """
    (out,) = run(body, np.zeros(32, np.uint32))
    assert list(out) == [2 * lane for lane in range(32)]


def test_use_after_free() -> None:
    machine = Machine("sm90")
    buffer = machine.alloc(0, 4)
    buffer.free()
    machine.launch(machine.load(ptx_kernel("ld.global.u32 %r0, [%a0];")), "k", 1, 1, args=[[buffer]])
    with pytest.raises(MemoryFault, match=r"which was freed"):
        machine.run()


# --- Undefined values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            "setp.eq.u32 %p0, %r0, 0; @%p0 bra L; L:",
            "the predicate that guards this instruction is undefined",
        ),
        (
            "cvt.u64.u32 %rd0, %r0; add.u64 %rd0, %rd0, %a0; ld.global.u32 %r1, [%rd0];",
            "the address is undefined",
        ),
        ("bar.sync %r0, 32;", "the barrier number is undefined"),
        ("shfl.sync.idx.b32 %r1, %r2, %r0, 31, -1;", "the source lane is undefined"),
    ],
)
def test_undefined_values_that_matter(use: str, message: str) -> None:
    with pytest.raises(UninitializedUse, match=message):
        run("mov.u32 %r2, 0; " + use, np.zeros(1, np.uint32))


@pytest.mark.parametrize(
    "use",
    [
        "add.u32 %r1, %r0, 1;",
        "and.b32 %r1, %r0, 0; setp.eq.u32 %p0, %r1, 0; @%p0 bra L; L:",
        "or.b32 %r1, %r0, -1; setp.eq.u32 %p0, %r1, 0; @%p0 bra L; L:",
        "shl.b32 %r1, %r0, 8; and.b32 %r1, %r1, 255; setp.eq.u32 %p0, %r1, 0; @%p0 bra L; L:",
        "mov.b64 %rd0, {%r0, %r2}; mov.b64 {%r3, %r4}, %rd0; setp.eq.u32 %p0, %r4, 0; @%p0 bra L; L:",
        "setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r2, 1; and.pred %p2, %p0, %p1; @%p2 bra L; L:",
        "prmt.b32 %r1, %r0, %r2, 0x7654; setp.eq.u32 %p0, %r1, 0; @%p0 bra L; L:",
        "st.global.u32 [%a0], %r0; st.global.u32 [%a0], 1; ld.global.u32 %r1, [%a0]; setp.eq.u32 %p0, %r1, 0; @%p0 bra L; L:",
    ],
)
def test_undefined_values_that_do_not(use: str) -> None:
    run("mov.u32 %r2, 0; " + use, np.zeros(1, np.uint32), block=1)


def test_undefined_memory_propagates_by_bytes_to_an_output() -> None:
    machine = Machine("sm90")
    source, out = machine.alloc(0, 8), machine.alloc(0, 8).expect_defined()
    body = "st.global.u8 [%a0], 1; st.global.u8 [%a0+2], 1; ld.global.b32 %r0, [%a0]; and.b32 %r0, %r0, 0xFF00FF; st.global.u64 [%a1], 0; st.global.u32 [%a1], %r0;"
    machine.launch(machine.load(ptx_kernel(body, 2)), "k", 1, 1, args=[[source, out]])
    machine.run()  # the bytes that are undefined were masked out
    assert list(out.view) == [1, 0, 1, 0, 0, 0, 0, 0]
    body = "ld.global.b32 %r0, [%a0]; st.global.u32 [%a1+4], %r0;"
    machine.launch(machine.load(ptx_kernel(body, 2)), "k", 1, 1, args=[[source, out]])
    with pytest.raises(
        UninitializedUse, match=r"2 bytes are undefined.*element \(5,\), last written by rank 0 SM 0 warp 0"
    ):
        machine.run()


def test_shared_memory_starts_undefined() -> None:
    body = "ld.shared.u32 %r0, [s]; setp.eq.u32 %p0, %r0, 0; @%p0 bra L; L:"
    with pytest.raises(UninitializedUse):
        run(body, np.zeros(1, np.uint32), module=".shared .align 4 .u32 s;")
