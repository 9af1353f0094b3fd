"""The parameter struct of a kernel in host memory, written in place so that a launch creates no objects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from struct import Struct

from megagen.protocol import CTYPE_BYTES, Field, struct_offsets

_CODES = {"u32": "I", "u64": "Q", "i64": "q"}  # the struct module's


class ParamStruct:
    """The struct of ``fields``, zeroed, and what ``cuLaunchKernelEx`` wants of it.

    Attributes:
        pointers: address of an array with one pointer, that of the struct.
        u64, u32: the struct as words; ``word[name]`` is a field's place in the view of its own size.
    """

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self._fields = {field.name: field for field in fields}
        self._offsets, self.size = struct_offsets(fields)
        memory = (ctypes.c_uint64 * (self.size // 8))()
        self._bytes = memoryview(memory).cast("B")
        self.u64, self.u32 = self._bytes.cast("Q"), self._bytes.cast("I")
        self.word = {name: self._offsets[name] // CTYPE_BYTES[f.ctype] for name, f in self._fields.items()}
        self._pointer = ctypes.c_void_p(ctypes.addressof(memory))
        self.pointers = ctypes.addressof(self._pointer)

    def set(self, name: str, value: int | list[int] | bytes) -> None:
        """Write a field: an integer, as many of them as an array has, or the bytes of a tensor map."""
        field, offset = self._fields[name], self._offsets[name]
        if isinstance(value, bytes):
            if len(value) != field.size:
                raise ValueError(f"{name} takes {field.size} bytes, not {len(value)}")
            self._bytes[offset : offset + field.size] = value
            return
        numbers = value if isinstance(value, list) else [value]
        if len(numbers) != field.count:
            raise ValueError(f"{name} takes {field.count} numbers, not {len(numbers)}")
        width = CTYPE_BYTES[field.ctype]
        packed = b"".join(n.to_bytes(width, "little", signed=field.ctype == "i64") for n in numbers)
        self._bytes[offset : offset + field.size] = packed

    def writer(self) -> Callable[..., None]:
        """A function that takes the values of all fields, numbers, in their order and writes them at once."""
        codes = "".join(f"{field.count}{_CODES[field.ctype]}" for field in self._fields.values())
        return partial(Struct(codes).pack_into, self._bytes, 0)

    def to_bytes(self) -> bytes:
        """The struct as the kernel will see it."""
        return bytes(self._bytes)
