"""wgmma in a kernel: descriptors, register and shared operands, groups, fences, and what misuse gives."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

from itertools import pairwise

import numpy as np
import pytest
import torch
from cuda_source import to_ptx

from megagen.emulator import Machine
from megagen.errors import DataRace, EmulatorError, MemoryFault, ProxyViolation, UninitializedUse
from megagen.tensor_map import TensorMap

KERNEL = r"""
struct alignas(64) Map { u64 v[16]; };
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// 128-byte swizzle, 8 rows of 128 bytes to an atom: the next 8 rows are 1,024 bytes on.
__device__ u64 descriptor(u32 a) { return (u64)((a & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62; }
__device__ void mma(float (&d)[HALF_N], u64 a, u64 b, int scale) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %SCALE, 0;\n"
        "wgmma.mma_async.sync.aligned.m64nWIDTHk32.f32.e4m3.e4m3 {REGS}, %DESC_A, %DESC_B, p, 1, 1;\n}" : OUTS : "l"(a), "l"(b), "r"(scale));
}
extern "C" __global__ void __launch_bounds__(128) k(const __grid_constant__ Map ma, const __grid_constant__ Map mb, float* out, int blocks) {
    extern __shared__ __align__(1024) u8 memory[];
    __shared__ u64 full;
    u8 *a = memory, *b = memory + 8192;
    const int t = threadIdx.x;
    if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" :: "r"(shared(&full)) : "memory");
    __syncthreads();
    float d[HALF_N];
    for (int i = 0; i < HALF_N; i++) d[i] = 0;
    for (int block = 0; block < blocks; block++) {
        if (t == 0) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared(&full)), "r"(8192 + WIDTH * 128) : "memory");
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                :: "r"(shared(a)), "l"(&ma), "r"(block * 128), "r"(0), "r"(shared(&full)) : "memory");
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                :: "r"(shared(b)), "l"(&mb), "r"(block * 128), "r"(0), "r"(shared(&full)) : "memory");
        }
        asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra W;\n}" :: "r"(shared(&full)), "r"(block & 1) : "memory");
        BEFORE
        asm volatile("FENCE" ::: "memory");
        for (int k = 0; k < 4; k++) mma(d, descriptor(shared(a) + k * 32), descriptor(shared(b) + k * 32), SCALE_D);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned PENDING;" ::: "memory");
        for (int i = 0; i < HALF_N; i++) asm volatile("" : "+f"(d[i]) :: "memory");
        __syncthreads();
    }
    for (int i = 0; i < HALF_N; i++) {
        int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
        out[row * WIDTH + column] = d[i];
    }
}
"""


def kernel(n: int, **changes: str) -> str:
    half = n // 2
    settings = {"FENCE": "wgmma.fence.sync.aligned;", "PENDING": "0", "SCALE_D": "1", "BEFORE": ""} | changes
    source = KERNEL.replace("REGS", ",".join(f"%{i}" for i in range(half)))
    source = source.replace("OUTS", ",".join(f'"+f"(d[{i}])' for i in range(half)))
    for name, index in (("%DESC_A", half), ("%DESC_B", half + 1), ("%SCALE", half + 2)):
        source = source.replace(name + ",", f"%{index},")
    for name, value in settings.items():
        source = source.replace(name, value)
    return source.replace("HALF_N", str(half)).replace("WIDTH", str(n))


def multiply(
    n: int = 32, depth: int = 256, seed: int = 0, rows: int = 64, **changes: str
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's product and torch's, of E4M3 matrices [rows, depth] and [n, depth]."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(r, depth, generator=generator).to(torch.float8_e4m3fn) for r in (rows, n))
    machine = Machine("sm90", seed=seed)
    module = machine.load(to_ptx(kernel(n, **changes)))
    buffers = [machine.alloc(0, (m.shape[0], depth)) for m in (a, b)]
    for buffer, matrix in zip(buffers, (a, b)):
        buffer.array[:] = matrix.view(torch.uint8).numpy()
    out = machine.alloc(0, (64, n), np.float32).expect_defined()
    boxes = (64, n)
    maps = [
        TensorMap("u8", buffer.ptr, (depth, len(buffer.view)), (depth,), (128, box), swizzle="128B")
        for buffer, box in zip(buffers, boxes)
    ]
    machine.launch(module, "k", 1, 128, smem=8192 + n * 128, args=[[*maps, out, depth // 128]])
    machine.run()
    return out.view.copy(), (a.float() @ b.float().T).numpy()


@pytest.mark.parametrize("n", [8, 32, 64, 128])
def test_products_of_swizzled_tiles(n: int) -> None:
    for seed in range(2):
        got, expected = multiply(n, seed=seed)
        # Tensor cores keep 13 bits below the largest product of 32: see csrc/wgmma.hpp.
        assert np.abs(got - expected).max() < 2e-2 * np.abs(expected).max() / 8


def test_rows_beyond_the_tensor_are_zeros() -> None:
    got, expected = multiply(rows=20)
    assert np.abs(got[:20] - expected).max() < 0.2
    assert (got[20:] == 0).all()


def test_a_fence_must_precede_the_first_wgmma() -> None:
    with pytest.raises(DataRace, match=r"no wgmma\.fence orders"):
        multiply(FENCE="")


def test_results_are_undefined_until_the_wait() -> None:
    with pytest.raises((UninitializedUse, DataRace, MemoryFault)):
        multiply(depth=128, PENDING="1")


def test_a_stage_may_be_refilled_only_after_the_wait() -> None:
    with pytest.raises(
        DataRace,
        match=r"wgmma of warpgroup 0 .* isn't ordered after|isn't ordered after the read by .* wgmma of warpgroup 0",
    ):
        for seed in range(10):
            multiply(seed=seed, PENDING="1")


def test_operands_written_by_threads_need_a_proxy_fence() -> None:
    write = "volatile u8* va = a; va[t] = va[t]; {} __syncthreads();"
    with pytest.raises(ProxyViolation, match=r"wgmma"):
        multiply(BEFORE=write.format(""))
    multiply(BEFORE=write.format('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");'))


def test_operands_written_without_a_barrier_race() -> None:
    with pytest.raises(DataRace):
        for seed in range(10):
            multiply(
                seed=seed,
                BEFORE='volatile u8* va = a; va[t] = va[t]; asm volatile("fence.proxy.async.shared::cta;" ::: "memory");',
            )


def test_scale_d_and_descriptors_must_agree_in_the_warpgroup() -> None:
    with pytest.raises(EmulatorError, match=r"scale-d differs among the lanes"):
        multiply(SCALE_D="t & 1")
    with pytest.raises(EmulatorError, match=r"different wgmma operations"):
        multiply(SCALE_D="t / 32 & 1")


def test_a_descriptor_that_leaves_shared_memory() -> None:
    source = kernel(32).replace("descriptor(shared(b) + k * 32)", "descriptor(shared(b) + 0x38000)")
    machine = Machine("sm90")
    buffer = machine.alloc(0, (64, 128))
    buffer.array[:] = 0
    out = machine.alloc(0, (64, 32), np.float32)
    maps = [TensorMap("u8", buffer.ptr, (128, 64), (128,), (128, rows), swizzle="128B") for rows in (64, 32)]
    machine.launch(machine.load(to_ptx(source)), "k", 1, 128, smem=8192 + 4096, args=[[*maps, out, 1]])
    with pytest.raises(MemoryFault, match=r"the matrix descriptor 0x.* reaches shared address"):
        machine.run()


REGISTER_FORM = r"""
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(const u32* a, const u16* b, float* out, int swap) {
    __shared__ __align__(128) u16 tile[8 * 16];
    const int t = threadIdx.x, lane = t % 32, row = t / 32 * 16 + lane / 4;
    tile[t] = b[t];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    u32 r[4];  // bf16 pairs: rows row and row + 8, columns 2 (lane % 4) and 8 more
    for (int i = 0; i < 4; i++) r[i] = a[(row + i % 2 * 8) * 8 + lane % 4 + i / 2 * 4];
    float d[4] = {};
    // No swizzle, K-major: the two 16-byte halves of K are 128 bytes apart (leading), 8 rows make one core matrix.
    u64 desc = (u64)((shared(tile) & 0x3FFFF) >> 4) | (u64)8 << 16 | (u64)16 << 32;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 0, 1, SIGN, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(desc));
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) out[(row + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
"""


@pytest.mark.parametrize("sign", [1, -1])
def test_a_from_registers_bfloat16_and_negation(sign: int) -> None:
    generator = torch.Generator().manual_seed(5)
    a, b = (
        torch.randn(64, 16, generator=generator).bfloat16(),
        torch.randn(8, 16, generator=generator).bfloat16(),
    )
    machine = Machine("sm90")
    buffers = [
        machine.alloc(0, (64, 8), np.uint32),
        machine.alloc(0, 128, np.uint16),
        machine.alloc(0, (64, 8), np.float32),
    ]
    buffers[0].array[:] = a.view(torch.int16).numpy().view(np.uint32)
    # Core matrices of 8 rows x 8 columns one after the other: K 0-7, then K 8-15.
    buffers[1].array[:] = (
        torch.cat([b[:, :8].reshape(-1), b[:, 8:].reshape(-1)]).view(torch.int16).numpy().view(np.uint16)
    )
    machine.launch(
        machine.load(to_ptx(REGISTER_FORM.replace("SIGN", str(sign)))), "k", 1, 128, args=[[*buffers, 0]]
    )
    machine.run()
    assert np.abs(buffers[2].view - sign * (a.float() @ b.float().T).numpy()).max() < 1e-4


def test_chained_operations_copy_accumulators_that_are_in_flight() -> None:
    # The compiler copies accumulators between the four wgmma of a block; the copies must follow the results.
    source = kernel(8)
    ptx = to_ptx(source)
    positions = [i for i, line in enumerate(ptx.splitlines()) if "wgmma.mma_async" in line]
    lines = ptx.splitlines()
    assert (
        any("mov.f32" in line for first, last in pairwise(positions) for line in lines[first:last])
        or len(positions) >= 4
    )
    got, expected = multiply(8, depth=512, seed=3)
    assert np.abs(got - expected).max() < 0.3


EVERY_TYPE = r"""
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
extern "C" __global__ void k(const u32* a, const u32* b, u32* out) {
    __shared__ __align__(128) u32 ta[64 * 8]; __shared__ __align__(128) u32 tb[8 * 8];
    const int t = threadIdx.x;
    for (int i = t; i < 64 * 8; i += 128) ta[i] = a[i];
    if (t < 64) tb[t] = b[t];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    // Core matrices of 8 rows x 16 bytes: 8 rows on is 128 bytes (stride), the second half of K 1,024 or 128 (leading).
    u64 da = (u64)((shared(ta) & 0x3FFFF) >> 4) | (u64)64 << 16 | (u64)8 << 32;
    u64 db = (u64)((shared(tb) & 0x3FFFF) >> 4) | (u64)8 << 16 | (u64)8 << 32;
    u32 d[4] = {};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.INSTRUCTION {REGISTERS}, %4, %5, OPERANDS;"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "l"(da), "l"(db));
    asm volatile("wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int i = 0; i < 4; i++) out[4 * t + i] = d[i];
}
"""


def _core_matrices(tile: np.ndarray) -> np.ndarray:
    """Rows of 32 bytes as two columns of core matrices."""
    return np.concatenate(
        [np.ascontiguousarray(tile[:, :16]).reshape(-1), np.ascontiguousarray(tile[:, 16:]).reshape(-1)]
    )


@pytest.mark.parametrize(
    ("instruction", "kind", "operands"),
    [
        ("m64n8k16.f32.f16.f16", "f16", "1, 1, 1, 0, 0"),
        ("m64n8k16.f16.f16.f16", "f16", "1, 1, 1, 0, 0"),
        ("m64n8k16.f32.bf16.bf16", "bf16", "1, 1, 1, 0, 0"),
        ("m64n8k8.f32.tf32.tf32", "tf32", "1, 1, 1"),
        ("m64n8k32.f32.e5m2.e4m3", "fp8", "1, 1, 1"),
        ("m64n8k32.f16.e4m3.e4m3", "fp8", "1, 1, 1"),
        ("m64n8k32.s32.s8.u8", "int", "1"),
        ("m64n8k32.satfinite.s32.u8.s8", "int", "1"),
        ("m64n8k256.s32.b1.b1.and.popc", "bits", "1"),
    ],
)
def test_every_operand_type(instruction: str, kind: str, operands: str) -> None:
    rng = np.random.default_rng(1)
    float_types = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}
    _, *types = instruction.split(".")
    types = [t for t in types if t != "satfinite"]
    fp8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    if kind in ("f16", "bf16", "tf32", "fp8"):
        # Small integers: every product and sum is exact in every model.
        depth = {"f16": 16, "bf16": 16, "tf32": 8, "fp8": 32}[kind]
        va, vb = (torch.from_numpy(rng.integers(-2, 3, (rows, depth))).float() for rows in (64, 8))
        stored = [float_types.get(kind) or fp8[t] for t in types[1:3]]
        a, b = (v.to(s).view(torch.uint8).numpy().reshape(len(v), 32) for v, s in zip((va, vb), stored))
        expected = (va @ vb.T).numpy()
    elif kind == "int":
        a, b = (
            rng.integers(-128 if t == "s8" else 0, 128 if t == "s8" else 256, (rows, 32))
            for t, rows in zip(types[1:], (64, 8))
        )
        expected = a @ b.T
        a, b = a.astype(np.uint8), b.astype(np.uint8)
    else:
        a, b = (rng.integers(0, 256, (rows, 32), dtype=np.uint8) for rows in (64, 8))
        expected = np.array([[np.unpackbits(x & y).sum() for y in b] for x in a])
    half = types[0] == "f16"
    source = EVERY_TYPE.replace("INSTRUCTION", instruction).replace("OPERANDS", operands)
    source = source.replace("REGISTERS", "%0, %1" if half else "%0, %1, %2, %3")
    ptx = to_ptx(source)
    machine = Machine("sm90")
    buffers = [
        machine.alloc(0, 64 * 8, np.uint32),
        machine.alloc(0, 64, np.uint32),
        machine.alloc(0, (128, 4), np.uint32),
    ]
    for buffer, tile in zip(buffers, (a, b)):
        buffer.array[:] = _core_matrices(tile).view(np.uint32)
    machine.launch(machine.load(ptx), "k", 1, 128, args=[buffers])
    machine.run()
    got = np.zeros((64, 8))
    for t in range(128):
        words = buffers[2].view[t]
        values = (
            words[:2].copy().view(np.float16)
            if half
            else words.copy().view(np.float32 if types[0] == "f32" else np.int32)
        )
        for i in range(4):
            got[t // 32 * 16 + t % 32 // 4 + i // 2 * 8, t % 4 * 2 + i % 2] = values[i]
    assert (got == expected).all()
