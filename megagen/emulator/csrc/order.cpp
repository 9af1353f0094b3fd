// What threads know of each other: acquire, release, fences and barriers on vector clocks.
// Source: PTX ISA, "Memory Consistency Model": release and acquire patterns, causality order, proxy-preserved
// order.
#include <algorithm>

#include "machine.hpp"

namespace megagen::emulator {

Accessor Exec::accessor(int lane, uint32_t flags) const {
  w.dirty = true;
  Accessor a;
  a.agent = w.agent;
  a.lane = lane;
  a.count = w.count;
  a.program_order_from = w.first_count;
  a.flags = flags | kValid;
  a.line = m.current->line;
  a.clock = &clock_of(lane);
  return a;
}

Accessor Exec::accessor(int lane, Order order, Scope scope, bool atomic) const {
  uint32_t flags = 0;
  if (atomic || order != Order::Weak) {
    const Scope s = order == Order::Volatile || order == Order::Mmio ? Scope::Sys : scope;
    flags = kStrong | static_cast<uint32_t>(s) << kScopeShift;
  }
  return accessor(lane, flags);
}

void Exec::visit(const Region& region, Mask lanes, uint32_t mbarrier, uint64_t phase) const {
  if (!region.is_shared() || region.cta == w.cta || !m.history.enabled) return;
  w.dirty = true;
  for (; lanes; lanes &= lanes - 1) {
    region.cta->visits[{w.agent, __builtin_ctz(lanes), mbarrier}] = {w.count, m.current->line, phase};
  }
}

const Clock& Exec::clock_of(int lane) const {
  for (const LaneClock& g : w.clocks) {
    if (g.lanes >> lane & 1) return g.clock;
  }
  return w.clocks.front().clock;
}

Clock Exec::publish(Mask lanes) const {
  Clock out;
  bool first = true;
  for (const LaneClock& g : w.clocks) {
    if (!(g.lanes & lanes)) continue;
    if (first) {
      out = g.clock;
      first = false;
    } else {
      out.join(g.clock);
    }
  }
  const uint32_t done = w.dirty ? w.count : w.count - 1;
  out.before.learn(w.agent, lanes, done);
  for (int proxy = 0; proxy < 2; ++proxy) {
    const uint32_t* fenced = w.fenced[proxy];
    for (Mask rest = lanes; rest;) {
      const uint32_t value = fenced[__builtin_ctz(rest)];
      Mask equal = 0;
      for (Mask look = rest; look; look &= look - 1) {
        const int l = __builtin_ctz(look);
        if (fenced[l] == value) equal |= 1u << l;
      }
      out.fenced[proxy].learn(w.agent, equal, value);
      rest &= ~equal;
    }
  }
  return out;
}

void Exec::tick() const {
  if (!w.dirty) return;
  ++w.count;
  w.dirty = false;
}

void Exec::acquire(Mask lanes, const Clock& clock) const {
  for (size_t k = 0, n = w.clocks.size(); k < n; ++k) {
    const Mask inside = w.clocks[k].lanes & lanes;
    if (!inside) continue;
    Clock joined = w.clocks[k].clock;
    joined.join(clock);
    if (joined.same(w.clocks[k].clock)) continue;
    w.synced = 0;
    if (inside == w.clocks[k].lanes) {
      w.clocks[k].clock = std::move(joined);
    } else {
      w.clocks[k].lanes &= ~inside;
      w.clocks.push_back({inside, std::move(joined)});
    }
  }
}

void Exec::warp_barrier(Mask lanes) const {
  if (w.clocks.size() == 1 && !w.dirty && w.synced == w.count && lanes == w.live) return;
  Clock joined = publish(lanes);
  for (size_t k = 0; k < w.clocks.size();) {
    w.clocks[k].lanes &= ~lanes;
    if (w.clocks[k].lanes) {
      ++k;
    } else {
      w.clocks[k] = std::move(w.clocks.back());
      w.clocks.pop_back();
    }
  }
  w.clocks.push_back({lanes, std::move(joined)});
  tick();
  if (lanes == w.live) w.synced = w.count;
}

namespace {

bool includes(const Machine& m, const SyncVariable::Release& r, Agent agent, Scope scope) {
  return m.history.mutual(r.agent, r.scope, agent, scope);
}

}  // namespace

/// Scopes contain whole CTAs, so that releases of one CTA at one scope need no telling apart.
void SyncVariable::add(Scope scope, Agent agent, const Clock& clock) {
  for (auto& r : releases) {
    if (slot_of(r.agent) == slot_of(agent) && r.scope == scope) {
      r.clock.join(clock);
      return;
    }
  }
  releases.push_back({scope, agent, clock});
}

/// A strong write to `variable`. `replaces`: a plain store, which ends older release sequences; a
/// read-modify-write continues them. A relaxed write after a fence releases what came before the fence.
void Exec::release_to(SyncVariable& variable, Mask lanes, Scope scope, bool replaces, bool release) const {
  if (replaces) variable.releases.clear();
  if (release) {
    variable.add(scope, w.agent, publish(lanes));
    return;
  }
  if (w.fences.empty()) return;
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    for (const auto& r : w.fences[static_cast<size_t>(__builtin_ctz(rest))].released.releases) {
      variable.add(std::min(scope, r.scope), w.agent, r.clock);
    }
  }
}

void Exec::acquire_from(const SyncVariable& variable, Mask lanes, Scope scope, bool acquires) const {
  for (const auto& r : variable.releases) {
    if (!includes(m, r, w.agent, scope)) continue;
    if (acquires) {
      acquire(lanes, r.clock);
      continue;
    }
    if (!r.clock.tensor.empty()) acquire(lanes, tensor_order_of(r.clock));
    if (w.fences.empty()) w.fences.resize(kLanes);
    for (Mask rest = lanes; rest; rest &= rest - 1) {
      w.fences[static_cast<size_t>(__builtin_ctz(rest))].acquired.add(r.scope, r.agent, r.clock);
    }
  }
}

/// `order`: Acquire, Release or both (AcqRel). A fence leaves alone what an earlier one releases at a wider
/// scope, and what a later one may acquire at a wider scope.
void Exec::fence(Scope scope, Order order) const {
  if (w.fences.empty()) w.fences.resize(kLanes);
  for (Mask rest = order == Order::Release ? 0 : mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    auto& seen = w.fences[static_cast<size_t>(l)].acquired.releases;
    const auto outside = std::partition(seen.begin(), seen.end(), [&](const SyncVariable::Release& r) {
      return !includes(m, r, w.agent, scope);
    });
    for (auto r = outside; r != seen.end(); ++r) acquire(1u << l, r->clock);
    seen.erase(outside, seen.end());
  }
  if (order == Order::Acquire) return;
  for (Mask rest = mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    auto& released = w.fences[static_cast<size_t>(l)].released;
    auto& older = released.releases;
    older.erase(std::remove_if(older.begin(), older.end(), [&](const auto& r) { return r.scope <= scope; }),
                older.end());
    released.add(scope, w.agent, publish(1u << l));
  }
  tick();
}

void Exec::proxy_fence(bool shared, bool global) const {
  const uint32_t done = w.dirty ? w.count : w.count - 1;
  w.synced = 0;
  for (size_t k = 0, n = w.clocks.size(); k < n; ++k) {
    const Mask inside = w.clocks[k].lanes & mask;
    if (!inside) continue;
    Clock c = w.clocks[k].clock;
    if (shared) c.fenced[kSharedProxy].join(c.before);
    if (global) c.fenced[kGlobalProxy].join(c.before);
    if (c.same(w.clocks[k].clock)) continue;
    if (inside == w.clocks[k].lanes) {
      w.clocks[k].clock = std::move(c);
    } else {
      w.clocks[k].lanes &= ~inside;
      w.clocks.push_back({inside, std::move(c)});
    }
  }
  for (Mask rest = mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    if (shared) w.fenced[kSharedProxy][l] = done;
    if (global) w.fenced[kGlobalProxy][l] = done;
  }
  tick();
}

}  // namespace megagen::emulator
