"""Whether outputs are right, and by how much they are not."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch

from megagen.bench.cases import Inputs
from megagen.bench.contenders import DEEP_GEMM, MEGAGEN, PYTORCH
from megagen.formats import Format
from megagen.reference import Accumulation, Activation, accumulation_for_check, moe_forward, relative_error
from megagen.weights import ExpertWeights


class Errors(NamedTuple):
    """Relative Frobenius errors of one output.

    Attributes:
        whole, worst_row: against the reference that quantizes where the kernel does.
        float32: of the whole output, against float32 arithmetic on the dequantized input and weights.
    """

    whole: float
    worst_row: float
    float32: float

    def within(self, limits: Errors) -> bool:
        return all(error <= limit for error, limit in zip(self, limits, strict=True))


LIMITS = {
    MEGAGEN: Errors(whole=6e-3, worst_row=3e-2, float32=4e-2),
    # It scales the intermediate by powers of two per 64 columns, so only float32 arithmetic is common ground.
    DEEP_GEMM: Errors(whole=float("inf"), worst_row=float("inf"), float32=4e-2),
    # One scale per row, for weights too: coarser everywhere.
    PYTORCH: Errors(whole=float("inf"), worst_row=float("inf"), float32=1e-1),
}


class Accuracy:
    """Both references for one rank's inputs."""

    def __init__(
        self,
        inputs: Inputs,
        weights: ExpertWeights,
        activation: str = "fast",
        clamp: float | None = None,
        format: Format = "fp8_block",
    ) -> None:
        def reference(quantize_intermediate: bool, accumulation: Accumulation = "exact") -> torch.Tensor:
            return moe_forward(
                (inputs.x_q, inputs.x_sf),
                inputs.topk_ids,
                inputs.topk_weights,
                weights,
                format=format,
                activation=cast(Activation, activation),
                clamp=clamp,
                quantize_intermediate=quantize_intermediate,
                accumulation=accumulation,
            )

        fp8 = format == "fp8_block"
        self._expected = reference(True, accumulation_for_check(inputs.topk_ids, weights) if fp8 else "exact")
        self._float32 = reference(False)

    def errors(self, output: torch.Tensor) -> Errors:
        """Errors of a bfloat16 [T, H]."""
        whole, worst_row = relative_error(output, self._expected)
        return Errors(whole, worst_row, relative_error(output.float(), self._float32).whole)


def worst(errors: list[Errors]) -> Errors:
    """The largest of each error over the ranks."""
    return Errors(*(max(values) for values in zip(*errors, strict=True)))
