// Who runs next: fragments within a warp, warps within the machine, asynchronous events, and the passing of
// time.
#include <algorithm>

#include "machine.hpp"
#include "mbarrier.hpp"

namespace megagen::emulator {

namespace {

constexpr uint32_t kPatience = 3;  // equal iterations before a loop is put to sleep
constexpr uint32_t kProbePatience =
    256;                            // the same, when it is the last chance before a deadlock is reported
constexpr size_t kMaxPlaces = 128;  // words that one loop may poll
constexpr uint32_t kStarvation =
    4096;  // instructions that one fragment may run while others of its warp are ready
constexpr uint64_t kMaxTimeStep = 1000000000;
constexpr uint32_t kIdleRounds =
    1000;  // times that sleepers wake up in vain before their sleep counts as polling
constexpr uint64_t kBarren = 20000000;  // warp instructions without any change that others can see

uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v + 0x9E3779B97F4A7C15 + (h << 6) + (h >> 2);
  return h * 0xFF51AFD7ED558CCD;
}

}  // namespace

// --- Fragments ---

/// Deepest call first, then lowest address: lanes that lag behind catch up, so that branches reconverge.
Fragment* Machine::pick(Warp& warp) {
  Fragment* best = nullptr;
  for (const auto& f : warp.fragments) {
    if (f->wait != Wait::None) continue;
    if (!best || f->stack.size() > best->stack.size() ||
        (f->stack.size() == best->stack.size() && f->pc < best->pc)) {
      best = f.get();
    }
  }
  if (best && best->ran > kStarvation) {
    for (const auto& f : warp.fragments) {
      if (f->wait == Wait::None && f->ran < best->ran) best = f.get();
    }
    for (const auto& f : warp.fragments) f->ran = 0;
  }
  return best;
}

/// Merges fragments that have come to the same place, and gives way to one that lags behind.
Fragment* Machine::reconverge(Warp& warp, Fragment* f) {
  bool give_way = ++f->ran > kStarvation;
  for (size_t k = 0; k < warp.fragments.size();) {
    Fragment* o = warp.fragments[k].get();
    if (o == f) {
      ++k;
      continue;
    }
    if (o->pc == f->pc && (o->wait == Wait::None || o->wait == Wait::Converge) && o->stack == f->stack) {
      f->mask |= o->mask;
      warp.fragments.erase(warp.fragments.begin() + static_cast<long>(k));
      continue;
    }
    give_way |= o->wait == Wait::None &&
                (o->stack.size() > f->stack.size() || (o->stack.size() == f->stack.size() && o->pc < f->pc));
    ++k;
  }
  return give_way ? pick(warp) : f;
}

void Exec::split_inactive() {
  if (mask == f->mask) return;
  auto rest = std::make_unique<Fragment>();
  rest->mask = f->mask & ~mask;
  rest->pc = f->pc;
  rest->stack = f->stack;
  f->mask = mask;
  w.fragments.push_back(std::move(rest));
}

void Exec::block(Wait wait, uint64_t detail) {
  split_inactive();
  f->wait = wait;
  f->wait_detail = detail;
  --f->pc;
  stop = true;
}

bool Exec::converge(const Instr&) {
  if (mask == w.live) {
    if (m.options.collectives_order) warp_barrier(mask);
    return true;
  }
  block(Wait::Converge);
  return false;
}

bool Exec::gather(const Instr& i, const Ref& member_mask) {
  require_defined(member_mask, "member mask");
  const View<uint32_t> members = view<uint32_t>(member_mask);
  const uint32_t wanted = members[__builtin_ctz(mask)];
  Mask same = 0;
  for (Mask rest = mask; rest; rest &= rest - 1) {
    const int l = __builtin_ctz(rest);
    if (members[l] == wanted) same |= 1u << l;
    if (!(members[l] >> l & 1)) {
      fail(ErrorKind::Emulator,
           format("lane %d isn't in its own member mask 0x%08x (undefined behaviour)", l, members[l]));
    }
  }
  const Mask required = wanted & w.live;
  if (same == mask && (mask & required) == required) {
    if (m.options.collectives_order) warp_barrier(mask);
    return true;
  }
  if (same != mask) {  // the others come back on their own
    split_inactive();
    auto rest = std::make_unique<Fragment>();
    rest->mask = mask & ~same;
    rest->pc = here();
    rest->stack = f->stack;
    f->mask = mask = same;
    w.fragments.push_back(std::move(rest));
  }
  if ((mask & required) == required) return true;
  block(Wait::WarpSync);
  f->sync_mask = wanted;
  Mask together = 0;
  bool one_place = true;
  for (const auto& o : w.fragments) {
    if (o->wait != Wait::WarpSync || o->sync_mask != wanted ||
        program.code[static_cast<size_t>(o->pc)].fn != i.fn)
      continue;
    together |= o->mask;
    one_place &= o->pc == f->pc && o->stack == f->stack;
  }
  if ((together & required) != required) return false;
  if (!one_place) {
    if (i.operands != 0)
      fail(ErrorKind::UnsupportedInstruction,
           "lanes of one member mask execute this instruction at different addresses; see PTX ISA, Parallel "
           "Synchronization and Communication Instructions");
    warp_barrier(together);
    for (const auto& o : w.fragments) {
      if (o->wait == Wait::WarpSync && o->sync_mask == wanted && (o->mask & together)) {
        o->wait = Wait::None;
        ++o->pc;
      }
    }
    return false;
  }
  for (size_t k = 0; k < w.fragments.size();) {
    Fragment* o = w.fragments[k].get();
    if (o != f && o->wait == Wait::WarpSync && o->sync_mask == wanted && o->pc == f->pc) {
      f->mask |= o->mask;
      w.fragments.erase(w.fragments.begin() + static_cast<long>(k));
    } else {
      ++k;
    }
  }
  f->wait = Wait::None;
  ++f->pc;
  mask = f->mask;
  stop = false;
  return true;
}

void Exec::jump(int32_t target) {
  const int32_t from = here();
  if (mask != f->mask) {
    auto taken = std::make_unique<Fragment>();
    taken->mask = mask;
    taken->pc = target;
    taken->stack = f->stack;
    f->mask &= ~mask;
    w.fragments.push_back(std::move(taken));
    stop = true;
    return;
  }
  f->pc = target;
  if (target > from) return;
  LoopWatch* loop = nullptr;
  for (LoopWatch& l : f->loops) {
    if (l.head == target) loop = &l;
  }
  if (!loop) {
    loop = &f->loops[f->next_loop++ % 3];
    *loop = LoopWatch();
    loop->head = target;
    return;
  }
  const bool idle =
      !loop->changed && !loop->overflow && (loop->strong || loop->timed) && loop->hash == loop->last_hash;
  loop->streak = idle ? loop->streak + 1 : 0;
  if (loop->streak >= f->patience) {
    ++m.counters.polls;
    f->wait = Wait::Poll;
    f->timed = loop->timed;
    f->patience = kPatience;
    loop->streak = 0;
    stop = true;
    m.watch(w, *f, loop->places);
  }
  loop->last_hash = loop->hash;
  loop->hash = 0;
  loop->places.clear();
  loop->changed = loop->strong = loop->timed = loop->overflow = false;
}

// --- Polling ---

void Exec::note_read(uint64_t place, uint32_t bytes, uint64_t value, bool strong) {
  for (LoopWatch& l : f->loops) {
    if (l.head < 0 || l.changed || l.overflow) continue;
    l.hash = mix(mix(l.hash, place), value);
    l.strong |= strong;
    if (l.places.size() >= kMaxPlaces) {
      l.overflow = true;
      continue;
    }
    for (uint64_t word = place & ~uint64_t{3}; word < place + bytes; word += 4) {
      if (l.places.empty() || l.places.back() != word) l.places.push_back(word);
    }
  }
}

void Exec::note_constants(uint64_t places) {
  for (LoopWatch& l : f->loops) l.hash = mix(l.hash, places);
}

void Exec::note_time() {
  for (LoopWatch& l : f->loops) l.timed = true;
}

void Exec::note_change() {
  for (LoopWatch& l : f->loops) l.changed = true;
  m.progress();
}

void Machine::watch(Warp& warp, Fragment& f, const std::vector<uint64_t>& places) {
  f.watched = places;
  std::sort(f.watched.begin(), f.watched.end());
  f.watched.erase(std::unique(f.watched.begin(), f.watched.end()), f.watched.end());
  for (uint64_t word : f.watched) watchers[word].push_back({&warp, reinterpret_cast<uint64_t>(&f)});
  sleeping += f.watched.size();
}

void Machine::unwatch(Fragment& f) {
  for (uint64_t word : f.watched) {
    auto it = watchers.find(word);
    auto& list = it->second;
    for (size_t k = 0; k < list.size(); ++k) {
      if (list[k].second == reinterpret_cast<uint64_t>(&f)) {
        list[k] = list.back();
        list.pop_back();
        break;
      }
    }
    if (list.empty()) watchers.erase(it);
  }
  sleeping -= f.watched.size();
  f.watched.clear();
}

void Machine::touched(Region& region, uint64_t offset, uint32_t bytes) {
  if (!sleeping) return;
  const uint64_t begin = (region.base + offset) & ~uint64_t{3}, end = region.base + offset + bytes;
  if (watchers.size() * 4 < (end - begin) / 4) {  // a large write: go through the sleepers instead
    std::vector<std::pair<Warp*, Fragment*>> found;
    for (const auto& [word, list] : watchers) {
      if (word < begin || word >= end) continue;
      for (const auto& [warp, f] : list) found.push_back({warp, reinterpret_cast<Fragment*>(f)});
    }
    for (const auto& [warp, f] : found) {
      if (f->wait == Wait::Poll) wake(*warp, *f);
    }
    return;
  }
  for (uint64_t word = begin; word < end && sleeping; word += 4) {
    for (auto it = watchers.find(word); it != watchers.end(); it = watchers.find(word)) {
      const auto [warp, f] = it->second.back();
      wake(*warp, *reinterpret_cast<Fragment*>(f));
    }
  }
}

// --- Warps and events ---

void Machine::enqueue(Warp& warp) {
  if (warp.queued) return;
  warp.queued = true;
  ready.push_back(&warp);
}

void Machine::wake(Warp& warp, Fragment& f) {
  if (!f.watched.empty()) unwatch(f);
  for (Mbarrier* b : f.awaited) {
    for (size_t k = 0; k < b->waiters.size(); ++k) {
      if (b->waiters[k].second != &f) continue;
      b->waiters[k] = b->waiters.back();
      b->waiters.pop_back();
      break;
    }
  }
  f.awaited.clear();
  if (f.waiting_since) {
    const Cta& cta = *warp.cta;
    const uint32_t line = cta.grid->program->code[static_cast<size_t>(f.pc)].line;
    timeline.push_back({static_cast<uint32_t>(cta.rank), static_cast<uint32_t>(cta.sm), cta.slot,
                        static_cast<uint32_t>(warp.index), f.mask, static_cast<uint32_t>(f.wait), line,
                        static_cast<uint32_t>(cta.grid->id), f.waiting_since, tick});
    f.waiting_since = 0;
  }
  f.wait = Wait::None;
  enqueue(warp);
}

/// Mostly soon, sometimes late, now and then very late.
uint64_t Machine::random_delay() {
  switch (random.below(8)) {
    case 0:
      return 0;
    case 1:
      return random.below(4);
    case 7:
      return random.below(400);
    default:
      return random.below(40);
  }
}

void Machine::after(uint64_t delay, std::function<void()> run) {
  events.push({tick + delay, event_order++, std::move(run)});
}

void Machine::run_warp(Warp& w) {
  uint64_t quantum = random.below(8) == 0 ? 1 + random.below(4) : 16 + random.below(240);
  Grid& grid = *w.cta->grid;
  const Program& p = *grid.program;
  program = &p;
  Fragment* f = pick(w);
  Exec x{*this,
         w,
         f,
         p,
         0,
         {w.registers, const_cast<uint8_t*>(grid.constants)},
         w.undefined.data(),
         w.shadow,
         w.predicates.data(),
         w.predicate_undefined.data()};
  const Instr* code = p.code.data();
  current_warp = &w;
  while (f && quantum--) {
    const Instr& i = code[f->pc++];
    Mask mask = f->mask;
    current = &i;
    current_lanes = mask;
    if (i.guard >= 0) {
      if (x.pred_undef[i.guard] & mask) {
        current_lanes = x.pred_undef[i.guard] & mask;
        fail(ErrorKind::UninitializedUse, "the predicate that guards this instruction is undefined");
      }
      mask &= i.guard_not ? ~x.pred[i.guard] : x.pred[i.guard];
    }
    ++counters.instructions;
    if (mask) {
      w.wgmma_touched |= i.touches_wgmma;
      x.mask = mask;
      x.f = f;
      current_lanes = mask;
      i.fn(x, i);
      if (x.stop) {
        x.stop = false;
        if (options.timeline) note_waits(w);
        f = w.live ? pick(w) : nullptr;
        continue;
      }
    }
    if (w.fragments.size() > 1) f = reconverge(w, f);
  }
  current = nullptr;
  current_warp = nullptr;
  if (w.live == 0) {
    Cta& cta = *w.cta;
    if (--cta.live_warps == 0) retire_cta(cta);
    return;
  }
  if (pick(w)) enqueue(w);
}

/// Notes when fragments began to wait.
void Machine::note_waits(Warp& w) {
  for (const auto& f : w.fragments) {
    if (f->wait != Wait::None && !f->waiting_since) f->waiting_since = tick;
  }
}

/// Nothing can run and no event is pending: lets time pass, gives sleepers another try, or reports a
/// deadlock.
bool Machine::idle() {
  uint64_t earliest = UINT64_MAX;
  bool pure_time = false, timed = false, any = false;
  const auto each = [&](const auto& visit) {
    for (const auto& cta : slots) {
      if (!cta) continue;
      for (const auto& w : cta->warps) {
        for (const auto& f : w->fragments) visit(*w, *f);
      }
    }
  };
  each([&](Warp&, Fragment& f) {
    any = true;
    if (f.wait == Wait::Time) earliest = std::min(earliest, f.wake_time);
    if (f.wait == Wait::Poll && f.timed) (f.watched.empty() ? pure_time : timed) = true;
    if (f.wait == Wait::Mbarrier || f.wait == Wait::Time) timed = true;
  });
  if (!any) return false;
  if (idle_progress != progress_count) {
    idle_progress = progress_count;
    idle_rounds = 0;
  }
  if (earliest != UINT64_MAX && ++idle_rounds < kIdleRounds) {
    time_ns = std::max(time_ns, earliest);
    each([&](Warp& w, Fragment& f) {
      if (f.wait == Wait::Time && f.wake_time <= time_ns) wake(w, f);
    });
    time_out_waits();
    return true;
  }
  const auto retry = [&](uint32_t patience, bool only_timed) {
    each([&](Warp& w, Fragment& f) {
      if (f.wait == Wait::Mbarrier) {
        f.give_up = true;
        wake(w, f);
      } else if (f.wait == Wait::Time) {
        wake(w, f);
      } else if (f.wait == Wait::Poll && (!only_timed || f.timed)) {
        f.patience = patience;
        wake(w, f);
      }
    });
  };
  if (probed_at != progress_count) {
    probed_at = progress_count;
    time_step = 1000;
    retry(kProbePatience, false);
    if (!ready.empty()) return true;
  }
  if (pure_time || (options.watchdog && timed)) {
    time_ns += time_step;
    if (time_step >= kMaxTimeStep * 64) deadlock();
    time_step *= 2;
    if (options.watchdog) {
      retry(kPatience, true);
    } else {
      each([&](Warp& w, Fragment& f) {
        if (f.wait == Wait::Poll && f.timed && f.watched.empty()) wake(w, f);
      });
    }
    return true;
  }
  deadlock();
}

/// try_wait suspends a thread for a limited time only: its loop may have another way out.
void Machine::time_out_waits() {
  for (const auto& cta : slots) {
    if (!cta) continue;
    for (const auto& w : cta->warps) {
      for (const auto& f : w->fragments) {
        if (f->wait != Wait::Mbarrier || f->wake_time > tick) continue;
        f->give_up = true;
        wake(*w, *f);
      }
    }
  }
}

bool Machine::run(uint64_t steps) {
  start_clusters();
  const uint64_t last = tick + steps;
  try {
    for (;;) {
      while (!events.empty() && events.top().due <= tick) {
        auto run = std::move(const_cast<Event&>(events.top()).run);
        events.pop();
        ++counters.events;
        run();
      }
      if (tick >= last) return false;
      if (ready.empty()) {
        if (!events.empty()) {
          tick = std::max(tick, events.top().due);
        } else if (!idle()) {
          break;
        }
        continue;
      }
      const size_t k = random.below(ready.size());
      Warp* w = ready[k];
      ready[k] = ready.back();
      ready.pop_back();
      w->queued = false;
      if (!w->live) continue;
      if ((++tick & (kWaitTicks - 1)) == 0) time_out_waits();
      run_warp(*w);
      if (barren_progress != progress_count) {
        barren_progress = progress_count;
        barren_from = counters.instructions;
      } else if (counters.instructions - barren_from > kBarren && events.empty()) {
        deadlock();
      }
      if (options.max_steps && counters.instructions > options.max_steps) {
        fail(ErrorKind::StepLimit, format("the run took more than max_steps=%llu warp instructions; raise "
                                          "max_steps if the kernel may take that long",
                                          static_cast<unsigned long long>(options.max_steps)));
      }
    }
  } catch (const Error& e) {
    if (e.located || !current_warp || !current) throw;
    throw Error(e.kind, locate(e, *current_warp, current_lanes, *current), true);
  }
  // The host waits here for all ranks: what comes later is ordered after everything so far.
  Clock all;
  for (const Clock& c : stream_clock) all.join(c);
  for (Clock& c : stream_clock) c = all;
  return true;
}

}  // namespace megagen::emulator
