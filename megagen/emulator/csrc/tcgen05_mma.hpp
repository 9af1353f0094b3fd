// tcgen05.mma: the instruction descriptor, its operands as numbers, and the arithmetic.
//
// The arithmetic is a model that no hardware has confirmed: products, of the scaled elements where there are
// scale factors, and the sum of an instruction's products with D are formed in double precision, in ascending
// order of k, and rounded once to D's type (float32 and f16: to nearest even). Integer sums are exact and
// wrap around or saturate at 32 bits.
//
// Source: PTX ISA, "TensorCore 5th Generation Family Instructions": Matrix Shape, Instruction descriptor,
// Block Scaling.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "float_formats.hpp"
#include "tcgen05_layout.hpp"

namespace megagen::tcgen05 {

enum class Kind : uint8_t { F16, TF32, F8F6F4, I8, MXF8F6F4, MXF4, MXF4NVF4 };
enum class Element : uint8_t { F16, BF16, TF32, E4M3, E5M2, E2M3, E3M2, E2M1, U8, S8 };
enum class Accumulator : uint8_t { F16, F32, S32 };

constexpr bool is_block_scaled(Kind kind) { return kind >= Kind::MXF8F6F4; }
/// Two elements of 4 bits to a byte, without padding.
constexpr bool is_dense4(Kind kind) { return kind >= Kind::MXF4; }

inline constexpr int kRowBytes = 32;  // K of every dense shape, as shared memory holds it

struct Instruction {
  Kind kind;
  int group;        // CTAs
  bool stationary;  // .ws
  int scales;       // scale factors per row along K: 0, 1, 2 or 4
  int m, n, k;
  Element a, b;
  Accumulator d;
  bool negate_a, negate_b, transpose_a, transpose_b, saturate;
  bool ue4m3;  // scale factors; otherwise UE8M0
  int a_scale_id, b_scale_id;
};

constexpr int depth(Kind kind) {
  return kind == Kind::F16 ? 16 : kind == Kind::TF32 ? 8 : is_dense4(kind) ? 64 : 32;
}

/// Bits of an element along the contiguous direction of shared memory, with padding.
constexpr int container_bits(Kind kind) { return kRowBytes * 8 / depth(kind); }

constexpr Packing packing_of(Kind kind, Element e) {
  if (is_dense4(kind)) return Packing::None;
  return e == Element::E2M1                         ? Packing::Bits4
         : e == Element::E2M3 || e == Element::E3M2 ? Packing::Bits6
                                                    : Packing::None;
}

namespace detail {

constexpr uint32_t bits(uint32_t word, int from, int count) { return word >> from & ((1u << count) - 1); }

/// False if the kind has no such type.
inline bool element_of(Kind kind, uint32_t code, Element& out) {
  static constexpr Element kNarrow[] = {Element::E4M3, Element::E5M2, Element::E4M3,
                                        Element::E2M3, Element::E3M2, Element::E2M1};
  switch (kind) {
    case Kind::F16:
      out = code ? Element::BF16 : Element::F16;
      return code < 2;
    case Kind::TF32:
      out = Element::TF32;
      return code == 2;
    case Kind::I8:
      out = code ? Element::S8 : Element::U8;
      return code < 2;
    case Kind::F8F6F4:
    case Kind::MXF8F6F4:
      out = kNarrow[code < 6 ? code : 0];
      return code < 6 && code != 2;
    default:
      out = Element::E2M1;
      return code == 1;
  }
}

inline const char* invalid_shape(const Instruction& i) {
  const bool m_fits = i.stationary              ? i.m == 32 || i.m == 64 || i.m == 128
                      : i.group == 2            ? i.m == 128 || i.m == 256
                      : is_block_scaled(i.kind) ? i.m == 128
                                                : i.m == 64 || i.m == 128;
  if (!m_fits) return "M doesn't fit kind and .cta_group";
  if (i.stationary)
    return i.n == 64 || i.n == 128 || i.n == 256 ? nullptr : "N of .ws must be 64, 128 or 256";
  if (i.n < 8 || i.n > 256) return "N must be 8 to 256";
  const int step = 8 * i.group * (i.kind == Kind::I8 && (i.group == 2 || i.n > 32) ? 2 : 1);
  if (i.n % step) return "N isn't a multiple of the step of kind and .cta_group";
  if (i.transpose_b && container_bits(i.kind) == 8 && i.n % (16 * i.group))
    return "N with an 8-bit transposed B must be a multiple of 16 per CTA";
  return nullptr;
}

inline const char* invalid_types(const Instruction& i) {
  if (i.kind == Kind::I8 && (i.negate_a || i.negate_b)) return "integer operands can't be negated";
  if (is_dense4(i.kind) && (i.transpose_a || i.transpose_b)) return "kinds mxf4 and mxf4nvf4 can't transpose";
  if ((i.transpose_a && packing_of(i.kind, i.a) != Packing::None) ||
      (i.transpose_b && packing_of(i.kind, i.b) != Packing::None))
    return "4- and 6-bit elements must be K-major";
  if (i.d == Accumulator::F16 && i.a == Element::BF16) return "bf16 operands need an f32 accumulator";
  return nullptr;
}

}  // namespace detail

/// Decodes the 32 bits for a kind; `kind`, `group`, `stationary` and `scales` come from the instruction's
/// qualifiers. Returns why it is invalid, or null.
inline const char* decode(uint32_t word, Instruction& i) {
  using detail::bits;
  const bool scaled = is_block_scaled(i.kind), dense4 = is_dense4(i.kind);
  i.k = depth(i.kind);
  i.negate_a = bits(word, 13, 1);
  i.negate_b = bits(word, 14, 1);
  i.transpose_a = bits(word, 15, 1);
  i.transpose_b = bits(word, 16, 1);
  i.n = static_cast<int>(bits(word, 17, 6) * 8);
  if (bits(word, 2, 1)) return "sparsity (bit 2) goes with tcgen05.mma.sp";
  if (bits(word, 6, 1)) return "bit 6 is reserved";
  if (!detail::element_of(i.kind, bits(word, 7, 3), i.a)) return "no such type of A (bits 7-9) for this kind";
  if (!detail::element_of(i.kind, dense4 ? bits(word, 10, 2) : bits(word, 10, 3), i.b))
    return "no such type of B (bits 10-12) for this kind";
  i.saturate = false;
  if (scaled) {
    if (bits(word, 0, 2) || bits(word, 3, 1) || bits(word, 24, 3) || (dense4 && bits(word, 12, 1)))
      return "reserved bits (0-1, 3, 24-26) must be 0";
    i.d = Accumulator::F32;
    i.b_scale_id = static_cast<int>(bits(word, 4, 2));
    i.a_scale_id = static_cast<int>(bits(word, 29, 2));
    i.m = static_cast<int>(bits(word, 27, 2) * 128);
    i.ue4m3 = !bits(word, 23, 1);
    if (bits(word, 31, 1)) return dense4 ? "K = 96 (bit 31) isn't implemented" : "bit 31 is reserved";
    if (i.ue4m3 && (i.kind != Kind::MXF4NVF4 || i.scales != 4))
      return "UE4M3 scale factors (bit 23 = 0) need kind mxf4nvf4 with scale_vec::4X";
    if (i.scales > 1 && (i.a_scale_id & 1 || i.b_scale_id & 1)) return "scale factor IDs must be 0 or 2";
    if (i.scales == 4 && (i.a_scale_id || i.b_scale_id))
      return "scale factor IDs must be 0 with scale_vec::4X";
  } else {
    if (bits(word, 23, 1) || bits(word, 29, 1)) return "reserved bits 23 and 29 must be 0";
    if (!i.stationary && bits(word, 30, 2)) return "bits 30-31 belong to .ws";
    if (i.stationary && bits(word, 30, 2)) return "the shift of .ws (bits 30-31) isn't implemented";
    i.m = static_cast<int>(bits(word, 24, 5) * 16);
    const uint32_t d = bits(word, 4, 2);
    const bool fits = i.kind == Kind::I8 ? d == 2 : i.kind == Kind::TF32 ? d == 1 : d < 2;
    if (!fits) return "no such type of D (bits 4-5) for this kind";
    i.d = static_cast<Accumulator>(d);
    i.saturate = i.kind == Kind::I8 && bits(word, 3, 1);
  }
  if (const char* why = detail::invalid_shape(i)) return why;
  return detail::invalid_types(i);
}

// --- Operands as numbers ---

constexpr numerics::Format format_of(Element e) {
  switch (e) {
    case Element::F16:
      return numerics::Format::F16;
    case Element::BF16:
      return numerics::Format::BF16;
    case Element::TF32:
      return numerics::Format::TF32;
    case Element::E5M2:
      return numerics::Format::E5M2;
    case Element::E2M3:
      return numerics::Format::E2M3;
    case Element::E3M2:
      return numerics::Format::E3M2;
    case Element::E2M1:
      return numerics::Format::E2M1;
    default:
      return numerics::Format::E4M3;
  }
}

/// Values of the codes of an element of at most 8 bits.
inline const double* code_values(Element e) {
  struct Table {
    double values[256];
    explicit Table(Element element) {
      for (int code = 0; code < 256; ++code) {
        values[code] = element == Element::U8 ? code
                       : element == Element::S8
                           ? static_cast<int8_t>(code)
                           : numerics::decode(static_cast<uint64_t>(code), format_of(element));
      }
    }
  };
  static const Table e4m3(Element::E4M3), e5m2(Element::E5M2), e2m3(Element::E2M3), e3m2(Element::E3M2),
      e2m1(Element::E2M1), u8(Element::U8), s8(Element::S8);
  switch (e) {
    case Element::E4M3:
      return e4m3.values;
    case Element::E5M2:
      return e5m2.values;
    case Element::E2M3:
      return e2m3.values;
    case Element::E3M2:
      return e3m2.values;
    case Element::E2M1:
      return e2m1.values;
    case Element::U8:
      return u8.values;
    default:
      return s8.values;
  }
}

inline double wide_value(const uint8_t* bytes, Element e) {
  if (e == Element::TF32) {
    uint32_t word;
    std::memcpy(&word, bytes, 4);
    return numerics::float_of(word & 0xFFFFE000);
  }
  uint16_t half;
  std::memcpy(&half, bytes, 2);
  return e == Element::BF16 ? numerics::float_of(static_cast<uint32_t>(half) << 16)
                            : numerics::from_f16(half);
}

/// The values of one 16-byte unit along K of a row in shared memory, and whether any of their bits is
/// undefined. Returns their number.
inline int unit_values(Kind kind, Element e, const uint8_t* data, const uint8_t* shadow, double* out,
                       bool& undefined) {
  const Packing packing = packing_of(kind, e);
  for (int k = 0; k < packed_bytes(packing); ++k) undefined |= shadow[k] != 0;
  if (e <= Element::TF32) {
    const int bytes = e == Element::TF32 ? 4 : 2;
    for (int k = 0; k < 16 / bytes; ++k) out[k] = wide_value(data + k * bytes, e);
    return 16 / bytes;
  }
  const double* values = code_values(e);
  if (is_dense4(kind)) {
    for (int k = 0; k < 32; ++k) out[k] = values[data[k / 2] >> (k % 2 * 4) & 15];
    return 32;
  }
  for (int k = 0; k < 16; ++k) out[k] = values[packed_element(data, packing, k)];
  return 16;
}

/// The same of 16 bytes of A in tensor memory, where 4- and 6-bit elements have bytes of their own.
inline int tensor_values(Kind kind, Element e, const uint8_t* data, const uint8_t* shadow, double* out,
                         bool& undefined) {
  const Packing packing = packing_of(kind, e);
  if (packing == Packing::None) return unit_values(kind, e, data, shadow, out, undefined);
  const int shift = container_shift(packing), mask = packing == Packing::Bits4 ? 15 : 63;
  for (int k = 0; k < 16; ++k) {
    out[k] = code_values(e)[data[k] >> shift & mask];
    undefined |= (shadow[k] >> shift & mask) != 0;
  }
  return 16;
}

inline double scale_value(uint8_t code, bool ue4m3) {
  return ue4m3 ? numerics::decode(code & 0x7F, numerics::Format::E4M3)
               : numerics::decode(code, numerics::Format::UE8M0);
}

// --- Arithmetic ---

inline constexpr int kColumnBlock = 4;
typedef double ColumnBlock __attribute__((vector_size(8 * kColumnBlock)));

/// B with its columns in blocks: [block][k][column].
struct Panel {
  int columns, k;
  std::vector<ColumnBlock> values;
  Panel(int n, int depth)
      : columns(n), k(depth), values(static_cast<size_t>((n + kColumnBlock - 1) / kColumnBlock * depth)) {}
  double& at(int column, int k_index) {
    return reinterpret_cast<double*>(
        &values[static_cast<size_t>(column / kColumnBlock * k + k_index)])[column % kColumnBlock];
  }
};

/// Sums of products of a row with all columns, after `sums` holds what they start from.
inline void multiply_row(const Panel& b, const double* a, double* sums) {
  for (int block = 0; block * kColumnBlock < b.columns; ++block) {
    ColumnBlock sum;
    std::memcpy(&sum, sums + block * kColumnBlock, sizeof sum);
    const ColumnBlock* values = &b.values[static_cast<size_t>(block * b.k)];
    for (int k = 0; k < b.k; ++k) sum += a[k] * values[k];
    std::memcpy(sums + block * kColumnBlock, &sum, sizeof sum);
  }
}

inline double accumulator_value(uint32_t word, Accumulator type, int scale) {
  if (type == Accumulator::S32) return static_cast<int32_t>(word);
  const float value =
      type == Accumulator::F16 ? numerics::from_f16(static_cast<uint16_t>(word)) : numerics::float_of(word);
  return scale ? std::ldexp(static_cast<double>(value), -scale) : value;
}

inline uint32_t accumulator_word(double value, Accumulator type, bool saturate) {
  if (type == Accumulator::F16) return static_cast<uint32_t>(numerics::encode(value, numerics::Format::F16));
  if (type == Accumulator::F32)
    return std::isnan(value) ? 0x7FFFFFFF : numerics::bits_of(static_cast<float>(value));
  const auto sum = static_cast<int64_t>(value);
  return static_cast<uint32_t>(saturate ? std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX) : sum);
}

}  // namespace megagen::tcgen05
