"""Planning rules that all architectures share. Each returns its value together with the reason for it."""

from __future__ import annotations

import math

from megagen.contract import Contract, ceil_div
from megagen.planning.workload import rows_per_expert

PANEL_BLOCKS = 16  # row blocks of an expert that are worked on together

RING_SLACK = 1.2  # rows that a ring holds, of those that even routing brings
FIRST_ROW_WARPS = 8  # per SM, each of which pulls a row without waiting for its place
IMBALANCE = 2  # expected work is halved before it is called enough: routing is uneven
TILE_WEIGHT_ROWS = 256  # of a tile, on one SM or on a pair
COMBINE_COLUMNS = (1024, 512, 256, 128)  # 256: 16 bytes per lane; 128: where no more divides a row


def choose_experts_per_wave(
    contract: Contract, sms: int, block_m: int, tokens: int, sms_each: int = 1
) -> tuple[int, str]:
    """The fewest experts, among the divisors of E/R, whose expected L1 tiles, halved for imbalance, fill all
    SMs.

    A tile takes one SM, or a cluster of `sms_each`.
    """
    experts, workers = contract.local_experts, sms // sms_each
    unit = "SMs" if sms_each == 1 else f"clusters of {sms_each}"
    n_tiles = 2 * contract.shape.intermediate // TILE_WEIGHT_ROWS
    rows = rows_per_expert(contract, tokens)
    tiles = max(1, ceil_div(math.ceil(rows), block_m)) * min(1.0, rows) * n_tiles
    for count in range(1, experts + 1):
        if experts % count == 0 and tiles * count / IMBALANCE >= workers:
            expected = f"{tiles * count:.0f} L1 tiles expected in a wave"
            return count, f"{expected}, at least {IMBALANCE} for each of {workers} {unit}; divides {experts}"
    expected = f"{tiles * experts:.0f} L1 tiles in all"
    return experts, f"{expected}: less than {IMBALANCE} for each of {workers} {unit}, so one wave"


def stage_limit(stages: int, most: int, stage_bytes: int) -> str:
    """Why there are no more stages than these, the most that fit."""
    if stages == most:
        return f"{most} stages are the most that a plan takes"
    return f"a stage takes {stage_bytes}, so one more does not fit"


def choose_pull_bytes(contract: Contract, limit: int) -> tuple[int, str]:
    """The largest piece of a token row, at most `limit` bytes, in which the row divides evenly."""
    hidden = contract.shape.hidden
    blocks = hidden // 128
    pieces = next(p for p in range(1, blocks + 1) if blocks % p == 0 and hidden // p <= limit)
    return hidden // pieces, f"a row of {hidden} bytes in {pieces} piece{'s' if pieces > 1 else ''}"


def choose_combine_columns(contract: Contract, warps: int, tokens: int) -> tuple[int, str]:
    """The most columns, of COMBINE_COLUMNS, that still give each of the grid's combining `warps` a unit."""
    hidden = contract.shape.hidden
    sizes = [size for size in COMBINE_COLUMNS if hidden % size == 0 and (size >= 256 or hidden % 256)]
    columns = next((size for size in sizes if tokens * hidden // size >= warps), sizes[-1])
    return columns, f"{tokens * hidden // columns} units for {warps} warps"


def least_ring_blocks(contract: Contract, block_m: int, sms: int) -> int:
    """Blocks that a ring of pulled rows needs so that nothing waits for ever.

    A block waits for the L1 tiles of the one a ring before it. Those come earlier in the schedule if both are
    not in one panel. The first rows, one per warp, must not wait at all, whatever experts they go to.
    """
    first_rows = contract.local_experts + ceil_div(FIRST_ROW_WARPS * sms, block_m)
    return max(PANEL_BLOCKS, first_rows)


def choose_ring_blocks(
    contract: Contract, block_m: int, sms: int, pool_blocks: int, padding: int
) -> tuple[int, str]:
    """Room for what even routing brings at capacity, and some more, and for `padding` rows of each expert; or
    for all that any routing can bring."""
    even = contract.max_tokens * contract.shape.top_k
    rows = math.ceil(RING_SLACK * even) + contract.local_experts * padding
    enough, least = ceil_div(rows, block_m), least_ring_blocks(contract, block_m, sms)
    blocks = max(enough, least)
    if blocks >= pool_blocks:
        return pool_blocks, "all that any routing can bring"
    held = (
        f"{RING_SLACK:g} times the {even:,} rows of even routing, and {padding} of padding for each of "
        f"{contract.local_experts} experts"
        if enough >= least
        else "the fewest with which nothing waits for ever"
    )
    return blocks, f"{held}; {pool_blocks} would take any routing"
