"""Where the templates are, and how files and JSON are written."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def templates_dir() -> Path:
    """The templates: inside the package when installed, beside it in a source tree."""
    package = Path(__file__).parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"


def to_json(values: Any) -> str:
    """JSON text; floats that are not finite become null, for JSON has no word for them."""
    return json.dumps(_finite(values), indent=1, allow_nan=False)


def _finite(values: Any) -> Any:
    if isinstance(values, float) and not math.isfinite(values):
        return None
    if isinstance(values, Mapping):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return values


def write_atomically(path: Path, contents: bytes) -> None:
    """Write a file aside and rename it, so that no reader and no interruption ever sees a part of it.

    What an interruption can leave behind is a file named ``<name>.<random>.tmp`` in the same folder. OSError
    as for any write.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
