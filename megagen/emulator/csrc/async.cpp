#include "async.hpp"

namespace megagen::emulator {

uint64_t combine_values(uint8_t op, Type type, uint64_t old, uint64_t value);  // exec_atomics.cpp

namespace {

/// Errors of an operation name who issued it.
template <class F>
void guarded(const AsyncCopy& c, F step) {
  c.m->async_program = c.program;
  try {
    step();
  } catch (const Error& e) {
    if (e.located) throw;
    throw Error(e.kind,
                "asynchronous operation issued by " + c.m->name_of(*c.warp) + format(" lane %d at ", c.lane) +
                    c.program->describe(*c.instr) + ": " + e.what(),
                true);
  }
}

Mbarrier& barrier_of(const AsyncCopy::Barrier& b) { return mbarrier_at({b.region, b.offset}); }

Accessor accessor(const AsyncCopy& c, const AsyncCopy::Piece& p, bool write) {
  Accessor a;
  a.program_order_from = UINT32_MAX;
  a.flags = c.async_proxy ? kValid | kAsync : kValid;
  a.line = c.instr->line;
  a.clock = &c.clock;
  if (!c.barriers.empty()) {
    const Mbarrier& b = barrier_of(c.barriers[p.barrier]);
    a.agent = b.agent;
    a.count = b.count;
  } else {
    a.agent = write ? c.write_agent : c.read_agent;
    a.count = write ? c.write_count : c.read_count;
    a.lane = c.lane;
  }
  return a;
}

void settle_groups(AsyncCopy& c, bool reads, bool writes) {
  auto& g = c.groups->group(c.group);
  if (reads) --g.reads;
  if (writes) {
    --g.writes;
    --c.groups->outstanding;
    for (size_t k = 0; k < c.groups->arrivals.size();) {
      auto& a = c.groups->arrivals[k];
      if (c.write_count <= a.up_to && --a.waits_for == 0) {
        Clock known;
        known.before.learn(c.write_agent, 1u << c.lane, a.up_to);
        Mbarrier& b = mbarrier_at({a.region, a.offset});
        c.groups->arrivals.erase(c.groups->arrivals.begin() + static_cast<long>(k));
        mbarrier_arrive(*c.m, b, known);
      } else {
        ++k;
      }
    }
  }
  c.m->progress();
  for (const auto& f : c.warp->fragments) {
    if (f->wait == Wait::Async) c.m->wake(*c.warp, *f);
  }
}

void read_sources(AsyncCopy& c) {
  for (const auto& p : c.pieces) {
    if (!p.from) continue;
    if (!p.from->read_only) c.m->history.read(*p.from, p.from_at, p.bytes, accessor(c, p, false));
    memcpy(&c.data[p.at], p.from->data + p.from_at, p.bytes);
    memcpy(&c.undefined[p.at], p.from->undefined + p.from_at, p.bytes);
    if (c.convert) c.convert(&c.data[p.at], p.bytes);
  }
  for (const auto& p : c.pieces) {
    if (p.from && p.from->is_shared()) --p.from->cta->async_in_flight;
  }
  if (c.groups) settle_groups(c, true, false);
}

void write_piece(AsyncCopy& c, const AsyncCopy::Piece& p) {
  uint8_t* to = p.to->data + p.to_at;
  uint8_t* undefined = p.to->undefined + p.to_at;
  if (c.reduce < 0) {
    memcpy(to, &c.data[p.at], p.bytes);
    memcpy(undefined, &c.undefined[p.at], p.bytes);
    return;
  }
  const auto element = static_cast<uint32_t>(bytes_of(c.type));
  for (uint32_t k = 0; k + element <= p.bytes; k += element) {
    uint64_t old = 0, value = 0, u = 0, v = 0;
    memcpy(&old, to + k, element);
    memcpy(&value, &c.data[p.at + k], element);
    memcpy(&u, undefined + k, element);
    memcpy(&v, &c.undefined[p.at + k], element);
    const uint64_t result = combine_values(static_cast<uint8_t>(c.reduce), c.type, old, value),
                   bits = u | v ? ~uint64_t{0} : 0;
    memcpy(to + k, &result, element);
    memcpy(undefined + k, &bits, element);
  }
}

void write_destinations(AsyncCopy& c) {
  for (const auto& p : c.pieces) {
    if (!p.to) continue;
    if (p.to->read_only) fail(ErrorKind::MemoryFault, "a write to " + p.to->name + ", which is read-only");
    if (p.to->holds_mbarrier(p.to_at, p.bytes))
      fail(ErrorKind::MemoryFault, "a copy over an mbarrier in " + p.to->name);
    Accessor by = accessor(c, p, true);
    if (c.reduce >= 0)
      by.flags |= kStrong | static_cast<uint32_t>(Scope::Gpu) << kScopeShift;  // relaxed at gpu scope
    c.m->history.write(*p.to, p.to_at, p.bytes, by);
    write_piece(c, p);
  }
  for (const auto& p : c.pieces) {
    if (!p.to) continue;
    if (p.to->is_shared()) --p.to->cta->async_in_flight;
    c.m->touched(*p.to, p.to_at, p.bytes);
  }
  c.m->progress();
  if (c.groups) settle_groups(c, false, true);
  for (const auto& b : c.barriers) {
    Mbarrier& object = barrier_of(b);
    object.tracks_copies = true;
    mbarrier_complete_tx(*c.m, object, b.bytes);
  }
}

}  // namespace

uint8_t* AsyncCopy::reserve(uint32_t bytes) {
  const size_t at = data.size();
  data.resize(at + bytes);
  undefined.resize(at + bytes);
  return data.data() + at;
}

void start_copy(std::shared_ptr<AsyncCopy> c) {
  Machine& m = *c->m;
  ++m.counters.async;
  for (const auto& p : c->pieces) {
    if (p.from && p.from->is_shared()) ++p.from->cta->async_in_flight;
    if (p.to && p.to->is_shared()) ++p.to->cta->async_in_flight;
  }
  m.after(m.random_delay(), [c] {
    guarded(*c, [&] { read_sources(*c); });
    c->m->after(c->m->random_delay(), [c] { guarded(*c, [&] { write_destinations(*c); }); });
  });
}

void join_group(AsyncCopy& c, Exec& x, bool bulk) {
  auto& lanes = bulk ? x.w.bulk : x.w.copy;
  if (!lanes) lanes = std::make_unique<LaneGroups[]>(kLanes);
  LaneGroups& g = lanes[static_cast<size_t>(c.lane)];
  c.groups = &g;
  c.group = g.open();
  const auto warp = static_cast<uint64_t>(x.w.index);
  c.read_agent = x.m.agent(x.cta(), bulk ? AgentKind::BulkRead : AgentKind::CopyGroup, warp);
  c.write_agent = bulk ? x.m.agent(x.cta(), AgentKind::BulkWrite, warp) : c.read_agent;
  c.read_count = ++x.m.agent_count(c.read_agent);
  c.write_count = bulk ? ++x.m.agent_count(c.write_agent) : c.read_count;
  auto& group = g.group(c.group);
  ++group.reads;
  ++group.writes;
  ++g.outstanding;
  group.last_read = c.read_count;
  group.last_write = c.write_count;
}

}  // namespace megagen::emulator
