"""Ranks, a timer, layers and contenders that need no GPU, and work for real processes without one."""

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from megagen import MoEShape, errors
from megagen.bench import baseline
from megagen.bench.cases import Case, Inputs, make_inputs, route
from megagen.bench.timing import Call, Timing
from megagen.planning import make_plan
from megagen.reference import moe_forward, relative_error
from megagen.weights import ExpertWeights, random_experts

MICRO = MoEShape.preset("micro")
CPU = torch.device("cpu")


class OneRank:
    """What ``Ranks`` is in a process alone; keeps what it reports."""

    rank, world, device, group = 0, 1, CPU, None

    def __init__(self) -> None:
        self.reported: list[dict[str, Any]] = []

    def report(self, kind: str, **content: Any) -> None:
        self.reported.append({"kind": kind, **content})

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def attempt(self, action: Any) -> tuple[Any, str]:
        try:
            return action(), ""
        except Exception as error:
            return None, f"rank 0: {type(error).__name__}: {error}"

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.reported if message["kind"] == kind]


class FakeTimer:
    """Makes each call once; the i-th takes 100 + i microseconds."""

    def __init__(self, ranks: Any, samples: int = 20, warm_up: int = 5) -> None:
        self.samples = samples

    def measure(self, calls: list[Call]) -> list[Timing]:
        timings = []
        for index, call in enumerate(calls):
            call.prepare()
            call.run()
            timings.append(Timing(100.0 + index, [100.0 + index] * self.samples, 0, True))
        return timings


class ReferenceContender:
    """Computes with the reference; ``wrong`` leaves the poison in, ``broken`` raises."""

    def __init__(self, weights: ExpertWeights, *, wrong: bool = False, broken: bool = False) -> None:
        self.weights, self.wrong, self.broken, self.recovered = weights, wrong, broken, 0

    def calls(self, inputs: Inputs) -> list[Call]:
        return [self._call(column, inputs) for column in ("kernel", "end_to_end")]

    def _call(self, column: str, inputs: Inputs) -> Call:
        output = torch.empty_like(inputs.x)

        def run() -> None:
            if self.broken:
                raise errors.MegaMoETimeout("stuck")
            if not self.wrong:
                tokens = (inputs.x_q, inputs.x_sf)
                output.copy_(moe_forward(tokens, inputs.topk_ids, inputs.topk_weights, self.weights))

        return Call(column, lambda: output.fill_(torch.nan), run, output)

    def check(self) -> None:
        pass

    def recover(self) -> None:
        self.recovered += 1

    def memory_bytes(self) -> int:
        return 1 << 20


class FakeLayer:
    """A ``MegaMoE`` that computes with the reference."""

    def __init__(self, shape: MoEShape, *, plan: Any = None, weights: Any = None, **options: Any) -> None:
        self.shape, self.forced, self.options = shape, plan, options
        self.weights: Any = weights
        self.checks = 0

    def load_weights(self, *weights: torch.Tensor) -> None:
        self.weights = ExpertWeights(*weights)

    def use_weights(self, weights: Any) -> None:
        self.weights = weights

    def prepare(self) -> None:
        pass

    def check(self) -> None:
        self.checks += 1

    def launcher_for(self, tokens: int) -> Any:
        from types import SimpleNamespace

        from megagen.contract import Contract

        contract = Contract(self.shape, 1, self.options.get("max_tokens", 64))
        return SimpleNamespace(plan=self.forced or make_plan(contract, "sm90", tokens))

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(moe_forward(x, ids, weights, self.weights))


# What real processes do


def talk(ranks: Any, argument: Any) -> None:
    """Report what was gathered, and what was attempted."""
    ranks.report("gathered", values=ranks.gather((ranks.rank, argument)))

    def fail_on_one() -> int:
        if ranks.rank == 1:
            raise ValueError("no")
        return 1

    ranks.report("attempted", result=ranks.attempt(fail_on_one))
    ranks.report("environment", nvls=os.environ["NCCL_NVLS_ENABLE"])


def fail(ranks: Any, argument: Any) -> None:
    """Rank 0 is told that its peer stopped; rank 1 knows why, a moment later."""
    if ranks.rank == 0:
        raise errors.PeerAborted("rank 1 stopped")
    time.sleep(0.5)
    raise errors.MegaMoETimeout("rank 1 waited for rank 0")


def end(ranks: Any, how: str) -> None:
    """Report once, then die or hang."""
    ranks.report("begun")
    if how == "dies":
        os._exit(7)
    time.sleep(600)


def run_baseline(ranks: Any, tokens: int) -> None:
    """The PyTorch baseline on CPUs, its grouped GEMM replaced; reports each rank's error."""
    baseline.grouped_gemm = plain_grouped_gemm
    baseline.compiled = lambda function: function
    ranks.report("errors", values=ranks.gather(baseline_error(ranks, tokens)))
    dist.barrier()


def baseline_error(ranks: Any, tokens: int) -> float:
    case = Case("micro", MICRO, tokens)
    weights = random_experts(MICRO, range(MICRO.experts))
    own = ExpertWeights(*(tensor.chunk(ranks.world)[ranks.rank] for tensor in weights))
    inputs = make_inputs(MICRO, route(case, ranks.world, 3), [tokens] * ranks.world, ranks.rank, 3, CPU)
    (call,) = baseline.PyTorch(ranks, MICRO, own, tokens).calls(inputs)
    call.prepare()
    call.run()
    expected = moe_forward(
        (inputs.x_q, inputs.x_sf),
        inputs.topk_ids,
        inputs.topk_weights,
        weights,
        quantize_intermediate=False,
    )
    return relative_error(call.output.float(), expected).whole


def plain_grouped_gemm(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """What torch's grouped GEMM computes, group by group; each group starts on a multiple of 16 rows."""
    out, start = torch.empty(len(x), weight.shape[1], dtype=torch.bfloat16), 0
    for expert, stop in enumerate(ends.tolist()):
        assert start % baseline.GROUP_ROWS == 0
        a = x[start:stop].float() * x_scale[start:stop, None]
        out[start:stop] = (a @ (weight[expert].float() * weight_scale[expert][:, None]).T).bfloat16()
        start = stop
    assert start == len(x)
    return out
