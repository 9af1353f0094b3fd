"""Whether the emulator finds bugs: runs mutants of the real kernels and reports which of them it catches.

    python scripts/mutants.py --out docs/results/mutants-sm90.json

Mutants fall into three heaps: those that don't compile, those claimed equivalent (with an argument each, in
``equivalent_mutants.toml``), and the others, which must be caught by a named error of the emulator or a wrong
result. Reaching a step limit is no catch. The unmutated kernels must pass every run without a report.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from cuda.bindings import nvrtc

from megagen.arch import Arch
from megagen.contract import Contract
from megagen.emulator.cases import Case, expert_weights, judge, run
from megagen.emulator.layer import EmulatedLayer, Kernel
from megagen.errors import CompileError, EmulatorError, StepLimit, UnsupportedInstruction
from megagen.files import write_atomically
from megagen.planning import KernelPlan, make_plan
from megagen.planning.planner import default_format
from megagen.protocol import STATUS_FIELDS
from megagen.render import ENTRY, render
from megagen.shape import MoEShape

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.mutation import Mutant, enumerate_mutants

CLAIMS = Path(__file__).with_name("equivalent_mutants.toml")
SHAPE = MoEShape(hidden=384, intermediate=256, experts=4, top_k=4)
RANKS, MAX_TOKENS = 2, 72
WITH_CODE = [f.name for f in STATUS_FIELDS if f.name not in ("aborted_by", "dropped_ids", "stuck")]
"""Fields of a status block that are written before its code, and the code."""

STEPS = 8  # times those of the unmutated kernel: a run that takes longer is stopped

NO_BUILD, CAUGHT, EQUIVALENT, SURVIVED = "does not compile", "caught", "claimed equivalent", "survived"


BYSTANDERS = r"""
// What a host does with a status block: it waits for the code, then reads the rest.
extern "C" __global__ void read_status(const unsigned* status, unsigned* copy, unsigned words) {
    unsigned code;
    do {
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(code) : "l"(status) : "memory");
    } while (code == 0);
    for (unsigned i = 0; i < words; ++i) copy[i] = status[i];
}

// What a peer does that fails in the middle of a launch.
extern "C" __global__ void abort_launch(unsigned* first, unsigned* second, unsigned delay, unsigned who) {
    for (unsigned i = 0; i < delay; ++i) asm volatile("" ::: "memory");
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(first), "r"(who) : "memory");
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(second), "r"(who) : "memory");
}
"""


@dataclass(frozen=True)
class Scenario:
    """A way to run a kernel; `sms` counts clusters.

    Attributes:
        refuses: a rank whose device count is above its tokens, so that its kernel stops the launch.
        absent: a rank that does not call, so that the others' waits time out.
        aborted_after: steps after which a peer outside stops the launch.
    """

    name: str
    tokens: tuple[int, int]
    sms: tuple[int, int]
    seed: int
    launches: int = 1
    routing: str = "uniform"
    refuses: int | None = None
    absent: int | None = None
    aborted_after: int | None = None

    @property
    def reporter(self) -> int | None:
        """The rank whose status block tells of a failure."""
        return self.refuses if self.absent is None else 1 - self.absent

    @property
    def fails(self) -> bool:
        return self.reporter is not None or self.aborted_after is not None


ABORTS = (300, 3000, 5000, 8000)
SCENARIOS = (
    Scenario("a rank refuses", (5, 4), (1, 1), 3, refuses=1),
    Scenario("a rank is absent", (5, 4), (1, 1), 5, absent=1),
    Scenario("a few tokens", (9, 6), (1, 1), 0),
    Scenario("many rows", (24, 23), (2, 2), 2, routing="first-experts"),
    Scenario("three launches", (17, 12), (2, 1), 1, launches=3),
    Scenario("many routes", (70, 66), (2, 2), 6, routing="out-of-range"),
    Scenario("a rank refuses, several SMs", (9, 14), (3, 2), 4, refuses=0),
    *(Scenario(f"aborted after {n} steps", (9, 14), (2, 2), n, aborted_after=n) for n in ABORTS),
    Scenario("aborted while math waits for a tile", (24, 20), (2, 2), 1, aborted_after=6000),
    Scenario("a rank is ahead", (40, 0), (1, 1), 0, launches=3, routing="one-expert"),
    Scenario("surplus rows", (70, 66), (1, 1), 1, routing="one-expert"),
    Scenario("repeated ids", (3, 24), (3, 2), 7, launches=2, routing="repeated"),
    *(Scenario(f"seed {seed}", (24, 11), (2, 3), seed) for seed in range(8, 12)),
)


@dataclass(frozen=True)
class Variant:
    """A kernel whose mutants are made."""

    name: str
    plan: KernelPlan


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: its heap, and the error or wrong result that caught it."""

    name: str
    variant: str
    kind: str
    line: int
    heap: str
    by: str = ""
    scenario: str = ""
    message: str = ""


def variants(arch: str = "sm90") -> tuple[Variant, ...]:
    """Small and large tiles (on Hopper: tokens on N, on M, on both); loaders that run far ahead, or can't;
    one SM publishing, or all."""
    contract = Contract(SHAPE, RANKS, MAX_TOKENS, default_format(arch))
    small, large = (make_plan(contract, arch, MAX_TOKENS, sms=2, block_m=tile) for tile in (16, 128))
    names = ("tokens on N", "tokens on M") if arch == "sm90" else ("16 rows", "128 rows")
    found = (
        Variant(names[0], replace(small, pull_bytes=128)),
        Variant(names[1], replace(large, pull_bytes=128, stages=2, lone_publisher_routes=0)),
    )
    if arch != "sm90":
        return found
    return (*found, Variant("tokens on M and N", make_plan(contract, arch, MAX_TOKENS, sms=2, block_m=144)))


def compile_ptx(source: str, arch: str = "sm90") -> str:
    """PTX without a cubin: a third of the time."""
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"mutant.cu", 0, [], [])
    target = Arch.get(arch).compile_target.replace("sm_", "compute_")
    options = [f"--gpu-architecture={target}".encode(), b"--std=c++17", b"--generate-line-info"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    try:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(log.decode(errors="replace"))
        _, size = nvrtc.nvrtcGetPTXSize(program)
        ptx = bytearray(size)
        nvrtc.nvrtcGetPTX(program, ptx)
        return ptx.rstrip(b"\0").decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class Bench:
    """Runs of a variant, and what the unmutated kernel does in them.

    Attributes:
        source: the unmutated kernel's.
        expected: by scenario, the status blocks that it leaves.
    """

    def __init__(self, variant: Variant, scenarios: Sequence[Scenario] = SCENARIOS) -> None:
        self.variant, self.scenarios = variant, scenarios
        self.source = render(variant.plan)
        self.expected: dict[str, list[dict[str, int]]] = {}
        self._steps: dict[str, int] = {}
        self._bystanders = compile_ptx(BYSTANDERS, variant.plan.arch)
        kernel = self.kernel(self.source)
        for scenario in scenarios:
            problem, layer, status = self._run(kernel, scenario, 0)
            if problem is not None:
                raise SystemExit(f"the unmutated kernel, {variant.name}, {scenario.name}: {problem}")
            self._steps[scenario.name] = layer.machine.report().instructions
            self.expected[scenario.name] = status

    def kernel(self, source: str) -> Kernel:
        return Kernel(self.variant.plan, source, compile_ptx(source, self.variant.plan.arch), ENTRY)

    def hunt(self, mutant: Mutant) -> Outcome:
        """Run the scenarios until one catches the mutant."""
        return hunt([(self, mutant)])

    def attempt(self, kernel: Kernel, scenario: Scenario) -> tuple[str, str]:
        """(what caught a kernel in a scenario, the message); the first is empty if nothing did."""
        try:
            problem, _, status = self._run(kernel, scenario, STEPS * self._steps[scenario.name])
        except UnsupportedInstruction as error:
            raise CompileError(str(error)) from error
        except StepLimit:
            return "", f"step limit in {scenario.name!r}"
        except EmulatorError as error:
            return type(error).__name__, str(error)[:600]
        if problem is None and status != self.expected[scenario.name]:
            problem = f"status {status} instead of {self.expected[scenario.name]}"
        return ("", "") if problem is None else ("wrong result", problem[:600])

    def _run(
        self, kernel: Kernel, scenario: Scenario, steps: int
    ) -> tuple[str | None, EmulatedLayer, list[dict[str, int]]]:
        """What is wrong, the layer, and the ranks' status blocks."""
        case = Case(
            (self.variant.plan,) * RANKS,
            tuple(sms * self.variant.plan.cluster for sms in scenario.sms),
            scenario.tokens,
            scenario.routing,
            scenario.seed,
            launches=scenario.launches,
        )
        layer = EmulatedLayer(
            case.contract,
            (kernel,) * RANKS,
            case.sms,
            expert_weights(SHAPE, case.contract.format),
            bystanders=int(scenario.fails),
            seed=case.seed,
            max_steps=steps,
            watchdog=scenario.absent is not None or scenario.aborted_after is not None,
        )
        if scenario.fails:
            return self._run_to_fail(case, layer, scenario)
        results = run(case, layer)
        verdict = judge(case, results, 0)
        return "; ".join(verdict.wrong) or None, layer, results[-1].status

    def _run_to_fail(
        self, case: Case, layer: EmulatedLayer, scenario: Scenario
    ) -> tuple[str | None, EmulatedLayer, list[dict[str, int]]]:
        machine = layer.machine
        module = machine.load(self._bystanders, BYSTANDERS)
        copy = machine.alloc(RANKS, len(WITH_CODE), np.uint32)
        if scenario.reporter is not None:
            arguments = [[layer.status[scenario.reporter], copy, len(WITH_CODE)]]
            machine.launch(module, "read_status", 1, 1, args=arguments, ranks=[RANKS])
        else:
            assert scenario.aborted_after is not None
            controls = [buffer.ptr + case.contract.symm["control"].offset for buffer in layer.symm]
            arguments = [[*controls, scenario.aborted_after, RANKS + 1]]
            machine.launch(module, "abort_launch", 1, 1, args=arguments, ranks=[RANKS])
        inputs = [None if rank == scenario.absent else own for rank, own in enumerate(case.inputs())]
        counts = {} if scenario.refuses is None else {scenario.refuses: MAX_TOKENS + 1}
        status = layer.call(inputs, device_counts=counts, may_fail=True).status
        if scenario.reporter is None:
            return None, layer, []  # how far the ranks came, and so what they report, is a matter of luck
        reported = status[scenario.reporter]
        seen = zip(WITH_CODE, copy.view.tolist())
        differ = [name for name, value in seen if value != reported[name]]
        # Which of a rank's SMs reports first is a matter of luck.
        return f"the host saw other {differ}" if differ else None, layer, [{**s, "sm": 0} for s in status]


def all_mutants(benches: Sequence[Bench]) -> list[list[tuple[Bench, Mutant]]]:
    """Each mutant, in all the kernels that have it."""
    found: dict[tuple[str, str], list[tuple[Bench, Mutant]]] = {}
    for bench in benches:
        for mutant in enumerate_mutants(bench.source):
            found.setdefault((mutant.name, mutant.body), []).append((bench, mutant))
    return list(found.values())


def hunt(places: Sequence[tuple[Bench, Mutant]]) -> Outcome:
    """Run a mutant, in each kernel that has it, through the scenarios until one catches it."""
    bench, mutant = places[0]
    outcome = Outcome(mutant.name, bench.variant.name, mutant.kind, mutant.line, SURVIVED)
    try:
        kernels = [(bench, bench.kernel(mutant.apply(bench.source))) for bench, mutant in places]
        for scenario in bench.scenarios:
            for bench, kernel in kernels:
                by, message = bench.attempt(kernel, scenario)
                outcome = replace(outcome, message=message or outcome.message)
                if by:
                    variant = bench.variant.name
                    return replace(outcome, variant=variant, heap=CAUGHT, by=by, scenario=scenario.name)
    except CompileError as error:
        return replace(outcome, heap=NO_BUILD, message=_first_line(str(error)))
    return outcome


def read_claims(arch: str) -> dict[str, str]:
    """Argument of each mutant claimed equivalent; names are those of ``Mutant``, or patterns of them."""
    claims = tomllib.loads(CLAIMS.read_text())["claim"]
    return {
        name: " ".join(claim["argument"].split())
        for claim in claims
        if claim.get("arch", arch) == arch
        for name in claim["mutants"]
    }


def argument_for(name: str, claims: dict[str, str]) -> str | None:
    """The argument that a mutant is equivalent, if it is claimed."""
    return next((text for pattern, text in claims.items() if fnmatch.fnmatchcase(name, pattern)), None)


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Counts of the heaps, and of what caught the mutants."""
    heaps = Counter(outcome.heap for outcome in outcomes)
    others = heaps[CAUGHT] + heaps[SURVIVED]
    return {
        "mutants": len(outcomes),
        **{heap: heaps[heap] for heap in (NO_BUILD, EQUIVALENT, CAUGHT, SURVIVED)},
        "does not compile, share": round(heaps[NO_BUILD] / max(1, len(outcomes)), 4),
        "claimed equivalent, share": round(heaps[EQUIVALENT] / max(1, len(outcomes)), 4),
        "caught of the others, share": round(heaps[CAUGHT] / max(1, others), 4),
        "caught by": dict(Counter(outcome.by for outcome in outcomes if outcome.by).most_common()),
    }


def markdown(outcomes: Sequence[Outcome], claims: dict[str, str], arch: str) -> str:
    """The tables of a report."""
    lines = [f"# Mutants of the {arch} kernels", "", "| | |", "| --- | ---: |"]
    for name, value in summary(outcomes).items():
        if isinstance(value, dict):
            lines += [f"| caught by {by} | {count} |" for by, count in value.items()]
        else:
            lines.append(f"| {name} | {value} |")
    for heap in (SURVIVED, EQUIVALENT, NO_BUILD):
        members = [outcome for outcome in outcomes if outcome.heap == heap]
        if members:
            lines += ["", f"## {heap.capitalize()}", ""]
            lines += [f"* `{o.name}`: {argument_for(o.name, claims) or o.message}" for o in members]
    return "\n".join(lines) + "\n"


def sources_of(benches: Sequence[Bench]) -> dict[str, str]:
    """Digest of each variant's source."""
    return {bench.variant.name: hashlib.sha256(bench.source.encode()).hexdigest() for bench in benches}


def read_report(path: Path, sources: dict[str, str]) -> dict[tuple[str, int], Outcome]:
    """What an earlier run found, by name and line; none of it may be of other kernels."""
    record = json.loads(path.read_text()) if path.exists() else {"sources": sources, "mutants": []}
    if record.get("sources") != sources:
        raise SystemExit(f"{path} is of other kernels; run without --resume")
    return {(row["name"], row["line"]): Outcome(**row) for row in record["mutants"]}


def with_claim(outcome: Outcome, claims: dict[str, str]) -> Outcome:
    """A mutant that nothing has caught counts as claimed if it is; a wrong claim is told of."""
    claimed = argument_for(outcome.name, claims) is not None
    if outcome.heap in (SURVIVED, EQUIVALENT):
        return replace(outcome, heap=EQUIVALENT if claimed else SURVIVED)
    if claimed:
        print(f"WRONG CLAIM: {outcome.name} is {outcome.heap}", file=sys.stderr)
    return outcome


def write_report(
    out: Path, outcomes: Sequence[Outcome], claims: dict[str, str], arch: str, sources: dict[str, str]
) -> None:
    """The JSON record, and the Markdown tables beside it."""
    record = {
        "schema_version": 1,
        "sources": sources,
        "summary": summary(outcomes),
        "mutants": [asdict(outcome) for outcome in outcomes],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(record, indent=1).encode())
    write_atomically(out.with_suffix(".md"), markdown(outcomes, claims, arch).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="JSON report, written as it grows; a Markdown table goes beside it"
    )
    parser.add_argument("--arch", default="sm90", help="whose kernels")
    parser.add_argument("--only", default="*", help="pattern of names")
    parser.add_argument("--resume", action="store_true", help="keep what --out has of these kernels")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    args = parser.parse_args()
    if args.resume and not args.out:
        parser.error("--resume needs --out")
    torch.set_num_threads(1)  # references are small: more threads only wait for each other
    benches = [Bench(variant) for variant in variants(args.arch)]
    chosen = [places for places in all_mutants(benches) if fnmatch.fnmatchcase(places[0][1].name, args.only)]
    if args.list:
        print("\n".join(places[0][1].name for places in chosen))
        return
    claims, sources = read_claims(args.arch), sources_of(benches)
    known = read_report(args.out, sources) if args.resume else {}
    outcomes: list[Outcome] = []
    start = time.monotonic()
    for places in chosen:
        mutant = places[0][1]
        outcome = with_claim(known.get((mutant.name, mutant.line)) or hunt(places), claims)
        outcomes.append(outcome)
        place = f"{len(outcomes)}/{len(chosen)} {time.monotonic() - start:6.1f} s"
        print(place, outcome.heap, outcome.name, outcome.by, outcome.scenario, file=sys.stderr, flush=True)
        if args.out:  # after each, so that a run that is stopped can be resumed
            write_report(args.out, outcomes, claims, args.arch, sources)
    print(json.dumps(summary(outcomes), indent=1))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""


if __name__ == "__main__":
    main()
