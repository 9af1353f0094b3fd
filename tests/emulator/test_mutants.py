"""That the emulator finds bugs: a sample of the mutants of ``scripts/mutants.py``, and its report."""

import json
from pathlib import Path

import pytest

from scripts import mutants
from scripts.mutants import (
    CAUGHT,
    EQUIVALENT,
    NO_BUILD,
    SCENARIOS,
    SURVIVED,
    Bench,
    argument_for,
    read_claims,
)
from scripts.mutation import enumerate_mutants

REPORT = Path(__file__).parents[2] / "docs" / "results" / "mutants-sm90.json"
SAMPLE = 12
PRIMITIVES = """
DEVICE u32 load_acquire_sys(const u32* pointer) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}
DEVICE void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
DEVICE bool mbarrier_try_wait(u32 barrier, u32 parity) {
    asm volatile("mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;" ::: "memory");
}
"""


def mutated(body: str) -> dict[str, str]:
    """Of a function ``role`` with this body: the last line of each mutant's source, by name."""
    source = f"{PRIMITIVES}\nDEVICE void role(RingPosition<STAGES>& stage) {{\n{body}\n}}\n"
    return {m.name.removeprefix("role/"): m.apply(source).splitlines()[-2] for m in enumerate_mutants(source)}


def test_a_statement_is_dropped_and_weakened() -> None:
    assert mutated("mbarrier_arrive(bar);  // mbarrier_arrive(no)") == {
        "mbarrier_arrive#1/dropped": "((void)0);  // mbarrier_arrive(no)",
        "mbarrier_arrive#1/release to relaxed": "mbarrier_arrive_mutant(bar);  // mbarrier_arrive(no)",
    }


def test_a_wait_succeeds_and_its_stage_is_another() -> None:
    assert mutated("while (!mbarrier_try_wait(b + stage.index, stage.parity)) {}") == {
        "mbarrier_try_wait#1/acquire to relaxed": (
            "while (!mbarrier_try_wait_mutant(b + stage.index, stage.parity)) {}"
        ),
        "mbarrier_try_wait#1/dropped": "while (!true) {}",
        "stage.index#1/+1": "while (!mbarrier_try_wait(b + ((stage.index + 1) % STAGES), stage.parity)) {}",
        "stage.parity#1/flipped": "while (!mbarrier_try_wait(b + stage.index, (stage.parity ^ 1))) {}",
    }


def test_a_load_is_not_dropped_and_weaker_copies_are_weaker() -> None:
    assert set(mutated("x = load_acquire_sys(flag);")) == {
        "load_acquire_sys#1/acquire to relaxed",
        "load_acquire_sys#1/scope sys to gpu",
    }
    source = f"{PRIMITIVES}\nDEVICE void role() {{\nx = load_acquire_sys(flag);\n}}\n"
    texts = [mutant.apply(source) for mutant in enumerate_mutants(source)]
    assert ["ld.relaxed.sys" in text for text in texts] == [
        "relaxed" in m.name for m in enumerate_mutants(source)
    ]
    assert all("DEVICE u32 load_acquire_sys_mutant(const u32* pointer)" in text for text in texts)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(mutants.variants()[0], SCENARIOS[:6])


def test_a_sample_is_caught(bench: Bench) -> None:
    claims = read_claims()
    report = json.loads(REPORT.read_text())["mutants"]
    here = [
        row for row in report if row["variant"] == bench.variant.name and row["scenario"] in bench.expected
    ]
    known = {row["name"] for row in here if row["heap"] == CAUGHT}
    candidates = [
        mutant
        for mutant in enumerate_mutants(bench.source)
        if mutant.name in known and argument_for(mutant.name, claims) is None
    ]
    sample = candidates[:: max(1, len(candidates) // SAMPLE)]
    assert len(sample) >= SAMPLE
    outcomes = [bench.hunt(mutant) for mutant in sample]
    assert {outcome.heap for outcome in outcomes} == {CAUGHT}, [o for o in outcomes if o.heap != CAUGHT]


def test_every_kind_of_mutant_exists(bench: Bench) -> None:
    assert {mutant.kind for mutant in enumerate_mutants(bench.source)} == {"drop", "scope", "order", "count"}


def test_the_report_keeps_its_limits() -> None:
    rows = json.loads(REPORT.read_text())["mutants"]
    count = {
        heap: sum(row["heap"] == heap for row in rows) for heap in (NO_BUILD, EQUIVALENT, CAUGHT, SURVIVED)
    }
    assert count[NO_BUILD] < 0.02 * len(rows)
    assert count[EQUIVALENT] <= 0.10 * len(rows)
    assert count[CAUGHT] >= 0.95 * (count[CAUGHT] + count[SURVIVED])
    assert all(row["by"] not in ("", "StepLimit") for row in rows if row["heap"] == CAUGHT)


def test_each_claim_has_an_argument_and_is_needed() -> None:
    rows = json.loads(REPORT.read_text())["mutants"]
    for pattern, argument in read_claims().items():
        assert len(argument.split()) >= 8, pattern
        assert any(
            argument_for(row["name"], {pattern: argument}) for row in rows if row["heap"] == EQUIVALENT
        ), pattern
