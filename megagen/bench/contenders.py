"""What is measured against each other: one class per implementation, each timed through its ``calls``."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Protocol

import torch

from megagen.bench.cases import Inputs
from megagen.bench.processes import Ranks
from megagen.bench.timing import Call
from megagen.errors import InputError
from megagen.planning import KernelPlan
from megagen.runtime.layer import MegaMoE
from megagen.shape import MoEShape
from megagen.weights import ExpertWeights

MEGAGEN, PYTORCH, DEEP_GEMM = "megagen", "pytorch", "sgl-deep-gemm"
KERNEL, END_TO_END = "kernel", "end_to_end"


class Contender(Protocol):
    """One implementation of a layer, on this rank, with its experts."""

    def calls(self, inputs: Inputs) -> list[Call]:
        """What to time for these inputs."""

    def check(self) -> None:
        """Raise what went wrong in the calls so far."""

    def recover(self) -> None:
        """Make it usable again after an error. Collective."""

    def memory_bytes(self) -> int | None:
        """Device memory held besides weights, if it says so."""


class Megagen:
    """This package's layer, with its defaults."""

    def __init__(self, ranks: Ranks, shape: MoEShape, weights: ExpertWeights, max_tokens: int) -> None:
        self.layer = MegaMoE(shape, group=ranks.group, max_tokens=max_tokens)
        self.layer.load_weights(*weights)
        self.layer.prepare()

    def plan(self, tokens: int) -> KernelPlan:
        """What a call with so many tokens runs."""
        return self.layer.launcher_for(tokens).plan

    def calls(self, inputs: Inputs) -> list[Call]:
        return [kernel_call(self.layer, inputs), end_to_end_call(self.layer, inputs)]

    def check(self) -> None:
        self.layer.check()

    def recover(self) -> None:
        self.layer.reset()

    def memory_bytes(self) -> int:
        sizes = self.layer.memory_bytes()
        return sizes["total"] - sizes["weights"]


def kernel_call(layer: MegaMoE, inputs: Inputs) -> Call:
    """A layer's call with its inputs already in place: one launch."""
    place = layer.inputs(len(inputs.x))
    output = torch.empty_like(inputs.x)

    def prepare() -> None:
        for view, values in zip(place, inputs[1:], strict=True):
            view.copy_(values)
        poison(output)

    def run() -> None:
        layer((place.x, place.x_sf), place.topk_ids, place.topk_weights, out=output)

    return Call(KERNEL, prepare, run, output)


def end_to_end_call(layer: MegaMoE, inputs: Inputs) -> Call:
    """A layer's call with bfloat16 input: quantization, then the layer."""
    place = layer.inputs(len(inputs.x))
    output = torch.empty_like(inputs.x)

    def prepare() -> None:
        clear(place.x)
        poison(output)

    def run() -> None:
        layer(inputs.x, inputs.topk_ids, inputs.topk_weights, out=output)

    return Call(END_TO_END, prepare, run, output)


def poison(output: torch.Tensor) -> None:
    """Fill an output with NaN, so that what a call does not write shows."""
    output.fill_(torch.nan)


def clear(inputs: torch.Tensor) -> None:
    """Zero an input buffer, so that a call that does not fill it gives a wrong result."""
    inputs.view(torch.uint8).zero_()


def available_contenders() -> dict[str, Callable[..., Contender]]:
    """What can be measured here, by name; each is made of (ranks, shape, this rank's experts, max_tokens)."""
    from megagen.bench.baseline import PyTorch
    from megagen.bench.deep_gemm import DeepGemm

    found: dict[str, Callable[..., Contender]] = {MEGAGEN: Megagen}
    if is_installed(DEEP_GEMM):
        found[DEEP_GEMM] = DeepGemm
    found[PYTORCH] = PyTorch
    return found


def choose_contenders(names: str | None) -> tuple[str, ...]:
    """Comma-separated names, by default all that are available.

    Raises:
        InputError: a name that is unknown or not installed.
    """
    available = available_contenders()
    chosen = tuple(available) if names is None else tuple(name.strip() for name in names.split(","))
    for name in chosen:
        if name not in available:
            raise InputError(
                f"contenders={names!r}: {name!r} is not here; choose among {', '.join(available)}"
            )
    return chosen


def is_installed(distribution: str) -> bool:
    """Whether a Python distribution of this name is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
