"""Puts the emulator's messages into the layer's words: roles, barriers and buffer regions by name.

The machine knows warps, addresses and PTX lines; the plan and the contract know what those are, and the PTX's
line information knows which function was inlined into which.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from megagen.contract import DTYPE_BYTES, Layout, Region
from megagen.planning import KernelPlan

SHARED_BASE = 1024
"""Shared address at which dynamic shared memory starts: the hardware keeps the first KiB."""

_RANK = re.compile(r"rank (\d+) SM \d+")
_SPEAKER = re.compile(r"(?=\brank \d+ SM \d)")
_WARP = re.compile(r"(\bwarp )(\d+)\b(?! of)")
_MBARRIER = re.compile(r"mbarrier at shared address 0x([0-9a-f]+)")
_BUFFER = re.compile(r"(buffer \d+ of rank \d+) \([^)]*\) \+ (\d+)")
_PTX_LINE = re.compile(r"PTX line (\d+)(?: `[^`]*` \(\S+?:(\d+): )?")
_LOC = re.compile(
    r"^\s*\.loc\s+\d+ (\d+) (\d+)(?:, function_name (\S+?)(?: ?\+ ?\d+)?, inlined_at \d+ (\d+) (\d+))?"
)
_INFO_STRING = re.compile(r"^(\$L__info_string\d+):\n((?:\.b8 [\d,]+\n)+)", re.MULTILINE)


class Words(NamedTuple):
    """What a message of one launch may speak of.

    Attributes:
        kernels: each rank's plan, source and PTX.
        buffers: named memory, by how the machine calls it ("buffer 0 of rank 0").
    """

    kernels: tuple[tuple[KernelPlan, str, str], ...]
    buffers: Mapping[str, tuple[str, Layout]]


def explain(message: str, words: Words) -> str:
    """The message with names instead of numbers."""
    return "".join(_explain_part(part, words) for part in _SPEAKER.split(message))


def _explain_part(part: str, words: Words) -> str:
    """From the place where a message names an SM to the next such place."""
    part = _BUFFER.sub(lambda m: _buffer_name(m[1], int(m[2]), words.buffers), part)
    rank = _RANK.match(part)
    if rank is None or int(rank[1]) >= len(words.kernels):
        return part
    plan, source, ptx = words.kernels[int(rank[1])]
    part = _WARP.sub(lambda m: f"{m[0]} ({_role(plan, int(m[2]))})", part)
    part = _MBARRIER.sub(lambda m: f"mbarrier {_shared_name(plan, int(m[1], 16))}", part)
    return _places(part, source.splitlines(), ptx)


def _role(plan: KernelPlan, warp: int) -> str:
    for role in plan.roles:
        if role.first_warp <= warp < role.first_warp + role.warps:
            return role.name
    return "no role"


def _shared_name(plan: KernelPlan, address: int) -> str:
    return _element(plan.smem, address - SHARED_BASE) or f"at shared address {address:#x}"


def _buffer_name(name: str, offset: int, buffers: Mapping[str, tuple[str, Layout]]) -> str:
    if name not in buffers:
        return f"{name} + {offset}"
    called, layout = buffers[name]
    return f"{_element(layout, offset) or f'byte {offset}'} of {called}"


def _element(layout: Layout, offset: int) -> str | None:
    """``name[i][j]`` of the element at a byte offset; None between regions."""
    for region in layout.regions:
        if region.offset <= offset < region.end:
            return region.name + "".join(f"[{index}]" for index in _indices(region, offset - region.offset))
    return None


def _indices(region: Region, offset: int) -> list[int]:
    rest = offset // DTYPE_BYTES[region.dtype]
    indices = []
    for extent in reversed(region.shape):
        rest, index = divmod(rest, extent)
        indices.append(index)
    return indices[::-1]


def _places(line: str, source: list[str], ptx: str) -> str:
    """Each quoted PTX line becomes the calls that led there, and a line of the outermost one."""
    text, rest = "", line
    while found := _PTX_LINE.search(rest):
        quoted = f"{source[int(found[2]) - 1].strip()})" if found[2] else ""
        end = found.end() + len(quoted) if rest.startswith(quoted, found.end()) else found.end()
        text += rest[: found.start()] + (_place(int(found[1]), source, ptx) or rest[found.start() : end])
        rest = rest[end:]
    return text + rest


def _place(number: int, source: list[str], ptx: str) -> str:
    """Where a PTX line comes from, the innermost function first; empty if it has no line information."""
    chain = _call_chain(ptx, number)
    if not chain:
        return ""
    steps = " < ".join(f"{name} line {line}" for name, line in chain)
    own = next((line for _, line in chain if "asm" not in _near(source, line)), chain[0][1])
    return f"{steps}: `{source[own - 1].strip()}`"


def _near(lines: list[str], line: int) -> str:
    """The text around a line of a primitive, which is a few lines of ``asm``."""
    return "\n".join(lines[max(0, line - 9) : line])


class _Locations(NamedTuple):
    """The .loc directives of a PTX text: the PTX line of each, its fields, and the functions' names."""

    at: list[int]
    fields: list[tuple[str | None, ...]]
    names: dict[str, str]


@lru_cache(maxsize=8)
def _locations(ptx: str) -> _Locations:
    at, fields = [], []
    for number, text in enumerate(ptx.splitlines(), 1):
        if found := _LOC.match(text):
            at.append(number)
            fields.append(found.groups())
    names = {}
    for label, data in _INFO_STRING.findall(ptx):
        mangled = bytes(int(byte) for byte in re.findall(r"\d+(?=[,\n])", data.replace(".b8 ", ""))).decode()
        names[label] = _unmangled(mangled.rstrip("\0"))
    return _Locations(at, fields, names)


def _unmangled(name: str) -> str:
    """A function's name without its scope and its types, from the Itanium mangling."""
    rest, last = name.removeprefix("_Z").removeprefix("N").lstrip("K"), name
    while found := re.match(r"(\d+)", rest):
        last = rest[found.end() : found.end() + int(found[1])]
        rest = rest[found.end() + int(found[1]) :]
        if not name.startswith("_ZN"):
            break
        rest = re.sub(r"^I(?:L\w\d+E)+E", "", rest)  # template arguments that are numbers
    return last


def _call_chain(ptx: str, number: int) -> list[tuple[str, int]]:
    """(function, source line) of a PTX line, the innermost first, then whom it was inlined into."""
    at, fields, names = _locations(ptx)
    place = bisect.bisect_right(at, number) - 1
    chain = []
    while place >= 0:
        line, _, label, outer_line, outer_column = fields[place]
        assert line is not None
        chain.append((names.get(label, label) if label else "kernel", int(line)))
        if label is None:
            break
        outer = (outer_line, outer_column)
        place = next((i for i in range(place - 1, -1, -1) if fields[i][:2] == outer), -1)
    return chain
