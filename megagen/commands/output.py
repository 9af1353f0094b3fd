"""What commands print: JSON with a schema version, or rich text."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from megagen.files import to_json

SCHEMA_VERSION = 1
_WIDTH_IN_FILES = 120

Json = Annotated[bool, typer.Option("--json", help="Print JSON (with a schema_version) instead of text.")]


def emit(as_json: bool, record: dict[str, Any], *text: RenderableType) -> None:
    """Print a command's result on standard output, in the form that the user asked for."""
    if as_json:
        print(to_json({"schema_version": SCHEMA_VERSION, **record}))
    else:
        console = Console()
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = _WIDTH_IN_FILES
        for renderable in text:
            # Plain strings keep their lines, whatever the width of the terminal.
            console.print(renderable, highlight=False, markup=False, soft_wrap=isinstance(renderable, str))


def warn(message: str) -> None:
    """A line on standard error."""
    Console(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)
