// From names to numbers: lays out variables, matches each instruction against the form table and decodes it.
#include <cstring>
#include <functional>
#include <set>
#include <sstream>

#include "error.hpp"
#include "forms.hpp"
#include "special.hpp"

namespace megagen::emulator {

namespace {

const std::map<std::string, Special>& special_registers() {
  static const std::map<std::string, Special> table = {
      {"%tid.x", Special::TidX},
      {"%tid.y", Special::TidY},
      {"%tid.z", Special::TidZ},
      {"%ntid.x", Special::NtidX},
      {"%ntid.y", Special::NtidY},
      {"%ntid.z", Special::NtidZ},
      {"%ctaid.x", Special::CtaidX},
      {"%ctaid.y", Special::CtaidY},
      {"%ctaid.z", Special::CtaidZ},
      {"%nctaid.x", Special::NctaidX},
      {"%nctaid.y", Special::NctaidY},
      {"%nctaid.z", Special::NctaidZ},
      {"%laneid", Special::LaneId},
      {"%warpid", Special::WarpId},
      {"%nwarpid", Special::NwarpId},
      {"%smid", Special::SmId},
      {"%nsmid", Special::NsmId},
      {"%gridid", Special::GridId},
      {"%clusterid.x", Special::ClusteridX},
      {"%clusterid.y", Special::ClusteridY},
      {"%clusterid.z", Special::ClusteridZ},
      {"%nclusterid.x", Special::NclusteridX},
      {"%nclusterid.y", Special::NclusteridY},
      {"%nclusterid.z", Special::NclusteridZ},
      {"%cluster_ctaid.x", Special::ClusterCtaidX},
      {"%cluster_ctaid.y", Special::ClusterCtaidY},
      {"%cluster_ctaid.z", Special::ClusterCtaidZ},
      {"%cluster_nctaid.x", Special::ClusterNctaidX},
      {"%cluster_nctaid.y", Special::ClusterNctaidY},
      {"%cluster_nctaid.z", Special::ClusterNctaidZ},
      {"%cluster_ctarank", Special::ClusterCtarank},
      {"%cluster_nctarank", Special::ClusterNctarank},
      {"%is_explicit_cluster", Special::IsExplicitCluster},
      {"%lanemask_eq", Special::LanemaskEq},
      {"%lanemask_le", Special::LanemaskLe},
      {"%lanemask_lt", Special::LanemaskLt},
      {"%lanemask_ge", Special::LanemaskGe},
      {"%lanemask_gt", Special::LanemaskGt},
      {"%clock", Special::Clock},
      {"%clock_hi", Special::ClockHi},
      {"%clock64", Special::Clock64},
      {"%globaltimer", Special::GlobalTimer},
      {"%globaltimer_lo", Special::GlobalTimerLo},
      {"%globaltimer_hi", Special::GlobalTimerHi},
      {"%total_smem_size", Special::TotalSmemSize},
      {"%aggr_smem_size", Special::AggrSmemSize},
      {"%dynamic_smem_size", Special::DynamicSmemSize},
      {"%reserved_smem_offset_begin", Special::ReservedSmemBegin},
      {"%reserved_smem_offset_end", Special::ReservedSmemEnd},
  };
  return table;
}

int register_width(Type type) {
  const int bytes = bytes_of(type);
  return bytes <= 4 ? 4 : bytes;
}

uint32_t align_up(uint32_t value, uint32_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

void set_special_handler(Instr& i, Special which, bool wide);  // exec_control.cpp

// --- The module ---

namespace {

class ModuleDecoder final : public Decoder {
 public:
  explicit ModuleDecoder(AstModule&& module) : m_(std::move(module)) {}

  Program run() {
    p_.text = std::move(m_.text);
    p_.target = m_.target;
    p_.files = m_.files;
    p_.locations = m_.locations;
    globals();
    for (const auto& f : m_.functions) {
      FunctionInfo info;
      info.name = f->name;
      info.defined = f->defined;
      p_.functions.push_back(info);
    }
    for (const auto& f : m_.functions) {
      if (!f->entry) lay_out(*f);
    }
    const uint32_t common_shared = shared_;
    for (const auto& f : m_.functions) {
      if (!f->entry) continue;
      shared_ = common_shared;
      lay_out(*f);
    }
    bodies();
    refuse_recursion();
    for (auto& [function, uses] : setmaxnreg_)
      p_.functions[static_cast<size_t>(function)].uses_setmaxnreg = uses;
    p_.local_bytes = align_up(local_, 16);
    return std::move(p_);
  }

  // Decoder interface.

  Program& program() override { return p_; }

  Ref constant(uint64_t value, int width) override {
    const auto key = std::make_pair(value, width);
    if (const auto it = constants_.find(key); it != constants_.end()) return it->second;
    const Ref ref = new_constant(value, width);
    constants_[key] = ref;
    return ref;
  }

  Ref source(const AstOperand& o, Type type) override {
    const int width = register_width(type);
    switch (o.kind) {
      case AstOperand::Integer: {
        if (type == Type::F32 || type == Type::F64) {
          return type == Type::F32 ? constant(bits32(static_cast<float>(o.value)), 4)
                                   : constant(bits64(static_cast<double>(o.value)), 8);
        }
        uint64_t value = static_cast<uint64_t>(o.value);
        if (width == 4) value &= 0xFFFFFFFFu;
        return constant(value, width);
      }
      case AstOperand::Float32:
        if (type == Type::F64) {
          float f;
          memcpy(&f, &o.bits, 4);
          return constant(bits64(f), 8);
        }
        return constant(o.bits, width);
      case AstOperand::Float64: {
        if (width == 8) return constant(o.bits, 8);
        double d;
        memcpy(&d, &o.bits, 8);
        return constant(bits32(static_cast<float>(d)), 4);
      }
      case AstOperand::Name:
        break;
      default:
        unsupported("an operand of this kind isn't expected here");
    }
    if (const auto it = special_registers().find(o.name); it != special_registers().end()) {
      return special(it->second, 0, width);
    }
    if (o.name == "WARP_SZ") return constant(32, width);
    const size_t dot = o.name.find('.');
    if (const Ref* r = find_register(o.name)) return *r;
    if (dot != std::string::npos) unsupported("components of vector registers");
    return symbol(o.name, o.value, width);
  }

  Ref destination(const AstOperand& o, Type type) override {
    if (o.kind == AstOperand::Discard) return scratch(register_width(type));
    if (o.kind == AstOperand::Name) {
      if (const Ref* r = find_register(o.name)) {
        if (r->kind == Ref::Predicate) unsupported("a predicate as destination");
        return *r;
      }
    }
    unsupported("the destination `" + o.name + "` isn't a register");
  }

  Ref predicate(const AstOperand& o) override {
    if (o.kind == AstOperand::Discard) return {};
    if (o.kind == AstOperand::Name) {
      if (const Ref* r = find_register(o.name); r && r->kind == Ref::Predicate) {
        Ref out = *r;
        out.negated = o.negated;
        return out;
      }
    }
    if (o.kind == AstOperand::Integer) {  // constants 0 and 1
      Ref out = constant_predicate();
      out.negated = o.value == 0;
      return out;
    }
    unsupported("`" + o.name + "` isn't a predicate");
  }

  bool is_predicate(const std::string& name) override {
    const Ref* r = find_register(name);
    return r && r->kind == Ref::Predicate;
  }

  void address(Instr& i, const AstOperand& o, int slot) override {
    AstOperand base = o;
    if (o.kind == AstOperand::Address) {
      i.imm = o.value;
      base.value = 0;
    }
    if (base.name.empty()) {
      i.op[slot] = constant(0, 8);
      return;
    }
    base.kind = AstOperand::Name;
    if (const Ref* r = find_register(base.name)) {
      i.op[slot] = *r;
    } else {
      i.op[slot] = symbol(base.name, 0, 8);
    }
  }

  int label(const std::string& name) override {
    for (int s = ast->scope; s >= 0; s = function_->scopes[static_cast<size_t>(s)].parent) {
      const auto& labels = function_->scopes[static_cast<size_t>(s)].labels;
      if (const auto it = labels.find(name); it != labels.end()) return it->second;
    }
    throw Error(ErrorKind::Emulator, format("PTX line %u: label `%s` isn't defined", ast->line, name.c_str()),
                true);
  }

  std::vector<int> targets(const std::string& list) override {
    for (int s = ast->scope; s >= 0; s = function_->scopes[static_cast<size_t>(s)].parent) {
      const auto& lists = function_->scopes[static_cast<size_t>(s)].target_lists;
      if (const auto it = lists.find(list); it != lists.end()) {
        std::vector<int> out;
        for (const std::string& name : it->second) out.push_back(label(name));
        return out;
      }
    }
    unsupported("`" + list + "` isn't a .branchtargets list");
  }

  void call(Instr& i) override {
    // call{.uni} [(result),] callee [, (arguments)]
    size_t k = 0;
    std::vector<std::string> results, arguments;
    if (operand(0).kind == AstOperand::Group) {
      for (const AstOperand& o : operand(0).items) results.push_back(o.name);
      k = 1;
    }
    const std::string callee = operand(k).name;
    if (k + 1 < count()) {
      for (const AstOperand& o : operand(k + 1).items) arguments.push_back(o.name);
    }
    const int index = p_.function(callee);
    if (index < 0) unsupported("indirect calls");
    const FunctionInfo& f = p_.functions[static_cast<size_t>(index)];
    CallSite site;
    const auto link = [&](const std::vector<std::string>& actual, const std::vector<AstVariable>& formal,
                          const std::vector<uint32_t>& offsets, bool in) {
      if (actual.size() != formal.size()) unsupported("the number of arguments differs from the callee's");
      for (size_t n = 0; n < actual.size(); ++n) {
        const auto bytes = static_cast<uint32_t>(formal[n].bytes());
        uint32_t mine;
        if (find_register(actual[n])) unsupported("registers as call arguments");
        mine = local_offset(actual[n]);
        if (in) {
          site.in.push_back({mine, offsets[n], bytes});
        } else {
          site.out.push_back({offsets[n], mine, bytes});
        }
      }
    };
    link(arguments, f.params, f.param_offsets, true);
    link(results, f.results, f.result_offsets, false);
    i.target = index;
    i.imm = static_cast<int64_t>(p_.calls.size());
    p_.calls.push_back(site);
    calls_[current_].insert(index);
  }

  [[noreturn]] void unsupported(const std::string& why) override {
    const char* section = form_ ? form_->section : "";
    std::string text = p_.text.substr(ast->begin, ast->end - ast->begin);
    throw Error(ErrorKind::UnsupportedInstruction,
                format("PTX line %u (%s): `%s`: %s%s%s", ast->line, p_.source_of(ast->location).c_str(),
                       text.substr(0, 300).c_str(), why.c_str(), *section ? "; see PTX ISA, " : "", section),
                true);
  }

 private:
  static uint32_t bits32(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
  }
  static uint64_t bits64(double d) {
    uint64_t b;
    memcpy(&b, &d, 8);
    return b;
  }

  Ref new_constant(uint64_t value, int width) {
    Ref ref;
    ref.kind = Ref::Value;
    ref.bank = 1;
    ref.width = static_cast<uint8_t>(width);
    ref.off = static_cast<uint32_t>(p_.constants.size());
    p_.constants.resize(p_.constants.size() + static_cast<size_t>(width) * kLanes);
    for (int l = 0; l < kLanes; ++l) {
      memcpy(&p_.constants[ref.off + static_cast<size_t>(l * width)], &value,
             static_cast<size_t>(width < 8 ? width : 8));
    }
    return ref;
  }

  Ref scratch(int width) {
    Ref ref;
    ref.kind = Ref::Value;
    ref.width = static_cast<uint8_t>(width);
    ref.off = registers_;
    registers_ += static_cast<uint32_t>(width) * kLanes;
    return ref;
  }

  Ref constant_predicate() {
    if (always_.kind == Ref::None) {
      always_.kind = Ref::Predicate;
      always_.off = 0;  // predicate 0 is all ones in every warp
    }
    return always_;
  }

  /// Emits a move from a special register, and returns its destination.
  Ref special(Special which, int64_t imm, int width) {
    Instr i;
    i.line = ast->line;
    i.location = ast->location;
    i.begin = ast->begin;
    i.end = ast->end;
    i.form = form_;
    i.op[0] = scratch(width);
    i.imm = imm;
    i.operands = 1;
    set_special_handler(i, which, width == 8);
    guard(i);
    p_.code.push_back(i);
    return i.op[0];
  }

  Ref symbol(const std::string& name, int64_t addend, int width) {
    const AstVariable* v = nullptr;
    const void* key = variable(name, &v);
    if (v && v->space == "shared") {
      const auto it = shared_offsets_.find(key);
      if (it == shared_offsets_.end()) return special(Special::DynamicSymbol, addend, width);
      return special(Special::SharedSymbol, it->second + addend, width);
    }
    if (v && (v->space == "local" || (v->space == "param" && !is_kernel_param(key)))) {
      return special(Special::LocalSymbol, local_offsets_.at(key) + addend, width);
    }
    if (v && v->space == "param")
      return special(Special::ParamSymbol, param_offsets_.at(key) + addend, width);
    for (size_t g = 0; g < p_.globals.size(); ++g) {
      if (p_.globals[g].name != name) continue;
      const Ref ref = new_constant(0, 8);
      p_.symbol_uses.push_back({ref.off, static_cast<int>(g), addend});
      return ref;
    }
    if (p_.function(name) >= 0) unsupported("addresses of functions");
    unsupported("`" + name + "` isn't declared");
  }

  bool is_kernel_param(const void* key) const { return param_offsets_.count(key) != 0; }

  uint32_t local_offset(const std::string& name) {
    const AstVariable* v = nullptr;
    const void* key = variable(name, &v);
    const auto it = local_offsets_.find(key);
    if (it == local_offsets_.end()) unsupported("`" + name + "` isn't a .param variable of this function");
    return it->second;
  }

  const void* variable(const std::string& name, const AstVariable** out) {
    for (int s = ast->scope; s >= 0; s = function_->scopes[static_cast<size_t>(s)].parent) {
      const auto& variables = function_->scopes[static_cast<size_t>(s)].variables;
      if (const auto it = variables.find(name); it != variables.end()) {
        *out = &it->second;
        return *out;
      }
    }
    for (const auto* list : {&function_->params, &function_->results}) {
      for (const AstVariable& v : *list) {
        if (v.name == name) return *out = &v;
      }
    }
    for (const AstVariable& v : m_.variables) {
      if (v.name == name) return *out = &v;
    }
    return nullptr;
  }

  const Ref* find_register(const std::string& name) {
    for (int s = ast->scope; s >= 0; s = function_->scopes[static_cast<size_t>(s)].parent) {
      auto& known = registers_of_[{function_, s}];
      if (const auto it = known.find(name); it != known.end()) return &it->second;
      const AstVariable* declared = declared_register(function_->scopes[static_cast<size_t>(s)], name);
      if (!declared) continue;
      if (declared->vector != 1) unsupported("vector registers");
      Ref ref;
      if (declared->type == "pred") {
        ref.kind = Ref::Predicate;
        ref.off = predicates_++;
      } else {
        ref = scratch(register_width(type_of(declared->type)));
      }
      return &(known[name] = ref);
    }
    return nullptr;
  }

  static const AstVariable* declared_register(const AstScope& scope, const std::string& name) {
    if (const auto it = scope.variables.find(name); it != scope.variables.end()) {
      return it->second.space == "reg" && it->second.range < 0 ? &it->second : nullptr;
    }
    const size_t digits = name.find_last_not_of("0123456789") + 1;
    if (digits == name.size() || digits == 0) return nullptr;
    // %r12 under %r<20>; a prefix may itself end in digits (%f1<4>), so try every split.
    for (size_t split = digits; split < name.size(); ++split) {
      const auto it = scope.variables.find(name.substr(0, split));
      if (it != scope.variables.end() && it->second.range > atoll(name.c_str() + split)) return &it->second;
    }
    return nullptr;
  }

  void globals() {
    for (const AstVariable& v : m_.variables) {
      if (v.space == "shared") {
        if (v.external || v.count == 0) continue;
        shared_ = align_up(shared_, v.align);
        shared_offsets_[&v] = shared_;
        shared_ += static_cast<uint32_t>(v.bytes());
        continue;
      }
      GlobalVariable g;
      g.name = v.name;
      g.bytes = v.bytes();
      g.align = std::max(v.align, 16u);
      g.constant = v.space == "const";
      g.image.resize(g.bytes);
      g.initialized = true;  // the ISA zero-fills what has no initializer
      for (size_t k = 0; k < v.initial.size(); ++k) {
        const auto& item = v.initial[k];
        if (!item.symbol.empty()) {
          g.pointers.push_back({k * v.element_bytes, item.symbol, item.bits});
        } else {
          memcpy(&g.image[k * v.element_bytes], &item.bits, v.element_bytes);
        }
      }
      p_.globals.push_back(g);
    }
  }

  /// Offsets of a function's parameters and .local, .shared and .param variables.
  void lay_out(const AstFunction& f) {
    FunctionInfo& info = p_.functions[static_cast<size_t>(p_.function(f.name))];
    info.entry = f.entry;
    info.params = f.params;
    info.results = f.results;
    memcpy(info.maxntid, f.maxntid, sizeof info.maxntid);
    memcpy(info.reqntid, f.reqntid, sizeof info.reqntid);
    memcpy(info.cluster, f.cluster, sizeof info.cluster);
    info.maxnreg = f.maxnreg;
    info.minnctapersm = f.minnctapersm;
    uint32_t at = 0;
    for (const AstVariable& v : f.params) {
      if (f.entry) {
        at = align_up(at, std::max(1u, v.align));
        info.param_offsets.push_back(at);
        param_offsets_[&v] = at;
        at += static_cast<uint32_t>(v.bytes());
      } else {
        info.param_offsets.push_back(add_local(v));
      }
    }
    info.param_bytes = at;
    for (const AstVariable& v : f.results) info.result_offsets.push_back(add_local(v));
    for (const AstScope& s : f.scopes) {
      for (const auto& [name, v] : s.variables) {
        if (v.space == "local" || v.space == "param") add_local(v);
        if (v.space == "shared" && v.count > 0) {
          shared_ = align_up(shared_, v.align);
          shared_offsets_[&v] = shared_;
          shared_ += static_cast<uint32_t>(v.bytes());
        }
      }
    }
    info.static_shared = shared_ - kSharedReserved;
    for (const AstVariable& v : m_.variables) {
      if (v.space == "shared" && (v.external || v.count == 0))
        info.shared_align = std::max(info.shared_align, v.align);
    }
  }

  uint32_t add_local(const AstVariable& v) {
    local_ = align_up(local_, std::max(4u, v.align));
    local_offsets_[&v] = local_;
    const uint32_t at = local_;
    local_ += static_cast<uint32_t>(v.bytes());
    return at;
  }

  void guard(Instr& i) {
    if (ast->guard.empty()) return;
    const Ref* r = find_register(ast->guard);
    if (!r || r->kind != Ref::Predicate) unsupported("the guard `" + ast->guard + "` isn't a predicate");
    i.guard = static_cast<int32_t>(r->off);
    i.guard_not = ast->guard_negated;
  }

  /// Functions first: each has registers of its own. An entry's come after them, and as a warp runs one entry
  /// alone, those of all entries share their places.
  void bodies() {
    for (const bool entries : {false, true}) {
      const uint32_t registers = registers_, predicates = predicates_;
      for (size_t k = 0; k < m_.functions.size(); ++k) {
        const AstFunction& f = *m_.functions[k];
        if (f.entry != entries || !f.defined) continue;
        if (entries) registers_ = registers, predicates_ = predicates;
        body(f, p_.functions[k]);
        p_.functions[k].register_bytes = registers_;
        p_.functions[k].predicates = predicates_;
      }
    }
  }

  void body(const AstFunction& f, FunctionInfo& info) {
    function_ = &f;
    current_ = static_cast<int>(&info - p_.functions.data());
    info.start = static_cast<int>(p_.code.size());
    std::vector<int> first;  // index of the first decoded instruction of each parsed one
    for (const AstInstruction& a : f.instructions) {
      first.push_back(static_cast<int>(p_.code.size()));
      ast = &a;
      instruction(a);
    }
    // Falling off the end returns.
    AstInstruction ret;
    ret.opcode = "ret";
    ret.line = f.instructions.empty() ? f.line : f.instructions.back().line;
    ret.location = f.instructions.empty() ? 0 : f.instructions.back().location;
    first.push_back(static_cast<int>(p_.code.size()));
    ast = &ret;
    instruction(ret);
    ast = nullptr;
    info.end = static_cast<int>(p_.code.size());
    // Labels were indices of parsed instructions.
    for (int k = info.start; k < info.end; ++k) {
      Instr& i = p_.code[static_cast<size_t>(k)];
      if (i.form && std::string(i.form->pattern).rfind("bra", 0) == 0)
        i.target = first[static_cast<size_t>(i.target)];
    }
    for (size_t k = lists_done_; k < p_.target_lists.size(); ++k) {
      for (int& t : p_.target_lists[k]) t = first[static_cast<size_t>(t)];
    }
    lists_done_ = p_.target_lists.size();
  }

  void instruction(const AstInstruction& a) {
    form_ = nullptr;
    const auto* rows = FormTable::get().rows(a.opcode);
    if (!rows) unsupported("this instruction isn't implemented");
    static const std::set<std::string> kAnyOrder = {"atom",     "red",      "ld",     "st",
                                                    "ldmatrix", "stmatrix", "tcgen05"};
    const bool any_order = kAnyOrder.count(a.opcode) != 0;
    for (const bool ordered : {true, false}) {
      if (!ordered && !any_order) break;
      for (const FormTable::Row& row : *rows) {
        if (row.match(a.modifiers, ordered, matched)) {
          emit(a, row);
          return;
        }
      }
    }
    form_ = rows->front().form;
    unsupported("this form isn't implemented");
  }

  void emit(const AstInstruction& a, const FormTable::Row& row) {
    form_ = row.form;
    Instr i;
    i.form = form_;
    i.line = a.line;
    i.location = a.location;
    i.begin = a.begin;
    i.end = a.end;
    guard(i);
    form_->decode(*this, i);
    if (a.opcode == "setmaxnreg") setmaxnreg_[current_] = true;
    p_.code.push_back(i);
  }

  void refuse_recursion() {
    std::set<int> open, done;
    const std::function<void(int)> visit = [&](int f) {
      if (done.count(f)) return;
      if (!open.insert(f).second) {
        throw Error(ErrorKind::UnsupportedInstruction,
                    "function `" + p_.functions[static_cast<size_t>(f)].name +
                        "` is recursive; see PTX ISA, Control Flow Instructions: call",
                    true);
      }
      for (int callee : calls_[f]) visit(callee);
      open.erase(f);
      done.insert(f);
    };
    for (size_t f = 0; f < p_.functions.size(); ++f) visit(static_cast<int>(f));
  }

  AstModule m_;
  Program p_;
  const AstFunction* function_ = nullptr;
  const Form* form_ = nullptr;
  int current_ = 0;
  size_t lists_done_ = 0;
  uint32_t registers_ = 0, predicates_ = 1, local_ = 16, shared_ = kSharedReserved;
  Ref always_;
  std::map<std::pair<const AstFunction*, int>, std::unordered_map<std::string, Ref>> registers_of_;
  std::map<std::pair<uint64_t, int>, Ref> constants_;
  std::map<const void*, uint32_t> shared_offsets_, local_offsets_, param_offsets_;
  std::map<int, std::set<int>> calls_;
  std::map<int, bool> setmaxnreg_;
};

}  // namespace

void mark_wgmma_registers(Program& program);  // exec_matrix.cpp

Program decode_module(AstModule&& ast) {
  Program p = ModuleDecoder(std::move(ast)).run();
  mark_wgmma_registers(p);
  return p;
}

int Program::function(const std::string& name) const {
  for (size_t k = 0; k < functions.size(); ++k) {
    if (functions[k].name == name) return static_cast<int>(k);
  }
  return -1;
}

std::string Program::instruction_text(const Instr& i) const {
  std::string out = text.substr(i.begin, i.end - i.begin);
  for (char& c : out) {
    if (c == '\n' || c == '\t') c = ' ';
  }
  return out.size() > 160 ? out.substr(0, 160) + "..." : out;
}

std::string Program::source_of(uint32_t location) const {
  const Location& l = locations[location < locations.size() ? location : 0];
  const auto it = files.find(l.file);
  if (it == files.end()) return "no source line";
  const size_t slash = it->second.find_last_of('/');
  return format("%s:%u", it->second.c_str() + (slash == std::string::npos ? 0 : slash + 1), l.line);
}

const Instr* Program::at_line(uint32_t line) const {
  for (const Instr& i : code) {
    if (i.line == line) return &i;
  }
  return nullptr;
}

std::string Program::describe(const Instr& i) const {
  std::string out =
      format("PTX line %u `%s` (%s", i.line, instruction_text(i).c_str(), source_of(i.location).c_str());
  const Location& l = locations[i.location];
  if (l.line > 0 && l.line <= source_lines.size()) {
    const std::string& source = source_lines[l.line - 1];
    const size_t start = source.find_first_not_of(" \t");
    if (start != std::string::npos) out += ": " + source.substr(start, 120);
  }
  return out + ")";
}

}  // namespace megagen::emulator
