// float32, float64 and packed float32x2 arithmetic, and comparison of floats.
// Source: PTX ISA, "Floating Point Instructions", "Comparison and Selection Instructions".
#include <cmath>

#include "alu.hpp"
#include "numerics.hpp"

namespace megagen::emulator {
namespace {

using namespace megagen::numerics;

// Instr::flags: rounding in bits 0-2, then:
enum : uint16_t { kFtz = 8, kSat = 16, kNan = 32, kXorsign = 64, kAbs = 128 };

uint16_t flags_from(const Decoder& d) {
  uint16_t f = 0;
  if (d.has(".rz")) f = static_cast<uint16_t>(Rounding::TowardZero);
  if (d.has(".rm")) f = static_cast<uint16_t>(Rounding::Down);
  if (d.has(".rp")) f = static_cast<uint16_t>(Rounding::Up);
  if (d.has(".ftz")) f |= kFtz;
  if (d.has(".sat")) f |= kSat;
  if (d.has(".NaN")) f |= kNan;
  if (d.has(".xorsign")) f |= kXorsign;
  if (d.has(".abs")) f |= kAbs;
  return f;
}

Arithmetic arithmetic(const Instr& i) {
  return {static_cast<Rounding>(i.flags & 7), (i.flags & kFtz) != 0, (i.flags & kSat) != 0};
}

// --- float32 ---

#define FLOAT_BINARY(name, function)                                                                  \
  void name##_plain(Exec& x, const Instr& i) {                                                        \
    binary<float, float, float>(x, i, [](float a, float b) { return function(a, b, Arithmetic{}); }); \
  }                                                                                                   \
  void name(Exec& x, const Instr& i) {                                                                \
    const Arithmetic how = arithmetic(i);                                                             \
    binary<float, float, float>(x, i, [how](float a, float b) { return function(a, b, how); });       \
  }
FLOAT_BINARY(add_f32, numerics::add)
FLOAT_BINARY(sub_f32, numerics::sub)
FLOAT_BINARY(mul_f32, numerics::mul)
FLOAT_BINARY(div_f32, numerics::div)

void fma_f32_plain(Exec& x, const Instr& i) {
  ternary<float, float, float, float>(
      x, i, [](float a, float b, float c) { return numerics::fma(a, b, c, Arithmetic{}); });
}
void fma_f32(Exec& x, const Instr& i) {
  const Arithmetic how = arithmetic(i);
  ternary<float, float, float, float>(
      x, i, [how](float a, float b, float c) { return numerics::fma(a, b, c, how); });
}

// --- float64: round to nearest with the processor, other modes by an exact error term ---

double directed(double nearest, double error, Rounding rounding) {
  if (error == 0 || !std::isfinite(nearest)) return nearest;
  switch (rounding) {
    case Rounding::TowardZero:
      return (error < 0) != (nearest < 0) ? std::nextafter(nearest, 0.0) : nearest;
    case Rounding::Down:
      return error < 0 ? std::nextafter(nearest, -INFINITY) : nearest;
    case Rounding::Up:
      return error > 0 ? std::nextafter(nearest, INFINITY) : nearest;
    default:
      return nearest;
  }
}
double canonical64(double v) { return std::isnan(v) ? double_of(uint64_t{0x7FFFFFFFFFFFFFFF}) : v; }
double add64(double a, double b, Rounding r) {
  const double s = a + b, t = s - a;
  return canonical64(directed(s, (a - (s - t)) + (b - t), r));
}
double mul64(double a, double b, Rounding r) {
  const double p = a * b;
  return canonical64(directed(p, std::fma(a, b, -p), r));
}
double fma64(double a, double b, double c, Rounding r) {
  const double nearest = std::fma(a, b, c);
  if (r == Rounding::NearestEven || !std::isfinite(nearest)) return canonical64(nearest);
  const long double exact =
      static_cast<long double>(a) * b + c;  // 64 bits: enough to tell the direction almost always
  return canonical64(directed(nearest, static_cast<double>(exact - nearest), r));
}
double div64(double a, double b, Rounding r) {
  const double q = a / b;
  const double remainder = std::fma(-q, b, a);
  return canonical64(directed(q, b < 0 ? -remainder : remainder, r));
}
double sqrt64(double a, Rounding r) {
  const double s = std::sqrt(a);
  return canonical64(directed(s, std::fma(-s, s, a), r));
}

#define DOUBLE_BINARY(name, expression)                                                   \
  void name(Exec& x, const Instr& i) {                                                    \
    const Rounding r = static_cast<Rounding>(i.flags & 7);                                \
    binary<double, double, double>(x, i, [r](double a, double b) { return expression; }); \
  }
DOUBLE_BINARY(add_f64, add64(a, b, r))
DOUBLE_BINARY(sub_f64, add64(a, -b, r))
DOUBLE_BINARY(mul_f64, mul64(a, b, r))
DOUBLE_BINARY(div_f64, div64(a, b, r))
void fma_f64(Exec& x, const Instr& i) {
  const Rounding r = static_cast<Rounding>(i.flags & 7);
  ternary<double, double, double, double>(x, i,
                                          [r](double a, double b, double c) { return fma64(a, b, c, r); });
}

// --- float32x2 ---

float low(uint64_t v) { return float_of(static_cast<uint32_t>(v)); }
float high(uint64_t v) { return float_of(static_cast<uint32_t>(v >> 32)); }
uint64_t pack(float lo, float hi) { return static_cast<uint64_t>(bits_of(hi)) << 32 | bits_of(lo); }

template <float (*F)(float, float, const Arithmetic&)>
void packed(Exec& x, const Instr& i) {
  const Arithmetic how = arithmetic(i);
  binary<uint64_t, uint64_t, uint64_t>(
      x, i, [how](uint64_t a, uint64_t b) { return pack(F(low(a), low(b), how), F(high(a), high(b), how)); });
}
void packed_fma(Exec& x, const Instr& i) {
  const Arithmetic how = arithmetic(i);
  ternary<uint64_t, uint64_t, uint64_t, uint64_t>(x, i, [how](uint64_t a, uint64_t b, uint64_t c) {
    return pack(numerics::fma(low(a), low(b), low(c), how), numerics::fma(high(a), high(b), high(c), how));
  });
}

void decode_arithmetic(Decoder& d, Instr& i) {
  const std::string& op = d.ast->opcode;
  const Type t = d.last_type();
  i.type = t;
  i.flags = flags_from(d);
  if (op == "fma" || op == "mad") {
    d.operands(i, t, {t, t, t});
    i.fn = t == Type::F64 ? fma_f64 : t == Type::F32x2 ? packed_fma : i.flags ? fma_f32 : fma_f32_plain;
    return;
  }
  d.operands(i, t, {t, t});
  if (op == "add")
    i.fn = t == Type::F64     ? add_f64
           : t == Type::F32x2 ? packed<numerics::add>
           : i.flags          ? add_f32
                              : add_f32_plain;
  if (op == "sub")
    i.fn = t == Type::F64     ? sub_f64
           : t == Type::F32x2 ? packed<numerics::sub>
           : i.flags          ? sub_f32
                              : sub_f32_plain;
  if (op == "mul")
    i.fn = t == Type::F64     ? mul_f64
           : t == Type::F32x2 ? packed<numerics::mul>
           : i.flags          ? mul_f32
                              : mul_f32_plain;
}

void div_f32_approx(Exec& x, const Instr& i) {
  const bool ftz = i.flags & kFtz;
  binary<float, float, float>(x, i, [ftz](float a, float b) { return div_approx(a, b, ftz); });
}
void decode_div(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  i.flags = flags_from(d);
  d.operands(i, t, {t, t});
  i.fn = t == Type::F64 ? div_f64 : d.has(".approx") ? div_f32_approx : i.flags ? div_f32 : div_f32_plain;
}

/// Mixed precision: a in F16 or BF16, the rest float32.
template <class F>
void mixed(Exec& x, const Instr& i, F f) {
  const Format format = i.type == Type::F16 ? Format::F16 : Format::BF16;
  binary<float, uint16_t, float>(
      x, i, [&](uint16_t a, float c) { return f(static_cast<float>(decode(a, format)), c); });
}
void add_mixed(Exec& x, const Instr& i) {
  const Arithmetic how = arithmetic(i);
  mixed(x, i, [&](float a, float c) { return numerics::add(a, c, how); });
}
void sub_mixed(Exec& x, const Instr& i) {
  const Arithmetic how = arithmetic(i);
  mixed(x, i, [&](float a, float c) { return numerics::sub(a, c, how); });
}
void fma_mixed(Exec& x, const Instr& i) {
  const Arithmetic how = arithmetic(i);
  const Format format = i.type == Type::F16 ? Format::F16 : Format::BF16;
  ternary<float, uint16_t, uint16_t, float>(x, i, [&](uint16_t a, uint16_t b, float c) {
    return numerics::fma(static_cast<float>(decode(a, format)), static_cast<float>(decode(b, format)), c,
                         how);
  });
}
void decode_mixed(Decoder& d, Instr& i) {
  i.type = d.last_type();
  i.flags = flags_from(d);
  if (d.ast->opcode == "fma") {
    d.operands(i, Type::F32, {i.type, i.type, Type::F32});
    i.fn = fma_mixed;
  } else {
    d.operands(i, Type::F32, {i.type, Type::F32});
    i.fn = d.ast->opcode == "add" ? add_mixed : sub_mixed;
  }
}

// --- Sign, minimum, maximum ---

void abs_f32(Exec& x, const Instr& i) {
  const bool ftz = i.flags & kFtz;
  unary<uint32_t, uint32_t>(x, i, [ftz](uint32_t a) {
    return std::isnan(float_of(a)) ? kCanonicalNan
                                   : bits_of(ftz ? flush(float_of(a)) : float_of(a)) & 0x7FFFFFFFu;
  });
}
void neg_f32(Exec& x, const Instr& i) {
  const bool ftz = i.flags & kFtz;
  unary<uint32_t, uint32_t>(x, i, [ftz](uint32_t a) {
    return std::isnan(float_of(a)) ? kCanonicalNan
                                   : bits_of(ftz ? flush(float_of(a)) : float_of(a)) ^ 0x80000000u;
  });
}
void abs_f64(Exec& x, const Instr& i) {
  unary<uint64_t, uint64_t>(x, i, [](uint64_t a) { return a & ~(uint64_t{1} << 63); });
}
void neg_f64(Exec& x, const Instr& i) {
  unary<uint64_t, uint64_t>(x, i, [](uint64_t a) { return a ^ uint64_t{1} << 63; });
}
void decode_sign(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  i.flags = flags_from(d) & kFtz;
  d.operands(i, t, {t});
  const bool is_abs = d.ast->opcode == "abs";
  i.fn = t == Type::F64 ? (is_abs ? abs_f64 : neg_f64) : (is_abs ? abs_f32 : neg_f32);
}

MinMax min_max(const Instr& i) {
  return {(i.flags & kFtz) != 0, (i.flags & kNan) != 0, (i.flags & kXorsign) != 0};
}

template <bool kMax>
void extremum_f32(Exec& x, const Instr& i) {
  const MinMax how = min_max(i);
  if (i.operands == 4) {
    ternary<float, float, float, float>(
        x, i, [how](float a, float b, float c) { return extremum(extremum(a, b, kMax, how), c, kMax, how); });
  } else {
    binary<float, float, float>(x, i, [how](float a, float b) { return extremum(a, b, kMax, how); });
  }
}
template <bool kMax>
void extremum_f64(Exec& x, const Instr& i) {
  binary<double, double, double>(x, i, [](double a, double b) {
    if (std::isnan(a)) return canonical64(b);
    if (std::isnan(b)) return a;
    const bool less = a < b || (a == b && std::signbit(a));
    return less == kMax ? b : a;
  });
}
void decode_extremum(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  const bool maximum = d.ast->opcode == "max";
  i.flags = flags_from(d);
  if (t == Type::F32 && d.count() == 4) {
    d.operands(i, t, {t, t, t});
    if (d.has(".abs")) d.unsupported("three operands with .abs");
  } else {
    d.operands(i, t, {t, t});
  }
  i.fn = t == Type::F64 ? (maximum ? Handler(extremum_f64<true>) : Handler(extremum_f64<false>))
                        : (maximum ? Handler(extremum_f32<true>) : Handler(extremum_f32<false>));
}

void copysign_f32(Exec& x, const Instr& i) {  // d = b with the sign of a
  binary<uint32_t, uint32_t, uint32_t>(
      x, i, [](uint32_t a, uint32_t b) { return (b & 0x7FFFFFFFu) | (a & 0x80000000u); });
}
void copysign_f64(Exec& x, const Instr& i) {
  constexpr uint64_t kSign = uint64_t{1} << 63;
  binary<uint64_t, uint64_t, uint64_t>(x, i,
                                       [](uint64_t a, uint64_t b) { return (b & ~kSign) | (a & kSign); });
}
void decode_copysign(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  d.operands(i, t, {t, t});
  i.fn = t == Type::F64 ? copysign_f64 : copysign_f32;
}

// --- One operand ---

template <float (*F)(float, bool)>
void approximate_f32(Exec& x, const Instr& i) {
  const bool ftz = i.flags & kFtz;
  unary<float, float>(x, i, [ftz](float a) { return F(a, ftz); });
}
void tanh_f32(Exec& x, const Instr& i) { unary<float, float>(x, i, tanh_approx); }
void rcp_f32(Exec& x, const Instr& i) {
  const Arithmetic how = arithmetic(i);
  unary<float, float>(x, i, [how](float a) { return numerics::rcp(a, how); });
}
void sqrt_f32(Exec& x, const Instr& i) {
  const Arithmetic how = arithmetic(i);
  unary<float, float>(x, i, [how](float a) { return numerics::sqrt(a, how); });
}
void rcp_f64(Exec& x, const Instr& i) {
  const Rounding r = static_cast<Rounding>(i.flags & 7);
  unary<double, double>(x, i, [r](double a) { return div64(1.0, a, r); });
}
void sqrt_f64_h(Exec& x, const Instr& i) {
  const Rounding r = static_cast<Rounding>(i.flags & 7);
  unary<double, double>(x, i, [r](double a) { return sqrt64(a, r); });
}
/// rcp.approx.ftz.f64 and rsqrt.approx.f64 keep the upper 32 bits' worth of precision.
double upper_half(double v) { return double_of(bits_of(v) & ~uint64_t{0xFFFFFFFF}); }
void rcp_f64_approx(Exec& x, const Instr& i) {
  unary<double, double>(x, i, [](double a) { return canonical64(upper_half(1.0 / upper_half(a))); });
}
void rsqrt_f64(Exec& x, const Instr& i) {
  unary<double, double>(x, i, [](double a) { return canonical64(1.0 / std::sqrt(a)); });
}

void decode_unary(Decoder& d, Instr& i) {
  const std::string& op = d.ast->opcode;
  const Type t = d.last_type();
  i.flags = flags_from(d);
  d.operands(i, t, {t});
  const bool approx = d.has(".approx");
  if (t == Type::F64) {
    i.fn = op == "rcp" ? (approx ? rcp_f64_approx : rcp_f64) : op == "sqrt" ? sqrt_f64_h : rsqrt_f64;
    return;
  }
  if (op == "rcp") i.fn = approx ? approximate_f32<rcp_approx> : rcp_f32;
  if (op == "sqrt") i.fn = approx ? approximate_f32<sqrt_approx> : sqrt_f32;
  if (op == "rsqrt") i.fn = approximate_f32<rsqrt_approx>;
  if (op == "ex2") i.fn = approximate_f32<ex2_approx>;
  if (op == "lg2") i.fn = approximate_f32<lg2_approx>;
  if (op == "sin") i.fn = approximate_f32<sin_approx>;
  if (op == "cos") i.fn = approximate_f32<cos_approx>;
  if (op == "tanh") i.fn = tanh_f32;
}

// --- Comparison ---

enum FloatCompare : uint8_t { Eq, Ne, Lt, Le, Gt, Ge, Equ, Neu, Ltu, Leu, Gtu, Geu, Num, Nan };

template <class T>
bool holds(T a, T b, uint8_t how) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  switch (how) {
    case Eq:
      return a == b;
    case Ne:
      return !unordered && a != b;
    case Lt:
      return a < b;
    case Le:
      return a <= b;
    case Gt:
      return a > b;
    case Ge:
      return a >= b;
    case Equ:
      return unordered || a == b;
    case Neu:
      return unordered || a != b;
    case Ltu:
      return unordered || a < b;
    case Leu:
      return unordered || a <= b;
    case Gtu:
      return unordered || a > b;
    case Geu:
      return unordered || a >= b;
    case Num:
      return !unordered;
    default:
      return unordered;
  }
}

template <class T>
Mask compare(Exec& x, const Instr& i) {
  const auto a = x.view<T>(i.op[1]);
  const auto b = x.view<T>(i.op[2]);
  Mask out = 0;
  for (int l = 0; l < kLanes; ++l) {
    T p = a[l], q = b[l];
    if constexpr (sizeof(T) == 4) {
      if (i.vector == 2) p = flush(p), q = flush(q);  // .ftz
    }
    out |= static_cast<Mask>(holds(p, q, i.choice)) << l;
  }
  return out;
}

template <class T>
void setp(Exec& x, const Instr& i) {
  set_predicates(x, i, compare<T>(x, i));
}

template <class T, class D>
void set(Exec& x, const Instr& i) {
  Mask r = compare<T>(x, i);
  if (i.flags) r = combine(i.flags, r, x.predicate(i.op[3]));
  D out[kLanes];
  const D yes = std::is_same_v<D, float> ? static_cast<D>(1) : static_cast<D>(-1);
  for (int l = 0; l < kLanes; ++l) out[l] = r >> l & 1 ? yes : D(0);
  x.store(i.op[0], out);
  x.finish(i, i.flags ? 3 : 2);
}

uint8_t compare_of(const std::string& m) {
  static const char* const kNames[] = {".eq",  ".ne",  ".lt",  ".le",  ".gt",  ".ge",  ".equ",
                                       ".neu", ".ltu", ".leu", ".gtu", ".geu", ".num", ".nan"};
  for (uint8_t k = 0; k < 14; ++k) {
    if (m == kNames[k]) return k;
  }
  return Nan;
}
void decode_setp(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  i.choice = compare_of(d.slot(0));
  decode_compare_operands(d, i, d.slot(1), t);
  i.vector = d.has(".ftz") ? 2 : 1;
  i.fn = t == Type::F64 ? Handler(setp<double>) : Handler(setp<float>);
}
void decode_set(Decoder& d, Instr& i) {
  const Type t = d.last_type(), to = d.slot_type(d.matched.size() - 2);
  i.choice = compare_of(d.slot(0));
  i.vector = d.has(".ftz") ? 2 : 1;
  if (!d.slot(1).empty()) {
    i.flags = bool_op(d.slot(1));
    d.operands(i, to, {t, t, Type::Pred});
  } else {
    d.operands(i, to, {t, t});
  }
  i.fn = t == Type::F64 ? (to == Type::F32 ? Handler(set<double, float>) : Handler(set<double, uint32_t>))
                        : (to == Type::F32 ? Handler(set<float, float>) : Handler(set<float, uint32_t>));
}

enum Test : uint8_t { Finite, Infinite, Number, NotANumber, Normal, Subnormal };
template <class T>
void testp(Exec& x, const Instr& i) {
  const auto a = x.view<T>(i.op[1]);
  Mask out = 0;
  for (int l = 0; l < kLanes; ++l) {
    const int c = std::fpclassify(a[l]);
    bool yes = false;
    switch (i.choice) {
      case Finite:
        yes = c != FP_NAN && c != FP_INFINITE;
        break;
      case Infinite:
        yes = c == FP_INFINITE;
        break;
      case Number:
        yes = c != FP_NAN;
        break;
      case NotANumber:
        yes = c == FP_NAN;
        break;
      case Normal:
        yes = c == FP_NORMAL || c == FP_ZERO;  // zeros count as normal
        break;
      default:
        yes = c == FP_SUBNORMAL;
        break;
    }
    out |= static_cast<Mask>(yes) << l;
  }
  x.set_predicate(i.op[0], out);
  x.set_predicate_undefined(i.op[0], x.undefined(i.op[1]));
}
void decode_testp(Decoder& d, Instr& i) {
  static const char* const kNames[] = {".finite",     ".infinite", ".number",
                                       ".notanumber", ".normal",   ".subnormal"};
  for (uint8_t k = 0; k < 6; ++k) {
    if (d.slot(0) == kNames[k]) i.choice = k;
  }
  const Type t = d.last_type();
  d.operands(i, Type::Pred, {t});
  i.fn = t == Type::F64 ? Handler(testp<double>) : Handler(testp<float>);
}

constexpr const char* kFloat = "Floating Point Instructions";
constexpr const char* kMixed = "Mixed Precision Floating-Point Instructions";
constexpr const char* kCompare = "Comparison and Selection Instructions";
#define ROUNDING ".rn|.rz|.rm|.rp"
#define COMPARISONS ".eq|.ne|.lt|.le|.gt|.ge|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan"

const Form kForms[] = {
    {"add{" ROUNDING "}{.ftz}{.sat}(.f32)", kFloat, decode_arithmetic},
    {"add{" ROUNDING "}{.ftz}(.f32x2)", kFloat, decode_arithmetic},
    {"add{" ROUNDING "}(.f64)", kFloat, decode_arithmetic},
    {"sub{" ROUNDING "}{.ftz}{.sat}(.f32)", kFloat, decode_arithmetic},
    {"sub{" ROUNDING "}{.ftz}(.f32x2)", kFloat, decode_arithmetic},
    {"sub{" ROUNDING "}(.f64)", kFloat, decode_arithmetic},
    {"mul{" ROUNDING "}{.ftz}{.sat}(.f32)", kFloat, decode_arithmetic},
    {"mul{" ROUNDING "}{.ftz}(.f32x2)", kFloat, decode_arithmetic},
    {"mul{" ROUNDING "}(.f64)", kFloat, decode_arithmetic},
    {"fma(" ROUNDING "){.ftz}{.sat}(.f32)", kFloat, decode_arithmetic},
    {"fma(" ROUNDING "){.ftz}(.f32x2)", kFloat, decode_arithmetic},
    {"fma(" ROUNDING ")(.f64)", kFloat, decode_arithmetic},
    {"mad(" ROUNDING "){.ftz}{.sat}(.f32)", kFloat, decode_arithmetic},
    {"mad(" ROUNDING ")(.f64)", kFloat, decode_arithmetic},
    {"add{" ROUNDING "}{.sat}(.f32)(.f16|.bf16)", kMixed, decode_mixed},
    {"sub{" ROUNDING "}{.sat}(.f32)(.f16|.bf16)", kMixed, decode_mixed},
    {"fma(" ROUNDING "){.sat}(.f32)(.f16|.bf16)", kMixed, decode_mixed},
    {"div(.approx|.full|" ROUNDING "){.ftz}(.f32)", kFloat, decode_div},
    {"div(" ROUNDING ")(.f64)", kFloat, decode_div},
    {"abs{.ftz}(.f32)", kFloat, decode_sign},
    {"abs(.f64)", kFloat, decode_sign},
    {"neg{.ftz}(.f32)", kFloat, decode_sign},
    {"neg(.f64)", kFloat, decode_sign},
    {"min{.ftz}{.NaN}{.xorsign}{.abs}(.f32)", kFloat, decode_extremum},
    {"min(.f64)", kFloat, decode_extremum},
    {"max{.ftz}{.NaN}{.xorsign}{.abs}(.f32)", kFloat, decode_extremum},
    {"max(.f64)", kFloat, decode_extremum},
    {"copysign(.f32|.f64)", kFloat, decode_copysign},
    {"rcp(.approx|" ROUNDING "){.ftz}(.f32)", kFloat, decode_unary},
    {"rcp(" ROUNDING ")(.f64)", kFloat, decode_unary},
    {"rcp(.approx)(.ftz)(.f64)", kFloat, decode_unary},
    {"sqrt(.approx|" ROUNDING "){.ftz}(.f32)", kFloat, decode_unary},
    {"sqrt(" ROUNDING ")(.f64)", kFloat, decode_unary},
    {"rsqrt(.approx){.ftz}(.f32|.f64)", kFloat, decode_unary},
    {"sin(.approx){.ftz}(.f32)", kFloat, decode_unary},
    {"cos(.approx){.ftz}(.f32)", kFloat, decode_unary},
    {"lg2(.approx){.ftz}(.f32)", kFloat, decode_unary},
    {"ex2(.approx){.ftz}(.f32)", kFloat, decode_unary},
    {"tanh(.approx)(.f32)", kFloat, decode_unary},
    {"testp(.finite|.infinite|.number|.notanumber|.normal|.subnormal)(.f32|.f64)", kFloat, decode_testp},
    {"setp(" COMPARISONS "){.and|.or|.xor}{.ftz}(.f32|.f64)", kCompare, decode_setp},
    {"set(" COMPARISONS "){.and|.or|.xor}{.ftz}(.u32|.s32|.f32)(.f32|.f64)", kCompare, decode_set},
};

}  // namespace

FormList float_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
