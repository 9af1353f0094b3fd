"""Which rows of the decoder's table a text's instructions belong to."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from hw.cases import Case

from megagen.emulator import supported_forms

TESTS = Path(__file__).parent
_SLOT = re.compile(r"\([^)]*\)|\{[^}]*\}")
_MODIFIER = re.compile(r"\.\w+(?:::\w+)*")
_INSTRUCTION = re.compile(r"(?<![\w.%$])([a-z]\w*(?:\.\w+(?:::\w+)*)*)(?=[\s;])")
_BARE = {"exit", "trap", "brkpt", "pmevent", "ret", "call", "bra"}  # instructions that need no modifier


def spellings(text: str) -> set[str]:
    """Opcodes with their modifiers in PTX, or in a source that has PTX in its strings."""
    found = _INSTRUCTION.findall(text)
    return {spelling for spelling in found if "." in spelling or spelling in _BARE}


def _matches(slots: list[tuple[list[str], bool]], modifiers: list[str]) -> bool:
    if not slots:
        return not modifiers
    (choices, optional), *rest = slots
    if modifiers and modifiers[0] in choices and _matches(rest, modifiers[1:]):
        return True
    return optional and _matches(rest, modifiers)


@cache
def _rows() -> dict[str, list[tuple[str, list[tuple[list[str], bool]]]]]:
    """(pattern, slots) by opcode; a slot has its choices and whether it may be absent."""
    rows: dict[str, list] = {}
    for pattern, _ in supported_forms():
        slots = [(slot[1:-1].split("|"), slot[0] == "{") for slot in _SLOT.findall(pattern)]
        rows.setdefault(re.split(r"[({]", pattern)[0], []).append((pattern, slots))
    return rows


@cache
def row_of(spelling: str) -> str | None:
    """The pattern of the first row that takes an instruction whose modifiers have the ISA's order."""
    opcode, modifiers = spelling.split(".")[0], _MODIFIER.findall(spelling)
    return next((p for p, slots in _rows().get(opcode, []) if _matches(slots, modifiers)), None)


def rows_of(found: set[str]) -> set[str]:
    return {row for row in map(row_of, found) if row}


def of_unit_tests() -> set[str]:
    sources = [*TESTS.glob("test_*.py"), *TESTS.glob("tcgen05_*.py")]  # tests, and the kernels of some
    return set().union(*(spellings(path.read_text()) for path in sources))


def of_cases(groups: dict[str, Callable[[], list[Case]]]) -> set[str]:
    """Of hardware cases, as their sources write them: in strings, which spell line ends as \\n."""
    sources = [case.source.replace("\\n", " ") for build in groups.values() for case in build()]
    return set().union(*map(spellings, sources))


def of_foreign_kernels() -> set[str]:
    return set().union(*(spellings(path.read_text()) for path in TESTS.glob("foreign/*.ptx")))
