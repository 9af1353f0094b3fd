"""Plans, resources and instruction mixes as rich tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

from megagen.arch import Arch
from megagen.inspection.sass import InstructionMix
from megagen.planning import KernelPlan


def plan_tables(plan: KernelPlan) -> tuple[Table, ...]:
    """All of a plan: its decisions with their reasons, roles, and shared-memory map."""
    return (decisions_table(plan), roles_table(plan), shared_memory_table(plan))


def decisions_table(plan: KernelPlan) -> Table:
    table = _table(f"{plan.name}, for {plan.expected_tokens} tokens per rank", "decision", "value", "reason")
    for choice in plan.choices:
        table.add_row(choice.name, choice.value, choice.reason)
    table.add_row("pool_rows", f"{plan.pool_rows:,}", "rows of received tokens that no routing overflows")
    return table


def roles_table(plan: KernelPlan) -> Table:
    table = _table(f"roles: {plan.threads} threads", "role", "warps", "registers", "job")
    for role in plan.roles:
        last = role.first_warp + role.warps - 1
        warps = f"{role.first_warp}" if role.warps == 1 else f"{role.first_warp}-{last}"
        table.add_row(role.name, warps, str(role.registers), role.job)
    return table


def shared_memory_table(plan: KernelPlan) -> Table:
    """Every region with its bytes, in order, and how much of the architecture's limit is left."""
    limit = Arch.get(plan.arch).max_shared_bytes_per_block
    table = _table(
        f"shared memory: {plan.smem.size:,} of {limit:,} bytes", "offset", "bytes", "region", "elements"
    )
    for region in plan.smem.regions:
        elements = " x ".join(map(str, region.shape))
        table.add_row(f"{region.offset:,}", f"{region.size:,}", region.name, f"{elements} {region.dtype}")
    return table


def resources_table(title: str, resources: Mapping[str, Any]) -> Table:
    """Name and value of each resource."""
    table = _table(title, "resource", "value")
    for name, value in resources.items():
        table.add_row(
            name.replace("_", " "), " ".join(value) if isinstance(value, tuple | list) else str(value)
        )
    return table


def instruction_mix_table(mix: InstructionMix, most_frequent: int = 12) -> Table:
    """Categories, then the most frequent opcodes, then the source lines that spill."""
    table = _table(f"{mix.total:,} instructions", "kind", "instructions")
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


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in ("offset", "bytes", "instructions") else "left")
    return table
