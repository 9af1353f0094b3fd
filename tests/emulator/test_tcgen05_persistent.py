"""A CTA that computes tile after tile: one warp loads, one multiplies into two accumulators in turn, four read results
in fragments of .16x256b and give the accumulator back. Warps synchronize through mbarriers alone."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import to_ptx
from tcgen05_kernel import DEVICE
from tcgen05_operands import NARROW, decode, idesc, random_codes, rounded_sum

from megagen.emulator import Machine
from megagen.errors import DataRace, Deadlock
from megagen.tensor_map import TensorMap

M, N, K, TILES, STAGES = 128, 32, 128, 5, 2

KERNEL = r"""
struct alignas(64) Map { u64 words[16]; };
__device__ void load(u32 to, const Map* map, u32 x, u32 y, u64* barrier) {
    ASM("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes.cta_group::1 [%0], [%1, {%2, %3}], [%4];"
        :: "r"(to), "l"(map), "r"(x), "r"(y), "r"(shared(barrier)));
}
struct Stage { unsigned char a[M * K]; unsigned char b[N * K]; };
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __global__ void k(const __grid_constant__ Map a, const __grid_constant__ Map b, float* out) {
    __shared__ u64 full[STAGES], empty[STAGES], ready[2], drained[2];
    __shared__ u32 base;
    const u32 t = threadIdx.x, warp = t / 32, lane = t % 32;
    Stage* stages = (Stage*)memory;
    if (t == 0) {
        for (u32 i = 0; i < STAGES; ++i) { init(&full[i], 1); init(&empty[i], 1); }
        for (u32 i = 0; i < 2; ++i) { init(&ready[i], 1); init(&drained[i], 128); }
    }
    if (warp == 4) { alloc(&base, 64); relinquish(); }
    before();
    __syncthreads();
    after();
    const u32 tm = base;
    if (t == 160) {
        for (u32 i = 0; i < TILES; ++i) {
            const u32 s = i % STAGES;
            if (i >= STAGES) wait(&empty[s], i / STAGES + 1 & 1);
            expect(&full[s], (M + N) * K);
            load(shared(stages[s].a), &a, 0, i * M, &full[s]);
            load(shared(stages[s].b), &b, 0, i * N, &full[s]);
        }
    } else if (t == 128) {
        for (u32 i = 0; i < TILES; ++i) {
            const u32 s = i % STAGES, slot = i & 1;
            DRAINED
            wait(&full[s], i / STAGES & 1);
            AFTER
            for (u32 j = 0; j < 4; ++j)
                asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %4, 0;\n"
                    "tcgen05.mma.cta_group::1.kind::f8f6f4 [%0], %1, %2, %3, p;\n}"
                    :: "r"(tm + slot * N), "l"(desc(shared(stages[s].a) + 32 * j, 0, 1024, 2)), "l"(desc(shared(stages[s].b) + 32 * j, 0, 1024, 2)),
                       "r"(IDESC), "r"(j) : "memory");
            commit(&empty[s]);
            commit(&ready[slot]);
        }
    } else if (warp < 4) {
        for (u32 i = 0; i < TILES; ++i) {
            const u32 slot = i & 1;
            wait(&ready[slot], i / 2 & 1);
            after();
            u32 r[2][16];
            for (u32 half = 0; half < 2; ++half)
                ASM("tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
                    : "=r"(r[half][0]), "=r"(r[half][1]), "=r"(r[half][2]), "=r"(r[half][3]), "=r"(r[half][4]), "=r"(r[half][5]), "=r"(r[half][6]), "=r"(r[half][7]),
                      "=r"(r[half][8]), "=r"(r[half][9]), "=r"(r[half][10]), "=r"(r[half][11]), "=r"(r[half][12]), "=r"(r[half][13]), "=r"(r[half][14]), "=r"(r[half][15])
                    : "r"(tm + slot * N + (warp * 32 + half * 16 << 16)));
            WAIT_LD
            BEFORE
            arrive(&drained[slot]);
            for (u32 half = 0; half < 2; ++half)
                for (u32 e = 0; e < 16; ++e) {
                    const u32 row = i * M + warp * 32 + half * 16 + lane / 4 + e / 2 % 2 * 8, column = e / 4 * 8 + lane % 4 * 2 + e % 2;
                    out[row * N + column] = __uint_as_float(r[half][e]);
                }
        }
    }
    __syncthreads();
    if (warp == 4) dealloc(tm, 64);
}
"""
STEPS = {
    "DRAINED": "if (i >= 2) wait(&drained[slot], i / 2 + 1 & 1);",
    "AFTER": "after();",
    "WAIT_LD": "wait_ld();",
    "BEFORE": "before();",
}


def launch(seed: int = 0, **changed: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    a, b = random_codes(rng, "e4m3", (TILES * M, K)), random_codes(rng, "e5m2", (TILES * N, K))
    source = KERNEL
    for name, text in {
        **STEPS,
        **changed,
        "STAGES": STAGES,
        "TILES": TILES,
        "IDESC": f"{idesc(N, M, 0, NARROW['e5m2'])}u",
    }.items():
        source = source.replace(name, str(text))
    source = f"constexpr u32 M = {M}, N = {N}, K = {K};\n" + DEVICE + source
    machine = Machine("sm103", seed=seed)
    buffers = []
    for codes in (a, b):
        buffers.append(machine.alloc(0, codes.shape, np.uint8))
        buffers[-1].array[:] = codes
    out = machine.alloc(0, (TILES * M, N), np.float32).expect_defined()
    maps = [
        TensorMap("u8", buffer.ptr, (K, rows * TILES), (K,), (K, rows), swizzle="128B")
        for buffer, rows in zip(buffers, (M, N))
    ]
    module = machine.load(to_ptx(source, "sm_103a"))
    machine.launch(module, "k", 1, 192, smem=STAGES * (M + N) * K, args=[[*maps, out]])
    machine.run()
    tiles = []
    for i in range(TILES):
        rows, columns = a[i * M : (i + 1) * M], b[i * N : (i + 1) * N]
        tile = np.zeros((M, N), np.float32)
        for k in range(0, K, 32):
            tile = rounded_sum(
                decode(rows[:, k : k + 32], "e4m3"),
                decode(columns[:, k : k + 32], "e5m2"),
                tile.astype(np.float64),
            )
        tiles.append(tile)
    return out.view.copy(), np.concatenate(tiles)


@pytest.mark.parametrize("seed", range(12))
def test_tiles_in_two_accumulators(seed):
    out, expected = launch(seed)
    assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"DRAINED": ""}, DataRace, r"tcgen05\.(mma|ld).* isn't ordered after .*tcgen05\.(ld|mma)"),
        ({"AFTER": ""}, DataRace, r"tcgen05\.mma.* isn't ordered after .*tcgen05\.ld.*fence::after_thread_sync is missing"),
        ({"BEFORE": ""}, DataRace, r"tcgen05\.mma.* isn't ordered after .*tcgen05\.ld.*fence::before_thread_sync is missing"),
        ({"WAIT_LD": "", "BEFORE": "before(); wait_ld();"}, DataRace, r"tcgen05\.mma.* isn't ordered after .*tcgen05\.ld"),
        ({"WAIT_LD": "", "arrive(&drained[slot]);": "arrive(&drained[slot]); wait_ld();"}, DataRace, r"tcgen05\.(mma|ld).* isn't ordered after .*tcgen05\.(ld|mma)"),
        ({"arrive(&drained[slot]);": ""}, Deadlock, r"waits for phase parity"),
    ],
)  # fmt: skip
def test_a_missing_step_is_reported(changed, error, match):
    for seed in range(4):
        with pytest.raises(error, match=match):
            launch(seed, **changed)
