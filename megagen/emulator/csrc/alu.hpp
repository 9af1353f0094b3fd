// Shapes of register-to-register handlers. A functor computes one lane; all 32 lanes are computed, active
// ones stored.
#pragma once

#include "forms.hpp"
#include "machine.hpp"

namespace megagen::emulator {

template <class D, class A, class F>
void unary(Exec& x, const Instr& i, F f) {
  D out[kLanes];
  const auto a = x.view<A>(i.op[1]);
  for (int l = 0; l < kLanes; ++l) out[l] = f(a[l]);
  x.finish(i, 1);  // looks at sources that the store may overwrite
  x.store(i.op[0], out);
}

template <class D, class A, class B, class F>
void binary(Exec& x, const Instr& i, F f) {
  D out[kLanes];
  const auto a = x.view<A>(i.op[1]);
  const auto b = x.view<B>(i.op[2]);
  for (int l = 0; l < kLanes; ++l) out[l] = f(a[l], b[l]);
  x.finish(i, 2);  // looks at sources that the store may overwrite
  x.store(i.op[0], out);
}

template <class D, class A, class B, class C, class F>
void ternary(Exec& x, const Instr& i, F f) {
  D out[kLanes];
  const auto a = x.view<A>(i.op[1]);
  const auto b = x.view<B>(i.op[2]);
  const auto c = x.view<C>(i.op[3]);
  for (int l = 0; l < kLanes; ++l) out[l] = f(a[l], b[l], c[l]);
  x.finish(i, 3);  // looks at sources that the store may overwrite
  x.store(i.op[0], out);
}

/// Handlers from a functor type `F<T>` with a static `apply`.
template <template <class> class F, class T>
void unary_of(Exec& x, const Instr& i) {
  unary<T, T>(x, i, F<T>::apply);
}
template <template <class> class F, class T>
void binary_of(Exec& x, const Instr& i) {
  binary<T, T, T>(x, i, F<T>::apply);
}
template <template <class> class F, class T>
void ternary_of(Exec& x, const Instr& i) {
  ternary<T, T, T, T>(x, i, F<T>::apply);
}

#define MEGAGEN_PICK_INTEGER(handler, F, type)          \
  (type) == Type::U16   ? Handler(handler<F, uint16_t>) \
  : (type) == Type::S16 ? Handler(handler<F, int16_t>)  \
  : (type) == Type::U32 ? Handler(handler<F, uint32_t>) \
  : (type) == Type::S32 ? Handler(handler<F, int32_t>)  \
  : (type) == Type::U64 ? Handler(handler<F, uint64_t>) \
  : (type) == Type::S64 ? Handler(handler<F, int64_t>)  \
                        : Handler(nullptr)

/// How setp and set combine their result with a predicate; 0: not at all.
inline uint16_t bool_op(const std::string& modifier) {
  return modifier == ".and" ? 1 : modifier == ".or" ? 2 : modifier == ".xor" ? 3 : 0;
}
inline Mask combine(uint16_t op, Mask a, Mask b) {
  return op == 1 ? a & b : op == 2 ? a | b : op == 3 ? a ^ b : a;
}

/// p|q, a, b [, c]: p and q into op[0] and op[4], a and b into op[1] and op[2], c into op[3].
inline void decode_compare_operands(Decoder& d, Instr& i, const std::string& combiner, Type type) {
  const AstOperand& p = d.operand(0);
  i.flags = bool_op(combiner);
  if (p.kind == AstOperand::Pair) {
    i.op[0] = d.predicate(p.items[0]);
    i.op[4] = d.predicate(p.items[1]);
  } else {
    i.op[0] = d.predicate(p);
  }
  i.op[1] = d.source(d.operand(1), type);
  i.op[2] = d.source(d.operand(2), type);
  if (i.flags) i.op[3] = d.predicate(d.operand(3));
  i.operands = 3;
}

/// Ends a setp: q gets the complement of the comparison, combined in the same way.
inline void set_predicates(Exec& x, const Instr& i, Mask result) {
  Mask undefined = x.undefined(i.op[1]) | x.undefined(i.op[2]);
  Mask p = result, q = ~result;  // the ISA combines p with c, and q with c
  if (i.flags) {
    const Mask c = x.predicate(i.op[3]), u = x.undefined(i.op[3]);
    p = combine(i.flags, p, c);
    q = combine(i.flags, q, c);
    // `and` with a defined false, `or` with a defined true are defined.
    const auto decides = [&](Mask value, Mask unknown) {
      return ~unknown & (i.flags == 1 ? ~value : i.flags == 2 ? value : 0);
    };
    undefined = (undefined & ~decides(c, u)) | (u & ~decides(result, undefined));
  }
  x.set_predicate(i.op[0], p);
  x.set_predicate(i.op[4], q);
  if (undefined & x.mask) {
    x.set_predicate_undefined(i.op[0], undefined);
    x.set_predicate_undefined(i.op[4], undefined);
  }
}

}  // namespace megagen::emulator
