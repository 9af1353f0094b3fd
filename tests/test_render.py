"""The form of the generated sources: what a reader would stumble over, and what nothing uses."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megagen.build import stale_files
from megagen.contract import Contract
from megagen.files import templates_dir
from megagen.planning import KernelPlan, make_plan
from megagen.planning.planner import default_format, ladder_of
from megagen.render import render, render_quantize
from megagen.shape import MoEShape

MAX_COLUMNS = 110
MAX_LINES = {"sm90": 1880, "sm100": 2260, "sm103": 2260}  # of a kernel
MAX_TRACE_LINES = 60
MAX_SURPLUS_LINES = 225  # MMA and epilogues with tokens on N, beside those with tokens on M
SHAPES = {
    "flash8": MoEShape.preset("flash8", 2),
    "micro": MoEShape.preset("micro", 2),  # hidden % 256 == 128
    "wide": MoEShape(9216, 1024, 16, 4),  # a token row is pulled in pieces
    "odd": MoEShape(2432, 1152, 16, 3),
}


def plan_of(shape: str, arch: str, block_m: int, **options) -> KernelPlan:
    contract = Contract(SHAPES[shape], 2, 1024, default_format(arch), **options)
    return make_plan(contract, arch, block_m=block_m)


def plans(arch: str) -> dict[str, KernelPlan]:
    ladder, format = ladder_of(arch), default_format(arch)
    found = {f"{shape}-m{m}": plan_of(shape, arch, m) for shape in SHAPES for m in ladder}
    for m in (ladder[0], ladder[-1]):
        found[f"clamp-m{m}"] = plan_of("micro", arch, m, clamp=7.0)
        found[f"exact-m{m}"] = plan_of("micro", arch, m, activation="exact")
        found[f"trace-m{m}"] = replace(plan_of("flash8", arch, m), trace=True)
    found["one-rank"] = make_plan(Contract(SHAPES["micro"], 1, 64, format), arch)
    found["many-ranks"] = make_plan(Contract(MoEShape(7168, 2048, 288, 32), 72, 64, format), arch)
    found["many-experts"] = make_plan(Contract(MoEShape(2048, 768, 128, 8), 1, 1024, format), arch)
    return {f"{arch}-{name}": plan for name, plan in found.items()}


PLANS = {**plans("sm90"), **plans("sm100")}
HELPERS = {f"{arch}-quantize": arch for arch in ("sm90", "sm100")}
SOURCES = [*PLANS, *HELPERS]


@cache
def source(name: str) -> str:
    if name in HELPERS:
        arch = HELPERS[name]
        return render_quantize(Contract(SHAPES["flash8"], 2, 1024, default_format(arch)), arch)
    return render(PLANS[name])


def code_of(text: str) -> str:
    """A source without its comments."""
    return re.sub(r"//.*", "", text)


def definitions(text: str) -> list[str]:
    """Names of the constants, aliases, structs and device functions that a source or a template defines."""
    patterns = (
        r"^ *constexpr \w+ (\w+) =",
        r"^typedef .* (\w+);",
        r"^using (\w+) =",
        r"^struct (\w+)",
        r"^#define (\w+)",
        r"^ *DEVICE [^(\n]*?([\w{} ]+)\(",
    )
    return [name.strip().split()[-1] for pattern in patterns for name in re.findall(pattern, text, re.M)]


@pytest.mark.parametrize("name", SOURCES)
def test_lines_are_short_and_clean(name):
    text = source(name)
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= MAX_COLUMNS, f"line {number}: {line}"
        assert line == line.rstrip() and "\t" not in line, f"line {number}: {line!r}"
    assert "\n\n\n" not in text and not re.search(r"\n\n[ }]", text), "a blank line where none belongs"
    assert text.endswith("}\n")


@pytest.mark.parametrize("name", SOURCES)
def test_no_template_syntax_is_left(name):
    assert not re.search(r"\{\{|\{%|\{#|Undefined|<bound method|<function|\bNone\b", source(name))


@pytest.mark.parametrize("name", SOURCES)
def test_everything_that_is_defined_is_used(name):
    code = code_of(source(name))
    names = definitions(code)
    assert len(names) == len(set(names)) and len(names) > 10
    unused = [defined for defined in names if len(re.findall(rf"\b{defined}\b", code)) < 2]
    assert not unused


@pytest.mark.parametrize("name", PLANS)
def test_a_kernel_stays_short(name):
    plan = PLANS[name]
    more = MAX_TRACE_LINES if plan.trace else 0
    if plan.arch == "sm90" and plan.surplus_rows:
        more += MAX_SURPLUS_LINES
    assert source(name).count("\n") <= MAX_LINES[plan.arch] + more


def test_a_trace_counts_surplus_rows_as_epilogue():
    """A state lasts until the next one begins, so it must begin before their epilogue."""
    role = source("sm90-trace-m144").split("math role")[-1]
    begun, surplus = (role.index(word) for word in ("TRACE_L1_EPILOGUE", "l1_epilogue_surplus("))
    assert begun < surplus and "trace_state" not in role[surplus : role.index("l2_epilogue<halves>(")]


def test_each_definition_of_a_template_is_in_some_kernel():
    """What no kernel uses is left out of all of them, so it would never be missed."""
    rendered = {defined for name in SOURCES for defined in definitions(source(name))}
    for path in templates_dir().rglob("*.j2"):
        missing = [n for n in definitions(path.read_text()) if n.isidentifier() and n not in rendered]
        assert not missing, f"{path.name}: used by no kernel: {missing}"


def test_only_primitives_hold_inline_assembly():
    assembly = {path for path in templates_dir().rglob("*.j2") if re.search(r"\basm\b", path.read_text())}
    assert assembly and {path.parent.name for path in assembly} == {"primitives"}


@pytest.mark.parametrize("name", SOURCES)
def test_no_header_is_included(name):
    assert "#include" not in source(name)


def test_reasons_are_told_in_full():
    """However long: they are wrapped, not cut."""
    plan = PLANS["sm90-flash8-m128"]
    head = source("sm90-flash8-m128").split("typedef", 1)[0]
    words = " ".join(re.sub(r"^// *", "", line) for line in head.splitlines())
    for choice in plan.choices:
        assert f"{choice.value}: {choice.reason}" in words


@pytest.mark.parametrize("name", PLANS)
def test_reasons_start_in_one_column(name):
    head = source(name).split("// Why this plan:\n")[1].split("//\n")[0]
    assert len({len(start) for start in re.findall(r"^//   \w+ +", head, re.M)}) == 1


def test_comments_are_wrapped_where_names_make_them_long():
    """Common templates call things by the architecture's names."""
    text = source("sm100-flash8-m128")
    assert "epilogue warps, which have nothing to compute yet" in text.replace("\n// ", " ")
    assert "math" not in re.sub(r"ROLE_MATH", "", text)


STEPS = {
    "counts its share of the": "dispatch 1, count",
    "claims slots for them": "dispatch 2, slot offsets",
    "writes each to its expert's": "dispatch 3, index",
    "no rank pulls before all have published": "dispatch 4, one barrier across ranks",
    "min-peeling": "dispatch 5, pull",
    "zeroes what the next": "dispatch 6, clean up",
    "waits for the rows of a block": "token loader",
    "wait for empty stages only": "weight loader",
    "to tensor memory, in both CTAs": "issue, scale factors",
    "Only the first of a tile does not add": "issue, four MMAs",
    "SwiGLU of this CTA's 64 intermediate columns": "L1 epilogue",
    "Largest magnitude of each of the lane's tokens over the 32 intermediate columns": "L1 epilogue, amax",
    "128 columns of STORE_ROWS tokens home": "L2 epilogue",
    "in order of k": "combine",
    "Waves of EXPERTS_PER_WAVE experts": "schedule",
}
"""Words of the comment at which a reader of a Blackwell kernel finds each of its steps."""


@pytest.mark.parametrize("words", STEPS)
def test_each_step_is_found_by_its_comment(words):
    comments = " ".join(re.findall(r"//(.*)", source("sm100-flash8-m128")))
    assert words in re.sub(r"\s+", " ", comments), STEPS[words]


def test_committed_kernels_are_fresh():
    stale = stale_files(Path(__file__).parent.parent / "generated")
    assert not stale, f"run scripts/generate.sh: {stale}"
