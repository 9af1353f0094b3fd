"""One process per GPU: symmetric memory over NVLink, agreement of the ranks, and their failures.

The processes are started once; each check runs in all of them, and its outcome is asserted afterwards.
"""

import os
import tempfile
import time
import traceback
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from gpu_cases import MODELS, TIMEOUT_S, check_close, make_inputs
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from megagen import ContractMismatch, MegaMoE, MegaMoETimeout, MoEShape, PeerAborted, SymmBuffer
from megagen.planning import make_plan
from megagen.weights import ExpertWeights, random_experts

START_LIMIT_S = 240.0
WORLD_SIZES = (2, 4, 8)
MAX_TOKENS = 2048


class Ranks:
    """What a check gets: this rank, and weights of all experts, kept per shape."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._weights: dict[MoEShape, ExpertWeights] = {}
        self._alone: dict[MoEShape, MegaMoE] = {}

    def weights(self, shape: MoEShape) -> ExpertWeights:
        if shape not in self._weights:
            self._weights = {shape: random_experts(shape, range(shape.experts), device="cuda")}
        return self._weights[shape]

    def own(self, shape: MoEShape) -> list[torch.Tensor]:
        return [tensor.chunk(self.world)[self.rank] for tensor in self.weights(shape)]

    def layer(self, shape: MoEShape, max_tokens: int, **options: object) -> MegaMoE:
        options = {"group": dist.group.WORLD, "max_tokens": max_tokens, "timeout": TIMEOUT_S} | options
        layer = MegaMoE(shape, **options)
        layer.load_weights(*self.own(shape))
        layer.prepare()
        return layer

    def alone(self, shape: MoEShape) -> MegaMoE:
        """All experts on this GPU, for the tokens of all ranks."""
        if shape not in self._alone:
            layer = MegaMoE(shape, max_tokens=self.world * MAX_TOKENS, timeout=TIMEOUT_S)
            layer.load_weights(*self.weights(shape))
            layer.prepare()
            self._alone = {shape: layer}
        return self._alone[shape]

    def compare(self, layer: MegaMoE, counts: list[int], seed: int = 0, routing: str = "uniform") -> None:
        """This rank's part against the reference, and all of it against one rank alone."""
        shape = layer.shape
        inputs = make_inputs(shape, sum(counts), routing, seed)
        part = inputs.deal(counts)[self.rank]
        expected = self.alone(shape)(*inputs)
        self.alone(shape).check()
        dist.barrier()
        output = layer(*part)
        layer.check()
        check_close(output, part, self.weights(shape))
        assert torch.equal(output, expected.split(counts)[self.rank]), "bits differ from one rank alone"


def check_models(ranks: Ranks) -> None:
    for shape in MODELS.values():
        if shape.experts % ranks.world:
            continue
        layer = ranks.layer(shape, MAX_TOKENS)
        for tokens in (1, 65, 512, MAX_TOKENS):
            ranks.compare(layer, [tokens] * ranks.world, seed=tokens)


def check_uneven_tokens(ranks: Ranks) -> None:
    layer = ranks.layer(MODELS["tiny"], 512)
    for seed in range(8):
        ranks.compare(layer, [(seed * 97 + rank * 173) % 513 for rank in range(ranks.world)], seed)
    ranks.compare(layer, [0] * ranks.world)
    ranks.compare(layer, [512] + [0] * (ranks.world - 1))


def check_adversarial_routing(ranks: Ranks) -> None:
    layer = ranks.layer(MODELS["tiny"], 256)
    for routing in ("one-expert", "none", "first-experts", "repeated", "masked", "tile-boundary:64"):
        ranks.compare(layer, [200] * ranks.world, routing=routing)


def check_different_plans(ranks: Ranks) -> None:
    shape = MODELS["tiny"]
    buffer = SymmBuffer(shape, dist.group.WORLD, max_tokens=128)
    plan = make_plan(buffer.contract, block_m=(16, 144, 64, 32)[ranks.rank % 4])
    layer = ranks.layer(shape, 128, buffer=buffer, group=None, plan=plan, num_sms=132 - 20 * (ranks.rank % 4))
    ranks.compare(layer, [100] * ranks.world)


def check_many_launches(ranks: Ranks) -> None:
    """200 launches of two layers without synchronization, each with inputs of its own."""
    shape = MODELS["tiny"]
    buffer = SymmBuffer(shape, dist.group.WORLD, max_tokens=256)
    layers = [ranks.layer(shape, 256, buffer=buffer, group=None) for _ in range(2)]
    counts = [[(37 * launch + 101 * rank) % 257 for rank in range(ranks.world)] for launch in range(200)]
    parts = [make_inputs(shape, sum(c), seed=i).deal(c)[ranks.rank] for i, c in enumerate(counts)]
    torch.cuda.synchronize()
    outputs = [layers[i % 2](*part) for i, part in enumerate(parts)]
    layers[0].check()
    for part, output in zip(parts, outputs):
        check_close(output, part, ranks.weights(shape))


def check_graph(ranks: Ranks) -> None:
    shape = MODELS["tiny"]
    layer = ranks.layer(shape, 64)
    static = make_inputs(shape, 64)
    layer(*static)
    layer.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(*static)
    for seed in range(5):
        fresh = make_inputs(shape, 64, seed=100 * ranks.rank + seed)
        for tensor, new in zip(static, fresh):
            tensor.copy_(new)
        graph.replay()
        layer.check()
        check_close(captured, fresh, ranks.weights(shape))


def check_contract_mismatch(ranks: Ranks) -> None:
    with pytest.raises(ContractMismatch, match="max_tokens"):
        SymmBuffer(MODELS["tiny"], dist.group.WORLD, max_tokens=64 + ranks.rank)
    layer = MegaMoE(
        MODELS["tiny"], group=dist.group.WORLD, max_tokens=64, clamp=None if ranks.rank == 0 else 7.0
    )
    with pytest.raises(ContractMismatch, match="clamp"):
        layer.prepare()


def check_a_rank_without_kernels_stops_all(ranks: Ranks) -> None:
    kernels = "/nonexistent" if ranks.rank == 1 else None
    layer = MegaMoE(MODELS["tiny"], group=dist.group.WORLD, max_tokens=64, kernels=kernels)
    with pytest.raises(Exception, match="/nonexistent") as error:
        layer.prepare()
    assert isinstance(error.value, PeerAborted) == (ranks.rank != 1)


def check_stalled_rank(ranks: Ranks) -> None:
    """The last rank does not call: every other names it, it learns of them, and a reset repairs all."""
    shape, stalled = MODELS["tiny"], ranks.world - 1
    layer = ranks.layer(shape, 64, timeout=1.0)
    ranks.compare(layer, [64] * ranks.world)
    dist.barrier()
    if ranks.rank != stalled:
        layer(*make_inputs(shape, 64))
        with pytest.raises((MegaMoETimeout, PeerAborted)) as error:
            layer.check()
        if isinstance(error.value, MegaMoETimeout):
            assert f"rank {stalled}" in str(error.value)
        told = isinstance(error.value, MegaMoETimeout)
    else:
        time.sleep(2.0)
        with pytest.raises(PeerAborted):
            layer.check()
        told = False
    reports: list[bool] = [False] * ranks.world
    dist.all_gather_object(reports, told)
    assert any(reports), "nobody named the stalled rank"
    layer.reset()
    ranks.compare(layer, [64] * ranks.world)


CHECKS: dict[str, Callable[[Ranks], None]] = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_") and name != "check_close"
}


def run_rank(rank: int, world: int, folder: str) -> None:
    """One process: every check in turn; outcomes go to a file per rank."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    ranks = Ranks(rank, world)
    outcomes: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check(ranks)
            outcomes[name] = ""
        except BaseException:
            outcomes[name] = f"rank {rank}:\n{traceback.format_exc()}"
            raise  # which ends all processes: the others may wait for this one
        finally:
            torch.save(outcomes, os.path.join(folder, f"outcomes-{rank}"))
        dist.barrier()
    dist.destroy_process_group()


def run_world(world: int) -> dict[str, str]:
    """Outcome of every check, "" where it passed on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            run_rank, (world, folder), nprocs=world, join=False, start_method="spawn"
        )
        deadline, ended = time.monotonic() + START_LIMIT_S, False
        problem = f"not reached within {START_LIMIT_S:g} s"
        try:
            while not ended and time.monotonic() < deadline:
                ended = context.join(timeout=1.0)
        except (ProcessRaisedException, ProcessExitedException) as error:
            problem = f"not reached: {error}"
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
        files = [os.path.join(folder, f"outcomes-{rank}") for rank in range(world)]
        of_ranks = [torch.load(file) if os.path.exists(file) else {} for file in files]
    return {name: "\n".join(filter(None, (of.get(name, problem) for of in of_ranks))) for name in CHECKS}


@pytest.fixture(scope="module")
def outcomes_of() -> Callable[[int], dict[str, str]]:
    known: dict[int, dict[str, str]] = {}

    def outcomes(world: int) -> dict[str, str]:
        if world not in known:
            known[world] = run_world(world)
        return known[world]

    return outcomes


@pytest.mark.timeout(START_LIMIT_S + 60)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in WORLD_SIZES])
def test_processes(outcomes_of: Callable[[int], dict[str, str]], world: int, name: str) -> None:
    outcome = outcomes_of(world)[name]
    assert not outcome, outcome
