"""Whole layers of real models against the reference, and the same bits whatever computes them."""

import gc
from collections.abc import Iterator

import pytest
import torch
from gpu_cases import (
    BLOCKS,
    FLOAT32,
    MODELS,
    RANK_COUNTS,
    SM_COUNTS,
    TOKENS,
    Model,
    check_close,
    even_counts,
    run_group,
)

from megagen.planning import make_plan
from megagen.reference import moe_forward, relative_error

REPEATS = 20


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    made = Model(MODELS[request.param])
    yield made
    made.__dict__.clear()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tokens", TOKENS)
def test_output_is_close_to_the_reference(model: Model, tokens: int) -> None:
    check_close(model.output(tokens), model.inputs(tokens), model.weights)


@pytest.mark.parametrize("tokens", TOKENS)
def test_output_is_close_to_float32_arithmetic(model: Model, tokens: int) -> None:
    expected = moe_forward(*model.inputs(tokens), model.weights, quantize_intermediate=False)
    assert relative_error(model.output(tokens), expected).whole <= FLOAT32


@pytest.mark.parametrize("tokens", TOKENS)
def test_bits_repeat(model: Model, tokens: int) -> None:
    outputs = [model.one_rank(*model.inputs(tokens)) for _ in range(REPEATS)]
    model.one_rank.check()
    for output in outputs:
        assert torch.equal(output, model.output(tokens))


@pytest.mark.parametrize("block_m", BLOCKS)
def test_bits_do_not_depend_on_the_plan(model: Model, block_m: int) -> None:
    layer = model.layer(plan=make_plan(model.one_rank.contract, block_m=block_m))
    for tokens in TOKENS:
        output = layer(*model.inputs(tokens))
        layer.check()
        assert torch.equal(output, model.output(tokens)), f"{tokens} tokens"


@pytest.mark.parametrize("num_sms", SM_COUNTS)
def test_bits_do_not_depend_on_the_sms(model: Model, num_sms: int) -> None:
    layer = model.layer(num_sms=num_sms)
    for tokens in TOKENS:
        output = layer(*model.inputs(tokens))
        layer.check()
        assert torch.equal(output, model.output(tokens)), f"{tokens} tokens"


@pytest.mark.parametrize("ranks", RANK_COUNTS)
def test_bits_do_not_depend_on_the_ranks(model: Model, ranks: int) -> None:
    group = model.group(ranks)
    for tokens in TOKENS:
        output = run_group(group, model.inputs(tokens).deal(even_counts(tokens, ranks)))
        assert torch.equal(output, model.output(tokens)), f"{tokens} tokens"


def test_the_planner_chooses_three_plans_or_more(model: Model) -> None:
    """Otherwise the tests above compare less than they say."""
    blocks = {model.one_rank.launcher_for(tokens).plan.block_m for tokens in TOKENS}
    assert len(blocks) >= 3
