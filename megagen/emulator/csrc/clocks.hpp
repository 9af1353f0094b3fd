// Vector clocks: who is known to have done what.
//
// An *agent* is a warp, or something asynchronous that a CTA has started (its bulk copies, its WGMMA reads, a
// barrier's incoming copies). Each agent has 32 lanes and one counter; an access by lane l at count c is the
// epoch (agent, l, c). A vector clock says, for every agent, up to which count each lane's accesses are known
// to have happened before. Almost always that is one number for all lanes and one later number for a few of
// them.
//
// Clocks are shared and copied on write, CTA by CTA, so that a join of two mostly equal clocks costs a
// pointer comparison per CTA.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "program.hpp"

namespace megagen::emulator {

inline constexpr int kSlotBits = 12, kLocalBits = 9;

/// (CTA slot << kLocalBits) | index within the CTA.
using Agent = uint32_t;
constexpr Agent agent_id(uint32_t slot, uint32_t local) { return slot << kLocalBits | local; }
constexpr uint32_t slot_of(Agent a) { return a >> kLocalBits; }

class VectorClock {
 public:
  VectorClock() = default;
  VectorClock(const VectorClock& other) : node_(other.node_) { retain(); }
  VectorClock(VectorClock&& other) noexcept : node_(other.node_) { other.node_ = nullptr; }
  VectorClock& operator=(VectorClock other) noexcept {
    std::swap(node_, other.node_);
    return *this;
  }
  ~VectorClock() { release(); }

  bool knows(Agent agent, int lane, uint32_t count) const {
    const Entry* e = find(agent);
    if (!e) return false;
    if (e->base >= count) return true;
    if ((e->mask >> lane & 1) && e->late >= count) return true;
    return e->each >= 0 && knows_each(agent, e->each, lane, count);
  }
  bool knows_all(Agent agent, Mask lanes, uint32_t count) const;
  /// Up to which count a lane's accesses are known.
  uint32_t known_count(Agent agent, int lane) const;
  /// Learns that `lanes` of `agent` are done up to `count`.
  void learn(Agent agent, Mask lanes, uint32_t count);
  void join(const VectorClock& other);
  bool same(const VectorClock& other) const { return node_ == other.node_; }
  bool empty() const { return node_ == nullptr; }

 private:
  struct Entry {
    uint32_t base = 0;  // all lanes
    uint32_t late = 0;  // lanes of `mask`
    Mask mask = 0;
    int32_t each = -1;  // index of an array with one number per lane
  };
  struct Chunk {  // of one CTA
    uint32_t references = 1;
    std::vector<Entry> entries;
    std::vector<std::array<uint32_t, kLanes>> each;
  };
  struct Node {
    uint32_t references = 1;
    std::vector<Chunk*> chunks;
  };

  const Entry* find(Agent agent) const {
    if (!node_) return nullptr;
    const uint32_t slot = slot_of(agent), local = agent & ((1u << kLocalBits) - 1);
    if (slot >= node_->chunks.size()) return nullptr;
    const Chunk* c = node_->chunks[slot];
    return c && local < c->entries.size() ? &c->entries[local] : nullptr;
  }
  bool knows_each(Agent agent, int32_t index, int lane, uint32_t count) const {
    return node_->chunks[slot_of(agent)]->each[static_cast<size_t>(index)][static_cast<size_t>(lane)] >=
           count;
  }
  void retain() {
    if (node_) ++node_->references;
  }
  void release();
  void own_node();
  Chunk* own_chunk(uint32_t slot);
  static void drop(Chunk* chunk);
  static bool covers(const Chunk& a, const Chunk& b);
  static uint32_t lane_count(const Chunk& c, const Entry& e, int lane);
  static void merge(Chunk& into, size_t local, const Chunk& from, const Entry& other);
  static void learn_in(Chunk& chunk, size_t local, Mask lanes, uint32_t count);

  Node* node_ = nullptr;
};

/// What a thread knows: accesses that happened before, and those of them that a proxy fence has made visible
/// to the async proxy, for shared and for global memory.
struct Clock {
  VectorClock before;
  VectorClock fenced[2];  // kShared, kGlobal
  VectorClock tensor;     // tcgen05 operations that come before, for whoever has a fence::after_thread_sync

  void join(const Clock& other) {
    before.join(other.before);
    tensor.join(other.tensor);
    fenced[0].join(other.fenced[0]);
    fenced[1].join(other.fenced[1]);
  }
  bool same(const Clock& other) const {
    return before.same(other.before) && fenced[0].same(other.fenced[0]) && fenced[1].same(other.fenced[1]) &&
           tensor.same(other.tensor);
  }
};
/// What relaxed synchronization passes on: it orders execution, hence tcgen05 operations, but not memory.
inline Clock tensor_order_of(const Clock& clock) {
  Clock out;
  out.tensor = clock.tensor;
  return out;
}
inline constexpr int kSharedProxy = 0, kGlobalProxy = 1;

}  // namespace megagen::emulator
