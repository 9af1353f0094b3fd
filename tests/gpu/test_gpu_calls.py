"""The layer's interface on one GPU: inputs of all kinds, graphs, shared buffers, many launches, host cost."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_cases import TIMEOUT_S, Inputs, check_close, make_inputs, run_group

from megagen import InputError, MegaMoE, MoEShape, SymmBuffer
from megagen.formats import quantize_activation
from megagen.weights import ExpertWeights, random_experts

SHAPE = MoEShape.preset("tiny")
MAX_TOKENS = 256
HOST_LIMIT_US = 25.0
WARM_START_LIMIT_MS = 50.0


@pytest.fixture(scope="module")
def weights() -> ExpertWeights:
    return random_experts(SHAPE, range(SHAPE.experts), device="cuda")


@pytest.fixture(scope="module")
def moe(weights: ExpertWeights) -> MegaMoE:
    layer = MegaMoE(SHAPE, max_tokens=MAX_TOKENS, timeout=TIMEOUT_S)
    layer.load_weights(*weights)
    layer.prepare()
    return layer


def run(moe: MegaMoE, inputs: Inputs, **options: object) -> torch.Tensor:
    output = moe(*inputs, **options)
    moe.check()
    return output


def differences(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """How many elements differ, and the first few of them."""
    at = (actual.float() != expected.float()).nonzero()
    shown = [(i, j, actual[i, j].item(), expected[i, j].item()) for i, j in at[:8].tolist()]
    return f"{len(at)} differ; (row, column, actual, expected): {shown}"


# Inputs


def test_companion_kernel_quantizes_as_the_reference(moe: MegaMoE) -> None:
    inputs = make_inputs(SHAPE, 100)
    inputs.x[7] = 0
    inputs.x[8] *= 1e-20
    inputs.x[9, 3] = 3e38
    run(moe, inputs)
    views = moe.inputs(100)
    values, scale = quantize_activation(inputs.x)
    assert torch.equal(views.x_sf, scale), differences(views.x_sf, scale)
    assert torch.equal(views.x.view(torch.uint8), values.view(torch.uint8)), differences(views.x, values)
    assert torch.equal(views.topk_ids, inputs.topk_ids)
    assert torch.equal(views.topk_weights, inputs.topk_weights)


def test_kinds_of_input_give_the_same_bits(moe: MegaMoE) -> None:
    inputs = make_inputs(SHAPE, 100)
    inputs = inputs._replace(topk_weights=inputs.topk_weights.bfloat16().float())
    expected = run(moe, inputs)
    wide = torch.zeros(100, 2 * SHAPE.hidden, dtype=torch.bfloat16, device="cuda")
    wide[:, : SHAPE.hidden] = inputs.x
    kinds = {
        "int64 ids": inputs._replace(topk_ids=inputs.topk_ids.long()),
        "bfloat16 weights": inputs._replace(topk_weights=inputs.topk_weights.bfloat16()),
        "rows of a wider tensor": inputs._replace(x=wide[:, : SHAPE.hidden]),
        "E4M3 tokens": inputs._replace(x=quantize_activation(inputs.x)),
    }
    for kind, same in kinds.items():
        assert torch.equal(run(moe, same), expected), kind


def test_inputs_in_place(moe: MegaMoE) -> None:
    inputs = make_inputs(SHAPE, 100)
    expected = run(moe, inputs)
    views = moe.inputs(100)
    for view in views:
        view.zero_()
    values, scale = quantize_activation(inputs.x)
    for view, tensor in zip(views, (values, scale, inputs.topk_ids, inputs.topk_weights)):
        view.copy_(tensor)
    in_place = Inputs((views.x, views.x_sf), views.topk_ids, views.topk_weights)
    assert torch.equal(run(moe, in_place), expected)


def test_out_is_written(moe: MegaMoE) -> None:
    inputs = make_inputs(SHAPE, 40)
    out = torch.full((40, SHAPE.hidden), torch.nan, dtype=torch.bfloat16, device="cuda")
    assert run(moe, inputs, out=out) is out
    assert torch.equal(out, run(moe, inputs))


@pytest.mark.parametrize("count", [0, 1, 39, 40])
@pytest.mark.parametrize("on_device", [False, True])
def test_num_tokens(moe: MegaMoE, count: int, on_device: bool) -> None:
    inputs = make_inputs(SHAPE, 40)
    expected = run(moe, inputs)
    out = torch.full((40, SHAPE.hidden), 7.0, dtype=torch.bfloat16, device="cuda")
    num_tokens = torch.tensor([count], dtype=torch.int32, device="cuda") if on_device else count
    run(moe, inputs, out=out, num_tokens=num_tokens)
    assert torch.equal(out[:count], expected[:count])
    assert (out[count:] == 7).all(), "rows from num_tokens on are not written"


@pytest.mark.parametrize("count", [41, MAX_TOKENS + 1, -1])
def test_device_num_tokens_beyond_the_rows_of_x(weights: ExpertWeights, count: int) -> None:
    layer = MegaMoE(SHAPE, max_tokens=MAX_TOKENS, timeout=TIMEOUT_S)
    layer.load_weights(*weights)
    inputs = make_inputs(SHAPE, 40)
    expected = run(layer, inputs)
    rows = torch.full((MAX_TOKENS, SHAPE.hidden), 7.0, dtype=torch.bfloat16, device="cuda")
    layer(*inputs, out=rows[:40], num_tokens=torch.tensor([count], dtype=torch.int32, device="cuda"))
    with pytest.raises(InputError, match="num_tokens"):
        layer.check()
    assert (rows[40:] == 7).all(), "the neighbours of the output are not written"
    layer.reset()
    assert torch.equal(run(layer, inputs), expected)


# Weights


def test_weights_loaded_again_are_used(weights: ExpertWeights) -> None:
    layer = MegaMoE(SHAPE, max_tokens=64, timeout=TIMEOUT_S, debug=True)
    layer.load_weights(*weights)
    inputs = make_inputs(SHAPE, 64)
    check_close(layer(*inputs), inputs, weights)
    others = random_experts(SHAPE, range(SHAPE.experts), seed=1, device="cuda")
    layer.load_weights(*others)
    check_close(layer(*inputs), inputs, others)


# Buffers, streams and graphs


def test_two_layers_share_a_buffer(weights: ExpertWeights) -> None:
    buffer = SymmBuffer(SHAPE, max_tokens=MAX_TOKENS)
    others = random_experts(SHAPE, range(SHAPE.experts), seed=1, device="cuda")
    layers = []
    for own in (weights, others):
        layers.append(MegaMoE(SHAPE, buffer=buffer, timeout=TIMEOUT_S))
        layers[-1].load_weights(*own)
    inputs = make_inputs(SHAPE, 100)
    hidden, steps = inputs.x, []
    for turn in range(6):
        output = layers[turn % 2](hidden, inputs.topk_ids, inputs.topk_weights)
        steps.append((hidden, output))
        hidden = torch.nn.functional.layer_norm(output.float(), (SHAPE.hidden,)).bfloat16()
    layers[0].check()
    for turn, (given, output) in enumerate(steps):
        check_close(output, inputs._replace(x=given), (weights, others)[turn % 2])


@pytest.mark.parametrize("ranks", [1, 2])
def test_200_launches_without_synchronization(weights: ExpertWeights, ranks: int) -> None:
    group = MegaMoE.local_group(SHAPE, ranks=ranks, max_tokens=MAX_TOKENS, timeout=TIMEOUT_S)
    group.load_weights(weights)
    group.prepare()
    cases = []
    for launch in range(200):
        counts = [(37 * launch + 101 * rank) % (MAX_TOKENS // 2) for rank in range(ranks)]
        cases.append((make_inputs(SHAPE, sum(counts), seed=launch), counts))
    parts = [inputs.deal(counts) for inputs, counts in cases]
    torch.cuda.synchronize()
    outputs = [group(*zip(*one)) for one in parts]
    group.check()
    for (inputs, _), output in zip(cases, outputs):
        check_close(torch.cat(output), inputs, weights)


def test_graph_replays_with_other_inputs(moe: MegaMoE, weights: ExpertWeights) -> None:
    static = make_inputs(SHAPE, 64)
    count = torch.tensor([64], dtype=torch.int32, device="cuda")
    run(moe, static, num_tokens=count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe(*static, num_tokens=count)
    for seed, tokens in enumerate((64, 1, 0, 33)):
        fresh = make_inputs(SHAPE, 64, seed=seed + 10)
        for tensor, new in zip(static, fresh):
            tensor.copy_(new)
        count.fill_(tokens)
        graph.replay()
        moe.check()
        expected = Inputs(*(tensor[:tokens] for tensor in fresh))
        check_close(captured[:tokens], expected, weights)


def test_graph_of_two_layers_replays_many_times(weights: ExpertWeights) -> None:
    buffer = SymmBuffer(SHAPE, max_tokens=64)
    layers = [MegaMoE(SHAPE, buffer=buffer, timeout=TIMEOUT_S) for _ in range(2)]
    for layer in layers:
        layer.load_weights(*weights)
    inputs = make_inputs(SHAPE, 64)

    def both() -> torch.Tensor:
        first = layers[0](*inputs)
        return layers[1](first, inputs.topk_ids, inputs.topk_weights)

    expected = both()
    layers[0].check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(50):
        graph.replay()
    layers[0].check()
    assert torch.equal(captured, expected)


def test_compiled_function_takes_the_layer_as_one_step(moe: MegaMoE) -> None:
    inputs = make_inputs(SHAPE, 32)
    expected = run(moe, inputs) + 1

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor, ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return moe(x, ids, gates) + 1

    assert torch.equal(step(*inputs), expected)


def test_calls_from_another_thread(moe: MegaMoE) -> None:
    import threading

    inputs = make_inputs(SHAPE, 32)
    expected, found = run(moe, inputs), []
    thread = threading.Thread(target=lambda: found.append(run(moe, inputs)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.gpu(2)
def test_layer_on_another_gpu_than_the_current_one(weights: ExpertWeights) -> None:
    layer = MegaMoE(SHAPE, max_tokens=64, timeout=TIMEOUT_S, device=1)
    layer.load_weights(*weights)
    inputs = make_inputs(SHAPE, 64)
    output = layer(*(tensor.to("cuda:1") for tensor in inputs))
    layer.check()
    check_close(output.to("cuda:0"), inputs, weights)


# Host side


@pytest.mark.parametrize("given", [False, True], ids=["without out", "with out"])
def test_host_cost_of_a_warm_call(moe: MegaMoE, given: bool) -> None:
    """The middle one of five means of 100 calls each, since other work shares the CPU."""
    inputs = make_inputs(SHAPE, 8)
    options = {"out": torch.empty_like(inputs.x)} if given else {}
    for _ in range(20):
        moe(*inputs, **options)
    moe.check()
    costs = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            moe(*inputs, **options)
        costs.append((time.perf_counter() - start) / 100 * 1e6)
        moe.check()
    means = ", ".join(f"{cost:.1f}" for cost in costs)
    cost = statistics.median(costs)
    print(f"host cost of a warm eager call, out given: {given}: {cost:.1f} us, median of {means}")
    assert cost <= HOST_LIMIT_US, means


def test_warm_start(moe: MegaMoE) -> None:
    """Construction to loaded function where the kernels are cached on disk and nothing is in this process."""
    from megagen import cache
    from megagen.runtime import driver

    inputs = make_inputs(SHAPE, 8)
    run(moe, inputs)
    weights = moe._weights
    assert weights is not None
    cache._cache_of.cache_clear()
    driver._load.cache_clear()
    start = time.perf_counter()
    layer = MegaMoE(SHAPE, buffer=moe.buffer, timeout=TIMEOUT_S)
    layer.use_weights(weights)
    layer.prepare()
    elapsed_ms = (time.perf_counter() - start) * 1e3
    print(f"warm start: {elapsed_ms:.1f} ms for {len(layer._launchers)} plans")
    assert torch.equal(run(layer, inputs), run(moe, inputs))
    assert elapsed_ms <= WARM_START_LIMIT_MS


def test_memory_is_accounted_for(moe: MegaMoE) -> None:
    sizes = moe.memory_bytes()
    assert sizes["total"] == sizes["symmetric"] + sizes["local"] + sizes["weights"]
    assert sizes["symmetric"] == moe.contract.symm.size


# Ahead of time

AHEAD_OF_TIME = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "jinja2" or name == "cuda.bindings.nvrtc":
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
sys.path.insert(0, sys.argv[2])
import torch
from gpu_cases import check_close, make_inputs
from megagen import CacheError, MegaMoE, MoEShape
from megagen.weights import random_experts

shape = MoEShape.preset("tiny")
weights = random_experts(shape, range(shape.experts), device="cuda")
moe = MegaMoE(shape, max_tokens=64, kernels=sys.argv[1])
moe.load_weights(*weights)
for tokens in (1, 64):
    inputs = make_inputs(shape, tokens)
    output = moe(*inputs)
    moe.check()
    check_close(output, inputs, weights)
try:
    MegaMoE(shape, max_tokens=32, kernels=sys.argv[1]).prepare()
except CacheError as error:
    assert "max_tokens" in str(error)
else:
    raise AssertionError("another contract was accepted")
"""


def test_kernels_built_ahead_of_time_run_without_nvrtc_and_jinja(tmp_path: Path) -> None:
    from megagen.build import KernelSet, generate, plan_layer
    from megagen.contract import Contract

    plans = plan_layer(Contract(SHAPE, 1, 64), "sm90")
    generate(KernelSet(plans, {}), tmp_path, compile=True)
    here = Path(__file__).parent
    command = [sys.executable, "-c", AHEAD_OF_TIME, str(tmp_path), str(here)]
    environment = {**os.environ, "PYTHONPATH": str(here.parents[1]), "MEGAGEN_CACHE_DIR": "/dev/null/none"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert ran.returncode == 0, ran.stderr


def test_local_group_on_a_folder_falls_back_to_jit_if_asked(tmp_path: Path, weights: ExpertWeights) -> None:
    inputs = make_inputs(SHAPE, 32)
    group = MegaMoE.local_group(
        SHAPE, ranks=2, max_tokens=16, kernels=tmp_path / "nothing", jit=True, timeout=TIMEOUT_S
    )
    group.load_weights(weights)
    check_close(run_group(group, inputs.deal([16, 16])), inputs, weights)
