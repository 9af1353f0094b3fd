#include "tensor_memory.hpp"

namespace megagen::emulator {

namespace {

constexpr uint64_t kTensorCanonical = 0x7A0000000000;
constexpr uint64_t kTensorBytes = uint64_t{kTensorLanes} * kTensorColumns * 4;

}  // namespace

bool TensorMemory::is_owned_by(const Cta* cta, uint32_t column, uint32_t columns) const {
  if (column + columns > kTensorColumns) return false;
  for (uint32_t u = column / kTensorUnit; u < (column + columns + kTensorUnit - 1) / kTensorUnit; ++u) {
    if (owner[u] != cta) return false;
  }
  return true;
}

void TensorMemory::assign(const Cta* cta, uint32_t column, uint32_t columns) {
  for (uint32_t u = column / kTensorUnit; u < (column + columns) / kTensorUnit; ++u) owner[u] = cta;
}

TensorMemory& tensor_memory(Cta& cta) {
  Machine& m = *cta.machine;
  if (m.options.arch.compute_capability < 100)
    fail(ErrorKind::UnsupportedInstruction,
         "tcgen05 instructions need sm_100 or later; see PTX ISA, "
         "TensorCore 5th Generation Family Instructions");
  const auto sms = static_cast<size_t>(m.options.sms);
  const size_t index = static_cast<size_t>(cta.rank) * sms + static_cast<size_t>(cta.sm);
  if (m.tensor_memory.empty()) m.tensor_memory.resize(static_cast<size_t>(m.options.ranks) * sms);
  auto& memory = m.tensor_memory[index];
  if (memory) return *memory;
  memory = std::make_unique<TensorMemory>();
  Region& r = memory->region;
  r.base = kTensorCanonical + index * kTensorBytes;
  r.size = kTensorBytes;
  r.rank = cta.rank;
  r.tensor = true;
  r.name = format("tensor memory of rank %d SM %d", cta.rank, cta.sm);
  r.data_store = LazyBytes(kTensorBytes);
  r.undefined_store = LazyBytes(kTensorBytes);
  r.cell_store = LazyBytes(kTensorBytes / 4 * sizeof(Cell));
  r.data = r.data_store.data();
  r.undefined = r.undefined_store.data();
  r.cells = reinterpret_cast<Cell*>(r.cell_store.data());
  return *memory;
}

int find_columns(Machine& m, const std::vector<TensorMemory*>& memories, uint32_t columns) {
  const auto is_free = [&](uint32_t column, uint32_t count) {
    for (const TensorMemory* t : memories) {
      if (!t->is_free(column, count)) return false;
    }
    return true;
  };
  std::vector<uint32_t> best;
  uint32_t best_block = 2 * kTensorColumns;
  for (uint32_t column = 0; column < kTensorColumns; column += columns) {
    if (!is_free(column, columns)) continue;
    uint32_t block = columns;  // the largest free aligned block around it
    while (block < kTensorColumns && is_free(column / (2 * block) * (2 * block), 2 * block)) block *= 2;
    if (block > best_block) continue;
    if (block < best_block) best.clear();
    best_block = block;
    best.push_back(column);
  }
  return best.empty() ? -1 : static_cast<int>(best[m.random.below(best.size())]);
}

void require_allocated(const TensorMemory& memory, const Cta& cta, uint32_t lane, uint32_t column,
                       uint32_t columns) {
  if (lane >= kTensorLanes || column + columns > kTensorColumns) {
    fail(ErrorKind::MemoryFault,
         format("tensor memory lane %u, columns %u to %u: there are %u lanes and %u columns", lane, column,
                column + columns - 1, kTensorLanes, kTensorColumns));
  }
  if (memory.is_owned_by(&cta, column, columns)) return;
  fail(ErrorKind::MemoryFault, format("tensor memory columns %u to %u of CTA (%u,%u,%u) aren't all allocated "
                                      "by it",
                                      column, column + columns - 1, cta.id[0], cta.id[1], cta.id[2]));
}

std::vector<Cta*> cta_group(const Exec& x, int group) {
  Cta& cta = x.cta();
  int& used = cta.grid->tensor_group;
  if (used && used != group)
    fail(ErrorKind::Emulator,
         "this kernel has executed tcgen05 instructions with another .cta_group (undefined behaviour)");
  used = group;
  tensor_memory(cta);
  if (group == 1) return {&cta};
  const uint32_t even = cta.cluster_rank & ~1u;
  if (even + 1 >= cta.cluster->ctas.size())
    fail(ErrorKind::Emulator,
         format(".cta_group::2 needs a peer CTA, but CTA %u of this cluster of %zu has none",
                cta.cluster_rank, cta.cluster->ctas.size()));
  std::vector<Cta*> pair{cta.cluster->ctas[even], cta.cluster->ctas[even + 1]};
  for (const Cta* c : pair) {
    if (!c->live_warps && !cta.tensor_request.granted)
      fail(ErrorKind::MemoryFault, "the peer CTA of a .cta_group::2 operation has exited");
  }
  return pair;
}

}  // namespace megagen::emulator
