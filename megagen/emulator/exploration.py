"""Exploration: each seed draws one case, so that together they meet every value and every pair of values.

The stratified axes are rank count, routing and tile: within a block of seeds (``block_size``) each pair of
their values occurs. Token and SM counts, shapes, launches and the rest of the plan are drawn evenly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megagen.contract import Contract
from megagen.emulator.cases import Case
from megagen.planning import KernelPlan, make_plan
from megagen.planning.planner import default_format, ladder_of
from megagen.planning.rules import COMBINE_COLUMNS, least_ring_blocks
from megagen.shape import MoEShape

RANKS = (1, 2, 3, 4, 6, 8)
ROUTINGS = (
    "uniform",
    "zipf:1.0",
    "one-expert",
    "none",
    "first-experts",
    "empty-experts",
    "repeated",
    "masked",
    "out-of-range",
    "tile-boundary",  # of the rows of the case's tile
)
MIXED = 0
TILES = (*ladder_of("sm90"), MIXED)
"""BLOCK_M of all ranks; MIXED gives each rank another one."""

SHAPES = (
    MoEShape(hidden=128, intermediate=128, experts=24, top_k=2),
    MoEShape(hidden=512, intermediate=256, experts=24, top_k=1),
    MoEShape(hidden=384, intermediate=384, experts=24, top_k=5),
    MoEShape(hidden=128, intermediate=128, experts=24, top_k=24),
)
"""Small, with experts that all of RANKS divide: one tile per GEMM, several, half tiles, many routes."""

LAUNCHES = (1, 1, 3)
SM_COUNTS = (1, 2, 3, 5, MIXED)
"""SMs of each rank; where a tile takes a pair, pairs, and on every other seed one SM more, which idles."""

_ROWS_BEYOND = 16  # tokens of all ranks together, at most, beyond the rows of the largest tile
_LEAST_STAGES = 2

_Value = TypeVar("_Value")
TokenCounts = Callable[[random.Random, int, int, int], Sequence[int]]


def _nobody(rng: random.Random, ranks: int, capacity: int, tile: int) -> list[int]:
    return [0] * ranks


def _one(rng: random.Random, ranks: int, capacity: int, tile: int) -> list[int]:
    """A single token, on one of the ranks."""
    chosen = rng.randrange(ranks)
    return [int(rank == chosen) for rank in range(ranks)]


def _odd(rng: random.Random, ranks: int, capacity: int, tile: int) -> list[int]:
    return [rng.randrange(1, min(capacity, 16), 2) for _ in range(ranks)]


def _uneven(rng: random.Random, ranks: int, capacity: int, tile: int) -> list[int]:
    """Anything, and nothing on one of several ranks."""
    counts = [rng.randint(1, capacity) for _ in range(ranks)]
    if ranks > 1:
        counts[rng.randrange(ranks)] = 0
    return counts


def _around_tile(rng: random.Random, ranks: int, capacity: int, tile: int) -> list[int]:
    """A tile's rows, or one less, or one more, over all ranks."""
    left = min(tile + rng.choice((-1, 0, 1)), ranks * capacity)
    counts = [0] * ranks
    while left:
        rank = rng.choice([rank for rank in range(ranks) if counts[rank] < capacity])
        taken = rng.randint(1, min(left, capacity - counts[rank]))
        counts[rank] += taken
        left -= taken
    return counts


def _full(rng: random.Random, ranks: int, capacity: int, tile: int) -> list[int]:
    return [capacity] * ranks


TOKENS: dict[str, TokenCounts] = {
    "nobody": _nobody,
    "one": _one,
    "odd": _odd,
    "uneven": _uneven,
    "around-tile": _around_tile,
    "full": _full,
}
"""Ways to draw each rank's tokens from (rng, ranks, capacity of a rank, rows of a tile)."""


@dataclass(frozen=True)
class Point:
    """What a seed draws; ``tile`` and ``sms`` may be MIXED."""

    ranks: int
    routing: str
    tile: int
    tokens: str
    sms: int
    shape: MoEShape
    launches: int


@dataclass(frozen=True)
class Exploration:
    """The values of each axis; one with a single value is fixed."""

    ranks: tuple[int, ...] = RANKS
    routings: tuple[str, ...] = ROUTINGS
    tiles: tuple[int, ...] = TILES
    tokens: tuple[str, ...] = tuple(TOKENS)
    sms: tuple[int, ...] = SM_COUNTS
    shapes: tuple[MoEShape, ...] = SHAPES
    launches: tuple[int, ...] = LAUNCHES
    arch: str = "sm90"

    @classmethod
    def of(cls, arch: str, **fixed: tuple[Any, ...]) -> Exploration:
        """All axes of an architecture, but for those that are fixed."""
        return cls(**{"tiles": (*ladder_of(arch), MIXED), **fixed}, arch=arch)

    @property
    def block_size(self) -> int:
        """Seeds in which each pair of a rank count and a routing occurs once."""
        return len(self.ranks) * len(self.routings)

    def point(self, seed: int) -> Point:
        """The values of one seed."""
        block, place = divmod(seed, self.block_size)
        order = self._shuffled(range(self.block_size), block, "order")[place]
        ranks, routing = divmod(order, len(self.routings))
        # A Latin square: along each row and each column of (ranks, routing) the tile takes every value.
        tile = (ranks + routing + block) % len(self.tiles)
        return Point(
            self.ranks[ranks],
            self.routings[routing],
            self.tiles[tile],
            self._even(self.tokens, seed, "tokens"),
            self._even(self.sms, seed, "sms"),
            self._even(self.shapes, seed, "shapes"),
            self._even(self.launches, seed, "launches"),
        )

    def case(self, seed: int) -> Case:
        """The case of one seed."""
        point = self.point(seed)
        rng = random.Random(f"case {seed}")
        ladder = ladder_of(self.arch)
        tiles = [point.tile or ladder[(rank + seed) % len(ladder)] for rank in range(point.ranks)]
        capacity = (ladder[-1] + _ROWS_BEYOND) // point.ranks
        contract = Contract(point.shape, point.ranks, capacity, default_format(self.arch))
        plan_of = {tile: self._plan(contract, tile, rng) for tile in sorted(set(tiles))}
        routing = point.routing
        if routing == "tile-boundary":
            routing = f"tile-boundary:{point.tile or ladder[0]}"
        return Case(
            plans=tuple(plan_of[tile] for tile in tiles),
            sms=tuple(self._sms(plan_of[tile], point.sms or rng.randint(1, 4), seed) for tile in tiles),
            tokens=tuple(TOKENS[point.tokens](rng, point.ranks, contract.max_tokens, tiles[0])),
            routing=routing,
            seed=seed,
            launches=point.launches,
        )

    @staticmethod
    def _sms(plan: KernelPlan, clusters: int, seed: int) -> int:
        return clusters * plan.cluster + seed % plan.cluster

    def _plan(self, contract: Contract, tile: int, rng: random.Random) -> KernelPlan:
        """The planner's plan for the tile, with what else a plan may choose drawn at random."""
        plan = make_plan(contract, self.arch, contract.max_tokens, sms=2, block_m=tile)
        blocks, experts = contract.shape.hidden // 128, contract.local_experts
        least = min(least_ring_blocks(contract, tile, self._sms(plan, max(SM_COUNTS), 1)), plan.max_blocks)
        plan = replace(
            plan,
            l1_ring_blocks=rng.choice((least, plan.max_blocks)),
            stages=rng.choice((_LEAST_STAGES, plan.stages)),
            experts_per_wave=rng.choice([n for n in range(1, experts + 1) if experts % n == 0]),
            pull_bytes=128 * rng.choice([n for n in range(1, blocks + 1) if blocks % n == 0]),
            combine_columns=rng.choice([n for n in COMBINE_COLUMNS if contract.shape.hidden % n == 0]),
        )
        plan.validate()
        return plan

    def _even(self, values: Sequence[_Value], seed: int, axis: str) -> _Value:
        """Values in turn, shuffled anew in each round of them."""
        turn, place = divmod(seed, len(values))
        return self._shuffled(values, turn, axis)[place]

    @staticmethod
    def _shuffled(values: Sequence[_Value], turn: int, axis: str) -> list[_Value]:
        shuffled = list(values)
        random.Random(f"{axis} {turn}").shuffle(shuffled)
        return shuffled
