"""Every instruction form that the emulator knows is tested, every form of a public kernel is run."""

import struct

import forms
import pytest
from hw import corpus
from test_warp import lanes

from megagen.emulator import supported_forms
from megagen.errors import Trap

TABLE = [pattern for pattern, _ in supported_forms()]

BLACKWELL = "an instruction of sm_100"
NO_RECORD = {
    "(.f32x2)": BLACKWELL,
    "(.f32)(.f16|.bf16)": BLACKWELL,
    "(.ue8m0x2)": BLACKWELL,
    "redux(.sync)(.min|.max)": BLACKWELL,
    "tcgen05": BLACKWELL,
    "st(.bulk)": BLACKWELL,
    "trap": "ends the kernel",
    "brkpt": "ends the kernel",
    "createpolicy(.cvt)": "its operand is opaque",
    "rcp(.approx)(.ftz)(.f64)": "the ISA leaves its low bits open",
    "stmatrix(.sync)(.aligned)(.x1|": "another spelling of the same instruction",
    "bar{.cta}(.sync|.arrive)": "compiled from __syncthreads in most cases",
    "bar(.warp)(.sync)": "compiled from __syncwarp",
    "call": "compiled from C++",
    "ret": "compiled from C++",
}
"""Parts of the patterns of forms that no case of the corpus spells out, with the reason."""


def test_every_form_has_a_unit_test_or_a_recorded_output():
    tested = forms.rows_of(forms.of_unit_tests()) | forms.rows_of(forms.of_cases(corpus.recorded_groups()))
    missing = [pattern for pattern in TABLE if pattern not in tested]
    assert not missing, f"{len(missing)} of {len(TABLE)} forms:\n" + "\n".join(missing)


def test_every_hopper_form_has_a_hardware_case():
    covered = forms.rows_of(forms.of_cases(corpus.groups()))
    missing = [p for p in TABLE if p not in covered and not any(part in p for part in NO_RECORD)]
    assert not missing, f"{len(missing)} of {len(TABLE)} forms:\n" + "\n".join(missing)
    needless = [part for part in NO_RECORD if all(p in covered for p in TABLE if part in p)]
    assert not needless, f"these forms have cases or don't exist: {needless}"


def public_forms() -> dict[str, int]:
    """Forms of a public Hopper kernel and how often it uses them."""
    lines = (forms.TESTS / "hopper_forms.txt").read_text().splitlines()
    rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {form: int(uses) for form, uses in rows}


def test_every_form_of_a_public_kernel_is_run_by_the_foreign_kernels():
    used, wanted = forms.of_foreign_kernels(), public_forms()
    assert len(wanted) > 100
    missing = {f"{form} ({uses})" for form, uses in wanted.items() if form not in used}
    assert not missing, "\n".join(sorted(missing))


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def test_reductions_of_floats():
    """Lane l holds l - 8, or NaN in lane 3 where `nan` says so."""
    value = "cvt.rn.f32.u32 %f1, %r9; sub.rn.f32 %f1, %f1, 0f41000000;"
    nan = "setp.eq.u32 %p0, %r9, 3; @%p0 mov.f32 %f1, 0f7FFFFFFF;"
    store = "mov.b32 %r0, %f0;"
    assert lanes(value + "redux.sync.min.f32 %f0, %f1, -1;" + store) == [bits(-8)] * 32
    assert lanes(value + "redux.sync.max.f32 %f0, %f1, -1;" + store) == [bits(23)] * 32
    assert lanes(value + "redux.sync.max.abs.f32 %f0, %f1, 0xFFFF;" + store, block=16) == [bits(8)] * 16
    assert lanes(value + nan + "redux.sync.min.f32 %f0, %f1, -1;" + store) == [bits(-8)] * 32
    assert lanes(value + nan + "redux.sync.min.NaN.f32 %f0, %f1, -1;" + store) == [0x7FFFFFFF] * 32


@pytest.mark.parametrize(
    "store",
    [
        "stmatrix.sync.aligned.x1.m8n8.trans.shared.b16 [%r3], {%r4};",
        "stmatrix.sync.aligned.x1.trans.m8n8.shared.b16 [%r3], {%r4};",
        "stmatrix.sync.aligned.x1.m8n8.shared.b16.trans [%r3], {%r4};",
    ],
)
def test_stmatrix_with_its_modifiers_in_other_orders(store):
    """Lane l holds elements 2l and 2l + 1 of a matrix, whose transpose is read back."""
    body = f"""
    mov.u32 %r2, s; and.b32 %r3, %r9, 7; shl.b32 %r3, %r3, 4; add.u32 %r3, %r2, %r3;
    shl.b32 %r4, %r9, 1; add.u32 %r5, %r4, 1; shl.b32 %r5, %r5, 16; or.b32 %r4, %r4, %r5;
    {store}
    bar.warp.sync -1; shl.b32 %r6, %r9, 2; add.u32 %r6, %r6, %r2; ld.shared.u32 %r0, [%r6];
    """
    expected = [lane % 4 * 2 * 8 + lane // 4 for lane in range(32)]
    assert lanes(body, module=".shared .align 16 .b8 s[128];") == [v | (v + 8) << 16 for v in expected]


@pytest.mark.parametrize("instruction", ["trap;", "brkpt;"])
def test_instructions_that_end_the_kernel(instruction):
    with pytest.raises(Trap):
        lanes(f"mov.u32 %r0, 1; {instruction}")


def test_a_monitor_event_changes_nothing():
    assert lanes("mov.u32 %r0, 1; pmevent 3;") == [1] * 32
