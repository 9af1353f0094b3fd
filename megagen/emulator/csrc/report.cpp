// Who, where, what: the texts of errors.
#include <algorithm>

#include "machine.hpp"
#include "mbarrier.hpp"

namespace megagen::emulator {

std::string Machine::name_of(const Warp& w) const {
  const Cta& c = *w.cta;
  return format("rank %d SM %d CTA (%u,%u,%u) warp %d", c.rank, c.sm, c.id[0], c.id[1], c.id[2], w.index);
}

std::string Machine::name_of(Agent a) const {
  const uint32_t slot = slot_of(a), local = a & ((1u << kLocalBits) - 1);
  const uint32_t place = slot % static_cast<uint32_t>(options.ranks * options.sms);
  const std::string where = format("rank %u SM %u", place / static_cast<uint32_t>(options.sms),
                                   place % static_cast<uint32_t>(options.sms));
  if (local < kLanes) return where + format(" warp %u", local);
  const Cta* cta = cta_in(slot);
  if (!cta) return where + " (an asynchronous operation)";
  for (const auto& [key, index] : cta->agents) {
    if (index != local) continue;
    const auto n = static_cast<unsigned>(key & 0xFFFFFFFF);
    switch (static_cast<AgentKind>(key >> 56)) {
      case AgentKind::CopyGroup:
        return where + format(" cp.async of warp %u", n);
      case AgentKind::BulkRead:
        return where + format(" source of a bulk copy of warp %u", n);
      case AgentKind::BulkWrite:
        return where + format(" destination of a bulk copy of warp %u", n);
      case AgentKind::Wgmma:
        return where + format(" wgmma of warpgroup %u", n);
      case AgentKind::TensorDone: {
        static const char* const kNames[] = {"mma", "cp", "cp", "shift", "ld", "st"};
        const auto& s = cta->tensor_streams[n];
        return where + format(" tcgen05.%s of warp %d", kNames[s.kind], s.warp);
      }
      case AgentKind::Mbarrier:
        return where + format(" copy that completes on the mbarrier at shared address 0x%x", n);
      default:
        return where + " (an asynchronous operation)";
    }
  }
  return where;
}

std::string Machine::describe_address(const Region& r, uint64_t address) const {
  if (r.tensor) {
    const auto word = static_cast<uint32_t>((address - r.base) / 4);
    return format("%s lane %u column %u", r.name.c_str(), word / 512, word % 512);
  }
  return format("%s + %llu", r.name.c_str(), static_cast<unsigned long long>(address - r.base));
}

std::string Machine::locate(const Error& e, const Warp& w, Mask lanes, const Instr& i) const {
  return format("%s lanes 0x%08x at ", name_of(w).c_str(), lanes) + w.cta->grid->program->describe(i) + ": " +
         e.what();
}

namespace {

/// What would have ordered two accesses to tensor memory.
const char* missing_fence(const RaceReport& r, const Accessor& by) {
  const Agent agent = agent_of(r.other);
  const auto known = [&](const VectorClock& c) {
    return c.knows(agent, lane_of(r.other), count_of(r.other));
  };
  if (known(by.unfenced->tensor)) {
    return ": the completion is known through thread synchronization, but tcgen05.fence::after_thread_sync "
           "is "
           "missing after it";
  }
  if (known(by.unfenced->before)) {
    return ": the completion is known through thread synchronization, but tcgen05.fence::before_thread_sync "
           "is "
           "missing before it";
  }
  return ": its completion (tcgen05.commit and a wait on the mbarrier, or tcgen05.wait::ld or ::st) isn't "
         "known";
}

}  // namespace

void Machine::violation(const RaceReport& r, const Accessor& by) {
  const uint64_t key = static_cast<uint64_t>(by.line) << 32 | r.other_line |
                       (r.kind == RaceReport::Proxy ? uint64_t{1} << 31 : 0);
  const bool only_report = r.kind == RaceReport::Proxy && history.proxy == ProxyCheck::Report;
  if (only_report && !reported.insert(key).second) return;
  const Program& p = current_warp ? *current_warp->cta->grid->program : *async_program;
  const auto who = [&](Agent agent, int lane, bool wrote, uint32_t line) {
    const Instr* i = p.at_line(line);
    std::string name = name_of(agent);
    if ((agent & ((1u << kLocalBits) - 1)) < kLanes && lane >= 0) name += format(" lane %d", lane);
    return std::string(wrote ? "the write" : "the read") + " by " + name + " at " +
           (i ? p.describe(*i) : format("PTX line %u", line));
  };
  const std::string a = who(by.agent, by.lane, r.wrote, by.line);
  const std::string b =
      who(agent_of(r.other), r.other_wrote ? lane_of(r.other) : -1, r.other_wrote, r.other_line);
  std::string text = describe_address(*r.region, r.address) + ": ";
  if (r.kind == RaceReport::Race) {
    text += a + " isn't ordered after " + b;
    if ((by.flags & kStrong) && (flags_of(r.other) & kStrong))
      text += " (both are strong, but not in one scope)";
    if (by.unfenced) text += missing_fence(r, by);
  } else {
    text += a + " goes through the async proxy without a proxy fence (fence.proxy.async) after " + b;
  }
  if (only_report) {
    reports.push_back(text);
    return;
  }
  throw Error(r.kind == RaceReport::Race ? ErrorKind::DataRace : ErrorKind::ProxyViolation, text, true);
}

std::string Machine::wait_text(const Warp& w, const Fragment& f) const {
  switch (f.wait) {
    case Wait::Converge:
      return format("waits for the rest of its warp (lanes 0x%08x) at an .aligned instruction",
                    w.live & ~f.mask);
    case Wait::WarpSync:
      return format("waits for lanes 0x%08x of member mask 0x%08x", f.sync_mask & w.live & ~f.mask,
                    f.sync_mask);
    case Wait::Barrier: {
      const NamedBarrier& b = w.cta->barriers[f.wait_detail & 15];
      return format("waits at named barrier %llu: %u of %u threads have arrived",
                    static_cast<unsigned long long>(f.wait_detail), b.arrived, b.expected);
    }
    case Wait::Cluster:
      return format("waits at the cluster barrier: %u of %u threads have arrived", w.cta->cluster->arrived,
                    w.cta->cluster->expected);
    case Wait::Mbarrier: {
      for (const Cta* c : w.cta->cluster->ctas) {
        const uint64_t offset = f.wait_detail - c->shared->base;
        if (f.wait_detail < c->shared->base || offset >= c->shared->size) continue;
        const auto it = c->shared->mbarriers.find(static_cast<uint32_t>(offset));
        if (it != c->shared->mbarriers.end())
          return format("waits for phase parity %u of ", f.parity) + mbarrier_text(*it->second);
      }
      return "waits for an mbarrier";
    }
    case Wait::Async:
      return "waits for its asynchronous operations";
    case Wait::Registers:
      return format("setmaxnreg waits for registers: has %u, wants %llu, %u are free in the CTA",
                    w.register_count, static_cast<unsigned long long>(f.wait_detail), w.cta->free_registers);
    case Wait::Time:
      return "sleeps";
    case Wait::Grid:
      return "waits for the previous grid";
    case Wait::Tensor:
      return f.wait_detail ? format("waits for %llu free columns of tensor memory",
                                    static_cast<unsigned long long>(f.wait_detail))
                           : "waits for the peer CTA to execute the same tcgen05 instruction";
    case Wait::Poll: {
      std::string text = "polls unchanged memory:";
      size_t shown = 0;
      for (uint64_t word : f.watched) {
        if (++shown > 8) {
          text += " ...";
          break;
        }
        Region* r = global_region(word);
        if (!r) {
          for (const auto& s : slot_shared) {
            if (s && word >= s->base && word < s->base + s->size) r = s.get();
          }
        }
        if (!r) continue;
        uint32_t value;
        memcpy(&value, r->data + (word - r->base), 4);
        const auto it = r->mbarriers.find(static_cast<uint32_t>(word - r->base));
        text += it != r->mbarriers.end() ? " " + mbarrier_text(*it->second) + ";"
                                         : " " + describe_address(*r, word) + format(" = %u;", value);
      }
      return text;
    }
    default:
      return "is ready";
  }
}

void Machine::deadlock() {
  std::string text = "nothing asynchronous is pending, and no warp can go on:";
  struct Group {
    std::string who, what;
    int more = 0;
  };
  std::vector<Group> groups;
  for (const auto& cta : slots) {
    if (!cta) continue;
    for (const auto& w : cta->warps) {
      for (const auto& f : w->fragments) {
        const Program& p = *cta->grid->program;
        const std::string what = p.describe(p.code[static_cast<size_t>(f->pc)]) + " " + wait_text(*w, *f);
        const auto same =
            std::find_if(groups.begin(), groups.end(), [&](const Group& g) { return g.what == what; });
        if (same != groups.end()) {
          ++same->more;
          continue;
        }
        groups.push_back({name_of(*w) + format(" lanes 0x%08x", f->mask), what, 0});
      }
    }
  }
  size_t shown = 0;
  for (const Group& g : groups) {
    if (++shown > 60) {
      text += format("\n  and %zu more", groups.size() - 60);
      break;
    }
    text += "\n  " + g.who + (g.more ? format(" and %d more like it", g.more) : "") + ": " + g.what;
  }
  for (const auto& g : grids) {
    const uint64_t waiting = g->clusters - g->next_cluster;
    if (g->started && waiting) {
      text += format(
          "\n  rank %d: %llu of %llu clusters of %s have not started, since the running CTAs leave no room",
          g->rank, static_cast<unsigned long long>(waiting), static_cast<unsigned long long>(g->clusters),
          g->entry->name.c_str());
    }
  }
  throw Error(ErrorKind::Deadlock, text, true);
}

}  // namespace megagen::emulator
