"""``megagen emulate``: a whole layer on the CPU, checked against the reference."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from megagen.commands.options import LayerOptions, takes_layer
from megagen.commands.output import Json, emit, warn
from megagen.errors import InputError
from megagen.files import write_atomically
from megagen.inspection.tables import rows_table
from megagen.routing import ROUTING_KINDS, parse_tokens

if TYPE_CHECKING:
    from megagen.emulator.cases import Case
    from megagen.emulator.exploration import Exploration
    from megagen.emulator.layer import EmulatedLayer

DEFAULT_TOKENS = "64"
DEFAULT_ROUTING = "uniform"
DEFAULT_SMS = 4
EXIT_WRONG, EXIT_DEADLOCK = 1, 4
_REFRESH_S = 0.2


@takes_layer
def emulate(
    layer: LayerOptions,
    context: typer.Context,
    routing: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(ROUTING_KINDS)}. Default: {DEFAULT_ROUTING}.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of tokens, routing and interleaving.")] = 0,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="A:B explores: each seed draws ranks, routing, tile, tokens, SMs that aren't given."
        ),
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="With --seeds: file of finished seeds, which are not run again.")
    ] = None,
    launches: Annotated[int, typer.Option(help="Calls in a row on the same buffers.")] = 1,
    timeline: Annotated[
        Path | None, typer.Option(help="Write what each role did and waited for, for ui.perfetto.dev.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a layer on the CPU, with races, deadlocks and undefined values checked.

    Exit 1 if a result is wrong or the emulator found something, 4 if that was a deadlock.
    """
    if launches < 1:
        raise InputError(f"launches={launches} is below 1")
    if seeds is None:
        if journal is not None:
            raise InputError("--journal belongs to --seeds; leave it out")
        if not _given(context, "max_tokens"):
            layer = replace(layer, max_tokens=_needed(layer))
        cases = _cases(layer, routing or DEFAULT_ROUTING, seed, launches)
        rows = _run_cases(cases, timeline)
    else:
        if timeline is not None:
            raise InputError("--timeline shows one case; give --seed instead of --seeds")
        if layer.plan is not None or layer.tokens is not None or _given(context, "max_tokens"):
            raise InputError("--seeds draws tokens and plans; leave --plan, --tokens and --max-tokens out")
        ranks = layer.ranks if _given(context, "ranks") else None
        rows = _explore(_exploration(layer, routing, ranks), _seed_range(seeds), journal)
    title = f"{sum(row['right'] for row in rows)} of {len(rows)} right"
    emit(as_json, {"rows": rows}, rows_table(title, [_shown(row) for row in rows]))
    for row in rows:
        _explain(row)
    if any(row["error"] == "Deadlock" for row in rows):
        raise typer.Exit(EXIT_DEADLOCK)
    if not all(row["right"] for row in rows):
        raise typer.Exit(EXIT_WRONG)


# -- one case, or one per count of --tokens


def _counts(layer: LayerOptions) -> list[tuple[int, ...]]:
    """Per case, the tokens of each rank."""
    ranks = layer.ranks if layer.plan is None else layer.forced_plan().contract.ranks
    return parse_tokens(layer.tokens or DEFAULT_TOKENS, ranks)


def _needed(layer: LayerOptions) -> int:
    """The capacity that the tokens need: an emulated buffer has no reason to be larger."""
    return max(1, *(max(case) for case in _counts(layer)))


def _cases(layer: LayerOptions, routing: str, seed: int, launches: int) -> list["Case"]:
    from megagen.emulator.cases import Case

    counts, sms = _counts(layer), layer.sms or DEFAULT_SMS
    plans = replace(layer, sms=sms, tokens=layer.tokens or DEFAULT_TOKENS).plans()
    return [
        Case(tuple(plans.select(n) for n in case), (sms,) * len(case), case, routing, seed, launches)
        for case in counts
    ]


def _run_cases(cases: list["Case"], timeline: Path | None) -> list[dict[str, Any]]:
    if timeline is None:
        return [_run(case) for case in cases]
    if len(cases) > 1:
        raise InputError(f"--timeline shows one case; --tokens names {len(cases)}, give one count per rank")
    traced = replace(cases[0], plans=tuple(replace(plan, trace=True) for plan in cases[0].plans))
    for plan in traced.plans:
        plan.validate()
    return [_run(traced, timeline)]


def _run(case: "Case", timeline: Path | None = None) -> dict[str, Any]:
    from megagen.emulator.cases import check, prepare

    start = time.monotonic()
    layer = prepare(case, step_clock=timeline is not None)
    with _progress(case, layer):
        verdict = check(case, layer)
    if timeline is not None:
        _write_timeline(layer, timeline)
    return {**case.describe(), **verdict.describe(), "seconds": round(time.monotonic() - start, 2)}


def _write_timeline(layer: "EmulatedLayer", path: Path) -> None:
    from megagen.inspection.timeline import RankTrace, chrome_trace

    ranks = [RankTrace(kernel.plan, layer.trace(rank)) for rank, kernel in enumerate(layer.kernels)]
    try:
        write_atomically(path, json.dumps(chrome_trace(ranks, clock="sm")).encode())
    except OSError as error:
        raise InputError(f"timeline={str(path)!r} can't be written: {error}; give another file") from error


@contextmanager
def _progress(case: "Case", layer: "EmulatedLayer") -> Iterator[None]:
    """Shows how many of the case's matrix operations are done while it runs."""
    from megagen.emulator.cases import expected_matrix_operations

    done = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=max(1, expected_matrix_operations(case)))

        def follow() -> None:
            while not done.wait(_REFRESH_S):
                report = layer.machine.report()
                text = f"{report.instructions:,} instructions"
                progress.update(task, completed=report.matrix_operations, description=text)

        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        try:
            yield
        finally:
            done.set()
            follower.join()


# -- exploration


def _exploration(layer: LayerOptions, routing: str | None, ranks: int | None) -> "Exploration":
    """All axes, but for those that the options fix."""
    from megagen.emulator.exploration import SHAPES, Exploration

    named = layer.model is not None or layer.hidden is not None
    shapes = (layer.shape(),) if named else SHAPES
    dividing = [r for r in Exploration.ranks if all(shape.experts % r == 0 for shape in shapes)]
    fixed: dict[str, tuple[Any, ...]] = {"shapes": shapes, "ranks": tuple(dividing)}
    if ranks is not None:
        shapes[0].experts_per_rank(ranks)  # refuses what does not divide
        fixed["ranks"] = (ranks,)
    if routing is not None:
        fixed["routings"] = (routing,)
    if layer.sms is not None:
        fixed["sms"] = (layer.sms,)
    return Exploration.of(layer.arch, **fixed)


def _explore(exploration: "Exploration", seeds: range, path: Path | None) -> list[dict[str, Any]]:
    from megagen.cache import recipe_of
    from megagen.emulator.cases import check
    from megagen.emulator.journal import Journal

    journal = Journal(path, {"exploration": str(exploration), "megagen": recipe_of("emulate")})
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("exploring", total=len(seeds))
        for seed in seeds:
            if seed not in journal.rows:
                case = exploration.case(seed)
                progress.update(task, description=f"seed {seed}, {len(case.tokens)} ranks, {case.routing}")
                start = time.monotonic()
                verdict = check(case, compare_bits=True)
                took = round(time.monotonic() - start, 2)
                journal.add(seed, {**case.describe(), **verdict.describe(), "seconds": took})
            progress.advance(task)
    return [journal.rows[seed] for seed in seeds]


def _seed_range(text: str) -> range:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise InputError(f"seeds={text!r} is no range; write A:B, as in 0:100 for the hundred seeds 0 to 99")
    return range(int(first), int(last))


# -- output


def _given(context: typer.Context, option: str) -> bool:
    """Whether the user gave an option, be it with its default value."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _shown(row: dict[str, Any]) -> dict[str, str]:
    """A row as text; errors are relative."""
    ended = row["error"] is None
    return {
        "seed": str(row["seed"]),
        "tokens per rank": _list(row["tokens"]),
        "SMs": _list(row["sms"]),
        "tile rows": _list(row["block_m"]),
        "routing": row["routing"] + (f" x{row['launches']}" if row["launches"] > 1 else ""),
        "instructions": f"{row['instructions']:,}",
        "seconds": f"{row['seconds']:.1f}",
        "error": f"{row['whole']:.1e}" if ended else row["error"],
        "worst row": f"{row['worst_row']:.1e}" if ended else "-",
        "right": "yes" if row["right"] else "NO",
    }


def _list(values: list[int]) -> str:
    if len(set(values)) > 1:
        return ", ".join(map(str, values))
    return str(values[0]) if len(values) == 1 else f"{len(values)} x {values[0]}"


def _explain(row: dict[str, Any]) -> None:
    """On standard error, what is wrong with a row."""
    if row["error"] is not None:
        warn(f"seed {row['seed']}: {row['error']}: {row['message']}")
    for text in row["wrong"]:
        warn(f"seed {row['seed']}: {text}")
