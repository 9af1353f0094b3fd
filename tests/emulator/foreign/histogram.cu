// Cooperative groups: a histogram spread over the shared memory of a cluster, tile-wide reductions and scans, and a
// sum that every block of the cluster reads from its neighbours.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>

namespace cg = cooperative_groups;

constexpr int kBins = 128;  // of a block

extern "C" __global__ void __cluster_dims__(4) histogram(const int* values, int count, int* bins, int* sums) {
    __shared__ int mine[kBins];
    __shared__ int partial;
    auto cluster = cg::this_cluster();
    auto block = cg::this_thread_block();
    for (int i = block.thread_rank(); i < kBins; i += block.size()) mine[i] = 0;
    if (block.thread_rank() == 0) partial = 0;
    cluster.sync();

    int sum = 0;
    for (int i = cluster.thread_rank(); i < count; i += cluster.num_threads()) {
        const int value = values[i], bin = value % (kBins * static_cast<int>(cluster.num_blocks()));
        atomicAdd(cluster.map_shared_rank(mine, bin / kBins) + bin % kBins, 1);
        sum += value;
    }
    auto tile = cg::tiled_partition<8>(block);
    sum = cg::reduce(tile, sum, cg::plus<int>());
    if (tile.thread_rank() == 0) atomicAdd(&partial, sum);
    cluster.sync();

    for (int i = block.thread_rank(); i < kBins; i += block.size()) bins[cluster.block_rank() * kBins + i] = mine[i];
    if (block.thread_rank() < cluster.num_blocks()) {
        auto few = cg::coalesced_threads();
        const int neighbour = *cluster.map_shared_rank(&partial, block.thread_rank());
        sums[cluster.block_rank() * cluster.num_blocks() + few.thread_rank()] = cg::inclusive_scan(few, neighbour);
    }
    cluster.sync();
}
