// Tensor memory of an SM: 128 lanes by 512 columns of 32 bits, and who has allocated which columns.
// Source: PTX ISA, "TensorCore 5th Generation Family Instructions: Tensor Memory".
#pragma once

#include "machine.hpp"
#include "mbarrier.hpp"

namespace megagen::emulator {

inline constexpr uint32_t kTensorLanes = 128, kTensorColumns = 512, kTensorUnit = 32;
inline constexpr uint32_t kTensorQuarter = 32;  // lanes that one warp of a warpgroup reaches

/// A 32-bit address: lane in the upper half, column in the lower.
struct TensorAddress {
  uint32_t lane, column;
  explicit TensorAddress(uint32_t bits) : lane(bits >> 16), column(bits & 0xFFFF) {}
};

struct TensorMemory {
  Region region;  // lane by lane
  const Cta* owner[kTensorColumns / kTensorUnit] = {};

  static uint64_t offset(uint32_t lane, uint32_t column) {
    return (static_cast<uint64_t>(lane) * kTensorColumns + column) * 4;
  }
  bool is_free(uint32_t column, uint32_t columns) const { return is_owned_by(nullptr, column, columns); }
  bool is_owned_by(const Cta* cta, uint32_t column, uint32_t columns) const;
  void assign(const Cta* cta, uint32_t column, uint32_t columns);
};

/// That of the SM on which the CTA resides.
TensorMemory& tensor_memory(Cta& cta);

/// A column from which `columns` are free in all memories, aligned to their number; negative if there is
/// none. The choice varies with the seed, but leaves larger blocks whole where it can.
int find_columns(Machine& m, const std::vector<TensorMemory*>& memories, uint32_t columns);

/// Before `cta` accesses columns of a lane.
void require_allocated(const TensorMemory& memory, const Cta& cta, uint32_t lane, uint32_t column,
                       uint32_t columns);

/// The CTAs that an instruction with .cta_group::N concerns, the even one first; they must be there.
std::vector<Cta*> cta_group(const Exec& x, int group);

}  // namespace megagen::emulator
