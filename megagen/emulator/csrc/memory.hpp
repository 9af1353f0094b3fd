// Memory as the emulator keeps it: regions with data, undefined bits, and who last accessed each word.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "clocks.hpp"

namespace megagen::emulator {

struct Cta;
struct Mbarrier;

// Generic addresses. Shared memory of CTA r of the cluster is at kSharedWindow + (r << 24); a 32-bit shared
// address is the offset in that window. Thread-local memory looks alike to every thread.
inline constexpr uint64_t kSharedWindow = 0x740000000000, kSharedWindowBytes = uint64_t{1} << 32;
inline constexpr uint64_t kLocalWindow = 0x760000000000, kLocalWindowBytes = uint64_t{1} << 32;
inline constexpr uint64_t kGlobalBase = 0x100000000000;
inline constexpr int kCtaShift = 24;
inline constexpr int kPageShift =
    16;  // of global memory; allocations start on a page and leave one free behind them

/// Who, when and how, in 64 bits: [count 32][agent 21][lane 5][flags 6].
using Epoch = uint64_t;
enum EpochFlag : uint32_t { kValid = 1, kStrong = 2, kScopeShift = 2, kAsync = 16, kBarrierOp = 32 };
constexpr Epoch epoch(uint32_t count, Agent agent, int lane, uint32_t flags) {
  return static_cast<uint64_t>(count) << 32 | static_cast<uint64_t>(agent) << 11 |
         static_cast<uint64_t>(lane) << 6 | flags;
}
constexpr uint32_t count_of(Epoch e) { return static_cast<uint32_t>(e >> 32); }
constexpr Agent agent_of(Epoch e) { return static_cast<uint32_t>(e) >> 11; }
constexpr int lane_of(Epoch e) { return static_cast<int>(e >> 6 & 31); }
constexpr uint32_t flags_of(Epoch e) { return static_cast<uint32_t>(e & 63); }
constexpr Scope scope_of(Epoch e) { return static_cast<Scope>(e >> kScopeShift & 3); }

/// History of a 4-byte word: the last write, and the last reads by one agent at one count.
struct Cell {
  Epoch write = 0;
  Epoch read = 0;  // lane field unused
  Mask readers = 0;
  uint32_t write_line = 0;
  uint32_t read_line = 0;
  uint32_t more = 0;  // index into History::more; 0: none
};

/// Zero-filled memory that costs nothing until touched.
class LazyBytes {
 public:
  LazyBytes() = default;
  explicit LazyBytes(uint64_t bytes);
  LazyBytes(LazyBytes&& o) noexcept : data_(o.data_), bytes_(o.bytes_) { o.data_ = nullptr; }
  LazyBytes& operator=(LazyBytes&& o) noexcept;
  ~LazyBytes();
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

struct Region {
  uint64_t base = 0;  // canonical address, unique in the machine
  uint64_t size = 0;
  uint8_t* data = nullptr;
  uint8_t* undefined = nullptr;  // one byte per byte: its undefined bits
  Cell* cells = nullptr;
  int rank = 0;
  bool read_only = false;
  bool live = true;
  bool tensor = false;  // tensor memory
  Cta* cta = nullptr;   // of shared memory
  std::string name;
  uint32_t watched = 0;                                               // words that sleeping fragments poll
  std::unordered_map<uint32_t, std::unique_ptr<Mbarrier>> mbarriers;  // shared memory: by offset
  uint32_t mbarriers_from = UINT32_MAX, mbarriers_to = 0;             // where they lie
  LazyBytes data_store, undefined_store, cell_store;

  bool is_shared() const { return cta != nullptr; }
  bool holds_mbarrier(uint64_t offset, uint32_t bytes) const {
    if (offset >= mbarriers_to || offset + bytes <= mbarriers_from) return false;
    for (uint64_t at = offset & ~uint64_t{7}; at < offset + bytes; at += 8) {
      if (mbarriers.count(static_cast<uint32_t>(at))) return true;
    }
    return false;
  }
};

/// A resolved address.
struct Place {
  Region* region = nullptr;
  uint64_t offset = 0;
  uint8_t* data() const { return region->data + offset; }
  uint8_t* undefined() const { return region->undefined + offset; }
  uint64_t canonical() const { return region->base + offset; }
};

}  // namespace megagen::emulator
