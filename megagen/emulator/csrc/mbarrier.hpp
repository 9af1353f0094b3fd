// mbarrier objects. Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include "machine.hpp"

namespace megagen::emulator {

inline constexpr uint32_t kMbarrierMaxCount = (1u << 20) - 1;
inline constexpr int64_t kMbarrierMaxTx = (1 << 20) - 1;

struct Mbarrier {
  Region* region = nullptr;
  uint32_t offset = 0;
  uint32_t expected = 0;  // arrivals per phase
  uint32_t pending = 0;
  int64_t tx = 0;
  uint64_t phase = 0;  // completed phases
  Agent agent = 0;     // of what completes on it
  uint32_t count = 0;  // its clock: that of the current phase
  bool tracks_copies = false;
  uint64_t committed = 0;  // phases up to that of the latest tcgen05.commit of another CTA
  uint64_t awaited = 0;    // phases up to the latest that a wait found complete
  SyncVariable arriving, done;  // releases into the current phase, and into the one before
  Epoch init = 0;               // who initialized it
  Agent init_agent = 0;         // the same among the initializations of that warp: fence.mbarrier_init orders
  uint32_t init_count = 0;      // them and nothing else
  uint32_t init_line = 0;
  bool init_fenced = false;  // fence.mbarrier_init
  std::vector<std::pair<Warp*, Fragment*>> waiters;

  bool completed(uint32_t parity) const { return ((phase & 1) != parity); }
};

/// Whether who knows `before` knows of the initialization.
bool knows_initialization(const VectorClock& before, const Mbarrier& b);
/// The object at a place; MemoryFault if none was initialized there.
Mbarrier& mbarrier_at(const Place& place);
/// Counts arrivals of threads, whose releases are in `arriving`; completes the phase when nothing is pending.
void mbarrier_arrive(Machine& m, Mbarrier& b, uint32_t arrivals);
/// Arrives for an asynchronous operation. Whoever waits knows `completed`, at whatever scope.
void mbarrier_arrive(Machine& m, Mbarrier& b, const Clock& completed);
void mbarrier_expect(Mbarrier& b, int64_t bytes);
void mbarrier_complete_tx(Machine& m, Mbarrier& b, int64_t bytes);
void mbarrier_settle(Machine& m, Mbarrier& b);
std::string mbarrier_text(const Mbarrier& b);

}  // namespace megagen::emulator
