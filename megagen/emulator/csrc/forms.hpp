// The decoder's table: each row is an instruction form in the ISA's own syntax, the section that defines it,
// and the function that decodes it. Rows live beside their handlers in exec_*.cpp.
//
// Pattern syntax: `opcode` followed by slots. (.a|.b) must be present, {.a|.b} may be.
#pragma once

#include <string>
#include <vector>

#include "program.hpp"

namespace megagen::emulator {

class Decoder;

struct Form {
  const char* pattern;
  const char* section;  // of the PTX ISA
  void (*decode)(Decoder&, Instr&);
};

struct Slot {
  std::vector<std::string> choices;
  bool optional;
};

/// All rows; built once.
class FormTable {
 public:
  static const FormTable& get();
  /// Rows for an opcode, with their parsed slots.
  struct Row {
    const Form* form;
    std::vector<Slot> slots;
    /// One entry per slot into `out`. `ordered`: the modifiers must stand in the ISA's order.
    bool match(const std::vector<std::string>& modifiers, bool ordered, std::vector<std::string>& out) const;
  };
  const std::vector<Row>* rows(const std::string& opcode) const;
  std::vector<std::string> patterns() const;

 private:
  FormTable();
  void add(const Form* forms, size_t count);
  std::map<std::string, std::vector<Row>> rows_;
  std::vector<const Form*> order_;
};

/// Tables of the exec_*.cpp files.
struct FormList {
  const Form* forms;
  size_t count;
};
FormList integer_forms();
FormList bit_forms();
FormList float_forms();
FormList half_forms();
FormList convert_forms();
FormList control_forms();
FormList memory_forms();
FormList atomic_forms();
FormList warp_forms();
FormList barrier_forms();
FormList mbarrier_forms();
FormList async_forms();
FormList matrix_forms();
FormList tensor_memory_forms();
FormList tensor_move_forms();
FormList tensor_mma_forms();

/// What a decode function works with: the parsed instruction, the matched modifiers, and access to the
/// symbols.
class Decoder {
 public:
  virtual ~Decoder() = default;
  const AstInstruction* ast = nullptr;
  std::vector<std::string> matched;  // one per slot, empty where absent

  bool has(const char* modifier) const;
  const std::string& slot(size_t index) const { return matched[index]; }
  Type slot_type(size_t index) const {
    return type_of(matched[index].empty() ? "" : matched[index].substr(1));
  }
  Type last_type() const { return slot_type(matched.size() - 1); }
  size_t count() const { return ast->operands.size(); }
  const AstOperand& operand(size_t index) const;

  virtual Ref source(const AstOperand& operand, Type type) = 0;
  virtual Ref destination(const AstOperand& operand, Type type) = 0;
  virtual Ref predicate(const AstOperand& operand) = 0;  // Discard gives kind None
  virtual bool is_predicate(const std::string& name) = 0;
  /// Address [base + offset]: base into i.op[slot], offset into i.imm.
  virtual void address(Instr& i, const AstOperand& operand, int slot) = 0;
  virtual Ref constant(uint64_t value, int width) = 0;
  virtual int label(const std::string& name) = 0;
  virtual Program& program() = 0;
  virtual std::vector<int> targets(const std::string& list) = 0;
  virtual void call(Instr& i) = 0;
  [[noreturn]] virtual void unsupported(const std::string& why) = 0;

  /// destination, then sources, all of one type; returns false never, throws if the count differs.
  void operands(Instr& i, Type destination_type, std::initializer_list<Type> source_types);
  void extra(Instr& i, const AstOperand& vector, Type type, bool is_destination);
};

}  // namespace megagen::emulator
