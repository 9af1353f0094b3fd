// What the emulator reports: one exception type, whose kind names the Python class that it becomes.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace megagen::emulator {

/// Numbered like `_ERRORS` in machine.py.
enum class ErrorKind {
  Emulator,
  Deadlock,
  DataRace,
  MemoryFault,
  ProxyViolation,
  UninitializedUse,
  Trap,
  UnsupportedInstruction,
  StepLimit,
};

/// Thrown without a location by whatever finds the fault; the machine adds who and where.
struct Error : std::runtime_error {
  Error(ErrorKind k, const std::string& what, bool with_location = false)
      : std::runtime_error(what), kind(k), located(with_location) {}
  ErrorKind kind;
  bool located;
};

[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
  va_list list;
  va_start(list, pattern);
  char buffer[1024];
  vsnprintf(buffer, sizeof buffer, pattern, list);
  va_end(list);
  return buffer;
}

}  // namespace megagen::emulator
