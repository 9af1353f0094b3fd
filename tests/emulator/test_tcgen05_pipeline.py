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
from megagen.errors import DataRace, Deadlock, EmulatorError, MemoryFault, UninitializedUse
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
    LAST_WAITS
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
    "LAST_WAITS": "for (u32 s = 0; s < STAGES; ++s) wait(&empty[s], (BLOCKS - 1 - s) / STAGES & 1);",
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
    constants = {
        "STAGES": STAGES,
        "BLOCKS": BLOCKS,
        "IDESC": f"{scaled_idesc(N, M, NARROW['e2m1'], NARROW['e4m3'])}u",
    }
    for name, text in {**STEPS, **changed, **constants}.items():
        source = source.replace(name, str(text))
    source = source.replace("c < N", f"c < {N}").replace("* N +", f"* {N} +")
    machine = Machine("sm100", sms=2, seed=seed, **(options or {}))

    def buffer(values: np.ndarray):
        result = machine.alloc(0, values.shape, values.dtype)
        result.array[:] = values
        return result

    scales_a = np.stack(
        [scale_image(sa[r : r + 128, k : k + 4]) for r in (0, 128) for k in range(0, K // 32, 4)]
    )
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


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"AFTER": ""}, DataRace, r"tcgen05\.ld.* isn't ordered after .*tcgen05\.mma.*fence::after_thread_sync is missing"),
        ({"WAIT_LD": ""}, (DataRace, UninitializedUse), r"dealloc.* isn't ordered after .*tcgen05\.ld|undefined"),
        ({"DONE_WAIT": ""}, DataRace, r"tcgen05\.(mma|ld).* isn't ordered after .*tcgen05\.(ld|mma).*its completion"),
        ({"PRODUCER_WAIT": ""}, (DataRace, MemoryFault), r"more than are pending|isn't ordered after"),
        ({"MMA_WAIT": ""}, DataRace, r"tcgen05\.cp|tcgen05\.mma"),
        ({"MMA_WAIT": "wait_relaxed(&full[s], i / STAGES & 1);"}, DataRace, r"the read by .*tcgen05\.(cp|mma).* isn't ordered after the write by .*copy"),
        ({"SCALE_SLOT": "0"}, DataRace, r"tcgen05\.cp.* isn't ordered after .*tcgen05\.(cp|mma)"),
        ({"STAGE_COMMIT": ""}, Deadlock, r"waits for phase parity"),
        ({"STAGE_COMMIT": "commit2(&empty[s], 1);"}, Deadlock, r"waits for phase parity"),
        ({"DONE_COMMIT": ""}, Deadlock, r"waits for phase parity"),
        ({"DONE_COMMIT": "commit2(&done, 2);"}, Deadlock, r"waits for phase parity"),
        ({"LAST_WAITS": ""}, MemoryFault, r"none of its threads has waited for another CTA's tcgen05\.commit"),
        ({"BEFORE_FREE": ""}, DataRace, r"dealloc.* isn't ordered after .*tcgen05\.ld"),
        ({"DEALLOC": ""}, MemoryFault, r"without a tcgen05\.dealloc"),
        ({"DEALLOC": "if (cta == 0) dealloc2(tm, 128);"}, (MemoryFault, Deadlock), r"without a tcgen05\.dealloc|peer"),
    ],
)  # fmt: skip
def test_a_missing_step_is_reported(changed, error, match):
    for seed in range(4):
        with pytest.raises(error, match=match):
            launch(seed, **changed)


def test_reused_scale_columns_where_copies_are_pipelined():
    out, expected = launch(options={"pipelined_copies": True}, SCALE_SLOT="0")
    assert np.array_equal(out, expected)


def test_mixed_groups_are_refused():
    """The assembler refuses a kernel that mixes them, the emulator one whose PTX it gets."""
    text = to_ptx(
        DEVICE
        + 'extern "C" __global__ void k(u32* out) { __shared__ u32 base; alloc(&base, 32); dealloc(base, 32); }',
        "sm_100a",
    )
    machine = Machine("sm100")
    mixed = text.replace("tcgen05.dealloc.cta_group::1", "tcgen05.dealloc.cta_group::2")
    machine.launch(machine.load(mixed), "k", 1, 32, args=[[0]])
    with pytest.raises(EmulatorError, match=r"another \.cta_group"):
        machine.run()


# --- Tensor copies ---

COPY = r"""
struct alignas(64) Map { u64 words[16]; };
extern __shared__ __align__(1024) unsigned char memory[];
extern "C" __global__ void k(const __grid_constant__ Map map, u32 x, u32 y, u32 mask, u32* out) {
    __shared__ u64 full;
    const u32 t = threadIdx.x, cta = rank();
    if (t == 0) { init(&full, 1); if (EXPECTS) expect(&full, EXPECTED); }
    cluster_sync();
    if (t == 0 && cta == 0) { LOAD }
    if (EXPECTS) wait(&full, 0);
    cluster_sync();
    for (u32 i = t; i < BYTES / 4; i += 32) out[cta * BYTES / 4 + i] = ((u32*)memory)[i];
}
"""
LOAD = 'ASM("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{} [%0], [%1, {{%2, %3}}], [%4]{};" :: "r"({}), "l"(&map), "r"(x), "r"(y), "r"({}), "h"((u16)mask));'


def copies(
    tensor: np.ndarray,
    tensor_map: dict,
    corner: tuple[int, int],
    load: str,
    expects: str,
    expected: int,
    nbytes: int,
    ctas: int = 1,
    mask: int = 0,
):
    """Shared memory per CTA after a copy, and its undefined bits."""
    source = (
        COPY.replace("LOAD", load)
        .replace("EXPECTS", expects)
        .replace("EXPECTED", str(expected))
        .replace("BYTES", str(nbytes))
    )
    machine = Machine("sm100", sms=ctas)
    buffer = machine.alloc(0, tensor.shape, tensor.dtype)
    buffer.array[:] = tensor
    out = machine.alloc(0, (ctas, nbytes), np.uint8)
    module = machine.load(to_ptx(DEVICE + source, "sm_100a"))
    arguments = [TensorMap(address=buffer.ptr, **tensor_map), *corner, mask, out]
    machine.launch(module, "k", ctas, 32, cluster=ctas, smem=nbytes, args=[arguments])
    machine.run()
    return out.view.copy(), out.undefined_bits.copy()


ONE = LOAD.format("", "", "shared(memory)", "shared(&full)")


def test_packed_fp4_with_a_tail_in_both_dimensions():
    """A box of 128 x 8 at (128, 3) of a tensor of 256 x 6: 16 elements lie in 8 of 16 bytes, three rows are beyond the
    end and zero, padding is nobody's, and the transaction counts 64 bytes per row."""
    rng = np.random.default_rng(0)
    tensor = rng.integers(0, 256, (6, 128), np.uint8)
    tensor_map = {"element": "u4x16_align16", "dims": (256, 6), "strides": (128,), "box": (128, 8)}
    out, undefined = copies(tensor, tensor_map, (128, 3), ONE, "true", 8 * 64, 1024)
    expected = np.zeros((8, 8, 8), np.uint8)
    expected[:3] = tensor[3:, 64:].reshape(3, 8, 8)
    units = out.reshape(8, 8, 16)
    assert np.array_equal(units[..., :8], expected)
    assert (
        not undefined.reshape(8, 8, 16)[..., :8].any() and (undefined.reshape(8, 8, 16)[..., 8:] == 255).all()
    )


def test_packed_fp4_swizzled():
    """The 16-byte units of a row of 128 bytes are permuted by the row's number."""
    tensor = np.random.default_rng(0).integers(0, 256, (8, 64), np.uint8)
    tensor_map = {
        "element": "u4x16_align16",
        "dims": (128, 8),
        "strides": (64,),
        "box": (128, 8),
        "swizzle": "128B",
    }
    out, _ = copies(tensor, tensor_map, (0, 0), ONE, "true", 8 * 64, 1024)
    units = out.reshape(8, 8, 16)[..., :8]
    for row, unit in np.ndindex(8, 8):
        assert np.array_equal(units[row, unit ^ row], tensor[row, 8 * unit : 8 * unit + 8])


def test_packed_fp4_cannot_be_stored():
    store = 'ASM("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" :: "l"(&map), "r"(x), "r"(y), "r"(shared(memory)));'
    tensor_map = {"element": "u4x16_align16", "dims": (256, 6), "strides": (128,), "box": (128, 8)}
    with pytest.raises(MemoryFault, match="16U4_ALIGN16B tensors can be loaded only"):
        copies(np.zeros((6, 128), np.uint8), tensor_map, (0, 0), store, "false", 0, 1024)


def test_packed_fp6_and_dense_fp4():
    tensor = np.random.default_rng(0).integers(0, 256, (4, 96), np.uint8)
    tensor_map = {"element": "u6x16_align16", "dims": (128, 4), "strides": (96,), "box": (128, 4)}
    out, undefined = copies(tensor, tensor_map, (0, 0), ONE, "true", 4 * 96, 512)
    assert np.array_equal(out.reshape(4, 8, 16)[..., :12], tensor.reshape(4, 8, 12))
    assert (undefined.reshape(4, 8, 16)[..., 12:] == 255).all()
    tensor_map = {"element": "u4x16_align8", "dims": (160, 4), "strides": (96,), "box": (64, 4)}
    out, undefined = copies(tensor, tensor_map, (128, 0), ONE, "true", 4 * 32, 128)
    expected = np.zeros((4, 32), np.uint8)
    expected[:, :16] = tensor[:, 64:80]  # 32 of the 64 elements exist
    assert np.array_equal(out.reshape(4, 32), expected) and not undefined.any()


BYTES_MAP = {"element": "u8", "dims": (64, 8), "strides": (64,), "box": (64, 4)}


@pytest.mark.parametrize(
    "barrier", ["shared(&full) & 0xFEFFFFFF", "peer(shared(&full), 1)", "shared(&full) | 1 << 24"]
)
def test_a_copy_that_signals_the_peer(barrier):
    """CTA 0 copies to CTA 1's shared memory and signals the even or the odd one of them."""
    tensor = np.random.default_rng(0).integers(0, 256, (8, 64), np.uint8)
    load = LOAD.format(".cta_group::2", "", "peer(shared(memory), 1)", barrier)
    waits = "cta == 0" if "FEFF" in barrier else "cta == 1"
    out, undefined = copies(tensor, BYTES_MAP, (0, 4), load, waits, 256, 256, 2)
    assert np.array_equal(out[1].reshape(4, 64), tensor[4:]) and (undefined[0] == 255).all()


def test_a_multicast_that_signals_the_leaders():
    """To all four CTAs; the even one of each pair gets the bytes of both."""
    tensor = np.random.default_rng(0).integers(0, 256, (8, 64), np.uint8)
    load = LOAD.format(
        ".multicast::cluster.cta_group::2", ", %5", "shared(memory)", "shared(&full) & 0xFEFFFFFF"
    )
    out, _ = copies(tensor, BYTES_MAP, (0, 4), load, "cta % 2 == 0", 512, 256, 4, 0b1111)
    assert all(np.array_equal(image.reshape(4, 64), tensor[4:]) for image in out)


def test_a_copy_can_signal_only_the_pair():
    tensor = np.zeros((8, 64), np.uint8)
    load = LOAD.format(".cta_group::2", "", "peer(shared(memory), 1)", "peer(shared(&full), 2)")
    with pytest.raises(MemoryFault, match="destination's CTA or its peer"):
        copies(tensor, BYTES_MAP, (0, 0), load, "cta == 2", 256, 256, 4)
    load = LOAD.format("", "", "peer(shared(memory), 1)", "shared(&full)")
    with pytest.raises(MemoryFault, match="in one CTA's shared memory"):
        copies(tensor, BYTES_MAP, (0, 0), load, "cta == 0", 256, 256, 4)
