// D = A B^T for half-precision A [64, K] and B [64 per block, K]: both operands of WGMMA in shared memory under the
// 128-byte swizzle, loaded by a producer through tensor maps; a cluster of two blocks shares A by multicast, and two
// warpgroups of consumers share a block's columns.
#include <cuda.h>
#include <cuda_fp16.h>

constexpr int kStages = 2, kDepth = 64, kRowsA = 64, kRowsB = 64;
constexpr unsigned kBytes = (kRowsA + kRowsB) * kDepth * sizeof(__half);

struct alignas(1024) Stage {
    __half a[kRowsA][kDepth];
    __half b[kRowsB][kDepth];
};

class Signal {
  public:
    __device__ void init(unsigned count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at()), "r"(count) : "memory"); }
    __device__ void expect(unsigned bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at()), "r"(bytes) : "memory");
    }
    __device__ void arrive_at(unsigned block) {
        asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                     "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" :: "r"(at()), "r"(block) : "memory");
    }
    __device__ void wait(unsigned phase) {
        unsigned ready;
        do {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                         : "=r"(ready) : "r"(at()), "r"(phase) : "memory");
        } while (!ready);
    }
    __device__ unsigned at() const { return static_cast<unsigned>(__cvta_generic_to_shared(&state)); }

  private:
    unsigned long long state;
};

__device__ unsigned long long descriptor(const void* matrix) {
    const unsigned long long address = __cvta_generic_to_shared(matrix);
    return (address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62;  // 1024 bytes per 8 rows, 128-byte swizzle
}

__device__ void multiply(float (&d)[16], unsigned long long a, unsigned long long b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
                   "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "l"(a), "l"(b));
}

extern "C" __global__ void __cluster_dims__(2) __launch_bounds__(384, 1)
gemm_ss(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b, float* out, int depth) {
    extern __shared__ Stage stages[];
    __shared__ Signal full[kStages], empty[kStages];
    unsigned block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) full[s].init(1), empty[s].init(4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int k = 0; k < depth / kDepth; ++k) {
                const int s = k % kStages, phase = k / kStages % 2;
                empty[s].wait(phase ^ 1);
                full[s].expect(kBytes);
                // Each block loads half of A's rows for both.
                asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                             "[%0], [%1, {%3, %4}], [%2], %5;"
                             :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(stages[s].a[32 * block]))), "l"(&map_a),
                                "r"(full[s].at()), "r"(k * kDepth), "r"(static_cast<int>(32 * block)), "h"(static_cast<unsigned short>(3)) : "memory");
                asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                             :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(stages[s].b))), "l"(&map_b), "r"(full[s].at()),
                                "r"(k * kDepth), "r"(static_cast<int>(blockIdx.x * kRowsB)) : "memory");
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = threadIdx.x / 128 - 1, t = threadIdx.x % 128;
        float d[16] = {};
        for (int k = 0; k < depth / kDepth; ++k) {
            const int s = k % kStages, phase = k / kStages % 2;
            full[s].wait(phase);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            for (int step = 0; step < kDepth / 16; ++step)
                multiply(d, descriptor(&stages[s].a[0][16 * step]), descriptor(&stages[s].b[32 * group][16 * step]));
            asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
            for (int i = 0; i < 16; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
            asm volatile("bar.sync %0, 128;" :: "r"(1 + group) : "memory");
            if (t < 2) empty[s].arrive_at(t);
        }
        const int warp = t / 32, lane = t % 32;
        for (int i = 0; i < 16; ++i) {
            const int row = 16 * warp + lane / 4 + (i / 2 % 2) * 8;
            const int column = blockIdx.x * kRowsB + 32 * group + i / 4 * 8 + lane % 4 * 2 + i % 2;
            out[row * gridDim.x * kRowsB + column] = d[i];
        }
    }
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
