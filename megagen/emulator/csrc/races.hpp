// Happens-before checking of memory accesses. Source: PTX ISA, "Memory Consistency Model".
#pragma once

#include <functional>
#include <unordered_map>
#include <vector>

#include "memory.hpp"

namespace megagen::emulator {

/// One access as the checker sees it: who, when, how, and what the accessing thread knows.
struct Accessor {
  Agent agent = 0;
  int lane = 0;
  uint32_t count = 0;
  uint32_t program_order_from = 0;  // this lane's accesses from this count on are ordered by program order
  uint32_t flags = kValid;          // EpochFlag
  uint32_t line = 0;
  const Clock* clock = nullptr;
  const Clock* also[3] = {};        // further threads that take part: what they know counts too
  const Clock* unfenced = nullptr;  // tensor memory: what the thread knows but for tcgen05.fence
};

enum class ProxyCheck : uint8_t { Off, Report, Error };

struct RaceReport {
  enum Kind { Race, Proxy } kind;
  Epoch other;
  uint32_t other_line;
  bool other_wrote, wrote;
  uint64_t address;
  const Region* region;
};

/// What strong operations have published at an address.
struct SyncVariable {
  struct Release {
    Scope scope;
    Agent agent;
    Clock clock;
  };
  std::vector<Release> releases;

  void add(Scope scope, Agent agent, const Clock& clock);
};

class History {
 public:
  /// Called with each violation; may throw.
  std::function<void(const RaceReport&, const Accessor&)> report;
  /// Whether two agents are both inside the scope of either.
  std::function<bool(Agent, Scope, Agent, Scope)> mutual;
  ProxyCheck proxy = ProxyCheck::Error;
  bool enabled = true;

  void read(Region& region, uint64_t offset, uint32_t bytes, const Accessor& by) {
    access<false>(region, offset, bytes, by);
  }
  void write(Region& region, uint64_t offset, uint32_t bytes, const Accessor& by) {
    access<true>(region, offset, bytes, by);
  }
  /// Forgets what happened in a region (a new CTA's shared memory).
  void forget(Region& region);
  void forget(Region& region, uint64_t offset, uint32_t bytes);

  std::unordered_map<uint64_t, SyncVariable> variables;  // by canonical address

 private:
  struct Record {
    Epoch epoch;
    Mask lanes;
    uint32_t line;
  };
  struct More {
    std::vector<Record> reads, writes;
    bool split = false;
    Cell bytes[4];
  };

  template <bool kWrite>
  void access(Region& region, uint64_t offset, uint32_t bytes, const Accessor& by);
  template <bool kWrite>
  void word(Region& region, Cell& cell, uint64_t offset, uint32_t byte_mask, const Accessor& by);
  template <bool kWrite>
  void check(Region& region, Cell& cell, uint64_t offset, const Accessor& by);
  bool ordered(Epoch e, Mask lanes, const Accessor& by) const;
  static bool known(const VectorClock& clock, Epoch e, Mask lanes);
  bool allowed(Epoch e, const Accessor& by) const;
  void check_write(const Region& region, Epoch e, uint32_t line, uint64_t offset, const Accessor& by,
                   bool wrote);
  uint32_t new_more();
  void free_more(uint32_t index);
  void drop_if_empty(Cell& cell);

  std::vector<std::unique_ptr<More>> more_{1};
  std::vector<uint32_t> free_;
  Epoch seen_write_ = 0;  // last write found to be ordered, for this accessor
};

}  // namespace megagen::emulator
