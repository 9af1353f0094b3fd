// tcgen05: allocation of tensor memory, fences, waits and commits.
// Source: PTX ISA, "TensorCore 5th Generation Family Instructions": Tensor Memory Allocation and Management,
// Specialized Synchronization, Async Synchronization.
#include <algorithm>

#include "access.hpp"
#include "tcgen05.hpp"

namespace megagen::emulator {

namespace {

// --- Allocation. op[1] address, op[2] columns, choice .cta_group ---

void wake_waiting(Machine& m) {
  for (const auto& cta : m.slots) {
    if (!cta) continue;
    for (const auto& w : cta->warps) {
      for (const auto& f : w->fragments) {
        if (f->wait == Wait::Tensor) m.wake(*w, *f);
      }
    }
  }
}

/// Gives columns to a CTA: they hold garbage.
void assign_columns(Machine& m, Cta& cta, uint32_t column, uint32_t columns) {
  TensorMemory& memory = tensor_memory(cta);
  memory.assign(&cta, column, columns);
  cta.tensor_allocations.push_back({column, columns});
  cta.tensor_limit = columns;
  for (uint32_t lane = 0; lane < kTensorLanes; ++lane) {
    const uint64_t at = TensorMemory::offset(lane, column);
    memset(memory.region.undefined + at, 0xFF, columns * 4);
    for (uint32_t c = 0; c < columns; c += 2) {
      const uint64_t garbage = m.random.next();
      memcpy(memory.region.data + at + c * 4, &garbage, 8);
    }
  }
}

void release_columns(Cta& cta, uint32_t column, uint32_t columns) {
  tensor_memory(cta).assign(nullptr, column, columns);
  auto& list = cta.tensor_allocations;
  list.erase(std::find(list.begin(), list.end(), std::make_pair(column, columns)));
}

/// The request of the pair's other CTA, if it has arrived and fits this one's.
Cta::TensorRequest* request_of_peer(Exec& x, const std::vector<Cta*>& pair) {
  const Cta::TensorRequest& mine = x.cta().tensor_request;
  Cta::TensorRequest& other = (pair[0] == &x.cta() ? pair[1] : pair[0])->tensor_request;
  if (!other.warp || other.granted) return nullptr;
  if (other.frees != mine.frees || other.columns != mine.columns ||
      (mine.frees && other.column != mine.column)) {
    fail(ErrorKind::Emulator,
         format("the CTAs of a pair %s different tensor memory together: %u and %u columns "
                "(undefined behaviour)",
                mine.frees ? "free" : "allocate", mine.columns, other.columns));
  }
  return &other;
}

/// Meets the pair's other warp. `grant` takes effect for both and tells whether it could. True: go on.
template <class Grant>
bool together(Exec& x, const std::vector<Cta*>& pair, Cta::TensorRequest wanted, Grant grant) {
  Cta::TensorRequest& mine = x.cta().tensor_request;
  if (mine.warp && mine.warp != &x.w)
    fail(ErrorKind::Emulator, "two warps of a CTA allocate or free tensor memory at the same time");
  if (mine.granted) return true;
  mine = wanted;
  Cta::TensorRequest* other = request_of_peer(x, pair);
  if (!other || !grant(mine)) {
    x.block(Wait::Tensor, other && !wanted.frees ? wanted.columns : 0);
    return false;
  }
  other->granted = true;
  other->column = mine.column;
  wake_waiting(x.m);
  return true;
}

bool allocate(Exec& x, const std::vector<Cta*>& ctas, uint32_t columns, uint32_t& column) {
  const auto grant = [&](Cta::TensorRequest& request) {
    std::vector<TensorMemory*> memories;
    for (Cta* c : ctas) memories.push_back(&tensor_memory(*c));
    const int found = find_columns(x.m, memories, columns);
    if (found < 0) return false;
    request.column = static_cast<uint32_t>(found);
    for (Cta* c : ctas) assign_columns(x.m, *c, request.column, columns);
    return true;
  };
  Cta::TensorRequest request;
  request.warp = &x.w;
  request.columns = columns;
  if (ctas.size() == 1) {
    if (!grant(request)) {
      x.block(Wait::Tensor, columns);
      return false;
    }
    column = request.column;
    return true;
  }
  if (!together(x, ctas, request, grant)) return false;
  column = x.cta().tensor_request.column;
  x.cta().tensor_request = {};
  return true;
}

void alloc(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  require_whole_warp(x);
  const uint32_t columns = uniform_value(x, i.op[2], "number of columns");
  uniform_value(x, i.op[1], "address");
  Cta& cta = x.cta();
  const auto ctas = cta_group(x, i.choice);
  if (columns < 32 || columns > 512 || (columns & (columns - 1)))
    fail(ErrorKind::Emulator,
         format("tcgen05.alloc of %u columns: must be a power of two from 32 to 512", columns));
  if (!cta.tensor_permit)
    fail(ErrorKind::Emulator, "tcgen05.alloc after tcgen05.relinquish_alloc_permit in the same CTA");
  if (columns > cta.tensor_limit && !cta.tensor_request.granted)
    fail(ErrorKind::Emulator,
         format("tcgen05.alloc of %u columns after one of %u: allocations of a CTA may not grow", columns,
                cta.tensor_limit));
  uint32_t column = 0;
  if (!allocate(x, ctas, columns, column)) return;
  const LanePlace p = lane_place(x, i.space, x.address_of(i, 1, 0), 4, 0, 4);
  if (!p.region || p.region->cta != &cta)
    fail(ErrorKind::MemoryFault, "tcgen05.alloc writes the address to this CTA's shared memory only");
  require_writable(p, 4);
  x.tick();
  x.m.history.write(*p.region, p.offset, 4, x.accessor(0, uint32_t{0}));
  memcpy(p.data, &column, 4);  // lane 0
  memset(p.undefined, 0, 4);
  Clock stored;  // by the warp as a whole
  stored.before.learn(x.w.agent, 1, x.w.count);
  x.acquire(kAllLanes, stored);
  x.tick();
  x.m.touched(*p.region, p.offset, 4);
  x.note_change();
}

/// Nothing may access the columns any more: every access must be known to be complete.
void check_free(Exec& x, uint32_t column, uint32_t columns) {
  Cta& cta = x.cta();
  TensorMemory& memory = tensor_memory(cta);
  for (const auto& op : cta.cluster->tensor_ops) {
    const bool uses = std::find(op->ctas.begin(), op->ctas.end(), &cta) != op->ctas.end();
    if (uses && op->kind != TensorKind::Commit && cta.tensor_allocations.size() == 1)
      fail(ErrorKind::DataRace, "tcgen05.dealloc isn't ordered after the completion of " +
                                    op->program->describe(*op->instr) + " by " + x.m.name_of(*op->warp));
  }
  Clock known = x.publish(kAllLanes);
  known.before.join(known.tensor);
  Accessor by = x.accessor(0, uint32_t{0});
  by.program_order_from = UINT32_MAX;
  by.clock = &known;
  for (uint32_t lane = 0; lane < kTensorLanes; ++lane) {
    const uint64_t at = TensorMemory::offset(lane, column);
    x.m.history.write(memory.region, at, columns * 4, by);
    x.m.history.forget(memory.region, at, columns * 4);
  }
}

void dealloc(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  require_whole_warp(x);
  const TensorAddress address(uniform_value(x, i.op[1], "tensor memory address"));
  const uint32_t columns = uniform_value(x, i.op[2], "number of columns");
  Cta& cta = x.cta();
  const auto ctas = cta_group(x, i.choice);
  Cta::TensorRequest request;
  request.warp = &x.w;
  request.columns = columns;
  request.column = address.column;
  request.frees = true;
  const auto& list = cta.tensor_allocations;
  if (!cta.tensor_request.granted) {
    if (address.lane ||
        std::find(list.begin(), list.end(), std::make_pair(address.column, columns)) == list.end())
      fail(ErrorKind::MemoryFault,
           format("tcgen05.dealloc of %u columns at lane %u column %u: the CTA has no such allocation",
                  columns, address.lane, address.column));
    if (cta.tensor_request.warp != &x.w) check_free(x, address.column, columns);
  }
  const auto free_all = [&](Cta::TensorRequest&) {
    for (Cta* c : ctas) release_columns(*c, address.column, columns);
    return true;
  };
  if (ctas.size() == 1) {
    free_all(request);
  } else if (!together(x, ctas, request, free_all)) {
    return;
  }
  cta.tensor_request = {};
  wake_waiting(x.m);
  x.note_change();
}

void decode_alloc(Decoder& d, Instr& i) {
  i.choice = static_cast<uint8_t>(group_of(d));
  i.space = d.has(".shared::cta") ? Space::Shared : Space::Generic;
  d.address(i, d.operand(0), 1);
  i.op[2] = d.source(d.operand(1), Type::U32);
  i.fn = alloc;
}
void decode_dealloc(Decoder& d, Instr& i) {
  i.choice = static_cast<uint8_t>(group_of(d));
  i.op[1] = d.source(d.operand(0), Type::U32);
  i.op[2] = d.source(d.operand(1), Type::U32);
  i.fn = dealloc;
}

void relinquish(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  cta_group(x, i.choice);
  x.cta().tensor_permit = false;
}
void decode_relinquish(Decoder& d, Instr& i) {
  i.choice = static_cast<uint8_t>(group_of(d));
  i.fn = relinquish;
}

// --- Fences and waits ---

/// Changes what the next operations of all active lanes come after. Lanes with equal clocks go on sharing
/// one.
template <class Change>
void for_each_order(Exec& x, Change change) {
  VectorClock before, after;
  const Clock* clock = nullptr;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    VectorClock& own = tensor_order(x.w, l).after;
    const Clock& thread = x.clock_of(l);
    if (clock == &thread && own.same(before)) {
      own = after;
      continue;
    }
    clock = &thread;
    before = own;
    change(own, thread);
    after = own;
  }
}

void fence_before(Exec& x, const Instr&) {
  tensor_memory(x.cta());
  for (Mask rest = x.mask; rest;) {
    const VectorClock own = tensor_order(x.w, __builtin_ctz(rest)).after;
    Mask equal = 0;
    for (Mask look = rest; look; look &= look - 1) {
      const int l = __builtin_ctz(look);
      if (tensor_order(x.w, l).after.same(own)) equal |= 1u << l;
    }
    rest &= ~equal;
    Clock fenced;
    fenced.tensor = own;
    x.acquire(equal, fenced);
  }
}
void fence_after(Exec& x, const Instr&) {
  tensor_memory(x.cta());
  for_each_order(x, [](VectorClock& own, const Clock& thread) { own.join(thread.tensor); });
}
void decode_fence(Decoder& d, Instr& i) {
  i.fn = d.has(".fence::before_thread_sync") ? fence_before : fence_after;
}

/// choice: stores instead of loads.
void wait(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  require_whole_warp(x);
  tensor_memory(x.cta());
  if (i.choice ? x.w.tensor_storing : x.w.tensor_loading) {
    x.block(Wait::Async);
    return;
  }
  Clock learned;
  const auto kind = static_cast<uint8_t>(i.choice ? TensorKind::Store : TensorKind::Load);
  for (const auto& s : x.cta().tensor_streams) {
    if (s.warp == x.w.index && s.kind == kind)
      learned.before.learn(s.done, kAllLanes, x.m.agent_count(s.done));
  }
  x.acquire(kAllLanes, learned);
  for_each_order(x, [&](VectorClock& own, const Clock&) { own.join(learned.before); });
  if (i.choice) return;
  for (const auto& [offset, source] : x.w.tensor_registers) {
    uint32_t& undefined = x.undef[offset >> 7];
    if (undefined != kAllLanes) continue;  // overwritten since
    const size_t at = source.index * static_cast<size_t>(kLanes);
    memcpy(x.base[0] + offset, &source.load->values[at], 4 * kLanes);
    memcpy(x.shadow + offset, &source.load->undefined[at], 4 * kLanes);
    for (int l = 0; l < kLanes; ++l) {
      if (!source.load->undefined[at + static_cast<size_t>(l)]) undefined &= ~(1u << l);
    }
  }
  x.w.tensor_registers.clear();
}
void decode_wait(Decoder& d, Instr& i) {
  i.choice = d.has(".wait::st");
  i.fn = wait;
}

// --- Commit. op[1] mbarrier, op[2] CTA mask, choice .cta_group ---

/// The mbarriers that a commit arrives on.
std::vector<Place> targets(const Exec& x, const Instr& i, int lane) {
  const Place first = x.resolve(i.space, x.address_of(i, 1, lane), 8, lane, 8);
  if (!first.region->is_shared()) fail(ErrorKind::MemoryFault, "an mbarrier must be in shared memory");
  if (i.op[2].kind == Ref::None) return {first};
  x.require_defined(i.op[2], "CTA mask");
  const auto mask = static_cast<uint16_t>(x.value(i.op[2], lane));
  const auto& ctas = x.cta().cluster->ctas;
  std::vector<Place> out;
  for (uint32_t r = 0; r < 16; ++r) {
    if (!(mask >> r & 1)) continue;
    if (r >= ctas.size())
      fail(ErrorKind::MemoryFault, format("a multicast to CTA %u of a cluster of %zu", r, ctas.size()));
    out.push_back({ctas[r]->shared, first.offset});
  }
  if (out.empty()) fail(ErrorKind::Emulator, "a multicast to no CTA");
  return out;
}

void require_initialized(const Exec& x, const Place& p, int lane) {
  const Mbarrier& b = mbarrier_at(p);
  if (!x.m.history.enabled || (agent_of(b.init) == x.w.agent && lane_of(b.init) == lane)) return;
  if (!knows_initialization(x.clock_of(lane).before, b))
    fail(ErrorKind::DataRace,
         "the commit to the " + mbarrier_text(b) + " isn't ordered after its initialization");
}

/// Arrives once all earlier operations of the thread have executed and its earlier commits have arrived.
void commit(Exec& x, const Instr& i) {
  const int lane = single_lane(x);
  x.require_defined(i.op[1], "mbarrier address");
  cta_group(x, i.choice);
  const auto places = targets(x, i, lane);
  const Warp::TensorOrder& own = tensor_order(x.w, lane);
  Clock released = x.clock_of(lane);
  released.join(own.before);
  released.before.join(own.tracked);
  released.tensor.join(own.tracked);
  released.tensor.join(own.after);
  const auto live = x.cta().cluster->tensor_ops;
  for (const Place& p : places) {
    require_initialized(x, p, lane);
    auto op = new_tensor_op(x, i, lane, TensorKind::Commit, {p.region->cta});
    for (const auto& earlier : live) {
      const bool tracked = earlier->kind < TensorKind::Load || earlier->kind == TensorKind::Commit;
      if (earlier->warp != &x.w || earlier->lane != lane || !tracked) continue;
      earlier->next.push_back(op);
      ++op->waits;
    }
    op->run = [p, released](TensorOp& o) {
      Mbarrier& b = mbarrier_at(p);
      if (p.region->cta != o.warp->cta) b.committed = b.phase + 1;
      mbarrier_arrive(*o.m, b, released);
    };
    issue_tensor_op(std::move(op));
  }
  x.note_change();
}
void decode_commit(Decoder& d, Instr& i) {
  i.choice = static_cast<uint8_t>(group_of(d));
  i.space = d.has(".shared::cluster") ? Space::SharedCluster : Space::Generic;
  d.address(i, d.operand(0), 1);
  if (d.has(".multicast::cluster")) i.op[2] = d.source(d.operand(1), Type::U16);
  i.fn = commit;
}

constexpr const char* kAlloc = MEGAGEN_TCGEN05 "Tensor Memory Allocation and Management Instructions";

const Form kForms[] = {
    {"tcgen05(.alloc)" MEGAGEN_CTA_GROUP "(.sync)(.aligned){.shared::cta}(.b32)", kAlloc, decode_alloc},
    {"tcgen05(.dealloc)" MEGAGEN_CTA_GROUP "(.sync)(.aligned)(.b32)", kAlloc, decode_dealloc},
    {"tcgen05(.relinquish_alloc_permit)" MEGAGEN_CTA_GROUP "(.sync)(.aligned)", kAlloc, decode_relinquish},
    {"tcgen05(.fence::before_thread_sync|.fence::after_thread_sync)", MEGAGEN_TCGEN05 "tcgen05.fence",
     decode_fence},
    {"tcgen05(.wait::ld|.wait::st)(.sync)(.aligned)", MEGAGEN_TCGEN05 "tcgen05.wait", decode_wait},
    {"tcgen05(.commit)" MEGAGEN_CTA_GROUP
     "(.mbarrier::arrive::one){.shared::cluster}{.multicast::cluster}(.b64)",
     MEGAGEN_TCGEN05 "tcgen05.commit", decode_commit},
};

}  // namespace

/// A register that a load not waited for writes is copied: the copy gets the result too.
void tensor_alias(Exec& x, uint32_t from, uint32_t to) {
  const auto it = x.w.tensor_registers.find(from);
  if (it != x.w.tensor_registers.end() && x.undef[from >> 7] == kAllLanes) {
    const Warp::TensorRegister source = it->second;
    x.w.tensor_registers[to] = source;
  }
}

FormList tensor_memory_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
