"""Resources of a cubin, read from its ELF sections.

The format of ``.nv.info`` is not published. The attributes read here are some that CUDA's binary tools print
by name (``EIATTR_REGCOUNT``, ``EIATTR_MIN_STACK_SIZE``, ``EIATTR_MAX_THREADS``); tests compare them with what
ptxas logs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from megagen.errors import InputError

_REGCOUNT = 0x2F
_MIN_STACK_SIZE = 0x12
_MAX_THREADS = 0x05
_SIZED_VALUE = 0x04  # attribute format: the 16-bit field is the size of the value that follows
_SHT_NOBITS = 8

SYSTEM_SHARED_BYTES = 1024
"""Shared memory per CTA that CUDA reserves from sm_90 on; a cubin counts it, ptxas's log does not."""


@dataclass(frozen=True)
class CubinResources:
    """Per-thread and per-CTA needs of the one kernel in a cubin.

    Attributes:
        entry: name of the ``__global__`` function.
        registers: per thread at entry.
        stack: bytes per thread; 0 means that nothing is spilled.
        static_shared: bytes per CTA, without dynamic shared memory and without what CUDA reserves.
        max_threads: threads of a CTA that ``__launch_bounds__`` allows, None without it.
        code_bytes: size of the machine code.
    """

    entry: str
    registers: int
    stack: int
    static_shared: int
    max_threads: int | None
    code_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    size: int
    data: bytes


def read_cubin(cubin: bytes) -> CubinResources:
    """Read a cubin that holds exactly one kernel.

    Raises:
        InputError: not a cubin, or not exactly one kernel in it.
    """
    try:
        sections = {section.name: section for section in _sections(cubin)}
        attributes = dict(_attributes(sections[".nv.info"].data))
    except (KeyError, IndexError, ValueError, struct.error) as error:
        raise InputError(
            f"not a cubin ({error}); give a file that `megagen generate --compile` wrote"
        ) from error
    entries = [name.removeprefix(".nv.info.") for name in sections if name.startswith(".nv.info.")]
    if len(entries) != 1:
        raise InputError(
            f"the cubin holds {len(entries)} kernels ({', '.join(entries)}); exactly one is supported"
        )
    (entry,) = entries
    kernel_attributes = dict(_attributes(sections[f".nv.info.{entry}"].data))
    shared = sections.get(f".nv.shared.{entry}")
    threads = kernel_attributes.get(_MAX_THREADS)
    return CubinResources(
        entry=entry,
        registers=_per_symbol(attributes[_REGCOUNT]),
        stack=_per_symbol(attributes[_MIN_STACK_SIZE]),
        static_shared=max(shared.size - SYSTEM_SHARED_BYTES, 0) if shared else 0,
        max_threads=struct.unpack("<3I", threads)[0] if threads else None,
        code_bytes=sections[f".text.{entry}"].size,
    )


def _per_symbol(value: bytes) -> int:
    """The number in a (symbol index, number) pair."""
    return int(struct.unpack("<2I", value)[1])


def _sections(elf: bytes) -> Iterator[_Section]:
    """Sections of a 64-bit little-endian ELF file."""
    if elf[:4] != b"\x7fELF":
        raise ValueError("no ELF header")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<2I4Q", elf, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    for name, kind, _, _, offset, size in headers:
        start = names_at + name
        text = elf[start : elf.index(b"\0", start)].decode()
        yield _Section(text, kind, size, b"" if kind == _SHT_NOBITS else elf[offset : offset + size])


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) pairs of a ``.nv.info`` section, those with a sized value only."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED_VALUE:
            yield attribute, info[at : at + size]
            at += size
