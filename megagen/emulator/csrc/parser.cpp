// Parser of PTX text: lexer and recursive descent. Source: PTX ISA, "Syntax", "Directives".
#include <cctype>
#include <cstdlib>
#include <cstring>

#include "ast.hpp"
#include "error.hpp"

namespace megagen::emulator {

uint32_t type_bytes(const std::string& t) {
  if (t == "pred") return 4;
  if (t == "f16x2" || t == "bf16x2") return 4;
  if (t == "f32x2") return 8;
  if (t == "bf16") return 2;
  if (t == "tf32") return 4;
  const char* digits = t.c_str();
  while (*digits && !isdigit(static_cast<unsigned char>(*digits))) ++digits;
  const int bits = atoi(digits);
  return bits >= 8 ? static_cast<uint32_t>(bits / 8) : 0;
}

namespace {

struct Token {
  enum Kind { End, Word, Directive, Number, String, Punct } kind = End;
  std::string text;
  AstOperand number;
  uint32_t line = 0, begin = 0;
};

bool is_word(char c) { return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%'; }

class Lexer {
 public:
  explicit Lexer(const std::string& text) : s_(text) { advance(); }

  const Token& peek() const { return token_; }
  Token take() {
    Token t = token_;
    advance();
    return t;
  }
  uint32_t position() const { return token_.begin; }
  uint32_t last_end() const { return last_end_; }

 private:
  void skip_space() {
    while (at_ < s_.size()) {
      const char c = s_[at_];
      if (c == '\n') ++line_;
      if (isspace(static_cast<unsigned char>(c))) {
        ++at_;
      } else if (s_.compare(at_, 2, "//") == 0) {
        while (at_ < s_.size() && s_[at_] != '\n') ++at_;
      } else if (s_.compare(at_, 2, "/*") == 0) {
        while (at_ < s_.size() && s_.compare(at_, 2, "*/") != 0) line_ += s_[at_++] == '\n';
        at_ += 2;
      } else {
        break;
      }
    }
  }

  void number() {
    const size_t start = at_;
    AstOperand& n = token_.number;
    token_.kind = Token::Number;
    const char kind = at_ + 1 < s_.size() && s_[at_] == '0' ? s_[at_ + 1] : 0;
    if (kind == 'f' || kind == 'F' || kind == 'd' || kind == 'D') {
      const size_t digits = kind == 'f' || kind == 'F' ? 8 : 16;
      n.kind = digits == 8 ? AstOperand::Float32 : AstOperand::Float64;
      n.bits = strtoull(s_.substr(at_ + 2, digits).c_str(), nullptr, 16);
      at_ += 2 + digits;
    } else if (kind == 'x' || kind == 'X') {
      at_ += 2;
      n.kind = AstOperand::Integer;
      char* end;
      n.value = static_cast<int64_t>(strtoull(s_.c_str() + at_, &end, 16));
      at_ = static_cast<size_t>(end - s_.c_str());
    } else if (kind == 'b' || kind == 'B') {
      n.kind = AstOperand::Integer;
      char* end;
      n.value = static_cast<int64_t>(strtoull(s_.c_str() + at_ + 2, &end, 2));
      at_ = static_cast<size_t>(end - s_.c_str());
    } else {
      size_t stop = at_;
      while (stop < s_.size() && isdigit(static_cast<unsigned char>(s_[stop]))) ++stop;
      const bool real =
          stop < s_.size() && (s_[stop] == '.' || s_[stop] == 'e' || s_[stop] == 'E') &&
          (s_[stop] != '.' || (stop + 1 < s_.size() && (isdigit(static_cast<unsigned char>(s_[stop + 1])) ||
                                                        !isalpha(static_cast<unsigned char>(s_[stop + 1])))));
      char* end;
      if (real) {
        n.kind = AstOperand::Float64;
        const double value = strtod(s_.c_str() + at_, &end);
        memcpy(&n.bits, &value, 8);
      } else {
        n.kind = AstOperand::Integer;
        n.value = static_cast<int64_t>(strtoull(s_.c_str() + at_, &end, s_[at_] == '0' ? 8 : 10));
      }
      at_ = static_cast<size_t>(end - s_.c_str());
    }
    if (at_ < s_.size() && (s_[at_] == 'U' || s_[at_] == 'u')) ++at_;
    token_.text = s_.substr(start, at_ - start);
  }

  void advance() {
    last_end_ = static_cast<uint32_t>(at_);
    skip_space();
    token_ = Token();
    token_.line = line_;
    token_.begin = static_cast<uint32_t>(at_);
    if (at_ >= s_.size()) return;
    const char c = s_[at_];
    size_t stop = at_;
    if (isdigit(static_cast<unsigned char>(c))) {
      number();
      return;
    }
    if (c == '"') {
      stop = s_.find('"', at_ + 1);
      token_.kind = Token::String;
      token_.text = s_.substr(at_ + 1, stop - at_ - 1);
      at_ = stop + 1;
      return;
    }
    if (c == '.' && at_ + 1 < s_.size() && is_word(s_[at_ + 1])) {
      token_.kind = Token::Directive;
      ++stop;
    } else if (is_word(c)) {
      token_.kind = Token::Word;
    } else {
      token_.kind = Token::Punct;
      token_.text = std::string(1, c);
      ++at_;
      return;
    }
    while (stop < s_.size() &&
           (is_word(s_[stop]) || (s_[stop] == ':' && stop + 2 < s_.size() && s_[stop + 1] == ':' &&
                                  token_.kind == Token::Directive))) {
      stop += s_[stop] == ':' ? 2 : 1;
    }
    token_.text = s_.substr(at_, stop - at_);
    at_ = stop;
  }

  const std::string& s_;
  size_t at_ = 0;
  uint32_t line_ = 1, last_end_ = 0;
  Token token_;
};

class Parser {
 public:
  Parser(const std::string& text, AstModule& module) : lex_(text), m_(module) { m_.locations.push_back({}); }

  void run() {
    while (lex_.peek().kind != Token::End) top_level();
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const {
    const Token& t = lex_.peek();
    throw Error(ErrorKind::Emulator,
                format("PTX line %u: expected %s, found '%s'", t.line, expected.c_str(), t.text.c_str()),
                true);
  }
  bool at(const char* text) const { return lex_.peek().kind != Token::String && lex_.peek().text == text; }
  bool accept(const char* text) {
    if (!at(text)) return false;
    lex_.take();
    return true;
  }
  void expect(const char* text) {
    if (!accept(text)) fail(text);
  }
  std::string word() {
    if (lex_.peek().kind != Token::Word) fail("a name");
    return lex_.take().text;
  }
  int64_t integer() {
    const bool minus = accept("-");
    if (lex_.peek().kind != Token::Number) fail("a number");
    const int64_t value = lex_.take().number.value;
    return minus ? -value : value;
  }
  void skip_block() {
    int depth = 0;
    do {
      if (lex_.peek().kind == Token::End) fail("}");
      const Token t = lex_.take();
      if (t.kind == Token::Punct) depth += t.text == "{" ? 1 : t.text == "}" ? -1 : 0;
    } while (depth);
  }

  void location() {  // .loc file line column [, function_name .. ] [, inlined_at ..]
    Location l;
    l.file = static_cast<uint32_t>(integer());
    l.line = static_cast<uint32_t>(integer());
    l.column = static_cast<uint32_t>(integer());
    if (accept(",")) {
      word();  // function_name
      word();
      if (accept("+")) integer();
      if (accept(",")) {
        word();  // inlined_at
        integer();
        integer();
        integer();
      }
    }
    m_.locations.push_back(l);
  }

  void top_level() {
    bool external = false;
    for (;;) {
      const Token t = lex_.peek();
      if (t.kind != Token::Directive) fail("a directive");
      if (t.text == ".version") {
        lex_.take();
        m_.version = lex_.take().text;
        return;
      }
      if (t.text == ".target") {
        lex_.take();
        m_.target = word();
        while (accept(",")) word();
        return;
      }
      if (t.text == ".address_size") {
        lex_.take();
        integer();
        return;
      }
      if (t.text == ".file") {
        lex_.take();
        const auto id = static_cast<uint32_t>(integer());
        m_.files[id] = lex_.take().text;
        while (accept(",")) integer();
        return;
      }
      if (t.text == ".section") {
        lex_.take();
        lex_.take();
        skip_block();
        return;
      }
      if (t.text == ".pragma" || t.text == ".alias") {
        while (!accept(";")) lex_.take();
        return;
      }
      if (t.text == ".loc") {
        lex_.take();
        location();
        return;
      }
      if (t.text == ".extern" || t.text == ".visible" || t.text == ".weak" || t.text == ".common") {
        external = lex_.take().text == ".extern";
        continue;
      }
      if (t.text == ".entry" || t.text == ".func") {
        function();
        return;
      }
      for (AstVariable& v : variables(external)) m_.variables.push_back(std::move(v));
      expect(";");
      return;
    }
  }

  /// .space [.align n] [.vN] .type name[<n>] [[n]] [= init], name ...
  std::vector<AstVariable> variables(bool external) {
    AstVariable v;
    v.external = external;
    v.space = lex_.take().text.substr(1);
    const bool is_param = v.space == "param";
    while (lex_.peek().kind == Token::Directive) {
      const std::string d = lex_.take().text.substr(1);
      if (d == "align") {
        v.align = static_cast<uint32_t>(integer());
      } else if (d == "v2" || d == "v4" || d == "v8") {
        v.vector = d[1] - '0';
      } else if (d == "ptr") {
        while (lex_.peek().kind == Token::Directive) {
          if (lex_.take().text == ".align") integer();
        }
        break;
      } else if (d.rfind("attribute", 0) == 0) {
        expect("(");
        while (!accept(")")) lex_.take();
      } else {
        v.type = d;
        v.element_bytes = type_bytes(d);
        if (v.element_bytes == 0) fail("a type");
      }
    }
    std::vector<AstVariable> out;
    do {
      AstVariable one = v;
      one.name = word();
      if (accept("<")) {
        one.range = integer();
        expect(">");
      }
      while (accept("[")) {
        if (at("]")) {
          one.count = 0;
        } else {
          one.count *= static_cast<uint64_t>(integer());
        }
        expect("]");
      }
      if (accept("=")) initializer(one);
      if (one.align == 0) one.align = one.element_bytes * static_cast<uint32_t>(one.vector);
      if (one.count == 0 && !one.initial.empty()) one.count = one.initial.size();
      out.push_back(one);
    } while (!is_param && accept(","));
    return out;
  }

  void initializer(AstVariable& v) {
    if (accept("{")) {
      while (!accept("}")) {
        initializer(v);
        accept(",");
      }
      return;
    }
    AstVariable::Initial item;
    const bool minus = accept("-");
    if (lex_.peek().kind == Token::Number) {
      const AstOperand n = lex_.take().number;
      item.bits = n.kind == AstOperand::Integer ? static_cast<uint64_t>(minus ? -n.value : n.value) : n.bits;
      if (n.kind == AstOperand::Float64 && v.type == "f32") {
        double d;
        memcpy(&d, &n.bits, 8);
        const float f = static_cast<float>(minus ? -d : d);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        item.bits = bits;
      }
    } else {
      item.symbol = word();
      if (item.symbol == "generic" && accept("(")) {
        item.generic = true;
        item.symbol = word();
        expect(")");
      }
      if (accept("+")) item.bits = static_cast<uint64_t>(integer());
    }
    v.initial.push_back(item);
  }

  void function() {
    auto f = std::make_unique<AstFunction>();
    f->line = lex_.peek().line;
    f->entry = lex_.take().text == ".entry";
    while (lex_.peek().kind == Token::Directive) lex_.take();  // .noreturn and the like
    if (accept("(")) {
      while (!accept(")")) {
        for (AstVariable& v : variables(false)) f->results.push_back(std::move(v));
        accept(",");
      }
    }
    f->name = word();
    if (accept("(")) {
      while (!accept(")")) {
        for (AstVariable& v : variables(false)) f->params.push_back(std::move(v));
        accept(",");
      }
    }
    while (!at("{") && !at(";")) {
      const std::string d = lex_.take().text;
      uint32_t* triple = d == ".maxntid"             ? f->maxntid
                         : d == ".reqntid"           ? f->reqntid
                         : d == ".reqnctapercluster" ? f->cluster
                                                     : nullptr;
      uint32_t values[3] = {1, 1, 1};
      int n = 0;
      while (lex_.peek().kind == Token::Number || at(",")) {
        if (accept(",")) continue;
        const auto value = static_cast<uint32_t>(integer());
        if (n < 3) values[n++] = value;
      }
      if (triple) memcpy(triple, values, sizeof values);
      if (d == ".maxnreg") f->maxnreg = values[0];
      if (d == ".minnctapersm") f->minnctapersm = values[0];
      if (d == ".pragma")
        while (!accept(";")) lex_.take();
      if (d == ".attribute") {
        expect("(");
        while (!accept(")")) lex_.take();
      }
    }
    if (!accept(";")) {
      f->defined = true;
      body(*f);
    }
    // A definition replaces an earlier declaration.
    for (auto& old : m_.functions) {
      if (old->name == f->name) {
        if (f->defined) old = std::move(f);
        return;
      }
    }
    m_.functions.push_back(std::move(f));
  }

  void body(AstFunction& f) {
    expect("{");
    f.scopes.push_back({});
    int scope = 0;
    std::vector<int> stack{0};
    for (;;) {
      const Token t = lex_.peek();
      if (t.kind == Token::End) fail("}");
      if (accept("}")) {
        stack.pop_back();
        if (stack.empty()) return;
        scope = stack.back();
      } else if (accept("{")) {
        AstScope inner;
        inner.parent = scope;
        f.scopes.push_back(inner);
        scope = static_cast<int>(f.scopes.size()) - 1;
        stack.push_back(scope);
      } else if (t.kind == Token::Directive) {
        directive(f, scope, "");
      } else if (!accept(";")) {
        statement(f, scope);
      }
    }
  }

  void directive(AstFunction& f, int scope, const std::string& label) {
    const std::string d = lex_.peek().text;
    if (d == ".loc") {
      lex_.take();
      location();
    } else if (d == ".branchtargets" || d == ".calltargets") {
      lex_.take();
      auto& list = f.scopes[static_cast<size_t>(scope)].target_lists[label];
      do list.push_back(word());
      while (accept(","));
      expect(";");
    } else if (d == ".pragma" || d == ".callprototype" || d == ".file" || d == ".section") {
      if (d == ".section") {
        lex_.take();
        lex_.take();
        skip_block();
      } else {
        while (!accept(";")) lex_.take();
      }
    } else if (d == ".reg" || d == ".param" || d == ".local" || d == ".shared" || d == ".const" ||
               d == ".global") {
      for (AstVariable& v : variables(false)) f.scopes[static_cast<size_t>(scope)].variables[v.name] = v;
      expect(";");
    } else {
      fail("a known directive");
    }
  }

  void statement(AstFunction& f, int scope) {
    AstInstruction i;
    i.scope = scope;
    i.location = static_cast<uint32_t>(m_.locations.size()) - 1;
    i.line = lex_.peek().line;
    i.begin = lex_.position();
    if (accept("@")) {
      i.guard_negated = accept("!");
      i.guard = word();
    }
    if (lex_.peek().kind != Token::Word) fail("an instruction");
    i.opcode = word();
    if (i.guard.empty() && accept(":")) {
      f.scopes[static_cast<size_t>(scope)].labels[i.opcode] = static_cast<int>(f.instructions.size());
      if (lex_.peek().kind == Token::Directive &&
          (at(".branchtargets") || at(".calltargets") || at(".callprototype"))) {
        directive(f, scope, i.opcode);
      }
      return;
    }
    while (lex_.peek().kind == Token::Directive) i.modifiers.push_back(lex_.take().text);
    while (!at(";")) {
      i.operands.push_back(operand());
      if (!at(";")) expect(",");
    }
    i.end = lex_.position();
    lex_.take();
    f.instructions.push_back(std::move(i));
  }

  AstOperand operand() {
    AstOperand o = single();
    if (!accept("|")) return o;
    AstOperand pair;
    pair.kind = AstOperand::Pair;
    pair.items.push_back(std::move(o));
    pair.items.push_back(single());
    return pair;
  }

  AstOperand list(const char* close, AstOperand::Kind kind) {
    AstOperand o;
    o.kind = kind;
    while (!accept(close)) {
      o.items.push_back(operand());
      accept(",");
    }
    return o;
  }

  AstOperand single() {
    if (accept("{")) return list("}", AstOperand::Vector);
    if (accept("(")) return list(")", AstOperand::Group);
    if (accept("[")) return address();
    AstOperand o;
    o.negated = accept("!");
    if (accept("-")) {
      o = lex_.take().number;
      o.value = -o.value;
      if (o.kind == AstOperand::Float64) o.bits ^= uint64_t{1} << 63;
      if (o.kind == AstOperand::Float32) o.bits ^= uint64_t{1} << 31;
      return o;
    }
    if (lex_.peek().kind == Token::Number) return lex_.take().number;
    o.name = word();
    if (o.name == "_") o.kind = AstOperand::Discard;
    while (lex_.peek().kind == Token::Directive) o.name += lex_.take().text;  // %tid.x
    if (accept("+")) o.value = integer();
    return o;
  }

  AstOperand address() {
    AstOperand o;
    o.kind = AstOperand::Address;
    if (lex_.peek().kind == Token::Word) {
      o.name = word();
      if (accept("+")) {
        o.value = integer();
      } else if (accept("-")) {
        o.value = -integer();
      }
    } else {
      o.value = integer();
    }
    while (accept(",")) o.items.push_back(operand());
    expect("]");
    return o;
  }

  Lexer lex_;
  AstModule& m_;
};

}  // namespace

AstModule parse_ptx(const std::string& text) {
  AstModule module;
  module.text = text;
  Parser(module.text, module).run();
  return module;
}

}  // namespace megagen::emulator
