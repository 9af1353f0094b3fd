"""MoEShape: the problem. One mixture-of-experts layer, without any choice of how to compute it.

Also the presets of well-known models and a reader of Hugging Face ``config.json`` files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from megagen.errors import ShapeError

SIZE_MULTIPLE = 128
"""Hidden and intermediate sizes are multiples of this: a block scale covers 128 of K."""

MAX_TOP_K = 32
"""One warp lane per chosen expert."""


@dataclass(frozen=True, slots=True)
class MoEShape:
    """One MoE layer: per expert, W13 is [2 * intermediate, hidden] (gate rows, then up rows), W2 is
    [hidden, intermediate].

    Args:
        hidden: width of a token, a positive multiple of 128.
        intermediate: width of an expert after SwiGLU, a positive multiple of 128.
        experts: routed experts of all ranks together.
        top_k: experts chosen per token, 1 to 32, at most ``experts``.

    Raises:
        ShapeError: a value that no kernel can be made for.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        for field in fields(self):
            _require_positive_int(field.name, getattr(self, field.name))
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if value % SIZE_MULTIPLE:
                padded = (value // SIZE_MULTIPLE + 1) * SIZE_MULTIPLE
                raise ShapeError(
                    f"{name}={value} is not a multiple of {SIZE_MULTIPLE}, the reach of one block scale; "
                    f"pad the weights with zeros to {name}={padded}"
                )
        if self.top_k > MAX_TOP_K:
            raise ShapeError(
                f"top_k={self.top_k} exceeds {MAX_TOP_K}, the lanes of a warp; choose fewer experts"
            )
        if self.top_k > self.experts:
            raise ShapeError(
                f"top_k={self.top_k} exceeds experts={self.experts}; lower top_k to at most {self.experts}"
            )

    def experts_per_rank(self, ranks: int) -> int:
        """Local experts of each of ``ranks`` ranks; rank r owns experts [r * local, (r + 1) * local).

        Raises:
            ShapeError: the experts can't be dealt out evenly.
        """
        _require_positive_int("ranks", ranks)
        if self.experts % ranks:
            raise ShapeError(
                f"experts={self.experts} is not divisible by ranks={ranks}; "
                f"use a number of ranks that divides {self.experts}, or add experts that no token chooses"
            )
        return self.experts // ranks

    @classmethod
    def preset(cls, name: str, ranks: int = 1) -> Self:
        """The shape of a model in ``PRESETS``; ``ranks`` scales those that fix the experts per rank.

        Raises:
            ShapeError: an unknown name, or a model whose sizes are not supported (gpt-oss-120b).
        """
        try:
            preset = PRESETS[name]
        except KeyError:
            raise ShapeError(
                f"model={name!r} is no preset; choose one of {', '.join(PRESETS)}, or give a config.json"
            ) from None
        _require_positive_int("ranks", ranks)
        experts = preset.experts * (ranks if preset.per_rank else 1)
        return cls(preset.hidden, preset.intermediate, experts, preset.top_k)

    @classmethod
    def from_config(cls, config: str | Path | Mapping[str, Any]) -> Self:
        """Read the MoE shape of a Hugging Face ``config.json``: its path, its folder, or its contents.

        The model type selects the field names (``FAMILIES``); ``text_config`` is followed.

        Raises:
            ShapeError: an unreadable file, an unknown family, or a field that is missing.
        """
        contents, origin = _read_config(config)
        text_config, family = _find_family(contents, origin)
        values = {}
        for field, names in family.items():
            found = next((text_config[name] for name in names if text_config.get(name) is not None), None)
            if found is None:
                raise ShapeError(
                    f"{origin}: no {field} for model_type={text_config['model_type']!r}; "
                    f"looked for {' or '.join(names)}; add it, or give the shape by its numbers"
                )
            values[field] = found
        activation = text_config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ShapeError(f"{origin}: hidden_act={activation!r} is not supported; only silu (SwiGLU) is")
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a published model; with ``per_rank``, ``experts`` counts one rank's share of the model's."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    per_rank: bool = False


PRESETS: dict[str, Preset] = {
    "deepseek-v3": Preset(7168, 2048, 256, 8),
    "deepseek-v4-flash": Preset(4096, 2048, 256, 6),
    "deepseek-v4-pro": Preset(7168, 3072, 384, 6),
    "qwen3-30b-a3b": Preset(2048, 768, 128, 8),
    "qwen3-235b-a22b": Preset(4096, 1536, 128, 8),
    "glm-4.5-air": Preset(4096, 1408, 128, 8),
    "kimi-k2": Preset(7168, 2048, 384, 8),
    "mixtral-8x7b": Preset(4096, 14336, 8, 2),
    "gpt-oss-120b": Preset(2880, 2880, 128, 4),
    # What each rank of an 8-GPU deployment of deepseek-v4-flash and -pro holds, at any number of ranks.
    "flash8": Preset(4096, 2048, 32, 6, per_rank=True),
    "pro8": Preset(7168, 3072, 48, 6, per_rank=True),
    # Small enough for tests and for the emulator.
    "tiny": Preset(512, 512, 8, 2),
    "micro": Preset(128, 128, 4, 2),
}

_COMMON = {"hidden": ("hidden_size",), "top_k": ("num_experts_per_tok", "experts_per_token")}
_DEEPSEEK = _COMMON | {"intermediate": ("moe_intermediate_size",), "experts": ("n_routed_experts",)}
_QWEN = _COMMON | {"intermediate": ("moe_intermediate_size",), "experts": ("num_experts",)}
_MIXTRAL = _COMMON | {"intermediate": ("intermediate_size",), "experts": ("num_local_experts",)}

FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4v_moe_text": _DEEPSEEK,
    "qwen3_moe": _QWEN,
    "qwen3_vl_moe_text": _QWEN,
    "mixtral": _MIXTRAL,
    "gpt_oss": _MIXTRAL,
}
"""``model_type`` of a config.json -> for each field of MoEShape the names it may have there."""


def _require_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ShapeError(f"{name}={value!r} is of type {type(value).__name__}; give an int")
    if value < 1:
        raise ShapeError(f"{name}={value} is below 1; give a positive number")


def _read_config(config: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The contents of a config, and how error messages call it."""
    if isinstance(config, Mapping):
        return config, "config"
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ShapeError(
            f"config={str(path)!r} can't be read: {error}; give a model's config.json"
        ) from error
    if not isinstance(contents, dict):
        raise ShapeError(
            f"config={str(path)!r} holds a JSON {type(contents).__name__}; give a model's config.json"
        )
    return contents, str(path)


def _find_family(
    contents: Mapping[str, Any], origin: str
) -> tuple[Mapping[str, Any], dict[str, tuple[str, ...]]]:
    """The (nested) text config of a known family, and that family's field names."""
    seen: list[object] = []
    nested: object = contents
    while isinstance(nested, Mapping):
        model_type = nested.get("model_type")
        seen.append(model_type)
        if isinstance(model_type, str) and model_type in FAMILIES:
            return nested, FAMILIES[model_type]
        nested = nested.get("text_config")
    raise ShapeError(
        f"{origin}: model_type={' > '.join(map(repr, seen))} is of no known family; looked for model_type in "
        f"{', '.join(FAMILIES)}, at the top and under text_config; give the shape by its numbers instead "
        f"(hidden, intermediate, experts, top_k)"
    )
