"""Plots of a benchmark's record. Needs matplotlib (``pip install megagen[plot]``), imported when called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megagen.bench.contenders import DEEP_GEMM, END_TO_END, KERNEL, MEGAGEN, PYTORCH
from megagen.bench.report import ceilings_count, floor_us, tflops, time_us
from megagen.errors import InputError

_LINES = {
    MEGAGEN: (KERNEL, "C0", "o"),
    DEEP_GEMM: (KERNEL, "C1", "s"),
    PYTORCH: (END_TO_END, "C2", "^"),
}


def plot_bench(record: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draw time and TFLOP/s against tokens, one column per model.

    Args:
        record: as ``megagen bench`` writes it, with at least one time.
        stem: path without its ending.

    Returns:
        The files written: ``stem``.png and ``stem``.svg.

    Raises:
        InputError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"plots need matplotlib ({error}); `pip install matplotlib`") from error
    timed = [row for row in record["rows"] if row["results"]]
    models = list(dict.fromkeys(row["model"] for row in timed))
    if not models:
        raise InputError("the record has no times, so there is nothing to draw")
    figure = Figure(figsize=(4.5 * len(models), 7), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False, sharex="col")
    for column, model in enumerate(models):
        rows = sorted((row for row in timed if row["model"] == model), key=lambda row: row["tokens"])
        _draw_model(axes[0][column], axes[1][column], rows, record["ceilings"])
        axes[0][column].set_title(f"{model}, EP-{record['ranks']}")
    axes[0][0].set_ylabel("time, us")
    axes[1][0].set_ylabel("TFLOP/s per GPU")
    files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return files


def _draw_model(times: Any, rates: Any, rows: list[Any], ceilings: Mapping[str, float] | None) -> None:
    for name, (column, color, marker) in _LINES.items():
        timed = [(row, us) for row in rows if (us := time_us(row, name, column)) is not None]
        if not timed:
            continue
        tokens = [row["tokens"] for row, _ in timed]
        label = f"{name} ({column.replace('_', ' ')})"
        times.plot(tokens, [us for _, us in timed], color=color, marker=marker, label=label)
        rates.plot(tokens, [tflops(row, us) for row, us in timed], color=color, marker=marker)
    if ceilings_count(ceilings):
        floors = [floor_us(row, ceilings) for row in rows]
        times.plot([row["tokens"] for row in rows], floors, color="0.5", linestyle="--", label="floor")
    for axis in (times, rates):
        axis.set_xscale("log", base=2)
        axis.grid(True, alpha=0.3)
    times.set_yscale("log")
    times.legend()
    rates.set_xlabel("tokens per GPU")
    rates.set_ylim(bottom=0)
