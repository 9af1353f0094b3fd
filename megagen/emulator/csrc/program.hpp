// A module as executed: one flat array of decoded instructions, with names resolved to register offsets,
// memory offsets and branch targets.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "ast.hpp"

namespace megagen::emulator {

struct Exec;
struct Instr;
struct Form;
using Handler = void (*)(Exec&, const Instr&);
using Mask = uint32_t;
inline constexpr int kLanes = 32;
inline constexpr Mask kAllLanes = 0xFFFFFFFFu;

enum class Type : uint8_t {
  None,
  B8,
  B16,
  B32,
  B64,
  B128,
  U8,
  U16,
  U32,
  U64,
  S8,
  S16,
  S32,
  S64,
  F16,
  F16x2,
  BF16,
  BF16x2,
  F32,
  F32x2,
  F64,
  TF32,
  U16x2,
  S16x2,
  Pred,
  E4M3x2,
  E5M2x2,
  E2M1x2,
  E2M3x2,
  E3M2x2,
  UE8M0x2,
  E4M3x4,
  E5M2x4,
};
Type type_of(const std::string& name);  // without the dot; None if unknown
int bytes_of(Type type);

enum class Space : uint8_t { Generic, Global, Shared, SharedCluster, Local, Param, Const };
enum class Scope : uint8_t { Cta, Cluster, Gpu, Sys };
enum class Order : uint8_t { Weak, Relaxed, Acquire, Release, AcqRel, Volatile, Mmio };

/// Where an operand lives: a register file offset (bank 0), a broadcast constant (bank 1) or a predicate
/// index.
struct Ref {
  enum Kind : uint8_t { None, Value, Predicate };
  uint32_t off = 0;
  uint8_t bank = 0;
  uint8_t width = 4;  // bytes of the register
  uint8_t kind = None;
  bool negated = false;  // predicates
};

/// How undefined bits travel from sources to the destination.
enum class Taint : uint8_t { All, Carry, Or, And, Xor, Move, ShiftLeft, ShiftRight, Select, Lanes };

struct Instr {
  Handler fn = nullptr;
  int32_t guard = -1;  // predicate index
  bool guard_not = false;
  bool touches_wgmma = false;  // accesses registers that a wgmma.mma_async also uses
  uint8_t operands = 0;
  Type type = Type::None, type2 = Type::None;
  Space space = Space::Generic;
  Scope scope = Scope::Gpu;
  Order order = Order::Weak;
  Taint taint = Taint::All;
  uint8_t vector = 1;
  uint8_t choice = 0;  // meaning belongs to the handler
  uint16_t flags = 0;  // meaning belongs to the handler
  Ref op[5];
  int64_t imm = 0;             // address offset
  int64_t offset[2] = {0, 0};  // of further addresses
  int32_t target = -1;         // branch target, callee
  uint32_t extra = 0;          // first of extra_count Refs in Program::extra
  uint32_t extra_count = 0;
  uint32_t line = 0, location = 0;
  uint32_t begin = 0, end = 0;  // text
  const Form* form = nullptr;
};

struct CallArgument {
  uint32_t from, to, bytes;  // offsets in thread-local memory
};

struct CallSite {
  std::vector<CallArgument> in, out;
};

struct FunctionInfo {
  std::string name;
  bool entry = false, defined = false;
  int start = 0, end = 0;
  std::vector<AstVariable> params, results;
  std::vector<uint32_t> param_offsets, result_offsets;  // entry: in the parameter block; else in local memory
  uint32_t param_bytes = 0;
  uint32_t maxntid[3] = {0, 0, 0}, reqntid[3] = {0, 0, 0}, cluster[3] = {0, 0, 0};
  uint32_t maxnreg = 0, minnctapersm = 0;
  uint32_t static_shared = 0;  // bytes, of this function and all that it may call
  uint32_t register_bytes = 0, predicates = 0;  // entry: of a warp that runs it, with all functions' own
  uint32_t shared_align = 16;
  bool uses_setmaxnreg = false;
};

/// A .global or .const variable: every rank has its own copy.
struct GlobalVariable {
  std::string name;
  uint64_t bytes = 0;
  uint32_t align = 1;
  bool constant = false;
  bool initialized = false;
  std::vector<uint8_t> image;
  struct Pointer {
    uint64_t at;
    std::string symbol;
    uint64_t addend;
  };
  std::vector<Pointer> pointers;
};

inline constexpr uint32_t kSharedReserved =
    1024;  // bytes at the start of shared memory that the system keeps

struct Program {
  std::vector<Instr> code;
  std::vector<Ref> extra;
  std::vector<CallSite> calls;
  std::vector<std::vector<int>> target_lists;
  std::vector<FunctionInfo> functions;
  std::vector<GlobalVariable> globals;
  std::vector<uint32_t> symbol_constants;  // constant offsets that hold a global's address, patched per rank
  struct SymbolUse {
    uint32_t constant;  // offset into the constant bank
    int global;
    int64_t addend;
  };
  std::vector<SymbolUse> symbol_uses;
  std::vector<uint8_t> constants;  // bank 1: 32-lane broadcasts
  uint32_t local_bytes = 0, static_shared = 0;
  bool dynamic_shared = false;
  bool uses_wgmma = false;
  std::string text, target;
  std::map<uint32_t, std::string> files;
  std::vector<Location> locations;
  std::vector<std::string> source_lines;

  int function(const std::string& name) const;
  std::string instruction_text(const Instr& i) const;
  /// "PTX line 12 `add.s32 %r1, ...;` (kernel.cu:34)"
  std::string describe(const Instr& i) const;
  std::string source_of(uint32_t location) const;
  const Instr* at_line(uint32_t line) const;
};

Program decode_module(AstModule&& ast);

}  // namespace megagen::emulator
