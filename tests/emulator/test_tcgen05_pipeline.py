"""A pair of CTAs that multiplies FP4 weights with FP8 activations: tensor copies that signal the leader, packed FP4
tensor maps, scale factors to tensor memory, block-scaled multiplications, multicast commits, an epilogue; and what is
reported when a step of its synchronization is missing."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import to_ptx
from tcgen05_kernel import DEVICE
from tcgen05_operands import NARROW, decode, random_codes, scale_image, scaled_idesc, ue8m0

from megagen.emulator import Machine
from megagen.errors import DataRace, Deadlock, EmulatorError, MemoryFault, ProxyViolation, UninitializedUse
from megagen.tensor_map import TensorMap

M, N, K, STAGES = 256, 48, 384, 2
BLOCKS = K // 128

KERNEL = r"""
struct alignas(64) Map { u64 words[16]; };
__device__ void load2(u32 to, const Map* map, u32 x, u32 y, u32 barrier) {
    ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2 [%0], [%1, {%2, %3}], [%4];"
        :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(barrier));
}
__device__ void expect_leader(u32 barrier, u32 bytes) {
    ASM("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes));
}
struct Stage { unsigned char a[128 * 128]; unsigned char b[24 * 128]; u32 scales[2][128]; };
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __global__ void k(const __grid_constant__ Map a, const __grid_constant__ Map b, const __grid_constant__ Map sa,
                             const __grid_constant__ Map sb, float* out) {
    __shared__ u64 full[STAGES], empty[STAGES], done;
    __shared__ u32 base;
    const u32 t = threadIdx.x, warp = t / 32, cta = rank();
    Stage* stages = (Stage*)memory;
    if (t == 0) {
        for (u32 i = 0; i < STAGES; ++i) { init(&full[i], 2); init(&empty[i], 1); }
        init(&done, 1);
    }
    if (warp == 0) { alloc2(&base, 128); RELINQUISH }
    cluster_sync();
    const u32 tm = base;
    if (t == 0) {
        for (u32 i = 0; i < BLOCKS; ++i) {
            const u32 s = i % STAGES, leader = shared(&full[s]) & 0xFEFFFFFF;
            PRODUCER_WAIT
            expect_leader(leader, 128 * 64 + 24 * 128 + 2 * 512);
            load2(shared(stages[s].a), &a, i * 128, cta * 128, leader);
            load2(shared(stages[s].b), &b, i * 128, cta * 24, leader);
            load2(shared(stages[s].scales[0]), &sa, 0, cta * BLOCKS + i, leader);
            load2(shared(stages[s].scales[1]), &sb, 0, i, leader);
        }
    } else if (t == 32 && cta == 0) {
        for (u32 i = 0; i < BLOCKS; ++i) {
            const u32 s = i % STAGES, sfa = tm + 64 + SCALE_SLOT * 8, sfb = sfa + 4;
            MMA_WAIT
            after();
            ASM("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" :: "r"(sfa), "l"(desc(shared(stages[s].scales[0]), 0, 128, 0)));
            ASM("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" :: "r"(sfb), "l"(desc(shared(stages[s].scales[1]), 0, 128, 0)));
            for (u32 j = 0; j < 4; ++j) {
                const u64 da = desc(shared(stages[s].a) + 32 * j, 0, 1024, 2), db = desc(shared(stages[s].b) + 32 * j, 0, 1024, 2);
                const u32 id = IDESC | j << 4 | j << 29;
                asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
                    "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%5], [%6], p;\n}"
                    :: "r"(tm), "l"(da), "l"(db), "r"(id), "r"(i | j), "r"(sfa), "r"(sfb) : "memory");
            }
            STAGE_COMMIT
        }
        DONE_COMMIT
    }
    __syncwarp();
    DONE_WAIT
    AFTER
    for (u32 c = 0; c < N; c += 8) {
        u32 r[8]; ld8(tm + (warp * 32 << 16) + c, r); WAIT_LD
        for (u32 e = 0; e < 8; ++e) out[(cta * 128 + t) * N + c + e] = __uint_as_float(r[e]);
    }
    BEFORE_FREE
    if (warp == 0) { DEALLOC }
}
"""

STEPS = {
    "RELINQUISH": 'ASM("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::);',
    "PRODUCER_WAIT": "if (i >= STAGES) wait(&empty[s], i / STAGES + 1 & 1);",
    "MMA_WAIT": "wait(&full[s], i / STAGES & 1);",
    "SCALE_SLOT": "s",
    "STAGE_COMMIT": "commit2(&empty[s], 3);",
    "DONE_COMMIT": "commit2(&done, 3);",
    "DONE_WAIT": "wait(&done, 0);",
    "AFTER": "after();",
    "WAIT_LD": "wait_ld();",
    "BEFORE_FREE": "cluster_sync();",
    "DEALLOC": "dealloc2(tm, 128);",
}


def packed(codes: np.ndarray) -> np.ndarray:
    return (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)


def launch(seed: int = 0, options: dict | None = None, **changed: str) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's output with some steps changed, and the expected one."""
    rng = np.random.default_rng(7)
    a, b = random_codes(rng, "e2m1", (M, K)), random_codes(rng, "e4m3", (N, K))
    sa, sb = rng.integers(122, 132, (M, K // 32)), rng.integers(122, 132, (N, K // 32))
    source = KERNEL
    constants = {"STAGES": STAGES, "BLOCKS": BLOCKS, "IDESC": f"{scaled_idesc(N, M, NARROW['e2m1'], NARROW['e4m3'])}u"}
    for name, text in {**STEPS, **changed, **constants}.items():
        source = source.replace(name, str(text))
    source = source.replace("c < N", f"c < {N}").replace("* N +", f"* {N} +")
    machine = Machine("sm100", sms=2, seed=seed, **(options or {}))

    def buffer(values: np.ndarray):
        result = machine.alloc(0, values.shape, values.dtype)
        result.array[:] = values
        return result

    scales_a = np.stack([scale_image(sa[r : r + 128, k : k + 4]) for r in (0, 128) for k in range(0, K // 32, 4)])
    scales_b = np.stack([scale_image(sb[:, k : k + 4]) for k in range(0, K // 32, 4)])
    weights, tokens, ga, gb = map(buffer, (packed(a), b.astype(np.uint8), scales_a, scales_b))
    out = machine.alloc(0, (M, N), np.float32).expect_defined()
    maps = [
        TensorMap("u4x16_align16", weights.ptr, (K, M), (K // 2,), (128, 128), swizzle="128B"),
        TensorMap("u8", tokens.ptr, (K, N), (K,), (128, 24), swizzle="128B"),
        TensorMap("u32", ga.ptr, (128, 2 * BLOCKS), (512,), (128, 1)),
        TensorMap("u32", gb.ptr, (128, BLOCKS), (512,), (128, 1)),
    ]
    module = machine.load(to_ptx(DEVICE + source, "sm_100a"))
    smem = STAGES * (128 * 128 + 24 * 128 + 1024)
    machine.launch(module, "k", 2, 128, cluster=2, smem=smem, args=[[*maps, out]])
    machine.run()
    scaled_a = decode(a, "e2m1") * np.repeat(ue8m0(sa), 32, axis=1)
    scaled_b = decode(b, "e4m3") * np.repeat(ue8m0(sb), 32, axis=1)
    expected = np.zeros((M, N), np.float32)
    for k in range(0, K, 32):  # one instruction each
        expected = (expected + scaled_a[:, k : k + 32] @ scaled_b[:, k : k + 32].T).astype(np.float32)
    return out.view.copy(), expected


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_interleaving(seed):
    out, expected = launch(seed)
    assert np.array_equal(out, expected)
