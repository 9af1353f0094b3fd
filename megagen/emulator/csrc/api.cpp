// The C interface that machine.py calls. Functions that can fail return null or a kind above zero and leave
// the text in emulator_error().
#include <new>

#include "forms.hpp"
#include "machine.hpp"

using namespace megagen::emulator;

namespace {

thread_local std::string error_text, returned_text;
thread_local int error_kind = 0;

template <class F>
int guarded(F f) {
  error_kind = -1;
  try {
    f();
  } catch (const Error& e) {
    error_kind = static_cast<int>(e.kind);
    error_text = e.what();
  } catch (const std::bad_alloc&) {
    error_kind = 0;
    error_text = "out of memory";
  } catch (const std::exception& e) {
    error_kind = 0;
    error_text = std::string("internal error: ") + e.what();
  }
  return error_kind;
}

}  // namespace

extern "C" {

struct emulator_options {
  int32_t ranks, sms;
  uint64_t seed, max_steps;
  int32_t races, collectives_order, pipelined_copies, watchdog, timeline, step_clock, proxy;
  int32_t compute_capability;
  uint32_t shared_per_sm, shared_per_cta, registers, threads_per_sm;
};

const char* emulator_error() { return error_text.c_str(); }
int emulator_error_kind() { return error_kind; }

Machine* emulator_create(const emulator_options* o) {
  Machine* m = nullptr;
  guarded([&] {
    Options options;
    options.ranks = o->ranks;
    options.sms = o->sms;
    options.seed = o->seed;
    options.max_steps = o->max_steps;
    options.races = o->races;
    options.collectives_order = o->collectives_order;
    options.pipelined_copies = o->pipelined_copies;
    options.watchdog = o->watchdog;
    options.timeline = o->timeline;
    options.step_clock = o->step_clock;
    options.proxy = static_cast<ProxyCheck>(o->proxy);
    options.arch.compute_capability = o->compute_capability;
    options.arch.shared_per_sm = o->shared_per_sm;
    options.arch.shared_per_cta = o->shared_per_cta;
    options.arch.registers = o->registers;
    options.arch.threads_per_sm = o->threads_per_sm;
    m = new Machine(options);
  });
  return m;
}
void emulator_destroy(Machine* m) { delete m; }

ModuleInstance* emulator_load(Machine* m, const char* ptx, const char* source) {
  ModuleInstance* module = nullptr;
  guarded([&] { module = m->load(ptx, source); });
  return module;
}

/// One line per kernel parameter: "offset bytes type".
const char* emulator_parameters(ModuleInstance* module, const char* entry) {
  returned_text.clear();
  const Program& p = module->program;
  const int index = p.function(entry);
  if (index < 0 || !p.functions[static_cast<size_t>(index)].entry) {
    std::string names;
    for (const FunctionInfo& f : p.functions) {
      if (f.entry) names += " " + f.name;
    }
    error_kind = 0;
    error_text = std::string("entry='") + entry + "' isn't a kernel of this module; it has:" + names;
    return nullptr;
  }
  const FunctionInfo& f = p.functions[static_cast<size_t>(index)];
  for (size_t k = 0; k < f.params.size(); ++k) {
    returned_text += format("%u %llu %s\n", f.param_offsets[k],
                            static_cast<unsigned long long>(f.params[k].bytes()), f.params[k].type.c_str());
  }
  return returned_text.c_str();
}

Region* emulator_allocate(Machine* m, int32_t rank, uint64_t bytes, uint64_t align, const char* name,
                          int32_t defined) {
  Region* r = nullptr;
  guarded([&] { r = m->allocate(rank, bytes, align, name, defined); });
  return r;
}
uint64_t emulator_address(const Region* r) { return r->base; }
uint8_t* emulator_data(const Region* r) { return r->data; }
uint8_t* emulator_undefined(const Region* r) { return r->undefined; }
void emulator_free(Region* r) { r->live = false; }

int emulator_launch(Machine* m, ModuleInstance* module, const char* entry, int32_t rank, const uint32_t* grid,
                    const uint32_t* block, const uint32_t* cluster, uint32_t shared, const uint8_t* params,
                    uint64_t param_bytes, int32_t programmatic) {
  return guarded([&] {
    m->launch(*module, entry, rank, grid, block, cluster, shared,
              std::vector<uint8_t>(params, params + param_bytes), programmatic);
  });
}

/// Runs for a while; `finished` tells whether everything has ended.
int emulator_run(Machine* m, uint64_t steps, int32_t* finished) {
  return guarded([&] { *finished = m->run(steps); });
}

/// instructions, asynchronous operations, events, matrix operations, polls, virtual nanoseconds.
void emulator_counters(const Machine* m, uint64_t* out) {
  const Counters& c = m->counters;
  const uint64_t values[6] = {c.instructions, c.async, c.events, c.matrix, c.polls, m->time_ns};
  memcpy(out, values, sizeof values);
}

/// Number of timeline events, and their array.
uint64_t emulator_timeline(const Machine* m, const TimelineEvent** events) {
  *events = m->timeline.data();
  return m->timeline.size();
}
uint64_t emulator_ticks(const Machine* m) { return m->tick; }

/// "file:line" and the text of a PTX line of a module.
const char* emulator_describe(const ModuleInstance* module, uint32_t line) {
  const Instr* i = module->program.at_line(line);
  returned_text =
      i ? module->program.source_of(i->location) + "\t" + module->program.instruction_text(*i) : "";
  return returned_text.c_str();
}

const char* emulator_output(const Machine* m) {
  returned_text.clear();
  for (const std::string& line : m->output) returned_text += line;
  return returned_text.c_str();
}
const char* emulator_reports(const Machine* m) {
  returned_text.clear();
  for (const std::string& line : m->reports) returned_text += line + "\n";
  return returned_text.c_str();
}
/// Who wrote last to the byte at an offset of a region, for reports about outputs.
const char* emulator_last_writer(const Machine* m, const Region* r, uint64_t offset) {
  const Cell& c = r->cells[offset / 4];
  returned_text = c.write ? m->name_of(agent_of(c.write)) + format(" at PTX line %u", c.write_line)
                          : "nobody in this run";
  return returned_text.c_str();
}

/// The decoder's table, one "pattern<tab>section" a line.
const char* emulator_forms() {
  returned_text.clear();
  for (const std::string& line : FormTable::get().patterns()) returned_text += line + "\n";
  return returned_text.c_str();
}

/// For coverage: one line per distinct form that a module uses.
const char* emulator_module_forms(const ModuleInstance* module) {
  returned_text.clear();
  std::vector<const Form*> seen;
  for (const Instr& i : module->program.code) {
    bool known = false;
    for (const Form* f : seen) known |= f == i.form;
    if (known || !i.form) continue;
    seen.push_back(i.form);
    returned_text += std::string(i.form->pattern) + "\n";
  }
  return returned_text.c_str();
}

}  // extern "C"
