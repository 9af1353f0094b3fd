// Asynchronous copies: they read their source and write their destination at later, seeded points.
#pragma once

#include "machine.hpp"
#include "mbarrier.hpp"

namespace megagen::emulator {

struct AsyncCopy {
  struct Piece {
    Region* from = nullptr;  // null: the data are there already (fills, values)
    uint64_t from_at = 0;
    Region* to = nullptr;
    uint64_t to_at = 0;
    uint32_t bytes = 0;
    uint32_t at = 0;      // in data
    uint8_t barrier = 0;  // index into barriers
  };
  struct Barrier {
    Region* region;
    uint32_t offset;
    uint32_t bytes;  // what complete_tx counts
  };

  Machine* m = nullptr;
  Warp* warp = nullptr;
  int lane = 0;
  const Instr* instr = nullptr;
  const Program* program = nullptr;
  Clock clock;  // what the issuing lane had done
  std::vector<Piece> pieces;
  std::vector<uint8_t> data, undefined;
  std::function<void(uint8_t*, uint32_t)> convert;  // of loaded values
  bool async_proxy = true;
  int reduce = -1;  // operation of combine_values
  Type type = Type::None;

  // Completion: mbarriers, or a group of the issuing lane.
  std::vector<Barrier> barriers;
  LaneGroups* groups = nullptr;
  uint32_t group = 0;
  Agent read_agent = 0, write_agent = 0;
  uint32_t read_count = 0, write_count = 0;

  uint8_t* reserve(uint32_t bytes);  // room at the end of data, defined
};

/// Starts the copy; counts it in the CTAs whose shared memory it touches.
void start_copy(std::shared_ptr<AsyncCopy> copy);
/// Puts the copy into the lane's open group.
void join_group(AsyncCopy& copy, Exec& x, bool bulk);

}  // namespace megagen::emulator
