// The form table: collects the rows of the exec_*.cpp files and matches modifiers against them.
#include "forms.hpp"

#include <sstream>

#include "error.hpp"

namespace megagen::emulator {

namespace {

const std::pair<const char*, Type> kTypeNames[] = {
    {"b8", Type::B8},         {"b16", Type::B16},         {"b32", Type::B32},       {"b64", Type::B64},
    {"b128", Type::B128},     {"u8", Type::U8},           {"u16", Type::U16},       {"u32", Type::U32},
    {"u64", Type::U64},       {"s8", Type::S8},           {"s16", Type::S16},       {"s32", Type::S32},
    {"s64", Type::S64},       {"f16", Type::F16},         {"f16x2", Type::F16x2},   {"bf16", Type::BF16},
    {"bf16x2", Type::BF16x2}, {"f32", Type::F32},         {"f32x2", Type::F32x2},   {"f64", Type::F64},
    {"tf32", Type::TF32},     {"u16x2", Type::U16x2},     {"s16x2", Type::S16x2},   {"pred", Type::Pred},
    {"e4m3x2", Type::E4M3x2}, {"e5m2x2", Type::E5M2x2},   {"e2m1x2", Type::E2M1x2}, {"e2m3x2", Type::E2M3x2},
    {"e3m2x2", Type::E3M2x2}, {"ue8m0x2", Type::UE8M0x2}, {"e4m3x4", Type::E4M3x4}, {"e5m2x4", Type::E5M2x4},
};

}  // namespace

Type type_of(const std::string& name) {
  for (const auto& [text, type] : kTypeNames) {
    if (name == text) return type;
  }
  return Type::None;
}

int bytes_of(Type type) {
  switch (type) {
    case Type::B8:
    case Type::U8:
    case Type::S8:
    case Type::E2M1x2:
      return 1;
    case Type::B16:
    case Type::U16:
    case Type::S16:
    case Type::F16:
    case Type::BF16:
    case Type::E4M3x2:
    case Type::E5M2x2:
    case Type::E2M3x2:
    case Type::E3M2x2:
    case Type::UE8M0x2:
      return 2;
    case Type::B64:
    case Type::U64:
    case Type::S64:
    case Type::F64:
    case Type::F32x2:
      return 8;
    case Type::B128:
      return 16;
    default:
      return 4;
  }
}

// --- The form table ---

FormTable::FormTable() {
  for (const FormList& list :
       {integer_forms(), bit_forms(), float_forms(), half_forms(), convert_forms(), control_forms(),
        memory_forms(), atomic_forms(), warp_forms(), barrier_forms(), mbarrier_forms(), async_forms(),
        matrix_forms(), tensor_memory_forms(), tensor_move_forms(), tensor_mma_forms()}) {
    add(list.forms, list.count);
  }
}

const FormTable& FormTable::get() {
  static const FormTable table;
  return table;
}

void FormTable::add(const Form* forms, size_t count) {
  for (size_t k = 0; k < count; ++k) {
    const std::string pattern = forms[k].pattern;
    const size_t name_end = pattern.find_first_of("({");
    Row row{&forms[k], {}};
    for (size_t at = name_end; at < pattern.size();) {
      const bool optional = pattern[at] == '{';
      const size_t close = pattern.find(optional ? '}' : ')', at);
      Slot slot{{}, optional};
      std::stringstream choices(pattern.substr(at + 1, close - at - 1));
      for (std::string one; std::getline(choices, one, '|');) slot.choices.push_back(one);
      row.slots.push_back(slot);
      at = close + 1;
    }
    rows_[pattern.substr(0, name_end)].push_back(row);
    order_.push_back(&forms[k]);
  }
}

const std::vector<FormTable::Row>* FormTable::rows(const std::string& opcode) const {
  const auto it = rows_.find(opcode);
  return it == rows_.end() ? nullptr : &it->second;
}

std::vector<std::string> FormTable::patterns() const {
  std::vector<std::string> out;
  for (const Form* f : order_) out.push_back(std::string(f->pattern) + "\t" + f->section);
  return out;
}

namespace {

bool match_from(const std::vector<Slot>& slots, size_t slot, const std::vector<std::string>& modifiers,
                size_t at, std::vector<std::string>& out) {
  if (slot == slots.size()) return at == modifiers.size();
  if (at < modifiers.size()) {
    for (const std::string& choice : slots[slot].choices) {
      if (choice != modifiers[at]) continue;
      out[slot] = choice;
      if (match_from(slots, slot + 1, modifiers, at + 1, out)) return true;
    }
  }
  out[slot].clear();
  return slots[slot].optional && match_from(slots, slot + 1, modifiers, at, out);
}

/// Modifiers in another order than the ISA's, as assemblers let pass: each takes the first free slot that
/// lists it. The last one, the type, must stay last.
bool match_unordered(const std::vector<Slot>& slots, const std::vector<std::string>& modifiers,
                     std::vector<std::string>& out) {
  for (size_t k = 0; k < modifiers.size(); ++k) {
    bool placed = false;
    const bool last = k + 1 == modifiers.size();
    for (size_t s = last ? slots.size() - 1 : 0; s < slots.size() && !placed; ++s) {
      if (!out[s].empty()) continue;
      for (const std::string& choice : slots[s].choices) placed |= choice == modifiers[k];
      if (placed) out[s] = modifiers[k];
    }
    if (!placed) return false;
  }
  for (size_t s = 0; s < slots.size(); ++s) {
    if (out[s].empty() && !slots[s].optional) return false;
  }
  return true;
}

}  // namespace

bool FormTable::Row::match(const std::vector<std::string>& modifiers, bool ordered,
                           std::vector<std::string>& out) const {
  out.assign(slots.size(), "");
  return ordered ? match_from(slots, 0, modifiers, 0, out) : match_unordered(slots, modifiers, out);
}

// --- Decoder helpers ---

bool Decoder::has(const char* modifier) const {
  for (const std::string& m : matched) {
    if (m == modifier) return true;
  }
  return false;
}

const AstOperand& Decoder::operand(size_t index) const {
  if (index >= ast->operands.size()) {
    throw Error(ErrorKind::Emulator,
                format("PTX line %u: `%s` lacks operand %zu", ast->line, ast->opcode.c_str(), index + 1),
                true);
  }
  return ast->operands[index];
}

void Decoder::operands(Instr& i, Type destination_type, std::initializer_list<Type> source_types) {
  i.operands = static_cast<uint8_t>(source_types.size() + 1);
  if (count() != i.operands) unsupported(format("%zu operands where %d were expected", count(), i.operands));
  i.op[0] =
      destination_type == Type::Pred ? predicate(operand(0)) : destination(operand(0), destination_type);
  size_t k = 1;
  for (Type type : source_types) {
    i.op[k] = type == Type::Pred ? predicate(operand(k)) : source(operand(k), type);
    ++k;
  }
}

void Decoder::extra(Instr& i, const AstOperand& vector, Type type, bool is_destination) {
  // All refs are made before any is stored: a source may emit code of its own.
  std::vector<Ref> refs;
  if (vector.kind == AstOperand::Vector) {
    for (const AstOperand& item : vector.items) {
      refs.push_back(is_destination ? destination(item, type) : source(item, type));
    }
  } else {
    refs.push_back(is_destination ? destination(vector, type) : source(vector, type));
  }
  std::vector<Ref>& pool = program().extra;
  if (i.extra_count == 0) i.extra = static_cast<uint32_t>(pool.size());
  pool.insert(pool.end(), refs.begin(), refs.end());
  i.extra_count += static_cast<uint32_t>(refs.size());
}

}  // namespace megagen::emulator
