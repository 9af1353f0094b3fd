// Swizzle patterns of shared memory, common to tensor copies and to matrix descriptors.
// Source: PTX ISA, "Swizzling Modes".
#pragma once

#include <cstdint>

namespace megagen {

/// Numbered like CUtensorMapSwizzle.
enum class Swizzle : uint8_t {
  None,
  B32,
  B64,
  B128,
  B128Atom32,
  B128Atom32Flip8,
  B128Atom64,
};

/// Bytes of the span that is permuted; 0 without swizzle.
constexpr uint32_t swizzle_span(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::None: return 0;
    case Swizzle::B32: return 32;
    case Swizzle::B64: return 64;
    default: return 128;
  }
}

/// Bytes that stay together under the permutation.
constexpr uint32_t swizzle_atom(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::B128Atom32: return 32;
    case Swizzle::B128Atom32Flip8: return 8;
    case Swizzle::B128Atom64: return 64;
    default: return 16;
  }
}

/// Where the byte at shared-memory address `address` of the plain layout lies in the swizzled one. Address
/// bits above 7 select the line of 128 bytes, whose number is XORed into the atom's index; `line_offset` is
/// subtracted from the line (a matrix descriptor's base offset).
constexpr uint32_t swizzle_address(uint32_t address, Swizzle swizzle, uint32_t line_offset = 0) {
  const uint32_t line = (address >> 7) - line_offset;
  switch (swizzle) {
    case Swizzle::None: return address;
    case Swizzle::B32: return address ^ (line & 1) << 4;
    case Swizzle::B64: return address ^ (line & 3) << 4;
    case Swizzle::B128: return address ^ (line & 7) << 4;
    case Swizzle::B128Atom32: return address ^ (line & 3) << 5;
    case Swizzle::B128Atom32Flip8: return address ^ (line & 3) << 5 ^ (line & 1) << 3;
    default: return address ^ (line & 1) << 6;
  }
}

/// Bytes after which the pattern repeats.
constexpr uint32_t swizzle_period(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::None: return 16;
    case Swizzle::B32:
    case Swizzle::B128Atom64: return 256;
    case Swizzle::B128: return 1024;
    default: return 512;
  }
}

}  // namespace megagen
