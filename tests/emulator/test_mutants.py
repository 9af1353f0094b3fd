"""That the emulator finds bugs: a sample of the mutants of ``scripts/mutants.py``, and its reports."""

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

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ARCHS = ("sm90", "sm100")
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


def rows_of(arch: str) -> list[dict[str, str]]:
    return json.loads((RESULTS / f"mutants-{arch}.json").read_text())["mutants"]


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


def test_rings_go_by_their_types_and_members_by_their_names() -> None:
    aliases = "using Stage = RingPosition<STAGES>;\nusing TileSlot = RingPosition<TILE_SLOTS>;\n"
    members = "struct Loader {\n    TileSlot slot;\n};\n"
    body = "f(stage.index, me.slot.index);\ng(me.slot.parity);\nh(other.index);"
    source = f"{aliases}{members}DEVICE void role(const Stage& stage, Loader& me) {{\n{body}\n}}\n"
    assert {
        m.name.removeprefix("role/"): m.apply(source).splitlines()[m.line - 1]
        for m in enumerate_mutants(source)
    } == {
        "stage.index#1/+1": "f(((stage.index + 1) % STAGES), me.slot.index);",
        "me.slot.index#1/+1": "f(stage.index, ((me.slot.index + 1) % TILE_SLOTS));",
        "me.slot.parity#1/flipped": "g((me.slot.parity ^ 1));",
    }


def test_the_kernel_function_has_mutants_of_its_whole_body() -> None:
    source = f"""{PRIMITIVES}
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    megamoe(const __grid_constant__ Params p) {{
    if (threadIdx.x == 0) {{
        mbarrier_arrive(first);
    }}
    mbarrier_arrive(second);
}}
"""
    dropped = [m.apply(source) for m in enumerate_mutants(source) if m.kind == "drop"]
    assert [("(first)" in text, "(second)" in text) for text in dropped] == [(False, True), (True, False)]


def test_cluster_scope_is_weakened_but_not_where_it_is_a_state_space() -> None:
    source = """
DEVICE void arrive(u32 mapped) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped));
}
DEVICE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void role() {
    arrive(mapped);
    cluster_barrier();
    fence_mbarrier_init();
}
"""
    weakened = {m.name: m.apply(source) for m in enumerate_mutants(source) if m.kind in ("scope", "order")}
    assert weakened.keys() == {
        "role/arrive#1/scope cluster to cta",
        "role/arrive#1/release to relaxed",
        "role/cluster_barrier#1/release to relaxed",
    }
    assert "arrive.release.cta.shared::cluster." in weakened["role/arrive#1/scope cluster to cta"]
    assert "barrier.cluster.arrive.relaxed;" in weakened["role/cluster_barrier#1/release to relaxed"]


@pytest.fixture(scope="module", params=ARCHS)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(mutants.variants(request.param)[0], SCENARIOS[:6])


def test_a_sample_is_caught(bench: Bench) -> None:
    claims = read_claims(bench.variant.plan.arch)
    here = [
        row
        for row in rows_of(bench.variant.plan.arch)
        if row["variant"] == bench.variant.name and row["scenario"] in bench.expected
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


@pytest.mark.parametrize("arch", ARCHS)
def test_the_report_keeps_its_limits(arch: str) -> None:
    rows = rows_of(arch)
    count = {
        heap: sum(row["heap"] == heap for row in rows) for heap in (NO_BUILD, EQUIVALENT, CAUGHT, SURVIVED)
    }
    assert count[NO_BUILD] < 0.02 * len(rows)
    assert count[EQUIVALENT] <= 0.10 * len(rows)
    assert count[CAUGHT] >= 0.95 * (count[CAUGHT] + count[SURVIVED])
    assert all(row["by"] not in ("", "StepLimit") for row in rows if row["heap"] == CAUGHT)


def test_each_claim_has_an_argument_and_is_needed() -> None:
    claims = {arch: read_claims(arch) for arch in ARCHS}
    needed = {
        pattern
        for arch in ARCHS
        for row in rows_of(arch)
        for pattern, argument in claims[arch].items()
        if row["heap"] == EQUIVALENT and argument_for(row["name"], {pattern: argument})
    }
    assert needed == {pattern for arch in ARCHS for pattern in claims[arch]}
    assert all(len(argument.split()) >= 8 for arch in ARCHS for argument in claims[arch].values())


def test_no_claim_is_of_a_mutant_that_is_caught() -> None:
    for arch in ARCHS:
        claims = read_claims(arch)
        caught = [row["name"] for row in rows_of(arch) if row["heap"] == CAUGHT]
        assert [name for name in caught if argument_for(name, claims)] == []
