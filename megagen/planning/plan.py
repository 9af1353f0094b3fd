"""KernelPlan: every number of one kernel, computed once.

The fields are the decisions; layouts, offsets and byte counts are properties that follow from them. Templates
and runtime read both.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from megagen.arch import Arch
from megagen.contract import DTYPE_BYTES, Contract, Layout, Region, WeightLayout, align_up
from megagen.errors import PlanError
from megagen.planning.rules import least_ring_blocks
from megagen.protocol import Field, params_fields
from megagen.tensor_map import TensorMap

OperandOrder = Literal["tokens_on_m", "tokens_on_n"]

BLOCK_K = 128  # bytes of K per pipeline stage, one scale block
TILE_SLOTS = 4  # tile tasks that the token loader may publish ahead of the math role
ORDER_SLOTS = 2  # tile numbers that the weight loader may be ahead of the token loader
COMBINE_STEP_COLUMNS = 256  # 16 bytes of bfloat16 for each lane


@dataclass(frozen=True)
class Choice:
    """One planning decision and why it was taken."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Role:
    """A group of warps with one job; `registers` per thread after ``setmaxnreg``."""

    name: str
    first_warp: int
    warps: int
    registers: int
    job: str


def smem_layout(*entries: tuple[str, str, tuple[int, ...], int]) -> Layout:
    """Places (name, dtype, shape, alignment) entries in shared memory, in order."""
    regions, offset = [], 0
    for name, dtype, shape, alignment in entries:
        size = DTYPE_BYTES[dtype]
        for extent in shape:
            size *= extent
        offset = align_up(offset, alignment)
        regions.append(Region(name, offset, size, shape, dtype))
        offset += size
    return Layout(tuple(regions), align_up(offset, 16))


# Regions that are zero before the first launch, and that a launch leaves zero (but for the launch number).
ZEROED_SYMMETRIC = ("control", "flags", "pending")
ZEROED_LOCAL = ("launch", "send_count", "l1_arrival", "l2_arrival", "l2_finished")


@dataclass(frozen=True)
class KernelPlan(ABC):
    """One kernel of one contract.

    `block_m`: token rows of a tile. `operand_order`: ``tokens_on_m`` gives each math warpgroup 64 token rows
    of the tile, ``tokens_on_n`` (A and B swapped) gives it 128 weight rows. `stages`: depth of the load
    pipeline. `experts_per_wave`: experts whose L1 tiles precede their L2 tiles. `pull_bytes`: piece of a
    token row that a dispatch warp copies at a time. `l1_ring_blocks`: blocks of pulled token rows that there
    is room for; if more may come, it is a ring. `combine_columns`: columns of one token that a warp combines
    at a time. `lone_publisher_routes`: up to so many routes of a rank, one SM publishes them all.
    `prefetched_blocks`: K blocks of weights that each SM fetches to L2 before it knows its first tile.
    `trace`: the kernel records what each warp does.
    """

    contract: Contract
    arch: str
    operand_order: OperandOrder
    block_m: int
    stages: int
    experts_per_wave: int
    pull_bytes: int
    roles: tuple[Role, ...]
    expected_tokens: int
    l1_ring_blocks: int
    combine_columns: int
    lone_publisher_routes: int = 1024
    prefetched_blocks: int = 0
    trace: bool = False
    choices: tuple[Choice, ...] = field(default=(), compare=False)

    # -- derived sizes

    @property
    def threads(self) -> int:
        return 32 * sum(role.warps for role in self.roles)

    @property
    @abstractmethod
    def ladder(self) -> tuple[int, ...]:
        """The values of `block_m` that this architecture's kernels exist for."""

    @property
    @abstractmethod
    def rated_block_m(self) -> int:
        """Token rows of the tiles that `Rates.fp8_flops_per_s` is of."""

    @abstractmethod
    def expert_cost(self, tokens: int) -> float:
        """Expected time of an expert's tiles, in full tiles of `rated_block_m` rows, at even routing."""

    @property
    def cluster(self) -> int:
        """CTAs per cluster; a cluster works on one tile."""
        return 1

    def grid(self, sms: int) -> int:
        """CTAs on so many SMs: one on each, in whole clusters."""
        return sms // self.cluster * self.cluster

    @property
    def weight_layout(self) -> WeightLayout:
        return WeightLayout(self.contract.shape, self.contract.local_experts, self.contract.format)

    @property
    @abstractmethod
    def weight_stage_bytes(self) -> int:
        """Weight side of a pipeline stage in the shared memory of one CTA."""

    @property
    @abstractmethod
    def token_tile_bytes(self) -> int:
        """Bytes of one K block of a pool block: the token rows and their scale factors."""

    @property
    @abstractmethod
    def pool_rows(self) -> int:
        """Rows of the pool that no routing overflows, in whole blocks."""

    @property
    def combine_step_columns(self) -> int:
        """Columns that a warp combines at once."""
        return COMBINE_STEP_COLUMNS if self.combine_columns % COMBINE_STEP_COLUMNS == 0 else 128

    @property
    def combine_step_bytes(self) -> int:
        return 2 * self.combine_step_columns

    @property
    def is_ring(self) -> bool:
        """Whether pulled rows may have to wait for the place of others."""
        return self.l1_ring_blocks < self.max_blocks

    @property
    def max_blocks(self) -> int:
        return self.pool_rows // self.block_m

    @property
    @abstractmethod
    def smem(self) -> Layout:
        """Shared-memory map of the CTA, bytes from the start of dynamic shared memory."""

    @property
    @abstractmethod
    def local(self) -> Layout:
        """Local workspace: plain device memory of this rank, zeroed once before the first launch."""

    # -- what the host passes

    @property
    def params(self) -> tuple[Field, ...]:
        """The kernel's one parameter, a struct."""
        return params_fields(self.contract.ranks, self.trace)

    def weight_params(self, addresses: Mapping[str, int]) -> dict[str, int | TensorMap]:
        """The fields of it that say where the weights are.

        `addresses`: of ``w13``, ``w13_sf``, ``w2`` and ``w2_sf``.
        """
        return dict(addresses)

    # -- identity

    @cached_property
    def hash(self) -> str:
        """SHA-256 over everything that shapes the source; reasons are left out."""
        return hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Base name of the files of this kernel."""
        s = self.contract.shape
        shape = f"h{s.hidden}i{s.intermediate}e{s.experts}k{s.top_k}-{self.contract.format}"
        return f"{shape}-{self.arch}-ep{self.contract.ranks}-m{self.block_m}-{self.hash[:8]}"

    def _identity(self) -> dict[str, Any]:
        reasons = ("choices", "expected_tokens")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in reasons}
        return {
            **values,
            "contract": self.contract.to_dict(),
            "roles": [asdict(role) for role in self.roles],
        }

    def to_json(self) -> str:
        """The plan with its reasons and its shared-memory map, as JSON."""
        return json.dumps(
            {
                "schema_version": 1,
                **self._identity(),
                "expected_tokens": self.expected_tokens,
                "choices": [asdict(c) for c in self.choices],
                **self._derived(),
            },
            indent=1,
        )

    def _derived(self) -> dict[str, Any]:
        """What a plan file says besides the decisions; `from_json` compares it."""
        return {
            "name": self.name,
            "hash": self.hash,
            "contract_hash": self.contract.hash,
            "weight_layout": self.weight_layout.name,
            "pool_rows": self.pool_rows,
            "shared_memory": [{**asdict(r), "shape": list(r.shape)} for r in self.smem.regions],
            "shared_memory_bytes": self.smem.size,
        }

    @classmethod
    def from_json(cls, text: str) -> KernelPlan:
        """Inverse of `to_json`, whatever the architecture; refuses a file that was edited in part.

        Raises PlanError for a field that is missing, of the wrong kind, or not what follows from the
        decisions (the hash, the map).
        """
        values = json.loads(text)
        try:
            form = plan_form(values["arch"])
            nested: dict[str, Any] = {
                "contract": Contract.from_dict(values["contract"]),
                "roles": tuple(Role(**role) for role in values["roles"]),
                "choices": tuple(Choice(**choice) for choice in values["choices"]),
            }
            decisions: dict[str, Any] = {f.name: nested.get(f.name, values[f.name]) for f in fields(form)}
            plan = form(**decisions)
        except KeyError as missing:
            raise PlanError(
                f"plan file lacks the field {missing}; generate it again with `megagen plan --json`"
            ) from None
        except (TypeError, AttributeError, ValueError) as error:
            raise PlanError(f"plan file: {error}; generate it again with `megagen plan --json`") from error
        plan.validate()
        for name, own in plan._derived().items():
            if values.get(name, own) != own:
                raise PlanError(
                    f"plan file: its {name} is not what follows from its decisions ({str(own)[:80]}); "
                    f"remove {name} after editing a plan by hand"
                )
        return plan

    def validate(self) -> None:
        """Raises PlanError naming the constraint that this plan breaks; one that passes fits the machine."""
        arch, hidden = Arch.get(self.arch), self.contract.shape.hidden
        sizes = ("block_m", "stages", "experts_per_wave", "pull_bytes", "l1_ring_blocks", "combine_columns")
        for name in sizes:
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name}={value!r}: give a positive integer")
        if type(self.lone_publisher_routes) is not int or self.lone_publisher_routes < 0:
            raise PlanError(
                f"lone_publisher_routes={self.lone_publisher_routes!r}: give an integer of 0 or more"
            )
        if not isinstance(self.trace, bool):
            raise PlanError(f"trace={self.trace!r} is neither True nor False")
        self._check_form()
        if self.stages < 2:
            raise PlanError(f"stages={self.stages}: the load pipeline needs at least 2")
        if self.smem.size > arch.max_shared_bytes_per_block:
            raise PlanError(
                f"shared memory: {self.smem.size} bytes with stages={self.stages}, the limit of "
                f"{self.arch} is {arch.max_shared_bytes_per_block}; use fewer stages"
            )
        if self.contract.local_experts % self.experts_per_wave:
            raise PlanError(
                f"experts_per_wave={self.experts_per_wave} does not divide the "
                f"{self.contract.local_experts} experts of a rank"
            )
        if hidden % self.pull_bytes or self.pull_bytes % 16:
            raise PlanError(
                f"pull_bytes={self.pull_bytes} must divide the row of {hidden} bytes, in multiples of 16"
            )
        fewest = min(least_ring_blocks(self.contract, self.block_m, sms=1), self.max_blocks)
        if not fewest <= self.l1_ring_blocks <= self.max_blocks:
            raise PlanError(
                f"l1_ring_blocks={self.l1_ring_blocks} is not within {fewest}, with which nothing waits for "
                f"ever, and the {self.max_blocks} blocks of the whole pool"
            )
        if self.prefetched_blocks not in range(hidden // BLOCK_K + 1):
            raise PlanError(
                f"prefetched_blocks={self.prefetched_blocks!r} is not within 0 and the {hidden // BLOCK_K} K "
                "blocks of an L1 tile"
            )
        if hidden % self.combine_columns or self.combine_columns % 128:
            raise PlanError(
                f"combine_columns={self.combine_columns} must divide the row of {hidden} columns, "
                "in multiples of 128"
            )
        for role in self.roles:
            allowed = range(arch.min_setmaxnreg, arch.max_setmaxnreg + 1, arch.register_step)
            if role.registers not in allowed:
                raise PlanError(
                    f"registers: role {role.name} asks for {role.registers}, setmaxnreg takes "
                    f"multiples of {allowed.step} from {allowed[0]} to {allowed[-1]}"
                )
        granted = sum(role.registers * role.warps * 32 for role in self.roles)
        launched = arch.launch_registers(self.threads) * self.threads
        if granted > launched:
            raise PlanError(
                f"registers: the roles ask for {granted}, a launch of {self.threads} threads "
                f"allocates {launched}"
            )

    def require_ring_for(self, sms: int) -> None:
        """PlanError if so many SMs would pull more first rows than the ring of pulled rows holds."""
        fewest = min(least_ring_blocks(self.contract, self.block_m, sms), self.max_blocks)
        if self.l1_ring_blocks < fewest:
            raise PlanError(
                f"l1_ring_blocks={self.l1_ring_blocks}: {sms} SMs need at least {fewest} blocks; give the "
                "kernel fewer SMs with num_sms, or plan with a larger ring"
            )

    @abstractmethod
    def _check_form(self) -> None:
        """The part of `validate` that belongs to the architecture."""


def plan_form(arch: str) -> type[KernelPlan]:
    """The class of an architecture's plans."""
    from megagen.planning import sm90, sm100  # here, since they derive from KernelPlan

    return sm100.Sm100Plan if arch in sm100.ARCHS else sm90.Sm90Plan
