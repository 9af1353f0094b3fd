// Asynchronous copies, stores and reductions, and their groups.
// Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy", "Tensor copy", "st.async",
// "Parallel Synchronization and Communication Instructions: red.async".
#include "access.hpp"
#include "async.hpp"
#include "tensor_map.hpp"

namespace megagen::emulator {

int atomic_op(const Decoder& d);  // exec_atomics.cpp

namespace {

// Instr: op[0] destination, op[1] source, op[2] size, op[3] mbarrier, op[4] multicast mask.
enum : uint16_t { kMulticast = 1, kGroup = 2, kByteMask = 4, kPair = 8 };

uint64_t address_at(const Exec& x, const Ref& r, int64_t offset, int lane) {
  return (r.width == 8 ? x.value(r, lane) : static_cast<uint32_t>(x.value(r, lane))) +
         static_cast<uint64_t>(offset);
}

/// An address operand into `slot`, its offset returned.
int64_t address(Decoder& d, Instr& i, size_t operand, int slot) {
  const int64_t saved = i.imm;
  i.imm = 0;
  d.address(i, d.operand(operand), slot);
  const int64_t offset = i.imm;
  i.imm = saved;
  return offset;
}

std::shared_ptr<AsyncCopy> new_copy(Exec& x, const Instr& i, int lane) {
  auto c = std::make_shared<AsyncCopy>();
  c->m = &x.m;
  c->warp = &x.w;
  c->lane = lane;
  c->instr = &i;
  c->program = &x.program;
  c->clock = x.publish(1u << lane);
  return c;
}

/// The mbarrier's initialization must have become visible to the async proxy before a copy may complete on
/// it.
void require_visible(const Exec& x, const Mbarrier& b, int lane) {
  if (!x.m.history.enabled || b.init_fenced || x.m.history.proxy == ProxyCheck::Off) return;
  const Clock now = x.publish(1u << lane);
  if (!knows_initialization(now.before, b)) {
    fail(ErrorKind::DataRace,
         "the use of the " + mbarrier_text(b) + " isn't ordered after its initialization");
  }
  if (now.fenced[kSharedProxy].knows(agent_of(b.init), lane_of(b.init), count_of(b.init))) return;
  const std::string text =
      "the initialization of the " + mbarrier_text(b) +
      " has no fence.mbarrier_init or fence.proxy.async before this copy, which completes on it";
  if (x.m.history.proxy == ProxyCheck::Error) fail(ErrorKind::ProxyViolation, text);
  if (x.m.reported.insert(static_cast<uint64_t>(b.init_line) << 32 | x.m.current->line).second)
    x.m.reports.push_back(text);
}

/// CTAs that a copy goes to: of the multicast mask, or the one that the destination names.
std::vector<Cta*> receivers(const Exec& x, const Instr& i, int lane, const Place& destination) {
  if (!(i.flags & kMulticast)) return {destination.region->cta};
  const auto mask = static_cast<uint16_t>(x.value(i.op[4], lane));
  std::vector<Cta*> out;
  for (uint32_t r = 0; r < 16; ++r) {
    if (!(mask >> r & 1)) continue;
    if (r >= x.cta().cluster->ctas.size())
      fail(ErrorKind::MemoryFault,
           format("multicast to CTA %u of a cluster of %zu", r, x.cta().cluster->ctas.size()));
    out.push_back(x.cta().cluster->ctas[r]);
  }
  if (out.empty()) fail(ErrorKind::Emulator, "a multicast to no CTA");
  return out;
}

/// Where a copy to `cta` signals: there, or with .cta_group::2 in whichever CTA of its pair is even or odd
/// like the one that the mbarrier operand names.
Region* barrier_region(const Instr& i, const Place& named, Cta& cta) {
  if (i.flags & kPair) {
    const uint32_t rank = (cta.cluster_rank & ~1u) | (named.region->cta->cluster_rank & 1);
    if (rank >= cta.cluster->ctas.size())
      fail(ErrorKind::MemoryFault, "a copy with .cta_group::2 to a CTA that has no peer");
    Region* region = cta.cluster->ctas[rank]->shared;
    if (i.flags & kMulticast || region == named.region) return region;
    fail(ErrorKind::MemoryFault,
         "the mbarrier must be in the shared memory of the destination's CTA or its peer");
  }
  if (i.flags & kMulticast) return cta.shared;
  if (named.region->cta != &cta)
    fail(ErrorKind::MemoryFault, "the mbarrier and the destination must be in one CTA's shared memory");
  return named.region;
}

void add_barriers(Exec& x, AsyncCopy& c, const Instr& i, int lane, const std::vector<Cta*>& to,
                  uint32_t bytes) {
  x.require_defined(i.op[3], "mbarrier address");
  const Place first =
      x.resolve(Space::SharedCluster, address_at(x, i.op[3], i.offset[1], lane) & 0xFFFFFFFFu, 8, lane, 8);
  for (Cta* cta : to) {
    Region* region = barrier_region(i, first, *cta);
    require_visible(x, mbarrier_at({region, first.offset}), lane);
    c.barriers.push_back({region, static_cast<uint32_t>(first.offset), bytes});
  }
}

// --- Bulk copies ---

void bulk(Exec& x, const Instr& i) {
  x.require_defined(i.op[0], "destination address");
  x.require_defined(i.op[1], "source address");
  x.require_defined(i.op[2], "size");
  const Space to_space = static_cast<Space>(i.vector), from_space = i.space;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const auto bytes = static_cast<uint32_t>(x.value(i.op[2], l));
    if (bytes % 16)
      fail(ErrorKind::MemoryFault, format("a bulk copy of %u bytes: must be a multiple of 16", bytes));
    auto c = new_copy(x, i, l);
    const Place to = x.resolve(to_space, address_at(x, i.op[0], i.imm, l), bytes, l, 16);
    const Place from = x.resolve(from_space, address_at(x, i.op[1], i.offset[0], l), bytes, l, 16);
    c->type = i.type;
    c->reduce = i.choice ? i.choice - 1 : -1;
    if (i.flags & kGroup) {
      join_group(*c, x, true);
      c->reserve(bytes);
      if (i.flags & kByteMask) {
        const auto mask = static_cast<uint16_t>(x.value(i.op[4], l));
        for (uint32_t at = 0; at < bytes; ++at) {
          if (mask >> (at % 16) & 1)
            c->pieces.push_back({from.region, from.offset + at, to.region, to.offset + at, 1, at, 0});
        }
      } else {
        c->pieces.push_back({from.region, from.offset, to.region, to.offset, bytes, 0, 0});
      }
    } else {
      const auto ctas = receivers(x, i, l, to);
      add_barriers(x, *c, i, l, ctas, bytes);
      c->reserve(bytes);
      for (size_t k = 0; k < ctas.size(); ++k) {
        Region* region = i.flags & kMulticast ? ctas[k]->shared : to.region;
        // One read serves all receivers.
        c->pieces.push_back({k == 0 ? from.region : nullptr, from.offset, region, to.offset, bytes, 0,
                             static_cast<uint8_t>(k)});
      }
    }
    start_copy(std::move(c));
  }
  x.tick();
  x.note_change();
}

void decode_bulk(Decoder& d, Instr& i) {
  const bool group = d.has(".bulk_group");
  const size_t to_slot = d.ast->modifiers[0] == ".reduce" ? 3 : 2;
  const std::string& to = d.slot(to_slot);
  i.vector = static_cast<uint8_t>(to == ".global"        ? Space::Global
                                  : to == ".shared::cta" ? Space::Shared
                                                         : Space::SharedCluster);
  i.space = d.slot(to_slot + 1) == ".global" ? Space::Global : Space::Shared;
  i.imm = address(d, i, 0, 0);
  i.offset[0] = address(d, i, 1, 1);
  i.op[2] = d.source(d.operand(2), Type::U32);
  size_t k = 3;
  if (!group) i.offset[1] = address(d, i, k++, 3);
  if (d.has(".multicast::cluster")) {
    i.flags |= kMulticast;
    i.op[4] = d.source(d.operand(k++), Type::U16);
  }
  if (d.has(".L2::cache_hint")) ++k;
  if (d.has(".cp_mask")) {
    i.flags |= kByteMask;
    i.op[4] = d.source(d.operand(k), Type::U16);
  }
  if (group) i.flags |= kGroup;
  if (const int op = atomic_op(d); to_slot == 3 && op >= 0) {
    i.choice = static_cast<uint8_t>(op + 1);
    i.type = d.last_type();
  }
  i.fn = bulk;
}

void bulk_prefetch(Exec& x, const Instr& i) {
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    x.resolve(Space::Global, address_at(x, i.op[0], i.imm, l), static_cast<uint32_t>(x.value(i.op[2], l)), l,
              16);
  }
}
void decode_bulk_prefetch(Decoder& d, Instr& i) {
  i.imm = address(d, i, 0, 0);
  i.op[2] = d.source(d.operand(1), Type::U32);
  i.fn = bulk_prefetch;
}

// --- Groups ---

/// choice 0: bulk, 1: cp.async.
std::unique_ptr<LaneGroups[]>& groups_of(Exec& x, const Instr& i) { return i.choice ? x.w.copy : x.w.bulk; }

void commit_group(Exec& x, const Instr& i) {
  auto& lanes = groups_of(x, i);
  if (!lanes) lanes = std::make_unique<LaneGroups[]>(kLanes);
  for (Mask rest = x.mask; rest; rest &= rest - 1)
    lanes[static_cast<size_t>(__builtin_ctz(rest))].groups.emplace_back();
}
void decode_commit(Decoder& d, Instr& i) {
  i.choice = !d.has(".bulk");
  i.fn = commit_group;
}

/// imm: groups that may be pending; flags 1: .read, 2: the open group too.
void wait_group(Exec& x, const Instr& i) {
  auto& lanes = groups_of(x, i);
  if (!lanes) return;
  const bool reads_only = i.flags & 1;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const LaneGroups& g = lanes[static_cast<size_t>(__builtin_ctz(rest))];
    const size_t done = g.groups.size() - (i.flags & 2 ? 0 : 1);
    for (size_t k = 0; k + static_cast<size_t>(i.imm) < done; ++k) {
      if (g.groups[k].reads || (!reads_only && g.groups[k].writes)) {
        x.block(Wait::Async);
        return;
      }
    }
  }
  const auto warp = static_cast<uint64_t>(x.w.index);
  const Agent read_agent = x.m.agent(x.cta(), i.choice ? AgentKind::CopyGroup : AgentKind::BulkRead, warp);
  const Agent write_agent = i.choice ? read_agent : x.m.agent(x.cta(), AgentKind::BulkWrite, warp);
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    LaneGroups& g = lanes[static_cast<size_t>(l)];
    const size_t done = g.groups.size() - (i.flags & 2 ? 0 : 1);
    Clock learned;
    for (size_t k = 0; k + static_cast<size_t>(i.imm) < done; ++k) {
      learned.before.learn(read_agent, 1u << l, g.groups[k].last_read);
      if (!reads_only) learned.before.learn(write_agent, 1u << l, g.groups[k].last_write);
    }
    x.acquire(1u << l, learned);
    while (g.groups.size() > 1 && !reads_only && g.groups.size() - 1 > static_cast<size_t>(i.imm) &&
           !g.groups.front().reads && !g.groups.front().writes) {
      g.groups.pop_front();
      ++g.first;
    }
  }
}
void decode_wait(Decoder& d, Instr& i) {
  i.choice = !d.has(".bulk");
  i.flags = static_cast<uint16_t>((d.has(".read") ? 1 : 0) | (d.has(".wait_all") ? 2 : 0));
  if (!d.has(".wait_all")) {
    if (d.operand(0).kind != AstOperand::Integer) d.unsupported("the group count must be a constant");
    i.imm = d.operand(0).value;
  }
  i.fn = wait_group;
}

// --- cp.async ---

/// op[2]: source size (optional); op[4]: ignore-src predicate; imm/offset as for bulk; target: cp-size.
void copy_async(Exec& x, const Instr& i) {
  x.require_defined(i.op[0], "destination address");
  x.require_defined(i.op[1], "source address");
  const auto bytes = static_cast<uint32_t>(i.target);
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint32_t read = bytes;
    if (i.op[2].kind == Ref::Value) read = std::min(bytes, static_cast<uint32_t>(x.value(i.op[2], l)));
    if (i.op[4].kind == Ref::Predicate && (x.predicate(i.op[4]) >> l & 1)) read = 0;
    auto c = new_copy(x, i, l);
    c->async_proxy = false;
    const Place to = x.resolve(Space::Shared, address_at(x, i.op[0], i.imm, l), bytes, l, bytes);
    join_group(*c, x, false);
    c->reserve(bytes);
    if (read) {
      const Place from = x.resolve(Space::Global, address_at(x, i.op[1], i.offset[0], l), read, l, bytes);
      c->pieces.push_back({from.region, from.offset, to.region, to.offset, read, 0, 0});
    }
    if (read < bytes) c->pieces.push_back({nullptr, 0, to.region, to.offset + read, bytes - read, read, 0});
    start_copy(std::move(c));
  }
  x.tick();
  x.note_change();
}
void decode_copy_async(Decoder& d, Instr& i) {
  i.imm = address(d, i, 0, 0);
  i.offset[0] = address(d, i, 1, 1);
  if (d.operand(2).kind != AstOperand::Integer) d.unsupported("cp-size must be a constant");
  i.target = static_cast<int32_t>(d.operand(2).value);
  const bool cg = d.has(".cg");
  if (!(i.target == 16 || (!cg && (i.target == 4 || i.target == 8))))
    d.unsupported("cp-size must be 16, or with .ca 4, 8 or 16");
  const size_t left = d.count() - 3 - (d.has(".L2::cache_hint") ? 1 : 0);
  if (left == 1) {
    const AstOperand& o = d.operand(3);
    const bool is_predicate = o.negated || (o.kind == AstOperand::Name && d.is_predicate(o.name));
    if (is_predicate) {
      i.op[4] = d.predicate(o);
    } else {
      i.op[2] = d.source(o, Type::U32);
    }
  }
  i.fn = copy_async;
}

void copy_arrive(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const Place p = x.resolve(i.space, x.address_of(i, 1, l), 8, l, 8);
    Mbarrier& b = mbarrier_at(p);
    if (!i.choice) ++b.pending;
    LaneGroups* g = x.w.copy ? &x.w.copy[static_cast<size_t>(l)] : nullptr;
    if (!g || g->outstanding == 0) {
      Clock known;
      if (g) {
        const Agent a = x.m.agent(x.cta(), AgentKind::CopyGroup, static_cast<uint64_t>(x.w.index));
        for (const auto& group : g->groups) known.before.learn(a, 1u << l, group.last_write);
      }
      mbarrier_arrive(x.m, b, known);
    } else {
      const Agent a = x.m.agent(x.cta(), AgentKind::CopyGroup, static_cast<uint64_t>(x.w.index));
      g->arrivals.push_back({g->outstanding, x.m.agent_count(a), p.region, static_cast<uint32_t>(p.offset)});
    }
  }
  x.note_change();
}
void decode_copy_arrive(Decoder& d, Instr& i) {
  i.space = space_from(d, Space::Generic);
  i.choice = d.has(".noinc");
  d.address(i, d.operand(0), 1);
  i.fn = copy_arrive;
}

// --- Tensor copies ---

// op[0] shared address, op[1] tensor map, extra: coordinates, op[3] mbarrier, op[4] multicast mask.
enum TensorMode : uint8_t { TensorLoad, TensorStore, TensorPrefetch };

TensorMap map_of(const Exec& x, const Instr& i, int lane, int dimensions) {
  const LanePlace p =
      lane_place(x, Space::Generic, address_at(x, i.op[1], i.offset[0], lane), kTensorMapBytes, lane, 64);
  if (!p.region) fail(ErrorKind::MemoryFault, "a tensor map can't be in local memory");
  if (!is_zero(p.undefined, kTensorMapBytes))
    fail(ErrorKind::UninitializedUse, "the tensor map is undefined");
  TensorMap map;
  if (!decode_tensor_map(p.data, map)) fail(ErrorKind::MemoryFault, "there is no tensor map at this address");
  if (const std::string why = validate(map, x.m.options.arch.compute_capability); !why.empty())
    fail(ErrorKind::MemoryFault, "tensor map: " + why);
  if (map.rank != dimensions)
    fail(ErrorKind::MemoryFault,
         format("a %d-dimensional copy with a tensor map of %d dimensions", dimensions, map.rank));
  if (map.interleave != Interleave::None)
    fail(ErrorKind::UnsupportedInstruction,
         "interleaved tensor maps aren't implemented; see PTX ISA, Tensors");
  return map;
}

void tensor(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "tensor map address");
  for (uint32_t k = 0; k < i.extra_count; ++k)
    x.require_defined(x.program.extra[i.extra + k], "tensor coordinate");
  if (i.vector != TensorPrefetch) x.require_defined(i.op[0], "shared address");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const TensorMap map = map_of(x, i, l, static_cast<int>(i.extra_count));
    if (i.vector == TensorPrefetch) continue;
    int32_t coordinates[kMaxTensorRank] = {};
    for (uint32_t k = 0; k < i.extra_count; ++k)
      coordinates[k] = static_cast<int32_t>(x.value(x.program.extra[i.extra + k], l));
    const bool load = i.vector == TensorLoad;
    if (!load && map.type == TensorType::U4x16Align16)
      fail(ErrorKind::MemoryFault, "tensor copy: 16U4_ALIGN16B tensors can be loaded only");
    auto c = new_copy(x, i, l);
    const uint64_t shared_address = address_at(x, i.op[0], i.imm, l);
    const Place shared = x.resolve(load ? i.space : Space::Shared, shared_address, shared_bytes(map), l, 16);
    const std::string fault = copy_violation(map, coordinates, static_cast<uint32_t>(shared.offset), !load);
    if (!fault.empty()) fail(ErrorKind::MemoryFault, "tensor copy: " + fault);
    std::vector<Cta*> ctas{shared.region->cta};
    if (load) {
      ctas = receivers(x, i, l, shared);
      add_barriers(x, *c, i, l, ctas, transaction_bytes(map));
      c->convert = [map](uint8_t* data, uint32_t bytes) { convert_loaded(map.type, data, bytes); };
    } else {
      join_group(*c, x, true);
      c->type = i.type;
      c->reduce = i.choice ? i.choice - 1 : -1;
    }
    for_each_run(load ? map : clipped_by_units(map), coordinates, static_cast<uint32_t>(shared.offset),
                 [&](const TensorRun& run) {
                   const auto at = static_cast<uint32_t>(c->data.size());
                   if (!run.in_bounds) {
                     if (!load) return;
                     fill_out_of_bounds(map, c->reserve(run.bytes), run.bytes);
                   } else {
                     c->reserve(run.bytes);
                   }
                   Region* global = nullptr;
                   uint64_t global_at = 0;
                   if (run.in_bounds) {
                     const Place p = x.resolve(Space::Global, run.global, run.bytes, l, 1);
                     global = p.region;
                     global_at = p.offset;
                   }
                   if (!load) {
                     c->pieces.push_back({shared.region, run.shared, global, global_at, run.bytes, at, 0});
                     return;
                   }
                   for (size_t k = 0; k < ctas.size(); ++k) {
                     Region* to = i.flags & kMulticast ? ctas[k]->shared : shared.region;
                     if (run.shared + run.bytes > to->size)
                       fail(ErrorKind::MemoryFault, "the box reaches past the end of shared memory");
                     c->pieces.push_back({k == 0 ? global : nullptr, global_at, to, run.shared, run.bytes, at,
                                          static_cast<uint8_t>(k)});
                   }
                 });
    start_copy(std::move(c));
  }
  x.tick();
  if (i.vector != TensorPrefetch) x.note_change();
}

void tensor_coordinates(Decoder& d, Instr& i, size_t operand, const std::string& dimensions) {
  const AstOperand& o = d.operand(operand);
  i.offset[0] = address(d, i, operand, 1);
  if (o.items.empty()) d.unsupported("the tensor's coordinates are missing");
  d.extra(i, o.items[0], Type::S32, false);
  if (i.extra_count != static_cast<uint32_t>(dimensions[1] - '0'))
    d.unsupported("the number of coordinates differs from the dimensions");
}

void decode_tensor_load(Decoder& d, Instr& i) {
  i.vector = TensorLoad;
  i.space = d.has(".shared::cta") ? Space::Shared : Space::SharedCluster;
  i.imm = address(d, i, 0, 0);
  tensor_coordinates(d, i, 1, d.slot(3));
  i.offset[1] = address(d, i, 2, 3);
  if (d.has(".multicast::cluster")) {
    i.flags |= kMulticast;
    i.op[4] = d.source(d.operand(3), Type::U16);
  }
  if (d.has(".cta_group::2")) i.flags |= kPair;
  i.fn = tensor;
}
void decode_tensor_store(Decoder& d, Instr& i) {
  i.vector = TensorStore;
  i.flags |= kGroup;
  tensor_coordinates(d, i, 0, d.ast->modifiers[0] == ".reduce" ? d.slot(4) : d.slot(3));
  i.imm = address(d, i, 1, 0);
  i.fn = tensor;
}
/// A reduction's element type is the tensor map's.
void tensor_reduce(Exec& x, const Instr& i) {
  static constexpr Type kTypes[] = {Type::U8,  Type::U16, Type::U32, Type::S32, Type::U64,
                                    Type::S64, Type::F16, Type::F32, Type::F64, Type::BF16,
                                    Type::F32, Type::F32, Type::F32};
  const TensorMap map = map_of(x, i, __builtin_ctz(x.mask), static_cast<int>(i.extra_count));
  const auto index = static_cast<size_t>(map.type);
  if (index < 2 || index >= sizeof kTypes / sizeof kTypes[0])
    fail(ErrorKind::MemoryFault, "a reduction with this element type of the tensor map");
  Instr typed = i;
  typed.type = kTypes[index];
  x.m.reduction_instrs.push_back(typed);  // the copy keeps a pointer to its instruction
  tensor(x, x.m.reduction_instrs.back());
}
void decode_tensor_reduce(Decoder& d, Instr& i) {
  decode_tensor_store(d, i);
  i.choice = static_cast<uint8_t>(atomic_op(d) + 1);
  i.fn = tensor_reduce;
}
void decode_tensor_prefetch(Decoder& d, Instr& i) {
  i.vector = TensorPrefetch;
  tensor_coordinates(d, i, 0, d.slot(4));
  i.fn = tensor;
}

// --- Asynchronous stores and reductions of registers; bulk zero ---

void store_async(Exec& x, const Instr& i) {
  x.require_defined(i.op[0], "address");
  const auto element = static_cast<uint32_t>(bytes_of(i.type));
  const uint32_t bytes = element * i.extra_count;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    auto c = new_copy(x, i, l);
    c->async_proxy = false;
    c->type = i.type;
    c->reduce = i.choice ? i.choice - 1 : -1;
    const Place to = x.resolve(Space::SharedCluster, address_at(x, i.op[0], i.imm, l), bytes, l, bytes);
    add_barriers(x, *c, i, l, {to.region->cta}, bytes);
    uint8_t* data = c->reserve(bytes);
    for (uint32_t k = 0; k < i.extra_count; ++k) {
      const Ref& r = x.program.extra[i.extra + k];
      const uint64_t value = x.value(r, l), u = x.undefined_bits(r, l);
      memcpy(data + k * element, &value, element);
      memcpy(&c->undefined[k * element], &u, element);
    }
    c->pieces.push_back({nullptr, 0, to.region, to.offset, bytes, 0, 0});
    start_copy(std::move(c));
  }
  x.tick();
  x.note_change();
}
void decode_store_async(Decoder& d, Instr& i) {
  i.type = d.last_type();
  i.imm = address(d, i, 0, 0);
  d.extra(i, d.operand(1), i.type, false);
  i.offset[1] = address(d, i, 2, 3);
  if (d.ast->opcode == "red") i.choice = static_cast<uint8_t>(atomic_op(d) + 1);
  i.fn = store_async;
}

void store_bulk(Exec& x, const Instr& i) {
  x.require_defined(i.op[0], "address");
  x.require_defined(i.op[2], "size");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const auto bytes = static_cast<uint32_t>(x.value(i.op[2], l));
    if (bytes % 8)
      fail(ErrorKind::MemoryFault, format("st.bulk of %u bytes: must be a multiple of 8", bytes));
    const LanePlace p = lane_place(x, i.space, address_at(x, i.op[0], i.imm, l), bytes, l, 8);
    require_writable(p, bytes);
    x.m.history.write(*p.region, p.offset, bytes, x.accessor(l, uint32_t{0}));
    memset(p.data, 0, bytes);
    memset(p.undefined, 0, bytes);
    x.m.touched(*p.region, p.offset, bytes);
  }
  x.note_change();
}
void decode_store_bulk(Decoder& d, Instr& i) {
  i.space = space_from(d, Space::Generic);
  i.imm = address(d, i, 0, 0);
  i.op[2] = d.source(d.operand(1), Type::U64);
  if (d.operand(2).kind != AstOperand::Integer || d.operand(2).value != 0) d.unsupported("initval must be 0");
  i.fn = store_bulk;
}

constexpr const char* kBulk = "Data Movement and Conversion Instructions: cp.async.bulk";
constexpr const char* kReduce = "Data Movement and Conversion Instructions: cp.reduce.async.bulk";
constexpr const char* kTensor = "Data Movement and Conversion Instructions: cp.async.bulk.tensor";
constexpr const char* kCopy = "Data Movement and Conversion Instructions: cp.async";
constexpr const char* kStore = "Data Movement and Conversion Instructions: st.async";
#define TX "(.mbarrier::complete_tx::bytes)"
#define DIMS "(.1d|.2d|.3d|.4d|.5d)"

const Form kForms[] = {
    {"cp(.async)(.bulk)(.shared::cluster|.shared::cta)(.global)" TX "{.multicast::cluster}{.L2::cache_hint}",
     kBulk, decode_bulk},
    {"cp(.async)(.bulk)(.shared::cluster)(.shared::cta)" TX, kBulk, decode_bulk},
    {"cp(.async)(.bulk)(.global)(.shared::cta)(.bulk_group){.L2::cache_hint}{.cp_mask}", kBulk, decode_bulk},
    {"cp(.async)(.bulk)(.prefetch)(.L2)(.global){.L2::cache_hint}", kBulk, decode_bulk_prefetch},
    {"cp(.reduce)(.async)(.bulk)(.shared::cluster)(.shared::cta)" TX
     "(.and|.or|.xor|.add|.inc|.dec|.min|.max)(.b32|.b64|.u32|.s32|.u64|.s64)",
     kReduce, decode_bulk},
    {"cp(.reduce)(.async)(.bulk)(.global)(.shared::cta)(.bulk_group){.L2::cache_hint}(.and|.or|.xor|.add|."
     "inc|.dec|.min|.max){.noftz}(.f16|.bf16|.b32|.u32|.s32|.b64|.u64|.s64|.f32|.f64)",
     kReduce, decode_bulk},
    {"cp(.async)(.bulk)(.commit_group)", kBulk, decode_commit},
    {"cp(.async)(.bulk)(.wait_group){.read}", kBulk, decode_wait},
    {"cp(.async)(.bulk)(.tensor)" DIMS "(.shared::cluster|.shared::cta)(.global){.tile}" TX
     "{.multicast::cluster}{.cta_group::1|.cta_group::2}{.L2::cache_hint}",
     kTensor, decode_tensor_load},
    {"cp(.async)(.bulk)(.tensor)" DIMS "(.global)(.shared::cta){.tile}(.bulk_group){.L2::cache_hint}",
     kTensor, decode_tensor_store},
    {"cp(.reduce)(.async)(.bulk)(.tensor)" DIMS
     "(.global)(.shared::cta)(.add|.min|.max|.inc|.dec|.and|.or|.xor){.tile}(.bulk_group){.L2::cache_hint}",
     "Data Movement and Conversion Instructions: cp.reduce.async.bulk.tensor", decode_tensor_reduce},
    {"cp(.async)(.bulk)(.prefetch)(.tensor)" DIMS "(.L2)(.global){.tile}{.L2::cache_hint}",
     "Data Movement and Conversion Instructions: cp.async.bulk.prefetch.tensor", decode_tensor_prefetch},
    {"cp(.async)(.ca|.cg)(.shared|.shared::cta)(.global){.L2::cache_hint}{.L2::64B|.L2::128B|.L2::256B}",
     kCopy, decode_copy_async},
    {"cp(.async)(.commit_group)", kCopy, decode_commit},
    {"cp(.async)(.wait_group)", kCopy, decode_wait},
    {"cp(.async)(.wait_all)", kCopy, decode_wait},
    {"cp(.async)(.mbarrier)(.arrive){.noinc}{.shared|.shared::cta}(.b64)",
     "Parallel Synchronization and Communication Instructions: cp.async.mbarrier.arrive", decode_copy_arrive},
    {"st(.async){.weak}{.shared::cluster}" TX "{.v2|.v4}(.b32|.b64|.u32|.u64|.s32|.s64|.f32|.f64)", kStore,
     decode_store_async},
    {"red(.async){.relaxed}{.cluster}{.shared::cluster}" TX
     "(.inc|.dec|.min|.max|.and|.or|.xor|.add)(.u32|.s32|.u64|.b32)",
     "Parallel Synchronization and Communication Instructions: red.async", decode_store_async},
    {"st(.bulk){.weak}{.shared::cta}", "Data Movement and Conversion Instructions: st.bulk",
     decode_store_bulk},
};

}  // namespace

FormList async_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
