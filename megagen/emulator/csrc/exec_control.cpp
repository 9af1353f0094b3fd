// Control flow, special registers, time, register budgets, printf.
// Source: PTX ISA, "Control Flow Instructions", "Special Registers", "Miscellaneous Instructions",
// "nanosleep", "Parallel Synchronization and Communication Instructions: griddepcontrol".
#include "alu.hpp"
#include "special.hpp"

namespace megagen::emulator {
namespace {

void bra(Exec& x, const Instr& i) { x.jump(i.target); }
void decode_bra(Decoder& d, Instr& i) {
  i.target = d.label(d.operand(0).name);
  i.fn = bra;
}

void brx(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "branch index");
  const auto& targets = x.program.target_lists[static_cast<size_t>(i.imm)];
  const auto index = x.view<uint32_t>(i.op[1]);
  const uint32_t first = index[__builtin_ctz(x.mask)];
  Mask same = 0;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    if (index[l] == first) same |= 1u << l;
  }
  if (first >= targets.size())
    fail(ErrorKind::MemoryFault, format("branch index %u of %zu targets", first, targets.size()));
  if (same != x.mask) {  // the other lanes execute the instruction again
    x.split_inactive();
    auto rest = std::make_unique<Fragment>();
    rest->mask = x.mask & ~same;
    rest->pc = x.here();
    rest->stack = x.f->stack;
    x.f->mask = x.mask = same;
    x.w.fragments.push_back(std::move(rest));
  }
  x.jump(targets[first]);
}
void decode_brx(Decoder& d, Instr& i) {
  i.op[1] = d.source(d.operand(0), Type::U32);
  i.imm = static_cast<int64_t>(d.program().target_lists.size());
  d.program().target_lists.push_back(d.targets(d.operand(1).name));
  i.fn = brx;
}

void copy_arguments(Exec& x, const std::vector<CallArgument>& list) {
  const size_t stride = x.program.local_bytes;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const auto lane = static_cast<size_t>(__builtin_ctz(rest));
    for (const CallArgument& a : list) {
      memcpy(&x.w.local[lane * stride + a.to], &x.w.local[lane * stride + a.from], a.bytes);
      memcpy(&x.w.local_undefined[lane * stride + a.to], &x.w.local_undefined[lane * stride + a.from],
             a.bytes);
    }
  }
}

void call(Exec& x, const Instr& i) {
  x.split_inactive();
  copy_arguments(x, x.program.calls[static_cast<size_t>(i.imm)].in);
  x.f->stack.push_back(x.here());
  x.f->pc = x.program.functions[static_cast<size_t>(i.target)].start;
}

// --- printf ---

uint64_t local_value(const Exec& x, int lane, uint64_t address, uint32_t bytes) {
  if (address >= kLocalWindow) address -= kLocalWindow;
  const size_t stride = x.program.local_bytes;
  if (address + bytes > stride)
    fail(ErrorKind::MemoryFault, "vprintf's argument buffer isn't in local memory");
  uint64_t v = 0;
  memcpy(&v, &x.w.local[static_cast<size_t>(lane) * stride + address], bytes);
  return v;
}

std::string global_string(const Exec& x, int lane, uint64_t address) {
  std::string out;
  for (;; ++address) {
    const Place p = x.resolve(Space::Generic, address, 1, lane, 1);
    const char c = static_cast<char>(*p.data());
    if (!c) return out;
    out += c;
  }
}

std::string formatted(const Exec& x, int lane, const std::string& pattern, uint64_t arguments) {
  std::string out;
  uint64_t at = 0;
  for (size_t k = 0; k < pattern.size(); ++k) {
    if (pattern[k] != '%') {
      out += pattern[k];
      continue;
    }
    std::string spec = "%";
    bool wide = false;
    for (++k; k < pattern.size() && !strchr("diouxXeEfFgGaAcsp%", pattern[k]); ++k) {
      if (pattern[k] == 'l' || pattern[k] == 'j' || pattern[k] == 'z' || pattern[k] == 't')
        wide = true;
      else if (pattern[k] != 'h')
        spec += pattern[k];
    }
    const char c = k < pattern.size() ? pattern[k] : '%';
    if (c == '%') {
      out += '%';
      continue;
    }
    const bool real = strchr("eEfFgGaA", c), pointer = c == 's' || c == 'p';
    const uint32_t bytes = real || pointer || wide ? 8 : 4;
    at = (at + bytes - 1) / bytes * bytes;
    const uint64_t v = local_value(x, lane, arguments + at, bytes);
    at += bytes;
    if (real) {
      double value;
      memcpy(&value, &v, 8);
      out += format((spec + c).c_str(), value);
    } else if (c == 's') {
      out += format((spec + c).c_str(), v ? global_string(x, lane, v).c_str() : "(null)");
    } else if (c == 'p') {
      out += format("0x%llx", static_cast<unsigned long long>(v));
    } else if (c == 'c') {
      out += static_cast<char>(v);
    } else if (c == 'd' || c == 'i') {
      out += format((spec + "ll" + c).c_str(),
                    static_cast<long long>(wide ? static_cast<int64_t>(v) : static_cast<int32_t>(v)));
    } else {
      out += format((spec + "ll" + c).c_str(), static_cast<unsigned long long>(v));
    }
  }
  return out;
}

void vprintf_call(Exec& x, const Instr& i) {
  const CallSite& site = x.program.calls[static_cast<size_t>(i.imm)];
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const uint64_t pattern = local_value(x, l, site.in[0].from, 8),
                   arguments = local_value(x, l, site.in[1].from, 8);
    x.m.output.push_back(formatted(x, l, global_string(x, l, pattern), arguments));
    if (!site.out.empty()) {
      const uint32_t zero = 0;
      memcpy(&x.w.local[static_cast<size_t>(l) * x.program.local_bytes + site.out[0].to], &zero, 4);
      memset(&x.w.local_undefined[static_cast<size_t>(l) * x.program.local_bytes + site.out[0].to], 0, 4);
    }
  }
  x.note_change();
}

void assert_call(Exec& x, const Instr& i) {
  const CallSite& site = x.program.calls[static_cast<size_t>(i.imm)];
  const int l = __builtin_ctz(x.mask);
  fail(ErrorKind::Trap, "assertion failed: " + global_string(x, l, local_value(x, l, site.in[0].from, 8)));
}

void decode_call(Decoder& d, Instr& i) {
  d.call(i);
  const FunctionInfo& callee = d.program().functions[static_cast<size_t>(i.target)];
  i.fn = call;
  if (callee.name == "vprintf") {
    i.fn = vprintf_call;
  } else if (callee.name == "__assertfail") {
    i.fn = assert_call;
  } else if (!callee.defined) {
    d.unsupported("the function `" + callee.name + "` isn't defined in this module");
  }
}

void leave(Exec& x) {  // lanes `mask` exit
  x.w.live &= ~x.mask;
  x.f->mask &= ~x.mask;
  x.note_change();
  if (x.f->mask == 0) {
    auto& list = x.w.fragments;
    for (size_t k = 0; k < list.size(); ++k) {
      if (list[k].get() == x.f) {
        list.erase(list.begin() + static_cast<long>(k));
        break;
      }
    }
    x.stop = true;
  }
  x.cta().cluster->expected -= static_cast<uint32_t>(__builtin_popcount(x.mask));
  recheck_barriers(x.m, x.cta());
  // Who waits for these lanes looks again.
  for (const auto& f : x.w.fragments) {
    if (f->wait == Wait::Converge || f->wait == Wait::WarpSync) f->wait = Wait::None;
  }
}

void exit_lanes(Exec& x, const Instr&) { leave(x); }

void ret(Exec& x, const Instr&) {
  if (x.f->stack.empty()) {
    leave(x);
    return;
  }
  x.split_inactive();
  const int32_t from = x.f->stack.back();
  const Instr& site = x.program.code[static_cast<size_t>(from)];
  copy_arguments(x, x.program.calls[static_cast<size_t>(site.imm)].out);
  x.f->stack.pop_back();
  x.f->pc = from + 1;
}
void decode_ret(Decoder& d, Instr& i) { i.fn = d.ast->opcode == "exit" ? exit_lanes : ret; }

void trap(Exec&, const Instr&) { fail(ErrorKind::Trap, "the kernel trapped"); }
void decode_trap(Decoder&, Instr& i) { i.fn = trap; }
void nothing(Exec&, const Instr&) {}
void decode_nothing(Decoder&, Instr& i) { i.fn = nothing; }

// --- Special registers ---

uint64_t special_value(const Exec& x, const Instr& i, int lane) {
  const Cta& c = *x.w.cta;
  const Grid& g = *c.grid;
  const uint32_t thread = static_cast<uint32_t>(x.w.index * kLanes + lane);
  const uint32_t lane_bit = 1u << lane;
  const auto own_shared = [&](int64_t offset) {
    return (static_cast<uint64_t>(c.cluster_rank) << kCtaShift) + static_cast<uint64_t>(offset);
  };
  const auto in_cluster = [&](int d) { return c.id[d] % g.cluster[d]; };
  const auto which = static_cast<Special>(i.choice);
  switch (which) {
    case Special::TidX:
      return thread % g.block[0];
    case Special::TidY:
      return thread / g.block[0] % g.block[1];
    case Special::TidZ:
      return thread / g.block[0] / g.block[1];
    case Special::NtidX:
      return g.block[0];
    case Special::NtidY:
      return g.block[1];
    case Special::NtidZ:
      return g.block[2];
    case Special::CtaidX:
      return c.id[0];
    case Special::CtaidY:
      return c.id[1];
    case Special::CtaidZ:
      return c.id[2];
    case Special::NctaidX:
      return g.dims[0];
    case Special::NctaidY:
      return g.dims[1];
    case Special::NctaidZ:
      return g.dims[2];
    case Special::LaneId:
      return static_cast<uint64_t>(lane);
    case Special::WarpId:
      return static_cast<uint64_t>(x.w.index);
    case Special::NwarpId:
      return x.m.options.arch.threads_per_sm / kLanes;
    case Special::SmId:
      return static_cast<uint64_t>(c.sm);
    case Special::NsmId:
      return static_cast<uint64_t>(x.m.options.sms);
    case Special::GridId:
      return g.id;
    case Special::ClusteridX:
      return c.cluster->id[0];
    case Special::ClusteridY:
      return c.cluster->id[1];
    case Special::ClusteridZ:
      return c.cluster->id[2];
    case Special::NclusteridX:
      return g.dims[0] / g.cluster[0];
    case Special::NclusteridY:
      return g.dims[1] / g.cluster[1];
    case Special::NclusteridZ:
      return g.dims[2] / g.cluster[2];
    case Special::ClusterCtaidX:
      return in_cluster(0);
    case Special::ClusterCtaidY:
      return in_cluster(1);
    case Special::ClusterCtaidZ:
      return in_cluster(2);
    case Special::ClusterNctaidX:
      return g.cluster[0];
    case Special::ClusterNctaidY:
      return g.cluster[1];
    case Special::ClusterNctaidZ:
      return g.cluster[2];
    case Special::ClusterCtarank:
      return c.cluster_rank;
    case Special::ClusterNctarank:
      return c.cluster->dims[0] * c.cluster->dims[1] * c.cluster->dims[2];
    case Special::IsExplicitCluster:
      return g.explicit_cluster;
    case Special::LanemaskEq:
      return lane_bit;
    case Special::LanemaskLe:
      return lane_bit | (lane_bit - 1);
    case Special::LanemaskLt:
      return lane_bit - 1;
    case Special::LanemaskGe:
      return ~(lane_bit - 1);
    case Special::LanemaskGt:
      return ~(lane_bit | (lane_bit - 1));
    case Special::Clock:
      return static_cast<uint32_t>(x.m.clock());
    case Special::ClockHi:
      return x.m.clock() >> 32;
    case Special::Clock64:
      return x.m.clock();
    case Special::GlobalTimer:
      return x.m.time_ns;
    case Special::GlobalTimerLo:
      return static_cast<uint32_t>(x.m.time_ns);
    case Special::GlobalTimerHi:
      return x.m.time_ns >> 32;
    case Special::TotalSmemSize:
    case Special::AggrSmemSize:
      return c.shared->size - kSharedReserved;
    case Special::DynamicSmemSize:
      return g.dynamic_shared;
    case Special::ReservedSmemBegin:
      return 0;
    case Special::ReservedSmemEnd:
      return kSharedReserved;
    case Special::SharedSymbol:
      return own_shared(i.imm);
    case Special::DynamicSymbol:
      return own_shared(i.imm + g.dynamic_base);
    case Special::LocalSymbol:
      return static_cast<uint64_t>(i.imm);
    case Special::ParamSymbol:
      return g.param_region->base + static_cast<uint64_t>(i.imm);
    default:
      return 0;
  }
}

template <class T>
void special(Exec& x, const Instr& i) {
  const auto which = static_cast<Special>(i.choice);
  if (which >= Special::Clock && which <= Special::GlobalTimerHi) x.note_time();
  T out[kLanes];
  for (int l = 0; l < kLanes; ++l) out[l] = static_cast<T>(special_value(x, i, l));
  x.store(i.op[0], out);
  x.define(i.op[0]);
}

// --- Time, registers, dependent grids ---

void nanosleep(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "sleep time");
  x.note_time();
  x.split_inactive();
  x.f->wait = Wait::Time;  // goes on behind this instruction
  x.f->wake_time = x.m.time_ns + x.view<uint32_t>(i.op[1])[__builtin_ctz(x.mask)];
  x.stop = true;
}
void decode_nanosleep(Decoder& d, Instr& i) {
  i.op[1] = d.source(d.operand(0), Type::U32);
  i.fn = nanosleep;
}

void setmaxnreg(Exec& x, const Instr& i) {
  if (!x.converge(i)) return;
  const auto wanted = static_cast<uint32_t>(i.imm);
  const bool inc = i.choice;
  Cta& cta = x.cta();
  if (inc) {
    if (wanted < x.w.register_count)
      fail(ErrorKind::Emulator,
           format("setmaxnreg.inc to %u, but the warp has %u registers per thread (undefined behaviour)",
                  wanted, x.w.register_count));
    const uint32_t more = wanted - x.w.register_count;
    if (more > cta.free_registers) {
      x.block(Wait::Registers, wanted);
      return;
    }
    cta.free_registers -= more;
  } else {
    if (wanted > x.w.register_count)
      fail(ErrorKind::Emulator,
           format("setmaxnreg.dec to %u, but the warp has %u registers per thread (undefined behaviour)",
                  wanted, x.w.register_count));
    cta.free_registers += x.w.register_count - wanted;
    for (const auto& w : cta.warps) {
      for (const auto& f : w->fragments) {
        if (f->wait == Wait::Registers) x.m.wake(*w, *f);
      }
    }
  }
  x.w.register_count = wanted;
  x.note_change();
}
void decode_setmaxnreg(Decoder& d, Instr& i) {
  if (d.operand(0).kind != AstOperand::Integer) d.unsupported("the register count must be a constant");
  i.imm = d.operand(0).value;
  if (i.imm < 24 || i.imm > 256 || i.imm % 8)
    d.unsupported("the register count must be a multiple of 8 from 24 to 256");
  i.choice = d.has(".inc");
  i.fn = setmaxnreg;
}

void griddep(Exec& x, const Instr& i) {
  Cta& cta = x.cta();
  Grid& grid = *cta.grid;
  if (i.choice) {  // launch_dependents: counts once per CTA
    if (!cta.launched_dependents) {
      cta.launched_dependents = true;
      ++grid.triggered;
      x.note_change();
      x.m.start_clusters();
    }
    return;
  }
  for (const auto& g : x.m.grids) {
    if (g->rank == grid.rank && g->id < grid.id && !g->finished) {
      x.block(Wait::Grid);
      return;
    }
  }
  x.acquire(x.mask, x.m.stream_clock[static_cast<size_t>(grid.rank)]);
}
void decode_griddep(Decoder& d, Instr& i) {
  i.choice = d.has(".launch_dependents");
  i.fn = griddep;
}

constexpr const char* kControl = "Control Flow Instructions";
constexpr const char* kMisc = "Miscellaneous Instructions";

const Form kForms[] = {
    {"bra{.uni}", kControl, decode_bra},
    {"brx(.idx){.uni}", kControl, decode_brx},
    {"call{.uni}", kControl, decode_call},
    {"ret{.uni}", kControl, decode_ret},
    {"exit", kControl, decode_ret},
    {"trap", kMisc, decode_trap},
    {"brkpt", kMisc, decode_trap},
    {"pmevent{.mask}", kMisc, decode_nothing},
    {"nanosleep(.u32)", kMisc, decode_nanosleep},
    {"setmaxnreg(.inc|.dec)(.sync)(.aligned)(.u32)", "Miscellaneous Instructions: setmaxnreg",
     decode_setmaxnreg},
    {"griddepcontrol(.launch_dependents|.wait)",
     "Parallel Synchronization and Communication Instructions: griddepcontrol", decode_griddep},
};

}  // namespace

void set_special_handler(Instr& i, Special which, bool wide) {
  i.choice = static_cast<uint8_t>(which);
  i.fn = wide ? special<uint64_t> : special<uint32_t>;
}

FormList control_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
