// Asynchronous tcgen05 operations: how they are issued, ordered and executed.
//
// Every operation executes at a later, seeded point; the pairs that the ISA lists as pipelined execute in the
// order of their issue, all others in any. What is ordered before an operation's accesses to tensor memory is
// a vector clock of its own, apart from the thread's: it grows by the thread's own issues (which help
// pipelined successors only), by tcgen05.wait, and, at fence::after_thread_sync, by what came with thread
// synchronization (Clock::tensor), which in turn has what other threads had at their
// fence::before_thread_sync and what commits announced. Shared memory is accessed through the async proxy,
// ordered by the thread's clock.
//
// Source: PTX ISA, "TensorCore 5th Generation Family Instructions: Memory Consistency Model".
#pragma once

#include "forms.hpp"
#include "mbarrier.hpp"
#include "tensor_memory.hpp"

namespace megagen::emulator {

enum class TensorKind : uint8_t { Mma, Copy, Copy4, Shift, Load, Store, Commit };

struct TensorOp {
  Machine* m = nullptr;
  Warp* warp = nullptr;
  int lane = 0;
  const Instr* instr = nullptr;
  const Program* program = nullptr;
  TensorKind kind = TensorKind::Mma;
  uint64_t key = 0;        // Mma: accumulator, shape and kind
  std::vector<Cta*> ctas;  // whose memories it uses
  Agent issued = 0, done = 0;
  uint32_t count = 0;
  Clock clock;    // what the thread had done: for shared memory, and for reports
  Clock order;    // .before: operations that come before, for tensor memory
  int waits = 0;  // pipelined predecessors that haven't executed
  std::vector<std::shared_ptr<TensorOp>> next;
  std::function<void(TensorOp&)> run;
};

/// What a tcgen05.ld has read; its registers get it at tcgen05.wait::ld.
struct TensorLoad {
  std::vector<uint32_t> values, undefined;  // [register][lane]
};

Warp::TensorOrder& tensor_order(Warp& warp, int lane);

/// An operation by `lane`, ordered but not started.
std::shared_ptr<TensorOp> new_tensor_op(Exec& x, const Instr& i, int lane, TensorKind kind,
                                        std::vector<Cta*> ctas, uint64_t key = 0);
/// Lets it execute once its pipelined predecessors have.
void issue_tensor_op(std::shared_ptr<TensorOp> op);

struct TensorPlace {
  uint8_t *data, *undefined;
};
/// Bytes of a lane's columns, after the access was checked. `order`, `thread`: what another thread than
/// op.lane knows, instead of op.order and op.clock.
TensorPlace tensor_access(TensorOp& op, Cta& cta, uint32_t lane, uint32_t column, uint32_t columns,
                          bool write, const Clock* order = nullptr, const Clock* thread = nullptr);

/// 16 bytes of a CTA's shared memory and their undefined bits, through the async proxy.
void tensor_read_shared(TensorOp& op, Cta& cta, uint32_t address, uint8_t* data, uint8_t* undefined);

/// The one lane that executes an instruction of single-thread semantics.
int single_lane(const Exec& x);
void require_whole_warp(const Exec& x);
/// The value that all lanes give for an operand.
uint32_t uniform_value(const Exec& x, const Ref& r, const char* role);
int group_of(const Decoder& d);

#define MEGAGEN_TCGEN05 "TensorCore 5th Generation Family Instructions: "
#define MEGAGEN_CTA_GROUP "(.cta_group::1|.cta_group::2)"

}  // namespace megagen::emulator
