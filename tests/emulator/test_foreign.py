"""Kernels in other idioms than the templates': PTX that nvcc made of foreign/*.cu, with known results."""

import struct
from functools import cache
from itertools import product
from pathlib import Path

import native
import numpy as np
import pytest
from hw import streams

from megagen.emulator import Machine
from megagen.tensor_map import TensorMap, encode_for_emulator

FOLDER = Path(__file__).parent / "foreign"
SEEDS = range(3)


@cache
def ptx(name: str) -> str:
    return (FOLDER / f"{name}.ptx").read_text()


def upload(machine: Machine, array: np.ndarray, rank: int = 0):
    buffer = machine.alloc(rank, array.shape, array.dtype)
    buffer.array[:] = array
    return buffer


PARTICLE = np.dtype([("at", "<f8", 3), ("mass", "<f4"), ("tag", "<i2"), ("name", "i1", 3), ("pad", "u1", 7)])
WEIGHTS = [1, -2, 3, -4, 5, -6, 7, -8]


def walk(root: int, limit: int) -> int:
    stack, total, sign = [root], 0, 1
    while stack:
        node = stack.pop()
        if node <= limit:
            total, sign = total + sign * node, -sign
            stack += [2 * node + 1, 2 * node]
    return total


def choose(kind: int, value: int) -> int:
    return [value + 7, value * WEIGHTS[value & 7], ~value, value << 3, -1][kind]


def test_functions_structs_and_local_memory_without_optimization():
    count, steps, order = 48, 3, [3, 1, 4, 1, 5]
    particles = np.zeros(count, PARTICLE)
    particles["at"] = streams.below(10, 3 * count, 9).reshape(count, 3) - 4
    particles["mass"] = np.arange(count)
    particles["tag"] = np.arange(count) * 3 - 50
    particles["name"] = streams.below(11, 3 * count, 40).reshape(count, 3)
    values = streams.below(12, 64, 200) - 100
    machine = Machine("sm90", sms=2)
    bodies, inputs = upload(machine, particles), upload(machine, values.astype(np.int32))
    out = machine.alloc(0, (count, 5), np.int32)
    shift = (1.0, -2.0, 3.0)
    settings = struct.pack("<i4x3d5B3x", steps, *shift, *order)
    module = machine.load(ptx("functions"), (FOLDER / "functions.cu").read_text())
    machine.launch(module, "functions", 2, count // 2, args=[[bodies, inputs, out, settings]])
    machine.run()

    moved = bodies.view
    expected = particles["at"].copy()
    for _ in range(steps):
        expected = np.cross(expected, shift)
    assert np.array_equal(moved["at"], expected)
    assert np.array_equal(moved["mass"], particles["mass"] / 2)
    assert np.array_equal(moved["tag"], particles["tag"] - np.array(order)[particles["tag"] & 3])
    assert np.array_equal(moved["name"][:, 1], particles["name"][:, 0] + particles["name"][:, 2])
    for t in range(count):
        power = np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]])
        for _ in range(t % 4):
            power = power @ power
        median = sorted(values[[(t + 5 * i) & 63 for i in range(9)]])[4]
        first = [power[0, 1] * 100 + power[2, 0], median, walk(1 + t % 5, 40 + t)]
        assert out.view[t].tolist() == [*first, choose(t % 5, int(values[t])), 1]


@pytest.mark.parametrize("seed", SEEDS)
def test_histogram_in_the_shared_memory_of_a_cluster(seed):
    values = streams.below(20 + seed, 1000, 5000).astype(np.int32)
    machine = Machine("sm90", sms=4, seed=seed)
    bins, sums = machine.alloc(0, 512, np.int32), machine.alloc(0, (4, 4), np.int32)
    module = machine.load(ptx("histogram"))
    machine.launch(module, "histogram", 4, 64, 4, args=[[upload(machine, values), len(values), bins, sums]])
    machine.run()
    assert np.array_equal(bins.view, np.bincount(values % 512, minlength=512))
    owner = np.arange(len(values)) // 64 % 4
    totals = np.cumsum(np.bincount(owner, values)[:4]).astype(int)
    assert sums.view.tolist() == [totals.tolist()] * 4


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_barriers_and_atomics_of_the_standard_library(seed):
    blocks, chunks, threads = 3, 3, 128
    values = (streams.below(30, blocks * chunks * 256, 17) - 8).astype(np.float16)
    machine = Machine("sm90", sms=4, seed=seed)
    out, total = machine.alloc(0, (blocks, threads), np.float32), upload(machine, np.zeros(1, np.float32))
    turn = upload(machine, np.zeros(1, np.uint32))
    arguments = [upload(machine, values), out, turn, total, chunks]
    machine.launch(machine.load(ptx("pipeline")), "pipeline", blocks, threads, args=[arguments])
    machine.run()
    pairs = values.reshape(blocks, chunks, threads, 2)[:, :, np.arange(threads) ^ 1].astype(np.float32)
    expected = (2 * pairs[..., 0] + 1 + np.maximum(2 * pairs[..., 1] - 1, 0)).sum(axis=1)
    assert np.array_equal(out.view, expected)
    assert total.view[0] == expected.sum() and turn.view[0] == blocks


TENSORS = {  # sizes, box, where the boxes start (dimension 0 first)
    1: ((100,), (32,), [(0,), (32,), (88,)]),
    2: ((20, 9), (8, 4), [(0, 0), (8, 4), (16, 8)]),
    3: ((12, 6, 5), (8, 3, 2), [(0, 0, 0), (4, 2, 3), (4, 2, 3)]),
    4: ((8, 5, 4, 3), (4, 2, 3, 2), [(0, 0, 0, 0), (4, 4, 2, 2)]),
    5: ((8, 4, 3, 3, 3), (4, 2, 2, 2, 2), [(0, 0, 0, 0, 0), (4, 3, 1, 2, 2)]),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rank", TENSORS)
def test_tensor_maps_of_every_rank(rank, seed):
    sizes, box, places = TENSORS[rank]
    before = (streams.below(40 + rank, int(np.prod(sizes)), 1000) - 500).astype(np.int32).reshape(sizes[::-1])
    target = (streams.below(50 + rank, before.size, 1000) - 500).astype(np.int32).reshape(sizes[::-1])
    machine = Machine("sm90", sms=len(places), seed=seed)
    buffers = [upload(machine, before), upload(machine, target)]
    strides = tuple(4 * int(n) for n in np.cumprod(sizes)[:-1])
    maps = b"".join(encode_for_emulator(TensorMap("s32", b.ptr, sizes, strides, box)) for b in buffers)
    elements = int(np.prod(box))
    positions = upload(machine, np.array(places, np.int32))
    module = machine.load(ptx("tensors"))
    arguments = [maps, positions, elements]
    machine.launch(module, f"shift_{rank}d", len(places), 64, smem=4 * elements, args=[arguments])
    machine.run()

    expected = target.copy()
    for number, place in enumerate(places, start=1):
        for index in product(*(range(n) for n in box)):
            at = tuple(p + i for p, i in zip(place, index))[::-1]
            if any(a >= n for a, n in zip(at, before.shape)):
                continue
            value = before[at] + number
            expected[at] = {3: expected[at] + value, 5: max(expected[at], value)}.get(rank, value)
    assert np.array_equal(buffers[1].view, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_wgmma_with_both_operands_in_shared_memory(seed):
    """Multicast in a cluster of two, 128-byte swizzle, a producer and two consumers that trade registers."""
    depth, columns = 320, 4 * 64
    a = (streams.below(60, 64 * depth, 9) - 4).astype(np.float16).reshape(64, depth)
    b = (streams.below(61, columns * depth, 9) - 4).astype(np.float16).reshape(columns, depth)
    machine = Machine("sm90", sms=4, seed=seed)
    out = machine.alloc(0, (64, columns), np.float32)

    def tensor(array: np.ndarray, rows: int) -> TensorMap:
        address = upload(machine, array).ptr
        return TensorMap("f16", address, array.shape[::-1], (2 * depth,), (64, rows), swizzle="128B")

    arguments = [tensor(a, 32), tensor(b, 64), out, depth]
    machine.launch(
        machine.load(ptx("gemm_ss")), "gemm_ss", 4, 384, 2, smem=2 * (64 + 64) * 128, args=[arguments]
    )
    report = machine.run()
    assert np.array_equal(out.view, a.astype(np.float32) @ b.astype(np.float32).T)
    assert report.matrix_operations == 4 * 2 * depth // 16


@pytest.mark.parametrize("seed", SEEDS)
def test_wgmma_with_bfloat16_in_registers(seed):
    a, b = (streams.below(70 + i, rows * 16, 33) - 16 for i, rows in enumerate((64, 16)))
    start = (streams.below(72, 64 * 16, 100) - 50).astype(np.float32).reshape(64, 16)
    machine = Machine("sm90", seed=seed)
    operands = [
        upload(machine, (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)) for x in (a, b)
    ]
    out = upload(machine, start)
    machine.launch(machine.load(ptx("gemm_rs")), "gemm_bf16", 1, 128, args=[[*operands, out, 0.5]])
    machine.run()
    assert np.array_equal(out.view, start + 0.5 * a.reshape(64, 16) @ b.reshape(16, 16))


@pytest.mark.parametrize("seed", SEEDS)
def test_wgmma_with_fp8_in_registers(seed):
    """E5M2 holds -4 to 4 exactly, E4M3 -8 to 8."""
    a, b, c = (
        streams.below(80 + i, rows * 32, 2 * m + 1) - m
        for i, (rows, m) in enumerate(((64, 4), (16, 8), (16, 8)))
    )
    machine = Machine("sm90", seed=seed)
    codes = [native.encode(x, fmt).astype(np.uint8) for x, fmt in ((a, "e5m2"), (b, "e4m3"), (c, "e4m3"))]
    out = machine.alloc(0, (64, 16), np.float32)
    buffers = [upload(machine, code) for code in codes]
    machine.launch(machine.load(ptx("gemm_rs")), "gemm_fp8", 1, 128, args=[[*buffers, out]])
    machine.run()
    assert np.array_equal(out.view, a.reshape(64, 32) @ (b - c).reshape(16, 32).T)


@pytest.mark.parametrize("seed", SEEDS)
def test_mailboxes_of_two_ranks(seed):
    blocks, threads = 3, 64
    machine = Machine("sm90", ranks=2, sms=blocks, seed=seed)
    ids = [streams.below(90 + rank, blocks * threads, 40).reshape(blocks, threads) - 4 for rank in range(2)]
    for values in ids:  # no zeros, and a first one that stands in for those that are missing
        values[values == 0] = 7
        values[0, 0] = 3
    weights = [streams.below(95 + rank, blocks * threads, 9).reshape(blocks, threads) for rank in range(2)]
    rows = [machine.alloc(rank, (blocks, 32, 4), np.float32) for rank in range(2)]
    arrived, done = ([upload(machine, np.zeros(1, t), r) for r in range(2)] for t in (np.int32, np.uint64))
    totals = [upload(machine, np.zeros(2, np.uint64), rank) for rank in range(2)]
    counts = [upload(machine, np.zeros(3, np.uint32), rank) for rank in range(2)]
    arguments = []
    for rank in range(2):
        fields = [buffers[r].ptr for r in (rank, 1 - rank) for buffers in (rows, arrived, done)]
        fields.append(upload(machine, ids[rank].astype(np.int64), rank).ptr)
        fields.append(upload(machine, weights[rank].astype(np.float32), rank).ptr)
        fields += [totals[rank].ptr, counts[rank].ptr]
        arguments.append([struct.pack("<10Qi4x", *fields, blocks)])
    machine.launch(machine.load(ptx("mailbox")), "mailbox", blocks, threads, args=arguments)
    machine.run()

    for rank in range(2):
        sent, weight = ids[1 - rank], weights[1 - rank]
        kept = int(np.where(sent < 0, 0, weight).sum())
        assert counts[rank].view[1] == (sent < 0).sum()
        assert done[rank].view[0] == (1 << blocks) - 1 and arrived[rank].view[0] == blocks
        assert counts[rank].view[0] == kept and counts[rank].view[2] == kept + 1
        total = int(np.where(sent < 0, 3, sent).sum())
        assert totals[rank].view.tolist() == [total, 2 * total]


def packed(matrix: np.ndarray, rows: int) -> np.ndarray:
    """E4M3 codes of an integer matrix as tiles of ``rows`` rows, each [k / 16][row / 8][row % 8][k % 16]."""
    codes = native.encode(matrix, "e4m3").astype(np.uint8)
    return codes.reshape(-1, rows // 8, 8, matrix.shape[1] // 16, 16).transpose(0, 3, 1, 2, 4).copy()


@pytest.mark.parametrize("seed", SEEDS)
def test_persistent_blocks_multiply_and_activate(seed):
    down, across, limit = 3, 2, 20.0
    a = streams.below(100, down * 64 * 64, 9).reshape(-1, 64) - 4
    b = streams.below(101, across * 128 * 64, 9).reshape(-1, 64) - 4
    machine = Machine("sm90", sms=2, seed=seed)
    out = machine.alloc(0, (down * 64, across * 64), np.float32)
    summary = machine.alloc(0, down * across * 64 + 1, np.uint32)
    counters = [upload(machine, np.zeros(1, kind)) for kind in (np.uint32, np.uint32, np.uint64)]
    pointers = [upload(machine, packed(a, 64)), upload(machine, packed(b, 128)), summary, *counters]
    work = struct.pack("<6Q2If4x", *(buffer.ptr for buffer in pointers), down, across, limit)
    sizes = (across * 64, down * 64)
    tensor = TensorMap("f32", out.ptr, sizes, (4 * sizes[0],), (64, 64))
    machine.launch(machine.load(ptx("expert")), "expert", 2, 128, args=[[work, tensor]])
    machine.run()

    product = a @ b.T
    gate, up = product[:, ::2].astype(float), product[:, 1::2].astype(float)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    assert np.allclose(out.view, gate / (1 + np.exp(-gate)) * up, rtol=2e-6, atol=1e-6)
    positive = (product[:, ::2] > 0).reshape(down, 64, across, 64).sum(axis=3).swapaxes(1, 2)
    rows = positive.reshape(-1, 4, 16)  # per tile and warp
    least = rows.min(axis=2, keepdims=True)
    second = np.vectorize(lambda n: [i for i in range(32) if n >> i & 1][1:2] or [31], otypes=[object])(rows)
    place = np.array([value[0] for value in second.ravel()]).reshape(rows.shape)
    place[:, :, 8:] = 0
    assert np.array_equal(summary.view[:-1].reshape(rows.shape), rows | least << 8 | place << 16)
    assert summary.view[-1] == down * across == counters[1].view[0]
    assert counters[2].view[0] == (rows.sum(axis=2) & 255).sum()
