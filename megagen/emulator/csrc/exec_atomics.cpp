// atom and red. Source: PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red".
#include <algorithm>
#include <cmath>

#include "access.hpp"
#include "numerics.hpp"

namespace megagen::emulator {
namespace {

using namespace megagen::numerics;

enum AtomicOp : uint8_t { Add, Inc, Dec, Min, Max, And, Or, Xor, Exch, Cas };

const char* const kOps[] = {".add", ".inc", ".dec", ".min", ".max", ".and", ".or", ".xor", ".exch", ".cas"};

bool is_signed(Type t) { return t == Type::S32 || t == Type::S64; }

uint64_t combine_float(AtomicOp op, Type t, uint64_t a, uint64_t b) {
  switch (t) {
    case Type::F32:
      return bits_of(add(float_of(static_cast<uint32_t>(a)), float_of(static_cast<uint32_t>(b))));
    case Type::F64:
      return bits_of(double_of(a) + double_of(b));
    case Type::F16:
    case Type::BF16: {
      const Format f = t == Type::F16 ? Format::F16 : Format::BF16;
      const auto x = static_cast<uint16_t>(a), y = static_cast<uint16_t>(b);
      return op == Add ? half_add(x, y, f) : half_extremum(x, y, f, op == Max);
    }
    default: {  // pairs
      const Type one = t == Type::F16x2 ? Type::F16 : Type::BF16;
      return combine_float(op, one, a & 0xFFFF, b & 0xFFFF) | combine_float(op, one, a >> 16, b >> 16) << 16;
    }
  }
}

}  // namespace

/// One read-modify-write step; shared with the asynchronous reductions.
uint64_t combine_values(uint8_t op, Type t, uint64_t old, uint64_t b) {
  const bool wide = bytes_of(t) == 8;
  switch (t) {
    case Type::F16:
    case Type::F16x2:
    case Type::BF16:
    case Type::BF16x2:
    case Type::F32:
    case Type::F64:
      return combine_float(static_cast<AtomicOp>(op), t, old, b);
    default:
      break;
  }
  switch (static_cast<AtomicOp>(op)) {
    case Add:
      return wide ? old + b : static_cast<uint32_t>(old + b);
    case Inc:
      return static_cast<uint32_t>(old) >= static_cast<uint32_t>(b) ? 0 : old + 1;
    case Dec:
      return old == 0 || static_cast<uint32_t>(old) > static_cast<uint32_t>(b) ? b : old - 1;
    case And:
      return old & b;
    case Or:
      return old | b;
    case Xor:
      return old ^ b;
    case Min:
    case Max: {
      bool less;
      if (is_signed(t)) {
        less = wide ? static_cast<int64_t>(old) < static_cast<int64_t>(b)
                    : static_cast<int32_t>(old) < static_cast<int32_t>(b);
      } else {
        less = wide ? old < b : static_cast<uint32_t>(old) < static_cast<uint32_t>(b);
      }
      return less == (op == Max) ? b : old;
    }
    default:
      return b;
  }
}

int atomic_op(const Decoder& d) {
  for (int k = 0; k < 10; ++k) {
    if (d.has(kOps[k])) return k;
  }
  return -1;
}

namespace {

/// op[0] destination (absent for red), op[1] address, extra: operands b (vector) and, for cas, c.
void atomic(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  const auto element = static_cast<uint32_t>(bytes_of(i.type));
  const uint32_t bytes = element * i.vector;
  const bool releases = i.order == Order::Release || i.order == Order::AcqRel;
  const bool acquires = i.order == Order::Acquire || i.order == Order::AcqRel;
  bool any_change = false;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const LanePlace p = lane_place(x, i.space, x.address_of(i, 1, l), bytes, l, bytes);
    if (!p.region) fail(ErrorKind::MemoryFault, "an atomic operation on local memory");
    require_writable(p, bytes);
    x.m.history.write(*p.region, p.offset, bytes, x.accessor(l, i.order, i.scope, true));
    x.visit(*p.region, 1u << l);
    auto& variables = x.m.history.variables;
    const auto found = variables.find(p.canonical());
    if (found != variables.end()) x.acquire_from(found->second, 1u << l, i.scope, acquires);
    if (releases || !x.w.fences.empty()) {
      x.release_to(variables[p.canonical()], 1u << l, i.scope, false, releases);
    }
    bool changed = false;
    uint64_t seen = 0;
    for (uint32_t k = 0; k < i.vector; ++k) {
      uint8_t* at = p.data + k * element;
      uint8_t* undefined = p.undefined + k * element;
      const Ref& b = x.program.extra[i.extra + k];
      uint64_t old = 0, old_bits = 0;
      memcpy(&old, at, element);
      memcpy(&old_bits, undefined, element);
      seen = seen * 31 + old;
      uint64_t value = x.value(b, l), bits = x.undefined_bits(b, l);
      if (element < 8) value &= (uint64_t{1} << (8 * element)) - 1;
      uint64_t result, result_bits = old_bits | bits ? ~uint64_t{0} : 0;
      if (i.choice == Cas) {
        const Ref& c = x.program.extra[i.extra + i.vector];
        const bool equal = old == value;
        result = equal ? x.value(c, l) : old;
        if (!result_bits) result_bits = equal ? x.undefined_bits(c, l) : 0;
      } else {
        result = combine_values(i.choice, i.type, old, value);
        if (i.choice == Exch) result_bits = bits;
      }
      uint64_t kept = 0;
      memcpy(&kept, &result, element);
      changed |= kept != old;
      memcpy(at, &result, element);
      memcpy(undefined, &result_bits, element);
      if (i.flags) {  // atom
        const Ref& d = i.vector == 1 ? i.op[0] : x.program.extra[i.extra + i.vector + k];
        x.set_value(d, l, old);
        x.set_undefined_bits(d, l, old_bits);
      }
    }
    if (changed) {
      any_change = true;
      x.m.touched(*p.region, p.offset, bytes);
    } else {
      x.note_read(p.canonical(), bytes, seen, true);
    }
  }
  if (releases) x.tick();
  if (any_change) x.note_change();
}

/// atom.exch and atom.cas on 128 bits.
void atomic128(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const LanePlace p = lane_place(x, i.space, x.address_of(i, 1, l), 16, l, 16);
    if (!p.region) fail(ErrorKind::MemoryFault, "an atomic operation on local memory");
    require_writable(p, 16);
    x.m.history.write(*p.region, p.offset, 16, x.accessor(l, i.order, i.scope, true));
    x.visit(*p.region, 1u << l);
    auto& variable = x.m.history.variables[p.canonical()];
    x.acquire_from(variable, 1u << l, i.scope, i.order == Order::Acquire || i.order == Order::AcqRel);
    x.release_to(variable, 1u << l, i.scope, false, i.order == Order::Release || i.order == Order::AcqRel);
    uint8_t old[16];
    memcpy(old, p.data, 16);
    const Ref& b = x.program.extra[i.extra];
    const Ref& source = i.choice == Cas ? x.program.extra[i.extra + 1] : b;
    if (i.choice == Exch || memcmp(old, x.base[b.bank] + b.off + l * 16, 16) == 0) {
      memcpy(p.data, x.base[source.bank] + source.off + l * 16, 16);
      memset(p.undefined, x.undefined_bits(source, l) ? 0xFF : 0, 16);
      x.m.touched(*p.region, p.offset, 16);
    }
    memcpy(x.base[0] + i.op[0].off + l * 16, old, 16);
    x.undef[i.op[0].off >> 7] &= ~(1u << l);
  }
  x.tick();
  x.note_change();
}

void decode(Decoder& d, Instr& i) {
  const bool is_atom = d.ast->opcode == "atom";
  i.type = d.last_type();
  i.choice = static_cast<uint8_t>(atomic_op(d));
  i.order = order_from(d, Order::Relaxed);
  i.scope = scope_from(d, Scope::Gpu);
  i.space = space_from(d, Space::Generic);
  i.vector = d.has(".v2") ? 2 : d.has(".v4") ? 4 : d.has(".v8") ? 8 : 1;
  i.flags = is_atom;
  const size_t address = is_atom ? 1 : 0;
  const bool wide = bytes_of(i.type) == 16;
  if (is_atom && i.vector == 1) i.op[0] = d.destination(d.operand(0), i.type);
  d.address(i, d.operand(address), 1);
  d.extra(i, d.operand(address + 1), i.type, false);
  if (i.choice == Cas) d.extra(i, d.operand(address + 2), i.type, false);
  if (is_atom && i.vector > 1) d.extra(i, d.operand(0), i.type, true);
  i.fn = wide ? atomic128 : atomic;
}

constexpr const char* kAtom = "Parallel Synchronization and Communication Instructions: atom";
constexpr const char* kRed = "Parallel Synchronization and Communication Instructions: red";
#define SEM                                                                                               \
  "{.relaxed|.acquire|.release|.acq_rel}{.cta|.cluster|.gpu|.sys}{.global|.shared|.shared::cta|.shared::" \
  "cluster}"
#define RED_SEM "{.relaxed|.release}{.cta|.cluster|.gpu|.sys}{.global|.shared|.shared::cta|.shared::cluster}"
#define HINT "{.L2::cache_hint}"

const Form kForms[] = {
    {"atom" SEM "(.and|.or|.xor|.exch)" HINT "(.b32|.b64)", kAtom, decode},
    {"atom" SEM "(.cas)" HINT "(.b16|.b32|.b64)", kAtom, decode},
    {"atom" SEM "(.exch|.cas)" HINT "(.b128)", kAtom, decode},
    {"atom" SEM "(.add)" HINT "(.u32|.s32|.u64|.s64|.f32|.f64)", kAtom, decode},
    {"atom" SEM "(.inc|.dec)" HINT "(.u32)", kAtom, decode},
    {"atom" SEM "(.min|.max)" HINT "(.u32|.s32|.u64|.s64)", kAtom, decode},
    {"atom" SEM "(.add)(.noftz)" HINT "(.f16|.f16x2|.bf16|.bf16x2)", kAtom, decode},
    {"atom{.relaxed|.acquire|.release|.acq_rel}{.cta|.cluster|.gpu|.sys}{.global}(.add)" HINT
     "(.v2|.v4)(.f32)",
     kAtom, decode},
    {"atom{.relaxed|.acquire|.release|.acq_rel}{.cta|.cluster|.gpu|.sys}{.global}(.add|.min|.max)(."
     "noftz)" HINT "(.v2|.v4|.v8)(.f16|.bf16|.f16x2|.bf16x2)",
     kAtom, decode},
    {"red" RED_SEM "(.and|.or|.xor)" HINT "(.b32|.b64)", kRed, decode},
    {"red" RED_SEM "(.add)" HINT "(.u32|.s32|.u64|.s64|.f32|.f64)", kRed, decode},
    {"red" RED_SEM "(.inc|.dec)" HINT "(.u32)", kRed, decode},
    {"red" RED_SEM "(.min|.max)" HINT "(.u32|.s32|.u64|.s64)", kRed, decode},
    {"red" RED_SEM "(.add)(.noftz)" HINT "(.f16|.f16x2|.bf16|.bf16x2)", kRed, decode},
    {"red{.relaxed|.release}{.cta|.cluster|.gpu|.sys}{.global}(.add)" HINT "(.v2|.v4)(.f32)", kRed, decode},
    {"red{.relaxed|.release}{.cta|.cluster|.gpu|.sys}{.global}(.add|.min|.max)(.noftz)" HINT
     "(.v2|.v4|.v8)(.f16|.bf16|.f16x2|.bf16x2)",
     kRed, decode},
};

}  // namespace

FormList atomic_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
