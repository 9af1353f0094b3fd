"""The host side on Blackwell against a fake driver: tensor maps, pairs of CTAs, formats."""

from types import SimpleNamespace

import pytest
import torch
from fake_gpu import CPU, FakeDriver, call_arguments, fake

from megagen import compiler
from megagen.arch import Arch
from megagen.build import KernelSet, generate, plan_layer
from megagen.companion import quantize_name
from megagen.contract import Contract
from megagen.errors import InputError, PlanError
from megagen.planning import make_plan
from megagen.planning.planner import largest_local_layout
from megagen.planning.sm100 import LADDER
from megagen.protocol import struct_offsets
from megagen.render import QUANTIZE_ENTRY, render_quantize
from megagen.runtime import driver, launch, local, symmetric
from megagen.runtime.arguments import ArgumentCheck
from megagen.runtime.layer import MegaMoE
from megagen.runtime.params import ParamStruct
from megagen.runtime.symmetric import SymmBuffer
from megagen.shape import MoEShape
from megagen.tensor_map import TensorMap
from megagen.weights import random_experts

__all__ = ["fake"]

TINY = MoEShape.preset("tiny")
CONTRACT = Contract(TINY, 1, 64, "mxfp8_mxfp4")


class BlackwellDriver(FakeDriver):
    """Encodes a tensor map as its address, over and over."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor_maps, self.ranks, self.maps = True, 1, []

    def cuTensorMapEncodeTiled(self, *arguments: object) -> tuple[object, object]:
        self.maps.append(arguments)
        return self._real.CUresult.CUDA_SUCCESS, SimpleNamespace(opaque=[arguments[2]] * 16)


@pytest.fixture
def blackwell(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> BlackwellDriver:
    made = BlackwellDriver()

    class FakeGpu(driver.Gpu):
        device = CPU

    for module in (driver, launch):
        monkeypatch.setattr(module, "bindings", lambda: made)
    for module in (symmetric, local):
        monkeypatch.setattr(module, "require_gpu", lambda device: FakeGpu(0, "fake", Arch.get("sm100"), 148))
    monkeypatch.setattr(launch, "load_kernel", lambda *_, **__: 1)
    return made


def test_a_call_takes_whole_pairs_and_tensor_maps(blackwell: BlackwellDriver) -> None:
    moe = MegaMoE(TINY, max_tokens=64, num_sms=7)
    assert moe.contract.format == moe.buffer.contract.format == "mxfp8_mxfp4"
    moe.load_weights(*random_experts(TINY, range(8), format="mxfp8_mxfp4"))
    moe(*call_arguments(5))
    quantize, kernel = blackwell.launches
    plan = moe.launcher_for(5).plan
    assert (kernel.grid, kernel.threads, kernel.shared) == (6, 512, plan.smem.size)
    weights = moe._weights
    assert weights is not None
    assert kernel.params.w13_map == weights.w13.data_ptr() and kernel.params.w2_map == weights.w2.data_ptr()
    assert kernel.params.w2_sf == weights.w2_sf.data_ptr()
    assert quantize.params.symm == kernel.params.symm == moe.buffer.symm_address


def test_the_driver_is_asked_for_unpacked_e2m1(blackwell: BlackwellDriver) -> None:
    plan = make_plan(CONTRACT, "sm100", 64)
    encoded = [driver.encode_for_driver(one) for one in plan.weight_maps(0x1000, 0x2000)]
    assert encoded == [(0x1000).to_bytes(8, "little") * 16, (0x2000).to_bytes(8, "little") * 16]
    real = blackwell._real
    kind, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill = blackwell.maps[0]
    assert kind == real.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B
    assert (rank, address) == (2, 0x1000)
    assert [int(n) for n in dims] == [512, 8 * 1024] and [int(n) for n in strides] == [256]
    assert [int(n) for n in box] == [128, 128] and [int(n) for n in steps] == [1, 1]
    assert interleave == real.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert swizzle == real.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert promotion == real.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert fill == real.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


def test_tensor_maps_are_aligned_in_the_parameters() -> None:
    plan = make_plan(CONTRACT, "sm100", 64)
    offsets, size = struct_offsets(plan.params)
    assert offsets["w13_map"] % 64 == offsets["w2_map"] % 64 == size % 64 == 0
    params = ParamStruct(plan.params)
    params.set("w2_map", bytes(range(128)))
    assert params.to_bytes()[offsets["w2_map"] :][:128] == bytes(range(128))
    with pytest.raises(ValueError, match="w13_map takes 128 bytes, not 4"):
        params.set("w13_map", b"1234")
    weights = plan.weight_params({"w13": 1, "w13_sf": 2, "w2": 3, "w2_sf": 4})
    assert isinstance(weights["w13_map"], TensorMap) and weights["w13_map"].address == 1
    assert (weights["w13_sf"], weights["w2_sf"]) == (2, 4)


def test_a_workspace_has_room_for_every_tile(blackwell: BlackwellDriver) -> None:
    buffer = SymmBuffer(TINY, max_tokens=64)
    for block_m in LADDER:
        buffer.require_room(make_plan(CONTRACT, "sm100", 64, block_m=block_m))
    assert buffer.memory_bytes()["local"] == largest_local_layout(CONTRACT, "sm100", 148).size


def test_one_sm_is_refused(blackwell: BlackwellDriver) -> None:
    with pytest.raises(PlanError, match="sms=1: a tile takes a cluster of 2"):
        MegaMoE(TINY, max_tokens=64, num_sms=1).prepare()


def test_weights_of_another_format_are_refused(blackwell: BlackwellDriver) -> None:
    with pytest.raises(InputError, match=r"w13 has dtype torch\.float8_e4m3fn; give torch\.uint8"):
        MegaMoE(TINY, max_tokens=64).load_weights(*random_experts(TINY, range(8)))


def test_scale_factors_of_tokens_are_packed_words() -> None:
    check = ArgumentCheck(CONTRACT, CPU)
    x = torch.zeros(4, 512).to(torch.float8_e4m3fn)
    ids, weights = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 2)
    assert check.inputs(x, torch.zeros(4, 4, dtype=torch.int32), ids, weights)[0] == 4
    with pytest.raises(InputError, match="scale factors has dtype float32; convert it to int32"):
        check.inputs(x, torch.ones(4, 4), ids, weights)


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_the_companion_compiles_clean(target: str) -> None:
    source = render_quantize(CONTRACT, "sm100")
    kernel = compiler.compile(source, target, name="quantize.cu")
    assert kernel.entry == QUANTIZE_ENTRY


def test_architectures_of_one_format_have_companions_of_their_own(tmp_path) -> None:
    for arch in ("sm100", "sm103"):
        generate(KernelSet(plan_layer(CONTRACT, arch, tokens=[64]), None), tmp_path)
    names = {path.stem for path in (tmp_path / "helpers").glob("*.cu")}
    assert names == {quantize_name(CONTRACT, arch) for arch in ("sm100", "sm103")}
