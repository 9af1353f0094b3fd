"""Compiles the Blackwell kernels of every preset, tile and target, and records what ptxas made of them.

    python scripts/compile_sweep.py --out docs/results/compile-sm100.json

A kernel is clean if it neither spills nor uses stack, if ptxas has no note on it, if no warp uses a register
beyond those that ``setmaxnreg`` leaves it, and if it has the MMAs and copies of scale factors that its plan
says. Needs nvdisasm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megagen import compiler
from megagen.arch import Arch
from megagen.contract import Contract
from megagen.errors import ShapeError
from megagen.files import write_atomically
from megagen.inspection.sass import disassemble
from megagen.planning import make_plan
from megagen.planning.sm100 import ARCHS, FORMAT, LADDER, MANY_EXPERTS, Sm100Plan
from megagen.render import render
from megagen.shape import PRESETS, MoEShape

RANKS = (8, 2)
"""The first if experts divide among them; the second too, if a rank's many experts take other registers."""
MAX_TOKENS = 4096

_NOTE = re.compile(r"\((C\d+)\)")
_LABEL = re.compile(r"([.$\w]+):")
_INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<opcode>[A-Z]\w*)(?P<operands>[^;]*)"
)
_TARGET = re.compile(r"`\((?!.*guardrail_trap)([^)]+)\)")  # those are checks that end the kernel
_BUDGET = re.compile(r"0x([0-9a-f]+) *$")
_LEAVES = ("BRA", "EXIT", "RET", "BPT")
"""Opcodes after which the next instruction is not executed, unless they are predicated."""


@dataclass(frozen=True)
class Instruction:
    """One of a disassembly.

    Attributes:
        opcode: without suffixes.
        conditional: whether the next one may be executed after it, if it is a branch.
        registers: one more than the highest that is live.
    """

    labels: tuple[str, ...]
    opcode: str
    operands: str
    conditional: bool
    registers: int


@dataclass(frozen=True)
class Row:
    """One compiled kernel.

    Attributes:
        registers: per thread at the launch.
        registers_used: by what ``setmaxnreg`` leaves a thread, how many of them it uses.
        notes: numbers of ptxas's notes.
        mmas, sf_copies: block-scaled MMAs and copies of scale factors to tensor memory, in the machine code.
        seconds: of CPU, to render and compile.
        problems: why the kernel is not clean.
    """

    preset: str
    ranks: int
    target: str
    block_m: int
    kernel: str
    stages: int
    shared_bytes: int
    tmem_columns: int
    registers: int
    registers_used: Mapping[int, int]
    stack: int
    spill_stores: int
    spill_loads: int
    notes: tuple[str, ...]
    instructions: int
    mmas: int
    sf_copies: int
    seconds: float
    problems: tuple[str, ...]


def registers_used(code: Sequence[Instruction]) -> dict[int, int]:
    """By each count that ``setmaxnreg`` sets, how many registers the code uses that may run under it."""
    places = {label: place for place, instruction in enumerate(code) for label in instruction.labels}
    used: dict[int, int] = {}
    for place, instruction in enumerate(code):
        if instruction.opcode == "USETMAXREG" and (count := _BUDGET.search(instruction.operands)):
            budget = int(count[1], 16)
            reached = _reachable(code, places, place + 1)
            # At a call, the life ranges have all that a callee might touch.
            counts = [code[i].registers for i in reached if code[i].opcode != "CALL"]
            used[budget] = max(used.get(budget, 0), *counts)
    return used


def _reachable(code: Sequence[Instruction], places: Mapping[str, int], start: int) -> set[int]:
    """What may be executed from `start` on, up to the next ``setmaxnreg``."""
    found: set[int] = set()
    ahead = [start]
    while ahead:
        place = ahead.pop()
        if place in found or code[place].opcode == "USETMAXREG":
            continue
        found.add(place)
        instruction = code[place]
        if instruction.opcode != "RET":  # it names the function that it returns to
            ahead += [places[label] for label in _TARGET.findall(instruction.operands)]
        if instruction.conditional or instruction.opcode not in _LEAVES:
            ahead.append(place + 1)
    return found


def machine_code(cubin: bytes) -> list[Instruction]:
    """A kernel's instructions, in the order of their addresses."""
    return list(_instructions(disassemble(cubin, "-plr")))


def _instructions(disassembly: str) -> Iterator[Instruction]:
    labels: list[str] = []
    columns: dict[int, int] = {}  # of the life ranges: place in the line -> register
    for line in disassembly.splitlines():
        text, _, ranges = line.partition("//")
        if header := re.match(r" \|\s+#[ \d]+", ranges):
            columns = {found.end() - 1: int(found[0]) for found in re.finditer(r"\d+", header[0])}
        if label := _LABEL.match(text):
            labels.append(label[1])
        elif found := _INSTRUCTION.search(text):
            operands = found["operands"]
            branches_on = re.match(r"[.\w]* *!?U?P\d", operands) if found["opcode"] == "BRA" else None
            live = (register for place, register in columns.items() if ranges[place : place + 1].strip())
            yield Instruction(
                tuple(labels),
                found["opcode"],
                operands,
                found["predicate"] is not None or branches_on is not None,
                max(live, default=-1) + 1,
            )
            labels.clear()


def contracts_of(preset: str) -> list[Contract]:
    """Those of a preset that differ in more than constants."""
    shapes = {ranks: MoEShape.preset(preset, ranks) for ranks in RANKS}
    found = [
        Contract(shape, ranks, MAX_TOKENS, FORMAT)
        for ranks, shape in shapes.items()
        if shape.experts % ranks == 0
    ]
    return [*found[:1], *(contract for contract in found[1:] if contract.local_experts > MANY_EXPERTS)]


def examine(preset: str, plan: Sm100Plan) -> Row:
    """Compile a plan's kernel and look at the result."""
    start = time.process_time()
    target = Arch.get(plan.arch).compile_target
    kernel = compiler.compile(render(plan), target, name=f"{plan.name}.cu", strict=False)
    seconds = time.process_time() - start
    code = machine_code(kernel.cubin)
    mmas, copies = (sum(i.opcode == opcode for i in code) for opcode in ("UTCQMMA", "UTCCP"))
    used, notes = registers_used(code), tuple(_NOTE.findall(kernel.log))
    problems = [*kernel.problems(), *(f"note {note}" for note in notes)]
    if set(used) != {role.registers for role in plan.roles}:
        problems.append(f"setmaxnreg sets {sorted(used)}")
    problems += [f"{count} registers of {budget}" for budget, count in used.items() if count > budget]
    bodies, odd = divmod(mmas, plan.mmas_per_stage)  # ptxas may unroll the loop over K blocks
    if odd or not bodies or copies != bodies * (1 + plan.sf_atoms):
        problems.append(f"{mmas} MMAs, {copies} copies of scale factors")
    return Row(
        preset=preset,
        ranks=plan.contract.ranks,
        target=target,
        block_m=plan.block_m,
        kernel=plan.name,
        stages=plan.stages,
        shared_bytes=plan.smem.size,
        tmem_columns=plan.tmem_columns,
        registers=kernel.registers,
        registers_used=dict(sorted(used.items())),
        stack=kernel.stack,
        spill_stores=kernel.spill_stores,
        spill_loads=kernel.spill_loads,
        notes=notes,
        instructions=len(code),
        mmas=mmas,
        sf_copies=copies,
        seconds=round(seconds, 2),
        problems=tuple(problems),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON record")
    args = parser.parse_args()
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for preset in PRESETS:
        try:
            contracts = contracts_of(preset)
        except ShapeError as error:
            refused[preset] = str(error)
            continue
        for contract, arch, block_m in itertools.product(contracts, ARCHS, LADDER):
            row = examine(preset, make_plan(contract, arch, block_m=block_m))
            print(row.target, row.kernel, row.seconds, *row.problems, file=sys.stderr, flush=True)
            rows.append(row)
    unclean = sum(bool(row.problems) for row in rows)
    print(f"{len(rows)} kernels, {unclean} unclean; no kernel for {', '.join(refused)}")
    if args.out:
        record = {
            "schema_version": 1,
            "nvrtc": compiler.nvrtc_version(),
            "refused": refused,
            "kernels": [asdict(row) for row in rows],
        }
        write_atomically(args.out, json.dumps(record, indent=1).encode())
    raise SystemExit(bool(unclean))


if __name__ == "__main__":
    main()
