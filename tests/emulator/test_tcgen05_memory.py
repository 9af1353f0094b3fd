"""Tensor memory: allocation, loads and stores of every shape, copies from shared memory, shifts."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import ptx_kernel, to_ptx
from tcgen05_kernel import DEVICE, run
from tcgen05_operands import k_major

from megagen.emulator import Machine
from megagen.errors import Deadlock, EmulatorError, MemoryFault, UnsupportedInstruction

REGISTERS = {"16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1, "16x32bx2": 1}
SPLIT = 64
"""Columns between the two halves of .16x32bx2."""


def cell(shape: str, lane: int, register: int, pack: int = 1) -> tuple[int, int]:
    """Lane and column of a thread's register, by the ISA's figures of matrix fragments; ``pack`` columns each."""
    column = {
        "32x32b": register,
        "16x64b": lane // 2 % 2 + 2 * register,
        "16x128b": lane % 4 + 4 * (register // 2),
        "16x256b": register % 2 + 2 * (lane % 4) + 8 * (register // 4),
        "16x32bx2": register,
    }[shape]
    row = {
        "32x32b": lane,
        "16x64b": lane // 4 + 8 * (lane % 2),
        "16x128b": lane // 4 + 8 * (register % 2),
        "16x256b": lane // 4 + 8 * (register // 2 % 2),
        "16x32bx2": lane % 16,
    }[shape]
    return row, column * pack + (SPLIT * (lane // 16) if shape == "16x32bx2" else 0)


MOVE = r"""
extern "C" __global__ void k(const u32* start, const u32* values, u32* out) {
    __shared__ u32 base;
    const u32 t = threadIdx.x, quarter = t / 32 * 32;
    if (t < 32) alloc(&base, 128);
    __syncthreads();
    const u32 tm = base + (quarter << 16);
    for (u32 c = 0; c < 128; c += 8) st8(tm + c, start + t * 128 + c);
    wait_st();
    u32 r[COUNT];
    for (u32 i = 0; i < COUNT; ++i) r[i] = values[t * COUNT + i];
    MOVE
    for (u32 i = 0; i < COUNT; ++i) out[t * COUNT + i] = r[i];
    for (u32 c = 0; c < 128; c += 8) {
        u32 x[8]; ld8(tm + c, x); wait_ld();
        for (u32 k = 0; k < 8; ++k) out[128 * COUNT + t * 128 + c + k] = x[k];
    }
    before();
    __syncthreads();
    if (t < 32) dealloc(base, 128);
}
"""


def move(
    instruction: str, count: int, start: np.ndarray, values: np.ndarray, results: int = 0, arch: str = "sm100"
):
    """Registers [thread, count], words [lane, column] of tensor memory, and its undefined bits, after ``instruction``.

    The instruction names its registers {R}, its address {A}.
    """
    names = ", ".join(f"%{i}" for i in range(count - results))
    constraint = '"+r"' if ".ld" in instruction else '"r"'
    ops = ", ".join(f"{constraint}(r[{i}])" for i in range(count))
    text = (
        instruction.replace("{R}", f"{{{names}}}")
        .replace("{A}", f"[%{count}]")
        .replace("{V}", f"%{count - 1}")
    )
    if ".ld" in instruction:
        asm = f'ASM("{text};" : {ops} : "r"(tm)); wait_ld();'
    else:
        asm = f'ASM("{text};" :: {ops}, "r"(tm)); wait_st();'
    source = MOVE.replace("MOVE", asm).replace("COUNT", str(count))
    machine = Machine(arch)
    first, given = machine.alloc(0, (128, 128), np.uint32), machine.alloc(0, (128, count), np.uint32)
    first.array[:], given.array[:] = start, values
    out = machine.alloc(0, 128 * (count + 128), np.uint32)
    module = machine.load(to_ptx(DEVICE + source, f"sm_{arch[2:]}a"))
    machine.launch(module, "k", 1, 128, args=[[first, given, out]])
    machine.run()
    split = 128 * count
    undefined = out.undefined_bits.view(np.uint32)[split:].reshape(128, 128).copy()
    return out.view[:split].reshape(128, count).copy(), out.view[split:].reshape(128, 128).copy(), undefined


def words(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


SHAPES = [
    ("16x64b", 1), ("16x64b", 4), ("16x128b", 1), ("16x128b", 8), ("16x256b", 1), ("16x256b", 2), ("16x256b", 16),
    ("32x32b", 1), ("32x32b", 2), ("32x32b", 32), ("32x32b", 128), ("16x32bx2", 2), ("16x32bx2", 16), ("16x32bx2", 64),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "num"), SHAPES)
def test_load_and_store(shape, num):
    """tcgen05.ld.sync.aligned.16x64b.x4.b32, tcgen05.st.sync.aligned.16x128b.x8.b32 and the others."""
    count = REGISTERS[shape] * num
    start, values = words((128, 128)), words((128, count), 1)
    half = f", {SPLIT}" if shape == "16x32bx2" else ""
    loaded, memory, _ = move(
        f"tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {{R}}, {{A}}{half}", count, start, values
    )
    _, stored, _ = move(
        f"tcgen05.st.sync.aligned.{shape}.x{num}.b32 {{A}}{half}, {{R}}", count, start, values
    )
    after = start.copy()
    for thread in range(128):
        for r in range(count):
            lane, column = cell(shape, thread % 32, r)
            lane += thread // 32 * 32
            assert loaded[thread, r] == start[lane, column]
            after[lane, column] = values[thread, r]
    assert np.array_equal(memory, start) and np.array_equal(stored, after)


@pytest.mark.parametrize(
    ("shape", "num"), [("32x32b", 4), ("16x64b", 2), ("16x128b", 1), ("16x256b", 4), ("16x32bx2", 2)]
)
def test_packed_load_and_unpacked_store(shape, num):
    """tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 joins the low halves of two columns,
    tcgen05.st.sync.aligned.32x32b.x4.unpack::16b.b32 takes a register apart."""
    count = REGISTERS[shape] * num
    start, values = words((128, 128)), words((128, count), 1)
    half = f", {SPLIT}" if shape == "16x32bx2" else ""
    loaded, _, _ = move(
        f"tcgen05.ld.sync.aligned.{shape}.x{num}.pack::16b.b32 {{R}}, {{A}}{half}", count, start, values
    )
    _, stored, undefined = move(
        f"tcgen05.st.sync.aligned.{shape}.x{num}.unpack::16b.b32 {{A}}{half}, {{R}}", count, start, values
    )
    written = np.zeros((128, 128), bool)
    for thread in range(128):
        for r in range(count):
            lane, column = cell(shape, thread % 32, r, 2)
            lane += thread // 32 * 32
            low, high = start[lane, column] & 0xFFFF, start[lane, column + 1] & 0xFFFF
            assert loaded[thread, r] == low | high << 16
            assert stored[lane, column] & 0xFFFF == values[thread, r] & 0xFFFF
            assert stored[lane, column + 1] & 0xFFFF == values[thread, r] >> 16
            written[lane, column : column + 2] = True
    assert np.array_equal(undefined, np.where(written, 0xFFFF0000, 0))
    assert np.array_equal(stored[~written], start[~written])


def test_load_with_a_reduction():
    """tcgen05.ld.red.sync.aligned.32x32b.x4.max.s32 and tcgen05.ld.red.sync.aligned.16x32bx2.x2.min.f32 among them."""
    start = words((128, 128))
    loaded, _, _ = move(
        "tcgen05.ld.red.sync.aligned.32x32b.x4.max.s32 {R}, {V}, {A}", 5, start, words((128, 5)), 1, "sm103"
    )
    assert np.array_equal(loaded[:, :4], start[:, :4])
    assert np.array_equal(loaded[:, 4].view(np.int32), start[:, :4].view(np.int32).max(1))
    loaded, _, _ = move(
        "tcgen05.ld.red.sync.aligned.32x32b.x8.min.u32 {R}, {V}, {A}", 9, start, words((128, 9)), 1, "sm103"
    )
    assert np.array_equal(loaded[:, 8], start[:, :8].min(1))
    floats = np.random.default_rng(3).normal(size=(128, 128)).astype(np.float32)
    floats[5, 1] = np.nan
    for form, expected in [("min", np.fmin.reduce), ("min.abs.NaN", lambda v, axis: np.abs(v).min(axis))]:
        loaded, _, _ = move(
            f"tcgen05.ld.red.sync.aligned.16x32bx2.x2.{form}.f32 {{R}}, {{V}}, {{A}}, {SPLIT}",
            3,
            floats.view(np.uint32),
            words((128, 3)),
            1,
            "sm103",
        )
        rows = np.concatenate(
            [
                [floats[32 * w + t % 16, [0, 1] + SPLIT * np.array(t // 16)] for t in range(32)]
                for w in range(4)
            ]
        )
        actual, wanted = loaded[:, 2].view(np.float32), expected(rows, axis=1)
        assert np.array_equal(actual, wanted, equal_nan=True)


# --- tcgen05.cp ---

COPIES = {
    "128x256b": (128, 32, lambda r: [r]),
    "4x256b": (4, 32, lambda r: [32 * r]),
    "128x128b": (128, 16, lambda r: [r]),
    "64x128b.warpx2::02_13": (64, 16, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 16, lambda r: [r // 32 * 64 + r % 32, r // 32 * 64 + r % 32 + 32]),
    "32x128b.warpx4": (32, 16, lambda r: [r, r + 32, r + 64, r + 96]),
}
"""Rows, bytes per row, and the lanes that a row goes to.

For instance tcgen05.cp.cta_group::1.128x256b or tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 or also
tcgen05.cp.cta_group::1.32x128b.warpx4.b8x16.b6x16_p32 with a conversion.
"""


def copy(form: str, descriptor: str, group: int = 1, column: int = 4) -> str:
    return f'ASM("tcgen05.cp.cta_group::{group}.{form} [%0], %1;" :: "r"(tm + {column}), "l"({descriptor}));'


@pytest.mark.parametrize("form", COPIES)
@pytest.mark.parametrize(
    ("mode", "leading", "stride"), [(0, 4096, 128), (2, 0, 1024), (4, 0, 512), (6, 0, 256)]
)
def test_copy(form, mode, leading, stride):
    rows, width, lanes = COPIES[form]
    data = np.random.default_rng(0).integers(0, 256, (rows, width), np.uint8)
    image = k_major(data, mode, leading, stride)
    out = run(copy(form, f"desc(s, {leading}, {stride}, {mode})"), image)
    expected = np.zeros((128, 32), np.uint32)
    undefined = np.full((128, 32), 0xFFFFFFFF, np.uint32)
    for r in range(rows):
        for lane in lanes(r):
            expected[lane, 4 : 4 + width // 4] = data[r].view(np.uint32)
            undefined[lane, 4 : 4 + width // 4] = 0
    assert np.array_equal(out.undefined, undefined)
    assert np.array_equal(np.where(undefined, 0, out.words), expected)


@pytest.mark.parametrize(("source", "width"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_decompressing_copy(source, width):
    """16 elements of 4 or 6 bits, then padding, become 16 bytes: 4 bits in the middle, 6 bits at the bottom."""
    rng = np.random.default_rng(0)
    elements = rng.integers(0, 1 << width, (128, 2, 16))
    data = rng.integers(0, 256, (128, 2, 16), np.uint8)
    for r, unit in np.ndindex(128, 2):
        stream = sum(int(e) << (width * k) for k, e in enumerate(elements[r, unit]))
        data[r, unit, : 2 * width] = np.frombuffer(stream.to_bytes(2 * width, "little"), np.uint8)
    image = k_major(data.reshape(128, 32), 0, 2048, 128)
    out = run(copy(f"128x256b.b8x16.{source}", "desc(s, 2048, 128, 0)"), image)
    shift = 2 if width == 4 else 0
    expected = (elements << shift).astype(np.uint8).reshape(128, 32).view(np.uint32)
    assert np.array_equal(out.words[:, 4:12], expected) and not out.undefined[:, 4:12].any()


def test_copy_by_two_ctas():
    """Each CTA copies from its own shared memory into its own tensor memory."""
    data = np.random.default_rng(0).integers(0, 256, (2, 128, 16), np.uint8)
    image = np.stack([k_major(d, 0, 0, 128) for d in data])
    out = run(copy("128x128b", "desc(s, 0, 128, 0)", 2), image, pair=True)
    assert np.array_equal(out.words[:, :, 4:8], data.view(np.uint32).reshape(2, 128, 4))


def test_copy_to_a_lane_and_from_the_end_of_a_swizzle_pattern():
    data = np.random.default_rng(0).integers(0, 256, (8, 32), np.uint8)
    image = np.concatenate([np.zeros(2048, np.uint8), k_major(data, 2, 0, 1024)])
    body = 'ASM("tcgen05.cp.cta_group::1.4x256b [%0], %1;" :: "r"(tm + (5 << 16)), "l"(desc(s + 2048, 0, 1024, 2)));'
    out = run(body, image)
    assert np.array_equal(out.words[5::32, :8], data[:4].view(np.uint32))
    # Rows 4 to 7 begin 512 bytes into the pattern: base offset 4 makes it count from there.
    shifted = np.concatenate(
        [np.zeros(512, np.uint8), k_major(data[:4], 2, 0, 1024), np.zeros(512, np.uint8)]
    )
    out = run(copy("4x256b", "desc(s + 512, 0, 1024, 2) | (u64)4 << 49"), shifted)
    assert np.array_equal(out.words[::32, 4:12], data[:4].view(np.uint32))


def test_shift():
    """32 bytes of each lane of a quarter but the last move to the next lane."""
    start = words((128, 32))
    expected = start.copy()
    expected[33:64, 8:16] = start[32:63, 8:16]
    for form in (
        "tcgen05.shift.cta_group::1.down ",
        "tcgen05.shift.down.cta_group::1 ",
    ):  # syntax and examples of the ISA
        body = f'ASM("{form} [%0];" :: "r"(tm + 8 + (32 << 16)));'
        assert np.array_equal(run(body, np.zeros(16, np.uint8), start=start).words, expected)


# --- Allocation ---


def allocate(
    body: str,
    grid: int = 1,
    sms: int = 1,
    block: int = 32,
    cluster: int = 1,
    seed: int = 0,
    arch: str = "sm100",
):
    machine = Machine(arch, sms=sms, seed=seed)
    out = machine.alloc(0, (grid, 64), np.uint32)
    text = f'extern "C" __global__ void k(u32* out) {{ __shared__ u32 base[8]; out += blockIdx.x * 64; const u32 t = threadIdx.x; {body} }}'
    machine.launch(
        machine.load(to_ptx(DEVICE + text, "sm_100a")), "k", grid, block, cluster=cluster, args=[[out]]
    )
    machine.run()
    return out.view.copy()


def test_allocations_are_disjoint_and_aligned():
    seen = set()
    for seed in range(8):
        body = """alloc(&base[0], 128); alloc(&base[1], 128); alloc(&base[2], 64); alloc(&base[3], 32);
            for (u32 i = 0; i < 4; ++i) if (t == 0) out[i] = base[i];
            dealloc(base[1], 128); alloc(&base[4], 32); if (t == 0) out[4] = base[4];
            dealloc(base[0], 128); dealloc(base[2], 64); dealloc(base[3], 32); dealloc(base[4], 32); relinquish();"""
        a, b, c, d, e = (int(v) for v in allocate(body, seed=seed)[0, :5])
        ranges = [set(range(x, x + n)) for x, n in ((a, 128), (b, 128), (c, 64), (d, 32))]
        assert len(set().union(*ranges)) == 352 and max(max(r) for r in ranges) < 512
        assert not set(range(e, e + 32)) & (ranges[0] | ranges[2] | ranges[3])
        seen.add(a)
    assert len(seen) > 1  # no kernel may rely on where it is


def test_ctas_of_one_sm_share_its_tensor_memory():
    """Eight CTAs that want half of it each take turns."""
    body = "alloc(&base[0], 256); if (t == 0) out[0] = base[0]; relinquish(); __nanosleep(100); dealloc(base[0], 256);"
    for seed in range(3):
        assert set(allocate(body, grid=8, seed=seed)[:, 0]) <= {0, 256}


def test_an_allocation_that_nobody_frees_for():
    with pytest.raises(Deadlock, match="waits for 512 free columns of tensor memory"):
        allocate("alloc(&base[0], 512); alloc(&base[1], 512); dealloc(base[0], 512); dealloc(base[1], 512);")


@pytest.mark.parametrize(
    ("body", "error", "match"),
    [
        ("alloc(&base[0], 48);", EmulatorError, "48 columns: must be a power of two"),
        ("alloc(&base[0], 16);", EmulatorError, "16 columns"),
        ("alloc(&base[0], 32); alloc(&base[1], 64);", EmulatorError, "64 columns after one of 32"),
        ("relinquish(); alloc(&base[0], 32);", EmulatorError, "after tcgen05.relinquish_alloc_permit"),
        ("alloc(&base[0], 64);", MemoryFault, "without a tcgen05.dealloc"),
        ("alloc(&base[0], 64); dealloc(base[0], 32);", MemoryFault, "no such allocation"),
        ("alloc(&base[0], 64); dealloc(base[0], 64); dealloc(base[0], 64);", MemoryFault, "no such allocation"),
        ("alloc2(&base[0], 64);", EmulatorError, "needs a peer CTA"),
        ("if (t < 16) alloc(&base[0], 64);", EmulatorError, "needs all lanes"),
    ],
)  # fmt: skip
def test_allocation_rules(body, error, match):
    block = 16 if "t < 16" in body else 32
    with pytest.raises(error, match=match):
        allocate(body, block=block)


def test_pairs_allocate_the_same_columns_together():
    body = "alloc2(&base[0], 128); if (t == 0) out[0] = base[0]; cluster_sync(); dealloc2(base[0], 128);"
    for seed in range(4):
        columns = allocate(body, grid=4, sms=4, cluster=2, seed=seed)[:, 0]
        assert columns[0] == columns[1] and columns[2] == columns[3]
    with pytest.raises(EmulatorError, match="allocate different tensor memory together"):
        allocate("alloc2(&base[0], rank() ? 64 : 128);", grid=2, sms=2, cluster=2)
    with pytest.raises(Deadlock, match="waits for the peer CTA"):
        allocate(
            "alloc2(&base[0], 64); if (rank()) dealloc2(base[0], 64); cluster_sync(); if (!rank()) dealloc2(base[0], 64);",
            grid=2,
            sms=2,
            cluster=2,
        )


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("ld8(tm, r);", r"lanes 0 to 31: warp 1 reaches lanes 32 to 63 only"),
        ("ld8(tm + (t / 32 * 32 << 16) + 56, r);", r"columns \d+ to \d+ of CTA .* aren't all allocated|lane \d+, columns 5\d\d"),
        ("ld8(tm + (t / 32 * 32 + 16 << 16), r);", r"from a multiple of 32 on"),
        ("st8((t / 32 * 32 << 16) + 511, r);", r"there are 128 lanes and 512 columns|aren't all allocated"),
    ],
)  # fmt: skip
def test_access_rules(body, match):
    text = f"if (t < 32) alloc(&base[0], 32); __syncthreads(); const u32 tm = base[0]; u32 r[8] = {{}}; if (t / 32 == 1) {{ {body} wait_ld(); wait_st(); }} if (t == 999) out[1] = r[0];"
    with pytest.raises(MemoryFault, match=match):
        allocate(text, block=64)


def test_hopper_has_none():
    with pytest.raises(UnsupportedInstruction, match="need sm_100"):
        allocate("alloc(&base[0], 32); dealloc(base[0], 32);", arch="sm90")


def test_one_thread_issues():
    with pytest.raises(EmulatorError, match="32 threads execute this instruction"):
        allocate('ASM("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%0];" :: "l"(base));')


@pytest.mark.parametrize(
    ("instruction", "match"),
    [
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r0}, [%r1];", "no such repetition"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0}, [%r1];", "1 registers where 2 were expected"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x1.max.u32 {%r0}, %r2, [%r1];", "needs .x2 or more"),
        ("tcgen05.cp.cta_group::1.128x128b.b8x16 [%r0], %rd0;", "a destination and a source format"),
        ("tcgen05.cp.cta_group::1.64x128b [%r0], %rd0;", "this form isn't implemented"),
        ("tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::4X [%r0], %rd0, %rd1, %r1, [%r2], [%r3], %p0;", "isn't implemented"),
        ("tcgen05.mma.cta_group::1.kind::f16 [%r0], %rd0, %rd1, %r1, {%r2, %r3}, %p0;", "four registers per CTA"),
        ("tcgen05.mma.cta_group::1.kind::i8 [%r0], %rd0, %rd1, %r1, %p0, 2;", "scale-input-d must be"),
        ("tcgen05.mma.cta_group::1.kind::f16.ashift [%r0], [%r2], %rd1, %r1, %p0;", "isn't implemented"),
        ("tcgen05.mma.sp.cta_group::1.kind::f16 [%r0], %rd0, %rd1, [%r1], %r2, %p0;", "isn't implemented"),
    ],
)  # fmt: skip
def test_instructions_that_are_refused(instruction, match):
    """With their text and section of the ISA."""
    text = ptx_kernel(instruction).replace("sm_90a", "sm_100a")
    with pytest.raises(
        UnsupportedInstruction, match=rf"tcgen05\.[\s\S]*{match}[\s\S]*see PTX ISA, TensorCore 5th Generation"
    ):
        Machine("sm100").load(text)
