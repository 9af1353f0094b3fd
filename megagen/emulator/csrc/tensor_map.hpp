// Tensor maps: the emulator's own 128-byte encoding, validation like the driver's, and what one tensor copy
// moves.
//
// Sources: CUDA driver API, cuTensorMapEncodeTiled; PTX ISA, "Tensors" (tiled mode, out-of-boundary access,
// sub-byte types, swizzling modes).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "float_formats.hpp"
#include "shared_swizzle.hpp"

namespace megagen {

inline constexpr int kMaxTensorRank = 5;
inline constexpr uint64_t kMaxBoxBytes = 228 * 1024;

/// Numbered like CUtensorMapDataType.
enum class TensorType : uint8_t {
  U8,
  U16,
  U32,
  S32,
  U64,
  S64,
  F16,
  F32,
  F64,
  BF16,
  F32Ftz,
  TF32,
  TF32Ftz,
  U4x16Align8,
  U4x16Align16,
  U6x16Align16,
};

/// Numbered like CUtensorMapInterleave and CUtensorMapFloatOOBfill.
enum class Interleave : uint8_t { None, B16, B32 };
enum class OutOfBoundsFill : uint8_t { Zeros, NanRequestZeroFma };

/// The fields of a tiled tensor map. Sizes and coordinates count elements, strides bytes.
struct TensorMap {
  TensorType type = TensorType::U8;
  uint8_t rank = 1;
  Interleave interleave = Interleave::None;
  Swizzle swizzle = Swizzle::None;
  OutOfBoundsFill fill = OutOfBoundsFill::Zeros;
  uint64_t address = 0;
  std::array<uint64_t, kMaxTensorRank> size{};
  std::array<uint64_t, kMaxTensorRank - 1> stride{};  // of dimensions 1 to rank - 1
  std::array<uint16_t, kMaxTensorRank> box{};
  std::array<uint8_t, kMaxTensorRank> element_stride{};
};

/// The emulator's 128 bytes, little-endian, at the same size and alignment (64) as the driver's opaque
/// object:
///
///   offset  0  u32     0x50414D54 ("TMAP"); anything else isn't a tensor map
///           4  u8      version, 1
///           5  u8 x 5  type, rank, interleave, swizzle, fill: the CUDA driver API's numbers
///          10  u8 x 6  zero
///          16  u64     global address
///          24  u64 x 5 size per dimension, elements
///          64  u64 x 4 stride of dimensions 1 to 4, bytes
///          96  u16 x 5 box
///         106  u8 x 5  element strides
///         111  u8 x 17 zero
///
/// Entries beyond the rank are zero.
inline constexpr uint32_t kTensorMapMagic = 0x50414D54;
inline constexpr uint8_t kTensorMapVersion = 1;
inline constexpr int kTensorMapBytes = 128;

/// Reads 128 bytes; false if they don't hold a tensor map (magic or version differ).
inline bool decode_tensor_map(const uint8_t* bytes, TensorMap& map) {
  uint32_t magic;
  std::memcpy(&magic, bytes, 4);
  if (magic != kTensorMapMagic || bytes[4] != kTensorMapVersion) return false;
  map.type = static_cast<TensorType>(bytes[5]);
  map.rank = bytes[6];
  map.interleave = static_cast<Interleave>(bytes[7]);
  map.swizzle = static_cast<Swizzle>(bytes[8]);
  map.fill = static_cast<OutOfBoundsFill>(bytes[9]);
  std::memcpy(&map.address, bytes + 16, 8);
  std::memcpy(map.size.data(), bytes + 24, 40);
  std::memcpy(map.stride.data(), bytes + 64, 32);
  std::memcpy(map.box.data(), bytes + 96, 10);
  std::memcpy(map.element_stride.data(), bytes + 106, 5);
  return true;
}

inline void encode_tensor_map(const TensorMap& map, uint8_t* bytes) {
  std::memset(bytes, 0, kTensorMapBytes);
  std::memcpy(bytes, &kTensorMapMagic, 4);
  const uint8_t head[6] = {kTensorMapVersion,
                           static_cast<uint8_t>(map.type),
                           map.rank,
                           static_cast<uint8_t>(map.interleave),
                           static_cast<uint8_t>(map.swizzle),
                           static_cast<uint8_t>(map.fill)};
  std::memcpy(bytes + 4, head, 6);
  std::memcpy(bytes + 16, &map.address, 8);
  std::memcpy(bytes + 24, map.size.data(), 40);
  std::memcpy(bytes + 64, map.stride.data(), 32);
  std::memcpy(bytes + 96, map.box.data(), 10);
  std::memcpy(bytes + 106, map.element_stride.data(), 5);
}

/// How sixteen elements (packed types) or one element (others) lie in memory.
struct ElementLayout {
  uint32_t elements;      // per unit
  uint32_t global_bytes;  // of a unit in global memory
  uint32_t shared_bytes;  // of a unit in shared memory, padding included
};

constexpr ElementLayout element_layout(TensorType type) {
  switch (type) {
    case TensorType::U8: return {1, 1, 1};
    case TensorType::U16:
    case TensorType::F16:
    case TensorType::BF16: return {1, 2, 2};
    case TensorType::U64:
    case TensorType::S64:
    case TensorType::F64: return {1, 8, 8};
    case TensorType::U4x16Align8: return {16, 8, 8};
    case TensorType::U4x16Align16: return {16, 8, 16};
    case TensorType::U6x16Align16: return {16, 12, 16};
    default: return {1, 4, 4};
  }
}

constexpr bool is_packed(TensorType type) { return type >= TensorType::U4x16Align8; }

constexpr bool is_floating(TensorType type) { return type >= TensorType::F16 && type <= TensorType::TF32Ftz; }

/// Elements that a copy moves along dimension `d`: ceil(box / element stride). Dimension 0 has no stride.
inline uint32_t box_elements(const TensorMap& map, int d) {
  const uint32_t step = d == 0 && map.interleave == Interleave::None ? 1 : map.element_stride[d];
  return (map.box[d] + step - 1) / step;
}

/// Bytes of `elements` elements of a row in global and in shared memory.
inline uint64_t global_row_bytes(TensorType type, uint64_t elements) {
  const ElementLayout layout = element_layout(type);
  return elements * layout.global_bytes / layout.elements;
}

inline uint32_t shared_row_bytes(const TensorMap& map) {
  const ElementLayout layout = element_layout(map.type);
  return box_elements(map, 0) * layout.shared_bytes / layout.elements;
}

/// Distance of successive rows in shared memory: a swizzled row takes the whole span, however short it is.
inline uint32_t shared_row_pitch(const TensorMap& map) {
  return std::max(shared_row_bytes(map), swizzle_span(map.swizzle));
}

inline uint32_t box_rows(const TensorMap& map) {
  uint32_t rows = 1;
  for (int d = 1; d < map.rank; ++d) rows *= box_elements(map, d);
  return rows;
}

/// Bytes that the box occupies in shared memory, with the unwritten ends of short swizzled rows.
inline uint32_t shared_bytes(const TensorMap& map) { return box_rows(map) * shared_row_pitch(map); }

/// Bytes that complete_tx counts: the whole box, out-of-bounds elements included, without the padding of
/// packed types.
inline uint32_t transaction_bytes(const TensorMap& map) {
  return box_rows(map) * static_cast<uint32_t>(global_row_bytes(map.type, box_elements(map, 0)));
}

namespace detail {

inline std::string violation(const char* field, int index, uint64_t value, const std::string& rule) {
  const std::string name = index < 0 ? field : std::string(field) + "[" + std::to_string(index) + "]";
  return name + " = " + std::to_string(value) + ": " + rule;
}

inline std::string validate_architecture(const TensorMap& map, int compute_capability) {
  if (compute_capability >= 100) return {};
  if (is_packed(map.type)) return violation("type", -1, static_cast<int>(map.type), "needs sm_100");
  if (map.swizzle > Swizzle::B128)
    return violation("swizzle", -1, static_cast<int>(map.swizzle), "needs sm_100");
  return {};
}

inline std::string validate_enums(const TensorMap& map) {
  if (map.type > TensorType::U6x16Align16)
    return violation("type", -1, static_cast<int>(map.type), "must be 0 to 15");
  if (map.rank < 1 || map.rank > kMaxTensorRank) return violation("rank", -1, map.rank, "must be 1 to 5");
  if (map.interleave > Interleave::B32) {
    return violation("interleave", -1, static_cast<int>(map.interleave), "must be 0 to 2");
  }
  if (map.swizzle > Swizzle::B128Atom64)
    return violation("swizzle", -1, static_cast<int>(map.swizzle), "must be 0 to 6");
  if (map.fill > OutOfBoundsFill::NanRequestZeroFma)
    return violation("fill", -1, static_cast<int>(map.fill), "must be 0 or 1");
  if (map.fill != OutOfBoundsFill::Zeros && !is_floating(map.type)) {
    return violation("fill", -1, static_cast<int>(map.fill), "NaN fill needs a floating-point element type");
  }
  if (map.interleave != Interleave::None && map.rank < 3) {
    return violation("rank", -1, map.rank, "interleaved tensors have 3 to 5 dimensions");
  }
  return {};
}

inline std::string validate_global(const TensorMap& map, bool padded) {
  const uint64_t alignment = map.interleave == Interleave::B32 || padded ? 32 : 16;
  const std::string aligned = "must be a multiple of " + std::to_string(alignment);
  if (map.address % alignment) return violation("address", -1, map.address, aligned);
  for (int d = 0; d < map.rank; ++d) {
    if (map.size[d] == 0 || map.size[d] > uint64_t{1} << 32)
      return violation("size", d, map.size[d], "must be 1 to 2^32");
    if (d > 0 && map.stride[d - 1] % alignment) return violation("stride", d, map.stride[d - 1], aligned);
    if (d > 0 && map.stride[d - 1] >= uint64_t{1} << 40)
      return violation("stride", d, map.stride[d - 1], "must be below 2^40");
  }
  if (padded && map.size[0] % 128)
    return violation("size", 0, map.size[0], "must be a multiple of 128 for this type");
  if (map.type == TensorType::U4x16Align8 && map.size[0] % 2) {
    return violation("size", 0, map.size[0], "must be a multiple of 2 for this type");
  }
  return {};
}

inline std::string validate_box(const TensorMap& map, bool padded) {
  for (int d = 0; d < map.rank; ++d) {
    if (map.box[d] < 1 || map.box[d] > 256) return violation("box", d, map.box[d], "must be 1 to 256");
    if (map.element_stride[d] < 1 || map.element_stride[d] > 8) {
      return violation("element_stride", d, map.element_stride[d], "must be 1 to 8");
    }
  }
  if (padded && map.box[0] != 128) return violation("box", 0, map.box[0], "must be 128 for this type");
  if (map.interleave != Interleave::None) return {};
  const uint64_t inner = shared_row_bytes(map);
  if (global_row_bytes(map.type, map.box[0]) % 16) {
    return violation("box", 0, map.box[0], "must span a multiple of 16 bytes");
  }
  if (map.swizzle != Swizzle::None && inner > swizzle_span(map.swizzle)) {
    return violation("box", 0, map.box[0],
                     "spans " + std::to_string(inner) + " bytes, more than the swizzle's " +
                         std::to_string(swizzle_span(map.swizzle)));
  }
  return {};
}

inline std::string validate_box_bytes(const TensorMap& map) {
  uint64_t bytes = global_row_bytes(map.type, map.box[0]);
  for (int d = 1; d < map.rank; ++d) bytes *= map.box[d];
  return bytes <= kMaxBoxBytes
             ? ""
             : violation("box", -1, bytes,
                         "bytes, must fit into shared memory (" + std::to_string(kMaxBoxBytes) + ")");
}

inline std::string validate_swizzle(const TensorMap& map) {
  const bool none_or_128 =
      map.swizzle == Swizzle::None || map.swizzle == Swizzle::B128 || map.swizzle == Swizzle::B128Atom32;
  const auto refuse = [&](const char* rule) {
    return violation("swizzle", -1, static_cast<int>(map.swizzle), rule);
  };
  if (map.type == TensorType::U4x16Align16 && !none_or_128) return refuse("not supported for 16U4_ALIGN16B");
  if (map.type == TensorType::U6x16Align16 && !none_or_128 && map.swizzle != Swizzle::B128Atom64) {
    return refuse("not supported for 16U6_ALIGN16B");
  }
  return {};
}

}  // namespace detail

/// What cuTensorMapEncodeTiled would refuse on an architecture (90, 100), in words that name the field, its
/// value and the rule; empty if valid. As measured with driver 13.0 on sm_90, where that differs from its
/// documentation: element_stride[0] is checked though ignored, 32B interleave goes with any swizzle, and the
/// box has to fit into shared memory.
inline std::string validate(const TensorMap& map, int compute_capability) {
  const bool padded = map.type == TensorType::U4x16Align16 || map.type == TensorType::U6x16Align16;
  std::string error = detail::validate_enums(map);
  if (error.empty()) error = detail::validate_architecture(map, compute_capability);
  if (error.empty()) error = detail::validate_global(map, padded);
  if (error.empty()) error = detail::validate_box(map, padded);
  if (error.empty()) error = detail::validate_box_bytes(map);
  if (error.empty()) error = detail::validate_swizzle(map);
  return error;
}

/// Why hardware faults on a copy of the box at `coordinates` from or to the shared address `shared`; empty if
/// it doesn't. As measured on an H200: "misaligned address" for the first rule, "illegal instruction" for the
/// others.
inline std::string copy_violation(const TensorMap& map, const int32_t* coordinates, uint32_t shared,
                                  bool store) {
  if (shared % 128) return detail::violation("shared address", -1, shared, "must be a multiple of 128");
  if (!is_packed(map.type) && coordinates[0] % 16 * element_layout(map.type).global_bytes % 16) {
    return "coordinates[0] = " + std::to_string(coordinates[0]) +
           ": the box must begin at a multiple of 16 bytes";
  }
  for (int d = 0; store && d < map.rank; ++d) {
    if (coordinates[d] < 0) {
      return "coordinates[" + std::to_string(d) + "] = " + std::to_string(coordinates[d]) +
             ": a store or reduction can't begin before the tensor";
    }
  }
  return {};
}

/// The map as a store clips by it. Stores write whole units of 16 bytes (measured on an H200): a row that ends
/// inside of a unit is overwritten up to the unit's end, while a load fills from the row's very end.
inline TensorMap clipped_by_units(TensorMap map) {
  if (is_packed(map.type)) return map;
  const uint64_t unit = std::max(1u, 16 / element_layout(map.type).global_bytes);
  map.size[0] = (map.size[0] + unit - 1) / unit * unit;
  return map;
}

/// One contiguous piece of a copy. Out of bounds: nothing in global memory corresponds to it; a load fills
/// the shared bytes (see fill_out_of_bounds), a store or reduction skips them.
struct TensorRun {
  uint64_t global;
  uint32_t shared;
  uint32_t bytes;
  bool in_bounds;
};

/// Joins adjacent pieces, so that visitors see runs as long as layout, swizzle and bounds allow.
template <class Visit>
class RunMerger {
 public:
  explicit RunMerger(Visit& visit) : visit_(visit) {}

  void add(uint64_t global, uint32_t shared, uint32_t bytes, bool in_bounds) {
    const bool extends = run_.bytes > 0 && run_.in_bounds == in_bounds &&
                         run_.shared + run_.bytes == shared &&
                         (!in_bounds || run_.global + run_.bytes == global);
    if (extends) {
      run_.bytes += bytes;
      return;
    }
    flush();
    run_ = {in_bounds ? global : 0, shared, bytes, in_bounds};
  }

  void flush() {
    if (run_.bytes > 0) visit_(static_cast<const TensorRun&>(run_));
    run_.bytes = 0;
  }

 private:
  Visit& visit_;
  TensorRun run_{};
};

/// Calls visit(TensorRun) for every piece of the box whose first element has `coordinates` (dimension 0
/// first) and whose shared-memory image starts at `shared`, an address within the CTA's shared memory (its
/// bits drive the swizzle). For a store pass clipped_by_units(map). The padding of packed types belongs to no
/// run: a copy leaves it undefined. The map must be valid and not interleaved. Types with padding need
/// coordinates[0] to be a multiple of 128.
template <class Visit>
void for_each_run(const TensorMap& map, const int32_t* coordinates, uint32_t shared, Visit&& visit) {
  RunMerger<std::remove_reference_t<Visit>> merger(visit);
  const ElementLayout layout = element_layout(map.type);
  const bool gaps = layout.global_bytes != layout.shared_bytes;
  const uint32_t atom = map.swizzle == Swizzle::None ? ~0u : swizzle_atom(map.swizzle);

  // Elements [first, last) of a row, at plain shared address `row`.
  const auto add_elements = [&](uint64_t global_row, uint32_t row, int64_t first, int64_t last,
                                bool in_bounds) {
    const int64_t step = gaps ? layout.elements : last - first;
    for (int64_t at = first; at < last; at += step) {
      uint64_t global =
          global_row + static_cast<uint64_t>((coordinates[0] + at) * layout.global_bytes / layout.elements);
      uint32_t plain = row + static_cast<uint32_t>(at * layout.shared_bytes / layout.elements);
      uint32_t left = static_cast<uint32_t>(global_row_bytes(map.type, step));
      while (left > 0) {
        const uint32_t bytes = std::min(left, atom == ~0u ? left : atom - plain % atom);
        merger.add(global, swizzle_address(plain, map.swizzle), bytes, in_bounds);
        global += bytes, plain += bytes, left -= bytes;
      }
    }
  };

  const int64_t inner = box_elements(map, 0);
  const int64_t size = static_cast<int64_t>(map.size[0]);
  const int64_t begin = std::clamp<int64_t>(-static_cast<int64_t>(coordinates[0]), 0, inner);
  const int64_t end = std::clamp<int64_t>(size - coordinates[0], begin, inner);
  std::array<uint32_t, kMaxTensorRank> index{};
  for (uint32_t row_number = 0, rows = box_rows(map); row_number < rows; ++row_number) {
    uint64_t global_row = map.address;
    bool inside = true;
    for (int d = 1; d < map.rank; ++d) {
      const int64_t position = coordinates[d] + static_cast<int64_t>(index[d]) * map.element_stride[d];
      inside = inside && position >= 0 && position < static_cast<int64_t>(map.size[d]);
      global_row += static_cast<uint64_t>(position) * map.stride[d - 1];
    }
    const uint32_t row = shared + row_number * shared_row_pitch(map);
    if (!inside) {
      add_elements(0, row, 0, inner, false);
    } else {
      add_elements(0, row, 0, begin, false);
      add_elements(global_row, row, begin, end, true);
      add_elements(0, row, end, inner, false);
    }
    for (int d = 1; d < map.rank && ++index[d] == box_elements(map, d); ++d) index[d] = 0;
  }
  merger.flush();
}

/// Fills `bytes` bytes (an even number) with what a load writes out of bounds: zeros, or OOB-NaN, whose bits
/// are 0x7FF7 in every 16 bits whatever the type (measured on sm_90).
inline void fill_out_of_bounds(const TensorMap& map, uint8_t* destination, uint32_t bytes) {
  std::memset(destination, 0, bytes);
  if (map.fill == OutOfBoundsFill::Zeros) return;
  constexpr uint16_t nan = 0x7FF7;
  for (uint32_t at = 0; at < bytes; at += sizeof nan) std::memcpy(destination + at, &nan, sizeof nan);
}

/// What a load does to the values of types that convert: .ftz flushes subnormals, TF32 rounds to nearest
/// even.
inline void convert_loaded(TensorType type, uint8_t* values, uint32_t bytes) {
  const bool ftz = type == TensorType::F32Ftz || type == TensorType::TF32Ftz;
  const bool round = type == TensorType::TF32 || type == TensorType::TF32Ftz;
  if (!ftz && !round) return;
  for (uint32_t at = 0; at < bytes; at += 4) {
    float value;
    std::memcpy(&value, values + at, 4);
    if (ftz && std::fpclassify(value) == FP_SUBNORMAL) value = std::copysign(0.0f, value);
    const uint32_t bits = round ? static_cast<uint32_t>(numerics::encode(value, numerics::Format::TF32))
                                : numerics::bits_of(value);
    std::memcpy(values + at, &bits, 4);
  }
}

}  // namespace megagen
