// Modules, grids, and the residency of clusters and CTAs on the ranks' SMs.
#include <algorithm>
#include <sstream>

#include "machine.hpp"
#include "mbarrier.hpp"
#include "tensor_memory.hpp"

namespace megagen::emulator {

namespace {

constexpr int kCtasPerSm = 8;  // slots of an SM

constexpr uint64_t kSharedCanonical = 0x780000000000;

uint32_t align_up(uint32_t v, uint32_t a) { return (v + a - 1) / a * a; }

uint8_t* aligned(std::vector<uint8_t>& store, size_t bytes) {
  store.assign(bytes + 64, 0);
  const auto address = reinterpret_cast<uintptr_t>(store.data());
  return store.data() + ((64 - address % 64) % 64);
}

uint32_t volume(const uint32_t d[3]) { return d[0] * d[1] * d[2]; }

}  // namespace

Machine::Machine(const Options& o) : options(o), random(o.seed) {
  if (o.ranks < 1 || o.sms < 1 || o.ranks * o.sms * kCtasPerSm > (1 << kSlotBits)) {
    fail(ErrorKind::Emulator, format("ranks=%d x sms=%d: both must be positive and their product at most %d",
                                     o.ranks, o.sms, (1 << kSlotBits) / kCtasPerSm));
  }
  const auto slots_total = static_cast<size_t>(o.ranks * o.sms * kCtasPerSm);
  slots.resize(slots_total);
  slot_counts.resize(slots_total);
  slot_shared.resize(slots_total);
  stream_clock.resize(static_cast<size_t>(o.ranks));
  history.enabled = o.races;
  history.proxy = o.proxy;
  history.report = [this](const RaceReport& r, const Accessor& by) { violation(r, by); };
  history.mutual = [this](Agent a, Scope sa, Agent b, Scope sb) {
    const uint32_t x = slot_of(a), y = slot_of(b);
    if (x == y) return true;
    const auto inside = [&](Scope s) {
      if (s == Scope::Sys) return true;
      const uint32_t total = static_cast<uint32_t>(options.ranks * options.sms);
      const uint32_t sms_ = static_cast<uint32_t>(options.sms);
      if (s == Scope::Gpu) return x % total / sms_ == y % total / sms_;
      if (s == Scope::Cta) return false;
      const Cta* p = cta_in(x);
      const Cta* q = cta_in(y);
      return p && q && p->cluster == q->cluster;
    };
    return inside(sa) && inside(sb);
  };
}

Machine::~Machine() = default;

ModuleInstance* Machine::load(const std::string& ptx, const std::string& source) {
  auto instance = std::make_unique<ModuleInstance>();
  instance->program = decode_module(parse_ptx(ptx));
  Program& p = instance->program;
  std::stringstream lines(source);
  for (std::string line; std::getline(lines, line);) p.source_lines.push_back(line);
  const auto ranks = static_cast<size_t>(options.ranks);
  instance->constant_store.resize(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::vector<uint64_t> addresses;
    for (const GlobalVariable& g : p.globals) {
      Region* r =
          allocate(static_cast<int>(rank), std::max<uint64_t>(g.bytes, 1), 256, "variable " + g.name, true);
      memcpy(r->data, g.image.data(), g.bytes);
      r->read_only = g.constant;
      addresses.push_back(r->base);
    }
    for (size_t g = 0; g < p.globals.size(); ++g) {
      for (const auto& pointer : p.globals[g].pointers) {
        for (size_t t = 0; t < p.globals.size(); ++t) {
          if (p.globals[t].name != pointer.symbol) continue;
          const uint64_t value = addresses[t] + pointer.addend;
          memcpy(global_region(addresses[g])->data + pointer.at, &value, 8);
        }
      }
    }
    auto& store = instance->constant_store[rank];
    uint8_t* bank = aligned(store, p.constants.size());
    if (!p.constants.empty()) memcpy(bank, p.constants.data(), p.constants.size());
    for (const auto& use : p.symbol_uses) {
      const uint64_t value = addresses[static_cast<size_t>(use.global)] + static_cast<uint64_t>(use.addend);
      for (int l = 0; l < kLanes; ++l) memcpy(bank + use.constant + l * 8, &value, 8);
    }
  }
  modules.push_back(std::move(instance));
  return modules.back().get();
}

void Machine::launch(ModuleInstance& module, const std::string& entry, int rank, const uint32_t grid[3],
                     const uint32_t block[3], const uint32_t cluster[3], uint32_t dynamic_shared,
                     const std::vector<uint8_t>& params, bool programmatic) {
  const Program& p = module.program;
  const int index = p.function(entry);
  if (index < 0 || !p.functions[static_cast<size_t>(index)].entry) {
    std::string names;
    for (const auto& f : p.functions) names += f.entry ? " " + f.name : "";
    fail(ErrorKind::Emulator, "entry='" + entry + "' isn't a kernel of this module; it has:" + names);
  }
  const FunctionInfo& f = p.functions[static_cast<size_t>(index)];
  auto g = std::make_unique<Grid>();
  g->program = &p;
  g->entry = &f;
  g->rank = rank;
  g->id = next_grid++;
  g->programmatic = programmatic;
  uint32_t c[3] = {cluster[0], cluster[1], cluster[2]};
  if (f.cluster[0]) {
    const bool unset = volume(c) <= 1;
    if (!unset && memcmp(c, f.cluster, sizeof c))
      fail(ErrorKind::Emulator, "cluster differs from the kernel's .reqnctapercluster");
    memcpy(c, f.cluster, sizeof c);
  }
  g->explicit_cluster = volume(c) > 1 || f.cluster[0];
  for (int d = 0; d < 3; ++d) {
    g->dims[d] = grid[d];
    g->block[d] = block[d];
    g->cluster[d] = c[d];
    if (!grid[d] || !block[d] || !c[d] || grid[d] % c[d]) {
      fail(ErrorKind::Emulator,
           format("grid[%d]=%u must be a positive multiple of cluster[%d]=%u, and block positive", d, grid[d],
                  d, c[d]));
    }
    if (f.reqntid[0] && f.reqntid[d] != block[d]) {
      fail(ErrorKind::Emulator,
           format("block[%d]=%u differs from the kernel's .reqntid %u", d, block[d], f.reqntid[d]));
    }
  }
  const uint32_t threads = volume(block);
  if (threads > 1024 || (f.maxntid[0] && threads > volume(f.maxntid))) {
    fail(ErrorKind::Emulator, format("block of %u threads exceeds the kernel's .maxntid or 1024", threads));
  }
  if (params.size() != f.param_bytes) {
    fail(ErrorKind::Emulator,
         format("%zu bytes of parameters, the kernel takes %u", params.size(), f.param_bytes));
  }
  g->dynamic_shared = dynamic_shared;
  g->dynamic_base = align_up(kSharedReserved + f.static_shared, f.shared_align);
  const uint32_t shared = g->dynamic_base - kSharedReserved + dynamic_shared;
  if (shared > options.arch.shared_per_cta) {
    fail(ErrorKind::Emulator, format("%u bytes of shared memory exceed the %u that a CTA may have", shared,
                                     options.arch.shared_per_cta));
  }
  // Occupancy: by threads, shared memory, and, where registers are dealt out by hand, one CTA.
  uint32_t fit =
      std::min<uint32_t>(kCtasPerSm, options.arch.threads_per_sm / std::max(32u, align_up(threads, 32)));
  fit = std::min(fit, options.arch.shared_per_sm / (shared + kSharedReserved));
  if (f.uses_setmaxnreg) fit = std::min(fit, std::max(1u, f.minnctapersm));
  if (f.maxnreg) fit = std::min(fit, options.arch.registers / (f.maxnreg * align_up(threads, 32)));
  g->ctas_per_sm = std::max(1u, fit);
  g->params = params;
  g->param_region =
      allocate(rank, std::max<size_t>(params.size(), 1), 256, "kernel parameters of " + entry, true);
  memcpy(g->param_region->data, params.data(), params.size());
  g->param_region->read_only = true;
  auto& store = module.constant_store[static_cast<size_t>(rank)];
  const auto address = reinterpret_cast<uintptr_t>(store.data());
  g->constants = store.data() + ((64 - address % 64) % 64);
  g->clusters = static_cast<uint64_t>(volume(grid)) / volume(c);
  if (volume(c) > g->ctas_per_sm * static_cast<uint32_t>(options.sms)) {
    fail(ErrorKind::Emulator, format("a cluster of %u CTAs can't be resident on %d SMs with %u CTAs each",
                                     volume(c), options.sms, g->ctas_per_sm));
  }
  grids.push_back(std::move(g));
}

/// Starts what fits: on each rank the first unfinished grid, and after it programmatic dependents whose turn
/// has come.
void Machine::start_clusters() {
  std::vector<const Grid*> previous(static_cast<size_t>(options.ranks), nullptr);
  for (const auto& g : grids) {
    const Grid*& before = previous[static_cast<size_t>(g->rank)];
    const bool may_start = !before || before->finished ||
                           (g->programmatic && before->triggered >= uint64_t{volume(before->dims)});
    before = g.get();
    if (!may_start || g->finished) continue;
    g->started = true;
    while (g->next_cluster < g->clusters && start_cluster(*g)) {
    }
  }
}

bool Machine::start_cluster(Grid& g) {
  // The emptiest SMs first.
  const uint32_t size = volume(g.cluster);
  std::vector<std::pair<uint32_t, int>> load;  // resident CTAs, SM
  const auto slot_at = [&](int sm, uint32_t k) {
    return k * static_cast<uint32_t>(options.ranks * options.sms) +
           static_cast<uint32_t>(g.rank * options.sms + sm);
  };
  for (int sm = 0; sm < options.sms; ++sm) {
    uint32_t resident = 0;
    for (uint32_t k = 0; k < kCtasPerSm; ++k) resident += slots[slot_at(sm, k)] != nullptr;
    load.push_back({resident, sm});
  }
  std::vector<std::pair<uint32_t, int>> chosen;  // slot, SM
  while (chosen.size() < size) {
    auto best = std::min_element(load.begin(), load.end());
    if (best->first >= g.ctas_per_sm) return false;
    for (uint32_t k = 0; k < kCtasPerSm; ++k) {
      const uint32_t slot = slot_at(best->second, k);
      if (slots[slot]) continue;
      if (std::any_of(chosen.begin(), chosen.end(), [&](const auto& c) { return c.first == slot; })) continue;
      chosen.push_back({slot, best->second});
      break;
    }
    ++best->first;
  }
  auto cluster = std::make_unique<Cluster>();
  const uint64_t index = g.next_cluster++;
  memcpy(cluster->dims, g.cluster, sizeof cluster->dims);
  const uint64_t nx = g.dims[0] / g.cluster[0], ny = g.dims[1] / g.cluster[1];
  cluster->id[0] = static_cast<uint32_t>(index % nx);
  cluster->id[1] = static_cast<uint32_t>(index / nx % ny);
  cluster->id[2] = static_cast<uint32_t>(index / nx / ny);
  cluster->live_ctas = size;
  cluster->expected = size * volume(g.block);
  Cluster& c = *cluster;
  clusters.push_back(std::move(cluster));
  for (uint32_t r = 0; r < size; ++r) start_cta(g, c, chosen[r].first, chosen[r].second, r, index);
  return true;
}

void Machine::start_cta(Grid& g, Cluster& cluster, uint32_t slot, int sm, uint32_t r, uint64_t) {
  auto owned = std::make_unique<Cta>();
  Cta& cta = *owned;
  cta.machine = this;
  cta.grid = &g;
  cta.slot = slot;
  cta.rank = g.rank;
  cta.sm = sm;
  cta.cluster = &cluster;
  cta.cluster_rank = r;
  const uint32_t in[3] = {r % g.cluster[0], r / g.cluster[0] % g.cluster[1], r / g.cluster[0] / g.cluster[1]};
  for (int d = 0; d < 3; ++d) cta.id[d] = cluster.id[d] * g.cluster[d] + in[d];
  cluster.ctas.push_back(&cta);

  auto& shared = slot_shared[slot];
  if (!shared) {
    const uint64_t bytes = options.arch.shared_per_cta + kSharedReserved;
    shared = std::make_unique<Region>();
    shared->base = kSharedCanonical + (static_cast<uint64_t>(slot) << kCtaShift);
    shared->data_store = LazyBytes(bytes);
    shared->undefined_store = LazyBytes(bytes);
    shared->cell_store = LazyBytes(bytes / 4 * sizeof(Cell));
    shared->data = shared->data_store.data();
    shared->undefined = shared->undefined_store.data();
    shared->cells = reinterpret_cast<Cell*>(shared->cell_store.data());
  } else {
    history.forget(*shared);
    shared->mbarriers.clear();
  }
  shared->size = g.dynamic_base + g.dynamic_shared;
  shared->rank = g.rank;
  shared->cta = &cta;
  shared->name =
      format("shared memory of rank %d SM %d CTA (%u,%u,%u)", g.rank, sm, cta.id[0], cta.id[1], cta.id[2]);
  memset(shared->undefined, 0xFF, shared->size);
  for (uint64_t k = 0; k + 8 <= shared->size; k += 8) {
    const uint64_t garbage = random.next();
    memcpy(shared->data + k, &garbage, 8);
  }
  cta.shared = shared.get();

  const uint32_t threads = volume(g.block), warps = (threads + kLanes - 1) / kLanes;
  const Program& p = *g.program;
  // What ptxas gives at most: the register file dealt out evenly in units of 8, at most 255 to a thread.
  const uint32_t ctas = std::max(1u, g.entry->minnctapersm);
  const uint32_t per_thread = g.entry->maxnreg
                                  ? g.entry->maxnreg
                                  : std::min(255u, options.arch.registers / ctas / (warps * kLanes) / 8 * 8);
  auto& counts = slot_counts[slot];
  counts.resize(std::max<size_t>(counts.size(), kLanes));
  cta.next_agent = kLanes;
  for (uint32_t k = 0; k < warps; ++k) {
    auto w = std::make_unique<Warp>();
    w->cta = &cta;
    w->index = static_cast<int>(k);
    const uint32_t lanes = std::min<uint32_t>(kLanes, threads - k * kLanes);
    w->live = w->started = lanes == kLanes ? kAllLanes : (1u << lanes) - 1;
    auto f = std::make_unique<Fragment>();
    f->mask = w->live;
    f->pc = g.entry->start;
    w->fragments.push_back(std::move(f));
    const uint32_t register_bytes = g.entry->register_bytes, predicates = g.entry->predicates;
    w->registers = aligned(w->register_store, register_bytes);
    w->shadow = aligned(w->shadow_store, register_bytes);
    memset(w->shadow, 0xFF, register_bytes);
    w->undefined.assign(register_bytes / 128 + 1, kAllLanes);
    w->predicates.assign(predicates, 0);
    w->predicate_undefined.assign(predicates, kAllLanes);
    w->predicates[0] = kAllLanes;
    w->predicate_undefined[0] = 0;
    w->local.resize(static_cast<size_t>(p.local_bytes) * kLanes);
    w->local_undefined.assign(w->local.size(), 0xFF);
    w->register_count = per_thread;
    w->agent = agent_id(slot, k);
    w->count = w->first_count = counts[k] + 1;
    w->clocks.push_back({w->live, stream_clock[static_cast<size_t>(g.rank)]});
    cta.warps.push_back(std::move(w));
  }
  cta.live_warps = warps;
  slots[slot] = std::move(owned);
  for (auto& w : cta.warps) enqueue(*w);
}

Agent Machine::agent(Cta& cta, AgentKind kind, uint64_t index) {
  const uint64_t key = static_cast<uint64_t>(kind) << 56 | index;
  const auto it = cta.agents.find(key);
  if (it != cta.agents.end()) return agent_id(cta.slot, it->second);
  const uint32_t local = kLanes + (cta.next_agent++ - kLanes) % ((1u << kLocalBits) - kLanes);
  auto& counts = slot_counts[cta.slot];
  if (counts.size() <= local) counts.resize(local + 1);
  cta.agents[key] = local;
  return agent_id(cta.slot, local);
}

uint32_t& Machine::agent_count(Agent a) { return slot_counts[slot_of(a)][a & ((1u << kLocalBits) - 1)]; }

void Warp::release_memory() {
  const auto release = [](auto&... stores) { ((stores = std::decay_t<decltype(stores)>()), ...); };
  release(register_store, shadow_store, undefined, predicates, predicate_undefined, local, local_undefined,
          clocks, fences);
}

/// A CTA's shared memory ends with it. Only a wait says that another CTA's tcgen05.commit has arrived: it is
/// asynchronous, and the ISA lists no order of its arrivals with those of a later one.
void require_visits_over(const Cta& cta) {
  if (!cta.machine->history.enabled) return;
  const auto& mbarriers = cta.shared->mbarriers;
  for (const auto& [offset, b] : mbarriers) {
    if (b->committed <= b->awaited) continue;
    fail(ErrorKind::MemoryFault,
         "the CTA exits, but none of its threads has waited for another CTA's tcgen05.commit to the " +
             mbarrier_text(*b) + ", which may arrive later");
  }
  VectorClock known;
  for (const auto& w : cta.warps) {
    for (const LaneClock& c : w->clocks) known.join(c.clock.before);
  }
  for (const auto& [who, visit] : cta.visits) {
    const auto& [agent, lane, mbarrier] = who;
    if (known.knows(agent, lane, visit.count)) continue;
    const auto b = mbarriers.find(mbarrier);
    if (mbarrier && (b == mbarriers.end() || b->second->awaited >= visit.phase)) continue;
    fail(ErrorKind::MemoryFault,
         format("the CTA exits, but another CTA's access to its shared memory at PTX line %u isn't ordered "
                "before the exit",
                visit.line));
  }
}

void Machine::retire_cta(Cta& cta) {
  if (cta.async_in_flight) {
    fail(ErrorKind::MemoryFault,
         format("the CTA exits while %u asynchronous operations still use its shared memory",
                cta.async_in_flight));
  }
  if (!cta.tensor_allocations.empty()) {
    const auto [column, columns] = cta.tensor_allocations.front();
    fail(ErrorKind::MemoryFault,
         format("the CTA exits without a tcgen05.dealloc of its tensor memory columns %u to %u", column,
                column + columns - 1));
  }
  require_visits_over(cta);
  Grid& g = *cta.grid;
  if (!cta.launched_dependents) ++g.triggered;
  for (auto& w : cta.warps) {
    slot_counts[cta.slot][static_cast<size_t>(w->index)] = w->count;
    for (const LaneClock& c : w->clocks) g.finish.join(c.clock);
    g.finish.before.learn(w->agent, kAllLanes, w->count);
    for (int proxy = 0; proxy < 2; ++proxy) g.finish.fenced[proxy].learn(w->agent, kAllLanes, w->count);
  }
  for (const auto& [key, local] : cta.agents) {
    g.finish.before.learn(agent_id(cta.slot, local), kAllLanes, slot_counts[cta.slot][local]);
  }
  // The cluster's shared memory must outlive the last access of its CTAs.
  Cluster& cluster = *cta.cluster;
  if (--cluster.live_ctas > 0) return;
  for (Cta* c : cluster.ctas) {
    c->shared->mbarriers.clear();
    for (auto& w : c->warps) w->release_memory();
    retired.push_back(std::move(slots[c->slot]));
  }
  if (++g.done_clusters == g.clusters) finish_grid(g);
  start_clusters();
}

void Machine::finish_grid(Grid& g) {
  g.finished = true;
  g.triggered = volume(g.dims);
  stream_clock[static_cast<size_t>(g.rank)].join(g.finish);
  g.param_region->live = false;
  for (const auto& cta : slots) {
    if (!cta || cta->rank != g.rank) continue;
    for (const auto& w : cta->warps) {
      for (const auto& f : w->fragments) {
        if (f->wait == Wait::Grid) wake(*w, *f);
      }
    }
  }
}

}  // namespace megagen::emulator
