"""TensorMap: what a tensor copy needs to know of a tensor in global memory.

The driver's 128 bytes are opaque, so there is one dataclass and two encoders: the runtime's, which asks
the driver, and the emulator's own, here.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from megagen.errors import InputError

ElementType = Literal[
    "u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz",
    "u4x16_align8", "u4x16_align16", "u6x16_align16",
]  # fmt: skip
Swizzle = Literal["none", "32B", "64B", "128B", "128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B"]
L2Promotion = Literal["none", "64B", "128B", "256B"]

ELEMENT_TYPES: tuple[str, ...] = ElementType.__args__  # type: ignore[attr-defined]
"""In the order of ``CUtensorMapDataType``."""
SWIZZLES: tuple[str, ...] = Swizzle.__args__  # type: ignore[attr-defined]
"""In the order of ``CUtensorMapSwizzle``."""
L2_PROMOTIONS: tuple[str, ...] = L2Promotion.__args__  # type: ignore[attr-defined]

TENSOR_MAP_BYTES = 128
MAX_RANK = 5
_MAGIC, _VERSION = 0x50414D54, 1


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A tiled tensor map; dimension 0 is the contiguous one.

    Attributes:
        element: type of an element, as the driver API names it.
        address: of element 0 in global memory, a multiple of 16.
        dims: elements per dimension, 1 to 5 of them.
        strides: bytes from one element to the next along dimensions 1 and up, multiples of 16.
        box: elements per dimension that one copy moves, at most 256 each.
        element_strides: step between the elements that a copy takes, 1 to 8; empty means 1 everywhere.
        swizzle: permutation of 16-byte units in shared memory.
        nan_fill: fill out-of-bounds elements with NaN instead of zeros (floating-point types only).
        l2_promotion: a hint for the driver; the emulator ignores it.
    """

    element: ElementType
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()
    swizzle: Swizzle = "none"
    nan_fill: bool = False
    l2_promotion: L2Promotion = "none"

    def __post_init__(self) -> None:
        rank = len(self.dims)
        if not 1 <= rank <= MAX_RANK:
            raise InputError(f"dims={self.dims}: a tensor map has 1 to {MAX_RANK} dimensions")
        if len(self.strides) != rank - 1:
            raise InputError(f"strides={self.strides}: {rank} dimensions need {rank - 1} strides")
        if len(self.box) != rank:
            raise InputError(f"box={self.box}: {rank} dimensions need as many box sizes")
        if self.element_strides and len(self.element_strides) != rank:
            raise InputError(f"element_strides={self.element_strides}: give {rank} or none")
        for name, value, allowed in (
            ("element", self.element, ELEMENT_TYPES),
            ("swizzle", self.swizzle, SWIZZLES),
            ("l2_promotion", self.l2_promotion, L2_PROMOTIONS),
        ):
            if value not in allowed:
                raise InputError(f"{name}={value!r} must be one of {', '.join(allowed)}")

    @property
    def rank(self) -> int:
        return len(self.dims)


def encode_for_emulator(tensor_map: TensorMap) -> bytes:
    """The 128 bytes that the emulator reads (their layout is described in csrc/tensor_map.hpp).

    Limits on sizes, strides and boxes are checked by the emulator when a copy uses the map.
    """
    steps = tensor_map.element_strides or (1,) * tensor_map.rank

    def padded(values: tuple[int, ...], count: int) -> tuple[int, ...]:
        return values + (0,) * (count - len(values))

    head = struct.pack(
        "<I6B6x",
        _MAGIC,
        _VERSION,
        ELEMENT_TYPES.index(tensor_map.element),
        tensor_map.rank,
        0,  # not interleaved
        SWIZZLES.index(tensor_map.swizzle),
        tensor_map.nan_fill,
    )
    body = struct.pack(
        "<Q5Q4Q5H5B17x",
        tensor_map.address,
        *padded(tensor_map.dims, 5),
        *padded(tensor_map.strides, 4),
        *padded(tensor_map.box, 5),
        *padded(steps, 5),
    )
    return head + body
