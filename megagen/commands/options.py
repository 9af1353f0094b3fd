"""The options that describe a layer, shared by all commands that take one."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from megagen.arch import ARCHS
from megagen.build import plan_layer
from megagen.contract import FORMATS, Contract
from megagen.errors import InputError
from megagen.planning import KernelPlan, PlanSet
from megagen.planning.planner import default_format
from megagen.routing import parse_tokens
from megagen.shape import PRESETS, MoEShape

_SHAPE_PANEL = "Layer"
_PLAN_PANEL = "Plan"


@dataclass(frozen=True)
class LayerOptions:
    """One layer as the command line describes it. The annotations are the options' definitions."""

    model: Annotated[
        str | None,
        typer.Option(
            help=f"A preset ({', '.join(PRESETS)}) or a Hugging Face config.json.",
            rich_help_panel=_SHAPE_PANEL,
        ),
    ] = None
    hidden: Annotated[int | None, typer.Option(help="Width of a token.", rich_help_panel=_SHAPE_PANEL)] = None
    intermediate: Annotated[
        int | None, typer.Option(help="Width of an expert.", rich_help_panel=_SHAPE_PANEL)
    ] = None
    experts: Annotated[
        int | None, typer.Option(help="Experts of all ranks together.", rich_help_panel=_SHAPE_PANEL)
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Experts per token.", rich_help_panel=_SHAPE_PANEL)] = None
    ranks: Annotated[
        int, typer.Option(help="GPUs of the expert-parallel group.", rich_help_panel=_SHAPE_PANEL)
    ] = 1
    max_tokens: Annotated[int, typer.Option(help="Capacity per rank.", rich_help_panel=_SHAPE_PANEL)] = 4096
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens per rank: 64, or 3,0,7 (one count per rank), or 1:8192 (doubling).",
            rich_help_panel=_SHAPE_PANEL,
        ),
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            help=f"One of {', '.join(FORMATS)}. Default: the architecture's.", rich_help_panel=_SHAPE_PANEL
        ),
    ] = None
    arch: Annotated[str, typer.Option(help=f"One of {', '.join(ARCHS)}.", rich_help_panel=_PLAN_PANEL)] = (
        "sm90"
    )
    sms: Annotated[
        int | None, typer.Option(help="SMs to plan for, per rank.", rich_help_panel=_PLAN_PANEL)
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Use the plan of this .plan.json; it describes the layer too.", rich_help_panel=_PLAN_PANEL
        ),
    ] = None

    def shape(self) -> MoEShape:
        """The shape that the options name.

        Raises:
            InputError: neither a model nor all four sizes, or both.
            ShapeError: a shape that no kernel can be made for.
        """
        sizes = {name: getattr(self, name) for name in ("hidden", "intermediate", "experts", "top_k")}
        given = [name for name, size in sizes.items() if size is not None]
        if self.model is None:
            if missing := [name for name in sizes if name not in given]:
                options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
                raise InputError(f"no shape: give --model (a preset or a config.json), or also {options}")
            return MoEShape(**sizes)
        if given:
            raise InputError(f"--model={self.model} already sets {', '.join(given)}; give one or the other")
        if self.model in PRESETS:
            return MoEShape.preset(self.model, self.ranks)
        if self.model.endswith(".json") or Path(self.model).exists():
            return MoEShape.from_config(self.model)
        return MoEShape.preset(self.model)  # raises, and lists what there is

    def contract(self) -> Contract:
        """The contract of the layer; errors as for ``shape`` and ``Contract``."""
        if self.plan is not None:
            return self.forced_plan().contract
        return Contract(self.shape(), self.ranks, self.max_tokens, self.format or default_format(self.arch))

    def forced_plan(self) -> KernelPlan:
        """The plan of ``--plan``.

        Raises:
            InputError: the file can't be read.
            PlanError: it holds no plan, or one that breaks a limit.
        """
        assert self.plan is not None
        if self.model is not None:
            raise InputError(
                f"--plan={self.plan} already describes the layer; leave --model={self.model} out"
            )
        try:
            return KernelPlan.from_json(self.plan.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(
                f"--plan={self.plan} can't be read: {error}; `megagen generate` writes plans"
            ) from error

    def token_counts(self) -> list[int] | None:
        """The token counts of a rank that ``--tokens`` names, in ascending order; None without it.

        Raises:
            InputError: not a form that ``--tokens`` takes.
        """
        if self.tokens is None:
            return None
        return sorted({count for case in parse_tokens(self.tokens, self.ranks) for count in case})

    def plans(self) -> PlanSet:
        """The plan of ``--plan``, or plans for the counts of ``--tokens``, or for every token bucket."""
        if self.plan is not None:
            plan = self.forced_plan()
            return PlanSet((plan.contract.max_tokens,), (plan,))
        return plan_layer(self.contract(), self.arch, tokens=self.token_counts(), sms=self.sms)


def takes_layer(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command whose first parameter is a ``LayerOptions`` one command-line option per field of it."""
    fields = dataclasses.fields(LayerOptions)
    own = list(inspect.signature(command).parameters.values())[1:]
    layer = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type)
        for f in fields
    ]

    @functools.wraps(command)
    def with_options(**values: Any) -> Any:
        options = LayerOptions(**{field.name: values.pop(field.name) for field in fields})
        return command(options, **values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + layer
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options
