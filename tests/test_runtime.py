"""The runtime without a GPU: parameters, argument checks, error texts, and calls against a fake driver."""

import ctypes
import dataclasses
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megagen import companion, errors
from megagen.arch import Arch
from megagen.compiler import CompiledKernel
from megagen.contract import Contract
from megagen.planning import PlanSet, make_plan
from megagen.protocol import STATUS_FIELDS, Awaited, RoleId, params_fields, struct_offsets
from megagen.runtime import driver, kernels, launch, layer, local, symmetric
from megagen.runtime.arguments import ArgumentCheck
from megagen.runtime.kernels import KernelBundle
from megagen.runtime.layer import MegaMoE
from megagen.runtime.params import ParamStruct
from megagen.runtime.patience import wait_for_streams
from megagen.runtime.status import StatusBlock
from megagen.runtime.symmetric import SymmBuffer, check_same_contract
from megagen.runtime.topology import RankPlace, check_one_domain
from megagen.shape import MoEShape
from megagen.weights import random_experts

CPU = torch.device("cpu")
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
    assert companion.quantize_name(clamped) == companion.quantize_name(CONTRACT)
    assert companion.quantize_name(larger) != companion.quantize_name(CONTRACT)


def test_quantize_kernel_compiles_clean() -> None:
    from megagen import compiler
    from megagen.render import QUANTIZE_ENTRY, render_quantize

    source = render_quantize(CONTRACT)
    kernel = compiler.compile(source, "sm_90a", name="quantize.cu")
    assert kernel.entry == QUANTIZE_ENTRY
    assert max(len(line) for line in source.splitlines()) <= 130
    assert source == render_quantize(dataclasses.replace(CONTRACT, clamp=7.0))


# Argument checks


def good(tokens: int = 4, **changes: torch.Tensor) -> dict[str, torch.Tensor | None]:
    arguments = {
        "x": torch.zeros(tokens, 512, dtype=torch.bfloat16),
        "x_sf": None,
        "topk_ids": torch.zeros(tokens, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(tokens, 2),
    }
    return arguments | changes


@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_good_arguments_pass(tokens: int) -> None:
    check = ArgumentCheck(CONTRACT, CPU)
    assert check.tokens(**good(tokens)) == tokens
    assert check.tokens(**good(tokens, topk_ids=torch.zeros(tokens, 2, dtype=torch.int32))) == tokens
    assert check.tokens(**good(tokens, topk_weights=torch.zeros(tokens, 2, dtype=torch.bfloat16))) == tokens
    quantized = {"x": torch.zeros(tokens, 512).to(torch.float8_e4m3fn), "x_sf": torch.ones(tokens, 4)}
    assert check.tokens(**good(tokens, **quantized)) == tokens


def test_row_stride_of_a_slice_is_used() -> None:
    wide = torch.zeros(4, 1024, dtype=torch.bfloat16)[:, :512]
    assert ArgumentCheck(CONTRACT, CPU).tokens(**good(x=wide)) == 4
    assert ArgumentCheck.row_bytes(wide, 4) == 2048


BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BAD_ARGUMENTS = {
    "x dtype": ({"x": torch.zeros(4, 512)}, "x has dtype float32; convert it to bfloat16"),
    "x without sf": ({"x": torch.zeros(4, 512).to(E4M3)}, "no scale factors"),
    "x columns": ({"x": torch.zeros(4, 256, dtype=BF16)}, r"x has shape \[4, 256\].*\[T, 512\]"),
    "x dimensions": ({"x": torch.zeros(512, dtype=BF16)}, r"x has shape \[512\]"),
    "x device": ({"x": torch.zeros(4, 512, dtype=BF16, device="meta")}, "x is on meta"),
    "x transposed": ({"x": torch.zeros(512, 4, dtype=BF16).T}, "x has strides.*contiguous"),
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
        ArgumentCheck(CONTRACT, CPU).tokens(**good(**changes))


def test_too_many_tokens() -> None:
    with pytest.raises(errors.InputError, match=r"65 tokens.*max_tokens=64"):
        ArgumentCheck(CONTRACT, CPU).tokens(**good(65))


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
    status.words[StatusBlock.DROPPED] = 5
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


def test_contract_mismatch_names_ranks_and_values() -> None:
    other = dataclasses.replace(CONTRACT, max_tokens=128)
    same = (CONTRACT.hash, CONTRACT.to_dict())
    check_same_contract([same, same])
    with pytest.raises(
        errors.ContractMismatch, match=r"ranks 0 and 2.*max_tokens: 64 on rank 0, 128 on rank 2"
    ):
        check_same_contract([same, same, (other.hash, other.to_dict())])


def test_shares_of_sms() -> None:
    assert local.share_sms(None, 8, 132) == [16] * 8
    assert local.share_sms([100, 32], 2, 132) == [100, 32]
    for bad in ([100, 33], [132], [0, 4], 67):
        with pytest.raises(errors.InputError, match="num_sms"):
            local.share_sms(bad, 2, 132)


# Waiting


class FakeStream:
    """A stream whose work is done after some polls; never, if ``polls`` is None."""

    def __init__(self, polls: int | None) -> None:
        self.polls, self.cuda_stream = polls, 0

    def record_event(self) -> "FakeStream":
        return self

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def query(self) -> bool:
        if self.polls is None:
            return False
        self.polls -= 1
        return self.polls < 0


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


# Calls against a fake driver


class FakeDriver:
    """cuda-python's driver module with calls that need no GPU; records launches as (grid, params, stream)."""

    def __init__(self) -> None:
        from cuda.bindings import driver as real

        self._real = real
        self.launches: list[SimpleNamespace] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("cu") and name != "cuuint32_t" and name != "cuuint64_t":
            return lambda *arguments: (self._real.CUresult.CUDA_SUCCESS, 1)
        return getattr(self._real, name)

    def cuLaunchKernelEx(self, config: object, function: object, pointers: int, extra: int) -> tuple[object]:
        struct = ctypes.c_uint64.from_address(pointers).value
        fields = companion.QUANTIZE_FIELDS if not config.numAttrs else params_fields(self.ranks)
        offsets, size = struct_offsets(fields)
        packed = ctypes.string_at(struct, size)
        values = {
            f.name: int.from_bytes(packed[offsets[f.name] :][: min(f.size, 8)], "little") for f in fields
        }
        self.launches.append(
            SimpleNamespace(
                grid=config.gridDimX,
                threads=config.blockDimX,
                shared=config.sharedMemBytes,
                cooperative=bool(config.numAttrs),
                params=SimpleNamespace(**values),
            )
        )
        return (self._real.CUresult.CUDA_SUCCESS,)


def fake_kernel(name: str) -> CompiledKernel:
    resources = dict.fromkeys(("registers", "stack", "spill_stores", "spill_loads", "static_shared"), 0)
    return CompiledKernel(
        name, "sm_90a", "entry", b"", "", "", nvrtc="", options=(), compile_ms=0.0, **resources
    )


def fake_compile(plans: PlanSet, contract: Contract, arch: Arch) -> KernelBundle:
    return KernelBundle(plans, tuple(fake_kernel(plan.name) for plan in plans.plans), fake_kernel("quantize"))


class FakeProgress:
    def __init__(self, launches: torch.Tensor, abort: torch.Tensor, stream: FakeStream) -> None:
        self.launches, self.aborted_by = lambda: int(launches), lambda: int(abort)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    driver_module = FakeDriver()
    driver_module.ranks = 1

    class FakeGpu(driver.Gpu):
        device = CPU

    for module in (driver, launch):
        monkeypatch.setattr(module, "bindings", lambda: driver_module)
    for module in (symmetric, local):
        monkeypatch.setattr(module, "private_stream", lambda *_: FakeStream(0))
        monkeypatch.setattr(module, "require_gpu", lambda device: FakeGpu(0, "fake", Arch.get("sm90"), 132))
    monkeypatch.setattr(symmetric, "Progress", FakeProgress)
    monkeypatch.setattr(kernels, "_compile", fake_compile)
    monkeypatch.delenv(kernels.KERNELS_VARIABLE, raising=False)
    for name in ("current_stream", "default_stream", "ExternalStream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: FakeStream(0))
    driver._load.cache_clear()
    yield driver_module
    driver._load.cache_clear()


@pytest.fixture
def moe(fake: FakeDriver) -> MegaMoE:
    made = MegaMoE(TINY, max_tokens=64, num_sms=7, timeout=2.0)
    made.load_weights(*random_experts(TINY, range(8)))
    return made


def call_arguments(tokens: int) -> list[torch.Tensor]:
    return [t for t in good(tokens).values() if t is not None]


def test_a_call_launches_companion_and_kernel(moe: MegaMoE, fake: FakeDriver) -> None:
    x, ids, weights = call_arguments(5)
    y = moe(x, ids, weights)
    quantize, kernel = fake.launches
    assert y.shape == (5, 512) and y.dtype == BF16
    assert not quantize.cooperative and quantize.grid == companion.quantize_ctas(512, 5, 132)
    q = quantize.params
    assert (q.x, q.x_sf, q.row_bytes, q.topk_ids, q.topk_weights) == (
        x.data_ptr(),
        0,
        1024,
        ids.data_ptr(),
        weights.data_ptr(),
    )
    assert (q.num_tokens, q.num_tokens_ptr, q.ids_are_int64, q.weights_are_bf16) == (5, 0, 1, 0)
    plan, p = moe.launcher_for(5).plan, kernel.params
    assert (kernel.grid, kernel.threads, kernel.shared) == (7, plan.threads, plan.smem.size)
    assert kernel.cooperative
    assert (p.output, p.num_tokens, p.num_tokens_ptr) == (y.data_ptr(), 5, 0)
    assert (p.timeout_ns, p.rank, p.offsets) == (2_000_000_000, 0, 0)
    assert p.symm == q.symm == moe.buffer.symm_address
    assert p.w13 != 0 and p.w2_sf != 0


def test_inputs_in_place_need_no_copy(moe: MegaMoE, fake: FakeDriver) -> None:
    views = moe.inputs(3)
    moe((views.x, views.x_sf), views.topk_ids, views.topk_weights)
    assert [launch.cooperative for launch in fake.launches] == [True]
    moe((views.x, views.x_sf), views.topk_ids.clone(), views.topk_weights)
    assert [launch.cooperative for launch in fake.launches] == [True, False, True]


def test_a_rank_without_tokens_still_launches(moe: MegaMoE, fake: FakeDriver) -> None:
    assert moe(*call_arguments(0)).shape == (0, 512)
    assert [launch.cooperative for launch in fake.launches] == [True]


def test_num_tokens_on_host_and_device(moe: MegaMoE, fake: FakeDriver) -> None:
    moe(*call_arguments(8), num_tokens=3)
    assert [launch.params.num_tokens for launch in fake.launches] == [3, 3]
    fake.launches.clear()
    count = torch.tensor([3], dtype=torch.int32)
    moe(*call_arguments(8), num_tokens=count)
    counts = [(launch.params.num_tokens, launch.params.num_tokens_ptr) for launch in fake.launches]
    assert counts == [(8, count.data_ptr())] * 2


def test_token_count_selects_the_plan(moe: MegaMoE, fake: FakeDriver) -> None:
    moe.prepare()
    assert len({moe.launcher_for(tokens).plan.block_m for tokens in (1, 64)}) > 1
    for tokens in (1, 64):
        moe(*call_arguments(tokens))
        assert fake.launches[-1].shared == moe.launcher_for(tokens).plan.smem.size


def test_weights_are_loaded_in_place_again(moe: MegaMoE, fake: FakeDriver) -> None:
    moe(*call_arguments(1))
    before, first = fake.launches[-1].params.w13, moe._weights.w13.clone()
    moe.load_weights(*random_experts(TINY, range(8), seed=1))
    moe(*call_arguments(1))
    assert fake.launches[-1].params.w13 == before
    assert not torch.equal(moe._weights.w13, first)


def test_weights_in_kernel_layout_are_used_as_they_are(moe: MegaMoE, fake: FakeDriver) -> None:
    other = MegaMoE(TINY, buffer=moe.buffer)
    other.use_weights(moe._weights)
    other(*call_arguments(1))
    assert fake.launches[-1].params.w13 == moe._weights.w13.data_ptr()
    with pytest.raises(errors.InputError, match="w2 has shape"):
        other.use_weights(moe._weights._replace(w2=moe._weights.w2[:4]))


def test_errors_stop_the_next_call_until_reset(moe: MegaMoE, fake: FakeDriver) -> None:
    moe(*call_arguments(1))
    launched = len(fake.launches)
    moe.buffer.status.words[STATUS_WORDS["role"]] = RoleId.MATH
    moe.buffer.status.words[StatusBlock.CODE] = Awaited.FULL_STAGE
    for act in (moe.check, lambda: moe(*call_arguments(1))):
        with pytest.raises(errors.MegaMoETimeout, match="pipeline stage"):
            act()
    assert len(fake.launches) == launched
    moe.buffer.symm_view("flags").fill_(3)
    moe.reset()
    assert moe.buffer.symm_view("flags").abs().sum() == 0
    moe.check()
    moe(*call_arguments(1))
    assert len(fake.launches) == launched + 2


def test_check_sees_a_peers_abort(moe: MegaMoE) -> None:
    moe.check()
    moe.buffer.symm_view("control")[0] = 1
    with pytest.raises(errors.PeerAborted, match="rank 0"):
        moe.check()


def test_check_notices_a_grid_that_never_starts(moe: MegaMoE, monkeypatch: pytest.MonkeyPatch) -> None:
    moe(*call_arguments(1))
    monkeypatch.setattr(symmetric, "START_MARGIN_S", 0.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: FakeStream(None))
    moe.timeout = 0.02
    with pytest.raises(errors.MegaMoETimeout, match="7 CTAs fit"):
        moe.check()


def test_calls_before_weights_are_refused(fake: FakeDriver) -> None:
    with pytest.raises(errors.InputError, match="load_weights"):
        MegaMoE(TINY, max_tokens=8)(*call_arguments(1))


def test_layers_share_a_buffer_of_their_shape_only(fake: FakeDriver) -> None:
    buffer = SymmBuffer(TINY, max_tokens=64)
    first, second = MegaMoE(TINY, buffer=buffer), MegaMoE(TINY, buffer=buffer, clamp=7.0)
    assert first.buffer is second.buffer
    assert first.memory_bytes()["symmetric"] == buffer.contract.symm.size
    with pytest.raises(errors.InputError, match="buffer is for"):
        MegaMoE(MoEShape(512, 512, 16, 2), buffer=buffer)
    with pytest.raises(errors.InputError, match="max_tokens=8"):
        MegaMoE(TINY, buffer=buffer, max_tokens=8)


def test_a_plan_that_needs_more_workspace_is_refused(fake: FakeDriver) -> None:
    small = SymmBuffer(TINY, max_tokens=8)
    larger = make_plan(Contract(TINY, 1, 640))
    with pytest.raises(errors.InputError, match=larger.name):
        small.require_room(larger)


@pytest.mark.parametrize("num_sms", [0, 133])
def test_num_sms_is_checked(fake: FakeDriver, num_sms: int) -> None:
    with pytest.raises(errors.InputError, match=f"num_sms={num_sms}"):
        MegaMoE(TINY, max_tokens=8, num_sms=num_sms)


def test_forced_plans_serve_every_count(fake: FakeDriver) -> None:
    plan = make_plan(CONTRACT, block_m=32)
    moe = MegaMoE(TINY, max_tokens=64, plan=plan)
    assert {moe.launcher_for(tokens).plan.hash for tokens in (0, 1, 64)} == {plan.hash}
    with pytest.raises(errors.PlanError, match="contract"):
        MegaMoE(TINY, max_tokens=32, plan=plan).prepare()


def test_local_group_maps_ranks_into_each_other(fake: FakeDriver) -> None:
    fake.ranks = 4
    group = MegaMoE.local_group(TINY, ranks=4, max_tokens=16)
    group.load_weights(random_experts(TINY, range(8)))
    calls = [call_arguments(tokens) for tokens in (3, 0, 16, 1)]
    outputs = group(*zip(*calls))
    assert [len(y) for y in outputs] == [3, 0, 16, 1]
    launched = [launch for launch in fake.launches if launch.cooperative]
    assert [launch.params.rank for launch in launched] == [0, 1, 2, 3]
    assert [launch.grid for launch in launched] == [33] * 4
    bases = [buffer.symm_address for buffer in group.buffers]
    assert group.buffers[2].offsets == [base - bases[2] for base in bases]
    group.check()


def test_operator_shows_compiled_graphs_the_right_output() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from megagen.runtime.ops import moe_forward

    with FakeTensorMode():
        x, ids, weights = call_arguments(4)
        y = moe_forward(x, None, ids, weights, None, None, 0)
    assert y.shape == (4, 512) and y.dtype == BF16


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


def test_timeout_must_be_positive() -> None:
    with pytest.raises(errors.InputError, match="timeout=0"):
        layer.MegaMoE(TINY, max_tokens=8, timeout=0)
