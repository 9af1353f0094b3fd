"""Routing for tests, benchmarks and commands: which experts each token names, and with which weights.

Also the reader of the ``--tokens`` option. NumPy only; the same seed gives the same routing everywhere. The
tokens of all ranks are drawn together and then dealt out, so a routing does not depend on the rank count.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megagen.errors import InputError
from megagen.shape import MoEShape

NO_EXPERT = -1


class Routing(NamedTuple):
    """Router output of T tokens.

    Attributes:
        topk_ids: [T, K] int32, -1 where there is no expert.
        topk_weights: [T, K] float32, each row summing to 1; without an expert the weight means nothing.
    """

    topk_ids: np.ndarray
    topk_weights: np.ndarray

    def deal(self, tokens_per_rank: Sequence[int]) -> list["Routing"]:
        """Split into consecutive parts, one per rank.

        Raises:
            InputError: the parts don't add up to T.
        """
        if sum(tokens_per_rank) != len(self.topk_ids):
            raise InputError(
                f"tokens_per_rank={list(tokens_per_rank)} adds up to {sum(tokens_per_rank)}, but the routing "
                f"has {len(self.topk_ids)} tokens; deal out exactly those"
            )
        ends = np.cumsum(tokens_per_rank)
        return [
            Routing(self.topk_ids[end - count : end], self.topk_weights[end - count : end])
            for count, end in zip(tokens_per_rank, ends, strict=True)
        ]


def make_routing(kind: str, shape: MoEShape, tokens: int, seed: int = 0) -> Routing:
    """Routing of ``tokens`` tokens (of all ranks together).

    Args:
        kind: a name of ``ROUTING_KINDS``, with its argument after a colon where it takes one
            (``zipf:1.0``, ``tile-boundary:64``), or the path of a ``.npy`` file with ids [tokens, top_k].

    Raises:
        InputError: an unknown kind, a bad argument, or a file that does not fit.
    """
    if tokens < 0:
        raise InputError(f"tokens={tokens} is negative; give 0 or more")
    rng = np.random.default_rng(seed)
    name, _, argument = kind.partition(":")
    if kind.endswith(".npy"):
        ids = _load_ids(Path(kind), shape, tokens)
    elif name == "zipf":
        ids = _zipf(rng, shape, tokens, _parse_argument(kind, argument, minimum=0))
    elif name == "tile-boundary":
        ids = _tile_boundary(rng, shape, tokens, int(_parse_argument(kind, argument, minimum=1)))
    elif kind in _PLAIN_KINDS:
        ids = _PLAIN_KINDS[kind](rng, shape, tokens)
    else:
        raise InputError(f"routing={kind!r} is unknown; choose one of {', '.join(ROUTING_KINDS)}")
    logits = rng.standard_normal((tokens, shape.top_k), dtype=np.float32)
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return Routing(ids.astype(np.int32), weights)


def parse_tokens(text: str, ranks: int) -> list[tuple[int, ...]]:
    """Read ``--tokens``: each case is a tuple of token counts, one per rank.

    ``64``: 64 on each rank. ``3,0,7``: a count per rank. ``1:8192``: one case per doubling from 1 up to 8192,
    both ends included, each the same on all ranks.

    Raises:
        InputError: not a number, negative, or a list whose length is not ``ranks``.
    """
    if ":" in text:
        first, last = (_parse_count(text, part) for part in _split_range(text))
        if first > last:
            raise InputError(f"tokens={text!r} runs backwards; give the smaller count first")
        counts = [first]
        while counts[-1] < last:
            counts.append(min(max(2 * counts[-1], 1), last))
        return [(count,) * ranks for count in counts]
    per_rank = tuple(_parse_count(text, part) for part in text.split(","))
    if len(per_rank) == 1:
        return [per_rank * ranks]
    if len(per_rank) != ranks:
        raise InputError(
            f"tokens={text!r} gives {len(per_rank)} counts for ranks={ranks}; give one, or one per rank"
        )
    return [per_rank]


def _split_range(text: str) -> list[str]:
    parts = text.split(":")
    if len(parts) != 2:
        raise InputError(f"tokens={text!r} is no range; write FIRST:LAST, as in 1:8192")
    return parts


def _parse_count(text: str, part: str) -> int:
    if not part.strip().isascii() or not part.strip().isdigit():
        raise InputError(
            f"tokens={text!r}: {part!r} is no token count; write 64, or 3,0,7 per rank, or 1:8192"
        )
    return int(part)


def _parse_argument(kind: str, argument: str, minimum: float) -> float:
    try:
        value = float(argument)
    except ValueError:
        value = minimum - 1
    if not minimum <= value < 1e6:
        raise InputError(
            f"routing={kind!r}: {argument!r} is no number from {minimum}; "
            f"write it as in zipf:1.0 or tile-boundary:64"
        )
    return value


def _load_ids(path: Path, shape: MoEShape, tokens: int) -> np.ndarray:
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(
            f"routing={str(path)!r} can't be read: {error}; save an integer array with numpy.save"
        ) from error
    if ids.shape != (tokens, shape.top_k) or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(
            f"routing={str(path)!r} holds {ids.dtype} {list(ids.shape)}; "
            f"give integers [tokens, top_k] = [{tokens}, {shape.top_k}]"
        )
    bad = ids[(ids < NO_EXPERT) | (ids >= shape.experts)]
    if bad.size:
        raise InputError(
            f"routing={str(path)!r} names expert {bad[0]}; give -1 for none, or 0 to {shape.experts - 1}"
        )
    return ids


def _draw_distinct(
    rng: np.random.Generator, log_probability: np.ndarray, tokens: int, count: int
) -> np.ndarray:
    """[tokens, count] distinct experts per token, drawn in turn by these probabilities (Gumbel top-k)."""
    keys = rng.gumbel(size=(tokens, len(log_probability))) + log_probability
    best = np.argpartition(-keys, count - 1, axis=1)[:, :count]
    order = np.argsort(-np.take_along_axis(keys, best, axis=1), axis=1)
    return np.take_along_axis(best, order, axis=1)


def _uniform(rng: np.random.Generator, shape: MoEShape, tokens: int) -> np.ndarray:
    return _draw_distinct(rng, np.zeros(shape.experts), tokens, shape.top_k)


def _zipf(rng: np.random.Generator, shape: MoEShape, tokens: int, exponent: float) -> np.ndarray:
    """The i-th most popular expert has probability proportional to i^-exponent; who is popular is random."""
    popularity = rng.permutation(shape.experts) + 1
    return _draw_distinct(rng, -exponent * np.log(popularity), tokens, shape.top_k)


def _none(rng: np.random.Generator, shape: MoEShape, tokens: int) -> np.ndarray:
    return np.full((tokens, shape.top_k), NO_EXPERT)


def _one_expert(rng: np.random.Generator, shape: MoEShape, tokens: int) -> np.ndarray:
    """Every token names the same single expert, in a random one of its K places."""
    ids = _none(rng, shape, tokens)
    ids[np.arange(tokens), rng.integers(shape.top_k, size=tokens)] = rng.integers(shape.experts)
    return ids


def _first_experts(rng: np.random.Generator, shape: MoEShape, tokens: int) -> np.ndarray:
    """Only the first top_k experts, so that all ranks but the first (few) receive nothing."""
    return rng.permuted(np.tile(np.arange(shape.top_k), (tokens, 1)), axis=1)


def _empty_experts(rng: np.random.Generator, shape: MoEShape, tokens: int) -> np.ndarray:
    """Odd experts get no token; ids repeat where fewer than top_k even experts exist."""
    ids = _uniform(rng, shape, tokens)
    return ids - ids % 2


def _repeated(rng: np.random.Generator, shape: MoEShape, tokens: int) -> np.ndarray:
    """Ids drawn from about top_k / 2 experts per token, so that they repeat, adjacent or not."""
    pool = _uniform(rng, shape, tokens)[:, : max(1, shape.top_k // 2)]
    return np.take_along_axis(pool, rng.integers(pool.shape[1], size=(tokens, shape.top_k)), axis=1)


def _masked(rng: np.random.Generator, shape: MoEShape, tokens: int) -> np.ndarray:
    """A third of the entries is -1, and a tenth of the tokens has no expert at all."""
    ids = _uniform(rng, shape, tokens)
    ids[rng.random(ids.shape) < 1 / 3] = NO_EXPERT
    ids[rng.random(tokens) < 1 / 10] = NO_EXPERT
    return ids


def _out_of_range(rng: np.random.Generator, shape: MoEShape, tokens: int) -> np.ndarray:
    """A third of the entries names an expert that does not exist."""
    ids = _uniform(rng, shape, tokens)
    invalid = np.array([shape.experts, np.iinfo(np.int32).max, np.iinfo(np.int32).min, -2])
    chosen = rng.random(ids.shape) < 1 / 3
    ids[chosen] = rng.choice(invalid, size=chosen.sum())
    return ids


def _tile_boundary(rng: np.random.Generator, shape: MoEShape, tokens: int, tile: int) -> np.ndarray:
    """Experts get tile - 1, tile and tile + 1 tokens in turn, as far as the tokens reach; the rest is -1."""
    ids = _none(rng, shape, tokens)
    used = np.zeros(tokens, dtype=np.int64)
    for expert in rng.permutation(shape.experts):
        count = min(tile + (int(expert) % 3) - 1, tokens)
        # The tokens with most free places first, so that places run out for all of them together.
        chosen = np.lexsort((rng.random(tokens), used))[:count]
        if count == 0 or used[chosen].max() >= shape.top_k:
            continue
        ids[chosen, used[chosen]] = expert
        used[chosen] += 1
    return ids


_PLAIN_KINDS = {
    "uniform": _uniform,
    "one-expert": _one_expert,
    "none": _none,
    "first-experts": _first_experts,
    "empty-experts": _empty_experts,
    "repeated": _repeated,
    "masked": _masked,
    "out-of-range": _out_of_range,
}

ROUTING_KINDS = (*_PLAIN_KINDS, "zipf:S", "tile-boundary:N", "FILE.npy")
"""What ``make_routing`` takes; those after ``none`` are adversarial, for tests."""
