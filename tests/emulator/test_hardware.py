"""The emulator's arithmetic, conversions and copies against outputs recorded on a real GPU.

Three classes: ``exact`` (the ISA defines every bit), ``model`` (bit for bit by the fitted model of
tensor-core accumulation), ``approximate`` (within the ISA's bound on the error).
"""

from functools import cache

import native
import numpy as np
import pytest
from hw import corpus, records, replay
from hw.cases import APPROXIMATE, OUTPUT, Case
from hw.tensor_copy_cases import acceptance_specs

GROUPS = corpus.recorded_groups()
LIBRARY_GROUPS = [name for name in GROUPS if name not in ("scalar", "memory", "tensor_faults", "more")]
CASES = {name: {case.name: case for case in build()} for name, build in GROUPS.items()}


@cache
def recorded(group: str):
    try:
        return records.load(group)
    except FileNotFoundError:
        pytest.fail(
            f"tests/emulator/hw/records/{group}.npz is missing: run scripts/record_hardware.py on an H200"
        )


def same_float(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Bitwise equality, except that any NaN equals any other."""
    equal = ours.view(f"u{ours.itemsize}") == theirs.view(f"u{theirs.itemsize}")
    return equal | (np.isnan(ours) & np.isnan(theirs)) if ours.dtype.kind == "f" else equal


def describe_mismatches(case: Case, ours: np.ndarray, theirs: np.ndarray, equal: np.ndarray) -> str:
    wrong = np.argwhere(~equal)
    lines = [f"{case.name} ({case.agreement}): {len(wrong)} of {equal.size} outputs differ"]
    for at in map(tuple, wrong[:5]):
        bits = [np.asarray(x[at]).view(f"u{x.itemsize}") for x in (ours, theirs)]
        lines.append(
            f"  at {tuple(int(i) for i in at)}: emulator 0x{bits[0]:x} ({ours[at]}), "
            f"GPU 0x{bits[1]:x} ({theirs[at]})"
        )
        if case.keep == OUTPUT and case.detail.get("instruction"):
            lines.append(
                f"    inputs {[hex(int(a[at].view(f'u{a.itemsize}'))) for a in replay.inputs(case)]}"
            )
    return "\n".join(lines)


@pytest.mark.parametrize("group", GROUPS)
def test_records_are_complete_and_belong_to_the_cases(group):
    outputs, checksums, meta = recorded(group)
    assert meta["compute_capability"] == [9, 0]
    assert set(outputs) == set(CASES[group])
    stale = [name for name, case in CASES[group].items() if checksums[name] != records.checksum(case)]
    assert not stale, f"source or inputs changed since the recording of {stale[:5]}"


def test_no_group_waits_that_was_recorded():
    assert not [name for name in corpus.PENDING if (records.FOLDER / f"{name}.npz").exists()]


def exact_names():
    names = [(group, case) for group in LIBRARY_GROUPS for case in CASES[group].values()]
    return [(group, case.name) for group, case in names if case.agreement != APPROXIMATE]


@pytest.mark.parametrize("group,name", exact_names())
def test_same_bits(group, name):
    case = CASES[group][name]
    theirs = recorded(group)[0][name][0]
    ours = records.condense(case, replay.replay(case))
    equal = same_float(ours, theirs)
    assert equal.all(), describe_mismatches(case, ours, theirs, equal)


def as_numbers(case: Case, outputs: np.ndarray) -> np.ndarray:
    """Outputs as float64; 16-bit ones by the instruction's type."""
    with np.errstate(invalid="ignore"):
        if outputs.dtype == np.float32:
            return outputs.astype(np.float64)
    return native.decode(outputs, case.detail["instruction"].rsplit(".", 1)[1])


def allowed_error(case: Case, ours: np.ndarray) -> np.ndarray:
    """The ISA's bound around the emulator's results, which are correctly rounded, plus that rounding."""
    kind, bound = case.detail["bound"]
    magnitude = np.abs(ours)
    fmt = case.detail["instruction"].rsplit(".", 1)[1]
    fraction_bits, min_exponent = {"f32": (23, -126), "f16": (10, -14), "bf16": (7, -126)}[fmt]
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.where(magnitude > 0, np.floor(np.log2(magnitude)), min_exponent)
        ulp = 2.0 ** (np.clip(exponent, min_exponent, 127) - fraction_bits)
        if kind == "absolute_or_relative":
            kind_error = np.maximum(bound, bound * magnitude)
        elif kind == "sine":  # the ISA loosens the bound outside of two periods and gives none far out
            x = np.abs(replay.inputs(case)[0].astype(np.float64))
            kind_error = np.select([x <= 2 * np.pi, x <= 100 * np.pi], [bound, 2.0**-14.7], np.inf)
        elif kind == "relative":  # a subnormal result can't be closer than its last bit
            kind_error = np.maximum(bound * magnitude, 2.0 ** (min_exponent - fraction_bits))
        else:
            kind_error = {"absolute": bound, "ulp": bound * ulp}[kind]
    return kind_error + ulp / 2


@pytest.mark.parametrize(
    "name", [n for n, c in CASES["approximations"].items() if c.agreement == APPROXIMATE]
)
def test_within_the_bound_of_the_isa(name):
    case = CASES["approximations"][name]
    theirs = as_numbers(case, recorded("approximations")[0][name][0])
    ours = as_numbers(case, replay.replay(case))
    finite = np.isfinite(ours) & np.isfinite(theirs)
    with np.errstate(invalid="ignore"):
        good = np.where(finite, np.abs(ours - theirs) <= allowed_error(case, ours), ours == theirs)
    good |= np.isnan(ours) & np.isnan(theirs)
    assert good.all(), describe_mismatches(case, ours, theirs, good)


@pytest.mark.parametrize("name", CASES["tensor_faults"])
def test_tensor_copies_that_fault(name):
    theirs = bool(recorded("tensor_faults")[0][name][0])
    assert replay.copy_faults(CASES["tensor_faults"][name]) == theirs


def test_tensor_maps_that_the_driver_accepts():
    """sm_90 refuses the packed types whatever their fields are; for others our rules are the driver's."""
    accepted = recorded("tensor_maps")[0]["accepted"][0]
    wrong = []
    for spec, theirs in zip(acceptance_specs(), accepted, strict=True):
        if spec.type in (13, 14, 15):
            continue
        ours = replay.acceptable(spec)
        if ours != bool(theirs):
            wrong.append(f"{spec}: we {'accept' if ours else 'refuse'} it")
    assert not wrong, f"{len(wrong)} of {len(accepted)} differ\n" + "\n".join(wrong[:10])
