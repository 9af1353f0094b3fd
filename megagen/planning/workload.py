"""What a token count means for a rank when routing is uniform: rows per expert, tiles, experts that get any.

Each of the n = tokens x R tokens of all ranks chooses an expert with probability p = K / E, so an expert's
rows are binomial(n, p); from the second tile of an expert on, the normal distribution stands for it.
"""

from __future__ import annotations

import math

from megagen.contract import Contract

TILE_COST_ROWS = 36
"""What a tile costs beside its rows, in rows: its weights have to be fetched whatever its rows are.

From H200 prototypes: 1,250 TFLOP/s at 128 x 256 tiles and 1,029 at 64 x 256 fit (rows + 36) per tile.
"""


def rows_per_expert(contract: Contract, tokens: int) -> float:
    """Token copies that an expert receives on average: tokens x R x K / E."""
    return tokens * contract.ranks * contract.shape.top_k / contract.shape.experts


def likely_rows_per_expert(contract: Contract, tokens: int) -> float:
    """The same with two standard deviations to spare."""
    rows = rows_per_expert(contract, tokens)
    return rows + 2 * math.sqrt(rows)


def experts_reached(contract: Contract, tokens: int) -> float:
    """Expected number of a rank's experts that receive a row: those whose weights are read."""
    missed = 1 - contract.shape.top_k / contract.shape.experts
    return contract.local_experts * (1 - missed ** (tokens * contract.ranks))


def blocks_per_expert(contract: Contract, tokens: int, block_m: int) -> float:
    """Expected row tiles of an expert, E[ceil(rows / block_m)] = sum over j of P(rows > j x block_m)."""
    mean = rows_per_expert(contract, tokens)
    deviation = math.sqrt(mean * (1 - contract.shape.top_k / contract.shape.experts))
    if deviation > block_m:  # all remainders are equally likely
        return mean / block_m + (block_m - 1) / (2 * block_m)
    certain = max(0, math.floor((mean - 6 * deviation) / block_m))
    blocks = float(certain) if certain else experts_reached(contract, tokens) / contract.local_experts
    for tile in range(max(1, certain), math.ceil((mean + 6 * deviation) / block_m) + 1):
        blocks += _normal_above(tile * block_m + 0.5, mean, deviation)
    return blocks


def row_distribution(contract: Contract, tokens: int) -> list[tuple[int, float]]:
    """Row counts that an expert may have, up to six deviations from the mean, with their probabilities."""
    mean = rows_per_expert(contract, tokens)
    deviation = math.sqrt(mean * (1 - contract.shape.top_k / contract.shape.experts))
    counts = range(max(0, math.floor(mean - 6 * deviation)), math.ceil(mean + 6 * deviation) + 1)

    def above(value: float) -> float:
        return _normal_above(value, mean, deviation)

    return [(rows, above(rows - 0.5) - above(rows + 0.5)) for rows in counts]


def padded_rows_cost(contract: Contract, tokens: int, block_m: int) -> float:
    """Rows that a rank's tensor cores work for, tile costs included: what a choice of `block_m` minimizes."""
    return contract.local_experts * blocks_per_expert(contract, tokens, block_m) * (block_m + TILE_COST_ROWS)


def _normal_above(value: float, mean: float, deviation: float) -> float:
    if deviation == 0:
        return float(mean > value)
    return 0.5 * math.erfc((value - mean) / (deviation * math.sqrt(2)))
