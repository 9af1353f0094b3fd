"""The runtime without a GPU: parameters, argument checks, error texts, and where kernels come from."""

import ctypes
import dataclasses
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_gpu import CPU, FakeStream, good

from megagen import companion, errors
from megagen.arch import Arch
from megagen.contract import Contract
from megagen.planning import PlanSet, make_plan
from megagen.protocol import STATUS_FIELDS, Awaited, RoleId, params_fields, struct_offsets
from megagen.runtime import driver, kernels, layer, local
from megagen.runtime.arguments import ArgumentCheck
from megagen.runtime.layer import MegaMoE
from megagen.runtime.params import ParamStruct
from megagen.runtime.patience import wait_for_streams
from megagen.runtime.peers import agree_on, together
from megagen.runtime.status import StatusBlock
from megagen.runtime.symmetric import SymmBuffer
from megagen.runtime.topology import RankPlace, check_one_domain
from megagen.shape import MoEShape

TINY = MoEShape.preset("tiny")
CONTRACT = Contract(TINY, ranks=1, max_tokens=64)


# Parameter structs


def test_param_struct_places_fields_by_c_rules() -> None:
    fields = params_fields(3)
    params = ParamStruct(fields)
    offsets, size = struct_offsets(fields)
    params.set("output", 0x1122334455667788)
    params.set("num_tokens", 7)
    params.set("offsets", [0, -4096, 1 << 40])
    packed = params.to_bytes()
    assert len(packed) == size
    assert packed[offsets["output"] :][:8] == (0x1122334455667788).to_bytes(8, "little")
    assert packed[offsets["num_tokens"] :][:4] == (7).to_bytes(4, "little")
    assert struct.unpack_from("<3q", packed, offsets["offsets"]) == (0, -4096, 1 << 40)


def test_param_struct_words_and_pointer_name_the_same_memory() -> None:
    params = ParamStruct(companion.QUANTIZE_FIELDS)
    params.u64[params.word["topk_ids"]] = 42
    params.u32[params.word["num_tokens"]] = 43
    address = ctypes.c_uint64.from_address(params.pointers).value
    assert ctypes.string_at(address, params.size) == params.to_bytes()
    offsets, _ = struct_offsets(companion.QUANTIZE_FIELDS)
    assert params.to_bytes()[offsets["topk_ids"]] == 42
    assert params.to_bytes()[offsets["num_tokens"]] == 43


def test_a_writer_writes_what_single_fields_do() -> None:
    fields = params_fields(2)
    one_by_one, at_once = ParamStruct(fields), ParamStruct(fields)
    values = {field.name: [1, -2] if field.count == 2 else 3 + at for at, field in enumerate(fields)}
    for name, value in values.items():
        one_by_one.set(name, value)
    at_once.writer()(*[values[f.name] for f in fields[:-1]], *values["offsets"])
    assert at_once.to_bytes() == one_by_one.to_bytes()


def test_param_struct_refuses_wrong_size() -> None:
    with pytest.raises(ValueError, match="offsets takes 2 numbers, not 3"):
        ParamStruct(params_fields(2)).set("offsets", [0, 0, 0])


# Companion kernel


def test_quantize_grid_covers_all_groups_up_to_what_fits() -> None:
    assert companion.quantize_ctas(512, 0, 4) == 1
    assert companion.quantize_ctas(512, 4, 4) == 1
    assert companion.quantize_ctas(512, 5, 4) == 2
    assert companion.quantize_ctas(4096, 4096, 132) == 8 * 132


def test_quantize_name_follows_the_buffer_only() -> None:
    clamped = dataclasses.replace(CONTRACT, clamp=7.0, activation="exact")
    larger = dataclasses.replace(CONTRACT, max_tokens=65)
    assert companion.quantize_name(clamped, "sm90") == companion.quantize_name(CONTRACT, "sm90")
    assert companion.quantize_name(larger, "sm90") != companion.quantize_name(CONTRACT, "sm90")


def test_quantize_kernel_compiles_clean() -> None:
    from megagen import compiler
    from megagen.render import QUANTIZE_ENTRY, render_quantize

    source = render_quantize(CONTRACT, "sm90")
    kernel = compiler.compile(source, "sm_90a", name="quantize.cu")
    assert kernel.entry == QUANTIZE_ENTRY
    assert max(len(line) for line in source.splitlines()) <= 130
    assert source == render_quantize(dataclasses.replace(CONTRACT, clamp=7.0), "sm90")


# Argument checks

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_good_arguments_pass(tokens: int) -> None:
    check = ArgumentCheck(CONTRACT, CPU)
    assert check.inputs(**good(tokens))[0] == tokens
    assert check.inputs(**good(tokens, topk_ids=torch.zeros(tokens, 2, dtype=torch.int32)))[0] == tokens
    assert check.inputs(**good(tokens, topk_weights=torch.zeros(tokens, 2, dtype=BF16)))[0] == tokens
    quantized = {"x": torch.zeros(tokens, 512).to(torch.float8_e4m3fn), "x_sf": torch.ones(tokens, 4)}
    assert check.inputs(**good(tokens, **quantized))[0] == tokens


def test_row_stride_of_a_slice_is_used() -> None:
    wide = torch.zeros(4, 1024, dtype=torch.bfloat16)[:, :512]
    narrow = torch.zeros(4, 1024).to(E4M3)[:, 512:]
    for changes, stride in (({"x": wide}, 2048), ({"x": narrow, "x_sf": torch.ones(4, 4)}, 1024)):
        arguments = good(**changes)
        tokens, inputs = ArgumentCheck(CONTRACT, CPU).inputs(**arguments)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in arguments.values()]
        assert (tokens, *inputs) == (4, *addresses, stride, True, False)


def test_the_stride_of_a_single_row_does_not_matter() -> None:
    check = ArgumentCheck(CONTRACT, CPU)
    odd = torch.zeros(4, 513, dtype=torch.bfloat16)[:1, :512]
    assert check.inputs(**good(1, x=odd))[0] == 1
    with pytest.raises(errors.InputError, match="contiguous"):
        check.inputs(**good(1, x=torch.zeros(1, 1024, dtype=torch.bfloat16)[:, ::2]))


BAD_ARGUMENTS = {
    "x dtype": ({"x": torch.zeros(4, 512)}, "x has dtype float32; convert it to bfloat16"),
    "x without sf": ({"x": torch.zeros(4, 512).to(E4M3)}, "no scale factors"),
    "x columns": ({"x": torch.zeros(4, 256, dtype=BF16)}, r"x has shape \[4, 256\].*\[T, 512\]"),
    "x dimensions": ({"x": torch.zeros(512, dtype=BF16)}, r"x has shape \[512\]"),
    "x device": ({"x": torch.zeros(4, 512, dtype=BF16, device="meta")}, "x is on meta"),
    "x transposed": ({"x": torch.zeros(512, 4, dtype=BF16).T}, "x has strides.*contiguous"),
    "x rows misaligned": ({"x": torch.zeros(4, 516, dtype=BF16)[:, :512]}, "multiples of 16 bytes"),
    "x misaligned": ({"x": torch.zeros(4, 516, dtype=BF16)[:, 4:]}, "multiples of 16 bytes"),
    "ids dtype": (
        {"topk_ids": torch.zeros(4, 2)},
        "topk_ids has dtype float32; convert it to int32 or int64",
    ),
    "ids rows": ({"topk_ids": torch.zeros(3, 2, dtype=torch.int32)}, r"topk_ids has shape \[3, 2\]"),
    "ids top-k": ({"topk_ids": torch.zeros(4, 3, dtype=torch.int32)}, r"topk_ids .*needs \[4, 2\]"),
    "ids strides": ({"topk_ids": torch.zeros(2, 4, dtype=torch.int32).T}, "topk_ids.*contiguous"),
    "weights dtype": ({"topk_weights": torch.zeros(4, 2, dtype=torch.float64)}, "topk_weights has dtype"),
    "weights shape": ({"topk_weights": torch.zeros(4)}, "topk_weights has shape"),
    "sf shape": ({"x": torch.zeros(4, 512).to(E4M3), "x_sf": torch.ones(4, 5)}, "scale factors has shape"),
    "sf dtype": (
        {"x": torch.zeros(4, 512).to(E4M3), "x_sf": torch.ones(4, 4).int()},
        "scale factors has dtype",
    ),
    "sf columns first": (
        {"x": torch.zeros(4, 512).to(E4M3), "x_sf": torch.ones(4, 4).T},
        "scale factors.*contiguous",
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_named(case: str) -> None:
    changes, message = BAD_ARGUMENTS[case]
    with pytest.raises(errors.InputError, match=message):
        ArgumentCheck(CONTRACT, CPU).inputs(**good(**changes))


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights"])
@pytest.mark.parametrize("value", [None, [[1.0]], torch.zeros(4, 512).numpy()], ids=["None", "list", "array"])
def test_what_is_no_tensor_is_named(name: str, value: object) -> None:
    with pytest.raises(errors.InputError, match=f"{name} is a {type(value).__name__}"):
        ArgumentCheck(CONTRACT, CPU).inputs(**good(**{name: value}))


def test_too_many_tokens() -> None:
    with pytest.raises(errors.InputError, match=r"65 tokens.*max_tokens=64"):
        ArgumentCheck(CONTRACT, CPU).inputs(**good(65))


def test_out_is_checked() -> None:
    check = ArgumentCheck(CONTRACT, CPU)
    check.output(torch.zeros(4, 512, dtype=BF16), 4)
    for bad in (
        torch.zeros(4, 512),
        torch.zeros(5, 512, dtype=BF16),
        torch.zeros(4, 1024, dtype=BF16)[:, :512],
        torch.zeros(4, 512, dtype=BF16, device="meta"),
    ):
        with pytest.raises(errors.InputError, match="out "):
            check.output(bad, 4)


def test_scale_factors_and_out_must_be_tensors() -> None:
    check = ArgumentCheck(CONTRACT, CPU)
    with pytest.raises(errors.InputError, match="x's scale factors is a list"):
        check.inputs(**good(x=torch.zeros(4, 512).to(E4M3), x_sf=[1.0]))
    with pytest.raises(errors.InputError, match="out is a list"):
        check.output([0.0], 4)


@pytest.mark.parametrize("value", [2.5, "3"])
def test_num_tokens_must_be_whole(value: object) -> None:
    with pytest.raises(errors.InputError, match=f"num_tokens={value!r} is a {type(value).__name__}"):
        ArgumentCheck(CONTRACT, CPU).count(value, 4)


def test_num_tokens_is_checked() -> None:
    check = ArgumentCheck(CONTRACT, CPU)
    assert check.count(3, 4) == (3, 0)
    on_device = torch.tensor([3], dtype=torch.int32)
    assert check.count(on_device, 4) == (4, on_device.data_ptr())
    for bad in (-1, 5):
        with pytest.raises(errors.InputError, match=f"num_tokens={bad}.*4 rows"):
            check.count(bad, 4)
    for tensor in (torch.tensor([3]), torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(errors.InputError, match="num_tokens"):
            check.count(tensor, 4)


# Status block

STATUS_WORDS = {field.name: index for index, field in enumerate(STATUS_FIELDS)}


def block(**values: int) -> StatusBlock:
    status = StatusBlock()
    for name, value in values.items():
        status.words[STATUS_WORDS[name]] = value
    return status


def test_quiet_status_is_no_error() -> None:
    assert block().take_error(0, 1.0) is None


@pytest.mark.parametrize("awaited", [a for a in Awaited if a != Awaited.NUM_TOKENS_IN_RANGE])
def test_timeout_names_who_waits_for_what(awaited: Awaited) -> None:
    status = block(code=awaited, rank=2, sm=17, role=RoleId.LOAD_TOKENS, peer=5, expected=9, seen=8)
    error = status.take_error(2, 0.5)
    assert isinstance(error, errors.MegaMoETimeout) and isinstance(error, TimeoutError)
    for part in ("rank 2", "SM 17", "load_tokens", "0.5 s", "5", "expected 9, seen 8"):
        assert part in str(error)
    assert status.take_error(2, 0.5) is not None, "a timeout stays until reset"


def test_device_count_out_of_range_is_an_input_error() -> None:
    error = block(code=Awaited.NUM_TOKENS_IN_RANGE, expected=64, seen=70).take_error(0, 1.0)
    assert isinstance(error, errors.InputError) and "num_tokens=70" in str(error) and "64" in str(error)


def test_peer_abort_names_the_peer() -> None:
    error = block(aborted_by=4).take_error(1, 1.0)
    assert isinstance(error, errors.PeerAborted) and "rank 3" in str(error) and "rank 1" in str(error)


def test_dropped_ids_are_reported_once_each() -> None:
    status = block(dropped_ids=3)
    assert "dropped 3 ids" in str(status.take_error(0, 1.0))
    assert status.take_error(0, 1.0) is None
    status.words[STATUS_WORDS["dropped_ids"]] = 5
    assert "dropped 2 ids" in str(status.take_error(0, 1.0))


# Groups


def place(host: str = "a", gpu: str = "0", fabric: str = "", apart: tuple[str, ...] = ()) -> RankPlace:
    return RankPlace(host, gpu, fabric, apart)


def test_one_host_or_one_fabric_is_one_domain() -> None:
    check_one_domain([place(gpu="0"), place(gpu="1")])
    check_one_domain([place("a", fabric="f/1"), place("b", fabric="f/1")])


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([place("a"), place("b", "1")], "ranks 0 and 1 are on different hosts"),
        ([place("a", fabric="f/1"), place("b", "1", fabric="f/2")], "different hosts"),
        ([place(), place(gpu="1"), place(gpu="0")], "ranks 0 and 2 use the same GPU"),
        ([place(gpu="0", apart=("1",)), place(gpu="1")], "without peer access"),
    ],
)
def test_groups_across_domains_are_refused(places: list[RankPlace], message: str) -> None:
    with pytest.raises(errors.NVLinkDomainError, match=message):
        check_one_domain(places)


class FakePeers:
    """Rank 0 of a group whose other ranks report these values."""

    def __init__(self, *others: object) -> None:
        self.rank, self.ranks, self.others = 0, 1 + len(others), others

    def gather(self, value: object) -> list[object]:
        return [value, *self.others]


def test_contract_mismatch_names_ranks_and_values() -> None:
    other = dataclasses.replace(CONTRACT, max_tokens=128)
    same = (CONTRACT.hash, CONTRACT.to_dict())
    agree_on(CONTRACT, FakePeers(same, same))
    message = r"ranks 0 and 2.*max_tokens: 64 on rank 0, 128 on rank 2"
    with pytest.raises(errors.ContractMismatch, match=message):
        agree_on(CONTRACT, FakePeers(same, (other.hash, other.to_dict())))


def test_a_step_of_the_set_up_fails_on_all_ranks_or_none() -> None:
    def fail() -> None:
        raise errors.CacheError("no room")

    assert together(FakePeers((2, "")), "counting", lambda: 1) == [1, 2]
    with pytest.raises(errors.CacheError, match="no room"):
        together(FakePeers((2, "")), "counting", fail)
    with pytest.raises(errors.PeerAborted, match="rank 1 failed while counting: no room"):
        together(FakePeers((None, "no room")), "counting", lambda: 1)


def test_shares_of_sms() -> None:
    assert local.share_sms(None, 8, 132) == [16] * 8
    assert local.share_sms([100, 32], 2, 132) == [100, 32]
    for bad in ([100, 33], [132], [0, 4], 67):
        with pytest.raises(errors.InputError, match="num_sms"):
            local.share_sms(bad, 2, 132)


# Waiting


def test_wait_ends_when_the_work_does() -> None:
    assert wait_for_streams([FakeStream(3), FakeStream(0)], lambda: 0, limit_s=60)


def test_wait_gives_up_without_progress() -> None:
    assert not wait_for_streams([FakeStream(None)], lambda: 5, limit_s=0.05)


def test_progress_extends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megagen.runtime.patience._PROBE_INTERVAL_S", 0.01)
    launches = iter([1, 2, 3, 4, *[5] * 1000])
    assert wait_for_streams([FakeStream(25)], lambda: next(launches), limit_s=0.05)


# Machine


def test_no_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(errors.DeviceError, match="no GPU"):
        SymmBuffer(TINY, max_tokens=8)


def test_old_driver_is_named() -> None:
    driver.check_driver(13000)
    with pytest.raises(errors.DeviceError, match=r"CUDA 12\.9, kernels need 13\.0"):
        driver.check_driver(12090)


def test_planning_and_rendering_do_not_import_torch() -> None:
    code = "import megagen, megagen.render, megagen.planning, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_experts_must_divide() -> None:
    with pytest.raises(errors.ShapeError, match="not divisible"):
        MegaMoE.local_group(TINY, ranks=3, max_tokens=8)


# Where kernels come from


def test_without_folder_and_compiler_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.KERNELS_VARIABLE, raising=False)
    with pytest.raises(errors.CacheError, match="jit=False"):
        kernels.bundle_kernels(CONTRACT, Arch.get("sm90"), sms=132, jit=False)


def test_missing_folder_is_an_error_unless_jit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAGEN_CACHE_DIR", str(tmp_path / "cache"))
    arguments = {"sms": 132, "directory": tmp_path / "nothing", "plan": make_plan(CONTRACT, block_m=16)}
    with pytest.raises(errors.CacheError, match="nothing"):
        kernels.bundle_kernels(CONTRACT, Arch.get("sm90"), **arguments)
    bundle = kernels.bundle_kernels(CONTRACT, Arch.get("sm90"), **arguments, jit=True)
    assert [plan.block_m for plan in bundle.plans.plans] == [16]


BLOCK_COMPILER = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "jinja2" or name == "cuda.bindings.nvrtc":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
"""


def test_kernels_built_ahead_of_time_need_neither_nvrtc_nor_jinja(tmp_path: Path) -> None:
    from megagen.build import KernelSet, generate

    plan = make_plan(CONTRACT, block_m=16)
    generate(KernelSet(PlanSet((64,), (plan,)), None), tmp_path, compile=True)
    load = f"""
from megagen.arch import Arch
from megagen.contract import Contract
from megagen.runtime.kernels import bundle_kernels
from megagen.runtime.layer import MegaMoE
from megagen.shape import MoEShape

contract = Contract(MoEShape.preset("tiny"), 1, 64)
bundle = bundle_kernels(contract, Arch.get("sm90"), sms=132, directory={str(tmp_path)!r})
print(bundle.plans.plans[0].hash, bundle.kernels[0].entry, bundle.quantize.entry)
"""
    ran = subprocess.run([sys.executable, "-c", BLOCK_COMPILER + load], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [plan.hash, "megamoe", "quantize_inputs"]


def test_kernels_from_the_cache_need_no_jinja(tmp_path: Path) -> None:
    """Importing it was about a third of a start from the cache."""
    load = """
from megagen.arch import Arch
from megagen.contract import Contract
from megagen.planning import make_plan
from megagen.runtime.kernels import bundle_kernels
from megagen.shape import MoEShape

contract = Contract(MoEShape.preset("tiny"), 1, 64)
bundle = bundle_kernels(contract, Arch.get("sm90"), sms=132, plan=make_plan(contract, block_m=16))
print(bundle.kernels[0].entry, bundle.quantize.entry)
"""
    block = BLOCK_COMPILER.replace(' or name == "cuda.bindings.nvrtc"', "")
    environment = {**os.environ, "MEGAGEN_CACHE_DIR": str(tmp_path)}
    environment.pop(kernels.KERNELS_VARIABLE, None)
    for prelude in ("", block):
        ran = subprocess.run(
            [sys.executable, "-c", prelude + load], capture_output=True, text=True, env=environment
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.split() == ["megamoe", "quantize_inputs"]


def test_timeout_must_be_positive() -> None:
    with pytest.raises(errors.InputError, match="timeout=0"):
        layer.MegaMoE(TINY, max_tokens=8, timeout=0)
