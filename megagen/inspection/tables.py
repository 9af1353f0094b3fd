"""Resources, instruction mixes and records as rich tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from megagen.inspection.sass import InstructionMix

_NUMBERS = ("offset", "bytes", "instructions", "column", "columns", "us", "in all")


def resources_table(title: str, resources: Mapping[str, Any]) -> Table:
    """Name and value of each resource."""
    table = titled_table(title, "resource", "value")
    for name, value in resources.items():
        table.add_row(
            name.replace("_", " "), " ".join(value) if isinstance(value, tuple | list) else str(value)
        )
    return table


def instruction_mix_table(mix: InstructionMix, most_frequent: int = 12) -> Table:
    """Categories, then the most frequent opcodes, then the source lines that spill."""
    table = titled_table(f"{mix.total:,} instructions", "kind", "instructions")
    for category, count in mix.by_category().items():
        table.add_row(category, f"{count:,}")
    table.add_section()
    for opcode, count in list(mix.opcodes.items())[:most_frequent]:
        table.add_row(opcode, f"{count:,}")
    if mix.spill_lines:
        table.add_section()
        for line, count in mix.spill_lines.items():
            table.add_row(f"local memory from line {line}", f"{count:,}")
    return table


def rows_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    """A table of equal records, one column per key."""
    table = Table(title=title, title_justify="left")
    for number, row in enumerate(rows):
        if number == 0:
            for column, name in enumerate(row):
                table.add_column(name.replace("_", " "), no_wrap=column == 0, overflow="fold")
        table.add_row(*(str(value) for value in row.values()))
    return table


def titled_table(title: str, *columns: str) -> Table:
    """An empty table; columns of numbers are right-aligned."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left")
    return table
