// Conversions and moves between registers. Source: PTX ISA, "Data Movement and Conversion Instructions: cvt,
// cvt.pack, mov, cvta, isspacep".
#include <cmath>
#include <limits>

#include "alu.hpp"
#include "numerics.hpp"

namespace megagen::emulator {

/// A register that an uncompleted wgmma writes is copied: the copy gets the result too (exec_matrix.cpp).
void wgmma_alias(Exec& x, uint32_t from, uint32_t to);
void tensor_alias(Exec& x, uint32_t from, uint32_t to);  // exec_tcgen05_memory.cpp

namespace {

using namespace megagen::numerics;

enum : uint16_t { kFtz = 8, kSat = 16, kRelu = 32, kSatfinite = 64 };  // Instr::flags; rounding in bits 0-2

bool is_float(Type t) {
  return t == Type::F16 || t == Type::BF16 || t == Type::F32 || t == Type::F64 || t == Type::TF32;
}
bool is_signed(Type t) { return t == Type::S8 || t == Type::S16 || t == Type::S32 || t == Type::S64; }

Format format_of(Type t) {
  switch (t) {
    case Type::F16:
    case Type::F16x2:
      return Format::F16;
    case Type::BF16:
    case Type::BF16x2:
      return Format::BF16;
    case Type::F32:
      return Format::F32;
    case Type::TF32:
      return Format::TF32;
    case Type::E4M3x2:
      return Format::E4M3;
    case Type::E5M2x2:
      return Format::E5M2;
    case Type::E2M1x2:
      return Format::E2M1;
    case Type::E2M3x2:
      return Format::E2M3;
    case Type::E3M2x2:
      return Format::E3M2;
    case Type::UE8M0x2:
      return Format::UE8M0;
    default:
      return Format::F64;
  }
}

Rounding rounding_from(const Decoder& d, Rounding otherwise) {
  if (d.has(".rn") || d.has(".rni")) return Rounding::NearestEven;
  if (d.has(".rz") || d.has(".rzi")) return Rounding::TowardZero;
  if (d.has(".rm") || d.has(".rmi")) return Rounding::Down;
  if (d.has(".rp") || d.has(".rpi")) return Rounding::Up;
  if (d.has(".rna")) return Rounding::NearestAway;
  return otherwise;
}

// --- Integers ---

/// A destination register wider than D holds the value extended by D's signedness.
template <class S, class D>
void integer_to_integer(Exec& x, const Instr& i) {
  const auto a = x.view<S>(i.op[1]);
  const bool saturate = i.flags & kSat;
  const bool wide = i.op[0].width == 8;
  uint64_t out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const S v = a[l];
    D r = static_cast<D>(v);
    if (saturate) {
      using Wide = __int128;
      const Wide w = v, lowest = std::numeric_limits<D>::min(), highest = std::numeric_limits<D>::max();
      r = static_cast<D>(w < lowest ? lowest : w > highest ? highest : w);
    }
    out[l] = static_cast<uint64_t>(static_cast<int64_t>(r));
    if (!std::is_signed_v<D>) out[l] = static_cast<uint64_t>(r);
  }
  const Mask u = x.undefined(i.op[1]) & x.mask;
  uint64_t bits[kLanes];
  for (Mask rest = u; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint64_t b = x.undefined_bits(i.op[1], l);
    constexpr int kFrom = 8 * sizeof(S), kTo = 8 * sizeof(D);
    if (kFrom < 64) b &= (uint64_t{1} << (kFrom & 63)) - 1;
    if (std::is_signed_v<S> && kFrom < 64 && (b >> (kFrom - 1) & 1)) b |= ~uint64_t{0} << (kFrom & 63);
    if (kTo < 64) b &= (uint64_t{1} << (kTo & 63)) - 1;
    bits[l] = saturate ? ~uint64_t{0} : b;
  }
  if (wide) {
    x.store(i.op[0], out);
  } else {
    uint32_t narrow[kLanes];
    for (int l = 0; l < kLanes; ++l) narrow[l] = static_cast<uint32_t>(out[l]);
    x.store(i.op[0], narrow);
  }
  x.define(i.op[0]);
  for (Mask rest = u; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    x.set_undefined_bits(i.op[0], l, bits[l]);
  }
}

template <class S>
Handler integer_from(Type to) {
  switch (to) {
    case Type::U8:
    case Type::B8:
      return integer_to_integer<S, uint8_t>;
    case Type::S8:
      return integer_to_integer<S, int8_t>;
    case Type::U16:
    case Type::B16:
      return integer_to_integer<S, uint16_t>;
    case Type::S16:
      return integer_to_integer<S, int16_t>;
    case Type::U32:
    case Type::B32:
      return integer_to_integer<S, uint32_t>;
    case Type::S32:
      return integer_to_integer<S, int32_t>;
    case Type::U64:
    case Type::B64:
      return integer_to_integer<S, uint64_t>;
    default:
      return integer_to_integer<S, int64_t>;
  }
}
Handler integer_handler(Type to, Type from) {
  switch (from) {
    case Type::U8:
      return integer_from<uint8_t>(to);
    case Type::S8:
      return integer_from<int8_t>(to);
    case Type::U16:
      return integer_from<uint16_t>(to);
    case Type::S16:
      return integer_from<int16_t>(to);
    case Type::U32:
      return integer_from<uint32_t>(to);
    case Type::S32:
      return integer_from<int32_t>(to);
    case Type::U64:
      return integer_from<uint64_t>(to);
    default:
      return integer_from<int64_t>(to);
  }
}

// --- Floats ---

double load_float(const Exec& x, const Ref& r, int l, Type t) {
  switch (t) {
    case Type::F64:
      return x.view<double>(r)[l];
    case Type::F32:
      return x.view<float>(r)[l];
    default:
      return decode(x.view<uint16_t>(r)[l], format_of(t));
  }
}

void store_float(const Exec& x, const Ref& r, int l, Type t, uint64_t bits) {
  if (t == Type::F64) {
    x.view<uint64_t>(r).set(l, bits);
  } else {
    x.view<uint32_t>(r).set(l, static_cast<uint32_t>(bits));
  }
}

uint64_t encode_float(double v, Type t, const Instr& i) {
  if (t == Type::F64) return bits_of(std::isnan(v) ? double_of(uint64_t{0x7FFFFFFFFFFFFFFF}) : v);
  if (i.flags & kSat) v = v > 0 ? std::fmin(v, 1.0) : 0.0;
  uint64_t bits =
      encode(v, format_of(t),
             {static_cast<Rounding>(i.flags & 7), (i.flags & kSatfinite) != 0, (i.flags & kRelu) != 0});
  if ((i.flags & kFtz) && t == Type::F32) bits = bits_of(flush(float_of(static_cast<uint32_t>(bits))));
  return bits;
}

/// choice 1: round to an integral value first (.rni and the like).
void float_to_float(Exec& x, const Instr& i) {
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    double v = load_float(x, i.op[1], l, i.type2);
    if ((i.flags & kFtz) && i.type2 == Type::F32) v = flush(static_cast<float>(v));
    if (i.choice) v = round_to_integral(v, static_cast<Rounding>(i.flags & 7));
    store_float(x, i.op[0], l, i.type, encode_float(v, i.type, i));
  }
  x.finish(i, 1);
}

void float_to_integer(Exec& x, const Instr& i) {
  const int bits = 8 * bytes_of(i.type);
  const auto rounding = static_cast<Rounding>(i.flags & 7);
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    double v = load_float(x, i.op[1], l, i.type2);
    if ((i.flags & kFtz) && i.type2 == Type::F32) v = flush(static_cast<float>(v));
    const auto out =
        static_cast<uint64_t>(to_integer(v, rounding, bits, is_signed(i.type), i.type2 == Type::F64));
    if (i.op[0].width == 8) {
      x.view<uint64_t>(i.op[0]).set(l, out);
    } else {
      x.view<uint32_t>(i.op[0]).set(l, static_cast<uint32_t>(out));
    }
  }
  x.finish(i, 1);
}

void s32_from_f32(Exec& x, const Instr& i) {  // cvt.rzi.s32.f32
  unary<int32_t, float>(x, i, [](float a) {
    return std::isnan(a)         ? 0
           : a >= 2147483648.0f  ? INT32_MAX
           : a <= -2147483648.0f ? INT32_MIN
                                 : static_cast<int32_t>(a);
  });
}

/// An integer of up to 64 bits as a double that rounds once more like the integer itself.
double odd_double(bool negative, uint64_t magnitude) {
  double v;
  if (magnitude >> 53) {
    v = std::ldexp(static_cast<double>(magnitude >> 11 | ((magnitude & 0x7FF) != 0)), 11);
  } else {
    v = static_cast<double>(magnitude);
  }
  return negative ? -v : v;
}

double integer_to_double(bool negative, uint64_t magnitude, Rounding r) {
  double v = static_cast<double>(magnitude);
  const __int128 error = static_cast<__int128>(magnitude) - static_cast<__int128>(v);
  const bool up = r == Rounding::Up ? !negative : r == Rounding::Down ? negative : false;
  if (r != Rounding::NearestEven && error != 0) {
    if (error > 0 && up) v = std::nextafter(v, INFINITY);
    if (error < 0 && !up) v = std::nextafter(v, 0.0);
  }
  return negative ? -v : v;
}

void integer_to_float(Exec& x, const Instr& i) {
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint64_t v = x.value(i.op[1], l);
    const int bits = 8 * bytes_of(i.type2);
    if (bits < 64) v &= (uint64_t{1} << bits) - 1;
    const bool negative = is_signed(i.type2) && (v >> (bits - 1) & 1);
    if (negative) v = -(bits < 64 ? v | ~uint64_t{0} << bits : v);
    const Rounding r = static_cast<Rounding>(i.flags & 7);
    store_float(x, i.op[0], l, i.type,
                i.type == Type::F64 ? bits_of(integer_to_double(negative, v, r))
                                    : encode_float(odd_double(negative, v), i.type, i));
  }
  x.finish(i, 1);
}
void tf32_from_f32(Exec& x, const Instr& i) {
  const Conversion how{static_cast<Rounding>(i.flags & 7), (i.flags & kSatfinite) != 0,
                       (i.flags & kRelu) != 0};
  unary<uint32_t, uint32_t>(x, i, [how](uint32_t a) { return to_tf32(a, how); });
}
void f32_from_s32(Exec& x, const Instr& i) {
  unary<float, int32_t>(x, i, [](int32_t a) { return static_cast<float>(a); });
}
void f32_from_u32(Exec& x, const Instr& i) {
  unary<float, uint32_t>(x, i, [](uint32_t a) { return static_cast<float>(a); });
}
void f32_from_f16(Exec& x, const Instr& i) {
  unary<float, uint16_t>(x, i, [](uint16_t a) { return static_cast<float>(decode(a, Format::F16)); });
}
void f32_from_bf16(Exec& x, const Instr& i) {
  unary<float, uint16_t>(x, i, [](uint16_t a) { return canonical(from_bf16(a)); });
}
void bf16_from_f32(Exec& x, const Instr& i) {
  unary<uint16_t, float>(x, i, [](float a) { return to_bf16(a); });
}

void decode_cvt(Decoder& d, Instr& i) {
  const size_t n = d.matched.size();
  const Type to = d.slot_type(n - 2), from = d.slot_type(n - 1);
  i.type = to;
  i.type2 = from;
  const bool integral = d.has(".rni") || d.has(".rzi") || d.has(".rmi") || d.has(".rpi");
  i.flags = static_cast<uint16_t>(static_cast<uint16_t>(rounding_from(d, Rounding::NearestEven)) |
                                  (d.has(".ftz") ? kFtz : 0) | (d.has(".sat") ? kSat : 0) |
                                  (d.has(".relu") ? kRelu : 0) | (d.has(".satfinite") ? kSatfinite : 0));
  i.choice = integral;
  d.operands(i, to, {from});
  if (!is_float(to) && !is_float(from)) {
    i.fn = integer_handler(to, from);
  } else if (!is_float(to)) {
    if (!integral) d.unsupported("a conversion to an integer needs .rni, .rzi, .rmi or .rpi");
    i.fn = to == Type::S32 && from == Type::F32 && d.has(".rzi") && !(i.flags & kFtz) ? s32_from_f32
                                                                                      : float_to_integer;
  } else if (!is_float(from)) {
    const bool plain = i.flags == 0 && to == Type::F32;
    i.fn = plain && from == Type::S32   ? f32_from_s32
           : plain && from == Type::U32 ? f32_from_u32
                                        : integer_to_float;
  } else {
    i.fn = to == Type::TF32 ? tf32_from_f32 : float_to_float;
    if (i.flags == 0 && !integral) {
      if (to == Type::F32 && from == Type::F16) i.fn = f32_from_f16;
      if (to == Type::F32 && from == Type::BF16) i.fn = f32_from_bf16;
      if (to == Type::BF16 && from == Type::F32) i.fn = bf16_from_f32;
    }
  }
}

// --- Packed narrow formats ---

/// d = {a, b}: a into the upper half.
void pack_from_f32(Exec& x, const Instr& i) {
  const Format f = format_of(i.type);
  const Conversion how{static_cast<Rounding>(i.flags & 7), (i.flags & kSatfinite) != 0,
                       (i.flags & kRelu) != 0};
  const auto a = x.view<float>(i.op[1]);
  const auto b = x.view<float>(i.op[2]);
  const bool plain_bf16 = f == Format::BF16 && i.flags == 0;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    x.view<uint32_t>(i.op[0]).set(l, plain_bf16 ? static_cast<uint32_t>(to_bf16(a[l])) << 16 | to_bf16(b[l])
                                                : encode_x2(a[l], b[l], f, how));
  }
  // Each half is undefined on its own.
  const Mask u = (x.undefined(i.op[1]) | x.undefined(i.op[2])) & x.mask, ua = x.undefined(i.op[1]),
             ub = x.undefined(i.op[2]);
  x.define(i.op[0]);
  const int width = packed_width(f);
  for (Mask rest = u; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const uint64_t one = (uint64_t{1} << width) - 1;
    x.set_undefined_bits(i.op[0], l, (ua >> l & 1 ? one << width : 0) | (ub >> l & 1 ? one : 0));
  }
}
void pack_from_pair(Exec& x, const Instr& i) {
  const Format to = format_of(i.type), from = format_of(i.type2);
  const Conversion how{static_cast<Rounding>(i.flags & 7), (i.flags & kSatfinite) != 0,
                       (i.flags & kRelu) != 0};
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    x.view<uint32_t>(i.op[0]).set(l, convert_x2(x.view<uint32_t>(i.op[1])[l], from, to, how));
  }
  x.finish(i, 1);
}
void decode_packed(Decoder& d, Instr& i) {
  const size_t n = d.matched.size();
  i.type = d.slot_type(n - 2);
  i.type2 = d.slot_type(n - 1);
  i.flags = static_cast<uint16_t>(static_cast<uint16_t>(rounding_from(d, Rounding::NearestEven)) |
                                  (d.has(".relu") ? kRelu : 0) | (d.has(".satfinite") ? kSatfinite : 0));
  if (i.type2 == Type::F32) {
    d.operands(i, i.type, {Type::F32, Type::F32});
    i.fn = pack_from_f32;
  } else {
    d.operands(i, i.type, {i.type2});
    i.fn = pack_from_pair;
  }
}

/// cvt.pack.sat.T.s32 d, a, b: {a, b} as 16-bit values; with a third operand, narrower values pushed in front
/// of c.
void cvt_pack(Exec& x, const Instr& i) {
  const Type t = i.type;
  const int bits = i.choice;
  const bool sign = is_signed(t) || t == Type::S8;
  const int64_t lowest = sign ? -(int64_t{1} << (bits - 1)) : 0,
                highest = (int64_t{1} << (sign ? bits - 1 : bits)) - 1;
  const auto clamp = [&](int64_t v) {
    return static_cast<uint32_t>((v < lowest    ? lowest
                                  : v > highest ? highest
                                                : v) &
                                 ((int64_t{1} << bits) - 1));
  };
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint32_t out = clamp(x.view<int32_t>(i.op[1])[l]) << bits | clamp(x.view<int32_t>(i.op[2])[l]);
    if (i.operands == 4) out |= x.view<uint32_t>(i.op[3])[l] << (2 * bits);
    x.view<uint32_t>(i.op[0]).set(l, out);
  }
  x.finish(i, i.operands - 1);
}
void decode_cvt_pack(Decoder& d, Instr& i) {
  i.type = d.slot_type(2);
  i.choice = static_cast<uint8_t>(8 * bytes_of(i.type));
  if (d.count() == 4) {
    d.operands(i, Type::U32, {Type::S32, Type::S32, Type::U32});
  } else {
    d.operands(i, Type::U32, {Type::S32, Type::S32});
  }
  i.fn = cvt_pack;
}

// --- mov ---

template <class T>
void mov(Exec& x, const Instr& i) {
  const auto a = x.view<T>(i.op[1]);
  T out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = a[l];
  x.store(i.op[0], out);
  if (x.undefined(i.op[1]) & x.mask) {
    if (x.mask == kAllLanes && !x.w.in_flight.empty()) {
      const auto it = x.w.in_flight.find(i.op[1].off);
      if (it != x.w.in_flight.end()) wgmma_alias(x, i.op[1].off, i.op[0].off);
    }
    if (x.mask == kAllLanes && !x.w.tensor_registers.empty()) tensor_alias(x, i.op[1].off, i.op[0].off);
    x.propagate(i, 1, 1);
  } else {
    x.define(i.op[0]);
  }
}
struct Wide128 {
  uint64_t low, high;
};
void mov128(Exec& x, const Instr& i) { mov<Wide128>(x, i); }

void mov_pred(Exec& x, const Instr& i) {
  const Mask u = x.undefined(i.op[1]);
  x.set_predicate(i.op[0], x.predicate(i.op[1]));
  x.set_predicate_undefined(i.op[0], u);
}

/// mov.b64 {a, b}, c and the like: little end first.
void mov_unpack(Exec& x, const Instr& i) {
  const int part = i.op[1].width == 4 && i.type == Type::B32
                       ? 32 / static_cast<int>(i.extra_count)
                       : 8 * bytes_of(i.type) / static_cast<int>(i.extra_count);
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint8_t value[16] = {}, undefined[16] = {};
    const Ref& s = i.op[1];
    memcpy(value, x.base[s.bank] + s.off + l * s.width, s.width);
    const bool u = x.undefined(s) >> l & 1;
    if (u) memcpy(undefined, x.shadow + s.off + l * s.width, s.width);
    for (uint32_t k = 0; k < i.extra_count; ++k) {
      const Ref& d = x.program.extra[i.extra + k];
      uint64_t piece = 0, bits = 0;
      memcpy(&piece, value + static_cast<int>(k) * part / 8, static_cast<size_t>(part / 8));
      memcpy(&bits, undefined + static_cast<int>(k) * part / 8, static_cast<size_t>(part / 8));
      x.set_value(d, l, piece);
      x.set_undefined_bits(d, l, bits);
    }
  }
}
void mov_pack(Exec& x, const Instr& i) {
  const int part = 8 * bytes_of(i.type) / static_cast<int>(i.extra_count);
  const Ref& d = i.op[0];
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint8_t value[16] = {}, undefined[16] = {};
    bool any = false;
    for (uint32_t k = 0; k < i.extra_count; ++k) {
      const Ref& s = x.program.extra[i.extra + k];
      const uint64_t piece = x.value(s, l), bits = x.undefined_bits(s, l);
      memcpy(value + static_cast<int>(k) * part / 8, &piece, static_cast<size_t>(part / 8));
      memcpy(undefined + static_cast<int>(k) * part / 8, &bits, static_cast<size_t>(part / 8));
    }
    for (uint8_t b : undefined) any |= b != 0;
    memcpy(x.base[0] + d.off + l * d.width, value, d.width);
    if (any) {
      x.undef[d.off >> 7] |= 1u << l;
      memcpy(x.shadow + d.off + l * d.width, undefined, d.width);
    } else {
      x.undef[d.off >> 7] &= ~(1u << l);
    }
  }
}

Type part_type(Type t, size_t count) {
  const size_t bytes = static_cast<size_t>(bytes_of(t)) / count;
  return bytes == 8 ? Type::B64 : bytes == 4 ? Type::B32 : bytes == 2 ? Type::B16 : Type::B8;
}

void decode_mov(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  i.type = t;
  i.taint = Taint::Move;
  if (t == Type::Pred) {
    d.operands(i, t, {t});
    i.fn = mov_pred;
    return;
  }
  const AstOperand& to = d.operand(0);
  const AstOperand& from = d.operand(1);
  if (to.kind == AstOperand::Vector) {
    d.extra(i, to, part_type(t, to.items.size()), true);
    i.op[1] = d.source(from, t);
    i.fn = mov_unpack;
    return;
  }
  if (from.kind == AstOperand::Vector) {
    d.extra(i, from, part_type(t, from.items.size()), false);
    i.op[0] = d.destination(to, t);
    i.fn = mov_pack;
    return;
  }
  d.operands(i, t, {t});
  const int width = i.op[0].width;
  i.fn = width == 16 ? Handler(mov128) : width == 8 ? Handler(mov<uint64_t>) : Handler(mov<uint32_t>);
  if (width == 8 && i.op[1].width == 4) i.fn = integer_to_integer<uint32_t, uint64_t>;
}

// --- Address spaces ---

/// choice 0: to generic, 1: from generic.
void cvta(Exec& x, const Instr& i) {
  const uint64_t window = i.space == Space::Shared  ? kSharedWindow
                          : i.space == Space::Local ? kLocalWindow
                                                    : 0;
  const bool to = i.choice;
  const bool param = i.space == Space::Param;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint64_t v = x.value(i.op[1], l);
    if (param) {  // device function parameters live in local memory, kernel parameters in the rank's memory
      if (!to && v < kLocalWindowBytes) v += kLocalWindow;
    } else {
      v = to ? v - window : v + window;
    }
    x.set_value(i.op[0], l, v);
  }
  x.finish(i, 1);
}
Space space_of(const std::string& m) {
  if (m.rfind(".shared", 0) == 0) return Space::Shared;
  if (m == ".local") return Space::Local;
  if (m == ".param") return Space::Param;
  return Space::Global;
}
void decode_cvta(Decoder& d, Instr& i) {
  i.choice = d.has(".to");
  i.space = space_of(d.slot(1));
  const Type t = d.last_type();
  d.operands(i, t, {t});
  i.taint = Taint::Carry;
  i.fn = cvta;
}

void isspacep(Exec& x, const Instr& i) {
  Mask out = 0;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const uint64_t v = x.value(i.op[1], l);
    bool in = false;
    if (i.space == Space::Shared) {
      in = v - kSharedWindow < kSharedWindowBytes &&
           (i.choice || ((v - kSharedWindow) >> kCtaShift) == x.cta().cluster_rank);
    } else if (i.space == Space::Local) {
      in = v - kLocalWindow < kLocalWindowBytes;
    } else {
      const Region* r = x.m.global_region(v);
      in = r != nullptr && (i.space == Space::Global || r->read_only);
    }
    out |= static_cast<Mask>(in) << l;
  }
  x.set_predicate(i.op[0], out);
}
void decode_isspacep(Decoder& d, Instr& i) {
  i.space = space_of(d.slot(0));
  if (d.has(".const")) i.space = Space::Const;
  i.choice = d.has(".shared::cluster");
  d.operands(i, Type::Pred, {Type::U64});
  i.fn = isspacep;
}

/// The address in CTA b's shared memory that corresponds to a. choice 1: getctarank, the CTA that a belongs
/// to.
void mapa(Exec& x, const Instr& i) {
  const uint64_t window = i.space == Space::Generic ? kSharedWindow : 0;
  if (!i.choice) x.require_defined(i.op[2], "CTA rank");
  const size_t ctas = x.cta().cluster->ctas.size();
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const uint64_t address = x.value(i.op[1], l) - window;
    if (address >= kSharedWindowBytes)
      fail(ErrorKind::MemoryFault, format("lane %d: not a shared address", l));
    if (i.choice) {
      x.set_value(i.op[0], l, address >> kCtaShift);
      continue;
    }
    const uint64_t rank = x.value(i.op[2], l) & 0xFFFFFFFFu;
    if (rank >= ctas) {
      fail(ErrorKind::MemoryFault,
           format("mapa to CTA %llu of a cluster of %zu", static_cast<unsigned long long>(rank), ctas));
    }
    x.set_value(i.op[0], l, window + (rank << kCtaShift | (address & ((1u << kCtaShift) - 1))));
  }
  x.finish(i, i.choice ? 1 : 2);
}
void decode_mapa(Decoder& d, Instr& i) {
  i.choice = d.ast->opcode == "getctarank";
  i.space = d.slot(0).empty() ? Space::Generic : Space::SharedCluster;
  const Type t = d.last_type();
  if (i.choice) {
    d.operands(i, Type::U32, {t});
  } else {
    d.operands(i, t, {t, Type::U32});
  }
  i.fn = mapa;
}

constexpr const char* kCvt = "Data Movement and Conversion Instructions: cvt";
constexpr const char* kMov = "Data Movement and Conversion Instructions: mov";
#define INTEGERS ".u8|.s8|.u16|.s16|.u32|.s32|.u64|.s64"
#define FLOATS ".f16|.bf16|.f32|.f64"

const Form kForms[] = {
    {"cvt{.sat}(" INTEGERS ")(" INTEGERS ")", kCvt, decode_cvt},
    {"cvt(.rni|.rzi|.rmi|.rpi){.ftz}{.sat}(" INTEGERS ")(" FLOATS ")", kCvt, decode_cvt},
    {"cvt(.rn|.rz|.rm|.rp){.sat}(" FLOATS ")(" INTEGERS ")", kCvt, decode_cvt},
    {"cvt{.rn|.rz|.rm|.rp|.rni|.rzi|.rmi|.rpi}{.relu}{.ftz}{.sat}{.satfinite}(" FLOATS ")(" FLOATS ")", kCvt,
     decode_cvt},
    {"cvt(.rna|.rn|.rz){.satfinite}{.relu}(.tf32)(.f32)", kCvt, decode_cvt},
    {"cvt(.rn|.rz){.relu}{.satfinite}(.f16x2|.bf16x2)(.f32)", kCvt, decode_packed},
    {"cvt(.rn)(.satfinite){.relu}(.e4m3x2|.e5m2x2|.e2m1x2|.e2m3x2|.e3m2x2)(.f32|.f16x2)", kCvt,
     decode_packed},
    {"cvt(.rn){.relu}(.f16x2)(.e4m3x2|.e5m2x2|.e2m1x2|.e2m3x2|.e3m2x2)", kCvt, decode_packed},
    {"cvt(.rz|.rp){.satfinite}(.ue8m0x2)(.f32|.bf16x2)", kCvt, decode_packed},
    {"cvt(.rn)(.bf16x2)(.ue8m0x2)", kCvt, decode_packed},
    {"cvt(.pack)(.sat)(.u16|.s16|.u8|.s8)(.s32){.b32}", "Data Movement and Conversion Instructions: cvt.pack",
     decode_cvt_pack},
    {"mov(.pred|.b16|.b32|.b64|.b128|.u16|.u32|.u64|.s16|.s32|.s64|.f16|.bf16|.f32|.f64)", kMov, decode_mov},
    {"cvta{.to}(.shared::cta|.shared::cluster|.shared|.global|.const|.local|.param|.param::entry)(.u64)",
     "Data Movement and Conversion Instructions: cvta", decode_cvta},
    {"mapa{.shared::cluster}(.u32|.u64)", "Data Movement and Conversion Instructions: mapa", decode_mapa},
    {"getctarank{.shared::cluster}(.u32|.u64)", "Data Movement and Conversion Instructions: getctarank",
     decode_mapa},
    {"isspacep(.const|.global|.local|.shared::cta|.shared::cluster|.shared|.param)",
     "Data Movement and Conversion Instructions: isspacep", decode_isspacep},
};

}  // namespace

FormList convert_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
