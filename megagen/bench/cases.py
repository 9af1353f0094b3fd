"""What is measured: layer shapes, token counts and inputs; and the ratios that are aimed at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megagen.errors import InputError
from megagen.formats import Format, quantize_activation
from megagen.routing import Routing, make_routing, parse_tokens
from megagen.shape import MoEShape

MODEL_ALIASES = {"flash": "deepseek-v4-flash", "pro": "deepseek-v4-pro"}
PADDED_ROWS = 64  # rows that the floor pads each expert's tokens to: the M of WGMMA

# Aimed-at time relative to sgl-deep-gemm 0.1.4.post1, by model and tokens per rank: of several ranks, of one.
_FLASH8 = {8: 0.82, 64: 0.82, 256: 0.80, 1024: 0.68, 4096: 0.69, 8192: 0.70}
_PRO8 = {64: 0.95, 1024: 0.74, 4096: 0.76, 8192: 0.76}
TARGETS_MANY_RANKS = {"flash8": _FLASH8, "pro8": _PRO8, "flash": {64: 0.95, 1024: 0.86, 4096: 0.68}}
TARGETS_ONE_RANK = {
    "flash8": _FLASH8,
    "pro8": _PRO8,
    "flash": {64: 0.97, 1024: 0.85, 4096: 0.75, 8192: 0.66},
}


@dataclass(frozen=True)
class Case:
    """One row of the table: a layer, and the tokens that each rank has."""

    model: str
    shape: MoEShape
    tokens: int
    routing: str = "uniform"

    def __str__(self) -> str:
        routing = "" if self.routing == "uniform" else f", routing {self.routing}"
        return f"{self.model}, {self.tokens} tokens{routing}"

    def target(self, ranks: int) -> float | None:
        """The ratio to the peer that is aimed at; None where it is only not to be slower."""
        targets = TARGETS_ONE_RANK if ranks == 1 else TARGETS_MANY_RANKS
        model = targets.get(self.model, {}) if self.routing == "uniform" else {}
        return model.get(self.tokens)


def make_cases(models: str, tokens: str, ranks: int, routing: str = "uniform") -> list[Case]:
    """Every model with every token count.

    Args:
        models: comma-separated presets, aliases of ``MODEL_ALIASES``, or config.json files.
        tokens: comma-separated counts and ranges such as ``1:8192`` (doubling), each for every rank.

    Raises:
        InputError, ShapeError: a model or a count that there is not.
    """
    counts = sorted({case[0] for part in tokens.split(",") for case in parse_tokens(part, 1)})
    if counts[0] == 0:
        raise InputError(f"tokens={tokens!r}: 0 tokens take no time; give 1 or more")
    return [
        Case(model, read_shape(model, ranks), count, routing)
        for model in (name.strip() for name in models.split(","))
        for count in counts
    ]


def read_shape(model: str, ranks: int) -> MoEShape:
    """The shape of a preset, of its alias, or of a config.json."""
    if model.endswith(".json") or Path(model).is_dir():
        return MoEShape.from_config(model)
    return MoEShape.preset(MODEL_ALIASES.get(model, model), ranks)


class Inputs(NamedTuple):
    """Arguments of a call: bfloat16 [T, H]; the same quantized, E4M3 [T, H] with scale factors [T, H/128];
    int32 [T, K]; float32 [T, K]."""

    x: torch.Tensor
    x_q: torch.Tensor
    x_sf: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


def make_inputs(
    shape: MoEShape,
    routing: Routing,
    counts: Sequence[int],
    rank: int,
    seed: int,
    device: torch.device,
    format: Format = "fp8_block",
) -> Inputs:
    """Gaussian tokens, drawn for all ranks together and then dealt out, and one rank's part of a routing."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(sum(counts), shape.hidden, generator=generator, device=device).bfloat16()
    own = routing.deal(counts)[rank]
    tokens = x.split(list(counts))[rank].clone()
    return Inputs(
        tokens,
        *quantize_activation(tokens, format),
        torch.from_numpy(own.topk_ids).to(device),
        torch.from_numpy(own.topk_weights).to(device),
    )


def route(case: Case, ranks: int, seed: int) -> Routing:
    """The routing of all ranks' tokens."""
    return make_routing(case.routing, case.shape, case.tokens * ranks, seed)


class Load(NamedTuple):
    """What one rank's experts get: how many get anything, token copies, and those padded to tiles of
    ``PADDED_ROWS`` and of the plan's rows."""

    experts: int
    rows: int
    padded_rows: int
    plan_rows: int


def rank_loads(routing: Routing, shape: MoEShape, ranks: int, block_m: int) -> list[Load]:
    """The load of each rank; an expert that a token names twice has it once."""
    token = np.broadcast_to(np.arange(len(routing.topk_ids))[:, None], routing.topk_ids.shape)
    named = (routing.topk_ids >= 0) & (routing.topk_ids < shape.experts)
    pairs = np.unique(token[named] * np.int64(shape.experts) + routing.topk_ids[named])
    counts = np.bincount(pairs % shape.experts, minlength=shape.experts)
    return [
        Load(int((own > 0).sum()), int(own.sum()), _padded(own, PADDED_ROWS), _padded(own, block_m))
        for own in np.split(counts, ranks)
    ]


def _padded(counts: np.ndarray, rows: int) -> int:
    return int((-(-counts // rows) * rows).sum())
