"""Routings that break kernels of this kind, uneven ranks, and what the dispatch leaves behind."""

from collections.abc import Sequence

import pytest
import torch
from gpu_cases import BLOCKS, TIMEOUT_S, Inputs, check_close, even_counts, make_inputs, run_group

from megagen import InputError, MegaMoE, MoEShape
from megagen.contract import ceil_div
from megagen.planning import make_plan
from megagen.reference import fold_topk, moe_forward, pool_order
from megagen.runtime.local import LocalGroup
from megagen.weights import ExpertWeights, random_experts

SHAPE = MoEShape(hidden=512, intermediate=384, experts=24, top_k=4)
MAX_TOKENS = 300
RANK_COUNTS = (1, 2, 3, 4, 8)

ROUTINGS = (
    "one-expert",
    "none",
    "first-experts",
    "empty-experts",
    "repeated",
    "masked",
    "zipf:1.5",
    *(f"tile-boundary:{tile}" for tile in (16, 32, 64, 128)),
)


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return random_experts(SHAPE, range(SHAPE.experts), device="cuda")


def make_group(shape: MoEShape, weights: ExpertWeights, ranks: int, **options: object) -> LocalGroup:
    group = MegaMoE.local_group(
        shape, ranks=ranks, **{"max_tokens": MAX_TOKENS, "timeout": TIMEOUT_S, **options}
    )
    group.load_weights(weights)
    group.prepare()
    return group


@pytest.fixture(scope="module", params=RANK_COUNTS)
def group(request: pytest.FixtureRequest, weights: ExpertWeights) -> LocalGroup:
    return make_group(SHAPE, weights, request.param)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_adversarial_routing(group: LocalGroup, weights: ExpertWeights, routing: str) -> None:
    inputs = make_inputs(SHAPE, 250, routing)
    check_close(run_group(group, inputs.deal(even_counts(250, len(group)))), inputs, weights)


@pytest.mark.parametrize("first", [0, 1, 64, MAX_TOKENS])
def test_uneven_tokens(group: LocalGroup, weights: ExpertWeights, first: int) -> None:
    """The first rank has ``first`` tokens, the second none, the others more and more."""
    counts = [first, 0, *(31 * rank % 128 for rank in range(2, len(group)))][: len(group)]
    inputs = make_inputs(SHAPE, sum(counts), seed=first)
    check_close(run_group(group, inputs.deal(counts)), inputs, weights)


def test_a_token_without_experts_gives_zeros(group: LocalGroup) -> None:
    inputs = make_inputs(SHAPE, 64, "masked")
    output = run_group(group, inputs.deal(even_counts(64, len(group))))
    nowhere = (inputs.topk_ids < 0).all(dim=1)
    assert nowhere.any() and (output[nowhere] == 0).all()


def test_ids_out_of_range_are_dropped_counted_and_reported(group: LocalGroup, weights: ExpertWeights) -> None:
    inputs = make_inputs(SHAPE, 64, "out-of-range")
    dropped = int(((inputs.topk_ids < -1) | (inputs.topk_ids >= SHAPE.experts)).sum())
    parts = inputs.deal(even_counts(64, len(group)))
    outputs = group(*zip(*parts))
    reported = 0
    for layer in group:
        with pytest.raises(InputError, match="dropped") as error:
            layer.check()
        reported += int(str(error.value).split("dropped ")[1].split()[0])
    assert reported == dropped
    group.check()
    check_close(torch.cat(outputs), inputs, weights)


def test_int64_ids_beyond_int32_are_dropped(group: LocalGroup, weights: ExpertWeights) -> None:
    inputs = make_inputs(SHAPE, 8 * len(group))
    wide = inputs.topk_ids.long()
    wide[::3, 1] += 1 << 32  # would name the same experts if only 32 bits were read
    inputs = inputs._replace(topk_ids=wide)
    outputs = group(*zip(*inputs.deal([8] * len(group))))
    with pytest.raises(InputError, match="dropped"):
        group.check()
    group.check()
    check_close(torch.cat(outputs), inputs, weights)


@pytest.mark.parametrize("top_k", [1, 2, 9, 32])
@pytest.mark.parametrize("ranks", [1, 3])
def test_top_k(ranks: int, top_k: int) -> None:
    shape = MoEShape(256, 256, 36, top_k)
    weights = random_experts(shape, range(shape.experts), device="cuda")
    inputs = make_inputs(shape, 90)
    group = make_group(shape, weights, ranks, max_tokens=90)
    check_close(run_group(group, inputs.deal(even_counts(90, ranks))), inputs, weights)


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(128, 128), (384, 128), (640, 1408), (2944, 256), (9216, 128), (256, 14336)]
)
def test_sizes(hidden: int, intermediate: int) -> None:
    """Odd multiples of 128, rows pulled in pieces, more intermediate columns than a mask has bits."""
    shape = MoEShape(hidden, intermediate, 4, 2)
    weights = random_experts(shape, range(shape.experts), device="cuda")
    inputs = make_inputs(shape, 100)
    check_close(run_group(make_group(shape, weights, 2), inputs.deal([70, 30])), inputs, weights)


@pytest.mark.parametrize("options", [{"activation": "exact"}, {"clamp": 0.5}], ids=str)
def test_activation(weights: ExpertWeights, options: dict[str, object]) -> None:
    inputs = make_inputs(SHAPE, 100)
    group = make_group(SHAPE, weights, 2, **options)
    check_close(run_group(group, inputs.deal([50, 50])), inputs, weights, **options)


@pytest.mark.parametrize("blocks", [(16, 128), (144, 32), (64, 16), (128, 144)])
def test_ranks_with_different_plans_and_sms(weights: ExpertWeights, blocks: tuple[int, int]) -> None:
    inputs = make_inputs(SHAPE, 400)
    expected = run_group(make_group(SHAPE, weights, 2), inputs.deal([300, 100]))
    contract = make_group(SHAPE, weights, 2)[0].contract
    plans = [make_plan(contract, block_m=block_m) for block_m in blocks]
    mixed = make_group(SHAPE, weights, 2, plan=plans, num_sms=[100, 17])
    assert torch.equal(run_group(mixed, inputs.deal([300, 100])), expected)


@pytest.mark.parametrize("block_m", BLOCKS)
@pytest.mark.parametrize(("tokens", "routing"), [(77, "uniform"), (137, "one-expert")])
def test_padding_rows_may_hold_anything(
    weights: ExpertWeights, tokens: int, routing: str, block_m: int
) -> None:
    inputs = make_inputs(SHAPE, tokens, routing)
    parts = inputs.deal(even_counts(tokens, 2))
    contract = make_group(SHAPE, weights, 2)[0].contract
    group = make_group(SHAPE, weights, 2, plan=make_plan(contract, block_m=block_m))
    expected = run_group(group, parts)
    for layer in group:
        for region in ("row_source", "row_weight", "l1_tiles", "l2_tiles"):
            layer.buffer.local_view(region).view(torch.uint8).fill_(0xFF)  # NaN as E4M3 and as float32
        layer.buffer.symm_view("combine").view(torch.uint8).fill_(0xFF)
    assert torch.equal(run_group(group, parts), expected)


def test_nan_stays_in_its_row(weights: ExpertWeights) -> None:
    inputs = make_inputs(SHAPE, 77)
    group = make_group(SHAPE, weights, 2)
    expected = run_group(group, inputs.deal([40, 37]))
    x = inputs.x.clone()
    x[5, 100] = torch.nan
    x[50, 7] = torch.inf
    actual = run_group(group, inputs._replace(x=x).deal([40, 37]))
    others = torch.ones(77, dtype=torch.bool, device="cuda")
    others[[5, 50]] = False
    assert torch.equal(actual[others], expected[others])
    assert actual[[5, 50]].isnan().any(dim=1).all()


def test_nan_routing_weight_stays_in_its_row(weights: ExpertWeights) -> None:
    inputs = make_inputs(SHAPE, 40)
    group = make_group(SHAPE, weights, 2)
    expected = run_group(group, inputs.deal([20, 20]))
    gates = inputs.topk_weights.clone()
    gates[3, 0] = torch.nan
    actual = run_group(group, inputs._replace(topk_weights=gates).deal([20, 20]))
    others = torch.arange(40, device="cuda") != 3
    assert torch.equal(actual[others], expected[others])


@pytest.mark.parametrize("block_m", [16, 128, 144])
@pytest.mark.parametrize(
    ("ranks", "routing"), [(1, "uniform"), (3, "zipf:1.2"), (4, "repeated"), (8, "masked")]
)
def test_pool_order_and_origins(weights: ExpertWeights, ranks: int, routing: str, block_m: int) -> None:
    """What the kernel leaves in pool and index is what a plain simulation of min-peeling gives."""
    probe = make_group(SHAPE, weights, ranks)
    plan = make_plan(probe[0].contract, block_m=block_m)
    group = make_group(SHAPE, weights, ranks, plan=plan)
    counts = [(97 * rank + 13) % 150 for rank in range(ranks)]
    parts = make_inputs(SHAPE, sum(counts), routing).deal(counts)
    run_group(group, parts)
    for rank, layer in enumerate(group):
        _check_pool(layer, rank, parts, block_m)


def _check_pool(layer: MegaMoE, rank: int, parts: Sequence[Inputs], block_m: int) -> None:
    local_experts, top_k = layer.contract.local_experts, SHAPE.top_k
    row_source = layer.buffer.local_view("row_source").tolist()
    row_weight = layer.buffer.local_view("row_weight").view(torch.int32).tolist()
    launches = layer.buffer.local_view("launch")[0].item()
    src_index = layer.buffer.symm_view("src_index")[(launches - 1) % 2]  # banked by the parity of the launch
    routes = [_routes(part) for part in parts]
    first_row = 0
    for local_expert in range(local_experts):
        expert = rank * local_experts + local_expert
        sent = [routes[source].get(expert, {}) for source in range(len(parts))]
        entries = [
            [
                divmod(entry, 1 << 32)
                for entry in src_index[local_expert, source, : len(sent[source])].tolist()
            ]
            for source in range(len(parts))
        ]
        for source, listed in enumerate(entries):
            assert {pair: weight for weight, pair in listed} == sent[source], (expert, source)
        for offset, (source, slot) in enumerate(pool_order([len(one) for one in sent])):
            weight, pair = entries[source][slot]
            token, k = divmod(pair, top_k)
            row = first_row + offset
            assert row_source[row] == source << 32 | (k * layer.contract.max_tokens + token), (expert, row)
            assert row_weight[row] == weight, (expert, row)
        first_row += ceil_div(sum(map(len, sent)), block_m) * block_m


def _routes(part: Inputs) -> dict[int, dict[int, int]]:
    """expert -> {token * K + k: bits of the folded routing weight as a signed 32-bit integer}."""
    ids, folded = fold_topk(part.topk_ids, part.topk_weights, SHAPE.experts)
    routes: dict[int, dict[int, int]] = {}
    bits = folded.view(torch.int32).flatten().tolist()
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert >= 0:
            routes.setdefault(expert, {})[pair] = bits[pair]
    return routes


def test_repeated_ids_equal_their_folded_form(weights: ExpertWeights) -> None:
    inputs = make_inputs(SHAPE, 60, "repeated")
    ids, folded = fold_topk(inputs.topk_ids, inputs.topk_weights, SHAPE.experts)
    group = make_group(SHAPE, weights, 2)
    as_given = run_group(group, inputs.deal([30, 30]))
    as_folded = run_group(group, Inputs(inputs.x, ids, folded).deal([30, 30]))
    assert torch.equal(as_given, as_folded)
    assert torch.equal(moe_forward(*inputs, weights), moe_forward(inputs.x, ids, folded, weights))
