"""Measures what an emulated layer costs: CPU seconds against warp instructions, for layers of growing size.

    python scripts/emulator_cost.py [--repeat 3] [--seed 0]

Prints a Markdown table, with all checks and without those of order and proxies, and how well a straight line
fits.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from megagen.contract import Contract
from megagen.emulator.cases import Case, prepare
from megagen.planning import make_plan
from megagen.shape import MoEShape

EXPERTS = (2, 4, 8, 16, 32, 64)
"""Layers from small to large. Each expert has as many rows in all of them, so that the mix of instructions,
copies and matrix operations stays the same."""

HIDDEN = INTERMEDIATE = 256
RANKS, SMS, TOP_K, ROWS, BLOCK_M = 2, 4, 2, 64, 64


def make_case(experts: int, seed: int) -> Case:
    shape = MoEShape(HIDDEN, INTERMEDIATE, experts, TOP_K)
    tokens = experts * ROWS // (RANKS * TOP_K)
    contract = Contract(shape, ranks=RANKS, max_tokens=tokens)
    plan = make_plan(contract, "sm90", tokens, sms=SMS, block_m=BLOCK_M)
    return Case((plan,) * RANKS, (SMS,) * RANKS, (tokens,) * RANKS, seed=seed)


def measure(case: Case, **machine: Any) -> tuple[int, int, float]:
    """Warp instructions, matrix operations and CPU seconds of a second call; the first loads the kernel."""
    layer, inputs = prepare(case, **machine), case.inputs()
    before = layer.call(inputs).report
    start = time.thread_time()
    after = layer.call(inputs).report
    seconds = time.thread_time() - start
    return (
        after.instructions - before.instructions,
        after.matrix_operations - before.matrix_operations,
        seconds,
    )


def fastest(experts: int, repeat: int, seed: int, **machine: Any) -> tuple[int, int, float]:
    runs = [measure(make_case(experts, seed), **machine) for _ in range(repeat)]
    return min(runs, key=lambda run: run[2])


def line(rows: Sequence[tuple[int, float]]) -> str:
    """The straight line through (instructions, seconds)."""
    instructions, seconds = np.array(rows).T
    slope = np.polyfit(instructions, seconds, 1)[0]
    fit = np.corrcoef(instructions, seconds)[0, 1] ** 2
    return f"{slope * 1e9:.0f} ns per warp instruction, R^2 = {fit:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each layer; the fastest counts")
    parser.add_argument("--seed", type=int, default=0, help="of tokens, routing and interleaving")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checked, unchecked = [], []
    columns = "experts", "tokens per rank", "warp instructions", "WGMMAs", "seconds", "seconds without checks"
    print(f"| {' | '.join(columns)} |\n|{' ---: |' * len(columns)}")
    for experts in track(EXPERTS, "layers", console=Console(stderr=True), transient=True):
        instructions, matrix, seconds = fastest(experts, options.repeat, options.seed)
        _, _, alone = fastest(experts, options.repeat, options.seed, races=False, proxy="off")
        checked.append((instructions, seconds))
        unchecked.append((instructions, alone))
        print(
            f"| {experts} | {experts * ROWS // (RANKS * TOP_K)} | {instructions:,} | {matrix:,} "
            f"| {seconds:.2f} | {alone:.2f} |"
        )
    print(f"\nwith all checks: {line(checked)}\nwithout those of order and proxies: {line(unchecked)}")


if __name__ == "__main__":
    main()
