"""Where a layer's kernels come from: compiled here and cached, or built ahead of time."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from megagen.aot import AotFolder, load_folder
from megagen.arch import Arch
from megagen.companion import quantize_name
from megagen.compiler import CompiledKernel
from megagen.contract import Contract
from megagen.errors import CacheError, PlanError
from megagen.planning import KernelPlan, PlanSet, plan_set
from megagen.tuning import tuned_plan_set

KERNELS_VARIABLE = "MEGAGEN_KERNELS"


class KernelBundle(NamedTuple):
    """The compiled kernels of a layer: one per plan, and the companion."""

    plans: PlanSet
    kernels: tuple[CompiledKernel, ...]
    quantize: CompiledKernel


def bundle_kernels(
    contract: Contract,
    arch: Arch,
    *,
    sms: int,
    plan: KernelPlan | None = None,
    directory: str | Path | None = None,
    jit: bool | None = None,
) -> KernelBundle:
    """The kernels for all token buckets of a contract.

    Args:
        sms: SMs to plan for.
        plan: use this one, which is for this contract and architecture, for every token count.
        directory: folder of kernels built ahead of time; default: ``MEGAGEN_KERNELS``.
        jit: whether to compile what is not there; default: only if there is no folder.

    Raises:
        CacheError: a kernel is missing from the folder, or the cache can't be written.
        CompileError, DeviceError: the kernel does not compile, or NVRTC can't be loaded.
        PlanError: no plan exists.
    """
    directory = directory or os.environ.get(KERNELS_VARIABLE) or None
    if directory is None:
        if jit is False:
            raise CacheError(f"jit=False, but no folder of kernels: give kernels=DIR or {KERNELS_VARIABLE}")
        return _compile(_planned(contract, arch, sms, plan), contract, arch)
    try:
        return _load(load_folder(directory), contract, arch, plan)
    except CacheError:
        if not jit:
            raise
    return _compile(_planned(contract, arch, sms, plan), contract, arch)


def check_forced_plan(plan: KernelPlan, contract: Contract, arch: Arch) -> None:
    """PlanError unless the plan is for this contract and architecture."""
    if plan.arch != arch.name:
        raise PlanError(f"plan={plan.name}: it is for {plan.arch}, the GPU is {arch.name}; plan for it again")
    if plan.contract != contract:
        raise PlanError(
            f"plan={plan.name}: its contract is {plan.contract}, the layer's is {contract}; make the plan "
            "for the layer's shape, ranks, max_tokens and options"
        )


def _planned(contract: Contract, arch: Arch, sms: int, plan: KernelPlan | None) -> PlanSet:
    if plan is not None:
        return PlanSet((contract.max_tokens,), (plan,))
    return tuned_plan_set(contract, arch.name, sms) or plan_set(contract, arch.name, sms=sms)


def _compile(plans: PlanSet, contract: Contract, arch: Arch) -> KernelBundle:
    # Here, since kernels built ahead of time need none of it.
    from megagen.cache import default_cache, recipe_of

    cache = default_cache()
    wanted: list[tuple[str, str, Callable[[], str]]] = [
        (plan.name, recipe_of(plan.hash), partial(_render, plan)) for plan in plans.plans
    ]
    helper = quantize_name(contract, arch.name)
    source = partial(_render_helper, contract, arch.name)
    wanted.append((helper, recipe_of(helper, contract.hash), source))

    def load(one: tuple[str, str, Callable[[], str]]) -> CompiledKernel:
        name, recipe, source = one
        return cache.load_or_render(recipe, source, arch.compile_target, name=f"{name}.cu")

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        *kernels, quantize = pool.map(load, wanted)
    return KernelBundle(plans, tuple(kernels), quantize)


def _render(plan: KernelPlan) -> str:
    from megagen.render import render  # here, since cached kernels need no Jinja

    return render(plan)


def _render_helper(contract: Contract, arch: str) -> str:
    """The source of a contract's companion."""
    from megagen.render import render_quantize

    return render_quantize(contract, arch)


def _load(folder: AotFolder, contract: Contract, arch: Arch, plan: KernelPlan | None) -> KernelBundle:
    built = folder.plan_set(contract, arch.name)
    plans = built if plan is None else PlanSet((contract.max_tokens,), (plan,))
    kernels = tuple(folder.load(one.name) for one in plans.plans)
    return KernelBundle(plans, kernels, folder.load(f"helpers/{quantize_name(contract, arch.name)}"))
