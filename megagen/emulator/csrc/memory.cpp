// Addresses, regions, and the undefined bits of registers.
#include "memory.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "machine.hpp"
#include "mbarrier.hpp"

namespace megagen::emulator {

LazyBytes::LazyBytes(uint64_t bytes) : bytes_(bytes ? bytes : 1) {
  data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw Error(ErrorKind::Emulator,
                format("no address space for %llu bytes", static_cast<unsigned long long>(bytes)), true);
  }
}

LazyBytes& LazyBytes::operator=(LazyBytes&& o) noexcept {
  std::swap(data_, o.data_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

LazyBytes::~LazyBytes() {
  if (data_) munmap(data_, bytes_);
}

Region* Machine::allocate(int rank, uint64_t bytes, uint64_t align, const std::string& name, bool defined) {
  if (align == 0 || (align & (align - 1)) || align > (uint64_t{1} << kPageShift)) {
    fail(ErrorKind::Emulator,
         format("align=%llu must be a power of two up to 65536", static_cast<unsigned long long>(align)));
  }
  auto r = std::make_unique<Region>();
  r->base = kGlobalBase + (next_page << kPageShift);
  r->size = bytes;
  r->rank = rank;
  r->name = name;
  r->data_store = LazyBytes(bytes);
  r->undefined_store = LazyBytes(bytes);
  r->cell_store = LazyBytes((bytes + 3) / 4 * sizeof(Cell));
  r->data = r->data_store.data();
  r->undefined = r->undefined_store.data();
  r->cells = reinterpret_cast<Cell*>(r->cell_store.data());
  if (!defined) {
    memset(r->undefined, 0xFF, bytes);
    for (uint64_t k = 0; k < bytes; ++k) r->data[k] = static_cast<uint8_t>(random.next() >> 32);
  }
  const uint64_t page_count = (bytes >> kPageShift) + 1;
  pages.resize(next_page + page_count + 1, nullptr);
  for (uint64_t p = 0; p < page_count; ++p) pages[next_page + p] = r.get();
  next_page += page_count + 1;
  regions.push_back(std::move(r));
  return regions.back().get();
}

Region* Machine::global_region(uint64_t address) const {
  const uint64_t page = (address - kGlobalBase) >> kPageShift;
  return address >= kGlobalBase && page < pages.size() ? pages[page] : nullptr;
}

Place Exec::resolve(Space space, uint64_t address, uint32_t bytes, int lane, uint32_t align) const {
  const char* const kNames[] = {"generic", "global", "shared::cta", "shared::cluster",
                                "local",   "param",  "const"};
  const auto fault = [&](const std::string& why) {
    fail(ErrorKind::MemoryFault,
         format("lane %d, %s address 0x%llx, %u bytes: %s", lane, kNames[static_cast<int>(space)],
                static_cast<unsigned long long>(address), bytes, why.c_str()));
  };
  if (address & (align - 1)) fault(format("not aligned to %u bytes", align));
  const bool is_shared = space == Space::Shared || space == Space::SharedCluster ||
                         (space == Space::Generic && address - kSharedWindow < kSharedWindowBytes);
  if (is_shared) {
    if (space == Space::Generic) address -= kSharedWindow;
    if (address >= kSharedWindowBytes) fault("outside the shared window");
    const uint64_t rank = address >> kCtaShift, offset = address & ((1u << kCtaShift) - 1);
    const Cluster& cluster = *w.cta->cluster;
    if (rank >= cluster.ctas.size())
      fault(format("no CTA %llu in a cluster of %zu", static_cast<unsigned long long>(rank),
                   cluster.ctas.size()));
    if (space == Space::Shared && rank != w.cta->cluster_rank)
      fault("another CTA's shared memory needs .shared::cluster");
    Cta* owner = cluster.ctas[rank];
    if (!owner->live_warps) fault("that CTA has exited");
    Region* r = owner->shared;
    if (offset < kSharedReserved || offset + bytes > r->size) {
      fault(format("outside the CTA's shared memory, 0x%x to 0x%llx", kSharedReserved,
                   static_cast<unsigned long long>(r->size)));
    }
    return {r, offset};
  }
  Region* r = m.global_region(address);
  if (!r) {
    const bool local = address - kLocalWindow < kLocalWindowBytes;
    fault(local ? "local memory can't be used here" : "outside every allocation");
  }
  const uint64_t offset = address - r->base;
  if (offset + bytes > r->size) {
    fault(format("%llu bytes past the end of %s (%llu bytes)",
                 static_cast<unsigned long long>(offset + bytes - r->size), r->name.c_str(),
                 static_cast<unsigned long long>(r->size)));
  }
  if (!r->live) fault("in " + r->name + ", which was freed");
  return {r, offset};
}

// --- Undefined bits of registers ---

uint64_t Exec::undefined_bits(const Ref& r, int lane) const {
  if (!(undefined(r) >> lane & 1)) return 0;
  if (r.kind == Ref::Predicate) return 1;
  uint64_t bits = 0;
  memcpy(&bits, shadow + r.off + lane * r.width, r.width < 8 ? 4 : 8);
  if (r.width == 16) {
    uint64_t high;
    memcpy(&high, shadow + r.off + lane * 16 + 8, 8);
    bits |= high;
  }
  return bits;
}

void Exec::set_undefined_bits(const Ref& r, int lane, uint64_t bits) const {
  if (r.width == 4) bits &= 0xFFFFFFFFu;
  uint32_t& lanes = undef[r.off >> 7];
  if (!bits) {
    lanes &= ~(1u << lane);
    return;
  }
  lanes |= 1u << lane;
  memcpy(shadow + r.off + lane * r.width, &bits, r.width < 8 ? 4 : 8);
  if (r.width == 16) memcpy(shadow + r.off + lane * 16 + 8, &bits, 8);
}

void Exec::require_defined(const Ref& r, const char* role) const {
  const Mask bad = undefined(r) & mask;
  if (!bad) return;
  m.current_lanes = bad;
  fail(ErrorKind::UninitializedUse, format("the %s is undefined", role));
}

namespace {

/// Carries travel upwards: everything from the lowest undefined bit on.
uint64_t upwards(uint64_t bits) { return bits ? ~((bits & -bits) - 1) : 0; }

}  // namespace

void Exec::propagate(const Instr& i, int first, int sources) {
  const Ref& d = i.op[0];
  const uint64_t full = d.width == 4 ? 0xFFFFFFFFu : ~uint64_t{0};
  for (Mask rest = mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    uint64_t u[4] = {};
    uint64_t any = 0;
    for (int k = 0; k < sources; ++k) any |= u[k] = undefined_bits(i.op[first + k], l);
    uint64_t out = any ? full : 0;
    if (any) {
      const Ref& a = i.op[first];
      const Ref& b = i.op[first + 1];
      switch (i.taint) {
        case Taint::Carry:
          out = upwards(any);
          break;
        case Taint::Xor:
          out = any;
          break;
        case Taint::Move:
          out = u[0];
          break;
        case Taint::And: {
          const uint64_t x = value(a, l), y = value(b, l);
          out = (u[0] & u[1]) | (u[0] & y) | (u[1] & x);
          break;
        }
        case Taint::Or: {
          const uint64_t x = value(a, l), y = value(b, l);
          out = (u[0] & u[1]) | (u[0] & ~y) | (u[1] & ~x);
          break;
        }
        case Taint::ShiftLeft:
        case Taint::ShiftRight:
          if (!u[1]) {
            const uint64_t n = std::min<uint64_t>(value(b, l), 63);
            out = i.taint == Taint::ShiftLeft ? u[0] << n : u[0] >> n;
            if (i.type == Type::S32 && (u[0] >> 31)) out |= full << (31 - std::min<uint64_t>(n, 31));
            if (i.type == Type::S64 && (u[0] >> 63)) out |= full << (63 - n);
          }
          break;
        case Taint::Select:  // op[3] chooses
          if (!u[2]) out = predicate(i.op[3]) >> l & 1 ? u[0] : u[1];
          break;
        default:
          break;
      }
    }
    set_undefined_bits(d, l, out & full);
  }
}

}  // namespace megagen::emulator
