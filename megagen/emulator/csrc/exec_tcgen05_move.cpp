// tcgen05.ld, st, cp and shift.
// Source: PTX ISA, "TensorCore 5th Generation Family Instructions": Data Movement Shape, Tensor Memory and
// Register Load/Store, Tensor Memory Data Movement.
#include <algorithm>
#include <array>
#include <cmath>

#include "access.hpp"
#include "float_formats.hpp"
#include "tcgen05.hpp"
#include "tcgen05_layout.hpp"

namespace megagen::emulator {

namespace {

namespace tg = megagen::tcgen05;

// --- ld and st. op[1] address, extra: registers, choice: shape, vector: registers, flags, imm: the halves'
// distance, type and op[2]: reduction ---

enum : uint16_t { kPacked = 1, kReduce = 2, kMax = 4, kAbs = 8, kNan = 16 };

/// What a warp-wide load or store touches.
struct Fragment32 {
  tg::MoveShape shape;
  int registers;
  bool packed;       // two columns of 16 bits per register
  uint32_t base[2];  // addresses of the first and, where there is one, of the second access

  Fragment32(const Exec& x, const Instr& i)
      : shape(static_cast<tg::MoveShape>(i.choice)), registers(i.vector), packed(i.flags & kPacked) {
    base[0] = uniform_value(x, i.op[1], "tensor memory address") + static_cast<uint32_t>(i.imm);
    base[1] = base[0] + static_cast<uint32_t>(i.offset[0]);
    require_quarter(x, TensorAddress(base[0]));
    require_quarter(x, TensorAddress(base[1]));
  }
  void require_quarter(const Exec& x, TensorAddress address) const {
    const uint32_t rows = shape == tg::MoveShape::L32x32b ? 32 : 16;
    const auto quarter = static_cast<uint32_t>(x.w.index % 4);
    if (address.lane / kTensorQuarter == quarter && address.lane % rows == 0) return;
    fail(ErrorKind::MemoryFault,
         format("tensor memory lanes %u to %u: warp %d reaches lanes %u to %u only, from a multiple of %u on",
                address.lane, address.lane + rows - 1, x.w.index, quarter * kTensorQuarter,
                quarter * kTensorQuarter + kTensorQuarter - 1, rows));
  }
  uint32_t columns() const { return packed ? 2 : 1; }
  /// First column and lane of a thread's register.
  TensorAddress at(int thread, int r) const {
    const tg::Cell cell = tg::move_cell(shape, thread, r);
    TensorAddress out(base[cell.half]);
    out.lane += cell.lane;
    out.column += cell.column * columns();
    return out;
  }
};

/// What each thread's accesses come after. Threads mostly agree.
struct ThreadOrders {
  std::vector<Clock> order, thread;
  std::array<uint8_t, kLanes> of{};
  explicit ThreadOrders(const Exec& x) {
    for (int l = 0; l < kLanes; ++l) {
      const VectorClock& own = tensor_order(x.w, l).after;
      const Clock& clock = x.clock_of(l);
      if (order.empty() || !order.back().before.same(own) || !thread.back().same(clock)) {
        order.emplace_back();
        order.back().before = own;
        thread.push_back(clock);
      }
      of[static_cast<size_t>(l)] = static_cast<uint8_t>(order.size() - 1);
    }
  }
};

template <class Visit>
void visit_cells(TensorOp& op, const Fragment32& f, const ThreadOrders& orders, bool write, Visit visit) {
  for (int r = 0; r < f.registers; ++r) {
    for (int l = 0; l < kLanes; ++l) {
      const TensorAddress a = f.at(l, r);
      const uint8_t k = orders.of[static_cast<size_t>(l)];
      visit(r, l,
            tensor_access(op, *op.ctas[0], a.lane, a.column, f.columns(), write, &orders.order[k],
                          &orders.thread[k]));
    }
  }
}

/// The word, or two half words, at a place, and its undefined bits.
uint32_t word_at(const uint8_t* bytes, bool packed) {
  uint32_t low;
  memcpy(&low, bytes, 4);
  if (!packed) return low;
  uint16_t high;
  memcpy(&high, bytes + 4, 2);
  return (low & 0xFFFF) | static_cast<uint32_t>(high) << 16;
}

/// min or max of a lane's values.
uint32_t reduce(const Instr& i, const TensorLoad& load, int registers, int lane) {
  const bool max = i.flags & kMax;
  uint32_t out = 0;
  bool nan = false;
  for (int r = 0; r < registers; ++r) {
    uint32_t v = load.values[static_cast<size_t>(r * kLanes + lane)];
    if (i.type == Type::F32) {
      if (i.flags & kAbs) v &= 0x7FFFFFFF;
      const float a = numerics::float_of(v), b = numerics::float_of(out);
      nan |= std::isnan(a);
      if (r == 0 || std::isnan(b) || (max ? a > b : a < b)) out = v;
    } else if (i.type == Type::S32) {
      const auto a = static_cast<int32_t>(v), b = static_cast<int32_t>(out);
      if (r == 0 || (max ? a > b : a < b)) out = v;
    } else if (r == 0 || (max ? v > out : v < out)) {
      out = v;
    }
  }
  const bool all_nan = i.type == Type::F32 && std::isnan(numerics::float_of(out));
  return all_nan || (nan && (i.flags & kNan)) ? 0x7FFFFFFF : out;
}

void load(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  require_whole_warp(x);
  tensor_memory(x.cta());
  const Fragment32 f(x, i);
  auto op = new_tensor_op(x, i, 0, TensorKind::Load, {&x.cta()});
  const size_t count = static_cast<size_t>(f.registers + (i.flags & kReduce ? 1 : 0)) * kLanes;
  auto result = std::make_shared<TensorLoad>();
  result->values.resize(count);
  result->undefined.resize(count);
  op->run = [f, result, orders = ThreadOrders(x)](TensorOp& o) {
    visit_cells(o, f, orders, false, [&](int r, int l, const TensorPlace& p) {
      const auto k = static_cast<size_t>(r * kLanes + l);
      result->values[k] = word_at(p.data, f.packed);
      result->undefined[k] = word_at(p.undefined, f.packed);
    });
    for (int l = 0; l < kLanes && (o.instr->flags & kReduce); ++l) {
      const auto k = static_cast<size_t>(f.registers * kLanes + l);
      result->values[k] = reduce(*o.instr, *result, f.registers, l);
      for (int r = 0; r < f.registers; ++r)
        result->undefined[k] |= result->undefined[static_cast<size_t>(r * kLanes + l)] ? ~0u : 0;
    }
    --o.warp->tensor_loading;
  };
  for (uint32_t r = 0; r < i.extra_count; ++r) {
    const uint32_t off = x.program.extra[i.extra + r].off;
    x.undef[off >> 7] = kAllLanes;
    memset(x.shadow + off, 0xFF, 4 * kLanes);
    x.w.tensor_registers[off] = {result, r};
  }
  ++x.w.tensor_loading;
  x.tick();
  x.note_change();
  issue_tensor_op(std::move(op));
}

void store(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  require_whole_warp(x);
  tensor_memory(x.cta());
  const Fragment32 f(x, i);
  auto op = new_tensor_op(x, i, 0, TensorKind::Store, {&x.cta()});
  TensorLoad values;
  for (int r = 0; r < f.registers; ++r) {
    const Ref& ref = x.program.extra[i.extra + static_cast<uint32_t>(r)];
    for (int l = 0; l < kLanes; ++l) {
      values.values.push_back(static_cast<uint32_t>(x.value(ref, l)));
      values.undefined.push_back(static_cast<uint32_t>(x.undefined_bits(ref, l)));
    }
  }
  op->run = [f, values = std::move(values), orders = ThreadOrders(x)](TensorOp& o) {
    visit_cells(o, f, orders, true, [&](int r, int l, const TensorPlace& p) {
      const auto k = static_cast<size_t>(r * kLanes + l);
      uint32_t v[2] = {values.values[k], 0}, u[2] = {values.undefined[k], 0};
      if (f.packed) {  // the columns' upper halves are nobody's
        v[1] = v[0] >> 16;
        u[1] = u[0] >> 16 | 0xFFFF0000;
        u[0] |= 0xFFFF0000;
      }
      memcpy(p.data, v, f.columns() * 4);
      memcpy(p.undefined, u, f.columns() * 4);
    });
    --o.warp->tensor_storing;
  };
  ++x.w.tensor_storing;
  x.tick();
  x.note_change();
  issue_tensor_op(std::move(op));
}

/// Shape in slot `s`, repetition in the one after it.
void decode_shape(Decoder& d, Instr& i, size_t s, uint32_t results) {
  i.choice = static_cast<uint8_t>(tg::move_shape(d.slot(s)));
  const int repeat = std::stoi(d.slot(s + 1).substr(2));
  const int registers = repeat * tg::registers_per_repeat(static_cast<tg::MoveShape>(i.choice));
  if (registers > 128) d.unsupported("this shape has no such repetition");
  if (i.extra_count != static_cast<uint32_t>(registers) + results)
    d.unsupported(format("%u registers where %d were expected", i.extra_count - results, registers));
  i.vector = static_cast<uint8_t>(registers);
  if (d.has(".pack::16b") || d.has(".unpack::16b")) i.flags |= kPacked;
}
int64_t constant(Decoder& d, size_t k) {
  if (d.operand(k).kind != AstOperand::Integer) d.unsupported("immHalfSplitoff must be a constant");
  return d.operand(k).value;
}
void decode_load(Decoder& d, Instr& i) {
  const bool reduces = d.slot(1) == ".red";
  d.extra(i, d.operand(0), Type::B32, true);
  if (reduces) d.extra(i, d.operand(1), Type::B32, true);
  const size_t k = reduces ? 2 : 1;
  d.address(i, d.operand(k), 1);
  decode_shape(d, i, reduces ? 4 : 3, reduces ? 1 : 0);
  if (static_cast<tg::MoveShape>(i.choice) == tg::MoveShape::L16x32bx2) i.offset[0] = constant(d, k + 1);
  if (reduces) {
    if (d.slot(5) == ".x1") d.unsupported("a reduction needs .x2 or more");
    i.type = d.last_type();
    i.flags |= static_cast<uint16_t>(kReduce | (d.has(".max") ? kMax : 0) | (d.has(".abs") ? kAbs : 0) |
                                     (d.has(".NaN") ? kNan : 0));
  }
  i.fn = load;
}
void decode_store(Decoder& d, Instr& i) {
  d.address(i, d.operand(0), 1);
  d.extra(i, d.operand(d.count() - 1), Type::B32, false);
  decode_shape(d, i, 3, 0);
  if (static_cast<tg::MoveShape>(i.choice) == tg::MoveShape::L16x32bx2) i.offset[0] = constant(d, 1);
  i.fn = store;
}

// --- cp. op[1] tensor memory address, op[2] descriptor, choice .cta_group, vector: shape, target: format ---

void copy_rows(TensorOp& op, Cta& cta, const tg::CopyShape& shape, const tg::Descriptor& descriptor,
               tg::Packing packing, TensorAddress to) {
  for (uint32_t row = 0; row < shape.rows; ++row) {
    uint8_t data[32], undefined[32];
    for (uint32_t unit = 0; unit < shape.columns / 4; ++unit) {
      uint8_t source[16], shadow[16];
      tensor_read_shared(op, cta, tg::k_major_address(descriptor, row, unit), source, shadow);
      tg::decompress(source, shadow, packing, data + 16 * unit, undefined + 16 * unit);
    }
    for (uint32_t copy = 0; copy < shape.copies; ++copy) {
      const TensorPlace p =
          tensor_access(op, cta, to.lane + shape.lane(row, copy), to.column, shape.columns, true);
      memcpy(p.data, data, shape.columns * 4);
      memcpy(p.undefined, undefined, shape.columns * 4);
    }
  }
}

void copy(Exec& x, const Instr& i) {
  const int lane = single_lane(x);
  x.require_defined(i.op[1], "tensor memory address");
  x.require_defined(i.op[2], "matrix descriptor");
  const tg::CopyShape& shape = tg::kCopyShapes[i.vector];
  const auto descriptor = tg::Descriptor::decode(x.value(i.op[2], lane));
  if (const char* why = descriptor.invalid())
    fail(ErrorKind::Emulator, format("matrix descriptor 0x%llx: %s",
                                     static_cast<unsigned long long>(x.value(i.op[2], lane)), why));
  const TensorAddress to(static_cast<uint32_t>(x.address_of(i, 1, lane)));
  auto op = new_tensor_op(x, i, lane, shape.rows == 4 ? TensorKind::Copy4 : TensorKind::Copy,
                          cta_group(x, i.choice));
  const auto packing = static_cast<tg::Packing>(i.target);
  op->run = [&shape, descriptor, packing, to](TensorOp& o) {
    for (Cta* cta : o.ctas) copy_rows(o, *cta, shape, descriptor, packing, to);
  };
  x.tick();
  x.note_change();
  issue_tensor_op(std::move(op));
}
void decode_copy(Decoder& d, Instr& i) {
  i.choice = static_cast<uint8_t>(group_of(d));
  const std::string name = d.slot(2) + (d.slot(3).rfind(".warp", 0) == 0 ? d.slot(3) : "");
  size_t k = 0;
  while (name != tg::kCopyShapes[k].name) ++k;
  i.vector = static_cast<uint8_t>(k);
  if (d.has(".b8x16") != (d.has(".b4x16_p64") || d.has(".b6x16_p32")))
    d.unsupported("a conversion has a destination and a source format");
  i.target = static_cast<int32_t>(d.has(".b4x16_p64")   ? tg::Packing::Bits4
                                  : d.has(".b6x16_p32") ? tg::Packing::Bits6
                                                        : tg::Packing::None);
  d.address(i, d.operand(0), 1);
  i.op[2] = d.source(d.operand(1), Type::B64);
  i.fn = copy;
}

// --- shift. op[1] address, choice .cta_group ---

/// Rows 0 to 30 of a warp's 32 lanes, 32 bytes each, move to the lane below.
void shift_rows(TensorOp& op, Cta& cta, TensorAddress at) {
  uint8_t data[32], undefined[32];
  for (uint32_t row = 0; row < kTensorQuarter; ++row) {
    const TensorPlace p = tensor_access(op, cta, at.lane + row, at.column, 8, row > 0);
    uint8_t next[32], next_undefined[32];
    memcpy(next, p.data, 32);
    memcpy(next_undefined, p.undefined, 32);
    if (row > 0) {
      memcpy(p.data, data, 32);
      memcpy(p.undefined, undefined, 32);
    }
    memcpy(data, next, 32);
    memcpy(undefined, next_undefined, 32);
  }
}

void shift(Exec& x, const Instr& i) {
  const int lane = single_lane(x);
  x.require_defined(i.op[1], "tensor memory address");
  const TensorAddress at(static_cast<uint32_t>(x.address_of(i, 1, lane)));
  if (at.lane % kTensorQuarter)
    fail(ErrorKind::MemoryFault, format("tcgen05.shift at lane %u: must be a multiple of 32", at.lane));
  auto op = new_tensor_op(x, i, lane, TensorKind::Shift, cta_group(x, i.choice));
  op->run = [at](TensorOp& o) {
    for (Cta* cta : o.ctas) shift_rows(o, *cta, at);
  };
  x.tick();
  x.note_change();
  issue_tensor_op(std::move(op));
}
void decode_shift(Decoder& d, Instr& i) {
  i.choice = static_cast<uint8_t>(group_of(d));
  d.address(i, d.operand(0), 1);
  i.fn = shift;
}

#define FORMATS "{.b8x16}{.b6x16_p32|.b4x16_p64}"
#define NUM "(.x1|.x2|.x4|.x8|.x16|.x32|.x64|.x128)"
#define SHAPES "(.16x64b|.16x128b|.16x256b|.32x32b|.16x32bx2)"
constexpr const char* kLd = MEGAGEN_TCGEN05 "tcgen05.ld";
constexpr const char* kSt = MEGAGEN_TCGEN05 "tcgen05.st";
constexpr const char* kCp = MEGAGEN_TCGEN05 "tcgen05.cp";

const Form kForms[] = {
    {"tcgen05(.ld)(.sync)(.aligned)" SHAPES NUM "{.pack::16b}(.b32)", kLd, decode_load},
    {"tcgen05(.ld)(.red)(.sync)(.aligned)(.32x32b|.16x32bx2)" NUM "(.min|.max){.abs}{.NaN}(.f32)", kLd,
     decode_load},
    {"tcgen05(.ld)(.red)(.sync)(.aligned)(.32x32b|.16x32bx2)" NUM "(.min|.max)(.u32|.s32)", kLd, decode_load},
    {"tcgen05(.st)(.sync)(.aligned)" SHAPES NUM "{.unpack::16b}(.b32)", kSt, decode_store},
    {"tcgen05(.cp)" MEGAGEN_CTA_GROUP "(.128x256b|.4x256b|.128x128b)" FORMATS, kCp, decode_copy},
    {"tcgen05(.cp)" MEGAGEN_CTA_GROUP "(.64x128b)(.warpx2::02_13|.warpx2::01_23)" FORMATS, kCp, decode_copy},
    {"tcgen05(.cp)" MEGAGEN_CTA_GROUP "(.32x128b)(.warpx4)" FORMATS, kCp, decode_copy},
    {"tcgen05(.shift)" MEGAGEN_CTA_GROUP "(.down)", MEGAGEN_TCGEN05 "tcgen05.shift", decode_shift},
    {"tcgen05(.shift)(.down)" MEGAGEN_CTA_GROUP, MEGAGEN_TCGEN05 "tcgen05.shift", decode_shift},
};

}  // namespace

FormList tensor_move_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
