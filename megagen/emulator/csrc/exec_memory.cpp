// Loads, stores and cache hints.
// Source: PTX ISA, "Data Movement and Conversion Instructions: ld, ld.global.nc, st, prefetch, createpolicy".
#include "access.hpp"
#include "mbarrier.hpp"

namespace megagen::emulator {
namespace {

bool is_signed(Type t) { return t == Type::S8 || t == Type::S16 || t == Type::S32 || t == Type::S64; }

/// A lane's loaded bytes into its registers, extended to their width.
void to_registers(const Exec& x, const Instr& i, int lane, const uint8_t* data, const uint8_t* undefined) {
  const auto bytes = static_cast<uint32_t>(bytes_of(i.type));
  const bool clean = is_zero(undefined, bytes * i.vector);
  for (uint32_t k = 0; k < i.extra_count; ++k) {
    const Ref& r = x.program.extra[i.extra + k];
    const uint8_t* from = data + k * bytes;
    if (bytes == 16) {
      memcpy(x.base[0] + r.off + lane * 16, from, 16);
      x.set_undefined_bits(r, lane, clean ? 0 : ~uint64_t{0});
      continue;
    }
    uint64_t value = 0, bits = 0;
    memcpy(&value, from, bytes);
    if (is_signed(i.type) && bytes < 8 && (value >> (8 * bytes - 1) & 1))
      value |= ~uint64_t{0} << (8 * bytes);
    x.set_value(r, lane, value);
    if (clean) {
      x.undef[r.off >> 7] &= ~(1u << lane);
    } else {
      memcpy(&bits, undefined + k * bytes, bytes);
      if (is_signed(i.type) && bytes < 8 && (bits >> (8 * bytes - 1) & 1))
        bits |= ~uint64_t{0} << (8 * bytes);
      x.set_undefined_bits(r, lane, bits);
    }
  }
}

bool any_loop(const Fragment& f) { return f.loops[0].head >= 0; }

void note_weak_read(Exec& x, const LanePlace& p, uint32_t bytes) {
  uint64_t value = 0;
  memcpy(&value, p.data, bytes < 8 ? bytes : 8);
  x.note_read(p.canonical(), bytes, value, false);
}

void acquire_pending(Exec& x, const Instr& i, uint64_t place, Mask readers) {
  if (!readers) return;
  const auto it = x.m.history.variables.find(place);
  if (it == x.m.history.variables.end()) return;
  x.acquire_from(it->second, readers, i.order == Order::Volatile ? Scope::Sys : i.scope,
                 i.order == Order::Acquire);
}

void load(Exec& x, const Instr& i) {
  x.require_defined(i.op[1], "address");
  const uint32_t bytes = static_cast<uint32_t>(bytes_of(i.type)) * i.vector;
  const bool strong = i.order != Order::Weak;
  const bool few = (x.mask & (x.mask - 1)) == 0;
  const bool loops = any_loop(*x.f);
  uint64_t place = 0;  // lanes that read one place in a row synchronize together
  Mask readers = 0;
  uint64_t constants = 0;  // where read-only memory is read
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const LanePlace p = lane_place(x, i.space, x.address_of(i, 1, l), bytes, l, bytes);
    if (p.region && !p.region->read_only) {
      x.m.history.read(*p.region, p.offset, bytes, x.accessor(l, i.order, i.scope));
      x.visit(*p.region, 1u << l);
      if (strong) {
        if (p.canonical() != place) {
          acquire_pending(x, i, place, readers);
          place = p.canonical();
          readers = 0;
        }
        readers |= 1u << l;
        uint64_t value = 0;
        memcpy(&value, p.data, bytes < 8 ? bytes : 8);
        if (loops) x.note_read(p.canonical(), bytes, value, true);
      } else if (loops && few) {
        note_weak_read(x, p, bytes);
      } else if (loops) {
        for (LoopWatch& loop : x.f->loops) loop.overflow = true;
      }
    } else if (p.region && loops) {
      constants = constants * 31 + p.canonical();
    }
    to_registers(x, i, l, p.data, p.undefined);
  }
  acquire_pending(x, i, place, readers);
  if (constants) x.note_constants(constants);
}

void decode_ld(Decoder& d, Instr& i) {
  i.type = d.last_type();
  i.order = order_from(d, Order::Weak);
  i.scope = scope_from(d, Scope::Gpu);
  if (d.has(".mmio")) i.scope = Scope::Sys;
  i.space = space_from(d, Space::Generic);
  i.vector = d.has(".v2") ? 2 : d.has(".v4") ? 4 : d.has(".v8") ? 8 : 1;
  d.extra(i, d.operand(0), i.type, true);
  if (i.extra_count != i.vector) d.unsupported("the number of registers differs from the vector's");
  d.address(i, d.operand(1), 1);
  i.fn = load;
}

/// All active lanes store to one address: one of them (the last) remains, and that isn't a race.
bool same_address(const Exec& x, const Instr& i) {
  if (!(x.mask & (x.mask - 1))) return false;
  const uint64_t first = x.address_of(i, 0, __builtin_ctz(x.mask));
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    if (x.address_of(i, 0, __builtin_ctz(rest)) != first) return false;
  }
  return i.space != Space::Local && i.space != Space::Param && first - kLocalWindow >= kLocalWindowBytes;
}

void store(Exec& x, const Instr& i) {
  x.require_defined(i.op[0], "address");
  const auto element = static_cast<uint32_t>(bytes_of(i.type));
  const uint32_t bytes = element * i.vector;
  const bool strong = i.order != Order::Weak;
  if (same_address(x, i)) x.mask = 1u << (31 - __builtin_clz(x.mask));
  const Scope scope = i.order == Order::Volatile ? Scope::Sys : i.scope;
  bool seen = false;
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const LanePlace p = lane_place(x, i.space, x.address_of(i, 0, l), bytes, l, bytes);
    require_writable(p, bytes);
    for (uint32_t k = 0; k < i.extra_count; ++k) {
      const Ref& r = x.program.extra[i.extra + k];
      uint8_t* to = p.data + k * element;
      if (element == 16) {
        memcpy(to, x.base[r.bank] + r.off + l * 16, 16);
        memset(p.undefined + k * element, x.undefined_bits(r, l) ? 0xFF : 0, 16);
        continue;
      }
      const uint64_t value = x.value(r, l), bits = x.undefined_bits(r, l);
      memcpy(to, &value, element);
      memcpy(p.undefined + k * element, &bits, element);
    }
    if (!p.region) continue;
    seen = true;
    const bool over_strong = !strong && (p.region->cells[p.offset / 4].write & kStrong);
    x.m.history.write(*p.region, p.offset, bytes, x.accessor(l, i.order, i.scope));
    x.visit(*p.region, 1u << l);
    if (strong) {
      if (i.order == Order::Release || !x.w.fences.empty()) {
        x.release_to(x.m.history.variables[p.canonical()], 1u << l, scope, true, i.order == Order::Release);
      } else if (const auto it = x.m.history.variables.find(p.canonical());
                 it != x.m.history.variables.end()) {
        it->second.releases.clear();
      }
    }
    if (over_strong) {  // what an acquire reads from here on isn't a release any more
      if (const auto it = x.m.history.variables.find(p.canonical()); it != x.m.history.variables.end()) {
        it->second.releases.clear();
      }
    }
    x.m.touched(*p.region, p.offset, bytes);
  }
  if (strong && i.order == Order::Release) x.tick();
  if (seen) x.note_change();
}

void decode_st(Decoder& d, Instr& i) {
  i.type = d.last_type();
  i.order = order_from(d, Order::Weak);
  i.scope = scope_from(d, Scope::Gpu);
  if (d.has(".mmio")) i.scope = Scope::Sys;
  i.space = space_from(d, Space::Generic);
  i.vector = d.has(".v2") ? 2 : d.has(".v4") ? 4 : d.has(".v8") ? 8 : 1;
  d.address(i, d.operand(0), 0);
  d.extra(i, d.operand(1), i.type, false);
  if (i.extra_count != i.vector) d.unsupported("the number of registers differs from the vector's");
  i.fn = store;
}

void prefetch(Exec& x, const Instr& i) {
  x.require_defined(i.op[0], "address");
  for (Mask rest = x.mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    const uint64_t address = x.address_of(i, 0, l);
    if (i.choice)
      lane_place(x, Space::Generic, address, 128, l, 64);  // a tensor map must be there; data need not
  }
}
void decode_prefetch(Decoder& d, Instr& i) {
  d.address(i, d.operand(0), 0);
  i.choice = d.has(".tensormap");
  i.fn = prefetch;
}

void policy(Exec& x, const Instr& i) {
  uint64_t out[kLanes];
  for (uint64_t& v : out) v = 0x12F0000000000000;
  x.store(i.op[0], out);
  x.define(i.op[0]);
}
void decode_policy(Decoder& d, Instr& i) {
  i.op[0] = d.destination(d.operand(0), Type::B64);
  i.fn = policy;
}

constexpr const char* kLd = "Data Movement and Conversion Instructions: ld";
constexpr const char* kNc = "Data Movement and Conversion Instructions: ld.global.nc";
constexpr const char* kSt = "Data Movement and Conversion Instructions: st";
constexpr const char* kHint = "Data Movement and Conversion Instructions: prefetch";
#define SPACES ".global|.shared|.shared::cta|.shared::cluster|.local|.param|.param::entry|.param::func|.const"
#define CACHE "{.ca|.cg|.cs|.lu|.cv|.wb|.wt}"
#define HINTS                                                                                  \
  "{.L1::evict_normal|.L1::evict_unchanged|.L1::evict_first|.L1::evict_last|.L1::no_allocate}" \
  "{.L2::evict_normal|.L2::evict_first|.L2::evict_last}{.L2::cache_hint}{.L2::64B|.L2::128B|.L2::256B}"
#define TYPES "{.v2|.v4|.v8}(" MEGAGEN_DATA_TYPES "|.b128)"
#define SCOPES "(.cta|.cluster|.gpu|.sys)"

const Form kForms[] = {
    {"ld{.weak}{" SPACES "}" CACHE HINTS TYPES, kLd, decode_ld},
    {"ld(.volatile){" SPACES "}{.L2::64B|.L2::128B|.L2::256B}" TYPES, kLd, decode_ld},
    {"ld(.relaxed|.acquire)" SCOPES "{" SPACES "}" HINTS TYPES, kLd, decode_ld},
    {"ld(.mmio)(.relaxed)(.sys){.global}(" MEGAGEN_DATA_TYPES ")", kLd, decode_ld},
    {"ld(.global)" CACHE "(.nc)" HINTS TYPES, kNc, decode_ld},
    {"ldu{.global}" TYPES, "Data Movement and Conversion Instructions: ldu", decode_ld},
    {"st{.weak}{" SPACES "}" CACHE HINTS TYPES, kSt, decode_st},
    {"st(.volatile){" SPACES "}" TYPES, kSt, decode_st},
    {"st(.relaxed|.release)" SCOPES "{" SPACES "}" HINTS TYPES, kSt, decode_st},
    {"st(.mmio)(.relaxed)(.sys){.global}(" MEGAGEN_DATA_TYPES ")", kSt, decode_st},
    {"prefetch{.global|.local}(.L1|.L2|.L2::evict_last|.L2::evict_normal)", kHint, decode_prefetch},
    {"prefetchu(.L1)", kHint, decode_prefetch},
    {"prefetch{.const|.param}(.tensormap)", kHint, decode_prefetch},
    {"applypriority{.global}(.L2::evict_normal)", "Data Movement and Conversion Instructions: applypriority",
     decode_prefetch},
    {"createpolicy(.fractional)(.L2::evict_last|.L2::evict_normal|.L2::evict_first|.L2::evict_unchanged){.L2:"
     ":evict_first|.L2::evict_unchanged}(.b64)",
     "Data Movement and Conversion Instructions: createpolicy", decode_policy},
    {"createpolicy(.range){.global}(.L2::evict_last|.L2::evict_normal|.L2::evict_first|.L2::evict_unchanged){"
     ".L2::evict_first|.L2::evict_unchanged}(.b64)",
     "Data Movement and Conversion Instructions: createpolicy", decode_policy},
    {"createpolicy(.cvt)(.L2)(.b64)", "Data Movement and Conversion Instructions: createpolicy",
     decode_policy},
};

}  // namespace

FormList memory_forms() { return {kForms, sizeof kForms / sizeof kForms[0]}; }

}  // namespace megagen::emulator
