"""Planning: no plan breaks a limit, no routing overflows one, and each plan explains itself."""

import json
import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import contracts, plans

from megagen import render
from megagen.arch import ARCHS, Arch
from megagen.contract import DTYPE_BYTES, Contract, ceil_div
from megagen.errors import PlanError, ShapeError
from megagen.planning import KernelPlan, make_plan, plan_set, sm90, sm100, workload
from megagen.planning.cost import predict
from megagen.planning.planner import FORMAT_OF_ARCH
from megagen.planning.rules import FIRST_ROW_WARPS, IMBALANCE, PANEL_BLOCKS, choose_experts_per_wave
from megagen.shape import PRESETS, MoEShape

quick = settings(max_examples=60, deadline=None)

TINY = Contract(MoEShape.preset("tiny"), 2, 256)
FLASH8 = Contract(MoEShape.preset("flash8"), 1, 8192)
FLASH = Contract(MoEShape.preset("deepseek-v4-flash"), 8, 8192, "mxfp8_mxfp4")


def contract_of(preset: str, arch: str, ranks: int = 1, max_tokens: int = 8192) -> Contract:
    return Contract(MoEShape.preset(preset, ranks), ranks, max_tokens, FORMAT_OF_ARCH[arch])


# Limits of the machine


@given(plans())
@quick
def test_no_plan_exceeds_shared_memory(plan):
    limit = Arch.get(plan.arch).max_shared_bytes_per_block
    assert plan.smem.size <= limit
    assert plan.stages >= 2
    one_more = replace(plan, stages=plan.stages + 1).smem.size
    assert one_more > limit or plan.stages in (sm90.MAX_STAGES, sm100.MAX_STAGES), (
        "shared memory would hold one more stage"
    )


@given(plans())
@quick
def test_no_plan_exceeds_the_register_file(plan):
    arch = Arch.get(plan.arch)
    granted = sum(role.registers * role.warps * 32 for role in plan.roles)
    assert granted <= arch.launch_registers(plan.threads) * plan.threads <= arch.registers
    owners = [role for role in plan.roles for _ in range(role.warps)]
    assert [role.first_warp for role in plan.roles] == [owners.index(role) for role in plan.roles]
    for first in range(0, len(owners), 4):  # setmaxnreg deals per warpgroup
        assert len({role.registers for role in owners[first : first + 4]}) == 1
    assert len(owners) % 4 == 0 and plan.threads <= arch.max_threads_per_block


@given(plans(arch="sm90"))
@quick
def test_hopper_kernels_stay_within_the_named_barriers(plan):
    names = [c for group in render.constants(plan) for c in group.constants if c.name.startswith("BARRIER_")]
    highest = max(int(c.value) + (c.name == "BARRIER_WARPGROUP") for c in names)
    assert 0 < highest < Arch.get("sm90").named_barriers


@given(st.sampled_from(["sm100", "sm103"]).flatmap(lambda arch: plans(arch=arch)))
@quick
def test_blackwell_plans_stay_within_tensor_memory_and_named_barriers(plan):
    arch = Arch.get(plan.arch)
    assert plan.tmem_columns <= arch.tmem_columns
    assert plan.tmem_columns & (plan.tmem_columns - 1) == 0
    end = 0
    for region in plan.tmem:
        assert region.column == end, f"{region.name} overlaps or leaves a gap"
        assert region.column % 4 == 0
        end = region.column + region.columns
    assert end <= plan.tmem_columns
    ids = [barrier.id for barrier in plan.named_barriers]
    assert len(set(ids)) == len(ids) and min(ids) > 0 and max(ids) < arch.named_barriers
    assert all(
        barrier.threads % 32 == 0 and barrier.threads <= plan.threads for barrier in plan.named_barriers
    )
    assert arch.mma[1].allows_n(plan.block_m) and arch.mma[1].m == sm100.UMMA_M
    assert all(plan.pool_rows % block_m == 0 for block_m in plan.ladder)


# Room for any routing


def blocks_of(counts: list[int], block_m: int) -> int:
    return sum(ceil_div(count, block_m) for count in counts)


def room(plan: KernelPlan) -> int:
    """Pool blocks that every region of the local workspace has room for; pulled rows may lie in a ring."""
    local = plan.local
    assert local["l1_tiles"].shape[0] == plan.l1_ring_blocks
    return min(
        plan.max_blocks,
        local["l2_tiles"].shape[0],
        *(local[name].shape[0] for name in ("l1_arrival", "l2_arrival")),
        *(local[name].shape[0] // plan.block_m for name in ("row_source", "row_weight")),
    )


@given(plans(max_tokens=8192), st.randoms(use_true_random=False))
@quick
def test_worst_row_counts_fit_the_pool(plan, random_source):
    contract = plan.contract
    experts, all_tokens = contract.local_experts, contract.ranks * contract.max_tokens
    reached = min(contract.shape.top_k, experts)
    cases = [[all_tokens] * reached + [0] * (experts - reached)]  # everybody chooses the same experts
    # As many copies as there can be, each expert's last block holding as few rows as possible.
    left, padded = contract.max_received, []
    for rest in range(experts, 0, -1):
        share = min(all_tokens, left // rest)
        count = share - (share - 1) % plan.block_m if share else 0
        padded.append(count)
        left -= count
    cases.append(padded)
    cuts = sorted(random_source.randint(0, contract.max_received) for _ in range(experts - 1))
    shares = [b - a for a, b in zip([0, *cuts], [*cuts, contract.max_received])]
    cases.append([min(share, all_tokens) for share in shares])
    for counts in cases:
        assert sum(counts) <= contract.max_received
        assert blocks_of(counts, plan.block_m) <= room(plan), counts


@given(plans(max_tokens=8192), st.integers(1, 132))
@quick
def test_a_ring_never_makes_a_block_wait_for_itself(plan, sms):
    """The block a ring before any of a panel lies in an earlier panel, and first rows need no wait."""
    contract, block_m = plan.contract, plan.block_m
    if not plan.is_ring:
        return
    assert plan.l1_ring_blocks >= PANEL_BLOCKS
    plan.require_ring_for(sms)
    first_rows = FIRST_ROW_WARPS * sms
    spread = [min(1, first_rows)] * min(first_rows, contract.local_experts - 1)  # a block for every expert
    assert blocks_of([*spread, first_rows - len(spread)], block_m) <= plan.l1_ring_blocks


def test_a_ring_that_is_too_small_is_refused():
    plan = make_plan(Contract(MoEShape.preset("flash8", 2), 2, 8192), "sm90", 8192)
    assert plan.is_ring
    with pytest.raises(PlanError, match="l1_ring_blocks=15 is not within"):
        replace(plan, l1_ring_blocks=15).validate()
    small = replace(plan, l1_ring_blocks=plan.contract.local_experts + 1)
    small.validate()
    with pytest.raises(PlanError, match="132 SMs need at least"):
        small.require_ring_for(132)


@pytest.mark.parametrize("preset, theirs", [("flash8", 1487), ("pro8", 2543)])
def test_memory_at_capacity_is_at_most_60_percent_of_the_peer(preset, theirs):
    """MiB of sgl-deep-gemm 0.1.4.post1's buffer at 8,192 tokens and EP-2, see docs/performance.md."""
    plan = make_plan(Contract(MoEShape.preset(preset, 2), 2, 8192), "sm90", 8192)
    assert (plan.contract.symm.size + plan.local.size) / 2**20 <= 0.6 * theirs


@given(
    plans(max_tokens=12),
    st.sampled_from(["uniform", "one expert", "repeated", "own rank", "none or out of range"]),
    st.integers(0, 2**32),
)
@quick
def test_no_routing_overflows_index_or_pool(plan, routing, seed):
    """Dispatch as the kernel does it: repeated ids folded, slots counted per (expert, source rank)."""
    contract, shape, draw = plan.contract, plan.contract.shape, random.Random(seed)
    choose = {
        "uniform": lambda: draw.sample(range(shape.experts), shape.top_k),
        "one expert": lambda: [shape.experts - 1] * shape.top_k,
        "repeated": lambda: draw.choices(range(min(shape.experts, 3)), k=shape.top_k),
        "own rank": lambda: draw.choices(range(contract.local_experts), k=shape.top_k),
        "none or out of range": lambda: draw.choices([-1, shape.experts, 0], k=shape.top_k),
    }[routing]
    sent: dict[tuple[int, int], int] = {}
    for source in range(contract.ranks):
        for _ in range(contract.max_tokens):
            for expert in {e for e in choose() if 0 <= e < shape.experts}:
                sent[expert, source] = sent.get((expert, source), 0) + 1
    slots = contract.symm["src_index"].shape[-1]
    assert max(sent.values(), default=0) <= slots, "a list of source rows overflows"
    for rank in range(contract.ranks):
        first = rank * contract.local_experts
        own = range(first, first + contract.local_experts)
        counts = [sum(sent.get((expert, source), 0) for source in range(contract.ranks)) for expert in own]
        assert sum(counts) <= contract.max_received
        assert blocks_of(counts, plan.block_m) <= room(plan)


# Regions


def check_regions(layout, alignment: int) -> None:
    end = 0
    for region in layout.regions:
        assert region.offset >= end, f"{region.name} overlaps the region before it"
        assert region.size == math.prod(region.shape) * DTYPE_BYTES[region.dtype]
        assert region.offset % max(alignment, DTYPE_BYTES[region.dtype]) == 0, f"{region.name} is misaligned"
        end = region.end
    assert end <= layout.size
    assert len({region.name for region in layout.regions}) == len(layout.regions)


@given(plans())
@quick
def test_regions_neither_overlap_nor_misalign(plan):
    check_regions(plan.contract.symm, 1024)
    check_regions(plan.local, 1024)
    check_regions(plan.weight_layout.regions, 1024)
    check_regions(plan.smem, 4)
    smem = plan.smem
    for name in ("weight_stages", "token_stages"):  # the 128B swizzle repeats every 1,024 bytes
        assert smem[name].offset % 1024 == smem[name].size // plan.stages % 1024 == 0
    for region in smem.regions:
        if region.dtype == "u8":
            assert region.offset % 128 == 0, f"{region.name}: bulk copies and descriptors want 128 bytes"
    for tiles in (plan.local["l1_tiles"], plan.local["l2_tiles"]):
        assert tiles.shape[-1] == plan.token_tile_bytes and plan.token_tile_bytes % 16 == 0
    assert plan.pull_bytes % 16 == plan.contract.shape.hidden % plan.pull_bytes == 0


@given(plans())
@quick
def test_all_plans_of_a_contract_find_the_counters_in_the_same_place(plan):
    """Counters stay zero between launches, so a launch of another plan must not have written there."""

    def counters(one: KernelPlan) -> list:
        return [region for region in one.local.regions if not region.name.endswith("_tiles")]

    for block_m in plan.ladder:
        other = make_plan(plan.contract, plan.arch, plan.expected_tokens, block_m=block_m)
        assert counters(other) == counters(plan)


# Files


@given(plans())
@quick
def test_json_round_trip(plan):
    read = KernelPlan.from_json(plan.to_json())
    assert read == plan and type(read) is type(plan)
    assert read.choices == plan.choices
    assert (read.hash, read.name, read.to_json()) == (plan.hash, plan.name, plan.to_json())


EDITS = {
    "arch": "sm103",
    "operand_order": "tokens_on_m",
    "block_m": 32,
    "stages": 3,
    "experts_per_wave": 1,
    "pull_bytes": 256,
    "combine_columns": 128,
    "trace": True,
    "name": "another",
    "hash": "0" * 64,
    "contract_hash": "0" * 64,
    "weight_layout": "another",
    "pool_rows": 1,
    "shared_memory_bytes": 1,
    "shared_memory": [],
}
BROKEN = {
    "stages": "four",
    "block_m": None,
    "experts_per_wave": 0,
    "pull_bytes": 0,
    "roles": 7,
    "contract": [],
}


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
@pytest.mark.parametrize(("field", "value"), [*EDITS.items(), *BROKEN.items()])
def test_edited_files_are_refused(arch, field, value):
    values = json.loads(make_plan(contract_of("tiny", arch, ranks=2), arch, 8).to_json())
    assert values[field] != value
    values[field] = value
    with pytest.raises((PlanError, ShapeError)):
        KernelPlan.from_json(json.dumps(values))


@pytest.mark.parametrize(
    "field", ["stages", "roles", "contract", "choices", "expected_tokens", "evicts_lone_weights"]
)
def test_files_that_lack_a_field_are_refused_by_its_name(field):
    values = json.loads(make_plan(TINY, "sm90", 8).to_json())
    del values[field]
    with pytest.raises(PlanError, match=field):
        KernelPlan.from_json(json.dumps(values))


def test_a_plan_edited_by_hand_is_accepted_without_what_follows_from_it():
    plan = make_plan(TINY, "sm90", 64)
    values = json.loads(plan.to_json())
    derived = ("hash", "name", "shared_memory", "shared_memory_bytes")
    values = {name: value for name, value in values.items() if name not in derived}
    edited = KernelPlan.from_json(json.dumps({**values, "stages": plan.stages - 1}))
    assert edited.stages == plan.stages - 1 and edited.hash != plan.hash


# Named constraints

BASES = {"sm90": make_plan(TINY, "sm90", 8), "sm100": make_plan(FLASH, "sm100", 64)}


@pytest.mark.parametrize(
    ("arch", "changes", "named"),
    [
        ("sm90", {"stages": 90}, "shared memory"),
        ("sm90", {"stages": 1}, "stages=1"),
        ("sm90", {"block_m": 48}, "block_m=48"),
        ("sm90", {"operand_order": "tokens_on_m"}, "operand_order='tokens_on_m'"),
        ("sm90", {"experts_per_wave": 3}, "experts_per_wave=3"),
        ("sm90", {"pull_bytes": 200}, "pull_bytes=200"),
        ("sm90", {"prefetched_blocks": 5}, "prefetched_blocks=5"),
        ("sm90", {"evicts_lone_weights": "no"}, "evicts_lone_weights='no'"),
        ("sm90", {"combine_columns": 64}, "combine_columns=64"),
        ("sm90", {"lone_publisher_routes": -1}, "lone_publisher_routes=-1"),
        ("sm90", {"lone_publisher_routes": "all"}, "lone_publisher_routes='all'"),
        ("sm90", {"trace": "yes"}, "trace='yes'"),
        ("sm100", {"stages": 90}, "tensor memory: 1024 columns"),
        ("sm100", {"stages": 40}, "shared memory"),
        ("sm100", {"block_m": 48}, "block_m=48"),
        ("sm100", {"block_m": 256}, "block_m=256"),
        ("sm100", {"operand_order": "tokens_on_m"}, "operand_order='tokens_on_m'"),
        ("sm100", {"experts_per_wave": 0}, "experts_per_wave=0"),
        ("sm100", {"contract": FLASH8}, "format='fp8_block'"),
    ],
)
def test_validate_names_the_constraint_that_fails(arch, changes, named):
    BASES[arch].validate()
    with pytest.raises(PlanError, match=named):
        replace(BASES[arch], **changes).validate()


@pytest.mark.parametrize("arch", BASES)
@pytest.mark.parametrize(
    ("registers", "named"), [(100, "multiples of 8"), (16, "from 24"), (256, "allocates")]
)
def test_validate_names_register_limits(arch, registers, named):
    plan = BASES[arch]
    roles = tuple(replace(role, registers=registers) for role in plan.roles)
    with pytest.raises(PlanError, match=rf"registers.*{named}"):
        replace(plan, roles=roles).validate()


def test_shared_memory_that_does_not_suffice_names_the_way_out():
    crowded = Contract(MoEShape(512, 512, 60_000, 2), 1, 8, "mxfp8_mxfp4")
    with pytest.raises(PlanError, match=r"shared memory.*more ranks"):
        make_plan(crowded, "sm100")


def test_blackwell_needs_a_pair_of_sms():
    with pytest.raises(PlanError, match="sms=1"):
        make_plan(FLASH, "sm100", sms=1)


@pytest.mark.parametrize(("arch", "format"), [("sm90", "mxfp8_mxfp4"), ("sm100", "fp8_block")])
def test_formats_belong_to_architectures(arch, format):
    with pytest.raises(PlanError, match=rf"arch='{arch}', format='{format}'.*{FORMAT_OF_ARCH[arch]}"):
        make_plan(replace(TINY, format=format), arch)


# Choices


@given(plans())
@quick
def test_each_choice_carries_its_value_and_a_reason(plan):
    named = {choice.name: choice for choice in plan.choices}
    assert len(named) == len(plan.choices)
    for name in ("block_m", "stages", "experts_per_wave", "pull_bytes", "combine_columns", "operand_order"):
        assert named[name].value == str(getattr(plan, name))
    assert all(choice.reason for choice in plan.choices)


def test_lone_weights_leave_l2_first_while_it_holds_the_activations():
    many = contract_of("deepseek-v4-flash", "sm90")
    evicts = {plan.expected_tokens: plan.evicts_lone_weights for plan in plan_set(many, "sm90").plans}
    assert evicts[256] and not evicts[512] and not evicts[1024]  # 22, 44 and 88 MB of activations
    largest = make_plan(many, "sm90", 8192)
    assert largest.block_m == 128 and largest.evicts_lone_weights


def test_surplus_rows_are_for_experts_that_have_a_few_rows_more_than_a_full_tile():
    pro8 = contract_of("pro8", "sm90")
    chosen = {
        tokens: make_plan(pro8, "sm90", tokens).block_m for tokens in (512, 896, 1024, 2048, 4096, 8192)
    }
    assert chosen == {512: 128, 896: 128, 1024: 144, 2048: 128, 4096: 128, 8192: 128}


@given(contracts(), st.sampled_from(sorted(ARCHS)))
@settings(max_examples=25, deadline=None)
def test_plan_sets_cover_every_token_count(contract, arch):
    contract = replace(contract, format=FORMAT_OF_ARCH[arch])
    made = plan_set(contract, arch)
    assert list(made.limits) == sorted(set(made.limits))
    assert made.limits[-1] == contract.max_tokens and made.limits[0] >= 1
    assert all(a.hash != b.hash for a, b in zip(made.plans, made.plans[1:]))
    for tokens in {0, 1, contract.max_tokens, *made.limits, *(limit + 1 for limit in made.limits[:-1])}:
        index = made.plans.index(made.select(tokens))
        assert tokens <= made.limits[index]
        assert index == 0 or tokens > made.limits[index - 1]
    with pytest.raises(PlanError, match=f"max_tokens={contract.max_tokens}"):
        made.select(contract.max_tokens + 1)
    if arch == "sm90":
        rows = [plan.block_m - plan.surplus_rows for plan in made.plans]
        assert rows == sorted(rows), "more tokens, smaller tiles"


@given(contracts("mxfp8_mxfp4"), st.data())
@quick
def test_blackwell_tiles_grow_until_one_no_longer_holds_an_expert(contract, data):
    tokens = data.draw(st.integers(0, contract.max_tokens))
    likely = workload.likely_rows_per_expert(contract, tokens)
    block_m = make_plan(contract, "sm100", tokens).block_m
    if likely <= sm100.LADDER[-1]:
        assert block_m == min(m for m in sm100.LADDER if likely <= m)
    else:
        costs = {m: workload.padded_rows_cost(contract, tokens, m) for m in sm100.LADDER}
        assert costs[block_m] == min(costs.values())


@given(contracts(), st.integers(0, 16_384), st.sampled_from([1, 2]))
@quick
def test_a_wave_is_the_smallest_divisor_that_fills_the_sms(contract, tokens, sms_each):
    sms, experts = 148, contract.local_experts
    tokens = min(tokens, contract.max_tokens)
    chosen, reason = choose_experts_per_wave(contract, sms, 64, tokens, sms_each)
    rows = workload.rows_per_expert(contract, tokens)
    tiles = math.ceil(max(rows, 1) / 64) * min(1.0, rows) * (2 * contract.shape.intermediate // 256)

    def fills(count: int) -> bool:
        return tiles * count / IMBALANCE >= sms // sms_each

    assert experts % chosen == 0
    assert fills(chosen) or chosen == experts
    assert not any(fills(count) for count in range(1, chosen) if experts % count == 0)
    assert str(sms // sms_each) in reason


@given(contracts(), st.integers(1, 40), st.sampled_from([16, 96, 128]))
@quick
def test_expected_blocks_agree_with_the_binomial_distribution(contract, tokens, block_m):
    shape, draws = contract.shape, tokens * contract.ranks
    chance = shape.top_k / shape.experts
    below, expected = (1 - chance) ** draws, 0.0
    if chance == 1:
        expected = ceil_div(draws, block_m)
    elif below > 1e-280:  # else the recurrence starts below the smallest number
        probability = below
        for rows in range(draws + 1):
            expected += probability * ceil_div(rows, block_m)
            probability *= (draws - rows) / (rows + 1) * chance / (1 - chance)
    else:
        return
    assert workload.blocks_per_expert(contract, tokens, block_m) == pytest.approx(expected, rel=0.12)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "gpt-oss-120b"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_preset_plans(preset, arch, ranks):
    made = plan_set(contract_of(preset, arch, ranks), arch)
    for limit, plan in zip(made.limits, made.plans):
        plan.validate()
        assert predict(plan, limit).seconds > 0


def test_gpt_oss_is_refused_by_name():
    with pytest.raises(ShapeError, match="hidden=2880 is not a multiple of 128"):
        MoEShape.preset("gpt-oss-120b")


def test_planning_imports_neither_torch_nor_jinja2():
    program = (
        "import sys, megagen.planning.cost\n"
        "from megagen.contract import Contract\n"
        "from megagen.planning import plan_set\n"
        "from megagen.shape import MoEShape\n"
        "plan_set(Contract(MoEShape.preset('tiny'), 1, 64, 'mxfp8_mxfp4'), 'sm100')\n"
        "print(*sorted({'torch', 'jinja2', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# Blackwell numbers, worked out by hand


@pytest.mark.parametrize(
    ("block_m", "columns", "tokens_staged", "sf_bytes", "tile_bytes"),
    [
        (16, 128, 1024, 256, 2304),
        (32, 256, 2048, 512, 4608),
        (64, 256, 4096, 512, 8704),
        (96, 256, 6144, 512, 12800),
        (128, 512, 8192, 512, 16896),
        (192, 512, 12288, 1024, 25600),
    ],
)
def test_blackwell_tile_numbers(block_m, columns, tokens_staged, sf_bytes, tile_bytes):
    plan = make_plan(FLASH, "sm100", 64, block_m=block_m)
    assert plan.tmem_columns == columns
    assert plan.token_stage_bytes == tokens_staged
    assert (plan.token_sf_bytes, plan.token_tile_bytes) == (sf_bytes, tile_bytes)
    assert (plan.weight_stage_bytes, plan.weight_transaction_bytes) == (16384, 8192)
    assert plan.stage_transaction_bytes == 8192 + 512 + tokens_staged + sf_bytes
    assert plan.stage_bytes * plan.stages == sum(
        plan.smem[f"{name}_stages"].size for name in ("weight", "token")
    ) + sum(plan.smem[f"{name}_sf_stages"].size for name in ("weight", "token"))
    assert plan.pool_rows % block_m == 0
    assert plan.l2_arrivals == 2 * 2 * 2048 // 256
    assert plan.mmas_per_stage == 4
    assert plan.operand_descriptor == 0x4000_4040_0000_0000  # stride 1,024, version 1, 128B swizzle
    assert plan.sf_descriptor == 0x0000_4008_0000_0000  # stride 128, version 1, no swizzle


@pytest.mark.parametrize(
    ("block_m", "sf_id", "word"), [(192, 0, 0x10B00280), (192, 3, 0x70B002B0), (16, 1, 0x30840290)]
)
def test_instruction_descriptor(block_m, sf_id, word):
    assert make_plan(FLASH, "sm100", 64, block_m=block_m).instruction.word(sf_id) == word


def test_scale_factors_lie_in_the_transposed_order():
    assert [*map(sm100.sf_offset, (0, 1, 32, 96, 127, 128))] == [0, 16, 4, 12, 508, 512]
    assert sorted(map(sm100.sf_offset, range(256))) == list(range(0, 1024, 4))
    for block_m in sm100.LADDER:
        assert max(map(sm100.sf_offset, range(block_m))) < sm100.token_sf_bytes(block_m)


@pytest.mark.parametrize(("experts", "budgets"), [(64, [48, 40, 208]), (65, [96, 40, 184])])
def test_blackwell_registers(experts, budgets):
    plan = make_plan(Contract(MoEShape(512, 512, experts, 2), 1, 64, "mxfp8_mxfp4"), "sm100")
    per_warp = [role.registers for role in plan.roles for _ in range(role.warps)]
    assert [per_warp[warp] for warp in (0, 4, 8)] == budgets
    assert sum(per_warp) * 32 == 64_512


def test_weight_maps_cover_the_weights_and_fill_a_stage():
    plan = make_plan(FLASH, "sm100", 64)
    for tensor_map, name in zip(plan.weight_maps(1 << 20, 1 << 30), ("w13", "w2")):
        region = plan.weight_layout.regions[name]
        assert math.prod(tensor_map.dims) == region.size * 2
        assert tensor_map.strides == (region.shape[-1],)
        assert math.prod(tensor_map.box) == plan.weight_stage_bytes == 2 * plan.weight_transaction_bytes


# The cost model

#: Microseconds on one H200, flash8, EP-1, by tokens.
MEASURED_US = {8: 159, 64: 200, 256: 210, 1024: 354, 4096: 1113, 8192: 2119}


@pytest.mark.parametrize("tokens", MEASURED_US)
def test_predictions_are_near_the_measured_times(tokens):
    predicted = predict(make_plan(FLASH8, "sm90", tokens)).seconds * 1e6
    assert predicted == pytest.approx(MEASURED_US[tokens], rel=0.2)


@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_predictions_at_ranks_that_cannot_be_measured(arch):
    alone, eight, all_ranks = (
        predict(make_plan(contract_of("flash8", arch, ranks), arch, 1024)) for ranks in (1, 8, 72)
    )
    times = [
        {part.name: part.seconds for part in prediction.parts} for prediction in (alone, eight, all_ranks)
    ]
    assert times[0]["NVLink"] == times[0]["peers"] == 0
    assert times[0]["NVLink"] < times[1]["NVLink"] < times[2]["NVLink"]
    assert times[1]["peers"] < times[2]["peers"]
    assert alone.seconds < eight.seconds < all_ranks.seconds


@given(plans(), st.data())
@quick
def test_predictions_add_up_and_grow_with_tokens(plan, data):
    most = plan.contract.max_tokens
    tokens = data.draw(st.integers(0, most))
    fewer, more = predict(plan, tokens), predict(plan, most)
    assert all(part.seconds >= 0 and part.reason for part in fewer.parts)
    serial = sum(part.seconds for part in fewer.parts if not part.overlaps)
    assert fewer.seconds == pytest.approx(serial + max(p.seconds for p in fewer.parts if p.overlaps))
    assert fewer.seconds <= more.seconds * 1.02  # a tile count just above whole rounds may cost a little more
    json.dumps(fewer.to_dict())
