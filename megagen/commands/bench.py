"""``megagen bench``: the layer against others and against the machine's limits."""

import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from megagen import __version__
from megagen.commands.output import SCHEMA_VERSION, Json, emit, warn
from megagen.errors import DeviceError, InputError
from megagen.files import to_json, write_atomically


def bench(
    shapes: Annotated[
        str, typer.Option(help="Comma-separated presets (flash: deepseek-v4-flash) or config.json files.")
    ] = "flash8,pro8,flash",
    tokens: Annotated[str, typer.Option(help="Tokens per rank: 8,64 or 1:8192 (doubling).")] = (
        "8,64,256,1024,4096,8192"
    ),
    ranks: Annotated[int | None, typer.Option(help="GPUs; default: all that are here.")] = None,
    routing: Annotated[str, typer.Option(help="uniform, or zipf:1.0 for skewed.")] = "uniform",
    contenders: Annotated[
        str | None, typer.Option(help="Of megagen, sgl-deep-gemm, pytorch; default: those installed.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Capacity of the buffers; default: what --tokens needs.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Timed calls per number.")] = 20,
    seed: Annotated[int, typer.Option(help="Of weights, tokens and routing.")] = 0,
    time_limit: Annotated[
        float, typer.Option(help="Seconds after which remaining rows are left out.")
    ] = 3600,
    out: Annotated[Path | None, typer.Option(help="Folder for JSON and plots.")] = None,
    plot: Annotated[bool, typer.Option(help="Draw plots into --out (needs matplotlib).")] = True,
    as_json: Json = False,
) -> None:
    """Time the layer, its peer and plain PyTorch on the same inputs, beside this machine's ceilings."""
    from megagen.bench.cases import make_cases, route
    from megagen.bench.contenders import MEGAGEN, choose_contenders
    from megagen.bench.measure import Job
    from megagen.bench.report import ours_is_right, summary, tables
    from megagen.bench.session import Session

    ranks = count_gpus(ranks)
    cases = make_cases(shapes, tokens, ranks, routing)
    route(cases[0], ranks, seed)  # refuses an unknown routing before anything starts
    if samples < 1:
        raise InputError(f"samples={samples} is below 1")
    capacity = _capacity(max_tokens, max(case.tokens for case in cases), ranks, routing)
    job = Job(tuple(cases), choose_contenders(contenders), capacity, samples=samples, seed=seed)
    stem = None if out is None else _stem(out, ranks, routing)
    record_file = None if stem is None else stem.with_name(f"{stem.name}.json")
    session = Session(ranks, time_limit, record_file, machine_facts())
    start = time.monotonic()
    for line in session.run(job):
        warn(f"{time.monotonic() - start:6.1f} s  {line}")
    record = session.to_dict()
    record["summary"] = summary(record)
    shown: list[Any] = list(tables(record))
    if stem is not None and record_file is not None:
        contents = to_json({"schema_version": SCHEMA_VERSION, **record})
        write_atomically(record_file, contents.encode())
        shown += [f"written: {record_file}", *(_plots(record, stem) if plot else [])]
    emit(as_json, record, *shown)
    if MEGAGEN in job.contenders and not ours_is_right(record):
        raise typer.Exit(1)


def count_gpus(ranks: int | None) -> int:
    """``ranks``, by default as many as there are GPUs.

    Raises:
        DeviceError: there are fewer.
    """
    import torch

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if here == 0:
        raise DeviceError("no GPU: this needs an NVIDIA GPU and a CUDA build of torch; see `megagen doctor`")
    if ranks is None:
        return here
    if not 1 <= ranks <= here:
        raise DeviceError(f"ranks={ranks}, but {here} GPUs are here; each rank needs one")
    return ranks


def machine_facts() -> dict[str, Any]:
    """What a reader of a record needs to know of where it was made."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "gpus": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "megagen": __version__,
        "commit": os.environ.get("MEGAGEN_COMMIT"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _capacity(max_tokens: int | None, needed: int, ranks: int, routing: str) -> int:
    """Tokens that buffers hold: with skewed routing also those of the balanced comparison, up to twice."""
    if max_tokens is None:
        return needed if routing == "uniform" else needed * min(ranks, 2)
    if max_tokens < needed:
        raise InputError(f"max_tokens={max_tokens} is below the {needed} of --tokens; give {needed} or more")
    return max_tokens


def _stem(out: Path, ranks: int, routing: str) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out={str(out)!r} can't be made: {error}; give a folder to write to") from error
    skew = "" if routing == "uniform" else f"-{routing.replace(':', '').replace('/', '-')}"
    return out / f"bench-ep{ranks}{skew}"


def _plots(record: dict[str, Any], stem: Path) -> list[str]:
    from megagen.inspection.plot import plot_bench

    try:
        return [f"written: {file}" for file in plot_bench(record, stem)]
    except InputError as error:
        return [f"no plots: {error}"]
