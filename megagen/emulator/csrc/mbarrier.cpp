#include "mbarrier.hpp"

namespace megagen::emulator {

bool knows_initialization(const VectorClock& before, const Mbarrier& b) {
  const int lane = lane_of(b.init);
  return before.knows(agent_of(b.init), lane, count_of(b.init)) ||
         before.knows(b.init_agent, lane, b.init_count);
}

Mbarrier& mbarrier_at(const Place& place) {
  if (!place.region->is_shared()) fail(ErrorKind::MemoryFault, "an mbarrier must be in shared memory");
  const auto it = place.region->mbarriers.find(static_cast<uint32_t>(place.offset));
  if (it == place.region->mbarriers.end()) {
    fail(ErrorKind::MemoryFault, format("no initialized mbarrier at %s + %llu", place.region->name.c_str(),
                                        static_cast<unsigned long long>(place.offset)));
  }
  return *it->second;
}

std::string mbarrier_text(const Mbarrier& b) {
  return format(
      "mbarrier at shared address 0x%x (phase %llu, pending %u of %u arrivals, %lld bytes; initialized at "
      "PTX line %u)",
      b.offset, static_cast<unsigned long long>(b.phase), b.pending, b.expected, static_cast<long long>(b.tx),
      b.init_line);
}

void mbarrier_settle(Machine& m, Mbarrier& b) {
  // The 8 bytes are opaque, but change with every operation.
  const uint64_t image = b.phase << 42 ^ static_cast<uint64_t>(b.tx & 0x1FFFFF) << 21 ^ b.pending;
  memcpy(b.region->data + b.offset, &image, 8);
  m.progress();
  if (b.pending == 0 && b.tx == 0) {
    ++b.phase;
    b.pending = b.expected;
    if (b.tracks_copies) {
      Clock copies;
      copies.before.learn(b.agent, kAllLanes, b.count);
      b.arriving.add(Scope::Cta, b.agent, copies);
    }
    b.done = std::move(b.arriving);
    b.arriving = SyncVariable();
    m.agent_count(b.agent) = ++b.count;
    while (!b.waiters.empty()) m.wake(*b.waiters.back().first, *b.waiters.back().second);
  }
  m.touched(*b.region, b.offset, 8);
}

void mbarrier_arrive(Machine& m, Mbarrier& b, uint32_t arrivals) {
  if (arrivals > b.pending) {
    fail(ErrorKind::MemoryFault, format("%u arrivals on the %s: more than are pending in this phase",
                                        arrivals, mbarrier_text(b).c_str()));
  }
  b.pending -= arrivals;
  mbarrier_settle(m, b);
}

void mbarrier_arrive(Machine& m, Mbarrier& b, const Clock& completed) {
  b.arriving.add(Scope::Cta, b.agent, completed);
  mbarrier_arrive(m, b, 1);
}

void mbarrier_expect(Mbarrier& b, int64_t bytes) {
  b.tx += bytes;
  if (b.tx > kMbarrierMaxTx || b.tx < -kMbarrierMaxTx) {
    fail(ErrorKind::MemoryFault,
         format("transaction count overflows its 20 bits: %s", mbarrier_text(b).c_str()));
  }
}

void mbarrier_complete_tx(Machine& m, Mbarrier& b, int64_t bytes) {
  mbarrier_expect(b, -bytes);
  mbarrier_settle(m, b);
}

}  // namespace megagen::emulator
