"""Rows -> floors, ratios and verdicts, and the tables that show them. Pure: needs no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table

from megagen.bench.cases import Case
from megagen.bench.contenders import DEEP_GEMM as PEER
from megagen.bench.contenders import END_TO_END, KERNEL, MEGAGEN, PYTORCH
from megagen.contract import SF_BLOCK
from megagen.shape import MoEShape

COLUMNS = {KERNEL: "kernel only, inputs in place", END_TO_END: "end to end, bfloat16 input"}

MIN_HBM_BYTES_PER_S = 4.3e12
MIN_GEMM_FLOPS_PER_S = 1.3e15
"""A run whose ceilings are lower than these measured a disturbed machine: its floors do not count."""

FLOOR_ALLOWANCE = 1.08
MEMORY_SHARE = 0.60
MEMORY_TOKENS = 8192
"""At this capacity, memory besides weights is aimed to be at most that share of the peer's."""

BALANCE_ALLOWANCE = 1.25
"""Skewed routing may take this much longer than balanced routing with the same largest load."""


@dataclass(frozen=True)
class Verdict:
    """One row's numbers in one column; times in microseconds, None where there is none.

    Attributes:
        ratio, target: ours / peer, as it is and as it should be at most.
        allowed_us: what the target, or the floor where that allows more, comes to.
        met: whether ours is within ``allowed_us`` and right; None if that can't be said.
    """

    ours_us: float | None
    peer_us: float | None
    baseline_us: float | None
    floor_us: float | None
    ratio: float | None
    target: float
    allowed_us: float | None
    met: bool | None


def flops(row: Mapping[str, Any], rows: int) -> int:
    """Of both GEMMs for so many token copies: 2 x 3 x H x I each."""
    return rows * 6 * row["hidden"] * row["intermediate"]


def weight_bytes(row: Mapping[str, Any], experts: int) -> int:
    """Of so many experts' matrices in E4M3 with their scale factors."""
    values = 3 * row["hidden"] * row["intermediate"]
    return experts * (values + 4 * values // SF_BLOCK**2)


def floor_us(row: Mapping[str, Any], ceilings: Mapping[str, float] | None) -> float | None:
    """The larger of reading the weights in use and of the padded FLOPs, on the busiest rank; None without
    ceilings, or with ones that don't count."""
    if not ceilings_count(ceilings):
        return None
    assert ceilings is not None
    return 1e6 * max(
        max(
            weight_bytes(row, load["experts"]) / ceilings["hbm_bytes_per_s"],
            flops(row, load["padded_rows"]) / ceilings["gemm_flops_per_s"],
        )
        for load in row["load"]
    )


def ceilings_count(ceilings: Mapping[str, float] | None) -> bool:
    """Whether the ceilings of a run were those of an undisturbed machine."""
    return (
        ceilings is not None
        and ceilings["hbm_bytes_per_s"] >= MIN_HBM_BYTES_PER_S
        and ceilings["gemm_flops_per_s"] >= MIN_GEMM_FLOPS_PER_S
    )


def judge(row: Mapping[str, Any], column: str, ceilings: Mapping[str, float] | None) -> Verdict:
    """Compare ours with the peer and with the floor."""
    ours, peer = time_us(row, MEGAGEN, column), time_us(row, PEER, column)
    floor = floor_us(row, ceilings)
    target = case_of(row).target(row["ranks"])
    allowed = met = None
    if peer is not None:
        allowed = peer if target is None else max(target * peer, FLOOR_ALLOWANCE * (floor or 0.0))
    if ours is not None and allowed is not None:
        met = ours <= allowed and row["results"][MEGAGEN][column]["right"]
    return Verdict(
        ours_us=ours,
        peer_us=peer,
        baseline_us=time_us(row, PYTORCH, END_TO_END),
        floor_us=floor,
        ratio=ours / peer if ours is not None and peer is not None else None,
        target=1.0 if target is None else target,
        allowed_us=allowed,
        met=met,
    )


def time_us(row: Mapping[str, Any], contender: str, column: str) -> float | None:
    """The time of a contender, if it was measured."""
    result = row["results"].get(contender, {}).get(column)
    return None if result is None else result["us"]


def tflops(row: Mapping[str, Any], us: float) -> float:
    """Useful TFLOP/s per rank: tokens x top_k x 6 x hidden x intermediate / time."""
    return flops(row, row["tokens"] * row["top_k"]) / us * 1e-6


def case_of(row: Mapping[str, Any]) -> Case:
    """The case that a row is of."""
    shape = MoEShape(row["hidden"], row["intermediate"], row["experts"], row["top_k"])
    return Case(row["model"], shape, row["tokens"], row["routing"])


def useful_share(row: Mapping[str, Any]) -> float:
    """Share of the rows in the plan's tiles that are tokens, over all ranks."""
    padded = sum(load["plan_rows"] for load in row["load"])
    return sum(load["rows"] for load in row["load"]) / padded if padded else 1.0


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    """What the tables show, for JSON: per row and column the verdict, and whether all are met."""
    verdicts = [
        {
            "case": str(case_of(row)),
            "column": column,
            **vars(judge(row, column, record["ceilings"])),
        }
        for row in record["rows"]
        for column in COLUMNS
    ]
    return {
        "ceilings_count": ceilings_count(record["ceilings"]),
        "verdicts": verdicts,
        "memory": memory_rows(record),
        "all_met": bool(verdicts) and all(verdict["met"] for verdict in verdicts),
    }


def memory_rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Memory besides weights, once per model."""
    found: dict[str, dict[str, Any]] = {}
    for row in record["rows"]:
        sizes = row["memory_bytes"]
        ours, peer = sizes.get(MEGAGEN), sizes.get(PEER)
        if ours is not None:
            share = ours / peer if peer else None
            found.setdefault(
                row["model"], {"model": row["model"], "ours": ours, "peer": peer, "share": share}
            )
    return list(found.values())


def ours_is_right(record: Mapping[str, Any]) -> bool:
    """Whether ours was measured in every row, and its results were right."""
    ours = [row["results"].get(MEGAGEN, {}) for row in record["rows"]]
    return bool(ours) and all(
        results and all(result["right"] for result in results.values()) for results in ours
    )


def tables(record: Mapping[str, Any]) -> list[Table | str]:
    """Everything a reader wants to see of a run."""
    shown: list[Table | str] = [ceilings_line(record["ceilings"])]
    shown += [column_table(record, column) for column in COLUMNS]
    shown += [memory_table(record)]
    if any("balanced" in row for row in record["rows"]):
        shown.append(balance_table(record))
    shown += [
        f"{case_of(row)}: {name}: {problem}"
        for row in record["rows"]
        for name, problem in [*row["failures"].items(), *wrong_results(row)]
    ]
    return [*shown, *record["problems"]]


def wrong_results(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(contender, what is wrong) of each result that is off or differs between its samples."""
    return [
        (name, f"{column}: wrong, errors {result['errors']}, same bits: {result['same_bits']}")
        for name, columns in row["results"].items()
        for column, result in columns.items()
        if not result["right"]
    ]


def ceilings_line(ceilings: Mapping[str, float] | None) -> str:
    if ceilings is None:
        return "ceilings: not measured"
    counted = "" if ceilings_count(ceilings) else " (too low: floors do not count)"
    return (
        f"ceilings: HBM read {ceilings['hbm_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"FP8 GEMM {ceilings['gemm_flops_per_s'] / 1e12:,.0f} TFLOP/s{counted}"
    )


def column_table(record: Mapping[str, Any], column: str) -> Table:
    """Times in microseconds, one row per case; ``met``: within the target, or 1.08 times the floor."""
    headings = ["model", "tokens", "tile", "megagen", "peer", "ratio", "aim", "met", "floor", "of it"]
    headings += ["TFLOP/s", "useful", "right"]
    if column == END_TO_END:
        headings.insert(5, "pytorch")
    routings = ", ".join(dict.fromkeys(row["routing"] for row in record["rows"]))
    table = _table(f"EP-{record['ranks']}, {routings}, {COLUMNS[column]}; microseconds", headings)
    for row in record["rows"]:
        table.add_row(*_cells(row, column, record["ceilings"]))
    return table


def _cells(row: Mapping[str, Any], column: str, ceilings: Mapping[str, float] | None) -> list[str]:
    verdict = judge(row, column, ceilings)
    ours, floor = verdict.ours_us, verdict.floor_us
    cells = [
        row["model"],
        f"{row['tokens']:,}",
        f"m{row['block_m']}" if row["block_m"] else "-",
        _number(ours, "{:,.1f}"),
        _number(verdict.peer_us, "{:,.1f}"),
        _number(verdict.ratio, "{:.3f}"),
        f"{verdict.target:.2f}",
        _yes_no(verdict.met),
        _number(floor, "{:,.1f}"),
        _number(floor and ours and floor / ours, "{:.0%}"),
        _number(ours and tflops(row, ours), "{:,.0f}"),
        f"{useful_share(row):.0%}",
        _yes_no(row["results"].get(MEGAGEN, {}).get(column, {}).get("right")),
    ]
    if column == END_TO_END:
        cells.insert(5, _number(verdict.baseline_us, "{:,.0f}"))
    return cells


def memory_table(record: Mapping[str, Any]) -> Table:
    """Memory that each contender holds besides weights."""
    table = _table(
        f"memory besides weights; MiB (aim: {MEMORY_SHARE:.0%} of the peer at {MEMORY_TOKENS:,} tokens)",
        ["model", "megagen", "peer", "share"],
    )
    for one in memory_rows(record):
        table.add_row(
            one["model"],
            f"{one['ours'] / 2**20:,.0f}",
            _number(one["peer"] and one["peer"] / 2**20, "{:,.0f}"),
            _number(one["share"], "{:.0%}"),
        )
    return table


def balance_table(record: Mapping[str, Any]) -> Table:
    """Skewed routing against balanced routing with the same largest load."""
    table = _table(
        f"skewed and balanced; us (aim: at most {BALANCE_ALLOWANCE}x)",
        ["case", "skewed", "balanced", "at tokens", "ratio"],
    )
    for row in record["rows"]:
        balanced, ours = row.get("balanced") or {}, time_us(row, MEGAGEN, KERNEL)
        us = balanced.get("us")
        table.add_row(
            str(case_of(row)),
            _number(ours, "{:,.1f}"),
            _number(us, "{:,.1f}"),
            str(balanced.get("tokens", "")),
            _number(us and ours and ours / us, "{:.2f}"),
        )
    return table


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _yes_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"
