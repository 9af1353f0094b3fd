// Special registers, and the values that only a running CTA knows and that decoded code reads in the same
// way.
#pragma once

#include <cstdint>

namespace megagen::emulator {

enum class Special : uint8_t {
  TidX,
  TidY,
  TidZ,
  NtidX,
  NtidY,
  NtidZ,
  CtaidX,
  CtaidY,
  CtaidZ,
  NctaidX,
  NctaidY,
  NctaidZ,
  LaneId,
  WarpId,
  NwarpId,
  SmId,
  NsmId,
  GridId,
  ClusteridX,
  ClusteridY,
  ClusteridZ,
  NclusteridX,
  NclusteridY,
  NclusteridZ,
  ClusterCtaidX,
  ClusterCtaidY,
  ClusterCtaidZ,
  ClusterNctaidX,
  ClusterNctaidY,
  ClusterNctaidZ,
  ClusterCtarank,
  ClusterNctarank,
  IsExplicitCluster,
  LanemaskEq,
  LanemaskLe,
  LanemaskLt,
  LanemaskGe,
  LanemaskGt,
  Clock,
  ClockHi,
  Clock64,
  GlobalTimer,
  GlobalTimerLo,
  GlobalTimerHi,
  TotalSmemSize,
  AggrSmemSize,
  DynamicSmemSize,
  ReservedSmemBegin,
  ReservedSmemEnd,
  // Not of the ISA:
  SharedSymbol,   // address of a static shared variable; Instr::imm is its offset
  DynamicSymbol,  // address of the dynamic shared memory
  LocalSymbol,    // local address; Instr::imm is its offset
  ParamSymbol,    // address of a kernel parameter; Instr::imm is its offset
};

}  // namespace megagen::emulator
