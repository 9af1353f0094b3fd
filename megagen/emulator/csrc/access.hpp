// Loads and stores of one lane, as the memory, atomic and matrix instructions share them.
#pragma once

#include "forms.hpp"
#include "machine.hpp"

namespace megagen::emulator {

/// Where a lane's bytes are: memory that all can see, or its own local memory (region null).
struct LanePlace {
  Region* region = nullptr;
  uint64_t offset = 0;
  uint8_t* data = nullptr;
  uint8_t* undefined = nullptr;
  uint64_t canonical() const { return region->base + offset; }
};

inline LanePlace lane_place(const Exec& x, Space space, uint64_t address, uint32_t bytes, int lane,
                            uint32_t align) {
  const bool local = space == Space::Local || (space == Space::Param && address < kLocalWindowBytes) ||
                     (space != Space::Global && address - kLocalWindow < kLocalWindowBytes);
  if (!local) {
    const Place p = x.resolve(space == Space::Param || space == Space::Const ? Space::Generic : space,
                              address, bytes, lane, align);
    return {p.region, p.offset, p.data(), p.undefined()};
  }
  if (address >= kLocalWindow) address -= kLocalWindow;
  const size_t stride = x.program.local_bytes;
  if (address < 16 || address + bytes > stride || address % align) {
    fail(ErrorKind::MemoryFault, format("lane %d, local address 0x%llx, %u bytes: outside the thread's local "
                                        "memory (%zu bytes) or misaligned",
                                        lane, static_cast<unsigned long long>(address), bytes, stride));
  }
  const size_t at = static_cast<size_t>(lane) * stride + address;
  return {nullptr, address, &x.w.local[at], &x.w.local_undefined[at]};
}

inline bool is_zero(const uint8_t* bytes, uint32_t count) {
  uint64_t any = 0;
  for (; count >= 8; count -= 8, bytes += 8) {
    uint64_t v;
    memcpy(&v, bytes, 8);
    any |= v;
  }
  for (; count; --count, ++bytes) any |= *bytes;
  return any == 0;
}

/// Before a store: nobody may write to constants or over an mbarrier.
inline void require_writable(const LanePlace& p, uint32_t bytes) {
  if (!p.region) return;
  if (p.region->read_only)
    fail(ErrorKind::MemoryFault, "a write to " + p.region->name + ", which is read-only");
  if (p.region->holds_mbarrier(p.offset, bytes)) {
    fail(ErrorKind::MemoryFault,
         format("a write over the mbarrier at %s + %llu (mbarrier.inval must come first)",
                p.region->name.c_str(), static_cast<unsigned long long>(p.offset & ~uint64_t{7})));
  }
}

/// Order, scope, space of an instruction from its modifiers.
inline Scope scope_from(const Decoder& d, Scope otherwise) {
  return d.has(".cta")       ? Scope::Cta
         : d.has(".cluster") ? Scope::Cluster
         : d.has(".gpu")     ? Scope::Gpu
         : d.has(".sys")     ? Scope::Sys
                             : otherwise;
}
inline Order order_from(const Decoder& d, Order otherwise) {
  return d.has(".relaxed")    ? Order::Relaxed
         : d.has(".acquire")  ? Order::Acquire
         : d.has(".release")  ? Order::Release
         : d.has(".acq_rel")  ? Order::AcqRel
         : d.has(".volatile") ? Order::Volatile
                              : otherwise;
}
inline Space space_from(const Decoder& d, Space otherwise) {
  if (d.has(".global")) return Space::Global;
  if (d.has(".shared") || d.has(".shared::cta")) return Space::Shared;
  if (d.has(".shared::cluster")) return Space::SharedCluster;
  if (d.has(".local")) return Space::Local;
  if (d.has(".param") || d.has(".param::entry") || d.has(".param::func")) return Space::Param;
  if (d.has(".const")) return Space::Const;
  return otherwise;
}

#define MEGAGEN_DATA_TYPES ".b8|.b16|.b32|.b64|.u8|.u16|.u32|.u64|.s8|.s16|.s32|.s64|.f16|.bf16|.f32|.f64"

}  // namespace megagen::emulator
