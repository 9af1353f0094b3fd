"""The command line, ``megagen`` or ``python -m megagen``.

Exit codes: 0 right, 1 wrong result, 2 bad input, 3 missing hardware or tool, 4 hang or timeout. Results go to
standard output, errors to standard error.
"""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megagen import __version__, errors
from megagen.commands import bench, cache, doctor, emulate, generate, inspect, plan, run, tune
from megagen.commands.output import warn

EXIT_CODES: dict[type[errors.MegagenError], int] = {
    errors.CompileError: 1,
    errors.PeerAborted: 1,
    errors.EmulatorError: 1,
    errors.ShapeError: 2,
    errors.PlanError: 2,
    errors.InputError: 2,
    errors.CacheError: 2,
    errors.ContractMismatch: 2,
    errors.DeviceError: 3,
    errors.NVLinkDomainError: 3,
    errors.MegaMoETimeout: 4,
    errors.Deadlock: 4,
}
"""Exit code of each exception; a class that is not listed has that of its nearest base."""


def exit_code(error: errors.MegagenError) -> int:
    """The exit code of a command that ends with this error."""
    return next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES)


class _ErrorsToExitCodes(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except errors.MegagenError as error:
            warn(f"{type(error).__name__}: {error}")
            raise typer.Exit(exit_code(error)) from error


app = typer.Typer(
    cls=_ErrorsToExitCodes,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan.plan)
app.command("generate")(generate.generate)
app.command("inspect")(inspect.inspect)
app.command("emulate")(emulate.emulate)
app.command("run")(run.run)
app.command("bench")(bench.bench)
app.command("tune")(tune.tune)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def megagen(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan, generate, compile, inspect, run and time mega-kernels for mixture-of-experts layers."""


def main() -> None:
    """Entry point of the ``megagen`` script."""
    app(prog_name="megagen")
