"""NVRTC: what a compilation reports, and what it refuses."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from megagen import compiler
from megagen.arch import Arch
from megagen.contract import Contract
from megagen.errors import CompileError
from megagen.planning import make_plan, plan_set
from megagen.planning.planner import default_format, ladder_of
from megagen.render import render
from megagen.shape import PRESETS, MoEShape

ROOT = Path(__file__).parents[1]

CLEAN = """
extern "C" __global__ void __launch_bounds__(128) scale(float* values, float factor) {
  __shared__ float staged[128];
  staged[threadIdx.x] = values[threadIdx.x];
  __syncthreads();
  values[threadIdx.x] = staged[threadIdx.x ^ 1] * factor;
}
"""

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spill(float* p, int n) {
  float a[96];
  for (int i = 0; i < 96; i++) a[i] = p[i * 1024 + threadIdx.x];
  for (int k = 0; k < n; k++) {
    #pragma unroll
    for (int i = 0; i < 96; i++) a[i] = a[i] * a[(i + 7) % 96];
  }
  for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = a[i];
}
"""

SETMAXNREG_IGNORED = """
extern "C" __global__ void ignored(float* p) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  p[threadIdx.x] = 1;
}
"""


def run_python(code: str) -> str:
    """What a fresh interpreter prints for ``code``, which must succeed."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("arch", compiler.TARGETS)
def test_resources_of_a_clean_kernel(arch):
    kernel = compiler.compile(CLEAN, arch, name="scale.cu")
    assert (kernel.entry, kernel.arch, kernel.static_shared) == ("scale", arch, 128 * 4)
    assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0)
    assert 0 < kernel.registers <= 32
    assert kernel.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in kernel.ptx
    assert kernel.nvrtc.startswith(compiler.nvrtc_version() + ".")


def test_ptx_leads_back_to_the_source():
    ptx = compiler.compile(CLEAN, "sm_90a", name="scale.cu").ptx
    store_line = 1 + CLEAN.splitlines().index("  values[threadIdx.x] = staged[threadIdx.x ^ 1] * factor;")
    assert f".loc\t1 {store_line} " in ptx
    assert '.file\t1 "/megagen/scale.cu"' in ptx


def test_same_source_same_bits_wherever_it_is_compiled(tmp_path, monkeypatch):
    here = compiler.compile(CLEAN, "sm_90a", name="scale.cu")
    monkeypatch.chdir(tmp_path)
    elsewhere = compiler.compile(CLEAN, "sm_90a", name="scale.cu")
    assert here.cubin == elsewhere.cubin
    assert here.ptx == elsewhere.ptx


def test_spills_are_refused_with_their_numbers():
    loose = compiler.compile(SPILLING, "sm_90a", name="spill.cu", strict=False)
    assert loose.registers == 64 and loose.stack > 0 and loose.spill_stores > 0 and loose.spill_loads > 0
    with pytest.raises(CompileError, match=f"{loose.spill_stores} bytes of spill stores") as refused:
        compiler.compile(SPILLING, "sm_90a", name="spill.cu")
    assert f"{loose.stack} bytes of stack" in str(refused.value)


def test_ptxas_note_is_refused():
    with pytest.raises(CompileError, match=r"C7508.*setmaxnreg"):
        compiler.compile(SETMAXNREG_IGNORED, "sm_90a", name="ignored.cu")


@pytest.mark.parametrize("note", compiler.REFUSED_NOTES)
def test_every_refused_note_is_found_in_a_log(note):
    kernel = compiler.compile(CLEAN, "sm_90a", name="scale.cu")
    line = f"ptxas info    : ({note}) Potential Performance Loss: something in the function 'scale'"
    noted = compiler.CompiledKernel.from_parts(kernel.resources(), b"", "", f"{kernel.log}\n{line}\n")
    assert kernel.problems() == ()
    assert len(noted.problems()) == 1 and line in noted.problems()[0]


def test_rejected_source_shows_the_line():
    source = CLEAN.replace("* factor", "* factr")
    with pytest.raises(CompileError) as refused:
        compiler.compile(source, "sm_90a", name="scale.cu")
    message = str(refused.value)
    assert 'identifier "factr" is undefined' in message
    assert ">     6 |   values[threadIdx.x] = staged[threadIdx.x ^ 1] * factr;" in message


@pytest.mark.parametrize(
    "source, count", [("__device__ int f() { return 1; }", 0), (CLEAN + CLEAN.replace("scale", "again"), 2)]
)
def test_exactly_one_kernel_per_source(source, count):
    with pytest.raises(CompileError, match=f"holds {count} __global__ functions"):
        compiler.compile(source, "sm_90a", name="source.cu")


def test_unknown_target_lists_the_known():
    with pytest.raises(CompileError, match=r"arch='sm_80'.*sm_90a, sm_100a, sm_103a"):
        compiler.compile(CLEAN, "sm_80", name="scale.cu")


def test_missing_nvrtc_says_how_to_get_it():
    run_python(f"""
        import sys
        sys.modules["cuda.bindings.nvrtc"] = None
        from megagen import compiler, errors
        try:
            compiler.compile({CLEAN!r}, "sm_90a", name="scale.cu")
        except errors.DeviceError as error:
            assert "pip install" in str(error) and "MEGAGEN_KERNELS" in str(error)
        else:
            raise AssertionError("compiled without NVRTC")
    """)


def test_compiling_needs_neither_torch_nor_jinja():
    run_python(f"""
        import sys
        sys.modules["torch"] = sys.modules["jinja2"] = None
        from megagen import compiler
        assert compiler.compile({CLEAN!r}, "sm_90a", name="scale.cu").registers
    """)


def test_module_compiles_a_file(tmp_path):
    (tmp_path / "spill.cu").write_text(SPILLING)
    command = [sys.executable, "-m", "megagen.compiler", tmp_path / "spill.cu", "--out", tmp_path]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout
    assert '"registers": 64' in printed and "bytes of spill stores" in printed
    assert ".entry spill" in (tmp_path / "spill.ptx").read_text()
    assert (tmp_path / "spill.cubin").read_bytes().startswith(b"\x7fELF")


PRESETS_WITHOUT_KERNELS = {"gpt-oss-120b"}  # 2,880 is no multiple of 128; test_shape.py has its error
CONTRACT_OF = {
    name: Contract(
        MoEShape.preset(name, ranks=8),
        ranks=8 if MoEShape.preset(name, 8).experts % 8 == 0 else 4,
        max_tokens=4096,
    )
    for name in sorted(PRESETS.keys() - PRESETS_WITHOUT_KERNELS)
}


@pytest.mark.parametrize("preset", CONTRACT_OF)
def test_presets_compile_cleanly(preset):
    """A plan of every tile size; docs/performance.md has how long that takes."""
    for plan in {plan.block_m: plan for plan in plan_set(CONTRACT_OF[preset]).plans}.values():
        kernel = compiler.compile(render(plan), "sm_90a", name=f"{plan.name}.cu")
        assert kernel.problems() == ()


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_the_largest_tiles_leave_registers_for_a_trace(arch):
    shape = MoEShape.preset("pro8")
    contract = Contract(shape, ranks=1, max_tokens=8192, format=default_format(arch))
    plan = replace(make_plan(contract, arch, block_m=ladder_of(arch)[-1]), trace=True)
    kernel = compiler.compile(render(plan), Arch.get(arch).compile_target, name="traced.cu")
    assert kernel.problems() == ()


@pytest.fixture(scope="session")
def newest_nvrtc(tmp_path_factory) -> Path:
    """The newest NVRTC library, beside the one in use (kept in MEGAGEN_TEST_NVRTC, if set)."""
    target = Path(os.environ.get("MEGAGEN_TEST_NVRTC") or tmp_path_factory.mktemp("nvrtc"))
    if not list(target.glob("nvidia/*/lib/libnvrtc.so.*")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
            "--target",
            str(target),
        ]
        installed = subprocess.run(
            [*command, "nvidia-cuda-nvrtc"], capture_output=True, text=True, timeout=240
        )
        if installed.returncode:
            pytest.skip(
                f"THE NEWEST NVRTC IS NOT TESTED: pip could not install it: {installed.stderr[-300:]}"
            )
    return next(target.glob("nvidia/*/lib/libnvrtc.so.*"))


def test_newest_nvrtc(newest_nvrtc):
    """cuda-python takes the library that the process already holds, so loading one first selects it."""
    printed = run_python(f"""
        import ctypes, json
        ctypes.CDLL({str(newest_nvrtc)!r}, ctypes.RTLD_GLOBAL)
        from megagen import compiler
        clean = [compiler.compile({CLEAN!r}, arch, name="scale.cu").resources() for arch in compiler.TARGETS]
        loose = compiler.compile({SPILLING!r}, "sm_90a", name="spill.cu", strict=False)
        noted = compiler.compile({SETMAXNREG_IGNORED!r}, "sm_90a", name="ignored.cu", strict=False)
        print(json.dumps([clean, loose.problems(), noted.problems()]))
    """)
    clean, spills, notes = json.loads(printed)
    installed = newest_nvrtc.parent.glob("libnvrtc-builtins.so.*")
    assert clean[0]["nvrtc"].startswith(next(installed).name.removeprefix("libnvrtc-builtins.so."))
    assert all(kernel["registers"] > 0 and kernel["static_shared"] >= 512 for kernel in clean)
    assert len(spills) == 1 and "spill stores" in spills[0]
    assert len(notes) == 1 and "C7508" in notes[0]


@pytest.mark.parametrize("preset", CONTRACT_OF)
def test_presets_with_the_newest_nvrtc(preset, newest_nvrtc, tmp_path):
    """The plans of the smallest and of the largest token bucket."""
    plans = plan_set(CONTRACT_OF[preset]).plans
    for plan in {plans[0], plans[-1]}:
        (tmp_path / f"{plan.name}.cu").write_text(render(plan))
    run_python(f"""
        import ctypes, pathlib
        ctypes.CDLL({str(newest_nvrtc)!r}, ctypes.RTLD_GLOBAL)
        from megagen import compiler
        for path in pathlib.Path({str(tmp_path)!r}).glob("*.cu"):
            compiler.compile(path.read_text(), "sm_90a", name=path.name)
    """)
