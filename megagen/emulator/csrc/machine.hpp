// The machine: ranks of SMs, the CTAs that reside on them, their warps, and the scheduler.
#pragma once

#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "error.hpp"
#include "program.hpp"
#include "races.hpp"

namespace megagen::emulator {

struct Machine;
struct Warp;
struct Grid;

/// Small deterministic generator (xorshift64*); one per machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15 + 0x1234567887654321) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1D;
  }
  uint64_t below(uint64_t n) { return n ? (next() >> 11) % n : 0; }

 private:
  uint64_t state_;
};

inline constexpr uint64_t kWaitTicks = 4096;  // scheduler steps after which a try_wait gives up

struct ArchInfo {
  int compute_capability = 90;
  uint32_t shared_per_sm = 233472, shared_per_cta = 232448, registers = 65536, threads_per_sm = 2048,
           ctas_per_sm = 32;
};

// --- Fragments: lanes of a warp that are at the same instruction ---

enum class Wait : uint8_t {
  None,  // ready
  Exited,
  Converge,   // an .aligned instruction waits for the rest of the warp
  WarpSync,   // lanes of a member mask
  Barrier,    // bar.sync
  Cluster,    // barrier.cluster.wait
  Mbarrier,   // try_wait
  Async,      // wait_group of any kind, or a source of registers
  Registers,  // setmaxnreg.inc
  Time,       // nanosleep
  Poll,       // a loop that reads unchanged memory
  Grid,       // griddepcontrol.wait
  Tensor,     // tcgen05.alloc and dealloc
};

/// Watches one loop: iterations that read the same values from the same places and change nothing are
/// polling.
struct LoopWatch {
  int32_t head = -1;
  uint64_t hash = 0, last_hash = 0;
  uint32_t streak = 0;
  bool changed = false;  // did something that others can see
  bool strong = false;   // read through a strong operation, an mbarrier or a clock
  bool timed = false;    // looked at a clock or slept
  bool overflow = false;
  std::vector<uint64_t> places;  // canonical word addresses read in this iteration
};

struct Fragment {
  Mask mask = 0;
  int32_t pc = 0;
  std::vector<int32_t> stack;  // return addresses
  Wait wait = Wait::None;
  uint64_t wait_detail = 0;  // barrier number, mbarrier address, group count
  Mask sync_mask = 0;
  uint64_t wake_time = 0;
  uint32_t parity = 0;
  uint64_t waiting_since = 0;  // tick, where the timeline is recorded
  bool give_up = false;        // a try_wait that must return false now
  bool timed = false;          // Poll: the loop looks at a clock
  uint32_t patience = 3;       // equal iterations before a loop counts as polling
  uint32_t ran = 0;            // instructions since another fragment of the warp ran
  LoopWatch loops[3];
  uint8_t next_loop = 0;
  std::vector<uint64_t> watched;
  std::vector<Mbarrier*> awaited;  // Wait::Mbarrier
};

struct LaneClock {
  Mask lanes = 0;
  Clock clock;
};

/// The bulk or cp.async groups of one lane, oldest first; the last one is still open.
struct LaneGroups {
  struct Group {
    uint32_t reads = 0, writes = 0;          // operations that haven't read or written yet
    uint32_t last_read = 0, last_write = 0;  // counts of the agents, for what completion teaches
  };
  std::deque<Group> groups{1};
  uint32_t first = 0;  // number of groups[0]
  struct Arrival {     // cp.async.mbarrier.arrive
    uint32_t waits_for;
    uint32_t up_to;
    Region* region;
    uint32_t offset;
  };
  std::vector<Arrival> arrivals;
  uint32_t outstanding = 0;
  uint32_t open() const { return first + static_cast<uint32_t>(groups.size()) - 1; }
  Group& group(uint32_t number) { return groups[number - first]; }
};

struct Wgmma;
struct TensorOp;      // tcgen05.hpp
struct TensorLoad;    // tcgen05.hpp
struct TensorMemory;  // tensor_memory.hpp

struct Warp {
  Cta* cta = nullptr;
  int index = 0;
  Mask live = 0;  // not exited
  Mask started = 0;
  std::vector<std::unique_ptr<Fragment>> fragments;
  bool queued = false;
  std::vector<uint8_t> register_store;
  uint8_t* registers = nullptr;
  std::vector<uint8_t> shadow_store;
  uint8_t* shadow = nullptr;
  std::vector<uint32_t> undefined;  // per 128 bytes of registers: lanes
  std::vector<uint32_t> predicates, predicate_undefined;
  Mask carry = 0;                               // the condition code register CC.CF
  std::vector<uint8_t> local, local_undefined;  // [lane][byte]
  uint32_t register_count = 0;                  // setmaxnreg
  Mask cluster_arrived = 0;             // lanes that arrived at the cluster barrier and haven't waited
  uint64_t cluster_phase[kLanes] = {};  // in which phase

  // Memory order.
  Agent agent = 0;
  uint32_t count = 1;
  uint32_t first_count = 1;
  bool dirty = false;   // accesses were recorded at `count`
  uint32_t synced = 0;  // `count` after the last barrier of the whole warp, if nothing happened since
  std::vector<LaneClock> clocks;
  uint32_t fenced[2][kLanes] = {};
  struct LaneFence {
    SyncVariable released;  // what came before fences, which a strong write turns into a release
    SyncVariable acquired;  // releases seen by strong reads, which a fence turns into an acquire
  };
  std::vector<LaneFence> fences;  // per lane, made on first use

  // Asynchronous operations.
  std::unique_ptr<LaneGroups[]> bulk, copy;
  struct WgmmaEntry {
    std::shared_ptr<Wgmma> operation;
    uint32_t group;  // 0: not committed yet
  };
  std::deque<WgmmaEntry> wgmma;
  struct InFlight {
    std::shared_ptr<Wgmma> operation;
    Mask undefined;  // lanes, once the result arrives
  };
  std::unordered_map<uint32_t, InFlight>
      in_flight;  // register offset -> uncompleted operation that writes it
  uint32_t wgmma_groups = 0;
  uint64_t wgmma_issued = 0;
  bool wgmma_touched = true;  // a register of a wgmma was accessed since the last wgmma.fence

  // tcgen05, per lane: what its next operation comes after, and what a commit says is complete.
  struct TensorOrder {
    VectorClock after, tracked;
    Clock before;  // what the thread had done when it issued the latest
  };
  std::unique_ptr<TensorOrder[]> tensor_order;  // made on first use
  uint32_t tensor_loading = 0, tensor_storing = 0;
  struct TensorRegister {
    std::shared_ptr<TensorLoad> load;
    uint32_t index;  // of the load's registers
  };
  std::unordered_map<uint32_t, TensorRegister> tensor_registers;  // by offset: of loads not waited for

  void release_memory();  // of a warp whose CTA has ended: reports may still name it, nobody reads its state
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0;  // threads
  Clock clock;
  uint32_t reduced = 0;  // barrier.red
  bool reduced_all = true, reduced_any = false;
  bool all = false;  // no thread count was given
};

struct Cluster;

void recheck_barriers(Machine& m, Cta& cta);  // exec_barrier.cpp
void complete_cluster_phase(Machine& m, Cluster& cluster);

struct Cta {
  Machine* machine = nullptr;
  Grid* grid = nullptr;
  uint32_t slot = 0;
  int rank = 0, sm = 0;
  uint32_t id[3] = {0, 0, 0};
  Cluster* cluster = nullptr;
  uint32_t cluster_rank = 0;
  std::vector<std::unique_ptr<Warp>> warps;
  uint32_t live_warps = 0;
  Region* shared = nullptr;
  NamedBarrier barriers[16];
  uint32_t free_registers = 0;
  uint32_t async_in_flight = 0;                   // operations that still touch this CTA's shared memory
  struct Visit {  // an access to it by a thread of another CTA, which must come before the exit
    uint32_t count, line;
    uint64_t phase;  // of an arrive: how many phases are complete when it counts
  };
  std::map<std::tuple<Agent, int, uint32_t>, Visit> visits;  // the latest by agent, lane and mbarrier or 0
  std::unordered_map<uint64_t, uint32_t> agents;  // kind and index -> local agent
  uint32_t next_agent = 0;
  struct Warpgroup {
    std::deque<std::shared_ptr<Wgmma>> queue;  // issued by at least one warp, not executed
    uint64_t first = 0;                        // number of queue[0]
  };
  std::vector<Warpgroup> warpgroups;
  bool launched_dependents = false;

  // Tensor memory.
  struct TensorStream {  // operations of one warp that are alike in what they are pipelined with
    int warp;
    uint8_t kind;  // TensorKind
    uint64_t key;
    Agent issued, done;
    Mask lanes;  // that issued
    struct Issued {
      uint32_t count;
      int lane;
      VectorClock order;  // what came before it
    };
    std::deque<Issued> recent;  // the latest, oldest first
  };
  std::vector<TensorStream> tensor_streams;
  struct TensorRequest {  // of a warp that allocates or frees together with one of the peer CTA
    const Warp* warp = nullptr;
    uint32_t columns = 0, column = 0;
    bool frees = false, granted = false;
  };
  TensorRequest tensor_request;
  bool tensor_permit = true;
  uint32_t tensor_limit = 512;                                    // what the next allocation may take
  std::vector<std::pair<uint32_t, uint32_t>> tensor_allocations;  // first column, columns
};

struct Cluster {
  std::vector<Cta*> ctas;
  uint32_t dims[3] = {1, 1, 1};
  uint32_t id[3] = {0, 0, 0};
  uint32_t arrived = 0, expected = 0;
  uint64_t phase = 0;
  Clock clock, done;
  uint32_t live_ctas = 0;
  std::vector<std::shared_ptr<TensorOp>> tensor_ops;  // not executed yet
};

enum class AgentKind : uint64_t {
  Warp,
  CopyGroup,
  BulkRead,
  BulkWrite,
  Wgmma,
  Mbarrier,
  MbarrierInit,
  Reduction,
  TensorIssued,
  TensorDone,
};

struct Grid {
  const Program* program = nullptr;
  const FunctionInfo* entry = nullptr;
  int rank = 0;
  uint32_t dims[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  bool explicit_cluster = false;
  uint32_t dynamic_shared = 0;
  uint32_t dynamic_base = 0;  // offset in shared memory
  std::vector<uint8_t> params;
  Region* param_region = nullptr;
  const uint8_t* constants = nullptr;  // the rank's copy of the program's constant bank
  uint64_t next_cluster = 0, clusters = 0, done_clusters = 0;
  uint64_t triggered = 0;  // CTAs that launched dependents or ended
  uint64_t id = 0;
  bool programmatic = false;
  bool started = false, finished = false;
  uint32_t ctas_per_sm = 1;
  int tensor_group = 0;  // .cta_group of its tcgen05 instructions, which all must have
  Clock finish;          // everything the grid did
};

// --- The machine ---

struct Options {
  int ranks = 1, sms = 1;
  uint64_t seed = 0;
  uint64_t max_steps = 0;  // warp instructions; 0: no limit
  bool races = true, watchdog = false, timeline = false;
  bool step_clock = false;  // %clock counts the machine's warp instructions, not virtual nanoseconds
  bool collectives_order =
      false;                      // shfl, vote and other warp collectives also order memory among their lanes
  bool pipelined_copies = false;  // a tcgen05.cp executes after the tcgen05.mma that were issued before it
  ProxyCheck proxy = ProxyCheck::Error;
  ArchInfo arch;
};

struct Event {
  uint64_t due;
  uint64_t order;
  std::function<void()> run;
};
struct LaterEvent {
  bool operator()(const Event& a, const Event& b) const {
    return a.due != b.due ? a.due > b.due : a.order > b.order;
  }
};

struct Counters {
  uint64_t instructions = 0, async = 0, events = 0, matrix = 0, polls = 0;
};

struct ModuleInstance {
  Program program;
  std::vector<std::vector<uint8_t>>
      constant_store;  // per rank: the constant bank with the addresses of its variables
};

/// One wait of a fragment, for timelines. Times are scheduler steps.
struct TimelineEvent {
  uint32_t rank, sm, slot, warp;
  uint32_t lanes, wait, line, grid;
  uint64_t begin, end;
};

struct Machine {
  explicit Machine(const Options& options);
  ~Machine();

  // Set-up (launch.cpp).
  ModuleInstance* load(const std::string& ptx, const std::string& source);
  Region* allocate(int rank, uint64_t bytes, uint64_t align, const std::string& name, bool defined);
  void launch(ModuleInstance& module, const std::string& entry, int rank, const uint32_t grid[3],
              const uint32_t block[3], const uint32_t cluster[3], uint32_t dynamic_shared,
              const std::vector<uint8_t>& params, bool programmatic);

  // The scheduler (scheduler.cpp).
  /// Runs for about so many scheduler steps; true once everything has ended.
  bool run(uint64_t steps);
  void start_clusters();
  void wake(Warp& warp, Fragment& fragment);
  void enqueue(Warp& warp);
  void after(uint64_t delay, std::function<void()> run);
  uint64_t random_delay();
  void run_warp(Warp& warp);
  bool advance_time();
  bool probe();
  void retire_cta(Cta& cta);
  void progress() { ++progress_count; }
  uint64_t clock() const { return options.step_clock ? counters.instructions : time_ns; }  // of %clock

  // Memory (memory.cpp).
  Region* global_region(uint64_t address) const;
  void touched(Region& region, uint64_t offset, uint32_t bytes);  // wakes pollers
  void watch(Warp& warp, Fragment& fragment, const std::vector<uint64_t>& places);
  void unwatch(Fragment& fragment);

  // Reports (report.cpp).
  std::string name_of(const Warp& warp) const;
  std::string name_of(Agent agent) const;
  std::string describe_address(const Region& region, uint64_t address) const;
  [[noreturn]] void deadlock();
  void violation(const RaceReport& report, const Accessor& by);
  std::string locate(const Error& error, const Warp& warp, Mask lanes, const Instr& instr) const;
  std::string wait_text(const Warp& warp, const Fragment& fragment) const;

  Agent agent(Cta& cta, AgentKind kind, uint64_t index);
  uint32_t& agent_count(Agent a);
  Cta* cta_in(uint32_t slot) const { return slot < slots.size() ? slots[slot].get() : nullptr; }

  Options options;
  Random random;
  History history;
  Counters counters;
  std::vector<std::unique_ptr<ModuleInstance>> modules;
  std::vector<std::unique_ptr<Region>> regions;
  std::vector<Region*> pages;  // global memory by page
  uint64_t next_page = 0;
  std::vector<std::unique_ptr<Cta>> slots;                   // residents; a slot is one CTA's place on an SM
  std::vector<std::unique_ptr<TensorMemory>> tensor_memory;  // per rank and SM, made on first use
  std::vector<std::vector<uint32_t>> slot_counts;            // per slot: counter of each local agent
  std::vector<std::unique_ptr<Region>> slot_shared;
  std::vector<std::unique_ptr<Cta>> retired;
  std::deque<std::unique_ptr<Grid>> grids;
  std::vector<Clock> stream_clock;  // per rank: what happened before its next grid
  std::vector<std::unique_ptr<Cluster>> clusters;
  std::vector<Warp*> ready;
  std::priority_queue<Event, std::vector<Event>, LaterEvent> events;
  std::unordered_map<uint64_t, std::vector<std::pair<Warp*, uint64_t>>> watchers;  // word -> sleepers
  std::vector<TimelineEvent> timeline;
  std::vector<std::string> output;   // printf
  std::vector<std::string> reports;  // proxy violations in report mode
  std::set<uint64_t> reported;
  uint64_t tick = 0, time_ns = 1000000, event_order = 0, progress_count = 0, next_grid = 1;
  uint64_t sleeping = 0;             // watched words of all regions
  const Program* program = nullptr;  // of the running instruction
  const Instr* current = nullptr;
  Warp* current_warp = nullptr;
  Mask current_lanes = 0;
  const Program* async_program = nullptr;
  std::deque<Instr> reduction_instrs;  // tensor reductions with their element type filled in
  uint64_t probed_at = UINT64_MAX;     // progress_count when all sleepers were last given another try
  uint64_t time_step = 1000;
  uint64_t idle_progress = 0, barren_progress = 0, barren_from = 0;  // progress_count when last looked at
  uint32_t idle_rounds = 0;

 private:
  Fragment* pick(Warp& warp);
  Fragment* reconverge(Warp& warp, Fragment* fragment);
  bool start_cluster(Grid& grid);
  void start_cta(Grid& grid, Cluster& cluster, uint32_t slot, int sm, uint32_t rank_in_cluster,
                 uint64_t cluster_index);
  void finish_grid(Grid& grid);
  bool idle();
  void time_out_waits();
  void note_waits(Warp& warp);
};

/// What a handler gets. One warp instruction of the active lanes `mask`.
struct Exec {
  Machine& m;
  Warp& w;
  Fragment* f;
  const Program& program;
  Mask mask = 0;
  uint8_t* base[2];
  uint32_t* undef;
  uint8_t* shadow;
  uint32_t* pred;
  uint32_t* pred_undef;
  bool stop = false;  // the fragment can't go on, or another must run

  Cta& cta() const { return *w.cta; }

  // Operands. A register of up to 4 bytes takes 4 bytes a lane; wider ones 8 or 16.
  template <class T>
  struct View {
    uint8_t* p;
    static constexpr int kStride = sizeof(T) <= 4 ? 4 : sizeof(T);
    T operator[](int lane) const {
      T v;
      memcpy(&v, p + lane * kStride, sizeof(T));
      return v;
    }
    void set(int lane, T v) const { memcpy(p + lane * kStride, &v, sizeof(T)); }
  };
  template <class T>
  View<T> view(const Ref& r) const {
    return {base[r.bank] + r.off};
  }
  uint64_t value(const Ref& r, int lane) const {
    uint64_t v = 0;
    memcpy(&v, base[r.bank] + r.off + lane * r.width, r.width < 8 ? 4 : 8);
    return v;
  }
  void set_value(const Ref& r, int lane, uint64_t v) const {
    memcpy(base[0] + r.off + lane * r.width, &v, r.width < 8 ? 4 : 8);
  }
  Mask predicate(const Ref& r) const { return r.negated ? ~pred[r.off] : pred[r.off]; }
  void set_predicate(const Ref& r, Mask value) const {
    if (r.kind != Ref::Predicate) return;
    pred[r.off] = (pred[r.off] & ~mask) | (value & mask);
    pred_undef[r.off] &= ~mask;
  }
  void set_predicate_undefined(const Ref& r, Mask lanes) const {
    if (r.kind == Ref::Predicate) pred_undef[r.off] = (pred_undef[r.off] & ~mask) | (lanes & mask);
  }

  // Undefined bits.
  Mask undefined(const Ref& r) const {
    if (r.kind == Ref::Predicate) return pred_undef[r.off];
    return r.bank ? 0 : undef[r.off >> 7];
  }
  void define(const Ref& r) const { undef[r.off >> 7] &= ~mask; }
  /// Undefined bits of one lane of a register (0: all defined).
  uint64_t undefined_bits(const Ref& r, int lane) const;
  void set_undefined_bits(const Ref& r, int lane, uint64_t bits) const;
  void propagate(const Instr& i, int first_source, int sources);
  /// Ends a register-to-register instruction: op[0] from op[1..sources].
  void finish(const Instr& i, int sources) {
    Mask u = 0;
    for (int k = 1; k <= sources; ++k) u |= undefined(i.op[k]);
    if (__builtin_expect((u & mask) != 0, 0)) {
      propagate(i, 1, sources);
    } else {
      define(i.op[0]);
    }
  }
  /// Throws UninitializedUse if an active lane of r is undefined.
  void require_defined(const Ref& r, const char* role) const;

  template <class T>
  void store(const Ref& r, const T* values) const {
    const View<T> v = view<T>(r);
    if (mask == kAllLanes) {
      for (int l = 0; l < kLanes; ++l) v.set(l, values[l]);
    } else {
      for (Mask rest = mask; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        v.set(l, values[l]);
      }
    }
  }

  // Waiting (scheduler.cpp). block: the instruction is executed again after a wake-up.
  void block(Wait wait, uint64_t detail = 0);
  void split_inactive();
  bool converge(const Instr& i);                        // .aligned: true if the whole warp is here
  bool gather(const Instr& i, const Ref& member_mask);  // .sync with a member mask: true if all are here
  void jump(int32_t target);
  int32_t here() const { return f->pc - 1; }

  // Polling detection.
  void note_read(uint64_t place, uint32_t bytes, uint64_t value, bool strong);
  /// A loop needn't watch what nobody can write, but going through it isn't polling.
  void note_constants(uint64_t places);
  void note_time();
  void note_change();

  // Memory (memory.cpp).
  Place resolve(Space space, uint64_t address, uint32_t bytes, int lane, uint32_t align) const;
  uint64_t address_of(const Instr& i, int slot, int lane) const {
    return (i.op[slot].width == 8 ? value(i.op[slot], lane)
                                  : static_cast<uint32_t>(value(i.op[slot], lane))) +
           static_cast<uint64_t>(i.imm);
  }

  // Memory order (order.cpp).
  Accessor accessor(int lane, uint32_t flags) const;
  Accessor accessor(int lane, Order order, Scope scope, bool atomic = false) const;
  const Clock& clock_of(int lane) const;
  /// Notes accesses to another CTA's shared memory; of an arrive, the mbarrier's offset and the phase.
  void visit(const Region& region, Mask lanes, uint32_t mbarrier = 0, uint64_t phase = 0) const;
  /// What lanes publish when they release; everything they did so far.
  Clock publish(Mask lanes) const;
  void tick() const;
  void acquire(Mask lanes, const Clock& clock) const;
  void release_to(SyncVariable& variable, Mask lanes, Scope scope, bool replaces, bool release) const;
  void acquire_from(const SyncVariable& variable, Mask lanes, Scope scope, bool acquire) const;
  void fence(Scope scope, Order order) const;
  void proxy_fence(bool shared, bool global) const;
  void warp_barrier(Mask lanes) const;
};

[[noreturn]] inline void fail(ErrorKind kind, const std::string& what) { throw Error(kind, what); }

}  // namespace megagen::emulator
