"""A plan explained: decisions, roles and registers, shared and tensor memory, predicted time."""

from __future__ import annotations

from rich.table import Table

from megagen.arch import Arch
from megagen.inspection.tables import titled_table
from megagen.planning import KernelPlan
from megagen.planning.cost import Prediction, predict
from megagen.planning.sm100 import Sm100Plan

_MAP_WIDTH = 32  # characters of the drawn maps


def plan_tables(plan: KernelPlan, sms: int | None = None) -> tuple[Table, ...]:
    """All of a plan; its time is predicted for `sms` SMs (default: the GPU's)."""
    return (
        decisions_table(plan),
        roles_table(plan),
        shared_memory_table(plan),
        *((tensor_memory_table(plan),) if isinstance(plan, Sm100Plan) else ()),
        prediction_table(predict(plan, sms=sms)),
    )


def decisions_table(plan: KernelPlan) -> Table:
    """Each decision with its reason, and the sizes of the memory that follows from them."""
    title = f"{plan.name}, for {plan.expected_tokens} tokens per rank"
    table = titled_table(title, "decision", "value", "reason")
    for choice in plan.choices:
        table.add_row(choice.name, choice.value, choice.reason)
    table.add_section()
    symm, local = plan.contract.symm.size, plan.local.size
    table.add_row("pool", f"{plan.pool_rows:,} rows", "received tokens; no routing overflows it")
    table.add_row("symmetric buffer", f"{symm / 2**20:,.1f} MiB", "what peers touch, the same for all plans")
    table.add_row("local workspace", f"{local / 2**20:,.1f} MiB", "pools, counters and metadata of this rank")
    return table


def roles_table(plan: KernelPlan) -> Table:
    """Warps and registers of each role, and what the register file has left."""
    arch = Arch.get(plan.arch)
    granted = sum(role.registers * role.warps * 32 for role in plan.roles)
    launched = arch.launch_registers(plan.threads) * plan.threads
    table = titled_table(
        f"roles: {plan.threads} threads, {granted:,} of the {launched:,} registers that the launch allocates",
        "role", "warps", "registers", "in all", "job",
    )  # fmt: skip
    for role in plan.roles:
        last = role.first_warp + role.warps - 1
        warps = f"{role.first_warp}" if role.warps == 1 else f"{role.first_warp}-{last}"
        in_all = f"{role.registers * role.warps * 32:,}"
        table.add_row(role.name, warps, str(role.registers), in_all, role.job)
    return table


def shared_memory_table(plan: KernelPlan) -> Table:
    """Every region with its bytes, in order, drawn to scale, and how much of the limit is left."""
    limit = Arch.get(plan.arch).max_shared_bytes_per_block
    size = plan.smem.size
    table = titled_table(
        f"shared memory: {size:,} of {limit:,} bytes, {limit - size:,} free",
        "offset", "bytes", "region", "elements", "map",
    )  # fmt: skip
    for region in plan.smem.regions:
        elements = f"{' x '.join(map(str, region.shape))} {region.dtype}"
        drawn = _drawn(region.offset, region.size, limit)
        table.add_row(f"{region.offset:,}", f"{region.size:,}", region.name, elements, drawn)
    return table


def tensor_memory_table(plan: Sm100Plan) -> Table:
    """Columns of tensor memory, drawn to scale."""
    limit = Arch.get(plan.arch).tmem_columns
    title = f"tensor memory: {plan.tmem_columns} of {limit} columns allocated"
    table = titled_table(title, "column", "columns", "region", "map")
    for region in plan.tmem:
        drawn = _drawn(region.column, region.columns, limit)
        table.add_row(str(region.column), str(region.columns), region.name, drawn)
    return table


def prediction_table(prediction: Prediction) -> Table:
    """The predicted time and its parts; of those that overlap, the longest counts."""
    table = titled_table(
        f"predicted time: {prediction.seconds * 1e6:,.0f} us for {prediction.tokens} tokens per rank on "
        f"{prediction.sms} SMs, bound by {prediction.bound.name} (rates of the GPU: {prediction.rates})",
        "part", "us", "counts", "because",
    )  # fmt: skip
    for part in prediction.parts:
        counts = "yes" if not part.overlaps or part is prediction.bound else "hidden"
        table.add_row(part.name, f"{part.seconds * 1e6:,.1f}", counts, part.reason)
    return table


def _drawn(start: int, size: int, limit: int) -> str:
    """A bar of _MAP_WIDTH characters for [0, limit), filled from `start` on, at least one character."""
    first = min(start * _MAP_WIDTH // limit, _MAP_WIDTH - 1)
    filled = max(1, round((start + size) * _MAP_WIDTH / limit) - first)
    return ("·" * first + "█" * filled).ljust(_MAP_WIDTH, "·")
