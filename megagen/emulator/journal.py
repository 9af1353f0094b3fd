"""The journal of an exploration: a line of JSON per finished seed, so that an interrupted one can go on.

The first line says what was explored. A line that a killed process left torn is written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megagen.errors import InputError


class Journal:
    """Seeds that are done, and their rows.

    Args:
        path: made if it is not there; None keeps nothing.
        subject: what is explored, as plain values: settings, and the code that they are explored with.

    Raises:
        InputError: the file can't be read or written, or belongs to another exploration.
    """

    def __init__(self, path: Path | None, subject: dict[str, Any]) -> None:
        self._path = path
        self.rows: dict[int, dict[str, Any]] = {}
        if path is None:
            return
        try:
            if path.exists() and path.stat().st_size:
                self._read(path, subject)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"subject": subject}) + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"journal={str(path)!r} can't be used: {error}; give another file") from error

    def add(self, seed: int, row: dict[str, Any]) -> None:
        """Note a finished seed."""
        self.rows[seed] = row
        if self._path is None:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"seed": seed, "row": row}) + "\n")
        except OSError as error:
            raise InputError(f"journal={str(self._path)!r} can't be written: {error}") from error

    def _read(self, path: Path, subject: dict[str, Any]) -> None:
        text = path.read_text()
        whole, _, torn = text.rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines or lines[0].get("subject") != json.loads(json.dumps(subject)):
            raise InputError(
                f"journal={str(path)!r} is of another exploration or another state of megagen; remove it, or "
                "give another file"
            )
        self.rows = {line["seed"]: line["row"] for line in lines[1:]}
        if torn:
            path.write_text(whole + "\n")
