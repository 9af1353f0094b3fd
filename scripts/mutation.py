"""Mutants of a kernel, enumerated from its CUDA source.

Every call site of a synchronization primitive is dropped, weakened in scope and weakened in order, and every
stage index, parity, wait count and last-arriver test is off by one. What a primitive is, and what weakens it,
is read off the PTX in its definition, so a new primitive is covered as soon as a template calls it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_DEFINITION = re.compile(
    r"^[ ]*(?:DEVICE|__device__ __forceinline__)\s+(?P<type>[\w:&<>,*\s]+?)\s*\b(?P<name>\w+)\(|"
    r"^extern \"C\" __global__ [^{]*?\s(?P<entry>\w+)\((?=const __grid_constant__)",
    re.MULTILINE,
)
_SYNCHRONIZES = re.compile(
    r"mbarrier\.(?!init)|\bfence\.|\b(?:ld|st)\.(?:acquire|release|relaxed)|\b(?:red|atom)\.|\bbar\.sync|"
    r"wgmma\.(?:fence|commit_group|wait_group)|tcgen05\.(?:fence|commit|wait)|barrier\.cluster"
)
_BUILTINS = {"__syncwarp": "void", "__syncthreads": "void", "atomicAdd": "u32", "atomicOr": "u32"}
_COMPOSITES = re.compile(r"wait_(?:for|unless)_\w+|\w+_test_wait")

_SCOPE = (
    ("scope sys to gpu", r"\.sys\b", ".gpu"),
    ("scope gpu to cta", r"\.gpu\b", ".cta"),
    (
        "scope cluster to cta",
        r"(?<!mbarrier_init\.)\b(release|acquire|relaxed|acq_rel)\.cluster\b",
        r"\1.cta",
    ),
    ("space global to shared", r"fence\.proxy\.async\.global", "fence.proxy.async.shared::cta"),
)
_ORDER = (
    ("acquire to relaxed", r"\bld\.acquire\b", "ld.relaxed"),
    ("release to relaxed", r"\b(st|red)\.release\b", r"\1.relaxed"),
    ("acq_rel to acquire", r"\batom\.acq_rel\b", "atom.acquire"),
    ("acq_rel to release", r"\batom\.acq_rel\b", "atom.release"),
    ("acq_rel to relaxed", r"\batom\.acq_rel\b", "atom.relaxed"),
    ("relaxed to weak", r"\b(ld|st)\.relaxed\.\w+\.", r"\1."),
    ("release to relaxed", r"mbarrier\.arrive\.(shared|expect_tx\.shared)", r"mbarrier.arrive.~\1"),
    ("release to relaxed", r"\b(mbarrier|barrier\.cluster)\.arrive\.release", r"\1.arrive.relaxed"),
    (
        "acquire to relaxed",
        r"mbarrier\.(test|try)_wait\.parity\.shared",
        r"mbarrier.\1_wait.parity.relaxed.cta.shared",
    ),
    ("acquire to relaxed", r"_wait\.parity\.acquire", "_wait.parity.relaxed"),
    ("sync to arrive", r"\bbar\.sync\b", "bar.arrive"),
)
"""(what is weakened, pattern in the PTX, replacement)."""


class Edit(NamedTuple):
    """Replaces ``source[start:end]``."""

    start: int
    end: int
    text: str


class Function(NamedTuple):
    """A function definition: ``start`` where its text begins, its body between ``open`` and ``close``."""

    name: str
    type: str
    start: int
    open: int
    close: int


@dataclass(frozen=True)
class Mutant:
    """One change of a kernel.

    Attributes:
        name: function, what is changed and which of its occurrences in the function, and how. Stable while
            the function does not change.
        kind: "drop", "scope", "order" or "count".
        body: text of the function, which tells whether two kernels have the same mutant.
        line: of the change in the kernel's source, from 1.
        edits: what makes the mutant of the source.
    """

    name: str
    kind: str
    body: str
    line: int
    edits: tuple[Edit, ...]

    def apply(self, source: str) -> str:
        """The mutant's source."""
        for edit in sorted(self.edits, reverse=True):
            source = source[: edit.start] + edit.text + source[edit.end :]
        return source


class Change(NamedTuple):
    """What is changed where: the first edit's ``place``, the text or name there, how, and the kind."""

    place: int
    what: str
    how: str
    kind: str
    edits: tuple[Edit, ...]


class Call(NamedTuple):
    """A call: its name, where it starts and ends, and its arguments with their places."""

    name: str
    start: int
    end: int
    arguments: tuple[tuple[int, int], ...]
    is_statement: bool


def enumerate_mutants(source: str) -> list[Mutant]:
    """All mutants of a source, in its order."""
    return sorted(_Enumerator(source).mutants(), key=lambda mutant: (mutant.line, mutant.name))


class _Enumerator:
    def __init__(self, source: str) -> None:
        self.source = source
        self.code = _blank_comments(source)
        self.functions = list(self._functions())
        self.types = {f.name: f.type for f in self.functions} | _BUILTINS
        with_asm = [f for f in self.functions if "asm" in self._body(f)]
        self.primitives = {f.name: f for f in with_asm if _SYNCHRONIZES.search(self._body(f))}
        self.depths = dict(self._rings())

    def mutants(self) -> Iterator[Mutant]:
        for function in self.functions:
            if "asm" in self._body(function):
                continue
            places: dict[str, list[int]] = defaultdict(list)  # of each thing that is changed, in order
            for place, what, how, kind, edits in [*self._of_calls(function), *self._of_counts(function)]:
                if place not in places[what]:
                    places[what].append(place)
                name = f"{function.name}/{what}#{places[what].index(place) + 1}/{how}"
                line = self.source.count("\n", 0, place) + 1
                yield Mutant(name, kind, self._body(function), line, edits)

    # -- calls of primitives

    def _of_calls(self, function: Function) -> Iterator[Change]:
        for call in self._calls(function):
            dropped = self._dropped(call)
            if dropped is not None:
                yield Change(call.start, call.name, "dropped", "drop", (Edit(call.start, call.end, dropped),))
            if call.name in self.primitives:
                for kind, rules in (("scope", _SCOPE), ("order", _ORDER)):
                    for how, edits in self._weakened(call, rules):
                        yield Change(call.start, call.name, how, kind, edits)
            for how, edits in self._miscounted(call):
                yield Change(call.start, call.name, how, "count", edits)

    def _dropped(self, call: Call) -> str | None:
        """What stands for a call that is left out: as if a wait had succeeded, or an atomic had found 0."""
        kind = self.types[call.name]
        if call.is_statement or kind == "void":
            return "((void)0)"
        if kind == "bool":
            return "true"
        return "0u" if re.search("add|Add|Or", call.name) else None

    def _weakened(
        self, call: Call, rules: tuple[tuple[str, str, str], ...]
    ) -> Iterator[tuple[str, tuple[Edit, ...]]]:
        """Copies of the primitive's definition with weaker PTX, called here instead."""
        primitive = self.primitives[call.name]
        definition = self.source[primitive.start : primitive.close + 1]
        for how, pattern, replacement in rules:
            weaker = re.sub(pattern, replacement, definition)
            weaker = re.sub(r"arrive\.~((?:expect_tx\.)?)", r"arrive.\1relaxed.cta.", weaker)
            if weaker != definition:
                copy = re.sub(rf"\b{call.name}\(", f"{call.name}_mutant(", weaker, count=1)
                name_end = call.start + len(call.name)
                yield (
                    how,
                    (
                        Edit(primitive.close + 1, primitive.close + 1, f"\n{copy}"),
                        Edit(call.start, name_end, f"{call.name}_mutant"),
                    ),
                )

    def _miscounted(self, call: Call) -> Iterator[tuple[str, tuple[Edit, ...]]]:
        """Wait counts: of arrivals, threads, bytes, values and groups."""
        place, step = {
            "mbarrier_init": (1, 1),
            "named_barrier": (1, 32),
            "mbarrier_arrive_expect_bytes": (1, 16),
            "wait_for_value": (2, 1),
            "wait_for_rank": (2, 1),
            "wait_for_all_ranks": (1, 1),
            "release_to_all_ranks": (1, 1),
        }.get(call.name, (0, 0))
        if step:
            start, end = call.arguments[place]
            for sign in "+-":
                edit = Edit(start, end, f" ({self.source[start:end].strip()}) {sign} {step}")
                yield f"count {sign}{step}", (edit,)
        if call.name == "wgmma_wait":
            found = re.compile(r"<(\d+)>").search(self.source, call.start)
            assert found is not None
            for by in (1, -1):
                if int(found[1]) + by >= 0:
                    yield f"count {by:+d}", (Edit(*found.span(), f"<{int(found[1]) + by}>"),)

    # -- stage indices, parities and tests for the last arrival

    def _of_counts(self, function: Function) -> Iterator[Change]:
        patterns = (
            (r"\b(?:\w+\.)*(\w+)\.index\b", "(({0} + 1) % {depth})", "+1"),
            (r"\b(?:\w+\.)*\w+\.parity\b(?! \^=)", "({0} ^ 1)", "flipped"),
            (r"\+\+index == depth\b", "++index == depth - 1", "-1"),
            (r"\bindex = 0;", "index = 1;", "+1"),
            (r"\bparity \^= 1\b", "parity ^= 0", "not flipped"),
            (r"\(?\btransfers(?: - 1\))?(?: / 2)? % 2", "({0} ^ 1)", "+1"),
            (r"\bbuffer \^ 1\b", "buffer", "-1"),
            (r"\blaunch & 1\b", "(launch + 1) & 1", "+1"),
            (r"== [\w.]+ - 1\b", "{0} - 1", "-1"),
            (r"== [\w.]+ - 1\b", "{0} + 1", "+1"),
            (r"\[LAUNCH_NUMBER\] & 1\b", "[LAUNCH_NUMBER] & 1 ^ 1", "+1"),
        )
        for pattern, replacement, how in patterns:
            for found in re.compile(pattern).finditer(self.code, function.open, function.close):
                variable = found[1] if found.re.groups else ""
                if ".index" in found[0] and variable not in self.depths:
                    continue
                text = replacement.format(found[0], depth=self.depths.get(variable))
                yield Change(found.start(), found[0], how, "count", (Edit(*found.span(), text),))

    # -- the source's structure

    def _rings(self) -> Iterator[tuple[str, str]]:
        """(name of a variable or member, depth) of each position in a ring."""
        depths = dict(re.findall(r"using (\w+) = RingPosition<(\w+)>;", self.code))
        for alias, depth, variable in re.findall(
            r"\b(?:(\w+)|RingPosition<(\w+)>)&? (\w+)(?=[;,)=]| =)", self.code
        ):
            if depth or alias in depths:
                yield variable, depth or depths[alias]

    def _functions(self) -> Iterator[Function]:
        for found in _DEFINITION.finditer(self.code):
            name = found["name"] or found["entry"]
            opened = self.code.index("{", _closing(self.code, self.code.index("(", found.end() - 1)))
            start = found.start()
            template = re.compile(r"template <[^\n]*>\n$").search(self.code[:start])
            yield Function(
                name,
                (found["type"] or "void").strip(),
                template.start() if template else start,
                opened,
                _closing(self.code, opened),
            )

    def _body(self, function: Function) -> str:
        return self.source[function.open : function.close + 1]

    def _calls(self, function: Function) -> Iterator[Call]:
        names = [*self.primitives, *_BUILTINS, *filter(_COMPOSITES.fullmatch, self.types)]
        names += [name for name in ("mbarrier_init", "release_to_all_ranks") if name in self.types]
        pattern = re.compile(rf"\b({'|'.join(sorted(set(names)))})(<\w+>)?\(")
        for found in pattern.finditer(self.code, function.open, function.close):
            opened = found.end() - 1
            end = _closing(self.code, opened) + 1
            before, after = self.code[: found.start()].rstrip(), self.code[end:].lstrip()
            is_statement = after.startswith(";") and before[-1] in ";{})"
            arguments = tuple(_arguments(self.code, opened, end - 1))
            yield Call(found[1], found.start(), end, arguments, is_statement)


def _blank_comments(source: str) -> str:
    """The same places, without the text of comments and string literals."""
    return re.sub(r'//[^\n]*|"[^"\n]*"', lambda m: m[0] if m[0] == '"C"' else " " * len(m[0]), source)


def _closing(text: str, opened: int) -> int:
    """Place of the bracket that closes the one at ``opened``."""
    pairs = {"(": ")", "{": "}", "[": "]"}
    depth = 0
    for place in range(opened, len(text)):
        if text[place] == text[opened]:
            depth += 1
        elif text[place] == pairs[text[opened]]:
            depth -= 1
            if depth == 0:
                return place
    raise ValueError(f"no bracket closes the one at {opened}")


def _arguments(text: str, opened: int, closed: int) -> Iterator[tuple[int, int]]:
    start, depth = opened + 1, 0
    for place in range(opened + 1, closed):
        depth += text[place] in "([{"
        depth -= text[place] in ")]}"
        if text[place] == "," and depth == 0:
            yield start, place
            start = place + 1
    yield start, closed
