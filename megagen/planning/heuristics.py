"""The planning rules. Each returns its value together with the reason for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megagen.arch import Arch
from megagen.contract import Contract
from megagen.errors import PlanError
from megagen.planning.plan import (
    BLOCK_N,
    LADDER,
    MATH_WARPS,
    Choice,
    KernelPlan,
    OperandOrder,
    Role,
    cta_smem,
)
from megagen.planning.rules import choose_combine_columns, choose_experts_per_wave, choose_pull_bytes
from megagen.planning.sm100 import make_sm100_plan
from megagen.planning.workload import likely_rows_per_expert, rows_per_expert

FORMAT_OF_ARCH = {"sm90": "fp8_block", "sm100": "mxfp8_mxfp4", "sm103": "mxfp8_mxfp4"}
MAX_STAGES = 8  # more in flight gains nothing: 8 stages of 40 KiB hide 10 us of latency at an SM's share of HBM bandwidth
MAX_PULL_BYTES = 7168  # two row buffers of this size leave room for the stages


def choose_block_m(contract: Contract, tokens: int) -> tuple[int, str]:
    """The smallest tile that holds an expert's rows with two standard deviations to spare, else the largest."""
    rows = rows_per_expert(contract, tokens)
    likely = likely_rows_per_expert(contract, tokens)
    for block_m in LADDER[:-1]:
        if likely <= block_m:
            return block_m, f"{rows:.1f} rows per expert expected, {likely:.1f} with two standard deviations: one tile holds them"
    return LADDER[-1], f"{rows:.1f} rows per expert expected: the largest tile reuses weights most"


def choose_operand_order(block_m: int) -> tuple[OperandOrder, str]:
    """Tokens on N below 128 rows: WGMMA has M = 64, so small tiles would pad; from 128 rows on, each warpgroup gets 64."""
    if block_m < 128:
        return "tokens_on_n", f"WGMMA's N goes in steps of 8, so {block_m} token rows need no padding to 64"
    return "tokens_on_m", "scales of 2 rows per thread instead of 32 columns; an SF group lies in one warp"


def choose_stages(
    arch: Arch, contract: Contract, order: OperandOrder, block_m: int, pull_bytes: int
) -> tuple[int, str]:
    """As many stages as shared memory holds beside the fixed regions, up to MAX_STAGES."""
    limit = arch.max_shared_bytes_per_block
    for stages in range(MAX_STAGES, 1, -1):
        size = cta_smem(contract, order, block_m, stages, pull_bytes).size
        if size <= limit:
            return stages, f"{size} of {limit} bytes of shared memory"
    fixed = cta_smem(contract, order, block_m, 0, pull_bytes).size
    raise PlanError(
        f"shared memory: {fixed} bytes of fixed regions leave no room for two stages of {(BLOCK_N + block_m) * 128} bytes in {limit} "
        f"({contract.shape.experts} experts, hidden {contract.shape.hidden}); spread the experts over more ranks"
    )


def roles_sm90() -> tuple[tuple[Role, ...], str]:
    """One warpgroup loads, dispatches and combines, two compute."""
    roles = (
        Role("load_tokens", 0, 1, 56, "walks the schedule, waits for rows, fills the token side of the stages"),
        Role("load_weights", 1, 1, 56, "fills the weight side of the stages"),
        Role("dispatch", 2, 1, 56, "waits for all ranks' routes, pulls tokens"),
        Role("combine", 3, 1, 56, "signals finished tiles, combines tokens that are home"),
        Role("math", 4, MATH_WARPS, 224, "publishes routes; WGMMA and epilogues; combines the rest"),
    )
    return roles, "setmaxnreg: 128 x 56 + 256 x 224 = 64,512 registers of a 384-thread launch; SwiGLU spills below 216"


@lru_cache(maxsize=1024)
def make_plan(
    contract: Contract, arch: str = "sm90", tokens: int | None = None, *, sms: int | None = None, block_m: int | None = None
) -> KernelPlan:
    """The plan for `tokens` tokens per rank (default: the contract's max_tokens) on `sms` SMs (default: all of the arch's).

    `block_m` forces the tile rows. Raises PlanError if no plan exists, naming the constraint.
    """
    machine = Arch.get(arch)
    tokens = contract.max_tokens if tokens is None else tokens
    sms = sms or machine.sms
    if contract.format != FORMAT_OF_ARCH[arch]:
        raise PlanError(f"arch={arch!r}, format={contract.format!r}: kernels for {arch} are planned with format={FORMAT_OF_ARCH[arch]!r}")
    if arch != "sm90":
        return make_sm100_plan(contract, machine, tokens, sms, block_m)
    if block_m is None:
        block_m, block_reason = choose_block_m(contract, tokens)
    else:
        block_reason = "forced"
    order, order_reason = choose_operand_order(block_m)
    pull_bytes, pull_reason = choose_pull_bytes(contract, MAX_PULL_BYTES)
    stages, stage_reason = choose_stages(machine, contract, order, block_m, pull_bytes)
    columns, columns_reason = choose_combine_columns(contract, sms * (MATH_WARPS + 1), tokens)
    wave, wave_reason = choose_experts_per_wave(contract, sms, block_m, tokens)
    roles, role_reason = roles_sm90()
    plan = KernelPlan(
        contract=contract,
        arch=arch,
        operand_order=order,
        block_m=block_m,
        stages=stages,
        experts_per_wave=wave,
        pull_bytes=pull_bytes,
        roles=roles,
        expected_tokens=tokens,
        combine_columns=columns,
        choices=(
            Choice("block_m", str(block_m), block_reason),
            Choice("operand_order", order, order_reason),
            Choice("stages", str(stages), stage_reason),
            Choice("combine_columns", str(columns), columns_reason),
            Choice("experts_per_wave", str(wave), wave_reason),
            Choice("pull_bytes", str(pull_bytes), pull_reason),
            Choice("roles", " + ".join(f"{r.warps * 32} x {r.registers}" for r in roles), role_reason),
        ),
    )
    plan.validate()
    return plan


@dataclass(frozen=True)
class PlanSet:
    """Plans of a layer by token count: plan i serves up to `limits[i]` tokens per rank. Fixed when a layer is made."""

    limits: tuple[int, ...]
    plans: tuple[KernelPlan, ...]

    def select(self, tokens: int) -> KernelPlan:
        """The plan for a call with `tokens` tokens on this rank."""
        for limit, plan in zip(self.limits, self.plans, strict=True):
            if tokens <= limit:
                return plan
        raise PlanError(f"tokens={tokens} is above max_tokens={self.limits[-1]}; make the buffer larger")


def plan_set(contract: Contract, arch: str = "sm90", *, sms: int | None = None) -> PlanSet:
    """Plans for token buckets at powers of two up to max_tokens; neighbouring buckets with one plan are merged."""
    buckets = [1 << i for i in range(contract.max_tokens.bit_length()) if 1 << i < contract.max_tokens] + [contract.max_tokens]
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
