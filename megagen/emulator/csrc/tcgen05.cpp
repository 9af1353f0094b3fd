#include "tcgen05.hpp"

#include <algorithm>

#include "access.hpp"

namespace megagen::emulator {

namespace {

/// The pairs that the ISA guarantees to execute in the order of their issue.
bool pipelined(const Machine& m, TensorKind first, uint64_t first_key, TensorKind second,
               uint64_t second_key) {
  using K = TensorKind;
  const bool copy = first == K::Copy || first == K::Copy4;
  switch (second) {
    case K::Mma:
      return copy || first == K::Shift || (first == K::Mma && first_key == second_key);
    case K::Copy4:
      return first == K::Shift || (first == K::Mma && m.options.pipelined_copies);
    case K::Copy:
      return first == K::Mma && m.options.pipelined_copies;
    case K::Shift:
      return first == K::Mma;
    default:
      return false;
  }
}

Cta::TensorStream& stream_of(Machine& m, Cta& cta, int warp, TensorKind kind, uint64_t key) {
  for (auto& s : cta.tensor_streams) {
    if (s.warp == warp && s.kind == static_cast<uint8_t>(kind) && s.key == key) return s;
  }
  const uint64_t index = cta.tensor_streams.size();
  cta.tensor_streams.push_back({warp,
                                static_cast<uint8_t>(kind),
                                key,
                                m.agent(cta, AgentKind::TensorIssued, index),
                                m.agent(cta, AgentKind::TensorDone, index),
                                0,
                                {}});
  return cta.tensor_streams.back();
}

constexpr size_t kRecent = 256;  // issued operations of a stream that are remembered

/// Adds what pipelined operations, known to have been issued, will have done, and what came before them.
void add_pipelined(const Machine& m, const TensorOp& op, const VectorClock& issued, VectorClock& order) {
  for (const Cta* cta : op.ctas) {
    for (const auto& s : cta->tensor_streams) {
      if (!pipelined(m, static_cast<TensorKind>(s.kind), s.key, op.kind, op.key)) continue;
      for (Mask rest = s.lanes; rest; rest &= rest - 1) {
        const int l = __builtin_ctz(rest);
        const uint32_t count = issued.known_count(s.issued, l);
        order.learn(s.done, 1u << l, count);
        const auto last = std::find_if(s.recent.rbegin(), s.recent.rend(),
                                       [&](const auto& o) { return o.lane == l && o.count <= count; });
        if (last != s.recent.rend()) order.join(last->order);
      }
    }
  }
}

void start(const std::shared_ptr<TensorOp>& op);

void finish(TensorOp& op) {
  Machine& m = *op.m;
  for (Cta* c : op.ctas) --c->async_in_flight;
  auto& live = op.warp->cta->cluster->tensor_ops;
  live.erase(std::remove_if(live.begin(), live.end(), [&](const auto& o) { return o.get() == &op; }),
             live.end());
  for (const auto& n : op.next) {
    if (--n->waits == 0) start(n);
  }
  op.next.clear();
  m.progress();
  for (const auto& f : op.warp->fragments) {
    if (f->wait == Wait::Async) m.wake(*op.warp, *f);
  }
}

void start(const std::shared_ptr<TensorOp>& op) {
  op->m->after(op->m->random_delay(), [op] {
    op->m->async_program = op->program;
    try {
      op->run(*op);
    } catch (const Error& e) {
      if (e.located) throw;
      throw Error(e.kind,
                  "tcgen05 operation issued by " + op->m->name_of(*op->warp) +
                      format(" lane %d at ", op->lane) + op->program->describe(*op->instr) + ": " + e.what(),
                  true);
    }
    finish(*op);
  });
}

}  // namespace

Warp::TensorOrder& tensor_order(Warp& warp, int lane) {
  if (!warp.tensor_order) warp.tensor_order = std::make_unique<Warp::TensorOrder[]>(kLanes);
  return warp.tensor_order[static_cast<size_t>(lane)];
}

std::shared_ptr<TensorOp> new_tensor_op(Exec& x, const Instr& i, int lane, TensorKind kind,
                                        std::vector<Cta*> ctas, uint64_t key) {
  auto op = std::make_shared<TensorOp>();
  op->m = &x.m;
  op->warp = &x.w;
  op->lane = lane;
  op->instr = &i;
  op->program = &x.program;
  op->kind = kind;
  op->key = key;
  op->ctas = std::move(ctas);
  op->clock = x.publish(1u << lane);
  Warp::TensorOrder& own = tensor_order(x.w, lane);
  op->order.before = own.after;
  if (kind == TensorKind::Commit) return op;
  add_pipelined(x.m, *op, own.after, op->order.before);
  auto& stream = stream_of(x.m, x.cta(), x.w.index, kind, key);
  stream.lanes |= 1u << lane;
  op->issued = stream.issued;
  op->done = stream.done;
  op->count = ++x.m.agent_count(op->done);
  for (const auto& earlier : x.cta().cluster->tensor_ops) {
    if (pipelined(x.m, earlier->kind, earlier->key, kind, key) &&
        own.after.knows(earlier->issued, earlier->lane, earlier->count)) {
      earlier->next.push_back(op);
      ++op->waits;
    }
  }
  if (kind >= TensorKind::Load) return op;  // tcgen05.wait tracks it
  stream.recent.push_back({op->count, lane, op->order.before});
  if (stream.recent.size() > kRecent) stream.recent.pop_front();
  own.after.learn(op->issued, 1u << lane, op->count);
  own.before = op->clock;
  own.tracked.join(op->order.before);
  own.tracked.learn(op->done, 1u << lane, op->count);
  return op;
}

void issue_tensor_op(std::shared_ptr<TensorOp> op) {
  ++op->m->counters.async;
  for (Cta* c : op->ctas) ++c->async_in_flight;
  op->warp->cta->cluster->tensor_ops.push_back(op);
  if (op->waits == 0) start(op);
}

TensorPlace tensor_access(TensorOp& op, Cta& cta, uint32_t lane, uint32_t column, uint32_t columns,
                          bool write, const Clock* order, const Clock* thread) {
  TensorMemory& memory = tensor_memory(cta);
  require_allocated(memory, cta, lane, column, columns);
  Accessor by;
  by.agent = op.done;
  by.lane = op.lane;
  by.count = op.count;
  by.program_order_from = op.kind == TensorKind::Load ? 0 : UINT32_MAX;  // loads: reads only
  by.line = op.instr->line;
  by.clock = order ? order : &op.order;
  by.unfenced = thread ? thread : &op.clock;
  const uint64_t at = TensorMemory::offset(lane, column);
  if (write) {
    op.m->history.write(memory.region, at, columns * 4, by);
  } else {
    op.m->history.read(memory.region, at, columns * 4, by);
  }
  return {memory.region.data + at, memory.region.undefined + at};
}

void tensor_read_shared(TensorOp& op, Cta& cta, uint32_t address, uint8_t* data, uint8_t* undefined) {
  Region& region = *cta.shared;
  if (address < kSharedReserved || address + 16 > region.size) {
    fail(ErrorKind::MemoryFault,
         format("a matrix descriptor reaches shared address 0x%x, outside the CTA's shared memory", address));
  }
  Accessor by;
  by.agent = op.done;
  by.lane = op.lane;
  by.count = op.count;
  by.program_order_from = 0;  // reads only, and who knows of a later one knows of this one
  by.flags = kValid | kAsync;
  by.line = op.instr->line;
  by.clock = &op.clock;
  op.m->history.read(region, address, 16, by);
  memcpy(data, region.data + address, 16);
  memcpy(undefined, region.undefined + address, 16);
}

int single_lane(const Exec& x) {
  if (x.mask & (x.mask - 1))
    fail(ErrorKind::Emulator,
         format("%d threads execute this instruction, each of which would start an operation of its own; "
                "elect one",
                __builtin_popcount(x.mask)));
  return __builtin_ctz(x.mask);
}

void require_whole_warp(const Exec& x) {
  if (x.mask != kAllLanes)
    fail(ErrorKind::Emulator, "this tcgen05 instruction needs all lanes of the warp (undefined behaviour)");
}

uint32_t uniform_value(const Exec& x, const Ref& r, const char* role) {
  x.require_defined(r, role);
  const uint64_t first = x.value(r, __builtin_ctz(x.mask));
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    if (x.value(r, __builtin_ctz(rest)) != first)
      fail(ErrorKind::Emulator, format("the %s differs among the lanes (undefined behaviour)", role));
  }
  return static_cast<uint32_t>(first);
}

int group_of(const Decoder& d) { return d.has(".cta_group::2") ? 2 : 1; }

}  // namespace megagen::emulator
