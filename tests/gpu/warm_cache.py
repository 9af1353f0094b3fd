"""Compile the kernels of the GPU tests into the cache, one process per core.

``python tests/gpu/warm_cache.py`` needs no GPU. Without it the tests compile one kernel after the other.
"""

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

from gpu_cases import all_plans

from megagen.arch import Arch
from megagen.cache import default_cache
from megagen.planning import KernelPlan
from megagen.render import render


def compile_plan(plan: KernelPlan) -> float:
    """Milliseconds that NVRTC took, now or when the kernel was cached."""
    target = Arch.get(plan.arch).compile_target
    return default_cache().load_or_compile(render(plan), target, name=f"{plan.name}.cu").compile_ms


def main() -> None:
    start = time.perf_counter()
    plans = all_plans()
    workers = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        times = list(pool.map(compile_plan, plans))
    elapsed = time.perf_counter() - start
    print(f"{len(plans)} kernels, {sum(times) / 1e3:.0f} s of compilation in {elapsed:.0f} s")


if __name__ == "__main__":
    main()
