"""Ahead-of-time folders: written once, restartable, complete, and refused by name where they don't fit."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megagen import build, render
from megagen.aot import load_folder
from megagen.companion import quantize_name
from megagen.contract import Contract
from megagen.errors import CacheError, CompileError
from megagen.planning import make_plan
from megagen.shape import MoEShape

ROOT = Path(__file__).parents[1]
CONTRACT = Contract(MoEShape.preset("tiny"), ranks=2, max_tokens=256)
OTHER_CONTRACT = Contract(MoEShape.preset("tiny"), ranks=4, max_tokens=256)


def kernels_of(contract=CONTRACT, tokens=64) -> build.KernelSet:
    return build.KernelSet(
        build.plan_layer(contract, "sm90", tokens=[tokens]), {"tokens": [tokens], "sms": None}
    )


@pytest.fixture
def small_sources(monkeypatch):
    """Kernels that compile in a moment, in place of the rendered ones."""
    text = 'extern "C" __global__ void __launch_bounds__(32) k(int* p) { p[threadIdx.x] = NUMBER; }\n'
    monkeypatch.setattr(render, "render", lambda plan: text.replace("NUMBER", str(plan.block_m)))
    monkeypatch.setattr(render, "render_quantize", lambda contract, arch: text.replace("NUMBER", "0"))


@pytest.fixture(scope="module")
def compiled_folder(tmp_path_factory):
    """The real kernels of ``CONTRACT``, compiled; not to be changed."""
    out = tmp_path_factory.mktemp("kernels")
    build.generate(kernels_of(), out, compile=True)
    return out


def test_files_are_named_after_their_plan(compiled_folder):
    (plan,) = kernels_of().plans.plans
    assert re.fullmatch(r"h512i512e8k2-fp8_block-sm90-ep2-m\d+-[0-9a-f]{8}", plan.name)
    assert plan.name.endswith(f"-m{plan.block_m}-{plan.hash[:8]}")
    for suffix in (".cu", ".plan.json", ".cubin", ".ptx"):
        assert (compiled_folder / f"{plan.name}{suffix}").is_file()
    listed = set(load_folder(compiled_folder).manifest["files"])
    on_disk = {
        str(path.relative_to(compiled_folder))
        for path in compiled_folder.rglob("*")
        if path.is_file() and ".build" not in path.parts
    }
    assert on_disk == listed | {"manifest.json"}


def test_kernel_and_companion_load_clean(compiled_folder):
    folder = load_folder(compiled_folder)
    (plan,) = kernels_of().plans.plans
    kernel = folder.load(plan.name)
    assert kernel.problems() == ()
    assert kernel.cubin == (compiled_folder / f"{plan.name}.cubin").read_bytes()
    assert kernel.entry == render.ENTRY
    (helper,) = folder.helpers(CONTRACT, "sm90")
    assert helper == f"helpers/{quantize_name(CONTRACT, 'sm90')}"
    assert folder.load(helper).entry == render.QUANTIZE_ENTRY


def test_round_trip_of_the_plans(compiled_folder):
    assert load_folder(compiled_folder).plan_set(CONTRACT, "sm90") == kernels_of().plans


def test_loading_needs_neither_nvrtc_nor_jinja(compiled_folder):
    code = f"""
        import sys
        for module in ("cuda.bindings.nvrtc", "jinja2", "torch", "ninja"):
            sys.modules[module] = None
        from megagen.aot import load_folder
        from megagen.contract import Contract
        from megagen.shape import MoEShape
        folder = load_folder({str(compiled_folder)!r})
        contract = Contract(MoEShape.preset("tiny"), ranks=2, max_tokens=256)
        plan = folder.plan_set(contract, "sm90").select(100)
        assert folder.load(plan.name).cubin.startswith(b"\\x7fELF")
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    "contract, arch, named",
    [
        (CONTRACT, "sm100", r"built for sm90, not for arch=sm100"),
        (OTHER_CONTRACT, "sm90", r"ranks \(built for 2, asked for 4\)"),
        (Contract(CONTRACT.shape, 2, 512), "sm90", r"max_tokens \(built for 256, asked for 512\)"),
        (Contract(MoEShape(512, 512, 8, 1), 2, 256), "sm90", r"top_k \(built for 2, asked for 1\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(compiled_folder, contract, arch, named):
    with pytest.raises(CacheError, match=named) as refused:
        load_folder(compiled_folder).plan_set(contract, arch)
    assert "jit=True" in str(refused.value)


def test_other_weight_layout_is_refused_by_name(compiled_folder, tmp_path):
    folder = shutil.copytree(compiled_folder, tmp_path / "copy")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["sets"][0]["weight_layout"] = "other-layout"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CacheError, match=r"layout other-layout.*fp8_block-"):
        load_folder(folder).plan_set(CONTRACT, "sm90")


@pytest.mark.parametrize("suffix", [".plan.json", ".cubin", ".ptx"])
def test_damaged_file_is_refused(compiled_folder, tmp_path, suffix):
    folder = shutil.copytree(compiled_folder, tmp_path / "copy")
    (plan,) = kernels_of().plans.plans
    damaged = folder / f"{plan.name}{suffix}"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(CacheError, match=re.escape(damaged.name)):
        opened = load_folder(folder)
        opened.load(opened.plan_set(CONTRACT, "sm90").plans[0].name)


@pytest.mark.parametrize("manifest", [None, "", "[]", '{"schema_version": 99}'])
def test_folder_without_a_good_manifest_is_refused(tmp_path, manifest):
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(CacheError, match=r"megagen generate"):
        load_folder(tmp_path)


def test_uncompiled_kernel_says_so(tmp_path, small_sources):
    folder = build.generate(kernels_of(), tmp_path)
    with pytest.raises(CacheError, match="--compile"):
        folder.load(folder.names[0])
    with pytest.raises(CacheError, match="holds no kernel 'other'"):
        folder.load("other")


def modification_times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.cubin")}


def test_second_build_compiles_only_what_is_missing(tmp_path, small_sources):
    kernels = build.KernelSet(build.plan_layer(CONTRACT, "sm90"), {})
    build.generate(kernels, tmp_path, compile=True)
    before = modification_times(tmp_path)
    assert len(before) > 1
    build.generate(kernels, tmp_path, compile=True)
    assert modification_times(tmp_path) == before

    lost = sorted(before)[0]
    (tmp_path / lost).unlink()
    build.generate(kernels, tmp_path, compile=True)
    after = modification_times(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {lost}


def test_other_compiler_compiles_again(tmp_path, small_sources, monkeypatch):
    build.generate(kernels_of(), tmp_path, compile=True)
    before = modification_times(tmp_path)
    key_of = build.cache.key_of
    monkeypatch.setattr(build.cache, "key_of", lambda *arguments: "other" + key_of(*arguments))
    build.generate(kernels_of(), tmp_path, compile=True)
    assert modification_times(tmp_path) != before


def test_failed_kernel_is_named_and_the_others_are_kept(tmp_path, monkeypatch):
    plans = build.plan_layer(CONTRACT, "sm90")
    broken = plans.plans[0]

    def source(plan):
        body = "undeclared;" if plan == broken else ""
        return f'extern "C" __global__ void __launch_bounds__(32) k() {{ {body} }}\n'

    monkeypatch.setattr(render, "render", source)
    with pytest.raises(CompileError, match=r'identifier "undeclared" is undefined'):
        build.generate(build.KernelSet(plans, {}), tmp_path, compile=True)
    assert not (tmp_path / "manifest.json").exists()
    kept = {f"{plan.name}.cubin" for plan in plans.plans if plan != broken}
    assert kept and {path.name for path in tmp_path.glob("*.cubin")} == kept


def test_sets_live_side_by_side_and_replace_their_like(tmp_path, small_sources):
    build.generate(kernels_of(), tmp_path, compile=True)
    build.generate(kernels_of(OTHER_CONTRACT), tmp_path, compile=True)
    (replaced,) = kernels_of().plans.plans
    folder = build.generate(kernels_of(tokens=1), tmp_path, compile=True)
    (small,) = kernels_of(tokens=1).plans.plans
    (other,) = kernels_of(OTHER_CONTRACT).plans.plans
    assert small.name != replaced.name
    helpers = {f"helpers/{quantize_name(contract, 'sm90')}" for contract in (CONTRACT, OTHER_CONTRACT)}
    assert set(folder.names) == {small.name, other.name} | helpers
    assert not list(tmp_path.glob(f"{replaced.name}*"))
    assert folder.load(other.name).entry == folder.load(small.name).entry == "k"


def test_fresh_folder_is_fresh(tmp_path, small_sources):
    build.generate(kernels_of(), tmp_path, compile=True)
    build.generate(kernels_of(OTHER_CONTRACT), tmp_path)
    assert build.stale_files(tmp_path) == []
    assert build.stale_files(tmp_path, kernels_of()) == []


def test_forced_plans_are_checked_as_they_are(tmp_path, small_sources):
    plan = make_plan(CONTRACT, "sm90", 1, block_m=128)
    build.generate(build.KernelSet(build.PlanSet((CONTRACT.max_tokens,), (plan,)), None), tmp_path)
    assert build.stale_files(tmp_path) == []


def test_stale_files_are_named(tmp_path, small_sources, monkeypatch):
    build.generate(kernels_of(), tmp_path, compile=True)
    (plan,) = kernels_of().plans.plans
    monkeypatch.setattr(render, "render", lambda plan: "// other\n")
    assert build.stale_files(tmp_path) == [f"{plan.name}.cu: differs from what is generated now"]


def test_missing_and_damaged_files_are_stale(tmp_path, small_sources):
    build.generate(kernels_of(), tmp_path, compile=True)
    (plan,) = kernels_of().plans.plans
    (tmp_path / f"{plan.name}.plan.json").unlink()
    (tmp_path / f"{plan.name}.cubin").write_bytes(b"")
    assert build.stale_files(tmp_path) == [
        f"{plan.name}.plan.json: missing",
        f"{plan.name}.cubin: missing or damaged",
    ]


def test_unwritable_folder_is_a_cache_error(tmp_path, small_sources):
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="can't be written"):
        build.generate(kernels_of(), tmp_path / "file")
