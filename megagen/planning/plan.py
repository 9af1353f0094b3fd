"""KernelPlan: every number of one kernel, computed once.

The fields are the decisions; layouts, offsets and byte counts are properties that follow from them. Templates and runtime read both.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from megagen.arch import Arch
from megagen.contract import DTYPE_BYTES, SF_BLOCK, Contract, Layout, Region, WeightLayout, align_up, lay_out
from megagen.errors import PlanError

OperandOrder = Literal["tokens_on_m", "tokens_on_n"]

BLOCK_N = 256  # weight rows of a tile: one SF group of 128 intermediate columns, gate and up
BLOCK_K = 128  # bytes of K per pipeline stage, one scale block
TILE_SLOTS = 4  # tile tasks that the token loader may publish ahead of the math role
ORDER_SLOTS = 2  # tile numbers that the weight loader may be ahead of the token loader
PULL_BUFFERS = 2  # token rows that a dispatch warp has in flight
EARLY_UNITS = 1024  # combine units of an SM that may be combined while tiles are still computed
MATH_WARPS = 8
WARP_STAGING_BYTES = 16 * 128  # 16 rows of 128 bytes
LADDER = (16, 32, 64, 128)  # BLOCK_M values of sm90
LARGEST_BLOCK_M = LADDER[-1]
SMALLEST_BLOCK_M = LADDER[0]


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


@dataclass(frozen=True)
class KernelPlan:
    """One kernel of one contract.

    `block_m`: token rows of a tile. `operand_order`: ``tokens_on_m`` gives each math warpgroup 64 token rows of the tile,
    ``tokens_on_n`` (A and B swapped) gives it 128 weight rows. `stages`: depth of the load pipeline. `experts_per_wave`: experts whose L1
    tiles precede their L2 tiles. `pull_bytes`: piece of a token row that a dispatch warp copies at a time. `combine_columns`:
    columns of one token that a warp combines at a time. `trace`: the kernel records what each warp does.
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
    combine_columns: int
    trace: bool = False
    choices: tuple[Choice, ...] = field(default=(), compare=False)

    # -- derived sizes

    @property
    def threads(self) -> int:
        return 32 * sum(role.warps for role in self.roles)

    @property
    def ladder(self) -> tuple[int, ...]:
        """The values of `block_m` that this architecture's kernels exist for."""
        return LADDER

    @property
    def cluster(self) -> int:
        """CTAs per cluster; a cluster works on one tile."""
        return 1

    @property
    def weight_layout(self) -> WeightLayout:
        return WeightLayout(self.contract.shape, self.contract.local_experts, self.contract.format, BLOCK_N)

    @property
    def weight_stage_bytes(self) -> int:
        return BLOCK_N * BLOCK_K

    @property
    def token_tile_bytes(self) -> int:
        return token_tile_bytes(self.block_m)

    @property
    def pool_rows(self) -> int:
        """Rows of the pool that no routing overflows, in whole blocks."""
        return pool_rows(self.contract, self.block_m)

    @property
    def max_blocks(self) -> int:
        return self.pool_rows // self.block_m

    @cached_property
    def smem(self) -> Layout:
        """Shared-memory map of the CTA, bytes from the start of dynamic shared memory."""
        return cta_smem(self.contract, self.operand_order, self.block_m, self.stages, self.pull_bytes, self.trace)

    @cached_property
    def local(self) -> Layout:
        """Local workspace: plain device memory of this rank, zeroed once before the first launch."""
        return local_layout(self.contract, self.block_m)

    # -- identity

    @cached_property
    def hash(self) -> str:
        """SHA-256 over everything that shapes the source; reasons are left out."""
        return hashlib.sha256(json.dumps(self._identity(), sort_keys=True).encode()).hexdigest()

    @property
    def name(self) -> str:
        """Base name of the files of this kernel."""
        s = self.contract.shape
        shape = f"h{s.hidden}i{s.intermediate}e{s.experts}k{s.top_k}"
        return f"{shape}-{self.contract.format}-{self.arch}-ep{self.contract.ranks}-m{self.block_m}-{self.hash[:8]}"

    def _identity(self) -> dict[str, Any]:
        values = {k: v for k, v in asdict(self).items() if k not in ("contract", "choices", "expected_tokens")}
        return {"contract": self.contract.to_dict(), **values}

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

        Raises PlanError for a field that is missing, of the wrong kind, or not what follows from the decisions (the hash, the map).
        """
        values = json.loads(text)
        try:
            plan = plan_form(values["arch"])(
                contract=Contract.from_dict(values["contract"]),
                arch=values["arch"],
                operand_order=values["operand_order"],
                block_m=values["block_m"],
                stages=values["stages"],
                experts_per_wave=values["experts_per_wave"],
                pull_bytes=values["pull_bytes"],
                roles=tuple(Role(**role) for role in values["roles"]),
                expected_tokens=values["expected_tokens"],
                combine_columns=values["combine_columns"],
                trace=values["trace"],
                choices=tuple(Choice(**choice) for choice in values["choices"]),
            )
        except KeyError as missing:
            raise PlanError(f"plan file lacks the field {missing}; generate it again with `megagen plan --json`") from None
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
        """Raises PlanError naming the constraint that this plan breaks; a plan that passes fits the machine."""
        arch = Arch.get(self.arch)
        for name in ("block_m", "stages", "experts_per_wave", "pull_bytes", "combine_columns"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(f"{name}={value!r}: give a positive integer")
        self._check_form()
        if self.stages < 2:
            raise PlanError(f"stages={self.stages}: the load pipeline needs at least 2")
        if self.smem.size > arch.max_shared_bytes_per_block:
            raise PlanError(
                f"shared memory: {self.smem.size} bytes with stages={self.stages}, the limit of {self.arch} is "
                f"{arch.max_shared_bytes_per_block}; use fewer stages"
            )
        if self.contract.local_experts % self.experts_per_wave:
            raise PlanError(
                f"experts_per_wave={self.experts_per_wave} does not divide the {self.contract.local_experts} experts of a rank"
            )
        if self.contract.shape.hidden % self.pull_bytes or self.pull_bytes % 16:
            raise PlanError(
                f"pull_bytes={self.pull_bytes} must divide the row of {self.contract.shape.hidden} bytes, in multiples of 16"
            )
        if self.contract.shape.hidden % self.combine_columns or self.combine_columns % 128:
            raise PlanError(
                f"combine_columns={self.combine_columns} must divide a row of {self.contract.shape.hidden} columns, "
                "in multiples of 128"
            )
        for role in self.roles:
            if role.registers % arch.register_step or not arch.min_setmaxnreg <= role.registers <= arch.max_setmaxnreg:
                raise PlanError(
                    f"registers: role {role.name} asks for {role.registers}, setmaxnreg takes multiples of {arch.register_step} "
                    f"from {arch.min_setmaxnreg} to {arch.max_setmaxnreg}"
                )
        granted = sum(role.registers * role.warps * 32 for role in self.roles)
        launched = arch.launch_registers(self.threads) * self.threads
        if granted > launched:
            raise PlanError(f"registers: the roles ask for {granted}, the launch of {self.threads} threads allocates {launched}")

    def _check_form(self) -> None:
        """The part of `validate` that belongs to the architecture."""
        if self.arch != "sm90" or self.contract.format != "fp8_block":
            raise PlanError(f"arch={self.arch!r}, format={self.contract.format!r}: this plan form is sm90 with fp8_block")
        if self.block_m not in LADDER:
            raise PlanError(f"block_m={self.block_m} is none of {LADDER}")
        if (self.operand_order == "tokens_on_m") != (self.block_m == 128):
            raise PlanError(
                f"operand_order={self.operand_order!r} with block_m={self.block_m}: tokens_on_m tiles have 128 rows "
                "(64 per math warpgroup), tokens_on_n tiles 16, 32 or 64"
            )


def plan_form(arch: str) -> type[KernelPlan]:
    """The class of an architecture's plans."""
    from megagen.planning.sm100 import ARCHS, Sm100Plan  # here, since it derives from KernelPlan

    return Sm100Plan if arch in ARCHS else KernelPlan


def token_tile_bytes(block_m: int) -> int:
    """One K block of a pool block: the rows' 128 bytes each, then a float32 scale factor each."""
    return block_m * (BLOCK_K + 4)


def pool_rows(contract: Contract, block_m: int) -> int:
    """Rows that hold every token copy a rank can receive, each expert's rows starting a new block of `block_m`."""
    worst = contract.max_received + contract.local_experts * (block_m - 1)
    return align_up(worst, block_m)


def cta_smem(contract: Contract, operand_order: OperandOrder, block_m: int, stages: int, pull_bytes: int, trace: bool = False) -> Layout:
    """Shared memory of one CTA; see the region names in the generated source."""
    experts = contract.local_experts
    on_m = operand_order == "tokens_on_m"
    # Output staging: 16 rows per math warp, or 128 bytes per token and warpgroup. Routes are counted in it before.
    staging = max(MATH_WARPS * WARP_STAGING_BYTES if on_m else 2 * block_m * 128, contract.shape.experts * 4)
    amax = () if on_m else (("amax", "f32", (MATH_WARPS, block_m), 16), ("inverse_sf", "f32", (block_m,), 16))
    return smem_layout(
        ("weight_stages", "u8", (stages, BLOCK_N * BLOCK_K), 1024),
        ("token_stages", "u8", (stages, align_up(token_tile_bytes(block_m), 1024)), 1024),
        ("staging", "u8", (staging,), 128),
        ("pull", "u8", (PULL_BUFFERS, pull_bytes), 128),
        *amax,
        ("expert_count", "u32", (experts,), 16),
        ("expert_block", "u32", (experts,), 16),
        ("tile_tasks", "u32", (TILE_SLOTS, 4), 16),
        ("full", "u64", (stages,), 8),
        ("empty", "u64", (stages,), 8),
        ("tile_full", "u64", (TILE_SLOTS,), 8),
        ("tile_empty", "u64", (TILE_SLOTS,), 8),
        ("tile_stored", "u64", (TILE_SLOTS,), 8),
        ("order_full", "u64", (ORDER_SLOTS,), 8),
        ("order_empty", "u64", (ORDER_SLOTS,), 8),
        ("order", "u32", (ORDER_SLOTS,), 8),
        ("pulled", "u64", (PULL_BUFFERS,), 8),
        # From here on the kernel zeroes everything at its start.
        ("cta_flags", "u32", (4,), 16),
        ("claimed_units", "u32", (EARLY_UNITS // 32,), 16),
        *((("trace_count", "u32", (12,), 16),) if trace else ()),
    )


def local_layout(contract: Contract, block_m: int) -> Layout:
    """Local workspace of one rank for tiles of `block_m` rows.

    Everything up to the tiles is sized for the smallest tile, so that all plans of a contract agree on where the counters lie, which stay
    zero between launches; the tiles hold nothing between launches. ``l1_tiles``, ``l2_tiles``: per pool block and K block, the token rows
    (128 bytes each) as they lie in shared memory, 128B-swizzled, then their scale factors: one bulk copy fills a pipeline stage.
    """
    shape = contract.shape
    blocks = pool_rows(contract, SMALLEST_BLOCK_M) // SMALLEST_BLOCK_M
    rows = pool_rows(contract, LARGEST_BLOCK_M)
    return lay_out(
        ("launch", "u32", (32,)),
        ("send_count", "u32", (shape.experts,)),
        ("l1_arrival", "u32", (blocks,)),
        ("l2_arrival", "u32", (blocks,)),
        ("l2_finished", "u32", (blocks,)),
        ("row_source", "u64", (rows,)),
        ("row_weight", "f32", (rows,)),
        ("l1_tiles", "u8", (rows // block_m, shape.hidden // SF_BLOCK, token_tile_bytes(block_m))),
        ("l2_tiles", "u8", (rows // block_m, shape.intermediate // SF_BLOCK, token_tile_bytes(block_m))),
    )

