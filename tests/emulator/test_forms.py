"""Every instruction form that the emulator knows is tested, and every form that a public kernel uses is run."""

import forms
import pytest
from hw import corpus

from megagen.emulator import supported_forms

TABLE = [pattern for pattern, _ in supported_forms()]

BLACKWELL = "needs sm_100"
SILENT = "has no result of its own"
NO_RECORD = {
    "f32x2": BLACKWELL,
    "(.f32)(.f16|.bf16)": BLACKWELL,
    "ue8m0x2": BLACKWELL,
    "redux(.sync)(.min|.max){.abs}{.NaN}(.f32)": BLACKWELL,
    "st(.bulk)": BLACKWELL,
}


def test_every_form_has_a_unit_test_or_a_recorded_output():
    tested = forms.rows_of(forms.of_unit_tests()) | forms.rows_of(forms.of_cases(corpus.recorded_groups()))
    missing = [pattern for pattern in TABLE if pattern not in tested]
    assert not missing, f"{len(missing)} of {len(TABLE)} forms:\n" + "\n".join(missing)
