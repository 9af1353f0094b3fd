// mbarrier.*. Source: PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier.*".
#include "access.hpp"
#include "mbarrier.hpp"

namespace megagen::emulator {
namespace {

/// The opaque state that arrive returns and test_wait takes: the phase, and the pending count before it.
uint64_t state_of(const Mbarrier& b) { return b.phase << 20 | b.pending; }

Place place_of(Exec& x, const Instr& i, int slot, int lane) {
  return x.resolve(i.space, x.address_of(i, slot, lane), 8, lane, 8);
}

/// The object, after its initialization must have become known to these lanes.
Mbarrier& known_mbarrier(const Exec& x, const Place& p, Mask lanes) {
  Mbarrier& b = mbarrier_at(p);
  if (!x.m.history.enabled) return b;
  for (const LaneClock& g : x.w.clocks) {
    Mask inside = g.lanes & lanes;
    if (agent_of(b.init) == x.w.agent) inside &= ~(1u << lane_of(b.init));
    if (inside && !knows_initialization(g.clock.before, b)) {
      fail(ErrorKind::DataRace,
           "the use of the " + mbarrier_text(b) + " isn't ordered after its initialization");
    }
  }
  return b;
}

uint32_t operand_or(const Exec& x, const Ref& r, int lane, uint32_t otherwise) {
  return r.kind == Ref::None ? otherwise : static_cast<uint32_t>(x.value(r, lane));
}

void init(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  x.require_defined(i.op[2], "arrival count");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const Place p = place_of(x, i, 1, l);
    if (!p.region->is_shared() || p.region->cta != &x.cta())
      fail(ErrorKind::MemoryFault, "mbarrier.init needs this CTA's shared memory");
    const auto count = static_cast<uint32_t>(x.value(i.op[2], l));
    if (count < 1 || count > kMbarrierMaxCount)
      fail(ErrorKind::Emulator,
           format("mbarrier.init with count %u: must be 1 to %u", count, kMbarrierMaxCount));
    const Accessor by = x.accessor(l, uint32_t{0});
    x.m.history.write(*p.region, p.offset, 8, by);
    auto& slot = p.region->mbarriers[static_cast<uint32_t>(p.offset)];
    if (slot && !slot->waiters.empty())
      fail(ErrorKind::MemoryFault, "mbarrier.init of an mbarrier that threads wait on");
    slot = std::make_unique<Mbarrier>();
    Mbarrier& b = *slot;
    b.region = p.region;
    b.offset = static_cast<uint32_t>(p.offset);
    b.expected = b.pending = count;
    b.agent = x.m.agent(x.cta(), AgentKind::Mbarrier, b.offset);
    b.count = ++x.m.agent_count(b.agent);
    b.init = epoch(by.count, by.agent, l, kValid);
    b.init_agent = x.m.agent(x.cta(), AgentKind::MbarrierInit, static_cast<uint64_t>(x.w.index));
    b.init_count = ++x.m.agent_count(b.init_agent);
    b.init_line = by.line;
    p.region->mbarriers_from = std::min(p.region->mbarriers_from, b.offset);
    p.region->mbarriers_to = std::max(p.region->mbarriers_to, b.offset + 8);
    memset(p.undefined(), 0, 8);
    mbarrier_settle(x.m, b);
  }
  x.note_change();
}
void decode_init(Decoder& d, Instr& i) {
  i.space = space_from(d, Space::Generic);
  d.address(i, d.operand(0), 1);
  i.op[2] = d.source(d.operand(1), Type::U32);
  i.fn = init;
}

void inval(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const Place p = place_of(x, i, 1, l);
    Mbarrier& b = known_mbarrier(x, p, 1u << l);
    if (!b.waiters.empty())
      fail(ErrorKind::MemoryFault, "mbarrier.inval of an mbarrier that threads wait on");
    p.region->mbarriers.erase(static_cast<uint32_t>(p.offset));
    memset(p.undefined(), 0xFF, 8);
    x.m.history.write(*p.region, p.offset, 8, x.accessor(l, uint32_t{0}));
  }
  x.note_change();
}
void decode_inval(Decoder& d, Instr& i) {
  i.space = space_from(d, Space::Generic);
  d.address(i, d.operand(0), 1);
  i.fn = inval;
}

void expect_tx(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  x.require_defined(i.op[2], "transaction count");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    Mbarrier& b = known_mbarrier(x, place_of(x, i, 1, l), 1u << l);
    const auto bytes = static_cast<int64_t>(static_cast<uint32_t>(x.value(i.op[2], l)));
    mbarrier_expect(b, i.choice ? -bytes : bytes);
    mbarrier_settle(x.m, b);
  }
  x.note_change();
}
void decode_expect_tx(Decoder& d, Instr& i) {
  i.choice = d.has(".complete_tx");
  i.space = space_from(d, Space::Generic);
  d.address(i, d.operand(0), 1);
  i.op[2] = d.source(d.operand(1), Type::U32);
  i.fn = expect_tx;
}

/// Lanes that address the same place as the first of `lanes`.
Mask same_place(const Exec& x, const Instr& i, Mask lanes) {
  const uint64_t first = x.address_of(i, 1, __builtin_ctz(lanes));
  Mask out = 0;
  for (Mask rest = lanes; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    out |= static_cast<Mask>(x.address_of(i, 1, l) == first) << l;
  }
  return out;
}

/// op[0] state (may be absent), op[1] address, op[2] count, op[3] transaction bytes.
enum : uint16_t { kRelaxed = 1, kDrop = 2, kNoComplete = 4 };

/// An arrive is a strong read-modify-write: relaxed, it releases what came before a fence, and by itself
/// passes on the order of tcgen05 operations only.
void release_into(const Exec& x, const Instr& i, Mbarrier& b, Mask lanes) {
  const bool relaxed = i.flags & kRelaxed;
  x.visit(*b.region, lanes, b.offset, b.phase + 1);
  x.release_to(b.arriving, lanes, i.scope, false, !relaxed);
  if (relaxed) b.arriving.add(i.scope, x.w.agent, tensor_order_of(x.publish(lanes)));
}

void arrive(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  if (i.op[2].kind) x.require_defined(i.op[2], "arrival count");
  if (i.op[3].kind) x.require_defined(i.op[3], "transaction count");
  if ((x.mask & (x.mask - 1)) && !i.op[0].kind && !i.op[2].kind && !i.op[3].kind &&
      !(i.flags & (kDrop | kNoComplete)) && same_place(x, i, x.mask) == x.mask) {  // many lanes, one mbarrier
    Mbarrier& b = known_mbarrier(x, place_of(x, i, 1, __builtin_ctz(x.mask)), x.mask);
    const auto count = static_cast<uint32_t>(__builtin_popcount(x.mask));
    if (count <= b.pending) {
      release_into(x, i, b, x.mask);
      mbarrier_arrive(x.m, b, count);
      if (!(i.flags & kRelaxed)) x.tick();
      x.note_change();
      return;
    }
  }
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const Place p = place_of(x, i, 1, l);
    Mbarrier& b = known_mbarrier(x, p, 1u << l);
    const bool remote = p.region->cta != &x.cta();
    if (remote && i.op[0].kind == Ref::Value)
      fail(ErrorKind::MemoryFault, "an arrive on another CTA's mbarrier can't return its state (use _)");
    const uint32_t count = operand_or(x, i.op[2], l, 1);
    if (count < 1 || count > kMbarrierMaxCount)
      fail(ErrorKind::Emulator, format("arrival count %u: must be 1 to %u", count, kMbarrierMaxCount));
    if (i.op[3].kind) mbarrier_expect(b, static_cast<int64_t>(static_cast<uint32_t>(x.value(i.op[3], l))));
    const uint64_t state = state_of(b);
    if (i.flags & kDrop) {
      if (count > b.expected)
        fail(ErrorKind::MemoryFault,
             "arrive_drop of more than the expected count of the " + mbarrier_text(b));
      b.expected -= count;
    }
    if ((i.flags & kNoComplete) && count >= b.pending && b.tx == 0) {
      fail(ErrorKind::Emulator,
           "arrive.noComplete completes the phase of the " + mbarrier_text(b) + " (undefined behaviour)");
    }
    release_into(x, i, b, 1u << l);
    mbarrier_arrive(x.m, b, count);
    if (i.op[0].kind == Ref::Value) {
      x.set_value(i.op[0], l, state);
      x.set_undefined_bits(i.op[0], l, 0);
    }
  }
  if (!(i.flags & kRelaxed)) x.tick();
  x.note_change();
}
void decode_arrive(Decoder& d, Instr& i) {
  i.space = space_from(d, Space::Generic);
  size_t k = 0;
  if (d.operand(0).kind != AstOperand::Address) {
    if (d.operand(0).kind != AstOperand::Discard) i.op[0] = d.destination(d.operand(0), Type::B64);
    k = 1;
  }
  d.address(i, d.operand(k), 1);
  if (d.has(".expect_tx")) {
    i.op[3] = d.source(d.operand(k + 1), Type::U32);
  } else if (d.count() > k + 1) {
    i.op[2] = d.source(d.operand(k + 1), Type::U32);
  }
  i.flags =
      static_cast<uint16_t>((d.has(".relaxed") ? kRelaxed : 0) | (d.slot(0) == ".arrive_drop" ? kDrop : 0) |
                            (d.has(".noComplete") ? kNoComplete : 0));
  i.scope = scope_from(d, Scope::Cta);
  i.fn = arrive;
}

/// op[0] predicate, op[1] address, op[2] state or parity, op[3] time hint.
enum : uint16_t { kParity = 2, kTry = 4 };

void wait(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  x.require_defined(i.op[2], i.flags & kParity ? "phase parity" : "mbarrier state");
  Mask complete = 0;
  std::vector<Mbarrier*> open;
  for (Mask rest = x.mask; rest;) {
    const Mask lanes = same_place(x, i, rest);
    rest &= ~lanes;
    const Place p = place_of(x, i, 1, __builtin_ctz(lanes));
    if (p.region->cta != &x.cta()) fail(ErrorKind::MemoryFault, "a wait on another CTA's mbarrier");
    Mbarrier& b = known_mbarrier(x, p, lanes);
    x.note_read(p.canonical(), 8, b.phase, true);
    Mask done = 0;
    for (Mask look = lanes; look; look &= look - 1) {
      const int l = __builtin_ctz(look);
      const uint64_t v = x.value(i.op[2], l);
      done |=
          static_cast<Mask>(i.flags & kParity ? b.completed(static_cast<uint32_t>(v) & 1) : b.phase > v >> 20)
          << l;
    }
    complete |= done;
    if (done) {
      x.acquire_from(b.done, done, i.scope, !(i.flags & kRelaxed));
      b.awaited = b.phase;
    }
    if (done != lanes) open.push_back(&b);
  }
  if ((i.flags & kTry) && !complete && !x.f->give_up && x.m.random.below(16) != 0) {
    x.f->parity = static_cast<uint32_t>(x.value(i.op[2], __builtin_ctz(x.mask))) & 1;
    x.block(Wait::Mbarrier, open.front()->region->base + open.front()->offset);
    x.f->wake_time = x.m.tick + kWaitTicks / 2;
    for (Mbarrier* b : open) b->waiters.push_back({&x.w, x.f});
    x.f->awaited = std::move(open);
    return;
  }
  x.f->give_up = false;
  x.set_predicate(i.op[0], complete);
}
void decode_wait(Decoder& d, Instr& i) {
  i.space = space_from(d, Space::Generic);
  i.flags = static_cast<uint16_t>((d.has(".relaxed") ? kRelaxed : 0) | (d.has(".parity") ? kParity : 0) |
                                  (d.slot(0) == ".try_wait" ? kTry : 0));
  i.op[0] = d.predicate(d.operand(0));
  d.address(i, d.operand(1), 1);
  i.op[2] = d.source(d.operand(2), d.has(".parity") ? Type::U32 : Type::B64);
  if (d.count() > 3) i.op[3] = d.source(d.operand(3), Type::U32);
  i.scope = scope_from(d, Scope::Cta);
  i.fn = wait;
}

void pending_count(Exec& x, const Instr& i) {
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    x.set_value(i.op[0], l, x.value(i.op[1], l) & kMbarrierMaxCount);
  }
  x.finish(i, 1);
}
void decode_pending_count(Decoder& d, Instr& i) {
  d.operands(i, Type::U32, {Type::B64});
  i.fn = pending_count;
}

constexpr const char* kMbarrier = "Parallel Synchronization and Communication Instructions: mbarrier";
#define SHARED "{.shared|.shared::cta}"
#define ANY_SHARED "{.shared|.shared::cta|.shared::cluster}"

const Form kForms[] = {
    {"mbarrier(.init)" SHARED "(.b64)", kMbarrier, decode_init},
    {"mbarrier(.inval)" SHARED "(.b64)", kMbarrier, decode_inval},
    {"mbarrier(.expect_tx){.relaxed}{.cta|.cluster}" ANY_SHARED "(.b64)", kMbarrier, decode_expect_tx},
    {"mbarrier(.complete_tx){.relaxed}{.cta|.cluster}" ANY_SHARED "(.b64)", kMbarrier, decode_expect_tx},
    {"mbarrier(.arrive|.arrive_drop){.expect_tx|.noComplete}{.release|.relaxed}{.cta|.cluster}" ANY_SHARED
     "(.b64)",
     kMbarrier, decode_arrive},
    {"mbarrier(.test_wait|.try_wait){.parity}{.acquire|.relaxed}{.cta|.cluster}" SHARED "(.b64)", kMbarrier,
     decode_wait},
    {"mbarrier(.pending_count)(.b64)", kMbarrier, decode_pending_count},
};

}  // namespace

FormList mbarrier_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
