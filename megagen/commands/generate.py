"""``megagen generate``: kernels ahead of time."""

from pathlib import Path
from typing import Annotated

import typer

from megagen import build
from megagen.commands.options import LayerOptions, takes_layer
from megagen.commands.output import Json, emit, warn
from megagen.errors import InputError
from megagen.inspection.tables import rows_table


@takes_layer
def generate(
    layer: LayerOptions,
    out: Annotated[Path, typer.Option(help="Folder to write, or with --check to compare.")],
    compile: Annotated[bool, typer.Option("--compile", help="Also compile, with ninja.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit 1 if the folder is not what would be written."),
    ] = False,
    jobs: Annotated[int | None, typer.Option(help="Compilations at a time; default: one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Write the kernels of a layer into a folder: source, plan, and with --compile cubin and PTX.

    With --check and no layer, every kernel of the folder is planned and rendered again.
    """
    if check:
        if compile:
            raise InputError("--check writes nothing; leave --compile out")
        given = layer != LayerOptions()
        stale = build.stale_files(out, _kernels(layer) if given else None)
        emit(as_json, {"out": str(out), "stale": stale}, f"{out}: {'stale' if stale else 'fresh'}")
        if stale:
            warn("\n".join(stale))
            raise typer.Exit(1)
        return
    kernels = _kernels(layer)
    folder = build.generate(kernels, out, compile=compile, jobs=jobs)
    written = [{"kernel": name, **(folder.manifest["kernels"][name] or {})} for name in kernels.names]
    shown = ("kernel", "registers", "static_shared", "compile_ms")
    table = rows_table(str(out), [{name: row[name] for name in shown if name in row} for row in written])
    emit(as_json, {"out": str(out), "kernels": written}, table)


def _kernels(layer: LayerOptions) -> build.KernelSet:
    planned_for = None if layer.plan else {"tokens": layer.token_counts(), "sms": layer.sms}
    return build.KernelSet(layer.plans(), planned_for)
