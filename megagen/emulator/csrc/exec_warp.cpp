// Exchange among the lanes of a warp, and matrices between shared memory and the registers of a warp.
// Source: PTX ISA, "Data Movement and Conversion Instructions: shfl.sync", "Parallel Synchronization and
// Communication Instructions: vote.sync, match.sync, activemask, redux.sync, elect.sync, bar.warp.sync",
// "Warp Level Matrix Instructions: ldmatrix, stmatrix, movmatrix".
#include <cmath>

#include "access.hpp"
#include "numerics.hpp"

namespace megagen::emulator {
namespace {

/// A predicate destination that doesn't fit into op[] goes to the extra operands.
void extra_predicate(Decoder& d, Instr& i, const AstOperand& o) {
  const Ref p = d.predicate(o);
  i.extra = static_cast<uint32_t>(d.program().extra.size());
  i.extra_count = 1;
  d.program().extra.push_back(p);
}

// --- shfl ---

enum ShuffleMode : uint8_t { Up, Down, Butterfly, Index };

void shfl(Exec& x, const Instr& i) {
  if (!x.gather(i, i.op[4])) return;
  x.require_defined(i.op[2], "source lane");
  x.require_defined(i.op[3], "segment mask");
  const auto a = x.view<uint32_t>(i.op[1]);
  const auto b = x.view<uint32_t>(i.op[2]);
  const auto c = x.view<uint32_t>(i.op[3]);
  uint32_t out[kLanes] = {};
  uint64_t undefined[kLanes] = {};
  Mask in_range = 0;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const int segment = static_cast<int>(c[lane] >> 8 & 31), clamp = static_cast<int>(c[lane] & 31);
    const int value = static_cast<int>(b[lane] & 31);
    const int highest = (lane & segment) | (clamp & ~segment & 31), lowest = lane & segment;
    int from;
    bool ok;
    switch (i.choice) {
      case Up:
        from = lane - value;
        ok = from >= highest;
        break;
      case Down:
        from = lane + value;
        ok = from <= highest;
        break;
      case Butterfly:
        from = lane ^ value;
        ok = from <= highest;
        break;
      default:
        from = lowest | (value & ~segment & 31);
        ok = from <= highest;
        break;
    }
    if (!ok) from = lane;
    out[lane] = a[from];
    undefined[lane] = x.mask >> from & 1 ? x.undefined_bits(i.op[1], from) : 0xFFFFFFFFu;
    in_range |= static_cast<Mask>(ok) << lane;
  }
  x.store(i.op[0], out);
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    x.set_undefined_bits(i.op[0], lane, undefined[lane]);
  }
  if (i.extra_count) x.set_predicate(x.program.extra[i.extra], in_range);
}
void decode_shfl(Decoder& d, Instr& i) {
  i.choice = d.has(".up") ? Up : d.has(".down") ? Down : d.has(".bfly") ? Butterfly : Index;
  const AstOperand& to = d.operand(0);
  if (to.kind == AstOperand::Pair) {
    i.op[0] = d.destination(to.items[0], Type::B32);
    extra_predicate(d, i, to.items[1]);
  } else {
    i.op[0] = d.destination(to, Type::B32);
  }
  for (size_t k = 1; k < 5; ++k) i.op[k] = d.source(d.operand(k), Type::B32);
  i.operands = 5;
  i.fn = shfl;
}

// --- vote, match, activemask, elect, redux ---

enum VoteMode : uint8_t { VoteAll, VoteAny, VoteUni, Ballot };

void vote(Exec& x, const Instr& i) {
  if (!x.gather(i, i.op[2])) return;
  const Mask yes = x.predicate(i.op[1]) & x.mask, u = x.undefined(i.op[1]) & x.mask;
  if (i.choice == Ballot) {
    uint32_t out[kLanes];
    for (uint32_t& v : out) v = yes;
    x.store(i.op[0], out);
    for (Mask rest = x.mask; rest; rest &= rest - 1) x.set_undefined_bits(i.op[0], __builtin_ctz(rest), u);
    return;
  }
  const bool result = i.choice == VoteAll   ? yes == x.mask
                      : i.choice == VoteAny ? yes != 0
                                            : yes == 0 || yes == x.mask;
  x.set_predicate(i.op[0], result ? kAllLanes : 0);
  const bool decided =
      i.choice == VoteAll ? (x.mask & ~yes & ~u) != 0 : i.choice == VoteAny && (yes & ~u) != 0;
  if (u && !decided) x.set_predicate_undefined(i.op[0], kAllLanes);
}
void decode_vote(Decoder& d, Instr& i) {
  i.choice = d.has(".all") ? VoteAll : d.has(".any") ? VoteAny : d.has(".uni") ? VoteUni : Ballot;
  d.operands(i, i.choice == Ballot ? Type::B32 : Type::Pred, {Type::Pred, Type::B32});
  i.fn = vote;
}

void match(Exec& x, const Instr& i) {
  if (!x.gather(i, i.op[2])) return;
  uint32_t out[kLanes] = {};
  bool all = true;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    for (Mask look = x.mask; look; look &= look - 1) {
      const int o = __builtin_ctz(look);
      const bool equal = x.value(i.op[1], l) == x.value(i.op[1], o);
      out[l] |= static_cast<uint32_t>(equal) << o;
    }
    all &= out[l] == x.mask;
  }
  if (i.choice) {
    for (uint32_t& v : out) v = all ? x.mask : 0;
  }
  const Mask u = x.undefined(i.op[1]) & x.mask;
  x.store(i.op[0], out);
  for (Mask rest = x.mask; rest; rest &= rest - 1)
    x.set_undefined_bits(i.op[0], __builtin_ctz(rest), u ? ~uint64_t{0} : 0);
  if (i.choice && i.extra_count) {
    x.set_predicate(x.program.extra[i.extra], all ? kAllLanes : 0);
    if (u) x.set_predicate_undefined(x.program.extra[i.extra], kAllLanes);
  }
}
void decode_match(Decoder& d, Instr& i) {
  i.choice = d.has(".all");
  const AstOperand& to = d.operand(0);
  if (to.kind == AstOperand::Pair) {
    i.op[0] = d.destination(to.items[0], Type::B32);
    extra_predicate(d, i, to.items[1]);
  } else {
    i.op[0] = d.destination(to, Type::B32);
  }
  i.op[1] = d.source(d.operand(1), d.last_type());
  i.op[2] = d.source(d.operand(2), Type::B32);
  i.operands = 3;
  i.fn = match;
}

void activemask(Exec& x, const Instr& i) {
  uint32_t out[kLanes];
  for (uint32_t& v : out) v = x.mask;
  x.store(i.op[0], out);
  x.define(i.op[0]);
}
void decode_activemask(Decoder& d, Instr& i) {
  i.op[0] = d.destination(d.operand(0), Type::B32);
  i.fn = activemask;
}

void elect(Exec& x, const Instr& i) {
  if (!x.gather(i, i.op[1])) return;
  const int leader = __builtin_ctz(x.mask);
  if (i.op[0].kind == Ref::Value) {
    uint32_t out[kLanes];
    for (uint32_t& v : out) v = static_cast<uint32_t>(leader);
    x.store(i.op[0], out);
    x.define(i.op[0]);
  }
  x.set_predicate(i.op[4], 1u << leader);
}
void decode_elect(Decoder& d, Instr& i) {
  const AstOperand& to = d.operand(0);
  if (to.kind != AstOperand::Pair) d.unsupported("elect.sync takes d|p, membermask");
  if (to.items[0].kind != AstOperand::Discard) i.op[0] = d.destination(to.items[0], Type::B32);
  i.op[4] = d.predicate(to.items[1]);
  i.op[1] = d.source(d.operand(1), Type::B32);
  i.operands = 2;
  i.fn = elect;
}

enum ReduxOp : uint8_t { ReduxAdd, ReduxMin, ReduxMax, ReduxAnd, ReduxOr, ReduxXor };

void redux(Exec& x, const Instr& i) {
  if (!x.gather(i, i.op[2])) return;
  const auto a = x.view<uint32_t>(i.op[1]);
  uint32_t r = 0;
  bool first = true;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const uint32_t v = a[__builtin_ctz(rest)];
    if (first) {
      r = v;
      first = false;
      continue;
    }
    const bool is_signed = i.type == Type::S32;
    const bool less = is_signed ? static_cast<int32_t>(v) < static_cast<int32_t>(r) : v < r;
    switch (i.choice) {
      case ReduxAdd:
        r += v;
        break;
      case ReduxMin:
        r = less ? v : r;
        break;
      case ReduxMax:
        r = less ? r : v;
        break;
      case ReduxAnd:
        r &= v;
        break;
      case ReduxOr:
        r |= v;
        break;
      default:
        r ^= v;
        break;
    }
  }
  const Mask u = x.undefined(i.op[1]) & x.mask;
  uint32_t out[kLanes];
  for (uint32_t& v : out) v = r;
  x.store(i.op[0], out);
  for (Mask rest = x.mask; rest; rest &= rest - 1)
    x.set_undefined_bits(i.op[0], __builtin_ctz(rest), u ? ~uint64_t{0} : 0);
}
/// redux.sync.min / max .f32: flags bit 0 .abs, bit 1 .NaN.
void redux_f32(Exec& x, const Instr& i) {
  using namespace megagen::numerics;
  if (!x.gather(i, i.op[2])) return;
  const auto a = x.view<float>(i.op[1]);
  const MinMax how{false, (i.flags & 2) != 0, false};
  float r = 0;
  bool first = true;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    float v = a[__builtin_ctz(rest)];
    if (i.flags & 1) v = std::fabs(v);
    r = first ? v : extremum(r, v, i.choice == ReduxMax, how);
    first = false;
  }
  const Mask u = x.undefined(i.op[1]) & x.mask;
  float out[kLanes];
  for (float& v : out) v = r;
  x.store(i.op[0], out);
  for (Mask rest = x.mask; rest; rest &= rest - 1)
    x.set_undefined_bits(i.op[0], __builtin_ctz(rest), u ? ~uint64_t{0} : 0);
}
void decode_redux(Decoder& d, Instr& i) {
  static const char* const kNames[] = {".add", ".min", ".max", ".and", ".or", ".xor"};
  for (uint8_t k = 0; k < 6; ++k) {
    if (d.has(kNames[k])) i.choice = k;
  }
  i.type = d.last_type();
  i.flags = static_cast<uint16_t>(d.has(".abs") | d.has(".NaN") << 1);
  d.operands(i, Type::B32, {Type::B32, Type::B32});
  i.fn = i.type == Type::F32 ? redux_f32 : redux;
}

void warp_sync(Exec& x, const Instr& i) {
  if (!x.gather(i, i.op[1])) return;
  x.warp_barrier(x.mask);
}
void decode_warp_sync(Decoder& d, Instr& i) {
  i.op[1] = d.source(d.operand(0), Type::B32);
  i.operands = 0;
  i.fn = warp_sync;
}

// --- Matrices ---

/// Rows of 8x8 matrices of 16-bit elements: lane 8m + r gives the address of row r of matrix m. flags:
/// .trans.
template <bool kLoad>
void matrix8x8(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  if (x.mask != kAllLanes)
    fail(ErrorKind::Emulator, "ldmatrix and stmatrix need all 32 lanes (undefined behaviour)");
  const uint32_t matrices = i.vector;
  LanePlace rows[32];
  const Mask addressed = matrices == 4 ? kAllLanes : (1u << (8 * matrices)) - 1;
  {
    const Mask all = x.mask;
    x.mask = addressed;
    x.require_defined(i.op[1], "address");
    x.mask = all;
  }
  for (uint32_t k = 0; k < 8 * matrices; ++k) {
    rows[k] = lane_place(x, i.space, x.address_of(i, 1, static_cast<int>(k)), 16, static_cast<int>(k), 16);
    if (!rows[k].region || !rows[k].region->is_shared())
      fail(ErrorKind::MemoryFault, "ldmatrix and stmatrix work on shared memory");
    if (!kLoad) require_writable(rows[k], 16);
  }
  for (uint32_t m = 0; m < matrices; ++m) {
    const Ref& r = x.program.extra[i.extra + m];
    for (int l = 0; l < kLanes; ++l) {
      uint32_t value = kLoad ? 0 : static_cast<uint32_t>(x.value(r, l));
      uint32_t undefined = kLoad ? 0 : static_cast<uint32_t>(x.undefined_bits(r, l));
      for (int e = 0; e < 2; ++e) {
        const int row = i.flags ? l % 4 * 2 + e : l / 4, column = i.flags ? l / 4 : l % 4 * 2 + e;
        const LanePlace& p = rows[8 * m + static_cast<uint32_t>(row)];
        uint8_t* data = p.data + 2 * column;
        uint8_t* bits = p.undefined + 2 * column;
        const Accessor by = x.accessor(l, uint32_t{0});
        uint16_t half, half_bits;
        if (kLoad) {
          x.m.history.read(*p.region, p.offset + static_cast<uint64_t>(2 * column), 2, by);
          memcpy(&half, data, 2);
          memcpy(&half_bits, bits, 2);
          value |= static_cast<uint32_t>(half) << (16 * e);
          undefined |= static_cast<uint32_t>(half_bits) << (16 * e);
        } else {
          x.m.history.write(*p.region, p.offset + static_cast<uint64_t>(2 * column), 2, by);
          half = static_cast<uint16_t>(value >> (16 * e));
          half_bits = static_cast<uint16_t>(undefined >> (16 * e));
          memcpy(data, &half, 2);
          memcpy(bits, &half_bits, 2);
        }
      }
      if (kLoad) {
        x.set_value(r, l, value);
        x.set_undefined_bits(r, l, undefined);
      }
    }
  }
  if (!kLoad) x.note_change();
}
void decode_matrix(Decoder& d, Instr& i) {
  const bool is_load = d.ast->opcode == "ldmatrix";
  i.vector = d.has(".x1") ? 1 : d.has(".x2") ? 2 : 4;
  i.flags = d.has(".trans");
  i.space = space_from(d, Space::Generic);
  i.type = Type::B32;
  d.extra(i, d.operand(is_load ? 0 : 1), Type::B32, is_load);
  if (i.extra_count != i.vector) d.unsupported("the number of registers differs from .x1, .x2 or .x4");
  d.address(i, d.operand(is_load ? 1 : 0), 1);
  i.operands = 1;
  i.fn = is_load ? matrix8x8<true> : matrix8x8<false>;
}

/// Transposes one 8x8 matrix across the warp.
void movmatrix(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  uint32_t out[kLanes];
  const auto a = x.view<uint32_t>(i.op[1]);
  const Mask u = x.undefined(i.op[1]);
  for (int l = 0; l < kLanes; ++l) {
    out[l] = 0;
    for (int e = 0; e < 2; ++e) {
      const int row = l % 4 * 2 + e, column = l / 4;
      out[l] |= (a[row * 4 + column / 2] >> (16 * (column % 2)) & 0xFFFF) << (16 * e);
    }
  }
  x.store(i.op[0], out);
  for (int l = 0; l < kLanes; ++l) x.set_undefined_bits(i.op[0], l, u ? 0xFFFFFFFFu : 0);
}
void decode_movmatrix(Decoder& d, Instr& i) {
  d.operands(i, Type::B32, {Type::B32});
  i.fn = movmatrix;
}

constexpr const char* kSync = "Parallel Synchronization and Communication Instructions: ";
constexpr const char* kShfl = "Data Movement and Conversion Instructions: shfl.sync";
constexpr const char* kMatrix = "Warp Level Matrix Instructions: ldmatrix, stmatrix";

const Form kForms[] = {
    {"shfl(.sync)(.up|.down|.bfly|.idx)(.b32)", kShfl, decode_shfl},
    {"vote(.sync)(.all|.any|.uni)(.pred)", kSync, decode_vote},
    {"vote(.sync)(.ballot)(.b32)", kSync, decode_vote},
    {"match(.any|.all)(.sync)(.b32|.b64)", kSync, decode_match},
    {"activemask(.b32)", kSync, decode_activemask},
    {"elect(.sync)", kSync, decode_elect},
    {"redux(.sync)(.add|.min|.max)(.u32|.s32)", kSync, decode_redux},
    {"redux(.sync)(.and|.or|.xor)(.b32)", kSync, decode_redux},
    {"redux(.sync)(.min|.max){.abs}{.NaN}(.f32)", kSync, decode_redux},
    {"bar(.warp)(.sync)", kSync, decode_warp_sync},
    {"ldmatrix(.sync)(.aligned)(.m8n8)(.x1|.x2|.x4){.trans}{.shared|.shared::cta}(.b16)", kMatrix,
     decode_matrix},
    {"stmatrix(.sync)(.aligned)(.m8n8)(.x1|.x2|.x4){.trans}{.shared|.shared::cta}(.b16)", kMatrix,
     decode_matrix},
    {"stmatrix(.sync)(.aligned)(.x1|.x2|.x4)(.m8n8)(.shared|.shared::cta)(.b16)(.trans)", kMatrix,
     decode_matrix},
    {"movmatrix(.sync)(.aligned)(.m8n8)(.trans)(.b16)", "Warp Level Matrix Instructions: movmatrix",
     decode_movmatrix},
};

}  // namespace

FormList warp_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
