"""That Blackwell kernels compile cleanly: a part of ``scripts/compile_sweep.py``, and its record of all."""

import itertools
import json
from pathlib import Path

import pytest

from megagen import compiler
from megagen.arch import Arch
from megagen.inspection.sass import find_nvdisasm
from megagen.planning import make_plan
from megagen.planning.sm100 import ARCHS, LADDER
from megagen.shape import PRESETS
from scripts.compile_sweep import contracts_of, examine, machine_code, registers_used

RECORD = Path(__file__).parents[1] / "docs" / "results" / "compile-sm100.json"
REFUSED = {"gpt-oss-120b"}  # 2,880 is no multiple of 128; test_shape.py has its error
ADMITTED = [preset for preset in PRESETS if preset not in REFUSED]

TWO_ROLES = """
extern "C" __global__ void __launch_bounds__(512, 1) roles(float* p, int n) {
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    p[threadIdx.x] += 1;
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
    float a[100];
    for (int i = 0; i < 100; ++i) a[i] = p[i * 512 + threadIdx.x];
    for (int k = 0; k < n; ++k) {
      #pragma unroll
      for (int i = 0; i < 100; ++i) a[i] *= a[(i + 7) % 100];
    }
    for (int i = 0; i < 100; ++i) p[i * 512 + threadIdx.x] = a[i];
  }
}
"""

needs_nvdisasm = pytest.mark.skipif(find_nvdisasm() is None, reason="nvdisasm is not installed")


@needs_nvdisasm
@pytest.mark.parametrize("target", compiler.TARGETS)
def test_registers_are_those_of_the_code_under_a_count(target):
    used = registers_used(machine_code(compiler.compile(TWO_ROLES, target, name="roles.cu").cubin))
    assert used.keys() == {40, 152}
    assert used[40] < 24 and 100 < used[152] <= 152


@needs_nvdisasm
@pytest.mark.parametrize("preset", ADMITTED)
def test_kernels_of_a_preset_are_clean(preset):
    """Half of the tiles for one of the targets, in turns, so that each tile meets each target."""
    n = ADMITTED.index(preset)
    contract = contracts_of(preset)[-1]
    for block_m in LADDER[n % 2 :: 2]:
        assert examine(preset, make_plan(contract, ARCHS[n // 2 % 2], block_m=block_m)).problems == ()


def test_the_record_has_every_kernel_and_all_are_clean():
    record = json.loads(RECORD.read_text())
    targets = [Arch.get(arch).compile_target for arch in ARCHS]
    kernels = {
        (preset, contract.ranks, target, block_m)
        for preset in ADMITTED
        for contract, target, block_m in itertools.product(contracts_of(preset), targets, LADDER)
    }
    rows = record["kernels"]
    assert {(row["preset"], row["ranks"], row["target"], row["block_m"]) for row in rows} == kernels
    assert record["refused"].keys() == REFUSED
    assert not [row for row in rows if row["problems"] or row["notes"] or row["stack"] or not row["mmas"]]
