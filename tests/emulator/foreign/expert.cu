// Persistent blocks take tiles of an FP8 matrix product from a counter: [64, 64] by [128, 64] bytes in packed 8 x 16
// matrices, fetched by bulk copies, multiplied by one warpgroup, and finished by a gated activation of column pairs.
// Tiles leave by a tensor copy, a summary of their rows by a bulk copy.
#include <cuda.h>

constexpr int kRows = 64, kColumns = 128, kDepth = 64;

struct Work {
    const unsigned char* a;       // [tiles down][kRows * kDepth], packed
    const unsigned char* b;       // [tiles across][kColumns * kDepth], packed
    unsigned* summary;            // [tiles][kRows], then the number of tiles
    unsigned* next;               // [1]
    unsigned* done;               // [1]
    unsigned long long* positive; // [1]
    unsigned down, across;
    float limit;
};

__device__ unsigned at(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

__device__ bool elected() {
    int chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen;
}

__device__ void fetch(void* to, const void* from, unsigned bytes, const void* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(at(to)), "l"(from), "r"(bytes), "r"(at(barrier)) : "memory");
}

__device__ unsigned long long descriptor(const void* matrix, unsigned leading) {  // 128 bytes per 8 rows
    return (at(matrix) >> 4 & 0x3FFF) | static_cast<unsigned long long>(leading >> 4) << 16 | 8ull << 32;
}

#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
__device__ void multiply(float (&d)[64], unsigned long long a, unsigned long long b, bool add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n}"
                 : SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

__device__ float activate(float gate, float up, float limit) {
    float power, inverse, bounded, minus;
    asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, %2;\nselp.f32 %0, %2, %1, p;\n}" : "=f"(gate) : "f"(gate), "f"(limit));
    asm("{\n.reg .f32 low;\nneg.f32 low, %2;\nmax.f32 %0, %1, low;\nmin.f32 %0, %0, %2;\n}" : "=f"(bounded) : "f"(up), "f"(limit));
    asm("mul.rn.f32 %0, %1, 0fBFB8AA3B;" : "=f"(minus) : "f"(gate));  // -log2(e)
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(minus));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return gate * inverse * bounded;
}

extern "C" __global__ void __launch_bounds__(128) expert(const __grid_constant__ Work work, const __grid_constant__ CUtensorMap out) {
    __shared__ __align__(128) unsigned char a[kRows * kDepth];
    __shared__ __align__(128) unsigned char b[kColumns * kDepth];
    __shared__ __align__(128) float result[kRows][kColumns / 2];
    __shared__ __align__(16) unsigned rows[kRows];
    __shared__ unsigned long long barrier;
    __shared__ unsigned tile;
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" :: "r"(at(&barrier)) : "memory");
    unsigned phase = 0;
    for (;; phase ^= 1) {
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(tile) : "l"(work.next) : "memory");
        __syncthreads();
        unsigned row, column;
        asm("div.u32 %0, %1, %2;" : "=r"(row) : "r"(tile), "r"(work.across));
        asm("rem.u32 %0, %1, %2;" : "=r"(column) : "r"(tile), "r"(work.across));
        if (row >= work.down) break;
        if (warp == 0 && elected()) {
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(&barrier)), "r"(static_cast<unsigned>(sizeof a + sizeof b)) : "memory");
            fetch(a, work.a + row * sizeof a, sizeof a, &barrier);
            fetch(b, work.b + column * sizeof b, sizeof b, &barrier);
        }
        unsigned ready;
        do {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                         : "=r"(ready) : "r"(at(&barrier)), "r"(phase) : "memory");
        } while (!ready);
        __syncwarp();
        float d[64] = {};
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int k = 0; k < kDepth / 32; ++k)
            multiply(d, descriptor(a + k * 32 * kRows, 16 * kRows), descriptor(b + k * 32 * kColumns, 16 * kColumns), k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        for (float& value : d) asm volatile("" : "+f"(value) :: "memory");
        unsigned count[2] = {};
        for (int i = 0; i < 64; i += 2) {
            const unsigned r = 16 * warp + lane / 4 + i / 2 % 2 * 8;
            unsigned mask;
            asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, 0f00000000, %1;\nvote.sync.ballot.b32 %0, p, 0xffffffff;\n}" : "=r"(mask) : "f"(d[i]));
            count[i / 2 % 2] += __popc(mask >> (lane & ~3u) & 15);
            result[r][i / 4 * 4 + lane % 4] = activate(d[i], d[i + 1], work.limit);
        }
        unsigned total, least, second, word;
        asm volatile("redux.sync.add.u32 %0, %1, 0xffffffff;" : "=r"(total) : "r"(lane % 4 == 0 ? count[0] + count[1] : 0));
        asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(least) : "r"(count[0] < count[1] ? count[0] : count[1]));
        asm("fns.b32 %0, %1, 0, 2;" : "=r"(second) : "r"(count[0]));  // place of the second bit
        asm("min.u32 %0, %0, 31;" : "+r"(second));
        for (int half = 0; half < 2; ++half) {
            asm("bfi.b32 %0, %1, %2, 8, 8;" : "=r"(word) : "r"(least), "r"(count[half]));
            asm("bfi.b32 %0, %1, %0, 16, 8;" : "+r"(word) : "r"(half == 0 ? second : 0));
            if (lane % 4 == 0) rows[16 * warp + lane / 4 + 8 * half] = word;
        }
        unsigned long long low;
        asm("and.b64 %0, %1, 255;" : "=l"(low) : "l"(static_cast<unsigned long long>(total)));
        if (lane == 0) asm volatile("{\n.reg .b64 before;\natom.global.add.u64 before, [%0], %1;\n}" :: "l"(work.positive), "l"(low) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                         :: "l"(&out), "r"(at(result)), "r"(column * kColumns / 2), "r"(row * kRows) : "memory");
            asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;"
                         :: "l"(work.summary + tile * kRows), "r"(at(rows)) : "memory");
            asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;" ::: "memory");
            asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(work.done) : "memory");
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        unsigned done;
        do {
            asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(done) : "l"(work.done) : "memory");
        } while (done != work.down * work.across);
        work.summary[done * kRows] = done;
    }
}
