"""Resources and instruction mix, checked against what ptxas says of the same kernels."""

import pytest

from megagen import compiler
from megagen.contract import Contract
from megagen.errors import InputError
from megagen.inspection.cubin import read_cubin
from megagen.inspection.sass import OTHER, find_nvdisasm, instruction_mix
from megagen.planning import make_plan
from megagen.render import render
from megagen.shape import MoEShape

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spill(float* p, int n) {
  __shared__ float shared[100];
  float a[96];
  for (int i = 0; i < 96; i++) a[i] = p[i * 1024 + threadIdx.x];
  shared[threadIdx.x % 100] = a[0];
  __syncthreads();
  for (int k = 0; k < n; k++) {
    #pragma unroll
    for (int i = 0; i < 96; i++) a[i] = a[i] * a[(i + 7) % 96] + shared[k % 100];
  }
  for (int i = 0; i < 96; i++) p[i * 1024 + threadIdx.x] = a[i];
}
"""

needs_nvdisasm = pytest.mark.skipif(find_nvdisasm() is None, reason="nvdisasm is not installed")


@pytest.fixture(scope="module", params=compiler.TARGETS)
def spilling(request):
    return compiler.compile(SPILLING, request.param, name="spill.cu", strict=False)


@pytest.fixture(scope="module")
def megakernel():
    plan = make_plan(Contract(MoEShape.preset("tiny"), ranks=2, max_tokens=64), "sm90")
    return compiler.compile(render(plan), "sm_90a", name=f"{plan.name}.cu")


def test_cubin_says_what_ptxas_says(spilling):
    read = read_cubin(spilling.cubin)
    assert read.entry == spilling.entry
    assert read.registers == spilling.registers
    assert read.stack == spilling.stack > 0
    assert read.static_shared == spilling.static_shared == 400
    assert read.max_threads == 1024
    assert read.code_bytes > 0


def test_cubin_of_a_megakernel(megakernel):
    read = read_cubin(megakernel.cubin)
    assert (read.entry, read.registers, read.stack) == (megakernel.entry, megakernel.registers, 0)


@needs_nvdisasm
@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_mix_of_a_blackwell_kernel(target):
    """Block-scaled MMAs of a pair, copies to tensor memory and loads from it, one tensor copy."""
    contract = Contract(MoEShape.preset("tiny"), 2, 64, "mxfp8_mxfp4")
    plan = make_plan(contract, "sm100", block_m=128)
    mix = instruction_mix(compiler.compile(render(plan), target, name=f"{plan.name}.cu").cubin)
    stages = mix.opcodes["UTCQMMA"] / plan.mmas_per_stage  # the compiler unrolls the loop over K blocks
    assert stages == int(stages) >= 1
    assert mix.opcodes["UTCCP"] == stages * (1 + plan.sf_atoms)
    assert mix.opcodes["LDTM"] == 2 and mix.opcodes["UTMALDG"] >= 1
    assert mix.opcodes["USETMAXREG"] == 3
    assert mix.by_category()["tensor core"] == mix.opcodes["UTCQMMA"]


@pytest.mark.parametrize("contents", [b"", b"no ELF", b"\x7fELF", b"\x7fELF" + bytes(200)], ids=len)
def test_what_is_no_cubin_is_refused(contents):
    with pytest.raises(InputError, match="not a cubin"):
        read_cubin(contents)


def test_truncated_cubin_is_refused(spilling):
    with pytest.raises(InputError, match="not a cubin"):
        read_cubin(spilling.cubin[: len(spilling.cubin) // 2])


@needs_nvdisasm
def test_instruction_mix_finds_spills_and_their_lines(spilling):
    mix = instruction_mix(spilling.cubin)
    assert mix.total == sum(mix.by_category().values())
    local = mix.by_category()["local memory"]
    assert local == sum(mix.spill_lines.values()) > 0
    lines = SPILLING.splitlines()
    assert any("a[(i + 7) % 96]" in lines[line - 1] for line in mix.spill_lines)


@needs_nvdisasm
def test_instruction_mix_of_a_megakernel(megakernel):
    mix = instruction_mix(megakernel.cubin)
    categories = mix.by_category()
    for category in ("tensor core", "bulk copy", "mbarrier", "registers per warp", "global memory", OTHER):
        assert categories.get(category, 0) > 0, category
    assert "local memory" not in categories
    assert mix.spill_lines == {}


@needs_nvdisasm
def test_nvdisasm_refusal_is_an_input_error():
    with pytest.raises(InputError, match="nvdisasm refuses"):
        instruction_mix(b"no cubin")
