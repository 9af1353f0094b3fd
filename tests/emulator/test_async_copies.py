"""Asynchronous copies: bulk, tensor, cp.async, st.async, their groups and mbarriers."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import to_ptx

from megagen.emulator import Machine
from megagen.errors import DataRace, Deadlock, MemoryFault, ProxyViolation
from megagen.tensor_map import TensorMap

DEVICE = r"""
struct alignas(64) Map { u64 words[16]; };
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ u32 rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ u32 peer(u32 a, u32 r) { u32 b; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(b) : "r"(a), "r"(r)); return b; }
__device__ void init(u64* b, u32 n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared(b)), "r"(n) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ void expect(u64* b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared(b)), "r"(n) : "memory"); }
__device__ void wait(u64* b, u32 parity) {
    asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra W;\n}" :: "r"(shared(b)), "r"(parity) : "memory");
}
__device__ void load(void* d, const void* s, u32 n, u64* b) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" :: "r"(shared(d)), "l"(s), "r"(n), "r"(shared(b)) : "memory");
}
__device__ void store(void* d, const void* s, u32 n) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" :: "l"(d), "r"(shared(s)), "r"(n) : "memory");
}
__device__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ void wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ void fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ void cluster_sync() { asm volatile("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::: "memory"); }
"""


def launch(
    kernel: str,
    *arrays: np.ndarray,
    maps=lambda *buffers: [],
    block: int = 32,
    grid: int = 1,
    smem: int = 0,
    **options: object,
):
    """Runs ``k(buffers..., maps...)``; returns the buffers' contents."""
    machine = Machine("sm90", sms=grid, **options)
    buffers = []
    for array in arrays:
        buffer = machine.alloc(0, array.shape, array.dtype)
        buffer.array[:] = array
        buffers.append(buffer)
    module = machine.load(to_ptx(DEVICE + kernel))
    machine.launch(module, "k", grid, block, smem=smem, args=[[*maps(*buffers), *buffers]])
    machine.run()
    return [buffer.view.copy() for buffer in buffers]


COPY_THROUGH = r"""
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ __align__(128) u32 data[256]; __shared__ u64 full;
    const u32 t = threadIdx.x;
    if (t == 0) { init(&full, 1); expect(&full, 1024); load(data, in, 1024, &full); }
    __syncwarp();
    wait(&full, 0);
    for (u32 i = t; i < 256; i += 32) data[i] += 1;
    FENCE
    __syncwarp();
    if (t == 0) { store(out, data, 1024); commit(); WAIT }
    AFTER
}
"""


def _through(
    fence: str = "fence();", wait: str = "wait_all();", after: str = "", seed: int = 0
) -> np.ndarray:
    kernel = COPY_THROUGH.replace("FENCE", fence).replace("WAIT", wait).replace("AFTER", after)
    return launch(kernel, np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32), seed=seed)[1]


def test_bulk_copies_in_and_out() -> None:
    for seed in range(5):
        assert (_through(seed=seed) == np.arange(256) + 1).all()


def test_a_generic_write_needs_a_proxy_fence_before_an_async_read() -> None:
    with pytest.raises(ProxyViolation, match=r"source of a bulk copy .* without a proxy fence .*`st\.shared"):
        _through(fence="")
    # Fenced by one lane, after the others' writes became known to it: that is enough.
    assert (_through(fence="__syncwarp(); if (t == 0) fence();") == np.arange(256) + 1).all()
    # But not before.
    with pytest.raises(ProxyViolation):
        _through(fence="if (t == 0) fence();")


def test_a_source_may_be_overwritten_only_after_it_was_read() -> None:
    overwrite = "__syncwarp(); data[t] = 0;"
    assert (
        _through(wait="wait_read();", after=overwrite + "if (t == 0) wait_all();") == np.arange(256) + 1
    ).all()
    with pytest.raises(DataRace):
        for seed in range(20):
            _through(wait="", after=overwrite + "if (t == 0) wait_all();", seed=seed)


def test_a_destination_is_there_only_after_the_group() -> None:
    read_back = "__syncwarp(); if (t == 0) out[1] = out[0];"
    assert _through(after=read_back)[1] == 1
    with pytest.raises(DataRace):
        for seed in range(20):
            _through(wait="wait_read();", after=read_back + " wait_all();", seed=seed)


def test_shared_memory_must_outlive_copies() -> None:
    with pytest.raises(MemoryFault, match=r"asynchronous operations still use its shared memory"):
        for seed in range(20):
            _through(wait="", seed=seed)


def test_too_few_expected_bytes_and_too_many() -> None:
    kernel = COPY_THROUGH.replace("FENCE", "fence();").replace("WAIT", "wait_all();").replace("AFTER", "")
    with pytest.raises(Deadlock, match=r"pending 0 of 1 arrivals, 16 bytes"):
        launch(
            kernel.replace("expect(&full, 1024)", "expect(&full, 1040)"),
            np.arange(256, dtype=np.uint32),
            np.zeros(256, np.uint32),
        )
    with pytest.raises(MemoryFault, match=r"must be a multiple of 16"):
        launch(
            kernel.replace("load(data, in, 1024", "load(data, in, 1020"),
            np.arange(256, dtype=np.uint32),
            np.zeros(256, np.uint32),
        )


def test_an_mbarrier_needs_a_fence_before_copies_complete_on_it() -> None:
    kernel = COPY_THROUGH.replace("FENCE", "fence();").replace("WAIT", "wait_all();").replace("AFTER", "")
    plain = 'asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared(&full)) : "memory");'
    with pytest.raises(ProxyViolation, match=r"fence.mbarrier_init or fence.proxy.async"):
        launch(
            kernel.replace("init(&full, 1);", plain),
            np.arange(256, dtype=np.uint32),
            np.zeros(256, np.uint32),
        )


def test_bulk_reductions() -> None:
    kernel = r"""
    extern "C" __global__ void k(u32* sum, float* real, unsigned short* half) {
        __shared__ __align__(128) u32 a[32]; __shared__ __align__(128) float f[32]; __shared__ __align__(128) u16 h[32];
        const u32 t = threadIdx.x; a[t] = t; f[t] = t * 0.5f; h[t] = 0x3C00;
        fence(); __syncwarp();
        if (t == 0) {
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 128;" :: "l"(sum), "r"(shared(a)) : "memory");
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 128;" :: "l"(real), "r"(shared(f)) : "memory");
            asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], 64;" :: "l"(half), "r"(shared(h)) : "memory");
            commit(); wait_all();
        }
    }
    """
    total, real, half = launch(
        kernel, np.full(32, 5, np.uint32), np.ones(32, np.float32), np.full(32, 0x4000, np.uint16)
    )
    assert (total == np.arange(32) + 5).all()
    assert (real == np.arange(32) * 0.5 + 1).all()
    assert (half == 0x4200).all()


def test_multicast_and_copies_between_ctas() -> None:
    kernel = r"""
    extern "C" __global__ void __cluster_dims__(4) k(const u32* in, u32* out) {
        __shared__ __align__(128) u32 data[32]; __shared__ __align__(128) u32 moved[32]; __shared__ u64 full, second;
        const u32 t = threadIdx.x, r = rank();
        if (t == 0) { init(&full, 1); init(&second, 1); }
        cluster_sync();
        if (t == 0) {
            expect(&full, 128);
            if (r == 1) asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 128, [%2], %3;"
                :: "r"(shared(data)), "l"(in), "r"(shared(&full)), "h"((u16)0xF) : "memory");
        }
        __syncwarp();
        wait(&full, 0);
        data[t] += 1000 * r;
        fence(); __syncwarp();
        if (t == 0) {
            expect(&second, 128);
            asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];"
                :: "r"(peer(shared(moved), (r + 1) % 4)), "r"(shared(data)), "r"(peer(shared(&second), (r + 1) % 4)) : "memory");
        }
        __syncwarp();
        wait(&second, 0);
        out[32 * r + t] = moved[t];
        cluster_sync();
    }
    """
    for seed in range(4):
        _, out = launch(kernel, np.arange(32, dtype=np.uint32), np.zeros(128, np.uint32), grid=4, seed=seed)
        assert (out == np.concatenate([np.arange(32) + 1000 * ((r + 3) % 4) for r in range(4)])).all()


def test_reductions_into_another_ctas_shared_memory() -> None:
    kernel = r"""
    extern "C" __global__ void __cluster_dims__(2) k(u32* out) {
        __shared__ __align__(128) u32 data[32]; __shared__ __align__(128) u32 sum[32]; __shared__ u64 full;
        const u32 t = threadIdx.x, r = rank();
        data[t] = t + 1; sum[t] = 100 * r;
        if (t == 0) { init(&full, 1); expect(&full, 128); }
        fence();
        cluster_sync();
        if (t == 0) asm volatile("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%0], [%1], 128, [%2];"
            :: "r"(peer(shared(sum), r ^ 1)), "r"(shared(data)), "r"(peer(shared(&full), r ^ 1)) : "memory");
        __syncwarp();
        wait(&full, 0);
        out[32 * r + t] = sum[t];
        cluster_sync();
    }
    """
    (out,) = launch(kernel, np.zeros(64, np.uint32), grid=2)
    assert (out == np.concatenate([np.arange(1, 33), np.arange(1, 33) + 100])).all()


def test_asynchronous_stores_and_reductions_of_registers() -> None:
    kernel = r"""
    extern "C" __global__ void __cluster_dims__(2) k(u32* out) {
        __shared__ u32 value[4]; __shared__ u64 full;
        const u32 r = rank();
        value[2] = value[3] = 10;
        init(&full, 1);
        expect(&full, 16);
        cluster_sync();
        const u32 v = peer(shared(value), r ^ 1), b = peer(shared(&full), r ^ 1);
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" :: "r"(v), "r"(r + 5), "r"(r + 6), "r"(b) : "memory");
        asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0+8], %1, [%2];" :: "r"(v), "r"(r + 1), "r"(b) : "memory");
        asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.max.s32 [%0+12], %1, [%2];" :: "r"(v), "r"(r + 11), "r"(b) : "memory");
        wait(&full, 0);
        for (int i = 0; i < 4; i++) out[4 * r + i] = value[i];
        cluster_sync();
    }
    """
    (out,) = launch(kernel, np.zeros(8, np.uint32), grid=2, block=1)
    assert list(out) == [6, 7, 12, 12, 5, 6, 11, 11]


def test_bulk_zero() -> None:
    kernel = r"""
    extern "C" __global__ void k(u32* out) {
        __shared__ __align__(16) u32 data[64];
        if (threadIdx.x == 0) asm volatile("st.bulk.weak.shared::cta [%0], 256, 0;" :: "r"(shared(data)) : "memory");
        __syncwarp();
        out[threadIdx.x] = data[2 * threadIdx.x] + 3;
    }
    """
    machine = Machine("sm90")
    out = machine.alloc(0, 32, np.uint32)
    text = to_ptx(DEVICE + kernel.replace('asm volatile("st.bulk', 'asm volatile("//st.bulk'))
    text = text.replace("//st.bulk", "st.bulk")
    machine.launch(machine.load(text), "k", 1, 32, args=[[out]])
    machine.run()
    assert (out.view == 3).all()


CP_ASYNC = r"""
extern "C" __global__ void k(const u32* in, u32* out) {
    __shared__ __align__(16) u32 data[4 * 32 + 32]; __shared__ u64 barrier;
    const u32 t = threadIdx.x;
    if (t == 0) init(&barrier, 32);
    __syncwarp();
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(shared(data + 4 * t)), "l"(in + 4 * t) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: "r"(shared(data + 128 + t)), "l"(in + t), "r"(t < 16 ? 4 : 0) : "memory");
    FINISH
    __syncwarp();
    for (u32 i = t; i < 160; i += 32) out[i] = data[(i + 4) % 160];
}
"""


@pytest.mark.parametrize(
    "finish",
    [
        'asm volatile("cp.async.wait_all;" ::: "memory");',
        'asm volatile("cp.async.commit_group;\\n cp.async.wait_group 0;" ::: "memory");',
        'asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(shared(&barrier)) : "memory"); wait(&barrier, 0);',
    ],
)
def test_copies_of_single_threads(finish: str) -> None:
    data = np.arange(128, dtype=np.uint32)
    expected = np.concatenate([data, np.where(np.arange(32) < 16, data[:32], 0)])
    for seed in range(3):
        _, out = launch(CP_ASYNC.replace("FINISH", finish), data, np.zeros(160, np.uint32), seed=seed)
        assert (out == np.roll(expected, -4)).all()


def test_a_group_that_was_not_waited_for_races() -> None:
    finish = 'asm volatile("cp.async.commit_group;\\n cp.async.wait_group 1;" ::: "memory");'
    with pytest.raises(DataRace, match=r"cp.async of warp 0"):
        for seed in range(20):
            launch(
                CP_ASYNC.replace("FINISH", finish),
                np.arange(128, dtype=np.uint32),
                np.zeros(160, np.uint32),
                seed=seed,
            )


def _tensor_kernel(dims: int, swizzled: bool = False) -> str:
    coordinates = ", ".join(f"%{i + 3}" for i in range(dims))
    values = ", ".join(f'"r"(at[{i}])' for i in range(dims))
    store_coordinates = ", ".join(f"%{i + 2}" for i in range(dims))
    return (
        r"""
    extern "C" __global__ void k(const __grid_constant__ Map from, const __grid_constant__ Map to, const u32* in, u32* out, const int* at, u32* image, u32 bytes) {
        extern __shared__ __align__(1024) unsigned char box[]; __shared__ u64 full;
        const u32 t = threadIdx.x;
        if (t == 0) {
            init(&full, 1); expect(&full, bytes);
            asm volatile("prefetch.tensormap [%0];" :: "l"(&from));
            asm volatile("cp.async.bulk.tensor.DIMSd.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {COORDINATES}], [%2];"
                :: "r"(shared(box)), "l"(&from), "r"(shared(&full)), VALUES : "memory");
        }
        __syncwarp();
        wait(&full, 0);
        for (u32 i = t; i < bytes / 4; i += 32) image[i] = ((u32*)box)[i];
        __syncwarp();
        bool inside = true;
        for (int d = 0; d < DIMS; d++) inside = inside && at[d] >= 0;  // a store can't begin before the tensor
        if (t == 0 && inside) {
            asm volatile("cp.async.bulk.tensor.DIMSd.global.shared::cta.tile.bulk_group [%0, {STORE}], [%1];" :: "l"(&to), "r"(shared(box)), VALUES : "memory");
            commit(); wait_all();
        }
    }
    """.replace("COORDINATES", coordinates)
        .replace("STORE", store_coordinates)
        .replace("VALUES", values)
        .replace("DIMS", str(dims))
    )


@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("corner", ["inside", "past the end", "before the start"])
def test_tensor_copies_with_tail_boxes(dims: int, corner: str) -> None:
    shape, box = (5, 4, 3, 6, 20)[-dims:], (2, 3, 2, 3, 8)[-dims:]
    start = {
        "inside": (1, 0, 1, 2, 4),
        "past the end": (4, 2, 2, 5, 16),
        "before the start": (-1, -2, -1, -1, -4),
    }[corner][-dims:]
    tensor = np.arange(1, 1 + np.prod(shape), dtype=np.uint32).reshape(shape)
    strides = [4 * int(np.prod(shape[d + 1 :])) for d in range(dims)]

    def maps(source, target, *rest):
        fields = (shape[::-1], tuple(strides[::-1][1:]), box[::-1])
        return [TensorMap("u32", buffer.ptr, *fields) for buffer in (source, target)]

    count = int(np.prod(box))
    machine = Machine("sm90", seed=dims)
    buffers = [
        machine.alloc(0, shape, np.uint32),
        machine.alloc(0, shape, np.uint32),
        machine.alloc(0, dims, np.int32),
        machine.alloc(0, count, np.uint32),
    ]
    for buffer, value in zip(buffers, [tensor, 0, start[::-1], 0]):
        buffer.array[:] = value
    machine.launch(
        machine.load(to_ptx(DEVICE + _tensor_kernel(dims))),
        "k",
        1,
        32,
        smem=4 * count,
        args=[[*maps(*buffers), *buffers, 4 * count]],
    )
    machine.run()
    expected = np.zeros(box, np.uint32)
    written = np.zeros(shape, np.uint32)
    for index in np.ndindex(*box):
        place = tuple(s + i for s, i in zip(start, index))
        if all(0 <= p < n for p, n in zip(place, shape)):
            expected[index] = tensor[place]
            if min(start) >= 0:
                written[place] = tensor[place]
    assert (buffers[3].view == expected.reshape(-1)).all()
    assert (buffers[1].view == written).all()


def test_tensor_reductions_and_prefetch() -> None:
    kernel = r"""
    extern "C" __global__ void k(const __grid_constant__ Map to, u32* out) {
        __shared__ __align__(128) u32 box[32];
        box[threadIdx.x] = threadIdx.x;
        fence(); __syncwarp();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" :: "l"(&to), "r"(0), "r"(0) : "memory");
            asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.max.tile.bulk_group [%0, {%2, %3}], [%1];" :: "l"(&to), "r"(shared(box)), "r"(4), "r"(1) : "memory");
            commit(); wait_all();
        }
    }
    """
    (out,) = launch(
        kernel,
        np.full((4, 12), 7, np.uint32),
        maps=lambda out: [TensorMap("u32", out.ptr, (12, 4), (48,), (8, 4))],
    )
    expected = np.full((4, 12), 7)
    for row in range(3):
        expected[row + 1, 4:12] = np.maximum(7, np.arange(8) + 8 * row)
    assert (out == expected).all()


@pytest.mark.parametrize(
    ("coordinates", "offset", "message"),
    [
        ((2, 0), 0, r"coordinates\[0\] = 2: the box must begin at a multiple of 16 bytes"),
        ((0, -1), 0, r"a store or reduction can't begin before the tensor"),
        ((0, 0), 64, r"shared address = .*: must be a multiple of 128"),
    ],
)
def test_where_a_tensor_copy_faults(coordinates: tuple[int, int], offset: int, message: str) -> None:
    kernel = r"""
    extern "C" __global__ void k(const __grid_constant__ Map to, int x, int y, u32 offset) {
        __shared__ __align__(128) u32 box[64];
        box[threadIdx.x] = box[threadIdx.x + 32] = 0;
        fence(); __syncwarp();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                :: "l"(&to), "r"(shared(box) + offset), "r"(x), "r"(y) : "memory");
            commit(); wait_all();
        }
    }
    """
    machine = Machine("sm90")
    out = machine.alloc(0, (4, 12), np.uint32)
    tensor_map = TensorMap("u32", out.ptr, (12, 4), (48,), (8, 2))
    machine.launch(
        machine.load(to_ptx(DEVICE + kernel)), "k", 1, 32, args=[[tensor_map, *coordinates, offset]]
    )
    with pytest.raises(MemoryFault, match=message):
        machine.run()


def test_tensor_maps_are_checked() -> None:
    kernel = _tensor_kernel(2)

    def bad(*b):
        return [TensorMap("u32", b[0].ptr + 4, (20, 6), (80,), (8, 3))] * 2

    data = [
        np.zeros((6, 20), np.uint32),
        np.zeros((6, 20), np.uint32),
        np.zeros(2, np.int32),
        np.zeros(24, np.uint32),
    ]
    machine = Machine("sm90")
    buffers = [machine.alloc(0, a.shape, a.dtype) for a in data]
    for buffer, array in zip(buffers, data):
        buffer.array[:] = array
    module = machine.load(to_ptx(DEVICE + kernel))
    machine.launch(module, "k", 1, 32, smem=96, args=[[*bad(*buffers), *buffers, 96]])
    with pytest.raises(MemoryFault, match=r"tensor map: address = .* must be a multiple of 16"):
        machine.run()
    machine = Machine("sm90")
    module = machine.load(to_ptx(DEVICE + kernel))
    machine.launch(module, "k", 1, 32, smem=96, args=[[bytes(128), bytes(128), 0, 0, 0, 0, 96]])
    with pytest.raises(Exception, match=r"outside every allocation|no tensor map at this address"):
        machine.run()
