// Barriers of the CTA and of the cluster, and fences.
// Source: PTX ISA, "Parallel Synchronization and Communication Instructions: bar, barrier, barrier.cluster,
// membar, fence".
#include "access.hpp"
#include "mbarrier.hpp"

namespace megagen::emulator {

namespace {

enum BarrierMode : uint8_t { Sync, Arrive, RedPopc, RedAnd, RedOr };

Exec other_exec(Machine& m, Warp& w, Fragment* f) {
  return {m,
          w,
          f,
          *w.cta->grid->program,
          f->mask,
          {w.registers, const_cast<uint8_t*>(w.cta->grid->constants)},
          w.undefined.data(),
          w.shadow,
          w.predicates.data(),
          w.predicate_undefined.data()};
}

uint32_t live_threads(const Cta& cta) {
  uint32_t n = 0;
  for (const auto& w : cta.warps) n += w->live ? kLanes : 0;
  return n;
}

void complete(Machine& m, Cta& cta, uint32_t id) {
  NamedBarrier& b = cta.barriers[id];
  const Clock clock = std::move(b.clock);
  for (const auto& w : cta.warps) {
    for (const auto& f : w->fragments) {
      if (f->wait != Wait::Barrier || f->wait_detail != id) continue;
      Exec x = other_exec(m, *w, f.get());
      if (f->mask == w->live) {
        w->clocks.clear();
        w->clocks.push_back({w->live, clock});
        w->synced = 0;
      } else {
        x.acquire(f->mask, clock);
      }
      const Instr& i = x.program.code[static_cast<size_t>(f->pc)];
      if (i.choice == RedPopc) {
        uint32_t out[kLanes];
        for (uint32_t& v : out) v = b.reduced;
        x.store(i.op[0], out);
        x.define(i.op[0]);
      } else if (i.choice == RedAnd || i.choice == RedOr) {
        x.set_predicate(i.op[0], (i.choice == RedAnd ? b.reduced_all : b.reduced_any) ? kAllLanes : 0);
      }
      ++f->pc;
      m.wake(*w, *f);
    }
  }
  b = NamedBarrier();
  m.progress();
}

}  // namespace

/// After an exit: barriers without a thread count wait for all threads that are left.
void recheck_barriers(Machine& m, Cta& cta) {
  for (uint32_t id = 0; id < 16; ++id) {
    NamedBarrier& b = cta.barriers[id];
    if (b.arrived && b.all) {
      b.expected = live_threads(cta);
      if (b.arrived >= b.expected) complete(m, cta, id);
    }
  }
  Cluster& c = *cta.cluster;
  if (c.arrived && c.arrived >= c.expected) complete_cluster_phase(m, c);
}

void complete_cluster_phase(Machine& m, Cluster& c) {
  ++c.phase;
  c.arrived = 0;
  c.done = std::move(c.clock);
  c.clock = Clock();
  m.progress();
  for (Cta* cta : c.ctas) {
    for (const auto& w : cta->warps) {
      for (const auto& f : w->fragments) {
        if (f->wait == Wait::Cluster) m.wake(*w, *f);
      }
    }
  }
}

namespace {

/// op[0] result, op[1] barrier, op[2] thread count (optional), op[3] predicate; flags: .aligned.
void barrier(Exec& x, const Instr& i) {
  if (i.flags && !x.converge(i)) return;
  x.require_defined(i.op[1], "barrier number");
  const int first = __builtin_ctz(x.mask);
  const auto id = static_cast<uint32_t>(x.value(i.op[1], first));
  if (id > 15) fail(ErrorKind::Emulator, format("barrier %u: there are 16, 0 to 15", id));
  Cta& cta = x.cta();
  NamedBarrier& b = cta.barriers[id];
  uint32_t expected = live_threads(cta);
  const bool all = i.op[2].kind == Ref::None;
  if (!all) {
    x.require_defined(i.op[2], "thread count of the barrier");
    expected = static_cast<uint32_t>(x.value(i.op[2], first));
    if (expected == 0 || expected % kLanes)
      fail(ErrorKind::Emulator,
           format("barrier %u: the thread count %u isn't a positive multiple of 32", id, expected));
  }
  if (b.arrived && b.expected != expected) {
    fail(ErrorKind::Emulator,
         format("barrier %u: this warp expects %u threads, earlier ones %u (undefined behaviour)", id,
                expected, b.expected));
  }
  b.expected = expected;
  b.all = all;
  b.arrived += x.mask == x.w.live ? kLanes : static_cast<uint32_t>(__builtin_popcount(x.mask));
  if (b.arrived > b.expected)
    fail(ErrorKind::Emulator,
         format("barrier %u: %u threads arrived, %u were expected", id, b.arrived, b.expected));
  if (i.choice >= RedPopc) {
    const Mask p = x.predicate(i.op[3]) & x.mask;
    if (x.undefined(i.op[3]) & x.mask)
      fail(ErrorKind::UninitializedUse, "the barrier's predicate is undefined");
    b.reduced += static_cast<uint32_t>(__builtin_popcount(p));
    b.reduced_all &= p == x.mask;
    b.reduced_any |= p != 0;
  }
  b.clock.join(x.publish(x.mask));
  x.tick();
  x.note_change();
  if (i.choice != Arrive) x.block(Wait::Barrier, id);
  if (b.arrived == b.expected) complete(x.m, cta, id);
}

void decode_barrier(Decoder& d, Instr& i) {
  i.flags = d.ast->opcode == "bar" || d.has(".aligned");
  i.choice = d.has(".arrive") ? Arrive
             : d.has(".popc") ? RedPopc
             : d.has(".and")  ? RedAnd
             : d.has(".or")   ? RedOr
                              : Sync;
  size_t k = 0;
  if (i.choice == RedPopc) i.op[0] = d.destination(d.operand(k++), Type::U32);
  if (i.choice == RedAnd || i.choice == RedOr) i.op[0] = d.predicate(d.operand(k++));
  i.op[1] = d.source(d.operand(k++), Type::U32);
  const size_t left = d.count() - k;
  if (i.choice >= RedPopc) {
    if (left == 2) i.op[2] = d.source(d.operand(k++), Type::U32);
    i.op[3] = d.predicate(d.operand(k));
  } else if (left) {
    i.op[2] = d.source(d.operand(k), Type::U32);
  } else if (i.choice == Arrive) {
    d.unsupported("arrive needs a thread count");
  }
  i.fn = barrier;
}

/// flags: 1 aligned, 2 relaxed.
void cluster_arrive(Exec& x, const Instr& i) {
  if ((i.flags & 1) && !x.converge(i)) return;
  Cluster& c = *x.cta().cluster;
  if (x.w.cluster_arrived & x.mask)
    fail(ErrorKind::Emulator, "barrier.cluster.arrive twice without a wait between (undefined behaviour)");
  for (Mask rest = x.mask; rest; rest &= rest - 1) x.w.cluster_phase[__builtin_ctz(rest)] = c.phase;
  x.w.cluster_arrived |= x.mask;
  c.arrived += static_cast<uint32_t>(__builtin_popcount(x.mask));
  if (!(i.flags & 2)) {
    c.clock.join(x.publish(x.mask));
    x.tick();
  } else {
    c.clock.join(tensor_order_of(x.publish(x.mask)));
    SyncVariable fenced;
    x.release_to(fenced, x.mask, Scope::Cluster, false, false);
    for (const auto& r : fenced.releases) {
      if (r.scope == Scope::Cluster) c.clock.join(r.clock);
    }
  }
  x.note_change();
  if (c.arrived >= c.expected) complete_cluster_phase(x.m, c);
}
void cluster_wait(Exec& x, const Instr& i) {
  if ((i.flags & 1) && !x.converge(i)) return;
  Cluster& c = *x.cta().cluster;
  if ((x.w.cluster_arrived & x.mask) != x.mask)
    fail(ErrorKind::Emulator, "barrier.cluster.wait without an arrive (undefined behaviour)");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    if (x.w.cluster_phase[__builtin_ctz(rest)] == c.phase) {
      x.block(Wait::Cluster);
      return;
    }
  }
  x.w.cluster_arrived &= ~x.mask;
  x.acquire(x.mask, c.done);
}
void decode_cluster(Decoder& d, Instr& i) {
  i.flags = static_cast<uint16_t>((d.has(".aligned") ? 1 : 0) | (d.has(".relaxed") ? 2 : 0));
  i.fn = d.has(".arrive") ? cluster_arrive : cluster_wait;
}

void fence(Exec& x, const Instr& i) { x.fence(i.scope, i.order); }
void decode_fence(Decoder& d, Instr& i) {
  i.scope = d.has(".cta")                   ? Scope::Cta
            : d.has(".cluster")             ? Scope::Cluster
            : d.has(".gpu") || d.has(".gl") ? Scope::Gpu
                                            : Scope::Sys;
  i.order = order_from(d, Order::AcqRel);
  i.fn = fence;
}

void fence_mbarrier_init(Exec& x, const Instr&) {
  if (x.w.fences.empty()) x.w.fences.resize(kLanes);
  for (const auto& [offset, b] : x.cta().shared->mbarriers) {
    const int lane = lane_of(b->init);
    if (agent_of(b->init) != x.w.agent || !(x.mask >> lane & 1)) continue;
    b->init_fenced = true;
    Clock initialized;
    initialized.before.learn(b->init_agent, 1u << lane, b->init_count);
    x.w.fences[static_cast<size_t>(lane)].released.add(Scope::Cluster, x.w.agent, initialized);
  }
}
void decode_fence_mbarrier_init(Decoder&, Instr& i) { i.fn = fence_mbarrier_init; }

void fence_proxy(Exec& x, const Instr& i) { x.proxy_fence(i.choice & 1, i.choice & 2); }
void decode_fence_proxy(Decoder& d, Instr& i) {
  const bool shared = d.has(".async.shared::cta") || d.has(".shared::cta") || d.has(".shared::cluster"),
             global = d.has(".global");
  i.choice = static_cast<uint8_t>(shared ? 1 : global ? 2 : 3);
  i.fn = fence_proxy;
}
void nothing(Exec&, const Instr&) {}
void decode_alias(Decoder&, Instr& i) { i.fn = nothing; }

constexpr const char* kBar = "Parallel Synchronization and Communication Instructions: bar, barrier";
constexpr const char* kCluster = "Parallel Synchronization and Communication Instructions: barrier.cluster";
constexpr const char* kFence = "Parallel Synchronization and Communication Instructions: membar, fence";

const Form kForms[] = {
    {"bar{.cta}(.sync|.arrive)", kBar, decode_barrier},
    {"bar{.cta}(.red)(.popc)(.u32)", kBar, decode_barrier},
    {"bar{.cta}(.red)(.and|.or)(.pred)", kBar, decode_barrier},
    {"barrier{.cta}(.sync|.arrive){.aligned}", kBar, decode_barrier},
    {"barrier{.cta}(.red)(.popc){.aligned}(.u32)", kBar, decode_barrier},
    {"barrier{.cta}(.red)(.and|.or){.aligned}(.pred)", kBar, decode_barrier},
    {"barrier(.cluster)(.arrive){.release|.relaxed}{.aligned}", kCluster, decode_cluster},
    {"barrier(.cluster)(.wait){.acquire}{.aligned}", kCluster, decode_cluster},
    {"fence{.sc|.acq_rel|.acquire|.release}(.cta|.cluster|.gpu|.sys)", kFence, decode_fence},
    {"membar(.cta|.gl|.sys)", kFence, decode_fence},
    {"fence(.mbarrier_init)(.release)(.cluster)", kFence, decode_fence_mbarrier_init},
    {"fence(.proxy)(.async){.global|.shared::cta|.shared::cluster}", kFence, decode_fence_proxy},
    {"fence(.proxy)(.alias)", kFence, decode_alias},
    {"fence(.proxy)(.tensormap::generic)(.release|.acquire)(.cta|.cluster|.gpu|.sys)", kFence, decode_fence},
};

}  // namespace

FormList barrier_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
