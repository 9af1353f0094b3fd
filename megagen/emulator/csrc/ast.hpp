// PTX as parsed: names are still names, and nothing is checked against the instruction set.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace megagen::emulator {

struct AstOperand {
  enum Kind { Name, Integer, Float32, Float64, Address, Vector, Discard, Pair, Group } kind = Name;
  std::string name;      // Name; for Address the base (empty: absolute)
  int64_t value = 0;     // Integer; for Address the offset
  uint64_t bits = 0;     // Float32, Float64: the encoding
  bool negated = false;  // !p
  std::vector<AstOperand>
      items;  // Vector {..}, Pair p|q, Group (..); for Address what follows the base: [map, {x, y}]
};

struct AstInstruction {
  std::string opcode;                  // up to the first dot
  std::vector<std::string> modifiers;  // with their dots
  std::vector<AstOperand> operands;
  std::string guard;  // empty: always
  bool guard_negated = false;
  int scope = 0;
  uint32_t line = 0;      // of the PTX text
  uint32_t location = 0;  // index into AstModule::locations
  uint32_t begin = 0, end = 0;
};

struct AstVariable {
  std::string space;  // "reg", "local", "shared", "param", "global", "const"
  std::string type;   // "b32", ...
  std::string name;
  uint64_t count = 1;  // elements; 0: unsized extern array
  uint32_t element_bytes = 0;
  uint32_t align = 0;
  int vector = 1;
  bool external = false;
  int64_t range = -1;  // name<range>
  struct Initial {
    uint64_t bits = 0;
    std::string symbol;
    bool generic = false;
  };
  std::vector<Initial> initial;
  uint64_t bytes() const { return count * element_bytes * vector; }
};

/// Names declared in a {} block, with the enclosing block.
struct AstScope {
  int parent = -1;
  std::map<std::string, AstVariable> variables;
  std::map<std::string, int> labels;                             // to an index of AstFunction::instructions
  std::map<std::string, std::vector<std::string>> target_lists;  // .branchtargets, .calltargets
};

struct AstFunction {
  std::string name;
  bool entry = false, defined = false;
  std::vector<AstVariable> results, params;
  std::vector<AstScope> scopes;
  std::vector<AstInstruction> instructions;
  std::vector<AstVariable> statics;  // .shared and .local of any block
  uint32_t maxntid[3] = {0, 0, 0}, reqntid[3] = {0, 0, 0}, cluster[3] = {0, 0, 0};
  uint32_t maxnreg = 0, minnctapersm = 0;
  uint32_t line = 0;
};

struct Location {
  uint32_t file = 0, line = 0, column = 0;
};

struct AstModule {
  std::string text, version, target;
  std::vector<AstVariable> variables;
  std::vector<std::unique_ptr<AstFunction>> functions;
  std::map<uint32_t, std::string> files;
  std::vector<Location> locations;
};

/// Parses a whole module. Throws Error(Emulator) with the line of what it can't read.
AstModule parse_ptx(const std::string& text);

uint32_t type_bytes(const std::string& type);

}  // namespace megagen::emulator
