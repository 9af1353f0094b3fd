// C functions over arrays, through which the Python tests reach the header-only libraries.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "numerics.hpp"
#include "tensor_map.hpp"
#include "wgmma.hpp"

using namespace megagen;
namespace nm = megagen::numerics;

namespace {

nm::Conversion conversion(int rounding, int satfinite, int relu) {
  return {static_cast<nm::Rounding>(rounding), satfinite != 0, relu != 0};
}

}  // namespace

extern "C" {

void mg_encode(int format, int rounding, int satfinite, int relu, const double* in, uint64_t* out,
               int64_t count) {
  const nm::Conversion how = conversion(rounding, satfinite, relu);
  for (int64_t i = 0; i < count; ++i) out[i] = nm::encode(in[i], static_cast<nm::Format>(format), how);
}

void mg_decode(int format, const uint64_t* in, double* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = nm::decode(in[i], static_cast<nm::Format>(format));
}

void mg_encode_x2(int format, int rounding, int satfinite, int relu, const double* high, const double* low,
                  uint32_t* out, int64_t count) {
  const nm::Conversion how = conversion(rounding, satfinite, relu);
  for (int64_t i = 0; i < count; ++i)
    out[i] = nm::encode_x2(high[i], low[i], static_cast<nm::Format>(format), how);
}

void mg_convert_x2(int from, int to, int rounding, int satfinite, int relu, const uint32_t* in, uint32_t* out,
                   int64_t count) {
  const nm::Conversion how = conversion(rounding, satfinite, relu);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = nm::convert_x2(in[i], static_cast<nm::Format>(from), static_cast<nm::Format>(to), how);
  }
}

/// operation: 0 add, 1 sub, 2 mul, 3 fma, 4 div, 5 rcp, 6 sqrt.
void mg_arithmetic(int operation, int rounding, int ftz, int sat, const float* a, const float* b,
                   const float* c, float* out, int64_t count) {
  const nm::Arithmetic how = {static_cast<nm::Rounding>(rounding), ftz != 0, sat != 0};
  for (int64_t i = 0; i < count; ++i) {
    switch (operation) {
      case 0: out[i] = nm::add(a[i], b[i], how); break;
      case 1: out[i] = nm::sub(a[i], b[i], how); break;
      case 2: out[i] = nm::mul(a[i], b[i], how); break;
      case 3: out[i] = nm::fma(a[i], b[i], c[i], how); break;
      case 4: out[i] = nm::div(a[i], b[i], how); break;
      case 5: out[i] = nm::rcp(a[i], how); break;
      default: out[i] = nm::sqrt(a[i], how); break;
    }
  }
}

void mg_extremum(int maximum, int ftz, int nan, int xorsign, const float* a, const float* b, float* out,
                 int64_t count) {
  const nm::MinMax how = {ftz != 0, nan != 0, xorsign != 0};
  for (int64_t i = 0; i < count; ++i) out[i] = nm::extremum(a[i], b[i], maximum != 0, how);
}

/// operation: 0 add, 1 sub, 2 mul, 3 fma, 4 min, 5 max; `nan` and `xorsign` belong to min and max.
void mg_half(int operation, int format, int ftz, int sat, int relu, int nan, int xorsign, const uint16_t* a,
             const uint16_t* b, const uint16_t* c, uint16_t* out, int64_t count) {
  const auto f = static_cast<nm::Format>(format);
  const nm::HalfArithmetic how = {ftz != 0, sat != 0, relu != 0};
  for (int64_t i = 0; i < count; ++i) {
    switch (operation) {
      case 0: out[i] = nm::half_add(a[i], b[i], f, how); break;
      case 1: out[i] = nm::half_sub(a[i], b[i], f, how); break;
      case 2: out[i] = nm::half_mul(a[i], b[i], f, how); break;
      case 3: out[i] = nm::half_fma(a[i], b[i], c[i], f, how); break;
      default:
        out[i] = nm::half_extremum(a[i], b[i], f, operation == 5, {ftz != 0, nan != 0, xorsign != 0});
        break;
    }
  }
}

/// function: 0 ex2, 1 rcp, 2 sqrt, 3 rsqrt, 4 lg2, 5 sin, 6 cos, 7 tanh, 8 div (approx), 9 div (full).
void mg_approximate(int function, int ftz, const float* a, const float* b, float* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    switch (function) {
      case 0: out[i] = nm::ex2_approx(a[i], ftz); break;
      case 1: out[i] = nm::rcp_approx(a[i], ftz); break;
      case 2: out[i] = nm::sqrt_approx(a[i], ftz); break;
      case 3: out[i] = nm::rsqrt_approx(a[i], ftz); break;
      case 4: out[i] = nm::lg2_approx(a[i], ftz); break;
      case 5: out[i] = nm::sin_approx(a[i], ftz); break;
      case 6: out[i] = nm::cos_approx(a[i], ftz); break;
      case 7: out[i] = nm::tanh_approx(a[i]); break;
      case 8: out[i] = nm::div_approx(a[i], b[i], ftz); break;
      default: out[i] = nm::div(a[i], b[i], {nm::Rounding::NearestEven, ftz != 0, false}); break;
    }
  }
}

/// function: 0 ex2, 7 tanh.
void mg_half_approximate(int function, int format, int ftz, const uint16_t* a, uint16_t* out, int64_t count) {
  const auto f = static_cast<nm::Format>(format);
  for (int64_t i = 0; i < count; ++i) {
    out[i] = function == 0 ? nm::half_ex2_approx(a[i], f, ftz) : nm::half_tanh_approx(a[i], f);
  }
}

void mg_to_tf32(int rounding, int satfinite, int relu, const uint32_t* in, uint32_t* out, int64_t count) {
  const nm::Conversion how = conversion(rounding, satfinite, relu);
  for (int64_t i = 0; i < count; ++i) out[i] = nm::to_tf32(in[i], how);
}

void mg_to_integer(int rounding, int bits, int is_signed, int from_f64, const double* in, int64_t* out,
                   int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = nm::to_integer(in[i], static_cast<nm::Rounding>(rounding), bits, is_signed, from_f64);
  }
}

void mg_from_integer(int format, int rounding, const uint64_t* magnitude, const uint8_t* negative,
                     uint64_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = nm::from_integer(magnitude[i], negative[i], static_cast<nm::Format>(format),
                              static_cast<nm::Rounding>(rounding));
  }
}

void mg_round_to_integral(int rounding, const double* in, double* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = nm::round_to_integral(in[i], static_cast<nm::Rounding>(rounding));
}

/// One instruction as a plain struct; the fields of wgmma::Instruction, and a model (terms = 0: Hopper's).
struct MgWgmma {
  int32_t n, a, b, d, scale_d, negate_a, negate_b, transpose_a, transpose_b, satfinite;
  int32_t fraction_bits, result_fraction_bits, terms;
};

static wgmma::Instruction instruction_of(const MgWgmma& i) {
  return {i.n,
          static_cast<wgmma::Type>(i.a),
          static_cast<wgmma::Type>(i.b),
          static_cast<wgmma::Accumulator>(i.d),
          i.scale_d != 0,
          i.negate_a != 0,
          i.negate_b != 0,
          i.transpose_a != 0,
          i.transpose_b != 0,
          i.satfinite != 0};
}

/// Executes an instruction on `shared`, with A from `fragments` [4][128] unless null. `d`: [registers][128].
void mg_wgmma(const MgWgmma* form, const uint8_t* shared, uint64_t desc_a, uint64_t desc_b,
              const uint32_t* fragments, uint32_t* d) {
  const wgmma::Instruction instruction = instruction_of(*form);
  const wgmma::AccumulationModel model =
      form->terms ? wgmma::AccumulationModel{form->fraction_bits, form->result_fraction_bits, form->terms}
                  : wgmma::hopper_model(instruction.a);
  std::vector<uint8_t> a(wgmma::kRows * wgmma::kTileRowBytes), b(instruction.n * wgmma::kTileRowBytes);
  std::vector<uint32_t> matrix(wgmma::kRows * instruction.n);
  const auto read = [shared](uint32_t address, uint8_t* out) { std::memcpy(out, shared + address, 16); };
  if (fragments) {
    wgmma::gather_fragments([&](int thread, int r) { return fragments[r * 128 + thread]; }, a.data());
  } else {
    wgmma::gather(wgmma::Descriptor::decode(desc_a), instruction.transpose_a, wgmma::kRows, read, a.data());
  }
  wgmma::gather(wgmma::Descriptor::decode(desc_b), instruction.transpose_b, instruction.n, read, b.data());
  wgmma::load_d(instruction, [&](int thread, int r) { return d[r * 128 + thread]; }, matrix.data());
  wgmma::multiply(instruction, model, a.data(), b.data(), matrix.data());
  wgmma::store_d(instruction, matrix.data(),
                 [&](int thread, int r, uint32_t word) { d[r * 128 + thread] = word; });
}

const char* mg_wgmma_invalid(const MgWgmma* form) { return wgmma::invalid(instruction_of(*form)); }

/// Byte ranges as (begin, end) pairs; returns their number, at most `capacity`.
int mg_wgmma_ranges(uint64_t descriptor, int mn_major, int first_row, int last_row, uint32_t* out,
                    int capacity) {
  const auto ranges = wgmma::ranges(wgmma::Descriptor::decode(descriptor), mn_major, first_row, last_row);
  for (int i = 0; i < static_cast<int>(ranges.size()) && i < capacity; ++i) {
    out[2 * i] = ranges[i].begin;
    out[2 * i + 1] = ranges[i].end;
  }
  return static_cast<int>(ranges.size());
}

/// Writes the violated rule, or an empty string; -1 if the bytes are no tensor map.
int mg_tensor_validate(const uint8_t* bytes, int compute_capability, char* message, int capacity) {
  TensorMap map;
  if (!decode_tensor_map(bytes, map)) return -1;
  std::snprintf(message, capacity, "%s", validate(map, compute_capability).c_str());
  return 0;
}

void mg_tensor_round_trip(const uint8_t* bytes, uint8_t* out) {
  TensorMap map;
  if (decode_tensor_map(bytes, map)) encode_tensor_map(map, out);
}

void mg_tensor_bytes(const uint8_t* bytes, uint32_t* shared, uint32_t* transaction) {
  TensorMap map;
  decode_tensor_map(bytes, map);
  *shared = shared_bytes(map);
  *transaction = transaction_bytes(map);
}

/// Writes why the copy faults, or an empty string.
void mg_tensor_copy_violation(const uint8_t* bytes, const int32_t* coordinates, uint32_t shared, int store,
                              char* message, int capacity) {
  TensorMap map;
  decode_tensor_map(bytes, map);
  std::snprintf(message, capacity, "%s", copy_violation(map, coordinates, shared, store).c_str());
}

/// Runs as (global, shared, bytes, in_bounds) rows; returns their number, at most `capacity` are written.
int mg_tensor_runs(const uint8_t* bytes, const int32_t* coordinates, uint32_t shared, int store, int64_t* out,
                   int capacity) {
  TensorMap map;
  decode_tensor_map(bytes, map);
  int count = 0;
  for_each_run(store ? clipped_by_units(map) : map, coordinates, shared, [&](const TensorRun& run) {
    if (count < capacity) {
      int64_t* row = out + 4 * count;
      row[0] = static_cast<int64_t>(run.global);
      row[1] = run.shared;
      row[2] = run.bytes;
      row[3] = run.in_bounds;
    }
    ++count;
  });
  return count;
}

void mg_tensor_fill(const uint8_t* bytes, uint8_t* destination, uint32_t count) {
  TensorMap map;
  decode_tensor_map(bytes, map);
  fill_out_of_bounds(map, destination, count);
}

void mg_tensor_convert(int type, uint8_t* values, uint32_t count) {
  convert_loaded(static_cast<TensorType>(type), values, count);
}

}  // extern "C"
