"""``megagen cache``: what compiled kernels are kept on disk."""

from typing import Any

import typer

from megagen.cache import CacheEntry, default_cache
from megagen.commands.output import Json, emit, warn
from megagen.inspection.tables import rows_table

app = typer.Typer(no_args_is_help=True, help="The cache of compiled kernels (MEGAGEN_CACHE_DIR).")


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """List the cached kernels."""
    kernels = default_cache()
    rows = [_row(entry) for entry in kernels.entries()]
    shown = [{**row, "key": row["key"][:12]} for row in rows]
    title = f"{kernels.directory}: {len(rows)} kernels, {sum(row['bytes'] for row in rows):,} bytes"
    emit(as_json, {"directory": str(kernels.directory), "kernels": rows}, rows_table(title, shown))


@app.command()
def clear(as_json: Json = False) -> None:
    """Remove every cached kernel."""
    kernels = default_cache()
    removed = kernels.clear()
    record = {"directory": str(kernels.directory), "removed": removed}
    emit(as_json, record, f"{kernels.directory}: removed {removed} kernels")


@app.command()
def verify(as_json: Json = False) -> None:
    """Check every cached kernel against its checksum; exit 1 if one is damaged (its next use rebuilds it)."""
    kernels = default_cache()
    entries = kernels.entries()
    damaged = {entry.path.name: entry.damage for entry in entries if entry.damage}
    record = {"directory": str(kernels.directory), "kernels": len(entries), "damaged": damaged}
    emit(
        as_json, record, f"{kernels.directory}: {len(entries) - len(damaged)} intact, {len(damaged)} damaged"
    )
    for name, damage in damaged.items():
        warn(f"{name}: {damage}")
    if damaged:
        raise typer.Exit(1)


def _row(entry: CacheEntry) -> dict[str, Any]:
    kernel = entry.kernel
    return {
        "key": entry.key,
        "name": kernel.name if kernel else "",
        "arch": kernel.arch if kernel else "",
        "nvrtc": kernel.nvrtc if kernel else "",
        "bytes": entry.size,
        "damage": entry.damage,
    }
