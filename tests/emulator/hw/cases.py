"""What a hardware case is: one kernel, its arguments, and how closely the emulator must agree with it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

EXACT = "exact"  # the ISA defines every bit
MODEL = "model"  # bit for bit by a model that was fitted to measurements (tensor-core accumulation)
APPROXIMATE = "approximate"  # within the ISA's error bound

OUTPUT = "output"  # the record keeps the output
DIGEST = "digest"  # a CRC-32 per row of the output's last axis
STATUS = "status"  # whether the launch faults


@dataclass(frozen=True)
class TensorMapSpec:
    """Fields of a tiled tensor map, in the numbers of the CUDA driver API. ``argument`` names the argument
    whose buffer it describes. Sizes in elements, ``strides`` in bytes for dimensions 1 and up."""

    argument: int
    type: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    interleave: int = 0
    fill: int = 0


@dataclass(frozen=True)
class Output:
    """A buffer that the kernel writes; starts with ``initial``, or zeros."""

    shape: tuple[int, ...]
    dtype: type = np.uint32
    initial: np.ndarray | None = None


Argument = np.ndarray | Output | TensorMapSpec | np.int32 | np.uint32 | np.uint64 | np.float32


@dataclass(frozen=True)
class Case:
    """One kernel launch. ``arguments`` builds the kernel's parameters in order: arrays are copied to the GPU
    and passed as pointers. ``keep``: what the record holds. ``detail``: what a replay by the libraries has to
    know."""

    name: str
    source: str
    entry: str
    arguments: Callable[[], list[Argument]]
    grid: int = 1
    block: int = 128
    shared_bytes: int = 0
    agreement: str = EXACT
    keep: str = OUTPUT
    detail: dict = field(default_factory=dict)
