// Floating-point arithmetic as PTX instructions do it: directed rounding, flush-to-zero, saturation, NaN
// rules, and the `.approx` functions.
//
// Add, multiply, fused multiply-add and division compute an exact error term in double, fold it in as a
// sticky bit
// ("round to odd") and round once more to the result format, so every rounding mode is exact without touching
// the processor's rounding state. Sources: PTX ISA "Floating Point Instructions"; Boldo and Melquiond,
// "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
//
// Approximate functions return the correctly rounded result, which lies within every bound the ISA gives, but
// is not what hardware returns bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "float_formats.hpp"

namespace megagen::numerics {

inline constexpr uint32_t kCanonicalNan = 0x7FFFFFFF;

/// float32 with NaN replaced by the canonical NaN that GPU arithmetic returns.
inline float canonical(float value) { return std::isnan(value) ? float_of(kCanonicalNan) : value; }

/// .ftz: subnormal float32 becomes a zero of the same sign.
inline float flush(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

/// .sat: clamps to [0, 1]; NaN becomes +0.
inline float saturate(float value) { return value > 0.0f ? std::min(value, 1.0f) : 0.0f; }

/// Modifiers of a float32 arithmetic instruction.
struct Arithmetic {
  Rounding rounding = Rounding::NearestEven;
  bool ftz = false;
  bool sat = false;
};

/// `nearest` + `error` rounded to odd in double: an inexact result gets an odd last bit, so that a second
/// rounding to a format at least two bits narrower is correct in every mode.
inline double round_to_odd(double nearest, double error) {
  if (error == 0 || !std::isfinite(nearest)) return nearest;
  uint64_t bits = bits_of(nearest);
  if (bits & 1) return nearest;
  // Step towards zero where the exact value is smaller in magnitude; then set the sticky bit.
  if ((error < 0) != (nearest < 0)) --bits;
  return double_of(bits | 1);
}

/// Exact a + b as a double that further rounding treats like the exact sum (two-sum, then round to odd).
inline double odd_sum(double a, double b) {
  const double sum = a + b;
  const double b_virtual = sum - a;
  const double error = (a - (sum - b_virtual)) + (b - b_virtual);
  return round_to_odd(sum, error);
}

/// An exact zero sum of nonzero or opposite-signed terms is +0, but -0 when rounding down (IEEE 754, 6.3).
inline double signed_zero_sum(double product, double addend, double sum, Rounding rounding) {
  if (sum != 0) return sum;
  if (product == 0 && addend == 0 && std::signbit(product) == std::signbit(addend)) return product;
  return rounding == Rounding::Down ? -0.0 : 0.0;
}

/// a * b + c rounded once to `format`. Operands must be values of a format of at most 24 significant bits.
inline double fused(double a, double b, double c, Format format, const Conversion& how) {
  const double product = a * b;  // exact: at most 48 bits
  const double sum = signed_zero_sum(product, c, odd_sum(product, c), how.rounding);
  return decode(encode(sum, format, how), format);
}

inline float finish(double value, const Arithmetic& how) {
  float result = float_of(static_cast<uint32_t>(encode(value, Format::F32, {how.rounding, false, false})));
  if (how.ftz) result = flush(result);
  return how.sat ? saturate(result) : result;
}

inline float operand(float value, const Arithmetic& how) { return how.ftz ? flush(value) : value; }

inline bool plain(const Arithmetic& how) {
  return how.rounding == Rounding::NearestEven && !how.ftz && !how.sat;
}

inline float add(float a, float b, const Arithmetic& how = {}) {
  if (plain(how)) return canonical(a + b);
  const double x = operand(a, how), y = operand(b, how);
  return finish(signed_zero_sum(x, y, odd_sum(x, y), how.rounding), how);
}

inline float sub(float a, float b, const Arithmetic& how = {}) { return add(a, -b, how); }

inline float mul(float a, float b, const Arithmetic& how = {}) {
  if (plain(how)) return canonical(a * b);
  return finish(static_cast<double>(operand(a, how)) * operand(b, how), how);
}

inline float fma(float a, float b, float c, const Arithmetic& how = {}) {
  if (plain(how)) return canonical(std::fma(a, b, c));
  const double product = static_cast<double>(operand(a, how)) * operand(b, how);
  const double addend = operand(c, how);
  return finish(signed_zero_sum(product, addend, odd_sum(product, addend), how.rounding), how);
}

/// div.rnd: also serves div.full and div.approx, whose error bounds (2 ulp) it meets.
inline float div(float a, float b, const Arithmetic& how = {}) {
  if (plain(how)) return canonical(a / b);
  const double x = operand(a, how), y = operand(b, how);
  const double quotient = x / y;
  if (!std::isfinite(quotient) || quotient == 0) return finish(quotient, how);
  const double remainder = std::fma(-quotient, y, x);
  return finish(round_to_odd(quotient, y < 0 ? -remainder : remainder), how);
}

inline float rcp(float a, const Arithmetic& how = {}) { return div(1.0f, a, how); }

inline float sqrt(float a, const Arithmetic& how = {}) {
  if (plain(how)) return canonical(std::sqrt(a));
  const double x = operand(a, how);
  const double root = std::sqrt(x);
  if (!std::isfinite(root) || root == 0) return finish(root, how);
  return finish(round_to_odd(root, std::fma(-root, root, x)), how);
}

/// Modifiers of min and max.
struct MinMax {
  bool ftz = false;
  bool nan = false;  // .NaN: a NaN operand makes the result NaN; otherwise the other operand is returned
  bool xorsign =
      false;  // .xorsign.abs: compares magnitudes, takes the sign from the XOR of the operands' signs
};

/// max.f32 / min.f32; +0 counts as larger than -0.
inline float extremum(float a, float b, bool maximum, const MinMax& how = {}) {
  if (how.ftz) a = flush(a), b = flush(b);
  if (std::isnan(a) || std::isnan(b)) {
    if (how.nan || (std::isnan(a) && std::isnan(b))) return float_of(kCanonicalNan);
    const float other = std::isnan(a) ? b : a;
    return how.xorsign ? std::copysign(other, std::signbit(a) != std::signbit(b) ? -1.0f : 1.0f) : other;
  }
  const bool negative = std::signbit(a) != std::signbit(b);
  if (how.xorsign) a = std::fabs(a), b = std::fabs(b);
  const bool a_is_less = a < b || (a == b && std::signbit(a) && !std::signbit(b));
  const float result = a_is_less == maximum ? b : a;
  return how.xorsign ? std::copysign(result, negative ? -1.0f : 1.0f) : result;
}

inline float max(float a, float b, const MinMax& how = {}) { return extremum(a, b, true, how); }
inline float min(float a, float b, const MinMax& how = {}) { return extremum(a, b, false, how); }

/// Fast float32 -> BF16, round to nearest even (cvt.rn.bf16.f32).
inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if (std::isnan(value)) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

/// cvt.*.tf32.f32 on register bits. As measured on sm_90, .rna works on the bit pattern: it adds half a unit
/// and cuts, except that NaN and infinity are only cut (a NaN's payload passes through and may vanish), and
/// .satfinite steps down from whatever then has the largest exponent.
inline uint32_t to_tf32(uint32_t bits, const Conversion& how) {
  if (how.rounding != Rounding::NearestAway) {
    return static_cast<uint32_t>(encode(float_of(bits), Format::TF32, how));
  }
  constexpr uint32_t exponent = 0x7F800000, unit = 0x2000;
  const bool finite = (bits & exponent) != exponent;
  const uint32_t cut = (finite ? bits + unit / 2 : bits) & ~(unit - 1);
  return how.satfinite && (cut & exponent) == exponent ? cut - unit : cut;
}

// --- integers
// ----------------------------------------------------------------------------------------------------

/// Rounds to an integral value: cvt.rni, .rzi, .rmi, .rpi between floating-point types.
inline double round_to_integral(double value, Rounding rounding) {
  if (!std::isfinite(value) || value == 0 || std::fabs(value) >= 0x1p52) return value;
  return std::copysign(static_cast<double>(rounded_magnitude(value, 0, rounding)), value);
}

/// cvt to an integer of `bits` bits, clamped to its range. NaN gives 0, or 2^(bits - 1) if source or
/// destination has 64 bits. The result is sign-extended to 64 bits.
inline int64_t to_integer(double value, Rounding rounding, int bits, bool is_signed, bool from_f64) {
  if (std::isnan(value)) return from_f64 || bits == 64 ? static_cast<int64_t>(uint64_t{1} << (bits - 1)) : 0;
  const bool negative = std::signbit(value);
  if (negative && !is_signed) return 0;
  const uint64_t largest = is_signed ? (uint64_t{1} << (bits - 1)) - !negative : ~uint64_t{0} >> (64 - bits);
  const bool huge = std::fabs(value) >= 0x1p64;
  const uint64_t magnitude = huge ? largest : value == 0 ? 0 : rounded_magnitude(value, 0, rounding);
  const uint64_t clamped = std::min(magnitude, largest);
  return static_cast<int64_t>(negative ? 0 - clamped : clamped);
}

/// cvt from an integer to a floating-point format; a uint64 source goes to `magnitude` with `negative` false.
inline uint64_t from_integer(uint64_t magnitude, bool negative, Format format, Rounding rounding) {
  // Keep 53 bits and a sticky bit, so that the conversion to double is exact and the rounding below sees the
  // rest.
  const bool wide = magnitude >> 53;
  const uint64_t kept = wide ? magnitude >> 11 | ((magnitude & 0x7FF) != 0) : magnitude;
  const double value = std::ldexp(static_cast<double>(kept), wide ? 11 : 0);
  return encode(negative ? -value : value, format, {rounding, false, false});
}

// --- 16-bit arithmetic
// -------------------------------------------------------------------------------------------

/// Modifiers of f16 / bf16 arithmetic. Only f16 has .ftz and .sat.
struct HalfArithmetic {
  bool ftz = false;
  bool sat = false;
  bool relu = false;  // fma.rn.relu: negative results become +0
};

inline double half_operand(uint16_t bits, Format format, bool ftz) {
  const double value = decode(bits, format);
  return ftz && std::fabs(value) < std::ldexp(1.0, traits(format).min_exponent()) ? std::copysign(0.0, value)
                                                                                  : value;
}

inline uint16_t half_finish(double value, Format format, const HalfArithmetic& how) {
  uint64_t bits = encode(value, format, {Rounding::NearestEven, false, how.relu});
  double rounded = decode(bits, format);
  if (how.ftz && std::fabs(rounded) < std::ldexp(1.0, traits(format).min_exponent())) {
    bits = encode(std::copysign(0.0, rounded), format);
  }
  if (how.sat) {
    rounded = decode(bits, format);
    bits = encode(rounded > 0 ? std::min(rounded, 1.0) : 0.0, format);
  }
  return static_cast<uint16_t>(bits);
}

inline uint16_t half_fma(uint16_t a, uint16_t b, uint16_t c, Format format, const HalfArithmetic& how = {}) {
  const double product = half_operand(a, format, how.ftz) * half_operand(b, format, how.ftz);
  const double addend = half_operand(c, format, how.ftz);
  return half_finish(signed_zero_sum(product, addend, odd_sum(product, addend), Rounding::NearestEven),
                     format, how);
}

inline uint16_t half_add(uint16_t a, uint16_t b, Format format, const HalfArithmetic& how = {}) {
  const double x = half_operand(a, format, how.ftz), y = half_operand(b, format, how.ftz);
  return half_finish(signed_zero_sum(x, y, odd_sum(x, y), Rounding::NearestEven), format, how);
}

inline uint16_t half_sub(uint16_t a, uint16_t b, Format format, const HalfArithmetic& how = {}) {
  return half_add(a, b ^ 0x8000, format, how);
}

inline uint16_t half_mul(uint16_t a, uint16_t b, Format format, const HalfArithmetic& how = {}) {
  return half_finish(half_operand(a, format, how.ftz) * half_operand(b, format, how.ftz), format, how);
}

inline uint16_t half_extremum(uint16_t a, uint16_t b, Format format, bool maximum, const MinMax& how = {}) {
  const float result = extremum(static_cast<float>(half_operand(a, format, how.ftz)),
                                static_cast<float>(half_operand(b, format, how.ftz)), maximum, how);
  return static_cast<uint16_t>(encode(result, format));
}

// --- approximate functions (float32)
// ------------------------------------------------------------------------------

inline float approximate(double exact, bool ftz) {
  const float rounded = canonical(static_cast<float>(exact));
  return ftz ? flush(rounded) : rounded;
}

inline double approximate_operand(float a, bool ftz) { return ftz ? flush(a) : a; }

inline float ex2_approx(float a, bool ftz = false) {
  return approximate(std::exp2(approximate_operand(a, ftz)), ftz);
}

inline float rcp_approx(float a, bool ftz = false) {
  return approximate(1.0 / approximate_operand(a, ftz), ftz);
}

inline float sqrt_approx(float a, bool ftz = false) {
  return approximate(std::sqrt(approximate_operand(a, ftz)), ftz);
}

inline float rsqrt_approx(float a, bool ftz = false) {
  return approximate(1.0 / std::sqrt(approximate_operand(a, ftz)), ftz);
}

inline float lg2_approx(float a, bool ftz = false) {
  return approximate(std::log2(approximate_operand(a, ftz)), ftz);
}

inline float sin_approx(float a, bool ftz = false) {
  return approximate(std::sin(approximate_operand(a, ftz)), ftz);
}

inline float cos_approx(float a, bool ftz = false) {
  return approximate(std::cos(approximate_operand(a, ftz)), ftz);
}

/// tanh.approx.f32 has no .ftz form and supports subnormals.
inline float tanh_approx(float a) { return approximate(std::tanh(static_cast<double>(a)), false); }

/// div.approx: like a * rcp(b), so a divisor beyond 2^126 gives 0 (NaN for an infinite dividend), as the ISA
/// says.
inline float div_approx(float a, float b, bool ftz = false) {
  if (std::isfinite(b) && std::fabs(b) > 0x1p126f) {
    return std::isinf(a) ? float_of(kCanonicalNan)
                         : std::copysign(std::isnan(a) ? float_of(kCanonicalNan) : 0.0f,
                                         std::signbit(a) != std::signbit(b) ? -1.0f : 1.0f);
  }
  return div(a, b, {Rounding::NearestEven, ftz, false});
}

/// ex2.approx and tanh.approx on F16 or BF16 (.ftz for BF16's ex2).
inline uint16_t half_ex2_approx(uint16_t a, Format format, bool ftz = false) {
  return half_finish(std::exp2(half_operand(a, format, ftz)), format, {ftz, false, false});
}

inline uint16_t half_tanh_approx(uint16_t a, Format format) {
  return half_finish(std::tanh(decode(a, format)), format, {});
}

}  // namespace megagen::numerics
