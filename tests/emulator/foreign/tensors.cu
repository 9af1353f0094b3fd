// Tensor maps of one to five dimensions, one kernel for all by templates: each block loads a box, adds its number to
// every element and stores the box, or adds it to what is there.
#include <cuda.h>

template <int Rank>
struct Box {
    int at[Rank];
};

struct Maps {
    CUtensorMap from, to;
};

__device__ unsigned address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

template <int Rank>
__device__ void load(void* to, const CUtensorMap& map, unsigned long long* barrier, const Box<Rank>& box) {
    const unsigned d = address(to), b = address(barrier);
    if constexpr (Rank == 1)
        asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];"
                     :: "r"(d), "l"(&map), "r"(b), "r"(box.at[0]) : "memory");
    else if constexpr (Rank == 2)
        asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                     :: "r"(d), "l"(&map), "r"(b), "r"(box.at[0]), "r"(box.at[1]) : "memory");
    else if constexpr (Rank == 3)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                     :: "r"(d), "l"(&map), "r"(b), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]) : "memory");
    else if constexpr (Rank == 4)
        asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                     :: "r"(d), "l"(&map), "r"(b), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                     :: "r"(d), "l"(&map), "r"(b), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4]) : "memory");
}

template <int Rank>
__device__ void store(const CUtensorMap& map, const void* from, const Box<Rank>& box) {
    const unsigned s = address(from);
    if constexpr (Rank == 1)
        asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0, {%2}], [%1];"
                     :: "l"(&map), "r"(s), "r"(box.at[0]) : "memory");
    else if constexpr (Rank == 2)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                     :: "l"(&map), "r"(s), "r"(box.at[0]), "r"(box.at[1]) : "memory");
    else if constexpr (Rank == 3)
        asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];"
                     :: "l"(&map), "r"(s), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]) : "memory");
    else if constexpr (Rank == 4)
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                     :: "l"(&map), "r"(s), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]) : "memory");
    else
        asm volatile("cp.reduce.async.bulk.tensor.5d.global.shared::cta.max.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                     :: "l"(&map), "r"(s), "r"(box.at[0]), "r"(box.at[1]), "r"(box.at[2]), "r"(box.at[3]), "r"(box.at[4]) : "memory");
}

/// `from` and `to` have boxes of `count` 32-bit elements; block b takes the box that starts at places[b].
template <int Rank>
__device__ void shift(const Maps& maps, const Box<Rank>* places, int count) {
    extern __shared__ __align__(128) int data[];
    __shared__ unsigned long long barrier;
    const Box<Rank> box = places[blockIdx.x];
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" :: "l"(&maps.from) : "memory");
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(address(&barrier)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.release.cta.shared.b64 state, [%0], %1;\n}"
                     :: "r"(address(&barrier)), "r"(4 * count) : "memory");
        load<Rank>(data, maps.from, &barrier, box);
    }
    __syncthreads();
    asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], 0, 1000;\n@p bra.uni done;\n"
                 "bra.uni wait;\ndone:\n}" :: "r"(address(&barrier)) : "memory");
    for (int i = threadIdx.x; i < count; i += blockDim.x) data[i] += blockIdx.x + 1;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        store<Rank>(maps.to, data, box);
        asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

#define KERNEL(rank) \
    extern "C" __global__ void shift_##rank##d(const __grid_constant__ Maps maps, const Box<rank>* places, int count) { \
        shift<rank>(maps, places, count); \
    }
KERNEL(1)
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(5)
