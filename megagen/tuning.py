"""Measured plan choices: which of the planner's candidates was fastest on a GPU, kept beside the cache.

The file holds choices (arguments of ``make_plan``), not plans: it survives a change of what follows from
them, and a choice that the planner no longer knows counts as not measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megagen.cache import cache_dir
from megagen.contract import Contract
from megagen.errors import CacheError, PlanError
from megagen.files import write_atomically
from megagen.planning import KernelPlan, PlanSet, make_plan
from megagen.planning.planner import ladder_of

FILE_NAME = "tuned.json"
SCHEMA_VERSION = 1
_LOCK_TIMEOUT_S = 60.0

Choice = dict[str, Any]
"""Arguments of ``make_plan`` that override its rules; empty for the rules themselves."""


def candidate_choices(contract: Contract, arch: str, tokens: int, sms: int) -> list[Choice]:
    """What there is to choose from for so many tokens per rank, the planner's own choice first.

    Choices that no plan exists for, or that give a plan which is there already, are left out.
    """
    found: dict[str, Choice] = {}
    for choice in ({}, *({"block_m": block_m} for block_m in ladder_of(arch))):
        try:
            plan = make_plan(contract, arch, tokens, sms=sms, **choice)
        except PlanError:
            continue
        found.setdefault(plan.hash, choice)
    return list(found.values())


def token_buckets(max_tokens: int) -> list[int]:
    """Largest token count of each bucket: powers of two below the capacity, and the capacity."""
    return [1 << i for i in range(max_tokens.bit_length()) if 1 << i < max_tokens] + [max_tokens]


def bucket_of(tokens: int) -> int:
    """The bucket under which a token count is kept, whatever the capacity: the next power of two."""
    return 1 << (tokens - 1).bit_length()


def tuned_file() -> Path:
    """Where measured choices are kept."""
    return cache_dir() / FILE_NAME


def store(
    gpu: str, contract: Contract, arch: str, sms: int, buckets: Mapping[int, Mapping[str, Any]]
) -> Path:
    """Keep what was measured, beside what is already there for other layers and buckets.

    Args:
        gpu: the GPU's name, as torch gives it.
        buckets: token count -> {"choice": Choice, "us": time, ...}, kept for all of its bucket.

    Raises:
        CacheError: the file can't be written.
    """
    path = tuned_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LOCK_TIMEOUT_S):
            entries = _read(path)
            entry = entries.setdefault(_key(gpu, contract, arch, sms), {})
            entry |= {str(bucket_of(tokens)): dict(result) for tokens, result in buckets.items()}
            contents = {"schema_version": SCHEMA_VERSION, "entries": entries}
            write_atomically(path, json.dumps(contents, indent=1, sort_keys=True).encode())
    except (OSError, Timeout) as error:
        raise CacheError(
            f"{path} can't be written: {error}; set MEGAGEN_CACHE_DIR to another folder"
        ) from error
    return path


def load(gpu: str, contract: Contract, arch: str, sms: int) -> dict[int, Choice]:
    """Bucket (``bucket_of``) -> the choice measured for it; empty if there is none."""
    entry = _read(tuned_file()).get(_key(gpu, contract, arch, sms), {})
    return {int(bucket): result["choice"] for bucket, result in entry.items()}


def tuned_plan_set(contract: Contract, arch: str, sms: int, gpu: str | None = None) -> PlanSet | None:
    """Plans by token bucket with the measured choices in place of the rules; None if nothing was measured.

    Args:
        sms: SMs that the kernel takes; other numbers were tuned apart.
        gpu: the GPU's name, by default that of torch's current one.
    """
    chosen = load(gpu or current_gpu(), contract, arch, sms)
    if not chosen:
        return None
    limits: list[int] = []
    plans: list[KernelPlan] = []
    for bucket in token_buckets(contract.max_tokens):
        plan = _plan(contract, arch, bucket, sms, chosen.get(bucket_of(bucket), {}))
        if plans and plan.hash == plans[-1].hash:
            limits[-1] = bucket
        else:
            limits.append(bucket)
            plans.append(plan)
    return PlanSet(tuple(limits), tuple(plans))


def current_gpu() -> str:
    """Name of torch's current GPU, "" without one."""
    import torch  # here, since planning does without

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _plan(contract: Contract, arch: str, tokens: int, sms: int, choice: Choice) -> KernelPlan:
    try:
        return make_plan(contract, arch, tokens, sms=sms, **choice)
    except (PlanError, TypeError):  # a choice of another version of the planner
        return make_plan(contract, arch, tokens, sms=sms)


def _key(gpu: str, contract: Contract, arch: str, sms: int) -> str:
    """All that a choice depends on; the capacity is left out, so that layers of any capacity use it."""
    shape = contract.shape
    sizes = f"h{shape.hidden}i{shape.intermediate}e{shape.experts}k{shape.top_k}"
    options = f"{contract.format}-{contract.sf_group}-{contract.activation}-{contract.clamp}"
    return f"{gpu}/{arch}/{sms} SMs/{sizes}/ep{contract.ranks}/{options}"


def _read(path: Path) -> dict[str, Any]:
    """The entries of the file; none if it is not there, torn, or of another version."""
    try:
        contents = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(contents, dict) or contents.get("schema_version") != SCHEMA_VERSION:
        return {}
    entries: dict[str, Any] = contents["entries"]
    return entries
