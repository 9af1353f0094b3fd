// Integer arithmetic, comparison and selection.
// Source: PTX ISA, "Integer Arithmetic Instructions", "Extended-Precision Integer Arithmetic Instructions",
// "Comparison and Selection Instructions".
#include <type_traits>

#include "alu.hpp"

namespace megagen::emulator {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;
/// Arithmetic in at least 32 unsigned bits: wraps, and isn't promoted to a signed type.
template <class T>
using Wrapping = std::conditional_t<sizeof(T) < 4, uint32_t, Unsigned<T>>;

template <class T>
T high(T a, T b) {
  if constexpr (sizeof(T) == 8) {
    if constexpr (std::is_signed_v<T>) {
      return static_cast<T>((static_cast<__int128>(a) * b) >> 64);
    } else {
      return static_cast<T>((static_cast<unsigned __int128>(a) * b) >> 64);
    }
  } else {
    using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return static_cast<T>((static_cast<Wide>(a) * b) >> (8 * sizeof(T)));
  }
}

template <class T>
struct Add {
  static T apply(T a, T b) { return static_cast<T>(Wrapping<T>(a) + Wrapping<T>(b)); }
};
template <class T>
struct Sub {
  static T apply(T a, T b) { return static_cast<T>(Wrapping<T>(a) - Wrapping<T>(b)); }
};
template <class T>
struct MulLo {
  static T apply(T a, T b) { return static_cast<T>(Wrapping<T>(a) * Wrapping<T>(b)); }
};
template <class T>
struct MulHi {
  static T apply(T a, T b) { return high(a, b); }
};
template <class T>
struct MadLo {
  static T apply(T a, T b, T c) { return static_cast<T>(Wrapping<T>(a) * Wrapping<T>(b) + Wrapping<T>(c)); }
};
template <class T>
struct MadHi {
  static T apply(T a, T b, T c) { return Add<T>::apply(high(a, b), c); }
};
// Division by zero gives all ones; the most negative number divided by -1 gives itself.
template <class T>
struct Div {
  static T apply(T a, T b) {
    if (b == 0) return static_cast<T>(-1);
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Sub<T>::apply(0, a);
    return static_cast<T>(a / b);
  }
};
template <class T>
struct Rem {
  static T apply(T a, T b) {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
  }
};
template <class T>
struct Min {
  static T apply(T a, T b) { return a < b ? a : b; }
};
template <class T>
struct Max {
  static T apply(T a, T b) { return a < b ? b : a; }
};
template <class T>
struct Abs {
  static T apply(T a) { return a < 0 ? Sub<T>::apply(0, a) : a; }
};
template <class T>
struct Neg {
  static T apply(T a) { return Sub<T>::apply(0, a); }
};
template <class T>
struct Sad {
  static T apply(T a, T b, T c) {
    return Add<T>::apply(c, a < b ? Sub<T>::apply(b, a) : Sub<T>::apply(a, b));
  }
};

int32_t saturate(int64_t v) {
  return static_cast<int32_t>(v > INT32_MAX ? INT32_MAX : v < INT32_MIN ? INT32_MIN : v);
}

void simple(Decoder& d, Instr& i, Handler handler, int sources, Taint taint) {
  const Type t = d.last_type();
  i.type = t;
  if (!handler) d.unsupported("this type isn't implemented");
  if (sources == 1) d.operands(i, t, {t});
  if (sources == 2) d.operands(i, t, {t, t});
  if (sources == 3) d.operands(i, t, {t, t, t});
  i.fn = handler;
  i.taint = taint;
}

void packed16_add(Exec& x, const Instr& i) {
  binary<uint32_t, uint32_t, uint32_t>(x, i, [](uint32_t a, uint32_t b) {
    return ((a + b) & 0xFFFF) | ((a >> 16) + (b >> 16)) << 16;
  });
}

void decode_add(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  Handler h = t == Type::U16x2 || t == Type::S16x2 ? Handler(packed16_add)
                                                   : MEGAGEN_PICK_INTEGER(binary_of, Add, t);
  if (d.has(".sat"))
    h = [](Exec& x, const Instr& j) {
      binary<int32_t, int32_t, int32_t>(x, j, [](int32_t a, int32_t b) { return saturate(int64_t{a} + b); });
    };
  simple(d, i, h, 2, Taint::Carry);
}
void decode_sub(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  Handler h = MEGAGEN_PICK_INTEGER(binary_of, Sub, t);
  if (d.has(".sat"))
    h = [](Exec& x, const Instr& j) {
      binary<int32_t, int32_t, int32_t>(x, j, [](int32_t a, int32_t b) { return saturate(int64_t{a} - b); });
    };
  simple(d, i, h, 2, Taint::Carry);
}

template <class D, class S>
void mul_wide(Exec& x, const Instr& i) {
  binary<D, S, S>(x, i, [](S a, S b) { return static_cast<D>(static_cast<D>(a) * static_cast<D>(b)); });
}
template <class D, class S>
void mad_wide(Exec& x, const Instr& i) {
  ternary<D, S, S, D>(x, i, [](S a, S b, D c) {
    return static_cast<D>(Wrapping<D>(static_cast<D>(a) * static_cast<D>(b)) + Wrapping<D>(c));
  });
}

Type widened(Type t) {
  return t == Type::U16 ? Type::U32 : t == Type::S16 ? Type::S32 : t == Type::U32 ? Type::U64 : Type::S64;
}

void decode_mul(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  if (!d.has(".wide")) {
    simple(
        d, i,
        d.has(".hi") ? MEGAGEN_PICK_INTEGER(binary_of, MulHi, t) : MEGAGEN_PICK_INTEGER(binary_of, MulLo, t),
        2, d.has(".hi") ? Taint::All : Taint::Carry);
    return;
  }
  i.type = t;
  d.operands(i, widened(t), {t, t});
  i.fn = t == Type::U16   ? Handler(mul_wide<uint32_t, uint16_t>)
         : t == Type::S16 ? Handler(mul_wide<int32_t, int16_t>)
         : t == Type::U32 ? Handler(mul_wide<uint64_t, uint32_t>)
                          : Handler(mul_wide<int64_t, int32_t>);
}

void decode_mad(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  if (d.has(".sat")) {
    i.type = t;
    d.operands(i, t, {t, t, t});
    i.fn = [](Exec& x, const Instr& j) {
      ternary<int32_t, int32_t, int32_t, int32_t>(
          x, j, [](int32_t a, int32_t b, int32_t c) { return saturate(int64_t{high(a, b)} + c); });
    };
    return;
  }
  if (!d.has(".wide")) {
    simple(d, i,
           d.has(".hi") ? MEGAGEN_PICK_INTEGER(ternary_of, MadHi, t)
                        : MEGAGEN_PICK_INTEGER(ternary_of, MadLo, t),
           3, d.has(".hi") ? Taint::All : Taint::Carry);
    return;
  }
  i.type = t;
  d.operands(i, widened(t), {t, t, widened(t)});
  i.fn = t == Type::U16   ? Handler(mad_wide<uint32_t, uint16_t>)
         : t == Type::S16 ? Handler(mad_wide<int32_t, int16_t>)
         : t == Type::U32 ? Handler(mad_wide<uint64_t, uint32_t>)
                          : Handler(mad_wide<int64_t, int32_t>);
}

template <class T>
T mul24(T a, T b, bool hi) {
  const int64_t x = std::is_signed_v<T> ? static_cast<int32_t>(static_cast<uint32_t>(a) << 8) >> 8
                                        : static_cast<int64_t>(a & 0xFFFFFF);
  const int64_t y = std::is_signed_v<T> ? static_cast<int32_t>(static_cast<uint32_t>(b) << 8) >> 8
                                        : static_cast<int64_t>(b & 0xFFFFFF);
  return static_cast<T>((x * y) >> (hi ? 16 : 0));
}
template <class T>
struct Mul24Lo {
  static T apply(T a, T b) { return mul24(a, b, false); }
};
template <class T>
struct Mul24Hi {
  static T apply(T a, T b) { return mul24(a, b, true); }
};
template <class T>
struct Mad24Lo {
  static T apply(T a, T b, T c) { return Add<T>::apply(mul24(a, b, false), c); }
};
template <class T>
struct Mad24Hi {
  static T apply(T a, T b, T c) { return Add<T>::apply(mul24(a, b, true), c); }
};

void decode_mul24(Decoder& d, Instr& i) {
  const bool is_signed = d.last_type() == Type::S32, hi = d.has(".hi");
  simple(d, i,
         is_signed ? (hi ? Handler(binary_of<Mul24Hi, int32_t>) : Handler(binary_of<Mul24Lo, int32_t>))
                   : (hi ? Handler(binary_of<Mul24Hi, uint32_t>) : Handler(binary_of<Mul24Lo, uint32_t>)),
         2, Taint::All);
}
void decode_mad24(Decoder& d, Instr& i) {
  const bool is_signed = d.last_type() == Type::S32, hi = d.has(".hi");
  simple(d, i,
         is_signed ? (hi ? Handler(ternary_of<Mad24Hi, int32_t>) : Handler(ternary_of<Mad24Lo, int32_t>))
                   : (hi ? Handler(ternary_of<Mad24Hi, uint32_t>) : Handler(ternary_of<Mad24Lo, uint32_t>)),
         3, Taint::All);
}

#define DECODE_BINARY(name, F, taint)                                          \
  void name(Decoder& d, Instr& i) {                                            \
    simple(d, i, MEGAGEN_PICK_INTEGER(binary_of, F, d.last_type()), 2, taint); \
  }
DECODE_BINARY(decode_div, Div, Taint::All)
DECODE_BINARY(decode_rem, Rem, Taint::All)

template <bool kMax, class T>
void packed16_extremum(Exec& x, const Instr& i) {
  binary<uint32_t, uint32_t, uint32_t>(x, i, [](uint32_t a, uint32_t b) {
    const auto pick = [](T p, T q) {
      return static_cast<uint16_t>(kMax ? Max<T>::apply(p, q) : Min<T>::apply(p, q));
    };
    return pick(static_cast<T>(a), static_cast<T>(b)) |
           static_cast<uint32_t>(pick(static_cast<T>(a >> 16), static_cast<T>(b >> 16))) << 16;
  });
}

void decode_extremum(Decoder& d, Instr& i, bool maximum) {
  const Type t = d.last_type();
  Handler h = maximum ? MEGAGEN_PICK_INTEGER(binary_of, Max, t) : MEGAGEN_PICK_INTEGER(binary_of, Min, t);
  if (t == Type::U16x2) h = maximum ? packed16_extremum<true, uint16_t> : packed16_extremum<false, uint16_t>;
  if (t == Type::S16x2) h = maximum ? packed16_extremum<true, int16_t> : packed16_extremum<false, int16_t>;
  if (d.has(".relu")) {
    if (t != Type::S32) d.unsupported(".relu with this type");
    h = maximum ? Handler([](Exec& x, const Instr& j) {
      binary<int32_t, int32_t, int32_t>(x, j,
                                        [](int32_t a, int32_t b) { return std::max(0, std::max(a, b)); });
    })
                : Handler([](Exec& x, const Instr& j) {
                    binary<int32_t, int32_t, int32_t>(
                        x, j, [](int32_t a, int32_t b) { return std::max(0, std::min(a, b)); });
                  });
  }
  simple(d, i, h, 2, Taint::All);
}
void decode_max(Decoder& d, Instr& i) { decode_extremum(d, i, true); }
void decode_min(Decoder& d, Instr& i) { decode_extremum(d, i, false); }
void decode_abs(Decoder& d, Instr& i) {
  simple(d, i, MEGAGEN_PICK_INTEGER(unary_of, Abs, d.last_type()), 1, Taint::All);
}
void decode_neg(Decoder& d, Instr& i) {
  simple(d, i, MEGAGEN_PICK_INTEGER(unary_of, Neg, d.last_type()), 1, Taint::Carry);
}
void decode_sad(Decoder& d, Instr& i) {
  simple(d, i, MEGAGEN_PICK_INTEGER(ternary_of, Sad, d.last_type()), 3, Taint::All);
}

// --- Extended precision: choice bit 0 reads the carry, bit 1 writes it ---

template <class T, bool kSubtract>
void with_carry(Exec& x, const Instr& i, T a, T b, int l, Mask& carry_out, T* out) {
  using Wide = unsigned __int128;
  const bool carry_in = (i.choice & 1) && (x.w.carry >> l & 1);
  const Wide sum = kSubtract ? static_cast<Wide>(a) - b - carry_in : static_cast<Wide>(a) + b + carry_in;
  out[l] = static_cast<T>(sum);
  if (sum >> (8 * sizeof(T)) & 1) carry_out |= 1u << l;
}

template <class T, bool kSubtract>
void carry_chain(Exec& x, const Instr& i) {
  T out[kLanes];
  Mask carry = 0;
  const auto a = x.view<T>(i.op[1]);
  const auto b = x.view<T>(i.op[2]);
  for (int l = 0; l < kLanes; ++l) with_carry<T, kSubtract>(x, i, a[l], b[l], l, carry, out);
  x.store(i.op[0], out);
  if (i.choice & 2) x.w.carry = (x.w.carry & ~x.mask) | (carry & x.mask);
  x.finish(i, 2);
}

template <class T, bool kHigh>
void mad_carry(Exec& x, const Instr& i) {
  T out[kLanes];
  Mask carry = 0;
  const auto a = x.view<T>(i.op[1]);
  const auto b = x.view<T>(i.op[2]);
  const auto c = x.view<T>(i.op[3]);
  for (int l = 0; l < kLanes; ++l) {
    const T product = kHigh ? high(a[l], b[l]) : MulLo<T>::apply(a[l], b[l]);
    with_carry<std::make_unsigned_t<T>, false>(x, i, static_cast<std::make_unsigned_t<T>>(product),
                                               static_cast<std::make_unsigned_t<T>>(c[l]), l, carry,
                                               reinterpret_cast<std::make_unsigned_t<T>*>(out));
  }
  x.store(i.op[0], out);
  if (i.choice & 2) x.w.carry = (x.w.carry & ~x.mask) | (carry & x.mask);
  x.finish(i, 3);
}

void decode_carry(Decoder& d, Instr& i, bool reads, bool writes, bool subtract) {
  const bool wide = bytes_of(d.last_type()) == 8;
  i.choice = static_cast<uint8_t>(reads | writes << 1);
  simple(d, i,
         subtract ? (wide ? Handler(carry_chain<uint64_t, true>) : Handler(carry_chain<uint32_t, true>))
                  : (wide ? Handler(carry_chain<uint64_t, false>) : Handler(carry_chain<uint32_t, false>)),
         2, Taint::All);
}
void decode_add_cc(Decoder& d, Instr& i) { decode_carry(d, i, false, true, false); }
void decode_addc(Decoder& d, Instr& i) { decode_carry(d, i, true, d.has(".cc"), false); }
void decode_sub_cc(Decoder& d, Instr& i) { decode_carry(d, i, false, true, true); }
void decode_subc(Decoder& d, Instr& i) { decode_carry(d, i, true, d.has(".cc"), true); }
void decode_mad_carry(Decoder& d, Instr& i, bool reads, bool writes) {
  i.choice = static_cast<uint8_t>(reads | writes << 1);
  const Type t = d.last_type();
  const bool hi = d.has(".hi");
  Handler h = t == Type::U32 ? (hi ? Handler(mad_carry<uint32_t, true>) : Handler(mad_carry<uint32_t, false>))
              : t == Type::S32 ? (hi ? Handler(mad_carry<int32_t, true>) : Handler(mad_carry<int32_t, false>))
              : t == Type::U64
                  ? (hi ? Handler(mad_carry<uint64_t, true>) : Handler(mad_carry<uint64_t, false>))
                  : (hi ? Handler(mad_carry<int64_t, true>) : Handler(mad_carry<int64_t, false>));
  simple(d, i, h, 3, Taint::All);
}
void decode_mad_cc(Decoder& d, Instr& i) { decode_mad_carry(d, i, false, true); }
void decode_madc(Decoder& d, Instr& i) { decode_mad_carry(d, i, true, d.has(".cc")); }

// --- Dot products ---

int32_t element(uint32_t word, int index, int bits, bool is_signed) {
  const uint32_t v = word >> (index * bits) & ((1u << bits) - 1);
  return is_signed ? static_cast<int32_t>(v << (32 - bits)) >> (32 - bits) : static_cast<int32_t>(v);
}

void dp4a(Exec& x, const Instr& i) {
  const bool sa = i.type == Type::S32, sb = i.type2 == Type::S32;
  ternary<uint32_t, uint32_t, uint32_t, uint32_t>(x, i, [=](uint32_t a, uint32_t b, uint32_t c) {
    for (int k = 0; k < 4; ++k) c += static_cast<uint32_t>(element(a, k, 8, sa) * element(b, k, 8, sb));
    return c;
  });
}
void dp2a(Exec& x, const Instr& i) {
  const bool sa = i.type == Type::S32, sb = i.type2 == Type::S32;
  const int first = i.choice ? 2 : 0;
  ternary<uint32_t, uint32_t, uint32_t, uint32_t>(x, i, [=](uint32_t a, uint32_t b, uint32_t c) {
    for (int k = 0; k < 2; ++k)
      c += static_cast<uint32_t>(element(a, k, 16, sa) * element(b, first + k, 8, sb));
    return c;
  });
}
void decode_dot(Decoder& d, Instr& i) {
  d.operands(i, Type::U32, {Type::U32, Type::U32, Type::U32});
  const size_t n = d.matched.size();
  i.type = d.slot_type(n - 2);
  i.type2 = d.slot_type(n - 1);
  i.choice = d.has(".hi");
  i.fn = d.ast->opcode == "dp4a" ? dp4a : dp2a;
}

// --- Comparison and selection ---

enum Compare : uint8_t { Eq, Ne, Lt, Le, Gt, Ge };
enum BoolOp : uint8_t { NoBool, BoolAnd, BoolOr, BoolXor };

template <class T, class F>
Mask lanes_where(Exec& x, const Instr& i, F f) {
  const auto a = x.view<T>(i.op[1]);
  const auto b = x.view<T>(i.op[2]);
  Mask out = 0;
  for (int l = 0; l < kLanes; ++l) out |= static_cast<Mask>(f(a[l], b[l])) << l;
  return out;
}

template <class T>
Mask compare(Exec& x, const Instr& i) {
  switch (i.choice) {
    case Eq:
      return lanes_where<T>(x, i, [](T a, T b) { return a == b; });
    case Ne:
      return lanes_where<T>(x, i, [](T a, T b) { return a != b; });
    case Lt:
      return lanes_where<T>(x, i, [](T a, T b) { return a < b; });
    case Le:
      return lanes_where<T>(x, i, [](T a, T b) { return a <= b; });
    case Gt:
      return lanes_where<T>(x, i, [](T a, T b) { return a > b; });
    default:
      return lanes_where<T>(x, i, [](T a, T b) { return a >= b; });
  }
}

/// setp: op[0] and op[4] are p and q, op[3] the predicate combined by `flags`.
template <class T>
void setp(Exec& x, const Instr& i) {
  set_predicates(x, i, compare<T>(x, i));
}

template <class T, class D>
void set(Exec& x, const Instr& i) {
  Mask r = compare<T>(x, i);
  if (i.flags) r = combine(i.flags, r, x.predicate(i.op[3]));
  D out[kLanes];
  const D yes = std::is_same_v<D, float> ? static_cast<D>(1) : static_cast<D>(-1);
  for (int l = 0; l < kLanes; ++l) out[l] = r >> l & 1 ? yes : D(0);
  x.store(i.op[0], out);
  x.finish(i, i.flags ? 3 : 2);
}

int compare_of(const std::string& m, bool& is_unsigned) {
  static const char* const kNames[] = {".eq", ".ne", ".lt", ".le", ".gt", ".ge"};
  for (int k = 0; k < 6; ++k) {
    if (m == kNames[k]) return k;
  }
  is_unsigned = true;
  return m == ".lo" ? Lt : m == ".ls" ? Le : m == ".hi" ? Gt : Ge;
}

void decode_setp(Decoder& d, Instr& i) {
  Type t = d.last_type();
  bool is_unsigned = false;
  i.choice = static_cast<uint8_t>(compare_of(d.slot(0), is_unsigned));
  if (t == Type::B16) t = Type::U16;
  if (t == Type::B32) t = Type::U32;
  if (t == Type::B64) t = Type::U64;
  i.type = t;
  decode_compare_operands(d, i, d.slot(1), t);
  i.fn = t == Type::U16   ? Handler(setp<uint16_t>)
         : t == Type::S16 ? Handler(setp<int16_t>)
         : t == Type::U32 ? Handler(setp<uint32_t>)
         : t == Type::S32 ? Handler(setp<int32_t>)
         : t == Type::U64 ? Handler(setp<uint64_t>)
                          : Handler(setp<int64_t>);
}

template <class D>
Handler set_handler(Type t) {
  return t == Type::U16 || t == Type::B16   ? Handler(set<uint16_t, D>)
         : t == Type::S16                   ? Handler(set<int16_t, D>)
         : t == Type::U32 || t == Type::B32 ? Handler(set<uint32_t, D>)
         : t == Type::S32                   ? Handler(set<int32_t, D>)
         : t == Type::U64 || t == Type::B64 ? Handler(set<uint64_t, D>)
                                            : Handler(set<int64_t, D>);
}

void decode_set(Decoder& d, Instr& i) {
  bool is_unsigned = false;
  i.choice = static_cast<uint8_t>(compare_of(d.slot(0), is_unsigned));
  const Type t = d.last_type(), to = d.slot_type(d.matched.size() - 2);
  i.type = t;
  if (!d.slot(1).empty()) {
    i.flags = bool_op(d.slot(1));
    d.operands(i, to, {t, t, Type::Pred});
  } else {
    d.operands(i, to, {t, t});
  }
  i.fn = to == Type::F32 ? set_handler<float>(t) : set_handler<uint32_t>(t);
}

template <class T>
void selp(Exec& x, const Instr& i) {
  const auto a = x.view<T>(i.op[1]);
  const auto b = x.view<T>(i.op[2]);
  const Mask p = x.predicate(i.op[3]);
  T out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = p >> l & 1 ? a[l] : b[l];
  x.store(i.op[0], out);
  x.finish(i, 3);
}
void decode_selp(Decoder& d, Instr& i) {
  const Type t = d.last_type();
  i.type = t;
  d.operands(i, t, {t, t, Type::Pred});
  i.taint = Taint::Select;
  i.fn = bytes_of(t) == 8   ? Handler(selp<uint64_t>)
         : bytes_of(t) == 2 ? Handler(selp<uint16_t>)
                            : Handler(selp<uint32_t>);
}

template <class T, class C>
void slct(Exec& x, const Instr& i) {
  ternary<T, T, T, C>(x, i, [](T a, T b, C c) { return c >= 0 ? a : b; });
}
void decode_slct(Decoder& d, Instr& i) {
  const Type c = d.last_type(), t = d.slot_type(d.matched.size() - 2);
  d.operands(i, t, {t, t, c});
  const bool f = c == Type::F32;
  i.fn = bytes_of(t) == 8   ? (f ? Handler(slct<uint64_t, float>) : Handler(slct<uint64_t, int32_t>))
         : bytes_of(t) == 2 ? (f ? Handler(slct<uint16_t, float>) : Handler(slct<uint16_t, int32_t>))
                            : (f ? Handler(slct<uint32_t, float>) : Handler(slct<uint32_t, int32_t>));
}

constexpr const char* kInteger = "Integer Arithmetic Instructions";
constexpr const char* kExtended = "Extended-Precision Integer Arithmetic Instructions";
constexpr const char* kCompare = "Comparison and Selection Instructions";
#define ALL_INTEGERS ".u16|.s16|.u32|.s32|.u64|.s64"

const Form kForms[] = {
    {"add(" ALL_INTEGERS "|.u16x2|.s16x2)", kInteger, decode_add},
    {"add(.sat)(.s32)", kInteger, decode_add},
    {"sub(" ALL_INTEGERS ")", kInteger, decode_sub},
    {"sub(.sat)(.s32)", kInteger, decode_sub},
    {"mul(.hi|.lo)(" ALL_INTEGERS ")", kInteger, decode_mul},
    {"mul(.wide)(.u16|.s16|.u32|.s32)", kInteger, decode_mul},
    {"mad(.hi|.lo)(" ALL_INTEGERS ")", kInteger, decode_mad},
    {"mad(.wide)(.u16|.s16|.u32|.s32)", kInteger, decode_mad},
    {"mad(.hi)(.sat)(.s32)", kInteger, decode_mad},
    {"mul24(.hi|.lo)(.u32|.s32)", kInteger, decode_mul24},
    {"mad24(.hi|.lo)(.u32|.s32)", kInteger, decode_mad24},
    {"div(" ALL_INTEGERS ")", kInteger, decode_div},
    {"rem(" ALL_INTEGERS ")", kInteger, decode_rem},
    {"max(" ALL_INTEGERS "|.u16x2|.s16x2)", kInteger, decode_max},
    {"max(.relu)(.s32)", kInteger, decode_max},
    {"min(" ALL_INTEGERS "|.u16x2|.s16x2)", kInteger, decode_min},
    {"min(.relu)(.s32)", kInteger, decode_min},
    {"abs(.s16|.s32|.s64)", kInteger, decode_abs},
    {"neg(.s16|.s32|.s64)", kInteger, decode_neg},
    {"sad(" ALL_INTEGERS ")", kInteger, decode_sad},
    {"dp4a(.u32|.s32)(.u32|.s32)", kInteger, decode_dot},
    {"dp2a(.lo|.hi)(.u32|.s32)(.u32|.s32)", kInteger, decode_dot},
    {"add(.cc)(.u32|.s32|.u64|.s64)", kExtended, decode_add_cc},
    {"addc{.cc}(.u32|.s32|.u64|.s64)", kExtended, decode_addc},
    {"sub(.cc)(.u32|.s32|.u64|.s64)", kExtended, decode_sub_cc},
    {"subc{.cc}(.u32|.s32|.u64|.s64)", kExtended, decode_subc},
    {"mad(.hi|.lo)(.cc)(.u32|.s32|.u64|.s64)", kExtended, decode_mad_cc},
    {"madc(.hi|.lo){.cc}(.u32|.s32|.u64|.s64)", kExtended, decode_madc},
    {"setp(.eq|.ne|.lt|.le|.gt|.ge|.lo|.ls|.hi|.hs){.and|.or|.xor}(.b16|.b32|.b64|" ALL_INTEGERS ")",
     kCompare, decode_setp},
    {"set(.eq|.ne|.lt|.le|.gt|.ge|.lo|.ls|.hi|.hs){.and|.or|.xor}(.u32|.s32|.f32)(.b16|.b32|."
     "b64|" ALL_INTEGERS ")",
     kCompare, decode_set},
    {"selp(.b16|.b32|.b64|" ALL_INTEGERS "|.f32|.f64)", kCompare, decode_selp},
    {"slct(.b16|.b32|.b64|" ALL_INTEGERS "|.f32|.f64)(.s32)", kCompare, decode_slct},
    {"slct{.ftz}(.b16|.b32|.b64|" ALL_INTEGERS "|.f32|.f64)(.f32)", kCompare, decode_slct},
};

}  // namespace

FormList integer_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
