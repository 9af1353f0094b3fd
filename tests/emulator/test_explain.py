"""What the emulator says of a layer that hangs or races: names, not numbers."""

import re
from collections.abc import Callable

import pytest

from megagen import compiler
from megagen.contract import Contract
from megagen.emulator.cases import Case, prepare, run
from megagen.emulator.explain import Words, explain
from megagen.emulator.layer import Kernel
from megagen.errors import DataRace, Deadlock, EmulatorError
from megagen.planning import make_plan
from megagen.shape import MoEShape

CONTRACT = Contract(MoEShape.preset("micro"), 2, 16)
PLAN = make_plan(CONTRACT, tokens=16, sms=2, block_m=32)


@pytest.fixture(scope="module")
def broken() -> Callable[[str, str], str]:
    """The message of the layer's kernel with a piece of its source exchanged."""

    def message(old: str, new: str, error: type[EmulatorError]) -> str:
        intact = Kernel.of(PLAN)
        assert intact.source.count(old) == 1, intact.source.count(old)
        source = intact.source.replace(old, new)
        compiled = compiler.compile(source, "sm_90a", name="broken.cu", strict=False)
        case = Case((PLAN, PLAN), (2, 2), (16, 9))
        layer = prepare(case, [Kernel(PLAN, source, compiled.ptx, compiled.entry)] * 2)
        with pytest.raises(error) as caught:
            run(case, layer)
        return str(caught.value)

    return message


def test_a_missing_arrival_names_its_barrier_and_who_waits(broken: Callable[..., str]) -> None:
    text = broken("mbarrier_arrive(smem + SMEM_ORDER_EMPTY + offset);", "", Deadlock)
    waiting = next(line for line in text.splitlines() if "mbarrier order_empty[" in line)
    assert re.search(r"rank \d SM \d .*warp \d+ \(load_weights\)", waiting)
    assert "wait_unless_left line" in waiting and "load_weights_role line" in waiting
    assert "pending 1 of 1 arrivals" in waiting


def test_an_output_that_never_comes_names_the_token(broken: Callable[..., str]) -> None:
    home = "map_to_rank(p, pending, static_cast<u32>(source >> 32))"
    text = broken(f"add_relaxed_sys(reinterpret_cast<u32*>({home}), ~0u);", "", Deadlock)
    assert re.search(r"pending\[\d+\] of rank [01]'s symmetric buffer = [12]", text)
    assert "combine line" in text


def test_a_race_names_both_sides(broken: Callable[..., str]) -> None:
    text = broken("    fence_acq_rel_sys();\n    for", "    for", DataRace)
    assert re.search(r"combine\[\d+\]\[\d+\]\[\d+\] of rank \d's symmetric buffer", text)
    assert "combine_unit line" in text and "l2_epilogue line" in text


def test_other_speakers_are_left_alone() -> None:
    words = Words(((PLAN, "", ""),) * 2, {})
    text = "rank 5 SM 0 warp 3 at PTX line 7 waits; buffer 9 of rank 5 (uint8[4]) + 3"
    assert explain(text, words) == "rank 5 SM 0 warp 3 at PTX line 7 waits; buffer 9 of rank 5 + 3"
