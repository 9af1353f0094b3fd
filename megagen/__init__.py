"""megagen writes mega-kernels: one persistent CUDA kernel per mixture-of-experts layer shape."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megagen.errors import (
    CacheError,
    CompileError,
    ContractMismatch,
    DataRace,
    Deadlock,
    DeviceError,
    EmulatorError,
    InputError,
    MegagenError,
    MegaMoETimeout,
    MemoryFault,
    NVLinkDomainError,
    PeerAborted,
    PlanError,
    ProxyViolation,
    ShapeError,
    StepLimit,
    Trap,
    UninitializedUse,
    UnsupportedInstruction,
)
from megagen.shape import MoEShape

if TYPE_CHECKING:
    from megagen.runtime.layer import MegaMoE
    from megagen.runtime.symmetric import SymmBuffer

__version__ = "0.1.0"

_NEED_TORCH = {"MegaMoE": "megagen.runtime.layer", "SymmBuffer": "megagen.runtime.symmetric"}

__all__ = [
    "CacheError",
    "CompileError",
    "ContractMismatch",
    "DataRace",
    "Deadlock",
    "DeviceError",
    "EmulatorError",
    "InputError",
    "MegaMoE",
    "MegaMoETimeout",
    "MegagenError",
    "MemoryFault",
    "MoEShape",
    "NVLinkDomainError",
    "PeerAborted",
    "PlanError",
    "ProxyViolation",
    "ShapeError",
    "StepLimit",
    "SymmBuffer",
    "Trap",
    "UninitializedUse",
    "UnsupportedInstruction",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used: planning, rendering and compiling do without."""
    if name in _NEED_TORCH:
        return getattr(import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
