// Logic, shifts and bit fields.
// Source: PTX ISA, "Logic and Shift Instructions", "Integer Arithmetic Instructions" (bit counting and bit
// fields), "Data Movement and Conversion Instructions: prmt".
#include <algorithm>
#include <type_traits>

#include "alu.hpp"

namespace megagen::emulator {
namespace {

template <class T>
struct And {
  static T apply(T a, T b) { return a & b; }
};
template <class T>
struct Or {
  static T apply(T a, T b) { return a | b; }
};
template <class T>
struct Xor {
  static T apply(T a, T b) { return a ^ b; }
};
template <class T>
struct Not {
  static T apply(T a) { return static_cast<T>(~a); }
};
template <class T>
struct Cnot {
  static T apply(T a) { return a == 0; }
};

#define PICK_BITS(handler, F, type)                     \
  bytes_of(type) == 2   ? Handler(handler<F, uint16_t>) \
  : bytes_of(type) == 8 ? Handler(handler<F, uint64_t>) \
                        : Handler(handler<F, uint32_t>)

enum PredicateOp : uint8_t { PredAnd, PredOr, PredXor, PredNot };

void predicate_logic(Exec& x, const Instr& i) {
  const Mask a = x.predicate(i.op[1]), ua = x.undefined(i.op[1]);
  if (i.choice == PredNot) {
    x.set_predicate(i.op[0], ~a);
    x.set_predicate_undefined(i.op[0], ua);
    return;
  }
  const Mask b = x.predicate(i.op[2]), ub = x.undefined(i.op[2]);
  Mask undefined = ua | ub;
  if (i.choice == PredAnd) undefined &= ~((~ua & ~a) | (~ub & ~b));
  if (i.choice == PredOr) undefined &= ~((~ua & a) | (~ub & b));
  x.set_predicate(i.op[0], i.choice == PredAnd ? a & b : i.choice == PredOr ? a | b : a ^ b);
  x.set_predicate_undefined(i.op[0], undefined);
}

void decode_logic(Decoder& d, Instr& i) {
  const std::string& op = d.ast->opcode;
  const Type t = d.last_type();
  i.type = t;
  if (t == Type::Pred) {
    if (op == "not") {
      d.operands(i, t, {t});
    } else {
      d.operands(i, t, {t, t});
    }
    i.choice = op == "and" ? PredAnd : op == "or" ? PredOr : op == "xor" ? PredXor : PredNot;
    i.fn = predicate_logic;
    return;
  }
  if (op == "not" || op == "cnot") {
    d.operands(i, t, {t});
    i.fn = op == "not" ? PICK_BITS(unary_of, Not, t) : PICK_BITS(unary_of, Cnot, t);
    i.taint = op == "not" ? Taint::Move : Taint::All;
    return;
  }
  d.operands(i, t, {t, t});
  i.fn = op == "and"  ? PICK_BITS(binary_of, And, t)
         : op == "or" ? PICK_BITS(binary_of, Or, t)
                      : PICK_BITS(binary_of, Xor, t);
  i.taint = op == "and" ? Taint::And : op == "or" ? Taint::Or : Taint::Xor;
}

void lop3(Exec& x, const Instr& i) {
  const auto table = static_cast<uint32_t>(i.imm);
  ternary<uint32_t, uint32_t, uint32_t, uint32_t>(x, i, [table](uint32_t a, uint32_t b, uint32_t c) {
    uint32_t out = 0;
    for (uint32_t k = 0; k < 8; ++k) {
      if (table >> k & 1) out |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    }
    return out;
  });
}
void decode_lop3(Decoder& d, Instr& i) {
  if (d.count() != 5 || d.operand(4).kind != AstOperand::Integer)
    d.unsupported("lop3 takes d, a, b, c and a constant table");
  i.op[0] = d.destination(d.operand(0), Type::B32);
  for (size_t k = 1; k < 4; ++k) i.op[k] = d.source(d.operand(k), Type::B32);
  i.imm = d.operand(4).value & 0xFF;
  i.fn = lop3;
  i.taint = Taint::Xor;
}

template <class T>
void shl(Exec& x, const Instr& i) {
  binary<T, T, uint32_t>(x, i,
                         [](T a, uint32_t n) { return n >= 8 * sizeof(T) ? T(0) : static_cast<T>(a << n); });
}
template <class T>
void shr(Exec& x, const Instr& i) {
  binary<T, T, uint32_t>(x, i, [](T a, uint32_t n) {
    if (n >= 8 * sizeof(T)) n = 8 * sizeof(T) - 1 + (std::is_signed_v<T> ? 0 : 1);
    return n >= 8 * sizeof(T) ? T(0) : static_cast<T>(a >> n);
  });
}
void decode_shift(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  i.type = t;
  d.operands(i, t, {t, Type::U32});
  const bool is_signed = t == Type::S16 || t == Type::S32 || t == Type::S64;
  const int bytes = bytes_of(t);
  if (d.ast->opcode == "shl") {
    i.fn = bytes == 2 ? Handler(shl<uint16_t>) : bytes == 8 ? Handler(shl<uint64_t>) : Handler(shl<uint32_t>);
    i.taint = Taint::ShiftLeft;
  } else {
    i.fn = is_signed ? (bytes == 2   ? Handler(shr<int16_t>)
                        : bytes == 8 ? Handler(shr<int64_t>)
                                     : Handler(shr<int32_t>))
                     : (bytes == 2   ? Handler(shr<uint16_t>)
                        : bytes == 8 ? Handler(shr<uint64_t>)
                                     : Handler(shr<uint32_t>));
    i.taint = Taint::ShiftRight;
  }
}

/// Funnel shift of b:a. choice bit 0: right, bit 1: wrap (else clamp).
void shf(Exec& x, const Instr& i) {
  const bool right = i.choice & 1, wrap = i.choice & 2;
  ternary<uint32_t, uint32_t, uint32_t, uint32_t>(x, i, [=](uint32_t a, uint32_t b, uint32_t c) {
    const uint32_t n = wrap ? c & 31 : c > 32 ? 32 : c;
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    return right ? static_cast<uint32_t>(n == 32 ? b : both >> n)
                 : static_cast<uint32_t>(n == 32 ? a : (both << n) >> 32);
  });
}
void decode_shf(Decoder& d, Instr& i) {
  d.operands(i, Type::B32, {Type::B32, Type::B32, Type::U32});
  i.choice = static_cast<uint8_t>(d.has(".r") | d.has(".wrap") << 1);
  i.fn = shf;
}

uint32_t permute(uint32_t a, uint32_t b, uint32_t c, int mode) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  const auto at = [&](uint32_t k) { return static_cast<uint32_t>(bytes >> (8 * (k & 7)) & 0xFF); };
  uint32_t out = 0;
  for (uint32_t k = 0; k < 4; ++k) {
    const uint32_t s = c & 3;
    uint32_t byte = 0;
    switch (mode) {
      case 0: {
        const uint32_t selector = c >> (4 * k) & 15;
        byte = at(selector & 7);
        if (selector & 8) byte = byte & 0x80 ? 0xFF : 0;  // replicate the sign
        break;
      }
      case 1:
        byte = at(s + k);
        break;  // .f4e
      case 2:
        byte = at(s - k + 8);
        break;  // .b4e
      case 3:
        byte = at(s);
        break;  // .rc8
      case 4:
        byte = at(k < s ? s : k);
        break;  // .ecl
      case 5:
        byte = at(k > s ? s : k);
        break;  // .ecr
      default:
        byte = at((s & 1) * 2 + (k & 1));
        break;  // .rc16
    }
    out |= byte << (8 * k);
  }
  return out;
}
void prmt(Exec& x, const Instr& i) {
  const int mode = i.choice;
  const Mask u = (x.undefined(i.op[1]) | x.undefined(i.op[2])) & x.mask & ~x.undefined(i.op[3]);
  uint32_t undefined[kLanes] = {};
  for (Mask rest = u; rest; rest &= rest - 1) {  // undefined bytes move along
    const int l = __builtin_ctz(rest);
    undefined[l] =
        permute(static_cast<uint32_t>(x.undefined_bits(i.op[1], l)),
                static_cast<uint32_t>(x.undefined_bits(i.op[2], l)), x.view<uint32_t>(i.op[3])[l], mode);
  }
  ternary<uint32_t, uint32_t, uint32_t, uint32_t>(
      x, i, [mode](uint32_t a, uint32_t b, uint32_t c) { return permute(a, b, c, mode); });
  for (Mask rest = u; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    x.set_undefined_bits(i.op[0], l, undefined[l]);
  }
}
void decode_prmt(Decoder& d, Instr& i) {
  static const char* const kModes[] = {"", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"};
  for (uint8_t k = 0; k < 7; ++k) {
    if (d.slot(1) == kModes[k]) i.choice = k;
  }
  d.operands(i, Type::B32, {Type::B32, Type::B32, Type::B32});
  i.fn = prmt;
}

template <class T>
void popc(Exec& x, const Instr& i) {
  unary<uint32_t, T>(x, i, [](T a) { return static_cast<uint32_t>(__builtin_popcountll(a)); });
}
template <class T>
void clz(Exec& x, const Instr& i) {
  unary<uint32_t, T>(x, i, [](T a) {
    return a == 0 ? static_cast<uint32_t>(8 * sizeof(T))
                  : static_cast<uint32_t>(__builtin_clzll(a)) - (64 - static_cast<uint32_t>(8 * sizeof(T)));
  });
}
void decode_count(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  d.operands(i, Type::U32, {t});
  const bool wide = bytes_of(t) == 8;
  i.fn = d.ast->opcode == "popc" ? (wide ? Handler(popc<uint64_t>) : Handler(popc<uint32_t>))
                                 : (wide ? Handler(clz<uint64_t>) : Handler(clz<uint32_t>));
}

template <class T>
void bfind(Exec& x, const Instr& i) {
  const bool shift = i.choice;
  unary<uint32_t, T>(x, i, [shift](T a) {
    using U = std::make_unsigned_t<T>;
    U v = static_cast<U>(std::is_signed_v<T> && a < 0 ? ~a : a);
    if (v == 0) return 0xFFFFFFFFu;
    const uint32_t top = 63 - static_cast<uint32_t>(__builtin_clzll(v));
    return shift ? static_cast<uint32_t>(8 * sizeof(T)) - 1 - top : top;
  });
}
void decode_bfind(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  i.choice = d.has(".shiftamt");
  d.operands(i, Type::U32, {t});
  i.fn = t == Type::U32   ? Handler(bfind<uint32_t>)
         : t == Type::S32 ? Handler(bfind<int32_t>)
         : t == Type::U64 ? Handler(bfind<uint64_t>)
                          : Handler(bfind<int64_t>);
}

/// The n-th set bit of mask from bit `base` on: upwards if n > 0, downwards if n < 0, bit `base` itself if n
/// = 0.
uint32_t find_nth_set(uint32_t mask, uint32_t base, int32_t n) {
  if (base > 31) return 0xFFFFFFFFu;
  if (n == 0) return mask >> base & 1 ? base : 0xFFFFFFFFu;
  int32_t left = n > 0 ? n : -n;
  for (int64_t bit = base; bit >= 0 && bit < 32; bit += n > 0 ? 1 : -1) {
    if (mask >> bit & 1 && --left == 0) return static_cast<uint32_t>(bit);
  }
  return 0xFFFFFFFFu;
}
void fns(Exec& x, const Instr& i) { ternary<uint32_t, uint32_t, uint32_t, int32_t>(x, i, find_nth_set); }
void decode_fns(Decoder& d, Instr& i) {
  d.operands(i, Type::B32, {Type::B32, Type::B32, Type::S32});
  i.fn = fns;
}

template <class T>
void brev(Exec& x, const Instr& i) {
  unary<T, T>(x, i, [](T a) {
    T out = 0;
    for (size_t k = 0; k < 8 * sizeof(T); ++k) out |= static_cast<T>((a >> k & 1) << (8 * sizeof(T) - 1 - k));
    return out;
  });
}
void decode_brev(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  d.operands(i, t, {t});
  i.fn = bytes_of(t) == 8 ? Handler(brev<uint64_t>) : Handler(brev<uint32_t>);
}

/// Position and length of a bit field. The ISA takes them from the low 8 bits; an H200 does so for 32-bit
/// values, but for 64-bit ones all bits count.
template <class T>
uint32_t field_operand(uint32_t v) {
  return sizeof(T) == 8 ? std::min(v, 64u) : v & 0xFF;
}

template <class T>
void bfe(Exec& x, const Instr& i) {
  ternary<T, T, uint32_t, uint32_t>(x, i, [](T a, uint32_t b, uint32_t c) {
    const uint32_t msb = 8 * sizeof(T) - 1, position = field_operand<T>(b), length = field_operand<T>(c);
    using U = std::make_unsigned_t<T>;
    const U v = static_cast<U>(a);
    U sign = 0;
    if (std::is_signed_v<T> && length) sign = v >> std::min(position + length - 1, msb) & 1;
    U out = 0;
    if (position <= msb) out = v >> position;
    const uint32_t kept = position > msb ? 0 : std::min(length, msb - position + 1);
    if (kept <= msb) {
      out &= (U{1} << kept) - 1;
      if (sign) out |= ~U{0} << kept;
    }
    return static_cast<T>(out);
  });
}
void decode_bfe(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  d.operands(i, t, {t, Type::U32, Type::U32});
  i.fn = t == Type::U32   ? Handler(bfe<uint32_t>)
         : t == Type::S32 ? Handler(bfe<int32_t>)
         : t == Type::U64 ? Handler(bfe<uint64_t>)
                          : Handler(bfe<int64_t>);
}

template <class T>
void bfi(Exec& x, const Instr& i) {
  const auto a = x.view<T>(i.op[1]);
  const auto b = x.view<T>(i.op[2]);
  const auto c = x.view<uint32_t>(i.op[3]);
  const auto e = x.view<uint32_t>(i.op[4]);
  T out[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    const uint32_t position = field_operand<T>(c[l]), length = field_operand<T>(e[l]), bits = 8 * sizeof(T);
    T field = length >= bits ? static_cast<T>(~T{0}) : static_cast<T>((T{1} << length) - 1);
    field = position >= bits ? T{0} : static_cast<T>(field << position);
    out[l] = static_cast<T>((b[l] & ~field) | (position >= bits ? 0 : (a[l] << position) & field));
  }
  x.store(i.op[0], out);
  x.finish(i, 4);
}
void decode_bfi(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  d.operands(i, t, {t, t, Type::U32, Type::U32});
  i.fn = bytes_of(t) == 8 ? Handler(bfi<uint64_t>) : Handler(bfi<uint32_t>);
}

/// choice 1: wrap, else clamp.
void bmsk(Exec& x, const Instr& i) {
  const bool wrap = i.choice;
  binary<uint32_t, uint32_t, uint32_t>(x, i, [wrap](uint32_t a, uint32_t b) {
    const uint32_t position = wrap ? a & 31 : a, width = wrap ? b & 31 : b;
    if (position >= 32 || width == 0) return 0u;
    return (width >= 32 ? ~0u : (1u << width) - 1) << position;
  });
}
void decode_bmsk(Decoder& d, Instr& i) {
  d.operands(i, Type::B32, {Type::U32, Type::U32});
  i.choice = d.has(".wrap");
  i.fn = bmsk;
}

template <bool kSigned>
void szext(Exec& x, const Instr& i) {
  const bool wrap = i.choice;
  binary<uint32_t, uint32_t, uint32_t>(x, i, [wrap](uint32_t a, uint32_t b) {
    const uint32_t n = wrap ? b & 31 : b;
    if (n >= 32) return a;
    const uint32_t field = a & ((1u << n) - 1);
    return kSigned && n && (field >> (n - 1) & 1) ? field | ~0u << n : field;
  });
}
void decode_szext(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  d.operands(i, t, {t, Type::U32});
  i.choice = d.has(".wrap");
  i.fn = t == Type::S32 ? szext<true> : szext<false>;
}

constexpr const char* kLogic = "Logic and Shift Instructions";
constexpr const char* kBits = "Integer Arithmetic Instructions";

const Form kForms[] = {
    {"and(.pred|.b16|.b32|.b64)", kLogic, decode_logic},
    {"or(.pred|.b16|.b32|.b64)", kLogic, decode_logic},
    {"xor(.pred|.b16|.b32|.b64)", kLogic, decode_logic},
    {"not(.pred|.b16|.b32|.b64)", kLogic, decode_logic},
    {"cnot(.b16|.b32|.b64)", kLogic, decode_logic},
    {"lop3(.b32)", kLogic, decode_lop3},
    {"shl(.b16|.b32|.b64)", kLogic, decode_shift},
    {"shr(.b16|.b32|.b64|.u16|.u32|.u64|.s16|.s32|.s64)", kLogic, decode_shift},
    {"shf(.l|.r)(.clamp|.wrap)(.b32)", kLogic, decode_shf},
    {"prmt(.b32){.f4e|.b4e|.rc8|.ecl|.ecr|.rc16}", "Data Movement and Conversion Instructions: prmt",
     decode_prmt},
    {"popc(.b32|.b64)", kBits, decode_count},
    {"clz(.b32|.b64)", kBits, decode_count},
    {"bfind{.shiftamt}(.u32|.u64|.s32|.s64)", kBits, decode_bfind},
    {"fns(.b32)", kBits, decode_fns},
    {"brev(.b32|.b64)", kBits, decode_brev},
    {"bfe(.u32|.u64|.s32|.s64)", kBits, decode_bfe},
    {"bfi(.b32|.b64)", kBits, decode_bfi},
    {"bmsk(.clamp|.wrap)(.b32)", kBits, decode_bmsk},
    {"szext(.clamp|.wrap)(.u32|.s32)", kBits, decode_szext},
};

}  // namespace

FormList bit_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
