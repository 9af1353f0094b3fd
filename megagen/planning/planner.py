"""make_plan and plan_set: contract x architecture x tokens -> KernelPlan.

The rules of each architecture are in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megagen.arch import Arch
from megagen.contract import Contract, Layout
from megagen.errors import PlanError
from megagen.planning import sm90, sm100
from megagen.planning.plan import KernelPlan
from megagen.planning.sm90 import make_sm90_plan
from megagen.planning.sm100 import make_sm100_plan

FORMAT_OF_ARCH = {"sm90": "fp8_block", "sm100": "mxfp8_mxfp4", "sm103": "mxfp8_mxfp4"}


def default_format(arch: str) -> str:
    """The format that an architecture's kernels are planned with; PlanError for one that is unknown."""
    return FORMAT_OF_ARCH[Arch.get(arch).name]


def ladder_of(arch: str) -> tuple[int, ...]:
    """The values of `block_m` that an architecture's kernels exist for."""
    return sm90.LADDER if arch == "sm90" else sm100.LADDER


def largest_local_layout(contract: Contract, arch: str, sms: int) -> Layout:
    """The local workspace that is large enough for every plan of a contract on up to so many SMs."""
    family = sm90 if arch == "sm90" else sm100
    layouts = (
        family.local_layout(contract, block_m, family.ring_blocks(contract, block_m, sms)[0])
        for block_m in family.LADDER
    )
    return max(layouts, key=lambda layout: layout.size)


@lru_cache(maxsize=1024)
def make_plan(
    contract: Contract,
    arch: str = "sm90",
    tokens: int | None = None,
    *,
    sms: int | None = None,
    block_m: int | None = None,
) -> KernelPlan:
    """The plan for `tokens` tokens per rank (default: the contract's max_tokens) on `sms` SMs (default: all
    of the arch's).

    `block_m` forces the tile rows. Raises PlanError if no plan exists, naming the constraint.
    """
    machine = Arch.get(arch)
    tokens = contract.max_tokens if tokens is None else tokens
    sms = sms or machine.sms
    if contract.format != FORMAT_OF_ARCH[arch]:
        raise PlanError(
            f"arch={arch!r}, format={contract.format!r}: kernels for {arch} are planned with "
            f"format={FORMAT_OF_ARCH[arch]!r}"
        )
    make = make_sm90_plan if arch == "sm90" else make_sm100_plan
    return make(contract, machine, tokens, sms, block_m)


@dataclass(frozen=True)
class PlanSet:
    """Plans of a layer: plan i serves up to `limits[i]` tokens per rank. Fixed when a layer is made."""

    limits: tuple[int, ...]
    plans: tuple[KernelPlan, ...]

    def select(self, tokens: int) -> KernelPlan:
        """The plan for a call with `tokens` tokens on this rank."""
        for limit, plan in zip(self.limits, self.plans, strict=True):
            if tokens <= limit:
                return plan
        raise PlanError(f"tokens={tokens} is above max_tokens={self.limits[-1]}; make the buffer larger")


def plan_set(contract: Contract, arch: str = "sm90", *, sms: int | None = None) -> PlanSet:
    """Plans for token buckets at powers of two up to max_tokens; neighbours with one plan are merged."""
    most = contract.max_tokens
    buckets = [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]
    limits: list[int] = []
    plans: list[KernelPlan] = []
    for bucket in buckets:
        plan = make_plan(contract, arch, bucket, sms=sms)
        if plans and plan.hash == plans[-1].hash:
            limits[-1] = bucket
        else:
            limits.append(bucket)
            plans.append(plan)
    return PlanSet(tuple(limits), tuple(plans))
