"""Named numbers of a generated source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """One named number of the source; `comment` gives its unit or meaning."""

    name: str
    value: int | str
    comment: str = ""
    ctype: str = "u32"


@dataclass(frozen=True)
class ConstantGroup:
    title: str
    constants: tuple[Constant, ...]
