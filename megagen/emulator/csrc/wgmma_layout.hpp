// Where the operands of wgmma.mma_async lie: instruction shapes, the shared-memory matrix descriptor, its
// canonical layouts, and the register fragments of A and D.
//
// Every shape has K = 256 bits, so one row (of A) or column (of B) is 32 bytes whatever the element type. An
// operand is gathered into a `tile`: 32 bytes per row, K contiguous. All later steps work on tiles and don't
// see the layout.
//
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": register fragments, shared memory
// matrix layout, strides, matrix descriptor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "shared_swizzle.hpp"

namespace megagen::wgmma {

inline constexpr int kRows = 64;          // M of every shape
inline constexpr int kThreads = 128;      // a warpgroup
inline constexpr int kTileRowBytes = 32;  // K of every shape, in bytes

enum class Type : uint8_t { F16, BF16, TF32, E4M3, E5M2, S8, U8, B1 };
enum class Accumulator : uint8_t { F32, F16, S32 };

/// Bytes of an element; B1 operands are treated as bytes of eight elements.
constexpr int element_bytes(Type type) {
  switch (type) {
    case Type::F16:
    case Type::BF16: return 2;
    case Type::TF32: return 4;
    default: return 1;
  }
}

/// K of the shape m64nNkK for a type: 16, 8, 32 or 256.
constexpr int depth(Type type) { return type == Type::B1 ? 256 : kTileRowBytes / element_bytes(type); }

/// A decoded wgmma.mma_async. `transpose_*` mean MN-major and exist for 16-bit types only.
struct Instruction {
  int n = 8;  // 8, 16, ... 256
  Type a = Type::E4M3;
  Type b = Type::E4M3;
  Accumulator d = Accumulator::F32;
  bool scale_d = true;  // false: D = A * B
  bool negate_a = false;
  bool negate_b = false;
  bool transpose_a = false;
  bool transpose_b = false;
  bool satfinite = false;  // s32 only
};

/// Why `instruction` isn't in the ISA's tables, or null if it is.
inline const char* invalid(const Instruction& i) {
  const auto is_integer = [](Type t) { return t == Type::S8 || t == Type::U8; };
  const auto is_fp8 = [](Type t) { return t == Type::E4M3 || t == Type::E5M2; };
  const bool integral = is_integer(i.a) || i.a == Type::B1;
  if (i.n < 8 || i.n > 256 || i.n % 8) return "N must be a multiple of 8 from 8 to 256";
  if (integral && i.n > 32 && i.n % 16) return "integer shapes have N = 8, 16, 24, 32 or a multiple of 16";
  if (is_fp8(i.a) != is_fp8(i.b) || is_integer(i.a) != is_integer(i.b))
    return "A and B are of different families";
  if (!is_fp8(i.a) && !is_integer(i.a) && i.a != i.b) return "A and B must have the same type";
  if (integral != (i.d == Accumulator::S32)) return "s32 accumulators go with s8, u8 and b1 operands only";
  if (i.d == Accumulator::F16 && i.a != Type::F16 && !is_fp8(i.a))
    return "f16 accumulators need f16 or FP8 operands";
  if ((i.transpose_a || i.transpose_b) && element_bytes(i.a) != 2) return "only f16 and bf16 can be MN-major";
  if (integral && (i.negate_a || i.negate_b)) return "integer operands can't be negated";
  return nullptr;
}

/// The 64-bit shared-memory matrix descriptor. Addresses and offsets in bytes.
struct Descriptor {
  uint32_t start;
  uint32_t leading;
  uint32_t stride;
  uint32_t base_offset;
  Swizzle swizzle;

  static Descriptor decode(uint64_t bits) {
    const auto field = [bits](int position) { return static_cast<uint32_t>(bits >> position & 0x3FFF) << 4; };
    constexpr Swizzle modes[4] = {Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32};
    return {field(0), field(16), field(32), static_cast<uint32_t>(bits >> 49 & 7), modes[bits >> 62]};
  }
};

/// Shared-memory address of the aligned 16-byte unit that holds element (`row`, first of the unit) of an
/// operand. `row` counts along M or N, `unit` the 16-byte units along the contiguous direction: K units 0-1
/// of a row if K-major; if MN-major, `unit` = row / 8 and `k` = 0-15.
///
/// Canonical layouts, from the ISA's tables of strides. K-major: 8 rows of span bytes form an atom; `stride`
/// leads to the next 8 rows; without swizzle the two K units are `leading` apart. MN-major: 8 k of span bytes
/// form an atom; swizzled, `leading` leads along MN and `stride` to the next 8 k; without swizzle the roles
/// are exchanged.
inline uint32_t k_major_address(const Descriptor& d, uint32_t row, uint32_t unit) {
  if (d.swizzle == Swizzle::None) return d.start + row / 8 * d.stride + row % 8 * 16 + unit * d.leading;
  const uint32_t plain = d.start + row / 8 * d.stride + row % 8 * swizzle_span(d.swizzle) + unit * 16;
  return swizzle_address(plain, d.swizzle, d.base_offset);
}

inline uint32_t mn_major_address(const Descriptor& d, uint32_t unit, uint32_t k) {
  if (d.swizzle == Swizzle::None) return d.start + unit * d.stride + k / 8 * d.leading + k % 8 * 16;
  const uint32_t span = swizzle_span(d.swizzle), units = span / 16;
  const uint32_t plain =
      d.start + unit / units * d.leading + unit % units * 16 + k / 8 * d.stride + k % 8 * span;
  return swizzle_address(plain, d.swizzle, d.base_offset);
}

/// Calls visit(address, row, byte) for every 16-byte unit of rows [first_row, last_row) of an operand:
/// K-major units hold bytes [byte, byte + 16) of tile row `row`; MN-major units hold the two bytes from
/// `byte` of rows row..row+7.
template <class Visit>
void for_each_unit(const Descriptor& d, bool mn_major, int first_row, int last_row, Visit&& visit) {
  if (mn_major) {
    for (int row = first_row; row < last_row; row += 8) {
      for (int k = 0; k < 16; ++k) visit(mn_major_address(d, row / 8, k), row, 2 * k);
    }
    return;
  }
  for (int row = first_row; row < last_row; ++row) {
    for (int unit = 0; unit < 2; ++unit) visit(k_major_address(d, row, unit), row, 16 * unit);
  }
}

/// Gathers `rows` rows of an operand into `tile` (rows x 32 bytes). `read(address, destination)` copies 16
/// bytes of shared memory; given a reader of shadow memory, the same call gathers shadows.
template <class Read16>
void gather(const Descriptor& d, bool mn_major, int rows, Read16&& read, uint8_t* tile) {
  for_each_unit(d, mn_major, 0, rows, [&](uint32_t address, int row, int byte) {
    uint8_t* destination = tile + row * kTileRowBytes + byte;
    if (!mn_major) {
      read(address, destination);
      return;
    }
    uint8_t unit[16];
    read(address, unit);
    for (int i = 0; i < 8; ++i) std::memcpy(destination + i * kTileRowBytes, unit + 2 * i, 2);
  });
}

struct ByteRange {
  uint32_t begin, end;
};

/// Shared-memory bytes that rows [first_row, last_row) occupy, sorted and merged. Row bounds must be
/// multiples of 8 if MN-major. Warp w of the warpgroup reads rows 16w to 16w + 15 of A and all of B.
inline std::vector<ByteRange> ranges(const Descriptor& d, bool mn_major, int first_row, int last_row) {
  std::vector<uint32_t> units;
  for_each_unit(d, mn_major, first_row, last_row,
                [&](uint32_t address, int, int) { units.push_back(address); });
  std::sort(units.begin(), units.end());
  std::vector<ByteRange> merged;
  for (uint32_t address : units) {
    if (!merged.empty() && address <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, address + 16);
    } else {
      merged.push_back({address, address + 16});
    }
  }
  return merged;
}

/// Fragment of A: every thread holds four 32-bit registers, for each type. Register r of `thread` holds 4
/// bytes of the tile at this row and byte.
constexpr int a_row(int thread, int r) { return thread / 32 * 16 + thread % 32 / 4 + r % 2 * 8; }
constexpr int a_byte(int thread, int r) { return r / 2 * 16 + thread % 4 * 4; }

/// Builds the tile of A from registers: `get(thread, r)` returns a 32-bit register.
template <class Get>
void gather_fragments(Get&& get, uint8_t* tile) {
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int r = 0; r < 4; ++r) {
      const uint32_t value = get(thread, r);
      std::memcpy(tile + a_row(thread, r) * kTileRowBytes + a_byte(thread, r), &value, 4);
    }
  }
}

/// Fragment of D: element i of a thread (i < n / 2) lies at this row and column.
constexpr int d_row(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
constexpr int d_column(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

/// 32-bit registers of D per thread: f16 accumulators are packed in pairs, the even element in the low half.
constexpr int d_registers(const Instruction& i) { return i.d == Accumulator::F16 ? i.n / 4 : i.n / 2; }

/// D as a row-major 64 x n matrix of 32-bit words (float32 bits, s32, or f16 in the low 16 bits), from and to
/// registers. `get(thread, register)` returns a word, `set(thread, register, word)` stores one.
template <class Get>
void load_d(const Instruction& instruction, Get&& get, uint32_t* matrix) {
  const int n = instruction.n, pack = instruction.d == Accumulator::F16 ? 2 : 1;
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int r = 0; r < d_registers(instruction); ++r) {
      const uint32_t word = get(thread, r);
      uint32_t* element = matrix + d_row(thread, r * pack) * n + d_column(thread, r * pack);
      element[0] = pack == 2 ? word & 0xFFFF : word;
      if (pack == 2) element[1] = word >> 16;
    }
  }
}

template <class Set>
void store_d(const Instruction& instruction, const uint32_t* matrix, Set&& set) {
  const int n = instruction.n, pack = instruction.d == Accumulator::F16 ? 2 : 1;
  for (int thread = 0; thread < kThreads; ++thread) {
    for (int r = 0; r < d_registers(instruction); ++r) {
      const uint32_t* element = matrix + d_row(thread, r * pack) * n + d_column(thread, r * pack);
      set(thread, r, pack == 2 ? element[0] | element[1] << 16 : element[0]);
    }
  }
}

}  // namespace megagen::wgmma
