// Where the operands of tcgen05 instructions lie: shapes of data movement, the shared-memory matrix
// descriptor, packed 4- and 6-bit elements, and which lanes and columns hold D.
//
// Source: PTX ISA, "TensorCore 5th Generation Family Instructions": Matrix and Data Movement Shape, Strides,
// Matrix Descriptors, Data Path Layout Organization, Packing formats. Where the ISA has figures only, this
// follows public documentation and kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "wgmma_layout.hpp"

namespace megagen::tcgen05 {

// --- Data movement between tensor memory and registers ---

enum class MoveShape : uint8_t { L16x64b, L16x128b, L16x256b, L32x32b, L16x32bx2 };

inline MoveShape move_shape(const std::string& name) {
  return name == ".16x64b"    ? MoveShape::L16x64b
         : name == ".16x128b" ? MoveShape::L16x128b
         : name == ".16x256b" ? MoveShape::L16x256b
         : name == ".32x32b"  ? MoveShape::L32x32b
                              : MoveShape::L16x32bx2;
}

constexpr int registers_per_repeat(MoveShape shape) {
  return shape == MoveShape::L16x128b ? 2 : shape == MoveShape::L16x256b ? 4 : 1;
}

/// A cell relative to the address of the instruction; `half` 1: that of the second access.
struct Cell {
  uint32_t lane, column, half;
};

/// The cell of register r of a thread.
constexpr Cell move_cell(MoveShape shape, int thread, int r) {
  const auto t = static_cast<uint32_t>(thread), k = static_cast<uint32_t>(r);
  switch (shape) {
    case MoveShape::L16x64b:
      return {t / 4 + t % 2 * 8, t / 2 % 2 + 2 * k, 0};
    case MoveShape::L16x128b:
      return {t / 4 + k % 2 * 8, t % 4 + k / 2 * 4, 0};
    case MoveShape::L16x256b:
      return {t / 4 + k / 2 % 2 * 8, k % 2 + t % 4 * 2 + k / 4 * 8, 0};
    case MoveShape::L32x32b:
      return {t, k, 0};
    default:
      return {t % 16, k, t / 16};
  }
}

// --- The shared-memory matrix descriptor ---

struct Descriptor : wgmma::Descriptor {
  uint64_t bits;

  static Descriptor decode(uint64_t bits) {
    const auto field = [bits](int position) { return static_cast<uint32_t>(bits >> position & 0x3FFF) << 4; };
    Descriptor d;
    d.bits = bits;
    d.start = field(0);
    d.leading = field(16);
    d.stride = field(32);
    d.base_offset = static_cast<uint32_t>(bits >> 49 & 7);
    const auto mode = bits >> 61;
    d.swizzle = mode == 1   ? Swizzle::B128Atom32
                : mode == 2 ? Swizzle::B128
                : mode == 4 ? Swizzle::B64
                : mode == 6 ? Swizzle::B32
                            : Swizzle::None;
    return d;
  }
  const char* invalid() const {
    if ((bits >> 46 & 7) != 1) return "bits 46-48 must hold the constant 0b001";
    if (bits >> 14 & 3 || bits >> 30 & 3) return "reserved bits 14-15 and 30-31 must be 0";
    if (bits >> 53 & 0xFF) return "bits 53-60 must be 0";
    const auto mode = bits >> 61;
    if (mode & 1 && mode != 1) return "swizzling modes 3, 5 and 7 are invalid";
    if (bits >> 52 & 1) return "the absolute leading dimension address (bit 52) isn't implemented";
    return nullptr;
  }
};

/// Shared-memory address of the 16-byte unit `unit` along K of row `row`.
inline uint32_t k_major_address(const Descriptor& d, uint32_t row, uint32_t unit) {
  return wgmma::k_major_address(d, row, unit);
}

/// The same of unit `unit` along M or N of column `k`. With 32-byte atoms the pattern repeats every 4
/// columns.
inline uint32_t mn_major_address(const Descriptor& d, uint32_t unit, uint32_t k) {
  if (d.swizzle != Swizzle::B128Atom32) return wgmma::mn_major_address(d, unit, k);
  const uint32_t plain = d.start + unit / 8 * d.leading + unit % 8 * 16 + k / 4 * d.stride + k % 4 * 128;
  return swizzle_address(plain, d.swizzle, d.base_offset);
}

// --- Packed elements ---

/// How 16 elements lie in 16 bytes: one byte each, or packed in the first 8 or 12, the rest being padding.
enum class Packing : uint8_t { None, Bits4, Bits6 };

constexpr int packed_bytes(Packing p) { return p == Packing::Bits4 ? 8 : p == Packing::Bits6 ? 12 : 16; }

/// Element `index` of 16.
inline uint8_t packed_element(const uint8_t* bytes, Packing p, int index) {
  if (p == Packing::None) return bytes[index];
  const int width = p == Packing::Bits4 ? 4 : 6, bit = index * width;
  uint32_t word = bytes[bit / 8];
  if (bit % 8 + width > 8) word |= static_cast<uint32_t>(bytes[bit / 8 + 1]) << 8;
  return static_cast<uint8_t>(word >> bit % 8 & ((1u << width) - 1));
}

/// Position of a 4- or 6-bit element in its 8-bit container: 4 bits lie in the middle, at bit 2, so that E2M1
/// reads as E2M3.
constexpr int container_shift(Packing p) { return p == Packing::Bits4 ? 2 : 0; }

/// tcgen05.cp's conversion of 16 bytes, and of their undefined bits.
inline void decompress(const uint8_t* from, const uint8_t* shadow, Packing p, uint8_t* to,
                       uint8_t* undefined) {
  const int shift = container_shift(p);
  for (int k = 0; k < 16; ++k) {
    to[k] = static_cast<uint8_t>(packed_element(from, p, k) << shift);
    undefined[k] = static_cast<uint8_t>(packed_element(shadow, p, k) << shift);
  }
}

// --- tcgen05.cp ---

/// Row `row` goes to `copies` lanes. Groups of 32 rows are `group_pitch` lanes apart, copies `copy_pitch`.
struct CopyShape {
  const char* name;
  uint32_t rows, columns, copies, row_pitch, group_pitch, copy_pitch;
  constexpr uint32_t lane(uint32_t row, uint32_t copy) const {
    return row % 32 * row_pitch + row / 32 * group_pitch + copy * copy_pitch;
  }
};

inline constexpr CopyShape kCopyShapes[] = {
    {".128x256b", 128, 8, 1, 1, 32, 0},
    {".4x256b", 4, 8, 1, 32, 0, 0},
    {".128x128b", 128, 4, 1, 1, 32, 0},
    {".64x128b.warpx2::02_13", 64, 4, 2, 1, 32, 64},
    {".64x128b.warpx2::01_23", 64, 4, 2, 1, 64, 32},
    {".32x128b.warpx4", 32, 4, 4, 1, 0, 32},
};

// --- D ---

/// How rows of one CTA's part of D, and its columns, are spread over the 128 lanes.
struct DataPath {
  uint32_t rows;   // of this CTA
  uint32_t parts;  // the columns are split into so many parts, which lie in different lanes
  bool half;       // only 16 of 32 lanes are used
  uint32_t row_of(uint32_t lane) const { return half ? lane / 32 * 16 + lane % 32 : lane % rows; }
  uint32_t part_of(uint32_t lane) const { return half ? 0 : lane / rows; }
  bool uses(uint32_t lane) const { return !half || lane % 32 < 16; }
};

/// `m` over all CTAs. Layouts A to G of the ISA.
constexpr DataPath data_path(uint32_t m, int group, bool weight_stationary) {
  const uint32_t rows = m / static_cast<uint32_t>(group);
  if (rows == 64 && group == 1 && !weight_stationary) return {64, 1, true};
  return {rows, 128 / rows, false};
}

}  // namespace megagen::tcgen05
