#include "clocks.hpp"

#include <algorithm>

namespace megagen::emulator {

void VectorClock::drop(Chunk* chunk) {
  if (chunk && --chunk->references == 0) delete chunk;
}

void VectorClock::release() {
  if (node_ && --node_->references == 0) {
    for (Chunk* c : node_->chunks) drop(c);
    delete node_;
  }
  node_ = nullptr;
}

void VectorClock::own_node() {
  if (!node_) {
    node_ = new Node;
  } else if (node_->references > 1) {
    Node* copy = new Node{1, node_->chunks};
    for (Chunk* c : copy->chunks) {
      if (c) ++c->references;
    }
    --node_->references;
    node_ = copy;
  }
}

VectorClock::Chunk* VectorClock::own_chunk(uint32_t slot) {
  own_node();
  if (slot >= node_->chunks.size()) node_->chunks.resize(slot + 1, nullptr);
  Chunk*& c = node_->chunks[slot];
  if (!c) {
    c = new Chunk;
  } else if (c->references > 1) {
    Chunk* copy = new Chunk{1, c->entries, c->each};
    --c->references;
    c = copy;
  }
  return c;
}

uint32_t VectorClock::lane_count(const Chunk& c, const Entry& e, int lane) {
  uint32_t count = e.base;
  if (e.mask >> lane & 1) count = std::max(count, e.late);
  if (e.each >= 0) count = std::max(count, c.each[static_cast<size_t>(e.each)][static_cast<size_t>(lane)]);
  return count;
}

uint32_t VectorClock::known_count(Agent agent, int lane) const {
  const Entry* e = find(agent);
  return e ? lane_count(*node_->chunks[slot_of(agent)], *e, lane) : 0;
}

bool VectorClock::knows_all(Agent agent, Mask lanes, uint32_t count) const {
  const Entry* e = find(agent);
  if (!e) return false;
  if (e->base >= count) return true;
  if (e->late >= count && (lanes & ~e->mask) == 0) return true;
  if (e->each < 0) return false;
  const Chunk& c = *node_->chunks[slot_of(agent)];
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    if (lane_count(c, *e, __builtin_ctz(rest)) < count) return false;
  }
  return true;
}

void VectorClock::learn_in(Chunk& chunk, size_t local, Mask lanes, uint32_t count) {
  if (local >= chunk.entries.size()) chunk.entries.resize(local + 1);
  Entry& e = chunk.entries[local];
  if (count <= e.base) return;
  if (lanes == kAllLanes) {
    e.base = count;
    if (e.late <= count) e.mask = 0, e.late = 0;
    if (e.each >= 0) {
      auto& each = chunk.each[static_cast<size_t>(e.each)];
      if (*std::max_element(each.begin(), each.end()) <= count) e.each = -1;
    }
    if (e.each < 0 && chunk.each.size() > 0 &&
        std::all_of(chunk.entries.begin(), chunk.entries.end(), [](const Entry& x) { return x.each < 0; })) {
      chunk.each.clear();
    }
    return;
  }
  if (e.each < 0) {
    if (e.mask == 0 || (e.late <= count && (e.mask & ~lanes) == 0)) {
      e.late = count;
      e.mask = lanes;
      return;
    }
    if (e.late == count) {
      e.mask |= lanes;
      return;
    }
    if (e.late > count && (lanes & ~e.mask) == 0) return;
    e.each = static_cast<int32_t>(chunk.each.size());
    chunk.each.push_back({});
    auto& each = chunk.each.back();
    for (int l = 0; l < kLanes; ++l) each[static_cast<size_t>(l)] = e.mask >> l & 1 ? e.late : 0;
  }
  auto& each = chunk.each[static_cast<size_t>(e.each)];
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    auto& value = each[static_cast<size_t>(__builtin_ctz(rest))];
    value = std::max(value, count);
  }
}

void VectorClock::learn(Agent agent, Mask lanes, uint32_t count) {
  if (count == 0 || knows_all(agent, lanes, count)) return;
  learn_in(*own_chunk(slot_of(agent)), agent & ((1u << kLocalBits) - 1), lanes, count);
}

void VectorClock::merge(Chunk& into, size_t local, const Chunk& from, const Entry& other) {
  learn_in(into, local, kAllLanes, other.base);
  if (other.mask) learn_in(into, local, other.mask, other.late);
  if (other.each >= 0) {
    const auto& each = from.each[static_cast<size_t>(other.each)];
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t count = each[static_cast<size_t>(l)];
      if (count > lane_count(into, into.entries[local], l)) learn_in(into, local, 1u << l, count);
    }
  }
}

/// Whether everything that b knows is known to a.
bool VectorClock::covers(const Chunk& a, const Chunk& b) {
  for (size_t k = 0; k < b.entries.size(); ++k) {
    const Entry& y = b.entries[k];
    if (y.base == 0 && y.mask == 0 && y.each < 0) continue;
    if (k >= a.entries.size()) return false;
    const Entry& x = a.entries[k];
    if (x.base >= y.base && y.each < 0 &&
        (y.mask == 0 || x.base >= y.late || (x.late >= y.late && (y.mask & ~x.mask) == 0))) {
      continue;
    }
    if (x.each < 0 && y.each < 0 && x.base < y.base) return false;
    for (int l = 0; l < kLanes; ++l) {
      if (lane_count(a, x, l) < lane_count(b, y, l)) return false;
    }
  }
  return true;
}

void VectorClock::join(const VectorClock& other) {
  if (node_ == other.node_ || !other.node_) return;
  if (!node_) {
    *this = other;
    return;
  }
  bool mine_covers = true, other_covers = true;
  const size_t mine = node_->chunks.size(), theirs = other.node_->chunks.size();
  // First see whether one side covers the other: then pointers can stay shared.
  for (size_t s = 0; s < std::max(mine, theirs) && (mine_covers || other_covers); ++s) {
    const Chunk* a = s < mine ? node_->chunks[s] : nullptr;
    const Chunk* b = s < theirs ? other.node_->chunks[s] : nullptr;
    if (a == b) continue;
    if (mine_covers && b && (!a || !covers(*a, *b))) mine_covers = false;
    if (other_covers && a && (!b || !covers(*b, *a))) other_covers = false;
  }
  if (mine_covers) return;
  if (other_covers) {
    *this = other;
    return;
  }
  own_node();
  if (node_->chunks.size() < theirs) node_->chunks.resize(theirs, nullptr);
  for (size_t s = 0; s < theirs; ++s) {
    Chunk* b = other.node_->chunks[s];
    Chunk*& a = node_->chunks[s];
    if (a == b || !b) continue;
    if (!a || covers(*b, *a)) {
      ++b->references;
      drop(a);
      a = b;
    } else if (!covers(*a, *b)) {
      Chunk* own = own_chunk(static_cast<uint32_t>(s));
      for (size_t k = 0; k < b->entries.size(); ++k) {
        if (k >= own->entries.size()) own->entries.resize(k + 1);
        merge(*own, k, *b, b->entries[k]);
      }
    }
  }
}

}  // namespace megagen::emulator
