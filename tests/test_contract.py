"""The contract: what ranks agree on, its hash, and the buffers that follow from it."""

import json
import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_cases import contracts

from megagen.contract import (
    DTYPE_BYTES,
    FORMATS,
    MAX_RANKS,
    PROTOCOL_VERSION,
    REGION_ALIGN,
    Contract,
    WeightLayout,
    align_up,
    ceil_div,
    lay_out,
)
from megagen.errors import ShapeError
from megagen.planning import plan_set
from megagen.planning.planner import FORMAT_OF_ARCH
from megagen.shape import MoEShape

quick = settings(max_examples=60, deadline=None)

TINY = Contract(MoEShape.preset("tiny"), 2, 64)


@given(st.integers(0, 10**12), st.integers(1, 10**6))
@quick
def test_rounding(value, multiple):
    up = align_up(value, multiple)
    assert up % multiple == 0 and value <= up < value + multiple
    assert ceil_div(value, multiple) == up // multiple


# Identity


@given(contracts())
@quick
def test_dict_round_trip(contract):
    read = Contract.from_dict(json.loads(json.dumps(contract.to_dict())))
    assert read == contract
    assert read.hash == contract.hash


CHANGES = {
    "shape": MoEShape(512, 512, 8, 1),
    "ranks": 4,
    "max_tokens": 65,
    "format": "mxfp8_mxfp4",
    "activation": "exact",
    "clamp": 7.0,
}


@pytest.mark.parametrize("field", CHANGES)
def test_every_field_changes_the_hash(field):
    assert replace(TINY, **{field: CHANGES[field]}).hash != TINY.hash


def test_no_field_is_left_out_of_the_hash():
    assert {field.name for field in fields(Contract)} == {*CHANGES, "sf_group"}
    assert set(TINY.to_dict()) == {*CHANGES, "sf_group", "protocol"}


@given(contracts(max_tokens=512), st.sampled_from(sorted(FORMAT_OF_ARCH)))
@settings(max_examples=15, deadline=None)
def test_plans_of_one_layer_share_the_contract(contract, arch):
    """Ranks choose their plans for themselves, so nothing of a plan may be in what they compare."""
    contract = replace(contract, format=FORMAT_OF_ARCH[arch])
    assert {plan.contract.hash for plan in plan_set(contract, arch).plans} == {contract.hash}


@pytest.mark.parametrize("version", [None, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_protocol_is_refused(version):
    with pytest.raises(ShapeError, match=f"protocol={version}"):
        Contract.from_dict({**TINY.to_dict(), "protocol": version})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, r"experts=8 is not divisible by ranks=3"),
        ({"ranks": 0}, r"ranks=0"),
        ({"shape": MoEShape(128, 128, 73, 1), "ranks": 73}, rf"ranks=73: .*{MAX_RANKS}"),
        ({"max_tokens": 0}, r"max_tokens=0"),
        ({"max_tokens": 1 << 30}, r"max_tokens=1073741824 x top_k=2 .* 31 bits"),
        ({"format": "fp4"}, r"format='fp4' is none of fp8_block, mxfp8_mxfp4"),
        ({"sf_group": 64}, r"sf_group=64"),
        ({"sf_group": 64, "format": "mxfp8_mxfp4"}, r"sf_group=64"),
        ({"activation": "gelu"}, r"activation='gelu'"),
        ({"clamp": 0.0}, r"clamp=0.0"),
        ({"clamp": float("nan")}, r"clamp=nan"),
    ],
)
def test_contracts_that_no_kernel_serves_are_refused_by_name(changes, message):
    with pytest.raises(ShapeError, match=message):
        replace(TINY, **changes)


# Layouts


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(1, 50), min_size=1, max_size=3)),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([16, 128, REGION_ALIGN]),
)
@quick
def test_lay_out_aligns_and_separates(entries, alignment):
    named = [(f"r{i}", dtype, tuple(shape)) for i, (dtype, shape) in enumerate(entries)]
    layout = lay_out(*named, alignment=alignment)
    assert [(region.name, region.dtype, region.shape) for region in layout.regions] == named
    assert all(region.offset % alignment == 0 for region in layout.regions)
    assert all(
        region.size == math.prod(region.shape) * DTYPE_BYTES[region.dtype] for region in layout.regions
    )
    ends = [region.end for region in layout.regions]
    assert all(end <= following.offset for end, following in zip(ends, layout.regions[1:]))
    assert ends[-1] <= layout.size and layout.size % alignment == 0
    assert "r0" in layout and layout["r0"] is layout.regions[0]
    assert "nonesuch" not in layout
    with pytest.raises(KeyError, match="nonesuch"):
        layout["nonesuch"]


@given(contracts())
@quick
def test_the_symmetric_buffer_holds_inputs_index_and_results(contract):
    shape, symm = contract.shape, contract.symm
    tokens, local = contract.max_tokens, contract.local_experts
    assert symm["x"].size == tokens * shape.hidden
    assert (
        symm["x_sf"].size == tokens * shape.hidden // 128 * 4
    )  # one float32, or four UE8M0, per 128 columns
    assert symm["x_sf"].dtype == {"fp8_block": "f32", "mxfp8_mxfp4": "u32"}[contract.format]
    assert symm["topk_ids"].shape == symm["topk_weights"].shape == (tokens, shape.top_k)
    assert symm["combine"].size == shape.top_k * tokens * shape.hidden * 2
    assert symm["flags"].shape == (contract.ranks,)
    assert symm["recv_count"].shape[-2:] == (contract.ranks, local)
    assert symm["src_index"].shape[-3:] == (local, contract.ranks, tokens)
    assert all(region.offset % REGION_ALIGN == 0 for region in symm.regions)


@given(contracts())
@quick
def test_most_rows_that_a_rank_can_receive(contract):
    """A token reaches each local expert at most once, and at most K of them."""
    each = min(contract.shape.top_k, contract.local_experts)
    assert contract.max_received == contract.ranks * contract.max_tokens * each
    assert contract.local_experts * contract.ranks == contract.shape.experts


@given(contracts())
@quick
def test_weight_layouts_hold_every_weight_once(contract):
    shape, local = contract.shape, contract.local_experts
    layout = WeightLayout(shape, local, contract.format)
    per_byte = {"fp8_block": 1, "mxfp8_mxfp4": 2}[contract.format]
    w13, w13_sf, w2, w2_sf = (layout.regions[name] for name in ("w13", "w13_sf", "w2", "w2_sf"))
    padded = align_up(shape.hidden, layout.block_n)
    assert w13.size * per_byte == local * 2 * shape.intermediate * shape.hidden
    assert w2.size * per_byte == local * padded * shape.intermediate
    if contract.format == "fp8_block":  # 128 x 128 blocks
        assert w13_sf.size // 4 * 128 * 128 == w13.size
        assert w2_sf.size // 4 * 128 * 128 == w2.size
    else:  # 1 x 32 blocks
        assert w13_sf.size * 32 == w13.size * 2
        assert w2_sf.size * 32 == w2.size * 2


def test_weight_layouts_have_names_of_their_own():
    assert len({WeightLayout(TINY.shape, 4, format).name for format in FORMATS}) == len(FORMATS)
