// Arithmetic of wgmma.mma_async: D = A * B (+ D) on gathered operand tiles (see wgmma_layout.hpp).
//
// Tensor cores don't round each product and sum as IEEE 754 would. The model used here, with its parameters
// in AccumulationModel, is: all products of one step and the accumulator are aligned to the largest nominal
// exponent among them, each is cut off `fraction_bits` below that, the integers are added exactly, and the
// normalized sum is cut to `result_fraction_bits`. The nominal exponent of a product is the sum of its
// factors' exponents (its significand lies in [1, 4)); zeros don't take part. Sources for the shape of the
// model: Khattak and Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004; Xie et al.,
// "MMA-Sim", arXiv:2511.10909.
//
// The vector path scales by powers of two, which is exact, and truncates by converting to integers. Elements
// with NaN, infinities, subnormal accumulators or extreme exponents are computed again by the scalar path.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "float_formats.hpp"
#include "wgmma_layout.hpp"

namespace megagen::wgmma {

/// How one step of floating-point accumulation rounds.
struct AccumulationModel {
  int fraction_bits;         // bits kept below the largest nominal exponent; the rest is truncated
  int result_fraction_bits;  // of a float32 result, the rest truncated; f16 results round to nearest even
  int terms;                 // products added in one step; a longer K takes several steps in order of k
};

/// The model of Hopper's tensor cores for an operand type. An H200 agrees with it bit for bit: 1,032,192 FP8
/// dot products of length 32 to 256 and 81,920 of 16-bit and TF32 operands, random and adversarial
/// (tests/emulator/hw/wgmma_cases.py). Changing any of the FP8 parameters by one gives 100,000 differences
/// and more.
constexpr AccumulationModel hopper_model(Type type) {
  switch (type) {
    case Type::E4M3:
    case Type::E5M2: return {13, 13, 32};
    case Type::TF32: return {25, 23, 8};
    default: return {25, 23, 16};
  }
}

namespace detail {

inline constexpr int kMaxColumns = 256;

constexpr numerics::Format format_of(Type type) {
  switch (type) {
    case Type::F16: return numerics::Format::F16;
    case Type::BF16: return numerics::Format::BF16;
    case Type::TF32: return numerics::Format::TF32;
    case Type::E5M2: return numerics::Format::E5M2;
    default: return numerics::Format::E4M3;
  }
}

/// Element k of a tile row; every floating-point operand type fits in float32.
inline float element(const uint8_t* row, int k, Type type) {
  switch (element_bytes(type)) {
    case 1: return numerics::decode_table(format_of(type))[row[k]];
    case 2: {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * k, 2);
      if (type == Type::BF16) return numerics::float_of(static_cast<uint32_t>(bits) << 16);
      return numerics::from_f16(bits);
    }
    default: {
      uint32_t bits;
      std::memcpy(&bits, row + 4 * k, 4);
      return numerics::float_of(bits & 0xFFFFE000);
    }
  }
}

/// 2^(smallest exponent) of a type.
constexpr float smallest_power(Type type) {
  switch (type) {
    case Type::E4M3: return 0x1p-6f;
    case Type::E5M2:
    case Type::F16: return 0x1p-14f;
    default: return 0x1p-126f;
  }
}

/// 2^(nominal exponent) of a finite value: subnormals count with the smallest exponent; 0 for zero.
inline float nominal_power(float value, float smallest) {
  const float power = std::max(numerics::float_of(numerics::bits_of(value) & 0x7F800000), smallest);
  return value == 0 ? 0.0f : power;
}

inline bool is_special(float value) { return (numerics::bits_of(value) & 0x7F800000) == 0x7F800000; }

/// Encodes a step's exact sum as the accumulator type.
inline uint32_t encode_result(double value, Accumulator type, const AccumulationModel& model) {
  using namespace numerics;
  if (type == Accumulator::F16) return static_cast<uint32_t>(encode(value, Format::F16));
  if (value == 0) return 0;
  if (std::isinf(value)) return bits_of(static_cast<float>(value));
  const int quantum =
      std::max(exponent_of(value), traits(Format::F32).min_exponent()) - model.result_fraction_bits;
  const double cut =
      std::ldexp(static_cast<double>(rounded_magnitude(value, quantum, Rounding::TowardZero)), quantum);
  return bits_of(static_cast<float>(std::copysign(cut, value)));
}

/// Operands of one step for one element of D, or for the lanes of a vector of them: value and nominal power
/// per k. Successive k of B are `pitch` apart.
template <class Real>
struct Operands {
  const Real* a;
  const Real* a_power;
  const Real* b;
  const Real* b_power;
  int pitch;
  int terms;
};

/// One element of one step by the model, for any operands.
template <class Real>
uint32_t scalar_step(const Operands<Real>& in, double c, Accumulator type, const AccumulationModel& model) {
  const auto format = type == Accumulator::F16 ? numerics::Format::F16 : numerics::Format::F32;
  double largest = 0, ieee_sum = c;
  if (c != 0 && std::isfinite(c)) {
    largest = std::ldexp(1.0, std::max(numerics::exponent_of(c), numerics::traits(format).min_exponent()));
  }
  for (int k = 0; k < in.terms; ++k) {
    ieee_sum += static_cast<double>(in.a[k]) * in.b[k * in.pitch];
    largest = std::max(largest, static_cast<double>(in.a_power[k]) * in.b_power[k * in.pitch]);
  }
  if (std::isnan(ieee_sum)) return static_cast<uint32_t>(numerics::traits(format).canonical_nan);
  if (std::isinf(ieee_sum))
    return encode_result(ieee_sum, type, model);  // no finite operands overflow a double
  if (largest == 0) return 0;
  const double unit = std::ldexp(largest, -model.fraction_bits);
  double sum = std::trunc(c / unit);
  for (int k = 0; k < in.terms; ++k)
    sum += std::trunc(static_cast<double>(in.a[k]) * in.b[k * in.pitch] / unit);
  return encode_result(sum * unit, type, model);
}

/// SIMD lanes across columns of D. FP8 fits float32 lanes and int32 sums; wider operands need doubles.
template <class Real>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int count = 8;
  typedef float Vector __attribute__((vector_size(32)));
  typedef int32_t Sum __attribute__((vector_size(32)));
};

template <>
struct Lanes<double> {
  static constexpr int count = 4;
  typedef double Vector __attribute__((vector_size(32)));
  typedef int32_t Sum __attribute__((vector_size(16)));
};

/// One step for Lanes::count neighbouring columns of one row: largest power and truncated sum in units of
/// largest / `one`, where `one` is 2^fraction_bits. `c_power` holds the accumulators' nominal powers.
template <class Real>
__attribute__((always_inline)) inline void vector_step(const Operands<Real>& in, const Real* c,
                                                       const Real* c_power, Real one, Real* largest_out,
                                                       Real* sum_out) {
  using L = Lanes<Real>;
  typename L::Vector largest, value, power, scale, total = {};
  std::memcpy(&largest, c_power, sizeof largest);
  for (int k = 0; k < in.terms; ++k) {
    std::memcpy(&power, in.b_power + k * L::count, sizeof power);
    power *= in.a_power[k];
    largest = power > largest ? power : largest;
  }
  // A floor far below every product keeps the scale finite when all terms are zero.
  const Real floor = sizeof(Real) == 4 ? Real(0x1p-90) : Real(0x1p-300);
  const typename L::Vector floors = floor - typename L::Vector{};
  scale = one / (largest > floors ? largest : floors);
  std::memcpy(&value, c, sizeof value);
  if (sizeof(Real) == 4) {
    typename L::Sum sum = __builtin_convertvector(value * scale, typename L::Sum);
    for (int k = 0; k < in.terms; ++k) {
      std::memcpy(&value, in.b + k * L::count, sizeof value);
      sum += __builtin_convertvector(in.a[k] * value * scale, typename L::Sum);
    }
    total = __builtin_convertvector(sum, typename L::Vector);
  } else {
    // A term fits 32 bits, the sum of all does not.
    total =
        __builtin_convertvector(__builtin_convertvector(value * scale, typename L::Sum), typename L::Vector);
    for (int k = 0; k < in.terms; ++k) {
      std::memcpy(&value, in.b + k * L::count, sizeof value);
      total += __builtin_convertvector(__builtin_convertvector(in.a[k] * value * scale, typename L::Sum),
                                       typename L::Vector);
    }
  }
  std::memcpy(largest_out, &largest, sizeof largest);
  std::memcpy(sum_out, &total, sizeof total);
}

/// Operand panels, accumulators and flags of one instruction. B is stored per block of Lanes::count columns,
/// K rows of lanes each.
template <class Real>
struct Workspace {
  static constexpr int kMaxDepth = 32;
  int depth, columns;
  Real a[kRows * kMaxDepth], a_power[kRows * kMaxDepth];
  Real b[kMaxColumns * kMaxDepth], b_power[kMaxColumns * kMaxDepth];
  bool row_special[kRows], column_special[kMaxColumns];
};

template <class Real>
void load_operands(const Instruction& instruction, const uint8_t* a, const uint8_t* b,
                   Workspace<Real>& work) {
  constexpr int lanes = Lanes<Real>::count;
  work.depth = depth(instruction.a);
  work.columns = instruction.n;
  const float sign = instruction.negate_a != instruction.negate_b ? -1.0f : 1.0f;
  const float a_smallest = smallest_power(instruction.a), b_smallest = smallest_power(instruction.b);
  for (int row = 0; row < kRows; ++row) {
    work.row_special[row] = false;
    for (int k = 0; k < work.depth; ++k) {
      const float value = element(a + row * kTileRowBytes, k, instruction.a);
      work.row_special[row] |= is_special(value);
      work.a[row * work.depth + k] = sign * value;
      work.a_power[row * work.depth + k] = nominal_power(value, a_smallest);
    }
  }
  for (int column = 0; column < work.columns; ++column) {
    work.column_special[column] = false;
    for (int k = 0; k < work.depth; ++k) {
      const float value = element(b + column * kTileRowBytes, k, instruction.b);
      const int at = (column / lanes * work.depth + k) * lanes + column % lanes;
      work.column_special[column] |= is_special(value);
      work.b[at] = value;
      work.b_power[at] = nominal_power(value, b_smallest);
    }
  }
}

/// Accumulators of Lanes::count neighbouring elements, or zeros. `odd`: one of them needs the scalar path.
template <class Real>
struct Accumulators {
  Real value[Lanes<Real>::count], power[Lanes<Real>::count];
  bool odd;

  __attribute__((always_inline)) Accumulators(const uint32_t* words, bool accumulate, bool half)
      : odd(false) {
    for (int lane = 0; lane < Lanes<Real>::count; ++lane) {
      const uint32_t word = accumulate ? words[lane] : 0;
      const float c = half ? numerics::from_f16(static_cast<uint16_t>(word)) : numerics::float_of(word);
      const uint32_t exponent = numerics::bits_of(c) & 0x7F800000;
      odd |= exponent == 0x7F800000 || (exponent == 0 && c != 0);
      value[lane] = c;
      power[lane] = numerics::float_of(exponent);
      if (half && c != 0) power[lane] = std::max(power[lane], Real(0x1p-14));
    }
  }
};

/// How results of a step become words of D.
template <class Real>
struct Output {
  Accumulator type;
  const AccumulationModel& model;
  Real one;           // 2^fraction_bits
  uint32_t cut;       // float32 bits that a result keeps
  Real lower, upper;  // largest powers within which the vector path is exact: doubles hold every product

  Output(Accumulator accumulator, const AccumulationModel& accumulation)
      : type(accumulator),
        model(accumulation),
        one(static_cast<Real>(std::ldexp(1.0, accumulation.fraction_bits))),
        cut(~uint32_t{0} << (23 - accumulation.result_fraction_bits)),
        lower(sizeof(Real) == 4 ? Real(0x1p-80) : Real(0)),
        upper(sizeof(Real) == 4 ? Real(0x1p+80) : Real(0x1p+126)) {}

  bool is_exact(Real largest) const { return largest <= upper && (largest >= lower || largest == 0); }

  __attribute__((always_inline)) uint32_t encode(Real sum, Real largest) const {
    if (sizeof(Real) == 8 || type == Accumulator::F16) {
      return encode_result(static_cast<double>(sum) * largest / one, type, model);
    }
    const float kept = numerics::float_of(numerics::bits_of(static_cast<float>(sum)) & cut);
    return numerics::bits_of(static_cast<float>(kept * largest * (1 / one)));
  }
};

/// One step for Lanes::count columns from `column` of one row; updates their words of D.
template <class Real>
__attribute__((always_inline)) inline void step_block(const Workspace<Real>& work, const Operands<Real>& in,
                                                      int row, int column, bool accumulate,
                                                      const Output<Real>& output, uint32_t* words) {
  constexpr int lanes = Lanes<Real>::count;
  const Accumulators<Real> c(words, accumulate, output.type == Accumulator::F16);
  const bool odd = c.odd || work.row_special[row];
  Real largest[lanes], sum[lanes];
  vector_step(in, c.value, c.power, output.one, largest, sum);
  for (int lane = 0; lane < lanes; ++lane) {
    if (odd || work.column_special[column + lane] || !output.is_exact(largest[lane])) {
      const Operands<Real> single = {in.a, in.a_power, in.b + lane, in.b_power + lane, in.pitch, in.terms};
      words[lane] = scalar_step(single, c.value[lane], output.type, output.model);
    } else {
      words[lane] = output.encode(sum[lane], largest[lane]);
    }
  }
}

/// All steps of the instruction. `d` holds the accumulators if `scale_d`.
template <class Real>
__attribute__((always_inline)) inline void run_steps(const Instruction& instruction,
                                                     const AccumulationModel& model,
                                                     const Workspace<Real>& work, uint32_t* d) {
  constexpr int lanes = Lanes<Real>::count;
  const Output<Real> output(instruction.d, model);
  for (int first = 0; first < work.depth; first += model.terms) {
    const int terms = std::min(model.terms, work.depth - first);
    const bool accumulate = first > 0 || instruction.scale_d;
    for (int column = 0; column < work.columns; column += lanes) {
      const int block = column * work.depth + first * lanes;
      for (int row = 0; row < kRows; ++row) {
        const int at = row * work.depth + first;
        const Operands<Real> in = {
            work.a + at, work.a_power + at, work.b + block, work.b_power + block, lanes, terms};
        step_block(work, in, row, column, accumulate, output, d + row * work.columns + column);
      }
    }
  }
}

#if defined(__x86_64__)
template <class Real>
__attribute__((target("avx2"))) void run_steps_avx2(const Instruction& instruction,
                                                    const AccumulationModel& model,
                                                    const Workspace<Real>& work, uint32_t* d) {
  run_steps(instruction, model, work, d);
}
#endif

template <class Real>
void multiply_floating(const Instruction& instruction, const AccumulationModel& model, const uint8_t* a,
                       const uint8_t* b, uint32_t* d) {
  static thread_local Workspace<Real> work;
  load_operands(instruction, a, b, work);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return run_steps_avx2(instruction, model, work, d);
#endif
  run_steps(instruction, model, work, d);
}

inline void multiply_integer(const Instruction& instruction, const uint8_t* a, const uint8_t* b,
                             uint32_t* d) {
  const auto value = [](uint8_t byte, Type type) {
    return type == Type::S8 ? static_cast<int8_t>(byte) : int{byte};
  };
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < instruction.n; ++column) {
      uint32_t& word = d[row * instruction.n + column];
      int64_t sum = instruction.scale_d ? static_cast<int32_t>(word) : 0;
      for (int k = 0; k < kTileRowBytes; ++k) {
        const uint8_t x = a[row * kTileRowBytes + k], y = b[column * kTileRowBytes + k];
        sum += instruction.a == Type::B1 ? __builtin_popcount(x & y)
                                         : value(x, instruction.a) * value(y, instruction.b);
      }
      if (instruction.satfinite) sum = std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX);
      word = static_cast<uint32_t>(sum);
    }
  }
}

}  // namespace detail

/// D = A * B (+ D). `a`: tile of 64 rows, `b`: tile of n rows (columns of B), `d`: row-major 64 x n words as
/// of load_d. Integer types ignore `model`; they wrap around at 32 bits unless `satfinite`.
inline void multiply(const Instruction& instruction, const AccumulationModel& model, const uint8_t* a,
                     const uint8_t* b, uint32_t* d) {
  if (instruction.d == Accumulator::S32) return detail::multiply_integer(instruction, a, b, d);
  // 33 terms below 4 must add up exactly in a float's 24 bits.
  if (element_bytes(instruction.a) == 1 && model.fraction_bits <= 16) {
    return detail::multiply_floating<float>(instruction, model, a, b, d);
  }
  detail::multiply_floating<double>(instruction, model, a, b, d);
}

}  // namespace megagen::wgmma
