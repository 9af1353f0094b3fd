// tcgen05.mma and mma.ws: decoding, gathering of operands, and results.
// Source: PTX ISA, "TensorCore 5th Generation Family Instructions: TensorCore 5th Generation Matrix Multiply
// and accumulate Operations".
#include "access.hpp"
#include "tcgen05.hpp"
#include "tcgen05_mma.hpp"

namespace megagen::emulator {

namespace {

namespace tg = megagen::tcgen05;

/// An instruction with its operands' values.
struct Multiplication {
  tg::Instruction shape;
  TensorAddress d{0}, a{0}, a_scales{0}, b_scales{0};
  tg::Descriptor a_descriptor{}, b_descriptor{};
  bool a_in_tensor_memory = false, accumulate = false;
  int scale_d = 0;
  std::vector<uint32_t> disabled;  // lanes, 32 to a word
  tg::DataPath path{};

  bool is_disabled(size_t cta, uint32_t lane) const {
    const size_t word = cta * 4 + lane / 32;
    return word < disabled.size() && (disabled[word] >> (lane % 32) & 1);
  }
};

/// Rows of A or columns of B as numbers.
struct Rows {
  int k;
  std::vector<double> values;
  std::vector<uint8_t> undefined;
  Rows(int count, int depth)
      : k(depth), values(static_cast<size_t>(count * depth)), undefined(static_cast<size_t>(count)) {}
  double* row(int index) { return &values[static_cast<size_t>(index * k)]; }
};

void gather_k_major(TensorOp& op, Cta& cta, const Multiplication& m, const tg::Descriptor& d, tg::Element e,
                    int first, int count, Rows& out) {
  for (int r = 0; r < count; ++r) {
    double* to = out.row(first + r);
    bool undefined = false;
    for (uint32_t unit = 0; unit < 2; ++unit) {
      uint8_t data[16], shadow[16];
      tensor_read_shared(op, cta, tg::k_major_address(d, static_cast<uint32_t>(r), unit), data, shadow);
      to += tg::unit_values(m.shape.kind, e, data, shadow, to, undefined);
    }
    out.undefined[static_cast<size_t>(first + r)] = undefined;
  }
}

void gather_mn_major(TensorOp& op, Cta& cta, const Multiplication& m, const tg::Descriptor& d, tg::Element e,
                     int first, int count, Rows& out) {
  const int per_unit = 128 / tg::container_bits(m.shape.kind), bytes = 16 / per_unit;
  for (int unit = 0; unit * per_unit < count; ++unit) {
    for (int k = 0; k < m.shape.k; ++k) {
      uint8_t data[16], shadow[16];
      tensor_read_shared(op, cta,
                         tg::mn_major_address(d, static_cast<uint32_t>(unit), static_cast<uint32_t>(k)), data,
                         shadow);
      double values[32];
      bool any = false;
      tg::unit_values(m.shape.kind, e, data, shadow, values, any);
      for (int t = 0; t < per_unit && unit * per_unit + t < count; ++t) {
        const int row = first + unit * per_unit + t;
        out.row(row)[k] = values[t];
        if (any && !is_zero(shadow + t * bytes, static_cast<uint32_t>(bytes)))
          out.undefined[static_cast<size_t>(row)] = true;
      }
    }
  }
}

void gather(TensorOp& op, Cta& cta, const Multiplication& m, bool is_a, int first, int count, Rows& out) {
  const tg::Descriptor& d = is_a ? m.a_descriptor : m.b_descriptor;
  const bool transposed = is_a ? m.shape.transpose_a : m.shape.transpose_b;
  (transposed ? gather_mn_major : gather_k_major)(op, cta, m, d, is_a ? m.shape.a : m.shape.b, first, count,
                                                  out);
}

/// A of one lane in tensor memory.
void gather_lane(TensorOp& op, Cta& cta, const Multiplication& m, uint32_t lane, Rows& out) {
  const TensorPlace p = tensor_access(op, cta, m.a.lane + lane, m.a.column, 8, false);
  double* to = out.row(static_cast<int>(lane));
  bool undefined = false;
  for (int unit = 0; unit < 2; ++unit) {
    to += tg::tensor_values(m.shape.kind, m.shape.a, p.data + 16 * unit, p.undefined + 16 * unit, to,
                            undefined);
  }
  out.undefined[lane] = undefined;
}

/// Scale factors of `count` rows, as the datapath of a quarter of the lanes finds them in its own lanes.
struct Scales {
  int per_row;
  std::vector<double> values;
  std::vector<uint8_t> undefined;

  Scales(TensorOp& op, Cta& cta, const tg::Instruction& shape, TensorAddress at, int id, uint32_t quarter,
         int count)
      : per_row(shape.scales),
        values(static_cast<size_t>(count * per_row)),
        undefined(static_cast<size_t>(count)) {
    const auto words = static_cast<uint32_t>((count + 31) / 32);
    for (uint32_t l = 0; l < 32 && l < static_cast<uint32_t>(count); ++l) {
      const TensorPlace p = tensor_access(op, cta, at.lane + quarter * 32 + l, at.column, words, false);
      for (uint32_t w = 0; w * 32 + l < static_cast<uint32_t>(count); ++w) {
        const size_t row = w * 32 + l;
        for (int s = 0; s < per_row; ++s) {
          const uint32_t byte = w * 4 + static_cast<uint32_t>(id + s);
          values[row * static_cast<size_t>(per_row) + static_cast<size_t>(s)] =
              tg::scale_value(p.data[byte], shape.ue4m3);
          undefined[row] |= p.undefined[byte] != 0;
        }
      }
    }
  }
  bool same(const Scales& other) const { return values == other.values && undefined == other.undefined; }
  double of(int row, int k, int depth) const {
    return values[static_cast<size_t>(row * per_row + k * per_row / depth)];
  }
};

/// B for one quarter of the lanes, scaled.
tg::Panel panel_of(const tg::Instruction& shape, Rows& b, const Scales* scales,
                   std::vector<uint8_t>& undefined) {
  tg::Panel panel(shape.n, shape.k);
  const double sign = shape.negate_b ? -1 : 1;
  for (int n = 0; n < shape.n; ++n) {
    for (int k = 0; k < shape.k; ++k)
      panel.at(n, k) = sign * b.row(n)[k] * (scales ? scales->of(n, k, shape.k) : 1);
    undefined[static_cast<size_t>(n)] =
        b.undefined[static_cast<size_t>(n)] || (scales && scales->undefined[static_cast<size_t>(n)]);
  }
  return panel;
}

void multiply_lane(TensorOp& op, Cta& cta, const Multiplication& m, uint32_t lane, const double* a,
                   bool a_undefined, const tg::Panel& b, const std::vector<uint8_t>& b_undefined) {
  const tg::Instruction& shape = m.shape;
  const int columns = shape.n / static_cast<int>(m.path.parts);
  const auto first = static_cast<int>(m.path.part_of(lane)) * columns;
  const TensorPlace p =
      tensor_access(op, cta, m.d.lane + lane, m.d.column, static_cast<uint32_t>(columns), true);
  double sums[256] = {};
  for (int c = 0; m.accumulate && c < columns; ++c) {
    uint32_t word;
    memcpy(&word, p.data + c * 4, 4);
    sums[first + c] = tg::accumulator_value(word, shape.d, m.scale_d);
  }
  tg::multiply_row(b, a, sums);
  for (int c = 0; c < columns; ++c) {
    const uint32_t word = tg::accumulator_word(sums[first + c], shape.d, shape.saturate);
    uint32_t shadow = 0;
    if (m.accumulate) memcpy(&shadow, p.undefined + c * 4, 4);
    if (shape.d == tg::Accumulator::F16) shadow &= 0xFFFF;
    if (shadow || a_undefined || b_undefined[static_cast<size_t>(first + c)]) shadow = ~0u;
    memcpy(p.data + c * 4, &word, 4);
    memcpy(p.undefined + c * 4, &shadow, 4);
  }
}

void execute_on(TensorOp& op, size_t index, const Multiplication& m, Rows& b) {
  Cta& cta = *op.ctas[index];
  const tg::Instruction& shape = m.shape;
  const auto rows = static_cast<int>(m.path.rows);
  Rows a(m.a_in_tensor_memory ? static_cast<int>(kTensorLanes) : rows, shape.k);
  if (!m.a_in_tensor_memory) gather(op, cta, m, true, 0, rows, a);
  std::vector<uint8_t> b_undefined(static_cast<size_t>(shape.n));
  std::unique_ptr<tg::Panel> panel;
  std::unique_ptr<Scales> in_panel;  // the factors that the panel's values contain
  const double sign = shape.negate_a ? -1 : 1;
  for (uint32_t quarter = 0; quarter < 4; ++quarter) {
    std::unique_ptr<Scales> a_scales, b_scales;
    if (shape.scales) {
      a_scales = std::make_unique<Scales>(op, cta, shape, m.a_scales, shape.a_scale_id, quarter, rows);
      b_scales = std::make_unique<Scales>(op, cta, shape, m.b_scales, shape.b_scale_id, quarter, shape.n);
    }
    if (!panel || (b_scales && !b_scales->same(*in_panel))) {
      panel = std::make_unique<tg::Panel>(panel_of(shape, b, b_scales.get(), b_undefined));
      in_panel = std::move(b_scales);
    }
    for (uint32_t l = 0; l < kTensorQuarter; ++l) {
      const uint32_t lane = quarter * kTensorQuarter + l;
      if (!m.path.uses(lane)) continue;
      if (m.a_in_tensor_memory) gather_lane(op, cta, m, lane, a);
      if (m.is_disabled(index, m.d.lane + lane)) continue;
      const auto row = static_cast<int>(m.path.row_of(lane));
      const int source = m.a_in_tensor_memory ? static_cast<int>(lane) : row;
      double values[64];
      for (int k = 0; k < shape.k; ++k)
        values[k] = sign * a.row(source)[k] * (a_scales ? a_scales->of(row, k, shape.k) : 1);
      const bool undefined = a.undefined[static_cast<size_t>(source)] ||
                             (a_scales && a_scales->undefined[static_cast<size_t>(row)]);
      multiply_lane(op, cta, m, lane, values, undefined, *panel, b_undefined);
    }
  }
}

void execute(TensorOp& op, const Multiplication& m) {
  Rows b(m.shape.n, m.shape.k);
  const int part = m.shape.n / static_cast<int>(op.ctas.size());
  for (size_t c = 0; c < op.ctas.size(); ++c)
    gather(op, *op.ctas[c], m, false, static_cast<int>(c) * part, part, b);
  for (size_t c = 0; c < op.ctas.size(); ++c) execute_on(op, c, m, b);
  ++op.m->counters.matrix;
}

// --- Issue. op[0] D, op[1] A, op[2] descriptor of B, op[3] instruction descriptor, op[4] enable-input-d,
// imm: scale-input-d; extra: scale addresses, or lanes not to write; choice .cta_group, vector: kind and
// scales ---

enum : uint16_t { kTensorA = 1, kStationary = 2, kMask = 4 };

tg::Descriptor descriptor_of(const Exec& x, const Ref& r, int lane, const char* role) {
  x.require_defined(r, role);
  const auto d = tg::Descriptor::decode(x.value(r, lane));
  if (const char* why = d.invalid())
    fail(ErrorKind::Emulator,
         format("%s 0x%llx: %s", role, static_cast<unsigned long long>(x.value(r, lane)), why));
  return d;
}

TensorAddress address_of(const Exec& x, const Ref& r, int lane, const char* role, int64_t offset = 0) {
  x.require_defined(r, role);
  return TensorAddress(static_cast<uint32_t>(x.value(r, lane)) + static_cast<uint32_t>(offset));
}

void check_lanes(const Multiplication& m) {
  const bool half = m.path.half;
  const auto fits = [&](TensorAddress a) { return a.lane == 0 || (half && a.lane == 16); };
  if (!fits(m.d) || (m.a_in_tensor_memory && (!fits(m.a) || m.a.lane != m.d.lane)))
    fail(ErrorKind::MemoryFault, format("tcgen05.mma with D at lane %u and A at lane %u: must be 0%s",
                                        m.d.lane, m.a.lane, half ? ", or 16 for both" : ""));
  if (m.shape.scales && (m.a_scales.lane || m.b_scales.lane))
    fail(ErrorKind::MemoryFault, "scale factors must begin at lane 0 of tensor memory");
}

void check_swizzle(const tg::Instruction& s, const tg::Descriptor& d, bool transposed) {
  if (transposed && (d.swizzle == Swizzle::B128Atom32) != (s.kind == tg::Kind::TF32))
    fail(ErrorKind::Emulator,
         "transposed tf32 operands need 128-byte swizzling with 32-byte atoms, others can't have it");
}

/// Of scale factors. The upper two bits, which no lane number has, don't count: pointers to parts of a word
/// may have the ID there, which belongs into the instruction descriptor.
TensorAddress scale_address_of(const Exec& x, const Ref& r, int lane, const char* role) {
  x.require_defined(r, role);
  return TensorAddress(static_cast<uint32_t>(x.value(r, lane)) & 0x3FFFFFFF);
}

Multiplication multiplication_of(const Exec& x, const Instr& i, int lane) {
  Multiplication m;
  m.shape.kind = static_cast<tg::Kind>(i.vector & 15);
  m.shape.scales = i.vector >> 4;
  m.shape.group = i.choice;
  m.shape.stationary = i.flags & kStationary;
  x.require_defined(i.op[3], "instruction descriptor");
  const auto word = static_cast<uint32_t>(x.value(i.op[3], lane));
  if (const char* why = tg::decode(word, m.shape))
    fail(ErrorKind::Emulator, format("instruction descriptor 0x%08x: %s", word, why));
  m.d = address_of(x, i.op[0], lane, "address of D", i.offset[0]);
  m.a_in_tensor_memory = i.flags & kTensorA;
  if (m.a_in_tensor_memory) {
    m.a = address_of(x, i.op[1], lane, "address of A", i.offset[1]);
    if (m.shape.transpose_a) fail(ErrorKind::Emulator, "A in tensor memory can't be transposed");
  } else {
    m.a_descriptor = descriptor_of(x, i.op[1], lane, "descriptor of A");
    check_swizzle(m.shape, m.a_descriptor, m.shape.transpose_a);
  }
  m.b_descriptor = descriptor_of(x, i.op[2], lane, "descriptor of B");
  check_swizzle(m.shape, m.b_descriptor, m.shape.transpose_b);
  if (x.undefined(i.op[4]) >> lane & 1) fail(ErrorKind::UninitializedUse, "enable-input-d is undefined");
  m.accumulate = x.predicate(i.op[4]) >> lane & 1;
  m.scale_d = static_cast<int>(i.imm);
  const Ref* extra = &x.program.extra[i.extra];
  if (m.shape.scales) {
    m.a_scales = scale_address_of(x, extra[0], lane, "address of the scale factors of A");
    m.b_scales = scale_address_of(x, extra[1], lane, "address of the scale factors of B");
  }
  for (uint32_t k = 0; (i.flags & kMask) && k < i.extra_count; ++k) {
    x.require_defined(extra[k], "mask of disabled lanes");
    m.disabled.push_back(static_cast<uint32_t>(x.value(extra[k], lane)));
  }
  m.path = tg::data_path(static_cast<uint32_t>(m.shape.m), m.shape.group, m.shape.stationary);
  check_lanes(m);
  return m;
}

/// Equal for multiplications that are pipelined: of one accumulator, shape and kind.
uint64_t key_of(const Multiplication& m) {
  return static_cast<uint64_t>(m.d.lane << 16 | m.d.column) << 32 | static_cast<uint64_t>(m.shape.m) << 20 |
         static_cast<uint64_t>(m.shape.n) << 8 | static_cast<uint64_t>(m.shape.kind) << 1 |
         m.shape.stationary;
}

void mma(Exec& x, const Instr& i) {
  const int lane = single_lane(x);
  auto ctas = cta_group(x, i.choice);
  Multiplication m = multiplication_of(x, i, lane);
  auto op = new_tensor_op(x, i, lane, TensorKind::Mma, std::move(ctas), key_of(m));
  op->run = [m = std::move(m)](TensorOp& o) { execute(o, m); };
  x.tick();
  x.note_change();
  issue_tensor_op(std::move(op));
}

tg::Kind kind_of(const Decoder& d) {
  return d.has(".kind::f16")        ? tg::Kind::F16
         : d.has(".kind::tf32")     ? tg::Kind::TF32
         : d.has(".kind::f8f6f4")   ? tg::Kind::F8F6F4
         : d.has(".kind::i8")       ? tg::Kind::I8
         : d.has(".kind::mxf8f6f4") ? tg::Kind::MXF8F6F4
         : d.has(".kind::mxf4")     ? tg::Kind::MXF4
                                    : tg::Kind::MXF4NVF4;
}

/// Scale factors per row along K, by qualifier.
int scales_of(Decoder& d, tg::Kind kind) {
  const int named = d.has(".scale_vec::1X")                        ? 1
                    : d.has(".scale_vec::2X")                      ? 2
                    : d.has(".scale_vec::4X") || d.has(".block16") ? 4
                                                                   : 0;
  const int usual = kind == tg::Kind::MXF8F6F4 ? 1 : 2;
  if (kind == tg::Kind::MXF4NVF4) {
    if (!named && !d.has(".block32")) d.unsupported("mxf4nvf4 needs a scale vector size");
    if (named == 1) d.unsupported("mxf4nvf4 has no scale_vec::1X");
    return named ? named : 2;
  }
  if (named && named != usual) d.unsupported("this kind has another scale vector size");
  return usual;
}

/// [register + offset], the offset into `offset`.
Ref tensor_address(Decoder& d, size_t operand, int64_t& offset) {
  Instr scratch;
  d.address(scratch, d.operand(operand), 0);
  offset = scratch.imm;
  return scratch.op[0];
}
Ref scale_address(Decoder& d, size_t operand) {
  int64_t offset = 0;
  const Ref base = tensor_address(d, operand, offset);
  if (offset) d.unsupported("an offset to the address of scale factors");
  return base;
}

void decode_mma(Decoder& d, Instr& i) {
  i.choice = static_cast<uint8_t>(group_of(d));
  const tg::Kind kind = kind_of(d);
  const int scales = tg::is_block_scaled(kind) ? scales_of(d, kind) : 0;
  i.vector = static_cast<uint8_t>(static_cast<int>(kind) | scales << 4);
  if (d.has(".ws")) i.flags |= kStationary;
  i.op[0] = tensor_address(d, 0, i.offset[0]);
  if (d.operand(1).kind == AstOperand::Address) {
    i.flags |= kTensorA;
    i.op[1] = tensor_address(d, 1, i.offset[1]);
  } else {
    i.op[1] = d.source(d.operand(1), Type::B64);
  }
  i.op[2] = d.source(d.operand(2), Type::B64);
  i.op[3] = d.source(d.operand(3), Type::U32);
  size_t k = 4;
  if (scales) {
    const Ref addresses[] = {scale_address(d, 4), scale_address(d, 5)};
    i.extra = static_cast<uint32_t>(d.program().extra.size());
    i.extra_count = 2;
    d.program().extra.insert(d.program().extra.end(), addresses, addresses + 2);
    k = 6;
  } else if (d.operand(4).kind == AstOperand::Vector) {
    d.extra(i, d.operand(k++), Type::B32, false);
    i.flags |= kMask;
    if (i.extra_count != 4u * i.choice) d.unsupported("disable-output-lane needs four registers per CTA");
  }
  i.op[4] = d.predicate(d.operand(k++));
  if (k < d.count()) {
    if (d.has(".ws")) d.unsupported("zero-column masks");
    if (d.operand(k).kind != AstOperand::Integer || d.operand(k).value < 0 || d.operand(k).value > 15 ||
        kind > tg::Kind::TF32)
      d.unsupported("scale-input-d must be a constant from 0 to 15, for kinds f16 and tf32");
    i.imm = d.operand(k).value;
  }
  i.fn = mma;
}

#define COLLECTOR_A "{.collector::a::fill|.collector::a::use|.collector::a::lastuse|.collector::a::discard}"
#define COLLECTOR(N)                                                                                 \
  ".collector::b" #N "::fill|.collector::b" #N "::use|.collector::b" #N "::lastuse|.collector::b" #N \
  "::discard"
#define COLLECTOR_B "{" COLLECTOR(0) "|" COLLECTOR(1) "|" COLLECTOR(2) "|" COLLECTOR(3) "}"
constexpr const char* kMma = MEGAGEN_TCGEN05 "tcgen05.mma";

const Form kForms[] = {
    {"tcgen05(.mma)" MEGAGEN_CTA_GROUP "(.kind::f16|.kind::tf32|.kind::f8f6f4|.kind::i8)" COLLECTOR_A, kMma,
     decode_mma},
    {"tcgen05(.mma)" MEGAGEN_CTA_GROUP "(.kind::mxf8f6f4)(.block_scale){.scale_vec::1X|.block32}" COLLECTOR_A,
     kMma, decode_mma},
    {"tcgen05(.mma)" MEGAGEN_CTA_GROUP "(.kind::mxf4)(.block_scale){.scale_vec::2X|.block32}" COLLECTOR_A,
     kMma, decode_mma},
    {"tcgen05(.mma)" MEGAGEN_CTA_GROUP
     "(.kind::mxf4nvf4)(.block_scale)(.scale_vec::2X|.scale_vec::4X|.block16|.block32)" COLLECTOR_A,
     kMma, decode_mma},
    {"tcgen05(.mma)(.ws)(.cta_group::1)(.kind::f16|.kind::tf32|.kind::f8f6f4|.kind::i8)" COLLECTOR_B,
     MEGAGEN_TCGEN05 "tcgen05.mma.ws", decode_mma},
};

}  // namespace

FormList tensor_mma_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
