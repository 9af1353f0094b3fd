// Two ranks send each other rows: writes to the peer's memory, a count released to the whole system, polls with a
// deadline. Atomics and ordered accesses are written as assembly, one function each.

struct Peer {
    float4* rows;             // [blocks][32]
    int* arrived;             // [1]
    unsigned long long* done; // [1], a bit per block
};

struct Mailbox {
    Peer self, peer;
    const long long* ids;
    const float* weights;
    unsigned long long* total;  // [2]
    unsigned* counts;  // [3]
    int blocks;
};

__device__ int load_acquire_sys(const int* p) {
    int v;
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
__device__ unsigned long long load_acquire_gpu(const unsigned long long* p) {
    unsigned long long v;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ long long load_volatile(const long long* p) {
    long long v;
    asm volatile("ld.volatile.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
__device__ void add_release_sys(int* p, int v) { asm volatile("red.release.sys.global.add.s32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
__device__ void or_release_gpu(unsigned long long* p, unsigned long long v) {
    asm volatile("red.release.gpu.global.or.b64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}
__device__ unsigned add_shared(unsigned* p, unsigned v) {
    unsigned old;
    asm volatile("atom.shared.cta.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(static_cast<unsigned>(__cvta_generic_to_shared(p))), "r"(v) : "memory");
    return old;
}
__device__ unsigned long long add_sys(unsigned long long* p, unsigned long long v) {
    unsigned long long old;
    asm volatile("atom.sys.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
    return old;
}
__device__ float read_weight(const float* p) {
    float v;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
__device__ long long read_id(const long long* p) {
    long long v;
    asm volatile("ld.global.nc.s64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}

template <class Ready>
__device__ void wait(Ready ready) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    while (!ready()) {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
        if (now - start > 2000000000ull) asm volatile("trap;");
    }
}

extern "C" __global__ void __launch_bounds__(64) mailbox(Mailbox box) {
    __shared__ __align__(16) unsigned staged[64][4];
    __shared__ unsigned ticket;
    const int t = threadIdx.x, block = blockIdx.x;
    if (t == 0) ticket = 0;
    asm volatile("barrier.sync 0;" ::: "memory");
    const long long id = read_id(box.ids + block * 64 + t);
    const float weight = read_weight(box.weights + block * 64 + t);
    float kept;
    asm("{\n.reg .pred p;\nsetp.lt.s64 p, %2, 0;\nselp.f32 %0, 0f00000000, %1, p;\n}" : "=f"(kept) : "f"(weight), "l"(id));
    const unsigned slot = add_shared(&ticket, 1);
    const long long wide = id < 0 ? load_volatile(box.ids) : id;
    staged[slot][0] = __float_as_uint(kept);
    staged[slot][1] = static_cast<unsigned>(id < 0);
    staged[slot][2] = static_cast<unsigned>(wide);
    staged[slot][3] = static_cast<unsigned>(wide >> 32);
    asm volatile("barrier.sync 1, 64;" ::: "memory");
    if (t < 32) {  // sums two staged slots into one row of the peer
        unsigned a[4], b[4];
        const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(staged[2 * t]));
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at + 16) : "memory");
        const unsigned sum = __float_as_uint(__uint_as_float(a[0]) + __uint_as_float(b[0]));
        asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};"
                     :: "l"(box.peer.rows + block * 32 + t), "r"(sum), "r"(a[1] + b[1]), "r"(a[2] + b[2]), "r"(a[3] + b[3]) : "memory");
        __syncwarp();
        if (t == 0) add_release_sys(box.peer.arrived, 1);
        if (t == 0) wait([&] { return load_acquire_sys(box.self.arrived) == box.blocks; });
        __syncwarp();
        const float4 row = box.self.rows[block * 32 + t];
        int missing;
        asm volatile("mov.s32 %0, %1;" : "=r"(missing) : "r"(static_cast<int>(__float_as_uint(row.y))));
        asm volatile("red.gpu.global.add.s32 [%0], %1;" :: "l"(box.counts + 1), "r"(missing) : "memory");
        asm volatile("red.gpu.global.add.u32 [%0], %1;" :: "l"(box.counts), "r"(static_cast<unsigned>(row.x)) : "memory");
        const unsigned long long low = __float_as_uint(row.z);
        unsigned long long chosen;
        asm volatile("{\n.reg .pred p;\nsetp.ne.b64 p, %1, 0;\nselp.b64 %0, %1, 1, p;\n}" : "=l"(chosen) : "l"(low));
        add_sys(box.total, chosen);
        __syncwarp();
        if (t == 0) or_release_gpu(box.self.done, 1ull << block);
    }
    if (block == 0 && t == 32) {
        wait([&] { return load_acquire_gpu(box.self.done) == (1ull << box.blocks) - 1; });
        box.counts[2] = box.counts[0] + 1;
        unsigned long long total;
        asm volatile("ld.global.u64 %0, [%1];" : "=l"(total) : "l"(box.total) : "memory");
        asm volatile("st.global.u64 [%0+8], %1;" :: "l"(box.total), "l"(2 * total) : "memory");
    }
}
