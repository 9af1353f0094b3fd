"""A kernel around a few tcgen05 instructions: an image in shared memory before, tensor memory's contents after."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cuda_source import to_ptx

from megagen.emulator import Machine

DEVICE = r"""
#define ASM(...) asm volatile(__VA_ARGS__ : "memory")
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ u32 rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
__device__ u32 peer(u32 a, u32 r) { u32 b; asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(b) : "r"(a), "r"(r)); return b; }
__device__ void init(u64* b, u32 n) { ASM("mbarrier.init.shared::cta.b64 [%0], %1;\n fence.mbarrier_init.release.cluster;" :: "r"(shared(b)), "r"(n)); }
__device__ void arrive(u64* b) { ASM("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared(b))); }
__device__ void expect(u64* b, u32 n) { ASM("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(shared(b)), "r"(n)); }
__device__ void wait(u64* b, u32 parity) { ASM("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra W;\n}" :: "r"(shared(b)), "r"(parity)); }
__device__ void wait_relaxed(u64* b, u32 parity) { ASM("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%0], %1;\n@!p bra W;\n}" :: "r"(shared(b)), "r"(parity)); }
__device__ void fence_async() { ASM("fence.proxy.async.shared::cta;" ::); }
__device__ void cluster_sync() { ASM("barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;" ::); }
__device__ void alloc(u32* to, u32 n) { ASM("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" :: "r"(shared(to)), "r"(n)); }
__device__ void alloc2(u32* to, u32 n) { ASM("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" :: "r"(shared(to)), "r"(n)); }
__device__ void dealloc(u32 a, u32 n) { ASM("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(a), "r"(n)); }
__device__ void dealloc2(u32 a, u32 n) { ASM("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" :: "r"(a), "r"(n)); }
__device__ void relinquish() { ASM("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::); }
__device__ void before() { ASM("tcgen05.fence::before_thread_sync;" ::); }
__device__ void after() { ASM("tcgen05.fence::after_thread_sync;" ::); }
__device__ void wait_ld() { ASM("tcgen05.wait::ld.sync.aligned;" ::); }
__device__ void wait_st() { ASM("tcgen05.wait::st.sync.aligned;" ::); }
__device__ void commit(u64* b) { ASM("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" :: "r"(shared(b))); }
__device__ void commit2(u64* b, u32 mask) { ASM("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" :: "r"(shared(b)), "h"((u16)mask)); }
__device__ void ld8(u32 a, u32* r) {
    ASM("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]) : "r"(a));
}
__device__ void st8(u32 a, const u32* r) {
    ASM("tcgen05.st.sync.aligned.32x32b.x8.b32 [%8], {%0, %1, %2, %3, %4, %5, %6, %7};"
        :: "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]), "r"(a));
}
/* Shared-memory matrix descriptor: address, leading and stride offsets in bytes, swizzling mode. */
__device__ u64 desc(u32 a, u32 leading, u32 stride, u32 mode) {
    return (u64)((a & 0x3FFFF) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | (u64)1 << 46 | (u64)mode << 61;
}
"""

_KERNEL = r"""
extern __shared__ __align__(1024) u32 image[];
extern "C" __global__ void k(const u32* in, u32 words, const u32* start, u32 filled, u32* out) {
    __shared__ u64 done; __shared__ u32 base;
    const u32 t = threadIdx.x, cta = @CTA@;
    in += cta * words; start += cta * 128 * @COLUMNS@; out += cta * 128 * @COLUMNS@;
    for (u32 i = t; i < words; i += 128) image[i] = in[i];
    if (t == 0) init(&done, 1);
    fence_async();
    if (t < 32) @ALLOC@(&base, @COLUMNS@);
    @SYNC@
    const u32 tm = base, lanes = tm + (t / 32 * 32 << 16), s = shared(image);
    if (filled) {
        for (u32 c = 0; c < @COLUMNS@; c += 8) st8(lanes + c, start + t * @COLUMNS@ + c);
        wait_st(); before();
    }
    @SYNC@
    after();
    if (t == 0 && @LEADER@) { @BODY@ @COMMIT@ }
    wait(&done, 0);
    after();
    for (u32 c = 0; c < @COLUMNS@; c += 8) {
        u32 r[8]; ld8(lanes + c, r); wait_ld();
        for (u32 k = 0; k < 8; ++k) out[t * @COLUMNS@ + c + k] = r[k];
    }
    before();
    @SYNC@
    if (t < 32) @DEALLOC@(tm, @COLUMNS@);
}
"""

_SINGLE = {
    "CTA": "0", "ALLOC": "alloc", "DEALLOC": "dealloc", "SYNC": "__syncthreads();", "LEADER": "true",
    "COMMIT": "commit(&done);",
}  # fmt: skip
_PAIR = {
    "CTA": "rank()", "ALLOC": "alloc2", "DEALLOC": "dealloc2", "SYNC": "cluster_sync();", "LEADER": "rank() == 0",
    "COMMIT": "commit2(&done, 3);",
}  # fmt: skip


@dataclass(frozen=True)
class TensorMemory:
    """Words [CTA,] lane, column after a kernel, and their undefined bits."""

    words: np.ndarray
    undefined: np.ndarray

    @property
    def floats(self) -> np.ndarray:
        assert not self.undefined.any(), "undefined words"
        return self.words.view(np.float32)


def run(
    body: str,
    image: np.ndarray,
    columns: int = 32,
    start: np.ndarray | None = None,
    pair: bool = False,
    undefined: Sequence[int] = (),
    arch: str = "sm100",
    seed: int = 0,
    **options: object,
) -> TensorMemory:
    """Runs ``body`` in one thread with ``tm``, the allocated tensor memory, and ``s``, the address of ``image``.

    ``image`` is a row of bytes, for a pair of CTAs one row each; ``start`` fills tensor memory before. Bytes
    ``undefined`` of the first image are so.
    """
    ctas = 2 if pair else 1
    text = _KERNEL
    for name, value in {**(_PAIR if pair else _SINGLE), "COLUMNS": str(columns), "BODY": body}.items():
        text = text.replace(f"@{name}@", value)
    data = np.ascontiguousarray(image, np.uint8).reshape(ctas, -1)
    data = np.pad(data, ((0, 0), (0, -data.shape[1] % 4))).view(np.uint32)
    machine = Machine(arch, sms=ctas, seed=seed, **options)
    source, first, out = (
        machine.alloc(0, shape, np.uint32)
        for shape in (data.shape, (ctas, 128, columns), (ctas, 128, columns))
    )
    source.array[:] = data
    source.undefined_bits[list(undefined)] = 0xFF
    first.array[:] = 0 if start is None else start.reshape(first.shape)
    module = machine.load(to_ptx(DEVICE + text, "sm_103a" if arch == "sm103" else "sm_100a"))
    arguments = [source, data.shape[1], first, int(start is not None), out]
    smem = data.nbytes // ctas
    machine.launch(module, "k", ctas, 128, cluster=ctas, smem=smem, args=[arguments])
    machine.run()
    shape = out.shape if pair else out.shape[1:]
    return TensorMemory(
        out.view.reshape(shape).copy(), out.undefined_bits.view(np.uint32).reshape(shape).copy()
    )
