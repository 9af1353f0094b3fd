"""PTX as compilers write it: functions, structs by value, local memory, variables, switches, scopes, printf, debug lines."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import re
import struct

import numpy as np
import pytest
from cuda_source import PTX_HEADER, ptx_kernel, to_ptx

from megagen.emulator import Machine, supported_forms
from megagen.errors import EmulatorError, InputError, MemoryFault, Trap, UnsupportedInstruction

FUNCTIONS = r"""
struct Point { int a; float b[5]; long long c; };
struct Pair { long long low; float high; };
__device__ int table[4] = {10, 20, 30, 40};
__device__ int* table_pointer = table;
__constant__ float weights[2] = {1.5f, 2.5f};
__device__ __noinline__ int scale(int a, float b) { return a * 3 + (int)b; }
__device__ __noinline__ float pick(Point p, int i) { return p.b[i] + p.c; }
__device__ __noinline__ Pair swap(Pair p) { Pair q; q.low = (long long)p.high; q.high = (float)p.low; return q; }
extern "C" __global__ void k(int* out, const float* in, const __grid_constant__ Point p, int mode) {
    int t = threadIdx.x;
    int local[16];
    for (int i = 0; i < 16; i++) local[i] = in[i] * t;
    int sum = scale(t, in[t]) + local[(t * 7) & 15] + table_pointer[t & 3];
    sum += (t & 1) ? (int)pick(p, t % 5) : (int)(weights[t & 1] * 2);
    Pair q = swap(Pair{t, 100.5f});
    sum += (int)q.low + (int)q.high;
    switch (mode) {
        case 0: sum += 1; break;
        case 1: sum += 1000 + t; break;
        case 2: sum ^= 5; break;
        case 3: sum *= 3; break;
        case 4: sum -= 77; break;
        case 5: sum = -sum; break;
        default: sum = 0;
    }
    out[t] = sum;
}
"""


@pytest.mark.parametrize("mode", range(7))
def test_functions_structs_and_local_memory(mode: int) -> None:
    machine = Machine("sm90")
    out, values = machine.alloc(0, 32, np.int32), machine.alloc(0, 32, np.float32)
    values.array[:] = np.arange(32) * 2
    point = struct.pack("<i5fq", 1, 2, 3, 4, 5, 6, 7)
    machine.launch(machine.load(to_ptx(FUNCTIONS)), "k", 1, 32, args=[[out, values, point, mode]])
    machine.run()
    for t in range(32):
        total = t * 3 + t * 2 + ((t * 7) & 15) * 2 * t + [10, 20, 30, 40][t & 3]
        total += [2, 3, 4, 5, 6][t % 5] + 7 if t & 1 else 3
        total += 100 + t
        total = [total + 1, total + 1000 + t, total ^ 5, total * 3, total - 77, -total, 0][mode]
        assert out.view[t] == total


def test_indexed_branch_and_local_labels() -> None:
    body = """
    mov.u32 %r0, %tid.x;
    and.b32 %r1, %r0, 3;
    targets: .branchtargets A, B, C, D;
    brx.idx %r1, targets;
    A: mov.u32 %r2, 100; bra.uni DONE;
    B: mov.u32 %r2, 200; bra.uni DONE;
    C: mov.u32 %r2, 300; bra.uni DONE;
    D: { .reg .pred q; .reg .b32 %r3; mov.u32 %r3, 0; mov.u32 %r2, 0;
       LOOP: add.u32 %r2, %r2, 50; add.u32 %r3, %r3, 1; setp.lt.u32 q, %r3, 8; @q bra LOOP; }
    DONE: mul.wide.u32 %rd0, %r0, 4; add.u64 %rd0, %rd0, %a0; st.global.u32 [%rd0], %r2;
    """
    machine = Machine("sm90")
    out = machine.alloc(0, 32, np.uint32)
    machine.launch(machine.load(ptx_kernel(body)), "k", 1, 32, args=[[out]])
    machine.run()
    assert list(out.view) == [100, 200, 300, 400] * 8


def test_printf_and_assert() -> None:
    source = r"""
    extern "C" __device__ int printf(const char*, ...);
    extern "C" __global__ void k(int x) {
        if (threadIdx.x == 3) printf("x=%d %5.2f %s %llu %%\n", x, 1.5, "text", 1ull << 40);
        if (x == 7) __trap();
    }
    """
    machine = Machine("sm90")
    machine.launch(machine.load(to_ptx(source)), "k", 1, 32, args=[[-5]])
    assert machine.run().output == "x=-5  1.50 text 1099511627776 %\n"
    machine.launch(machine.load(to_ptx(source)), "k", 1, 32, args=[[7]])
    with pytest.raises(Trap, match=r"rank 0 SM 0 CTA \(0,0,0\) warp 0 .*test\.cu:5"):
        machine.run()


def test_breakpoints_stop_like_traps() -> None:
    machine = Machine("sm90")
    machine.launch(machine.load(ptx_kernel("brkpt;")), "k", 1, 1, args=[[0]])
    with pytest.raises(Trap):
        machine.run()


def test_an_unknown_instruction_stops_with_text_line_and_section() -> None:
    with pytest.raises(
        UnsupportedInstruction, match=r"PTX line \d+ .*`vadd4.u32.u32.u32 %r0, %r1, %r2, %r3`"
    ):
        Machine("sm90").load(ptx_kernel("vadd4.u32.u32.u32 %r0, %r1, %r2, %r3;"))
    with pytest.raises(UnsupportedInstruction, match=r"Integer Arithmetic Instructions"):
        Machine("sm90").load(ptx_kernel("add.f8 %r0, %r1, %r2;"))
    with pytest.raises(UnsupportedInstruction, match=r"im2col|form isn't implemented"):
        Machine("sm90").load(
            ptx_kernel(
                "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
                "[%r0], [%a0, {%r1, %r2, %r3}], [%r4], {%h0};"
            )
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ".version 8.6\n.target sm_90a\n.address_size 64\n.entry k() { add.u32 %r1 %r2; }",
            "PTX line 4: expected ,",
        ),
        (ptx_kernel("bra NOWHERE;"), "label `NOWHERE` isn't defined"),
        (ptx_kernel("mov.u32 %q1, 1;"), "`%q1` isn't a register"),
        (ptx_kernel("mov.u32 %r1, missing;"), "`missing` isn't declared"),
    ],
)
def test_what_cannot_be_decoded_names_its_line(text: str, message: str) -> None:
    with pytest.raises(EmulatorError, match=re.escape(message)):
        Machine("sm90").load(text)


def test_recursion_is_refused_by_name() -> None:
    text = PTX_HEADER + ".func f() { call f; ret; }\n.visible .entry k() { call f; ret; }"
    with pytest.raises(UnsupportedInstruction, match=r"function `f` is recursive"):
        Machine("sm90").load(text)


def test_external_functions_are_refused_by_name() -> None:
    text = ptx_kernel("call foreign;", module=".extern .func foreign();")
    with pytest.raises(UnsupportedInstruction, match=r"the function `foreign` isn't defined in this module"):
        Machine("sm90").load(text)


def test_arguments_are_checked() -> None:
    machine = Machine("sm90")
    module = machine.load(ptx_kernel("", 2))
    with pytest.raises(InputError, match=r"k takes 2 parameters, 1 were given"):
        machine.launch(module, "k", 1, 32, args=[[1]])
    with pytest.raises(InputError, match=r"argument 1 has 4 bytes, its parameter 8"):
        machine.launch(module, "k", 1, 32, args=[[1, b"1234"]])
    with pytest.raises(InputError, match=r"isn't a kernel of this module; it has: k"):
        machine.launch(module, "j", 1, 32, args=[[1, 2]])
    with pytest.raises(InputError, match=r"args has 1 entries"):
        Machine("sm90", ranks=2).launch(module, "k", 1, 32, args=[[1, 2]])
    with pytest.raises(InputError, match=r"rank=3: the machine has ranks 0 to 0"):
        machine.alloc(3, 4)
    with pytest.raises(EmulatorError, match=r"must be a positive multiple of cluster"):
        machine.launch(module, "k", 3, 32, 2, args=[[1, 2]])
    with pytest.raises(EmulatorError, match=r"shared memory exceed"):
        machine.launch(module, "k", 1, 32, 1, 300000, args=[[1, 2]])


def test_special_registers() -> None:
    body = """
    mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %ntid.x; mad.lo.u32 %r3, %r1, %r2, %r0;
    mov.u32 %r4, %ctaid.x; mov.u32 %r5, %nctaid.x; mov.u32 %r6, %laneid; mov.u32 %r7, %warpid; mov.u32 %r8, %lanemask_lt;
    mov.u32 %r9, %cluster_ctarank; mov.u32 %r10, %clusterid.x; mov.u32 %r11, %cluster_nctarank; mov.u32 %r12, %dynamic_smem_size;
    mul.wide.u32 %rd0, %r4, 2048; add.u64 %rd0, %rd0, %a0; mul.wide.u32 %rd1, %r3, 32; add.u64 %rd0, %rd0, %rd1;
    st.global.v4.u32 [%rd0], {%r4, %r5, %r6, %r7}; st.global.v4.u32 [%rd0+16], {%r8, %r9, %r10, %r12};
    """
    machine = Machine("sm90", sms=4)
    out = machine.alloc(0, (4, 64, 8), np.uint32)
    machine.launch(machine.load(ptx_kernel(body)), "k", 4, (16, 4), 2, 512, args=[[out]])
    machine.run()
    for cta in range(4):
        for thread in range(64):
            lane = thread % 32
            expected = [cta, 4, lane, thread // 32, (1 << lane) - 1, cta % 2, cta // 2, 512]
            assert list(out.view[cta, thread]) == expected


def test_more_ctas_than_sms_run_one_after_the_other() -> None:
    body = """
    mov.u32 %r0, %ctaid.x; mov.u32 %r1, %smid; mul.wide.u32 %rd0, %r0, 4; add.u64 %rd0, %rd0, %a0;
    add.u32 %r1, %r1, 1; st.global.u32 [%rd0], %r1;
    """
    machine = Machine("sm90", sms=3)
    out = machine.alloc(0, 1000, np.uint32)
    machine.launch(machine.load(ptx_kernel(body)), "k", 1000, 1, args=[[out]])
    machine.run()
    assert set(out.view) == {1, 2, 3}


def test_module_variables_are_per_rank() -> None:
    body = "mov.u64 %rd0, counter; ld.global.u32 %r0, [%rd0]; add.u32 %r0, %r0, 1; st.global.u32 [%rd0], %r0; st.global.u32 [%a0], %r0;"
    machine = Machine("sm90", ranks=2)
    outs = [machine.alloc(rank, 1, np.uint32) for rank in range(2)]
    module = machine.load(ptx_kernel(body, module=".global .align 4 .u32 counter = 41;"))
    machine.launch(module, "k", 1, 1, args=[[out] for out in outs])
    machine.launch(module, "k", 1, 1, args=[[outs[1]]], ranks=[1])
    machine.run()
    assert [int(out.view[0]) for out in outs] == [42, 43]


def test_constants_cannot_be_written() -> None:
    body = "mov.u64 %rd0, c; cvta.const.u64 %rd0, %rd0; st.u32 [%rd0], 1;"
    machine = Machine("sm90")
    machine.launch(
        machine.load(ptx_kernel(body, module=".const .align 4 .u32 c = 1;")), "k", 1, 1, args=[[0]]
    )
    with pytest.raises(MemoryFault, match=r"variable c, which is read-only"):
        machine.run()


def test_every_row_of_the_decoder_names_its_section() -> None:
    rows = supported_forms()
    assert len(rows) > 200
    assert all(pattern and section for pattern, section in rows)
    assert len({pattern for pattern, _ in rows}) == len(rows)
