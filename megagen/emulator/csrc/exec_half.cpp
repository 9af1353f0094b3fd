// F16 and BF16 arithmetic, scalar and packed. Source: PTX ISA, "Half Precision Floating Point Instructions",
// "Half Precision Comparison Instructions".
#include <cmath>

#include "alu.hpp"
#include "numerics.hpp"

namespace megagen::emulator {
namespace {

using namespace megagen::numerics;

enum : uint16_t { kFtz = 1, kSat = 2, kRelu = 4, kNan = 8, kXorsign = 16 };

uint16_t flags_from(const Decoder& d) {
  return static_cast<uint16_t>((d.has(".ftz") ? kFtz : 0) | (d.has(".sat") ? kSat : 0) |
                               (d.has(".relu") ? kRelu : 0) | (d.has(".NaN") ? kNan : 0) |
                               (d.has(".xorsign") ? kXorsign : 0));
}
Format format_of(Type t) { return t == Type::F16 || t == Type::F16x2 ? Format::F16 : Format::BF16; }
bool is_packed(Type t) { return t == Type::F16x2 || t == Type::BF16x2; }
HalfArithmetic half(const Instr& i) {
  return {(i.flags & kFtz) != 0, (i.flags & kSat) != 0, (i.flags & kRelu) != 0};
}

uint16_t lo(uint32_t v) { return static_cast<uint16_t>(v); }
uint16_t hi(uint32_t v) { return static_cast<uint16_t>(v >> 16); }
uint32_t both(uint16_t l, uint16_t h) { return static_cast<uint32_t>(h) << 16 | l; }

template <class F>
void one(Exec& x, const Instr& i, F f) {
  if (is_packed(i.type)) {
    unary<uint32_t, uint32_t>(x, i, [&](uint32_t a) { return both(f(lo(a)), f(hi(a))); });
  } else {
    unary<uint16_t, uint16_t>(x, i, f);
  }
}
template <class F>
void two(Exec& x, const Instr& i, F f) {
  if (is_packed(i.type)) {
    binary<uint32_t, uint32_t, uint32_t>(
        x, i, [&](uint32_t a, uint32_t b) { return both(f(lo(a), lo(b)), f(hi(a), hi(b))); });
  } else {
    binary<uint16_t, uint16_t, uint16_t>(x, i, f);
  }
}

void add(Exec& x, const Instr& i) {
  two(x, i,
      [f = format_of(i.type), how = half(i)](uint16_t a, uint16_t b) { return half_add(a, b, f, how); });
}
void sub(Exec& x, const Instr& i) {
  two(x, i, [f = format_of(i.type), how = half(i)](uint16_t a, uint16_t b) {
    return half_add(a, b ^ 0x8000, f, how);
  });
}
void mul(Exec& x, const Instr& i) {
  two(x, i,
      [f = format_of(i.type), how = half(i)](uint16_t a, uint16_t b) { return half_mul(a, b, f, how); });
}
void fma(Exec& x, const Instr& i) {
  const Format f = format_of(i.type);
  const HalfArithmetic how = half(i);
  if (is_packed(i.type)) {
    ternary<uint32_t, uint32_t, uint32_t, uint32_t>(x, i, [&](uint32_t a, uint32_t b, uint32_t c) {
      return both(half_fma(lo(a), lo(b), lo(c), f, how), half_fma(hi(a), hi(b), hi(c), f, how));
    });
  } else {
    ternary<uint16_t, uint16_t, uint16_t, uint16_t>(
        x, i, [&](uint16_t a, uint16_t b, uint16_t c) { return half_fma(a, b, c, f, how); });
  }
}
template <bool kMax>
void extreme(Exec& x, const Instr& i) {
  const MinMax how{(i.flags & kFtz) != 0, (i.flags & kNan) != 0, (i.flags & kXorsign) != 0};
  two(x, i,
      [f = format_of(i.type), how](uint16_t a, uint16_t b) { return half_extremum(a, b, f, kMax, how); });
}
/// A change of the sign bit; an H200 answers any NaN with the canonical one.
template <class F>
void sign(Exec& x, const Instr& i, F f) {
  one(x, i, [&, format = format_of(i.type), ftz = (i.flags & kFtz) != 0](uint16_t a) -> uint16_t {
    const double value = half_operand(a, format, ftz);
    if (std::isnan(value)) return 0x7FFF;
    return static_cast<uint16_t>(f(ftz ? encode(value, format) : a));
  });
}
void neg(Exec& x, const Instr& i) {
  sign(x, i, [](uint32_t a) { return a ^ 0x8000; });
}
void abs(Exec& x, const Instr& i) {
  sign(x, i, [](uint32_t a) { return a & 0x7FFF; });
}
void ex2(Exec& x, const Instr& i) {
  one(x, i, [f = format_of(i.type), ftz = (i.flags & kFtz) != 0](uint16_t a) {
    return half_ex2_approx(a, f, ftz);
  });
}
void tanh(Exec& x, const Instr& i) {
  one(x, i, [f = format_of(i.type)](uint16_t a) { return half_tanh_approx(a, f); });
}

void decode(Decoder& d, Instr& i) {
  const std::string& op = d.ast->opcode;
  const Type t = d.last_type();
  i.type = t;
  i.flags = flags_from(d);
  if (op == "fma") {
    d.operands(i, t, {t, t, t});
    i.fn = fma;
  } else if (op == "neg" || op == "abs" || op == "ex2" || op == "tanh") {
    d.operands(i, t, {t});
    i.fn = op == "neg" ? neg : op == "abs" ? abs : op == "ex2" ? ex2 : tanh;
  } else {
    d.operands(i, t, {t, t});
    i.fn = op == "add"   ? add
           : op == "sub" ? sub
           : op == "mul" ? mul
           : op == "max" ? extreme<true>
                         : extreme<false>;
  }
}

// --- Comparison: p is the low element's result, q the high one's ---

bool holds(double a, double b, uint8_t how) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  static const auto base = [](double p, double q, int k) {
    switch (k) {
      case 0:
        return p == q;
      case 1:
        return p != q;
      case 2:
        return p < q;
      case 3:
        return p <= q;
      case 4:
        return p > q;
      default:
        return p >= q;
    }
  };
  if (how == 12) return !unordered;
  if (how == 13) return unordered;
  return unordered ? how >= 6 : base(a, b, how % 6);
}

void setp(Exec& x, const Instr& i) {
  const Format f = format_of(i.type);
  const bool ftz = i.vector == 2;
  const auto a = x.view<uint32_t>(i.op[1]);
  const auto b = x.view<uint32_t>(i.op[2]);
  const auto element = [&](uint32_t v, int k) { return half_operand(k ? hi(v) : lo(v), f, ftz); };
  Mask first = 0, second = 0;
  for (int l = 0; l < kLanes; ++l) {
    first |= static_cast<Mask>(holds(element(a[l], 0), element(b[l], 0), i.choice)) << l;
    if (is_packed(i.type))
      second |= static_cast<Mask>(holds(element(a[l], 1), element(b[l], 1), i.choice)) << l;
  }
  set_predicates(x, i, first);
  if (is_packed(i.type) && i.op[4].kind == Ref::Predicate) {
    x.pred[i.op[4].off] = (x.pred[i.op[4].off] & ~x.mask) |
                          ((i.flags ? combine(i.flags, second, x.predicate(i.op[3])) : second) & x.mask);
  }
}
void decode_setp(Decoder& d, Instr& i) {
  static const char* const kNames[] = {".eq",  ".ne",  ".lt",  ".le",  ".gt",  ".ge",  ".equ",
                                       ".neu", ".ltu", ".leu", ".gtu", ".geu", ".num", ".nan"};
  for (uint8_t k = 0; k < 14; ++k) {
    if (d.slot(0) == kNames[k]) i.choice = k;
  }
  i.type = d.last_type();
  decode_compare_operands(d, i, d.slot(1), i.type);
  i.vector = d.has(".ftz") ? 2 : 1;
  i.fn = setp;
}

constexpr const char* kHalf = "Half Precision Floating Point Instructions";
#define HALF ".f16|.f16x2"
#define BFLOAT ".bf16|.bf16x2"

const Form kForms[] = {
    {"add{.rn}{.ftz}{.sat}(" HALF ")", kHalf, decode},
    {"add{.rn}(" BFLOAT ")", kHalf, decode},
    {"sub{.rn}{.ftz}{.sat}(" HALF ")", kHalf, decode},
    {"sub{.rn}(" BFLOAT ")", kHalf, decode},
    {"mul{.rn}{.ftz}{.sat}(" HALF ")", kHalf, decode},
    {"mul{.rn}(" BFLOAT ")", kHalf, decode},
    {"fma(.rn){.ftz}{.sat|.relu}(" HALF ")", kHalf, decode},
    {"fma(.rn){.relu}(" BFLOAT ")", kHalf, decode},
    {"neg{.ftz}(" HALF "|" BFLOAT ")", kHalf, decode},
    {"abs{.ftz}(" HALF "|" BFLOAT ")", kHalf, decode},
    {"max{.ftz}{.NaN}{.xorsign}{.abs}(" HALF "|" BFLOAT ")", kHalf, decode},
    {"min{.ftz}{.NaN}{.xorsign}{.abs}(" HALF "|" BFLOAT ")", kHalf, decode},
    {"ex2(.approx)(" HALF ")", kHalf, decode},
    {"ex2(.approx)(.ftz)(" BFLOAT ")", kHalf, decode},
    {"tanh(.approx)(" HALF "|" BFLOAT ")", kHalf, decode},
    {"setp(.eq|.ne|.lt|.le|.gt|.ge|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan){.and|.or|.xor}{.ftz}(" HALF
     "|" BFLOAT ")",
     "Half Precision Comparison Instructions", decode_setp},
};

}  // namespace

FormList half_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
