// wgmma: asynchronous matrix operations of a warpgroup.
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
//
// The k-th wgmma of each of a warpgroup's four warps form one operation. It executes, in order, some time
// after the last warp has issued it; its results reach the registers' visible state at the wait. Until then
// its registers count as undefined. A plain copy of such a register is followed (PTX compilers emit copies
// that the assembler removes).
#include <algorithm>
#include <set>

#include "access.hpp"
#include "wgmma.hpp"

namespace megagen::emulator {

struct Wgmma {
  wgmma::Instruction shape;
  const Instr* instr = nullptr;
  const Program* program = nullptr;
  Machine* m = nullptr;
  bool a_in_registers = false, scale_d = true;
  uint64_t a_descriptor = 0, b_descriptor = 0;
  Warp* warps[4] = {};
  Clock clocks[4];
  int issued = 0;
  bool executed = false;
  Agent agent = 0;
  uint32_t count = 0;
  std::vector<std::pair<uint32_t, uint32_t>>
      copies[4];  // per warp: result register -> register it was copied to
  const Ref* d(int k) const { return &program->extra[instr->extra + static_cast<uint32_t>(k)]; }
  const Ref* a(int k) const { return d(wgmma::d_registers(shape) + k); }
};

/// A register that an uncompleted wgmma writes is copied: the copy gets the result too.
void wgmma_alias(Exec& x, uint32_t from, uint32_t to) {
  const Warp::InFlight source = x.w.in_flight.at(from);
  if (x.undef[from >> 7] != kAllLanes) {  // overwritten since: an ordinary value
    x.w.in_flight.erase(from);
    return;
  }
  if (!source.operation->executed) source.operation->copies[x.w.index % 4].push_back({from, to});
  x.w.in_flight[to] = source;
}

namespace {

using wgmma::Accumulator;
namespace wg = megagen::wgmma;

uint32_t* word(Warp& w, uint32_t off, int lane) {
  return reinterpret_cast<uint32_t*>(w.registers + off + lane * 4);
}

struct Operand {
  uint8_t tile[256 * wg::kTileRowBytes];
  bool undefined[256];  // per row
};

void gather_shared(Wgmma& op, uint64_t bits, bool mn_major, int rows, Operand& out) {
  Region& region = *op.warps[0]->cta->shared;
  Accessor by;
  by.agent = op.agent;
  by.count = op.count;
  by.program_order_from = UINT32_MAX;
  by.flags = kValid | kAsync;
  by.line = op.instr->line;
  by.clock = &op.clocks[0];
  for (int k = 0; k < 3; ++k) by.also[k] = &op.clocks[k + 1];
  const wg::Descriptor d = wg::Descriptor::decode(bits);
  bool any_undefined = false;
  wg::gather(
      d, mn_major, rows,
      [&](uint32_t address, uint8_t* to) {
        if (address < kSharedReserved || address + 16 > region.size) {
          fail(
              ErrorKind::MemoryFault,
              format(
                  "the matrix descriptor 0x%llx reaches shared address 0x%x, outside the CTA's shared memory",
                  static_cast<unsigned long long>(bits), address));
        }
        op.m->history.read(region, address, 16, by);
        memcpy(to, region.data + address, 16);
        any_undefined |= !is_zero(region.undefined + address, 16);
      },
      out.tile);
  std::fill(out.undefined, out.undefined + rows, false);
  if (!any_undefined) return;
  std::vector<uint8_t> shadow(static_cast<size_t>(rows) * wg::kTileRowBytes);
  wg::gather(
      d, mn_major, rows, [&](uint32_t address, uint8_t* to) { memcpy(to, region.undefined + address, 16); },
      shadow.data());
  for (int r = 0; r < rows; ++r)
    out.undefined[r] = !is_zero(&shadow[static_cast<size_t>(r) * wg::kTileRowBytes], wg::kTileRowBytes);
}

void gather_registers(Wgmma& op, Operand& out) {
  std::fill(out.undefined, out.undefined + wg::kRows, false);
  wg::gather_fragments(
      [&](int thread, int r) {
        Warp& w = *op.warps[thread / 32];
        const uint32_t off = op.a(r)->off;
        if (w.undefined[off >> 7] >> (thread % 32) & 1) out.undefined[wg::a_row(thread, r)] = true;
        return *word(w, off, thread % 32);
      },
      out.tile);
}

void execute(Wgmma& op) {
  static thread_local Operand a, b;
  static thread_local uint32_t d[wg::kRows * 256];
  static thread_local bool undefined[wg::kRows * 256];
  Machine& m = *op.m;
  m.async_program = op.program;
  const int n = op.shape.n, registers = wg::d_registers(op.shape),
            pack = op.shape.d == Accumulator::F16 ? 2 : 1;
  if (op.a_in_registers) {
    gather_registers(op, a);
  } else {
    gather_shared(op, op.a_descriptor, op.shape.transpose_a, wg::kRows, a);
  }
  gather_shared(op, op.b_descriptor, op.shape.transpose_b, n, b);
  wg::Instruction shape = op.shape;
  shape.scale_d = op.scale_d;
  std::fill(undefined, undefined + wg::kRows * n, false);
  if (op.scale_d) {
    wg::load_d(
        shape, [&](int thread, int r) { return *word(*op.warps[thread / 32], op.d(r)->off, thread % 32); },
        d);
  }
  bool any = false;
  for (int r = 0; r < registers; ++r) {
    for (int w = 0; w < 4; ++w) {
      const auto it = op.warps[w]->in_flight.find(op.d(r)->off);
      const Mask before = op.scale_d && it != op.warps[w]->in_flight.end() ? it->second.undefined : 0;
      for (Mask rest = before; rest; rest &= rest - 1) {
        const int thread = w * 32 + __builtin_ctz(rest);
        for (int e = 0; e < pack; ++e)
          undefined[wg::d_row(thread, r * pack + e) * n + wg::d_column(thread, r * pack + e)] = true;
        any = true;
      }
    }
  }
  wg::multiply(shape, wg::hopper_model(shape.a), a.tile, b.tile, d);
  for (int row = 0; row < wg::kRows; ++row) {
    for (int column = 0; column < n; ++column)
      undefined[row * n + column] |= a.undefined[row] || b.undefined[column];
  }
  for (int k = 0; k < wg::kRows; ++k) any |= a.undefined[k];
  for (int k = 0; k < n; ++k) any |= b.undefined[k];
  wg::store_d(shape, d, [&](int thread, int r, uint32_t value) {
    *word(*op.warps[thread / 32], op.d(r)->off, thread % 32) = value;
  });
  for (int w = 0; w < 4; ++w) {
    Warp& warp = *op.warps[w];
    for (int r = 0; r < registers; ++r) {
      Mask lanes = 0;
      for (int l = 0; any && l < kLanes; ++l) {
        for (int e = 0; e < pack; ++e) {
          const int thread = w * 32 + l;
          lanes |= static_cast<Mask>(
                       undefined[wg::d_row(thread, r * pack + e) * n + wg::d_column(thread, r * pack + e)])
                   << l;
        }
      }
      const auto it = warp.in_flight.find(op.d(r)->off);
      if (it != warp.in_flight.end()) it->second.undefined = lanes;
    }
    for (const auto& [from, to] : op.copies[w]) {
      const auto it = warp.in_flight.find(to);
      if (it == warp.in_flight.end() || warp.undefined[to >> 7] != kAllLanes) continue;  // overwritten since
      memcpy(warp.registers + to, warp.registers + from, 4 * kLanes);
      const auto source = warp.in_flight.find(from);
      if (source != warp.in_flight.end()) it->second.undefined = source->second.undefined;
    }
  }
  op.executed = true;
  ++m.counters.matrix;
  m.progress();
  for (Warp* w : op.warps) {
    for (const auto& f : w->fragments) {
      if (f->wait == Wait::Async) m.wake(*w, *f);
    }
  }
}

void schedule(Machine& m, Cta& cta, size_t index) {
  auto& group = cta.warpgroups[index];
  if (group.queue.empty() || group.queue.front()->issued != 4) return;
  std::shared_ptr<Wgmma> op = group.queue.front();
  m.after(m.random_delay(), [&m, &cta, index, op] {
    try {
      execute(*op);
    } catch (const Error& e) {
      if (e.located) throw;
      throw Error(e.kind,
                  "wgmma issued by " + m.name_of(*op->warps[0]) + " at " + op->program->describe(*op->instr) +
                      ": " + e.what(),
                  true);
    }
    auto& g = cta.warpgroups[index];
    g.queue.pop_front();
    ++g.first;
    --cta.async_in_flight;
    schedule(m, cta, index);
  });
}

/// op[0] A descriptor (absent in register form), op[1] B descriptor, op[2] scale-d predicate;
/// flags: 1 A in registers, 2 scale-d is constant, 4 and true; type/type2/choice/vector: shape (see
/// shape_of).
enum : uint16_t {
  kRegisters = 1,
  kConstant = 2,
  kScale = 4,
  kNegateA = 8,
  kNegateB = 16,
  kTransposeA = 32,
  kTransposeB = 64,
  kSatfinite = 128
};

wg::Instruction shape_of(const Instr& i) {
  wg::Instruction s;
  s.n = i.target;
  s.a = static_cast<wg::Type>(i.choice & 15);
  s.b = static_cast<wg::Type>(i.choice >> 4);
  s.d = static_cast<Accumulator>(i.vector);
  s.negate_a = i.flags & kNegateA;
  s.negate_b = i.flags & kNegateB;
  s.transpose_a = i.flags & kTransposeA;
  s.transpose_b = i.flags & kTransposeB;
  s.satfinite = i.flags & kSatfinite;
  return s;
}

void mma_async(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  if (x.mask != kAllLanes)
    fail(ErrorKind::Emulator, "wgmma needs all lanes of the warp (undefined behaviour)");
  Cta& cta = x.cta();
  const auto index = static_cast<size_t>(x.w.index / 4);
  const int member = x.w.index % 4;
  if ((index + 1) * 4 > cta.warps.size())
    fail(ErrorKind::Emulator, "wgmma in an incomplete warpgroup (undefined behaviour)");
  if (x.w.wgmma_touched) {
    fail(ErrorKind::DataRace,
         "registers of a wgmma were accessed (or none was issued before), and no wgmma.fence orders that "
         "before this one");
  }
  const bool in_registers = i.flags & kRegisters;
  if (!in_registers) x.require_defined(i.op[0], "descriptor of A");
  x.require_defined(i.op[1], "descriptor of B");
  bool scale = i.flags & kScale;
  if (!(i.flags & kConstant)) {
    if (x.undefined(i.op[2])) fail(ErrorKind::UninitializedUse, "scale-d is undefined");
    const Mask p = x.predicate(i.op[2]);
    if (p != 0 && p != kAllLanes)
      fail(ErrorKind::Emulator, "scale-d differs among the lanes (undefined behaviour)");
    scale = p != 0;
  }
  const uint64_t a = in_registers ? 0 : x.value(i.op[0], 0), b = x.value(i.op[1], 0);
  for (int l = 1; l < kLanes; ++l) {
    if ((!in_registers && x.value(i.op[0], l) != a) || x.value(i.op[1], l) != b) {
      fail(ErrorKind::Emulator, "a matrix descriptor differs among the lanes (undefined behaviour)");
    }
  }
  if (cta.warpgroups.size() <= index) cta.warpgroups.resize(cta.warps.size() / 4);
  auto& group = cta.warpgroups[index];
  const uint64_t number = x.w.wgmma_issued++;
  if (number - group.first == group.queue.size()) {
    auto op = std::make_shared<Wgmma>();
    op->shape = shape_of(i);
    op->instr = &i;
    op->program = &x.program;
    op->m = &x.m;
    op->a_in_registers = in_registers;
    op->scale_d = scale;
    op->a_descriptor = a;
    op->b_descriptor = b;
    op->agent = x.m.agent(cta, AgentKind::Wgmma, index);
    op->count = ++x.m.agent_count(op->agent);
    group.queue.push_back(op);
    ++cta.async_in_flight;
  }
  const std::shared_ptr<Wgmma> op = group.queue[number - group.first];
  if (op->instr != &i || op->a_descriptor != a || op->b_descriptor != b || op->scale_d != scale) {
    fail(ErrorKind::Emulator,
         "the warps of a warpgroup execute different wgmma operations (undefined behaviour); another warp: " +
             x.program.describe(*op->instr));
  }
  op->warps[member] = &x.w;
  op->clocks[member] = x.publish(kAllLanes);
  x.tick();
  const int registers = wg::d_registers(op->shape);
  for (int r = 0; r < registers; ++r) {
    const uint32_t off = op->d(r)->off;
    uint32_t& undefined = x.undef[off >> 7];
    auto it = x.w.in_flight.find(off);
    if (it != x.w.in_flight.end() && undefined == kAllLanes) {
      it->second.operation = op;
    } else {
      x.w.in_flight[off] = {op, undefined};
    }
    undefined = kAllLanes;
    memset(x.shadow + off, 0xFF, 4 * kLanes);
  }
  x.w.wgmma.push_back({op, 0});
  x.note_change();
  if (++op->issued == 4 && group.queue.front() == op) schedule(x.m, cta, index);
}

void fence(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  x.w.wgmma_touched = false;
}
void commit(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  ++x.w.wgmma_groups;
  for (auto& e : x.w.wgmma) {
    if (!e.group) e.group = x.w.wgmma_groups;
  }
}
void wait(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  const int64_t last = static_cast<int64_t>(x.w.wgmma_groups) - i.imm;
  for (const auto& e : x.w.wgmma) {
    if (e.group && e.group <= last && !e.operation->executed) {
      x.block(Wait::Async);
      return;
    }
  }
  Clock learned;
  while (!x.w.wgmma.empty() && x.w.wgmma.front().group && x.w.wgmma.front().group <= last) {
    const std::shared_ptr<Wgmma> op = x.w.wgmma.front().operation;
    x.w.wgmma.pop_front();
    learned.before.learn(op->agent, kAllLanes, op->count);
    for (auto it = x.w.in_flight.begin(); it != x.w.in_flight.end();) {
      if (it->second.operation != op) {
        ++it;
        continue;
      }
      uint32_t& undefined = x.undef[it->first >> 7];
      if (undefined == kAllLanes) undefined = it->second.undefined;  // else overwritten since
      it = x.w.in_flight.erase(it);
    }
  }
  x.acquire(x.mask, learned);
}
void decode_fence(Decoder&, Instr& i) { i.fn = fence; }
void decode_commit(Decoder&, Instr& i) { i.fn = commit; }
void decode_wait(Decoder& d, Instr& i) {
  if (d.operand(0).kind != AstOperand::Integer) d.unsupported("the group count must be a constant");
  i.imm = d.operand(0).value;
  i.fn = wait;
}

wg::Type operand_type(const std::string& m) {
  return m == ".f16"    ? wg::Type::F16
         : m == ".bf16" ? wg::Type::BF16
         : m == ".tf32" ? wg::Type::TF32
         : m == ".e4m3" ? wg::Type::E4M3
         : m == ".e5m2" ? wg::Type::E5M2
         : m == ".s8"   ? wg::Type::S8
         : m == ".u8"   ? wg::Type::U8
                        : wg::Type::B1;
}

int64_t constant(Decoder& d, size_t k) {
  if (d.operand(k).kind != AstOperand::Integer) d.unsupported("this operand must be a constant");
  return d.operand(k).value;
}

void decode_mma(Decoder& d, Instr& i) {
  int n = 0, k = 0;
  if (sscanf(d.slot(3).c_str(), ".m64n%dk%d", &n, &k) != 2) d.unsupported("this shape isn't known");
  size_t s = 4;
  if (d.has(".satfinite")) i.flags |= kSatfinite;
  if (d.slot(4).empty() || d.slot(4) == ".satfinite") s = 5;
  const std::string& dt = d.slot(s);
  i.vector = static_cast<uint8_t>(dt == ".f32"   ? Accumulator::F32
                                  : dt == ".f16" ? Accumulator::F16
                                                 : Accumulator::S32);
  const wg::Type a = operand_type(d.slot(s + 1)), b = operand_type(d.slot(s + 2));
  i.choice = static_cast<uint8_t>(static_cast<int>(a) | static_cast<int>(b) << 4);
  i.target = n;
  i.type = Type::B32;
  size_t at = 0;
  d.extra(i, d.operand(at++), Type::B32, true);
  if (d.operand(at).kind == AstOperand::Vector) {
    i.flags |= kRegisters;
    d.extra(i, d.operand(at++), Type::B32, false);
  } else {
    i.op[0] = d.source(d.operand(at++), Type::B64);
  }
  i.op[1] = d.source(d.operand(at++), Type::B64);
  if (at < d.count()) {
    const AstOperand& scale = d.operand(at++);
    if (scale.kind == AstOperand::Integer) {
      i.flags |= static_cast<uint16_t>(kConstant | (scale.value ? kScale : 0));
    } else {
      i.op[2] = d.predicate(scale);
    }
  } else {
    i.flags |= kConstant | kScale;
  }
  if (at + 1 < d.count()) {
    if (constant(d, at++) == -1) i.flags |= kNegateA;
    if (constant(d, at++) == -1) i.flags |= kNegateB;
  }
  if (at < d.count() && !(i.flags & kRegisters) && constant(d, at++)) i.flags |= kTransposeA;
  if (at < d.count() && constant(d, at++)) i.flags |= kTransposeB;
  const wg::Instruction shape = shape_of(i);
  if (const char* why = wg::invalid(shape)) d.unsupported(why);
  if (k != wg::depth(a)) d.unsupported("K of the shape doesn't fit the operand type");
  const auto expected = static_cast<uint32_t>(wg::d_registers(shape) + (i.flags & kRegisters ? 4 : 0));
  if (i.extra_count != expected)
    d.unsupported(format("%u registers where %u were expected", i.extra_count, expected));
  d.program().uses_wgmma = true;
  i.fn = mma_async;
}

constexpr const char* kWgmma = "Asynchronous Warpgroup Level Matrix Instructions";

/// "wgmma(.mma_async)(.sync)(.aligned)(.m64n8kK|...|.m64n256kK)" + rest.
const char* mma_pattern(int k, const char* rest) {
  static std::deque<std::string> kept;
  std::string p = "wgmma(.mma_async)(.sync)(.aligned)(";
  for (int n = 8; n <= 256; n += 8) p += format("%s.m64n%dk%d", n > 8 ? "|" : "", n, k);
  kept.push_back(p + ")" + rest);
  return kept.back().c_str();
}

}  // namespace

FormList matrix_forms() {
  static const Form kForms[] = {
      {"wgmma(.fence)(.sync)(.aligned)", kWgmma, decode_fence},
      {"wgmma(.commit_group)(.sync)(.aligned)", kWgmma, decode_commit},
      {"wgmma(.wait_group)(.sync)(.aligned)", kWgmma, decode_wait},
      {mma_pattern(16, "(.f32|.f16)(.f16)(.f16)"), kWgmma, decode_mma},
      {mma_pattern(16, "(.f32)(.bf16)(.bf16)"), kWgmma, decode_mma},
      {mma_pattern(8, "(.f32)(.tf32)(.tf32)"), kWgmma, decode_mma},
      {mma_pattern(32, "(.f32|.f16)(.e4m3|.e5m2)(.e4m3|.e5m2)"), kWgmma, decode_mma},
      {mma_pattern(32, "{.satfinite}(.s32)(.s8|.u8)(.s8|.u8)"), kWgmma, decode_mma},
      {mma_pattern(256, "(.s32)(.b1)(.b1)(.and)(.popc)"), kWgmma, decode_mma},
  };
  return {kForms, sizeof kForms / sizeof kForms[0]};
}

/// Marks instructions (but copies and wgmma itself) that access registers of a wgmma.
void mark_wgmma_registers(Program& p) {
  for (const FunctionInfo& f : p.functions) {  // a function sees its own registers only
    std::set<uint32_t> used;
    for (int k = f.start; k < f.end; ++k) {
      const Instr& i = p.code[static_cast<size_t>(k)];
      if (i.fn != mma_async) continue;
      for (uint32_t e = 0; e < i.extra_count; ++e) used.insert(p.extra[i.extra + e].off);
    }
    const auto touches = [&](const Ref& r) {
      return r.kind == Ref::Value && r.bank == 0 && used.count(r.off);
    };
    for (int k = f.start; !used.empty() && k < f.end; ++k) {
      Instr& i = p.code[static_cast<size_t>(k)];
      const std::string pattern = i.form ? i.form->pattern : "";
      if (i.fn == mma_async || pattern.rfind("mov", 0) == 0) continue;
      for (const Ref& r : i.op) i.touches_wgmma |= touches(r);
      for (uint32_t e = 0; e < i.extra_count; ++e) i.touches_wgmma |= touches(p.extra[i.extra + e]);
    }
  }
}

}  // namespace megagen::emulator
