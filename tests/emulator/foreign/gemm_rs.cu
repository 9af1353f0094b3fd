// WGMMA with A in registers. One kernel in bfloat16 scales A on its way through the registers, B is row-major and so
// transposed; one in FP8 widens nothing: E5M2 bytes times E4M3 bytes. No swizzle, operands written by ordinary stores.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

__device__ unsigned long long descriptor(const void* matrix, unsigned leading, unsigned stride) {
    const unsigned long long address = __cvta_generic_to_shared(matrix);
    return (address >> 4 & 0x3FFF) | static_cast<unsigned long long>(leading >> 4) << 16 | static_cast<unsigned long long>(stride >> 4) << 32;
}

__device__ void settle(float (&d)[8]) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (float& value : d) asm volatile("" : "+f"(value) :: "memory");
}

__device__ void write(float* out, const float (&d)[8]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 8; i += 2) {
        const int row = 16 * warp + lane / 4 + (i / 2 % 2) * 8, column = i / 4 * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(out + row * 16 + column) = make_float2(d[i], d[i + 1]);
    }
}

/// out [64, 16] = (scale A) B + out; A bfloat16 [64, 16], B bfloat16 [16, 16], both row-major.
extern "C" __global__ void gemm_bf16(const __nv_bfloat16* a, const __nv_bfloat16* b, float* out, float scale) {
    __shared__ __align__(128) __nv_bfloat16 tile[2][16][8];  // [n / 8][k][n % 8]: N runs fastest
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    for (int i = t; i < 256; i += 128) tile[i % 16 / 8][i / 16][i % 8] = b[i];
    __nv_bfloat162 fragment[4];
    for (int r = 0; r < 4; ++r) {
        const int row = 16 * warp + lane / 4 + r % 2 * 8, column = lane % 4 * 2 + r / 2 * 8;
        const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(a + row * 16 + column);
        fragment[r] = __hmul2(pair, __float2bfloat162_rn(scale));
    }
    float d[8];
    for (int i = 0; i < 8; ++i) d[i] = out[(16 * warp + lane / 4 + (i / 2 % 2) * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2];
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    const unsigned* bits = reinterpret_cast<const unsigned*>(fragment);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    // Matrices of 8 x 8: the next along K after 128 bytes (leading), along N after 256 (stride).
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(bits[0]), "r"(bits[1]), "r"(bits[2]), "r"(bits[3]), "l"(descriptor(tile, 128, 256)));
    settle(d);
    write(out, d);
}

/// out [64, 16] = A B^T - A C^T; A E5M2 [64, 32], B and C E4M3 [16, 32].
extern "C" __global__ void gemm_fp8(const unsigned* a, const unsigned* b, const unsigned* c, float* out) {
    __shared__ __align__(128) unsigned tiles[2][2][2][8][4];  // [operand][k / 16][n / 8][n % 8][k % 16 / 4]
    const int t = threadIdx.x, warp = t / 32, lane = t % 32;
    tiles[0][t % 8 / 4][t / 64][t / 8 % 8][t % 4] = b[t];
    tiles[1][t % 8 / 4][t / 64][t / 8 % 8][t % 4] = c[t];
    unsigned fragment[4];
    for (int r = 0; r < 4; ++r) fragment[r] = a[(16 * warp + lane / 4 + r % 2 * 8) * 8 + lane % 4 + r / 2 * 4];
    float d[8];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n16k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1;\n}"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7])
                 : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "l"(descriptor(tiles[0], 256, 128)), "r"(0));
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.f32.e5m2.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, -1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "l"(descriptor(tiles[1], 256, 128)));
    settle(d);
    write(out, d);
}
