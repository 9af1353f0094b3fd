// Narrow and wide floating-point formats of the PTX ISA: decoding, and encoding with every rounding of `cvt`.
//
// One integer routine serves all formats: a double holds each source format exactly, so a value is rounded
// once. Sources: PTX ISA "Alternate floating point data formats", "cvt"; OCP Microscaling Formats (MX) 1.0.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace megagen::numerics {

/// PTX rounding modifiers: .rn, .rz, .rm, .rp, .rna (nearest, ties away from zero; tf32 only).
enum class Rounding : uint8_t { NearestEven, TowardZero, Down, Up, NearestAway };

enum class Format : uint8_t { F64, F32, TF32, F16, BF16, E4M3, E5M2, E3M2, E2M3, E2M1, UE8M0 };

/// What the all-ones exponent encodes.
enum class Specials : uint8_t {
  InfinityAndNan,  // IEEE 754
  OneNan,          // E4M3: only S.1111.111 is NaN, and there is no infinity
  None,            // FP6 and FP4
};

struct FormatTraits {
  int exponent_bits;
  int mantissa_bits;
  Specials specials;
  uint64_t canonical_nan;  // what PTX instructions return

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  constexpr int min_exponent() const { return 1 - bias(); }
  constexpr uint64_t sign_bit() const { return uint64_t{1} << (exponent_bits + mantissa_bits); }
  constexpr uint64_t infinity() const { return ((uint64_t{1} << exponent_bits) - 1) << mantissa_bits; }
  constexpr uint64_t max_finite() const {
    switch (specials) {
      case Specials::InfinityAndNan: return infinity() - 1;
      case Specials::OneNan: return sign_bit() - 2;
      default: return sign_bit() - 1;
    }
  }
};

/// Traits of every format but UE8M0, which has neither sign nor mantissa. TF32 is described as the upper 19
/// bits of its 32-bit register.
constexpr FormatTraits traits(Format format) {
  switch (format) {
    case Format::F64: return {11, 52, Specials::InfinityAndNan, 0x7FFFFFFFFFFFFFFF};
    case Format::F32: return {8, 23, Specials::InfinityAndNan, 0x7FFFFFFF};
    case Format::TF32: return {8, 10, Specials::InfinityAndNan, 0x3FFFF};
    case Format::F16: return {5, 10, Specials::InfinityAndNan, 0x7FFF};
    case Format::BF16: return {8, 7, Specials::InfinityAndNan, 0x7FFF};
    case Format::E4M3: return {4, 3, Specials::OneNan, 0x7F};
    case Format::E5M2: return {5, 2, Specials::InfinityAndNan, 0x7F};
    case Format::E3M2: return {3, 2, Specials::None, 0x1F};
    case Format::E2M3: return {2, 3, Specials::None, 0x1F};
    default: return {2, 1, Specials::None, 0x7};
  }
}

/// Modifiers of a conversion. `satfinite` turns overflow and infinities into the largest finite value; `relu`
/// turns negative results into +0.
struct Conversion {
  Rounding rounding = Rounding::NearestEven;
  bool satfinite = false;
  bool relu = false;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline double double_of(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// Whether truncated magnitude `kept` must be incremented, given the discarded fraction compared with one
/// half. `below`, `tie`: fraction < 1/2, == 1/2; `exact`: fraction == 0.
inline bool rounds_up(Rounding rounding, bool negative, bool odd, bool exact, bool below, bool tie) {
  switch (rounding) {
    case Rounding::NearestEven: return !below && (!tie || odd);
    case Rounding::NearestAway: return !below;
    case Rounding::Down: return negative && !exact;
    case Rounding::Up: return !negative && !exact;
    default: return false;
  }
}

/// Magnitude |value| of a finite nonzero double in units of 2^quantum, rounded.
inline uint64_t rounded_magnitude(double value, int quantum, Rounding rounding) {
  const uint64_t bits = bits_of(value);
  const bool negative = bits >> 63;
  const int biased = static_cast<int>((bits >> 52) & 0x7FF);
  const uint64_t significand = (bits & 0xFFFFFFFFFFFFF) | (biased ? uint64_t{1} << 52 : 0);
  const int shift = quantum - ((biased ? biased : 1) - 1075);
  if (shift <= 0) return significand << -shift;
  const uint64_t kept = shift > 63 ? 0 : significand >> shift;
  const uint64_t rest = shift > 63 ? significand : significand & ((uint64_t{1} << shift) - 1);
  const uint64_t half = shift > 63 ? ~uint64_t{0} : uint64_t{1} << (shift - 1);
  return kept + rounds_up(rounding, negative, kept & 1, rest == 0, rest < half, rest == half);
}

inline int exponent_of(double value) {
  int exponent;
  std::frexp(value, &exponent);
  return exponent - 1;
}

/// Encodes as UE8M0: a byte e means 2^(e - 127), 255 is NaN. The sign of `value` is ignored, as `cvt` does
/// for scale factors. PTX offers .rz and .rp; without satfinite, what exceeds 2^127 becomes NaN.
inline uint8_t encode_ue8m0(double value, Rounding rounding, bool satfinite) {
  if (std::isnan(value)) return 255;
  if (std::isinf(value)) return satfinite ? 254 : 255;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return 0;
  int exponent = exponent_of(magnitude);
  if (rounding == Rounding::Up && magnitude > std::ldexp(1.0, exponent)) ++exponent;
  if (exponent > 127) return satfinite ? 254 : 255;
  return static_cast<uint8_t>(exponent < -127 ? 0 : exponent + 127);
}

/// Encodes `value` in `format`. Overflow follows IEEE 754 per rounding direction unless `satfinite`; formats
/// without infinity always saturate, except that E4M3 without satfinite gives NaN. NaN becomes the canonical
/// NaN, or the largest positive value where the format has no NaN. TF32 results are the 32-bit register with
/// 13 zero bits.
inline uint64_t encode(double value, Format format, const Conversion& how = {}) {
  if (format == Format::UE8M0) return encode_ue8m0(value, how.rounding, how.satfinite);
  const FormatTraits t = traits(format);
  const int register_shift = format == Format::TF32 ? 13 : 0;
  if (std::isnan(value)) return t.canonical_nan << register_shift;
  const bool negative = std::signbit(value);
  if (how.relu && negative) return 0;
  const uint64_t sign = negative ? t.sign_bit() : 0;
  const bool saturate = how.satfinite || t.specials == Specials::None;
  if (std::isinf(value)) {
    const uint64_t overflow = t.specials == Specials::OneNan ? t.canonical_nan : t.infinity();
    return (sign | (saturate ? t.max_finite() : overflow)) << register_shift;
  }
  if (value == 0) return sign << register_shift;
  const int exponent = exponent_of(value);
  const int clamped = exponent < t.min_exponent() ? t.min_exponent() : exponent;
  const uint64_t magnitude = rounded_magnitude(value, clamped - t.mantissa_bits, how.rounding);
  // A significand that rounds up to the next power of two carries into the exponent field by itself.
  const uint64_t code = (static_cast<uint64_t>(clamped - t.min_exponent()) << t.mantissa_bits) + magnitude;
  if (code <= t.max_finite()) return (sign | code) << register_shift;
  const bool away = how.rounding == Rounding::NearestEven || how.rounding == Rounding::NearestAway ||
                    how.rounding == (negative ? Rounding::Down : Rounding::Up);
  if (saturate || !away) return (sign | t.max_finite()) << register_shift;
  return (sign | (t.specials == Specials::OneNan ? t.canonical_nan : t.infinity())) << register_shift;
}

/// Value of an encoding; exact, and NaN keeps its sign. TF32 takes the 32-bit register and ignores its low 13
/// bits.
inline double decode(uint64_t bits, Format format) {
  if (format == Format::F64) return double_of(bits);
  if (format == Format::F32) return float_of(static_cast<uint32_t>(bits));
  if (format == Format::UE8M0) {
    return bits == 255 ? std::numeric_limits<double>::quiet_NaN()
                       : std::ldexp(1.0, static_cast<int>(bits) - 127);
  }
  const FormatTraits t = traits(format);
  if (format == Format::TF32) bits >>= 13;
  const uint64_t magnitude = bits & (t.sign_bit() - 1);
  const double sign = bits & t.sign_bit() ? -1.0 : 1.0;
  const double nan = std::copysign(std::numeric_limits<double>::quiet_NaN(), sign);
  if (t.specials == Specials::OneNan && magnitude == t.canonical_nan) return nan;
  if (t.specials == Specials::InfinityAndNan && magnitude >= t.infinity()) {
    return magnitude == t.infinity() ? sign * std::numeric_limits<double>::infinity() : nan;
  }
  const uint64_t field = magnitude >> t.mantissa_bits;
  const uint64_t mantissa = magnitude & ((uint64_t{1} << t.mantissa_bits) - 1);
  const uint64_t significand = field ? mantissa | (uint64_t{1} << t.mantissa_bits) : mantissa;
  const int exponent = (field ? static_cast<int>(field) - 1 : 0) + t.min_exponent() - t.mantissa_bits;
  return sign * std::ldexp(static_cast<double>(significand), exponent);
}

/// Bits that one value occupies in a packed pair (FP6 values sit in bytes).
constexpr int packed_width(Format format) {
  switch (format) {
    case Format::F16:
    case Format::BF16: return 16;
    case Format::E2M1: return 4;
    default: return 8;
  }
}

/// cvt.*x2: `high` goes to the upper half of the result, `low` to the lower. PTX's operand a is `high`.
inline uint32_t encode_x2(double high, double low, Format format, const Conversion& how = {}) {
  return static_cast<uint32_t>(encode(high, format, how) << packed_width(format) | encode(low, format, how));
}

struct Pair {
  double high, low;
};

inline Pair decode_x2(uint32_t packed, Format format) {
  const int width = packed_width(format);
  const uint32_t mask = (1u << width) - 1;
  return {decode(packed >> width & mask, format), decode(packed & mask, format)};
}

/// cvt between packed pairs, e.g. e4m3x2 -> f16x2, f16x2 -> e5m2x2, ue8m0x2 -> bf16x2.
inline uint32_t convert_x2(uint32_t packed, Format from, Format to, const Conversion& how = {}) {
  const Pair pair = decode_x2(packed, from);
  return encode_x2(pair.high, pair.low, to, how);
}

/// Fast F16 -> float32: moves the fields into place and corrects the bias by a multiplication, which is
/// exact.
inline float from_f16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16,
                 magnitude = static_cast<uint32_t>(bits & 0x7FFF) << 13;
  const float value =
      magnitude >= 0x0F800000 ? float_of(magnitude | 0x7F800000) : float_of(magnitude) * 0x1p112f;
  return float_of(bits_of(value) | sign);
}

/// Values of the 256 codes of an 8-bit format as float32; the hot path of operand decoding.
inline const float* decode_table(Format format) {
  struct Table {
    float values[256];
    explicit Table(Format f) {
      for (int code = 0; code < 256; ++code) values[code] = static_cast<float>(decode(code, f));
    }
  };
  static const Table e4m3(Format::E4M3), e5m2(Format::E5M2), ue8m0(Format::UE8M0);
  return format == Format::E4M3 ? e4m3.values : format == Format::E5M2 ? e5m2.values : ue8m0.values;
}

}  // namespace megagen::numerics
