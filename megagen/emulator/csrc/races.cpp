#include "races.hpp"

#include <cstring>

namespace megagen::emulator {

uint32_t History::new_more() {
  if (free_.empty()) {
    more_.push_back(std::make_unique<More>());
    return static_cast<uint32_t>(more_.size() - 1);
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  *more_[index] = More();
  return index;
}

void History::free_more(uint32_t index) {
  More& m = *more_[index];
  if (m.split) {
    for (Cell& c : m.bytes) {
      if (c.more) free_more(c.more);
    }
  }
  m = More();
  free_.push_back(index);
}

void History::drop_if_empty(Cell& cell) {
  if (cell.more && more_[cell.more]->reads.empty() && more_[cell.more]->writes.empty()) {
    free_more(cell.more);
    cell.more = 0;
  }
}

void History::forget(Region& region, uint64_t offset, uint32_t bytes) {
  for (uint64_t w = offset / 4; w < (offset + bytes) / 4; ++w) {
    if (region.cells[w].more) free_more(region.cells[w].more);
    region.cells[w] = Cell();
  }
}

void History::forget(Region& region) {
  const uint64_t words = (region.size + 3) / 4;
  for (uint64_t w = 0; w < words; ++w) {
    if (region.cells[w].more) free_more(region.cells[w].more);
  }
  memset(static_cast<void*>(region.cells), 0, words * sizeof(Cell));
  for (auto it = variables.begin(); it != variables.end();) {
    it = it->first >= region.base && it->first < region.base + region.size ? variables.erase(it)
                                                                           : std::next(it);
  }
}

bool History::ordered(Epoch e, Mask lanes, const Accessor& by) const {
  const Agent agent = agent_of(e);
  const uint32_t count = count_of(e);
  if (agent == by.agent && count >= by.program_order_from) {
    lanes &= ~(1u << by.lane);
    if (!lanes) return true;
  }
  if (!known(by.clock->before, e, lanes)) return false;
  for (const Clock* c : by.also) {
    if (c && !known(c->before, e, lanes)) return false;
  }
  return true;
}

bool History::known(const VectorClock& clock, Epoch e, Mask lanes) {
  if ((lanes & (lanes - 1)) == 0) return clock.knows(agent_of(e), __builtin_ctz(lanes), count_of(e));
  return clock.knows_all(agent_of(e), lanes, count_of(e));
}

/// Unordered, but morally strong with each other.
bool History::allowed(Epoch e, const Accessor& by) const {
  return (flags_of(e) & kStrong) && (by.flags & kStrong) &&
         mutual(agent_of(e), scope_of(e), by.agent, static_cast<Scope>(by.flags >> kScopeShift & 3));
}

void History::check_write(const Region& region, Epoch e, uint32_t line, uint64_t offset, const Accessor& by,
                          bool wrote) {
  if (!ordered(e, 1u << lane_of(e), by)) {
    if (!allowed(e, by)) report({RaceReport::Race, e, line, true, wrote, region.base + offset, &region}, by);
    return;
  }
  const bool crosses = (by.flags & kAsync) && !(flags_of(e) & kAsync);
  if (crosses && proxy != ProxyCheck::Off) {
    const int which = region.is_shared() ? kSharedProxy : kGlobalProxy;
    bool fenced = known(by.clock->fenced[which], e, 1u << lane_of(e));
    for (const Clock* c : by.also) fenced &= !c || known(c->fenced[which], e, 1u << lane_of(e));
    if (!fenced) {
      report({RaceReport::Proxy, e, line, true, wrote, region.base + offset, &region}, by);
    }
  }
}

template <bool kWrite>
void History::check(Region& region, Cell& cell, uint64_t offset, const Accessor& by) {
  // Against writes.
  bool keep_write = false;
  if (cell.write && cell.write != seen_write_) {
    const bool known = ordered(cell.write, 1u << lane_of(cell.write), by);
    if (known && !((by.flags & kAsync) && !(flags_of(cell.write) & kAsync))) {
      seen_write_ = cell.write;
    } else {
      check_write(region, cell.write, cell.write_line, offset, by, kWrite);
      keep_write = kWrite && !known;
    }
  }
  if (cell.more) {
    for (const Record& r : more_[cell.more]->writes) check_write(region, r.epoch, r.line, offset, by, kWrite);
  }
  if (!kWrite) {
    const Epoch mine = epoch(by.count, by.agent, 0, by.flags);
    if (cell.read == mine) {
      cell.readers |= 1u << by.lane;
      return;
    }
    if (cell.read == 0 || ordered(cell.read, cell.readers, by)) {
      cell.read = mine;
      cell.readers = 1u << by.lane;
      cell.read_line = by.line;
      return;
    }
    if (!cell.more) cell.more = new_more();
    auto& reads = more_[cell.more]->reads;
    for (size_t k = 0; k < reads.size();) {
      if (reads[k].epoch == mine) {
        reads[k].lanes |= 1u << by.lane;
        return;
      }
      if (ordered(reads[k].epoch, reads[k].lanes, by)) {
        reads[k] = reads.back();
        reads.pop_back();
      } else {
        ++k;
      }
    }
    reads.push_back({mine, 1u << by.lane, by.line});
    return;
  }
  // Against reads.
  const auto check_read = [&](Epoch e, Mask lanes, uint32_t line) {
    if (ordered(e, lanes, by)) return false;
    if (allowed(e, by)) return true;
    report({RaceReport::Race, e, line, false, true, region.base + offset, &region}, by);
    return false;
  };
  if (cell.read && !check_read(cell.read, cell.readers, cell.read_line)) cell.read = 0;
  if (cell.more) {
    auto& reads = more_[cell.more]->reads;
    for (size_t k = 0; k < reads.size();) {
      if (check_read(reads[k].epoch, reads[k].lanes, reads[k].line)) {
        ++k;
      } else {
        reads[k] = reads.back();
        reads.pop_back();
      }
    }
    auto& writes = more_[cell.more]->writes;
    for (size_t k = 0; k < writes.size();) {
      if (ordered(writes[k].epoch, 1u << lane_of(writes[k].epoch), by)) {
        writes[k] = writes.back();
        writes.pop_back();
      } else {
        ++k;
      }
    }
  }
  if (keep_write && (flags_of(cell.write) & kStrong)) {
    if (!cell.more) cell.more = new_more();
    auto& writes = more_[cell.more]->writes;
    bool merged = false;
    for (Record& r : writes) merged |= r.epoch == cell.write;
    if (!merged) writes.push_back({cell.write, 0, cell.write_line});
  }
  cell.write = epoch(by.count, by.agent, by.lane, by.flags);
  cell.write_line = by.line;
  drop_if_empty(cell);
}

template <bool kWrite>
void History::word(Region& region, Cell& cell, uint64_t offset, uint32_t byte_mask, const Accessor& by) {
  const bool split = cell.more && more_[cell.more]->split;
  if (byte_mask == 15 && !split) {
    check<kWrite>(region, cell, offset, by);
    return;
  }
  if (!split) {
    // Every byte starts with the history of the word.
    const uint32_t index = new_more();
    More& m = *more_[index];
    m.split = true;
    for (Cell& b : m.bytes) {
      b = cell;
      b.more = 0;
      if (cell.more) {
        b.more = new_more();
        more_[b.more]->reads = more_[cell.more]->reads;
        more_[b.more]->writes = more_[cell.more]->writes;
      }
    }
    if (cell.more) free_more(cell.more);
    cell = Cell();
    cell.more = index;
  }
  More& m = *more_[cell.more];
  for (int b = 0; b < 4; ++b) {
    if (byte_mask >> b & 1) check<kWrite>(region, m.bytes[b], offset + static_cast<uint64_t>(b), by);
  }
  if (kWrite && byte_mask == 15 && !m.bytes[0].more && !m.bytes[1].more && !m.bytes[2].more &&
      !m.bytes[3].more && !m.bytes[0].read && !m.bytes[1].read && !m.bytes[2].read && !m.bytes[3].read) {
    const Cell whole = m.bytes[0];
    free_more(cell.more);
    cell = whole;
  }
}

template <bool kWrite>
void History::access(Region& region, uint64_t offset, uint32_t bytes, const Accessor& by) {
  if (!enabled) return;
  seen_write_ = 0;
  const uint64_t end = offset + bytes;
  for (uint64_t at = offset & ~uint64_t{3}; at < end; at += 4) {
    uint32_t mask = 15;
    if (at < offset) mask &= 15u << (offset - at);
    if (at + 4 > end) mask &= 15u >> (at + 4 - end);
    word<kWrite>(region, region.cells[at / 4], at, mask, by);
  }
}

template void History::access<false>(Region&, uint64_t, uint32_t, const Accessor&);
template void History::access<true>(Region&, uint64_t, uint32_t, const Accessor&);

}  // namespace megagen::emulator
