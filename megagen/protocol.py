"""Words that the kernel and the host share: parameters, status block, roles and what a wait awaits.

Rendered into the source as constants and structs, and read by the runtime, so that each exists once.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class RoleId(IntEnum):
    """Who waits, in a status record."""

    DISPATCH = 1
    LOAD_TOKENS = 2
    LOAD_WEIGHTS = 3
    MATH = 4
    COMBINE = 5
    ISSUE_MMA = 6
    EPILOGUE = 7


class Awaited(IntEnum):
    """What a wait awaits; `peer` of the record is what `AWAITED_TEXT` says: a rank, a token, a pool block, a
    pipeline stage or a slot."""

    RANK_BEFORE_PULL = 1
    OUTPUTS_OF_TOKEN = 2
    TOKENS_OF_BLOCK = 3
    INTERMEDIATE_OF_BLOCK = 4
    FULL_STAGE = 5
    EMPTY_STAGE = 6
    TILE_TASK = 7
    PULLED_ROW = 8
    NUM_TOKENS_IN_RANGE = 9
    TILE_NUMBER = 10
    PLACE_OF_BLOCK = 11
    FULL_ACCUMULATOR = 12
    EMPTY_ACCUMULATOR = 13


class TraceState(IntEnum):
    """What a warp does from a trace record on, until its next record."""

    PUBLISH = 1
    WAIT_RANKS = 2
    PULL = 3
    WAIT_ROWS = 4
    FILL = 5
    WAIT_TILE = 6
    L1_LOOP = 7
    L1_EPILOGUE = 8
    L2_LOOP = 9
    L2_EPILOGUE = 10
    SIGNAL = 11
    COMBINE_REST = 13
    END = 14


TRACE_CAPACITY = 512  # records per warp; later ones are dropped

AWAITED_TEXT = {
    Awaited.RANK_BEFORE_PULL: "the routing counts of rank {peer}",
    Awaited.OUTPUTS_OF_TOKEN: "the expert outputs of token {peer}",
    Awaited.TOKENS_OF_BLOCK: "the token rows of pool block {peer}",
    Awaited.INTERMEDIATE_OF_BLOCK: "the intermediate rows of pool block {peer}",
    Awaited.FULL_STAGE: "the data of pipeline stage {peer}",
    Awaited.EMPTY_STAGE: "the release of pipeline stage {peer}",
    Awaited.TILE_TASK: "tile slot {peer}",
    Awaited.PULLED_ROW: "a token row that is on its way",
    Awaited.NUM_TOKENS_IN_RANGE: "num_tokens within max_tokens",
    Awaited.TILE_NUMBER: "the next tile's number",
    Awaited.PLACE_OF_BLOCK: "the L1 tiles of pool block {peer}, whose place another block takes",
    Awaited.FULL_ACCUMULATOR: "the result of the MMAs in accumulator {peer}",
    Awaited.EMPTY_ACCUMULATOR: "the release of accumulator {peer}",
}


@dataclass(frozen=True)
class Field:
    """One member of a C struct: `ctype` is an alias of the kernel source, `count` > 1 makes an array."""

    name: str
    ctype: str
    comment: str
    count: int = 1

    @property
    def size(self) -> int:
        return CTYPE_BYTES[self.ctype] * self.count


CTYPE_BYTES = {"TensorMap": 128, "u64": 8, "i64": 8, "u32": 4, "f32": 4}

#: The status block in pinned host memory. `code` is written last, with release at system scope.
STATUS_FIELDS = (
    Field("code", "u32", "AWAITED_* of the wait that failed, 0 while all is well"),
    Field("rank", "u32", "rank that reports"),
    Field("sm", "u32", "its SM (block index)"),
    Field("role", "u32", "its ROLE_*"),
    Field("peer", "u32", "rank, pool block or pipeline stage that is waited for"),
    Field("expected", "u32", "value that would end the wait"),
    Field("seen", "u32", "value last seen"),
    Field("launch", "u32", "launch number of this buffer"),
    Field("aborted_by", "u32", "rank + 1 of the peer whose abort stopped this rank, 0 if none"),
    Field("dropped_ids", "u32", "expert ids out of range so far, dropped"),
    Field("stuck", "u32", "a phase that never completed, and trapped: see stuck_word; 0 if none"),
)

#: Widths of the parts of `stuck`, from the highest bits down: RoleId, Awaited, `peer`, and the SM.
STUCK_BITS = (4, 4, 8, 16)


def params_fields(ranks: int, trace: bool = False, tensor_maps: bool = False) -> tuple[Field, ...]:
    """The kernel's one parameter, a struct.

    `tensor_maps`: weights are read through tensor maps (Blackwell) instead of by address.
    """
    records = "trace records, [SMs][warps][TRACE_CAPACITY] of u32 {ns, SM clock, state, argument}"
    by_turns = "rows by turns of 8 (gate 0-7, up 0-7, gate 8-15, ...)"
    maps: tuple[Field, ...] = ()
    weights: tuple[Field, ...]
    if tensor_maps:
        maps = (
            Field("w13_map", "TensorMap", f"{by_turns}, unpacked by the copy"),
            Field("w2_map", "TensorMap", "down weights, unpacked by the copy"),
        )
        weights = (
            Field("w13_sf", "u64", "scale factors of w13, kernel layout"),
            Field("w2_sf", "u64", "scale factors of w2, kernel layout"),
        )
    else:
        weights = (
            Field("w13", "u64", f"{by_turns}, kernel layout"),
            Field("w13_sf", "u64", "their scale factors, (gate, up) pairs"),
            Field("w2", "u64", "down weights, kernel layout"),
            Field("w2_sf", "u64", "their scale factors, pairs"),
        )
    return (
        *maps,
        Field("symm", "u64", "this rank's symmetric buffer"),
        Field("local", "u64", "this rank's local workspace"),
        *weights,
        Field("output", "u64", "y: bfloat16 [num_tokens][H]"),
        Field("num_tokens_ptr", "u64", "device u32 with the token count, or 0 to use num_tokens"),
        Field("status", "u64", "status block, pinned host memory"),
        Field("timeout_ns", "u64", "limit of a wait for other SMs or ranks"),
        *((Field("trace", "u64", records),) if trace else ()),
        Field("num_tokens", "u32", "tokens of this rank (an upper bound if num_tokens_ptr is set)"),
        Field("rank", "u32", "this rank"),
        Field("offsets", "i64", "symmetric buffer of rank r minus this rank's, bytes", ranks),
    )


def struct_offsets(fields: tuple[Field, ...]) -> tuple[dict[str, int], int]:
    """Byte offset of each field and the struct's size, by the C rules (natural alignment; 64 bytes for tensor
    maps)."""
    offsets, position, widest = {}, 0, 1
    for field in fields:
        alignment = 64 if field.ctype == "TensorMap" else CTYPE_BYTES[field.ctype]
        widest = max(widest, alignment)
        position = -(-position // alignment) * alignment
        offsets[field.name] = position
        position += field.size
    return offsets, -(-position // widest) * widest
