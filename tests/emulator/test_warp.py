"""Exchange within a warp, divergence, and matrices between shared memory and registers."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import ptx_kernel, to_ptx

from megagen.emulator import Machine
from megagen.errors import Deadlock, EmulatorError

STORE = "mul.wide.u32 %rd9, %r9, 4; add.u64 %rd9, %rd9, %a0; st.global.u32 [%rd9], %r0;"


def lanes(body: str, block: int = 32, module: str = "", **options: object) -> list[int]:
    """What each lane leaves in %r0; %r9 is its number."""
    machine = Machine("sm90", **options)
    out = machine.alloc(0, block, np.uint32)
    text = ptx_kernel("mov.u32 %r9, %tid.x; " + body + STORE, module=module)
    machine.launch(machine.load(text), "k", 1, block, args=[[out]])
    machine.run()
    return [int(v) for v in out.view]


def test_shuffles() -> None:
    assert lanes("shfl.sync.idx.b32 %r0, %r9, 5, 31, -1;") == [5] * 32
    assert lanes("shfl.sync.bfly.b32 %r0, %r9, 3, 31, -1;") == [lane ^ 3 for lane in range(32)]
    assert lanes("shfl.sync.up.b32 %r0, %r9, 2, 0, -1;") == [
        max(lane - 2, lane % 2 if lane < 2 else 0) for lane in range(32)
    ]
    down = lanes("shfl.sync.down.b32 %r0|%p0, %r9, 4, 31, -1; @!%p0 mov.u32 %r0, 99;")
    assert down == [lane + 4 if lane < 28 else 99 for lane in range(32)]
    # Segments of 8: c = (32 - 8) << 8 | 7 for idx.
    assert lanes("shfl.sync.idx.b32 %r0, %r9, 1, 0x181F, -1;") == [lane // 8 * 8 + 1 for lane in range(32)]


def test_votes_and_matches() -> None:
    assert lanes("setp.lt.u32 %p0, %r9, 4; vote.sync.ballot.b32 %r0, %p0, -1;") == [15] * 32
    assert (
        lanes("setp.lt.u32 %p0, %r9, 4; vote.sync.any.pred %p1, %p0, -1; selp.u32 %r0, 1, 0, %p1;")
        == [1] * 32
    )
    assert (
        lanes("setp.lt.u32 %p0, %r9, 4; vote.sync.all.pred %p1, !%p0, -1; selp.u32 %r0, 1, 0, %p1;")
        == [0] * 32
    )
    assert (
        lanes("setp.lt.u32 %p0, %r9, 40; vote.sync.uni.pred %p1, %p0, -1; selp.u32 %r0, 1, 0, %p1;")
        == [1] * 32
    )
    assert lanes("and.b32 %r1, %r9, 1; match.any.sync.b32 %r0, %r1, -1;") == [0x55555555, 0xAAAAAAAA] * 16
    assert lanes("match.all.sync.b32 %r0|%p0, %r9, -1; @%p0 mov.u32 %r0, 7;") == [0] * 32
    assert lanes("activemask.b32 %r0;") == [0xFFFFFFFF] * 32


def test_reductions_and_election() -> None:
    assert lanes("redux.sync.add.u32 %r0, %r9, -1;") == [496] * 32
    assert lanes("sub.s32 %r1, %r9, 5; redux.sync.min.s32 %r0, %r1, -1;") == [2**32 - 5] * 32
    assert lanes("redux.sync.max.u32 %r0, %r9, -1;") == [31] * 32
    assert lanes("shl.b32 %r1, 1, %r9; redux.sync.or.b32 %r0, %r1, -1;") == [0xFFFFFFFF] * 32
    assert lanes("mov.u32 %r0, 9; elect.sync %r1|%p0, -1; @%p0 mov.u32 %r0, %r1;") == [0] + [9] * 31
    floats = "cvt.rn.f32.u32 %f1, %r9; neg.f32 %f1, %f1; redux.sync.{}.f32 %f0, %f1, -1; mov.b32 %r0, %f0;"
    assert lanes(floats.format("max.abs")) == [0x41F80000] * 32
    assert lanes(floats.format("min")) == [0xC1F80000] * 32
    half = "setp.ge.u32 %p0, %r9, 16; mov.u32 %r0, 0; @!%p0 bra E; redux.sync.add.u32 %r0, 1, 0xFFFF0000; E: "
    assert lanes(half) == [0] * 16 + [16] * 16


def test_lanes_wait_for_each_other_at_a_sync() -> None:
    # The two halves reach the same shuffle by different ways.
    body = """
    setp.lt.u32 %p0, %r9, 16; @%p0 bra A;
    mul.lo.u32 %r1, %r9, 10; bra B;
    A: add.u32 %r1, %r9, 1000;
    B: shfl.sync.bfly.b32 %r0, %r1, 16, 31, -1;
    """
    assert lanes(body) == [(lane + 16) * 10 for lane in range(16)] + [lane + 1000 for lane in range(16)]


def test_divergent_lanes_make_progress() -> None:
    # Lane 0 spins until lane 1, behind it in program order, has stored.
    source = r"""
    extern "C" __global__ void k(int* out) {
        __shared__ int flag;
        if (threadIdx.x == 0) flag = 0;
        __syncwarp();
        if (threadIdx.x == 0) {
            int seen;
            do asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(seen) : "r"((u32)__cvta_generic_to_shared(&flag)) : "memory");
            while (!seen);
            out[0] = seen;
        } else if (threadIdx.x == 1) {
            asm volatile("st.release.cta.shared.b32 [%0], 5;" :: "r"((u32)__cvta_generic_to_shared(&flag)) : "memory");
        }
    }
    """
    machine = Machine("sm90")
    out = machine.alloc(0, 1, np.int32)
    machine.launch(machine.load(to_ptx(source)), "k", 1, 32, args=[[out]])
    machine.run()
    assert out.view[0] == 5


def test_a_member_mask_that_never_gathers_is_a_deadlock() -> None:
    body = "setp.eq.u32 %p0, %r9, 3; @%p0 bra L; bar.warp.sync -1; L: bar.warp.sync 0xF; mov.u32 %r0, 0;"
    with pytest.raises(Deadlock, match=r"waits for lanes 0x00000008 of member mask 0xffffffff"):
        lanes(body)


def test_a_lane_outside_its_own_mask_is_an_error() -> None:
    with pytest.raises(EmulatorError, match=r"lane 4 isn't in its own member mask 0x0000000f"):
        lanes("mov.u32 %r0, 0; bar.warp.sync 15;")


def test_matrices_of_16_bit_elements() -> None:
    # Row r of matrix m holds 64 m + 8 r + c in column c; lane l receives row l / 4, columns 2 (l mod 4) and the next.
    fill = """
    mul.lo.u32 %r1, %r9, 16; mov.u32 %r2, s; add.u32 %r2, %r2, %r1; mul.lo.u32 %r3, %r9, 8;
    mov.u32 %r4, 0;
    F: add.u32 %r5, %r3, %r4; cvt.u16.u32 %h0, %r5; shl.b32 %r6, %r4, 1; add.u32 %r6, %r6, %r2; st.shared.u16 [%r6], %h0;
    add.u32 %r4, %r4, 1; setp.lt.u32 %p0, %r4, 8; @%p0 bra F; bar.warp.sync -1;
    """
    module = ".shared .align 16 .b8 s[512]; .shared .align 16 .b8 t[512];"
    for k in range(4):
        loaded = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r10, %r11, %r12, %r13}}, [%r2]; mov.u32 %r0, %r{10 + k};"
        expected = [64 * k + 8 * (lane // 4) + 2 * (lane % 4) for lane in range(32)]
        assert lanes(fill + loaded, module=module) == [v | (v + 1) << 16 for v in expected]
    transposed = "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r10, %r11}, [%r2]; mov.u32 %r0, %r11;"
    expected = [64 + 8 * (2 * (lane % 4)) + lane // 4 for lane in range(32)]
    assert lanes(fill + transposed, module=module) == [v | (v + 8) << 16 for v in expected]
    back = """
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r2];
    mov.u32 %r20, t; add.u32 %r20, %r20, %r1; stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%r20], {%r10, %r11, %r12, %r13};
    bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r14, %r15, %r16, %r17}, [%r20];
    xor.b32 %r0, %r10, %r14; xor.b32 %r18, %r13, %r17; or.b32 %r0, %r0, %r18;
    """
    assert lanes(fill + back, module=module) == [0] * 32
    other_order = back.replace("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "stmatrix.sync.aligned.{}")
    for form in ("x4.m8n8.trans.shared.b16", "x4.m8n8.shared.b16.trans"):
        assert lanes(fill + other_order.replace("{}", form, 1), module=module) == [0] * 32
    moved = "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r2]; movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r10;"
    expected = [8 * (2 * (lane % 4)) + lane // 4 for lane in range(32)]
    assert lanes(fill + moved, module=module) == [v | (v + 8) << 16 for v in expected]
