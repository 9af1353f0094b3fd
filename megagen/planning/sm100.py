"""Plans for Blackwell (sm100, sm103): E4M3 activations x E2M1 weights, block-scaled MMA on pairs of CTAs.

The operands are swapped: the instruction's A are 256 weight rows, 128 of each CTA of a pair, its B the tile's
token rows, half of them loaded by each CTA. So accumulators, in tensor memory, have weight rows on lanes and
tokens on columns. Nothing of this has run on hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from megagen.arch import Arch
from megagen.contract import SF_BLOCK, Contract, Layout, align_up, ceil_div, lay_out
from megagen.errors import PlanError
from megagen.planning.plan import (
    BLOCK_K,
    ORDER_SLOTS,
    TILE_SLOTS,
    Choice,
    KernelPlan,
    Role,
    smem_layout,
)
from megagen.planning.rules import (
    choose_combine_columns,
    choose_experts_per_wave,
    choose_pull_bytes,
    choose_ring_blocks,
    stage_limit,
)
from megagen.planning.workload import (
    TILE_COST_ROWS,
    likely_rows_per_expert,
    padded_rows_cost,
    rows_per_expert,
)
from megagen.protocol import Field, params_fields
from megagen.tensor_map import TensorMap

ARCHS = ("sm100", "sm103")
FORMAT = "mxfp8_mxfp4"

CLUSTER = 2  # CTAs of a pair: leader and follower
BLOCK_N = 128  # weight rows of a tile per CTA
UMMA_M = CLUSTER * BLOCK_N
UMMA_K = 32  # K of one instruction, and of one scale factor
LADDER = (16, 32, 64, 96, 128, 192)  # BLOCK_M, which is UMMA_N
LADDER_MULTIPLE = 384  # least common multiple of the ladder: pool rows are whole blocks of every plan
MIN_STAGES, MAX_STAGES = 2, 12
MAX_PULL_BYTES = 4096  # a dispatch warp's row buffer

SF_BYTES = 4  # four UE8M0 scale factors, those of 128 of K
SF_ATOM_ROWS = 128  # rows whose scale factors one tcgen05.cp 32x128b.warpx4 brings to 4 TMEM columns
SF_ATOM_BYTES = SF_ATOM_ROWS * SF_BYTES
SF_ATOM_COLUMNS = SF_ATOM_ROWS // 32

ACCUMULATORS = 2  # tiles in tensor memory: the epilogue of one runs under the main loop of the next
MIN_TMEM_COLUMNS = 32  # tcgen05.alloc takes powers of two from here on

DISPATCH_WARPS = 4
EPILOGUE_WARPS = 8
EPILOGUE_WARPGROUPS = 2  # each takes half of a tile's token columns
STORE_ROWS = 16  # tokens that an epilogue warpgroup stages at a time
STORE_BUFFERS = 2
MANY_EXPERTS = 64  # per rank; above, the dispatch role keeps more counts in registers


@dataclass(frozen=True)
class TmemRegion:
    """Columns of tensor memory, 128 lanes x 4 bytes each, counted from the allocation's first."""

    name: str
    column: int
    columns: int


@dataclass(frozen=True)
class NamedBarrier:
    """A ``bar.sync`` barrier; `threads` take part."""

    name: str
    id: int
    threads: int


@dataclass(frozen=True)
class InstructionDescriptor:
    """The 32-bit instruction descriptor of ``tcgen05.mma.kind::mxf8f6f4`` (PTX ISA, tcgen05, instruction
    descriptor).

    A and B are K-major, dense, not negated; scale factors are UE8M0. `a_type`, `b_type`: 0 is E4M3, 5 E2M1.
    """

    a_type: int
    b_type: int
    m: int
    n: int

    A_SF_ID_SHIFT: ClassVar[int] = 29
    B_SF_ID_SHIFT: ClassVar[int] = 4

    def word(self, sf_id: int = 0) -> int:
        """The descriptor for the `sf_id`-th 32 of a K block: byte `sf_id` of each packed SF of A and of B."""
        static = self.a_type << 7 | self.b_type << 10 | self.n // 8 << 17 | 1 << 23 | self.m // 128 << 27
        return static | sf_id << self.B_SF_ID_SHIFT | sf_id << self.A_SF_ID_SHIFT


def matrix_descriptor(stride_bytes: int, swizzle: int) -> int:
    """A shared-memory matrix descriptor of tcgen05 but for its address (bits 0-13, in units of 16 bytes).

    `stride_bytes` is the distance of groups of 8 rows; `swizzle` is 0 for none, 2 for 128 bytes. K-major
    operands of 128 bytes of K, and the copies of scale factors, need no leading offset (PTX ISA, tcgen05,
    matrix descriptor).
    """
    return stride_bytes // 16 << 32 | 1 << 46 | swizzle << 61


def sf_offset(row: int) -> int:
    """Byte offset of a row's packed scale factors within its tile, in the order that ``tcgen05.cp`` 32x128b
    wants.

    4 x 32 transposed: rows r, r + 32, r + 64, r + 96 of an atom of 128 are the four words of 16-byte line r.
    """
    atom, r = divmod(row, SF_ATOM_ROWS)
    return atom * SF_ATOM_BYTES + r % 32 * 16 + r // 32 * SF_BYTES


@dataclass(frozen=True)
class Sm100Plan(KernelPlan):
    """A plan of sm100 or sm103. Sizes are per CTA unless they say otherwise."""

    # -- tile and pipeline

    @property
    def ladder(self) -> tuple[int, ...]:
        return LADDER

    @property
    def rated_block_m(self) -> int:
        return LADDER[-1]

    def expert_cost(self, tokens: int) -> float:
        rows = padded_rows_cost(self.contract, tokens, self.block_m) / self.contract.local_experts
        return rows / (self.rated_block_m + TILE_COST_ROWS)

    @property
    def cluster(self) -> int:
        return CLUSTER

    @property
    def load_rows(self) -> int:
        """Token rows of a tile that each CTA of the pair loads, the leader the first half."""
        return self.block_m // CLUSTER

    @property
    def weight_stage_bytes(self) -> int:
        """Weights of a stage in shared memory: a byte per value, 16 values in the first half of 16 bytes."""
        return BLOCK_N * BLOCK_K

    @property
    def weight_transaction_bytes(self) -> int:
        """What the tensor copy of it counts on the mbarrier: the packed bytes, half."""
        return self.weight_stage_bytes // 2

    @property
    def combine_rows(self) -> int:
        """Rows of a unit that an epilogue warp fetches at once, into its part of the weight stages."""
        room = self.stages * BLOCK_N * BLOCK_K // EPILOGUE_WARPS
        return min(self.contract.shape.top_k, room // (2 * self.combine_columns))

    @property
    def token_stage_bytes(self) -> int:
        return self.load_rows * BLOCK_K

    @property
    def weight_sf_bytes(self) -> int:
        """Scale factors of the CTA's weight rows, a stage's and its copy's."""
        return SF_ATOM_BYTES

    @property
    def sf_atoms(self) -> int:
        """Atoms of 128 rows with the scale factors of a tile's tokens; both CTAs need all of them."""
        return ceil_div(self.block_m, SF_ATOM_ROWS)

    @property
    def token_sf_stage_bytes(self) -> int:
        return self.sf_atoms * SF_ATOM_BYTES

    @property
    def token_sf_bytes(self) -> int:
        """What is stored of it and copied: a tile of 16 rows uses only the first half of its atom."""
        return token_sf_bytes(self.block_m)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a pipeline stage, without its barriers."""
        return (
            self.weight_stage_bytes
            + self.token_stage_bytes
            + self.weight_sf_bytes
            + self.token_sf_stage_bytes
        )

    @property
    def stage_transaction_bytes(self) -> int:
        """Bytes that fill a stage of one CTA, as mbarriers count them; a pair's stage takes twice that."""
        return (
            self.weight_transaction_bytes
            + self.token_stage_bytes
            + self.weight_sf_bytes
            + self.token_sf_bytes
        )

    @property
    def instruction(self) -> InstructionDescriptor:
        """A: E2M1 weights, B: E4M3 tokens."""
        return InstructionDescriptor(a_type=5, b_type=0, m=UMMA_M, n=self.block_m)

    @property
    def mmas_per_stage(self) -> int:
        """Instructions per K block; the i-th uses scale factor id i and starts 32 bytes further in K."""
        return BLOCK_K // UMMA_K

    @property
    def operand_descriptor(self) -> int:
        """Matrix descriptor of either operand, without the address: 128B-swizzled rows of 128 bytes."""
        return matrix_descriptor(stride_bytes=8 * BLOCK_K, swizzle=2)

    @property
    def sf_descriptor(self) -> int:
        """Matrix descriptor of an atom of scale factors for ``tcgen05.cp``, without the address."""
        return matrix_descriptor(stride_bytes=8 * 16, swizzle=0)

    # -- epilogue

    @property
    def store_rows(self) -> int:
        """Token columns that an epilogue warpgroup takes from tensor memory and stages at a time."""
        return min(STORE_ROWS, self.block_m // EPILOGUE_WARPGROUPS)

    @property
    def l2_arrivals(self) -> int:
        """Arrivals on a block's L2 counter that complete it: each CTA's 64 columns of every L1 tile."""
        return CLUSTER * self.weight_layout.n_tiles13

    # -- tensor memory

    @property
    def sf_columns(self) -> int:
        """Columns of a stage's scale factors: of weights (the instruction's A), then of tokens (B)."""
        return SF_ATOM_COLUMNS * (1 + self.sf_atoms)

    @property
    def tmem(self) -> tuple[TmemRegion, ...]:
        """Accumulators, then the scale factors of each stage.

        Of each stage, since tcgen05 orders a copy before the MMAs that follow it, but not behind those before
        it: only the stage's `full` barrier says that the MMAs have read what the next copy overwrites.
        """
        accumulators = tuple(
            TmemRegion(f"accumulator_{i}", i * self.block_m, self.block_m) for i in range(ACCUMULATORS)
        )
        sf = ACCUMULATORS * self.block_m
        return (*accumulators, TmemRegion("stage_sf", sf, self.stages * self.sf_columns))

    @property
    def tmem_columns(self) -> int:
        """Columns to allocate: a power of two."""
        used = self.tmem[-1].column + self.tmem[-1].columns
        return max(MIN_TMEM_COLUMNS, 1 << (used - 1).bit_length())

    # -- synchronization

    @property
    def named_barriers(self) -> tuple[NamedBarrier, ...]:
        """Barrier 0 is ``__syncthreads``."""
        sizes = [
            ("counts_known", self.threads),
            ("epilogue", EPILOGUE_WARPS * 32),
            ("roles_done", self.threads),
            *((f"epilogue_warpgroup_{i}", 128) for i in range(EPILOGUE_WARPGROUPS)),
            # 64 lanes hold gate and up of 32 columns, which share a scale factor: two warps exchange amax.
            *((f"amax_pair_{i}", 64) for i in range(EPILOGUE_WARPS // 2)),
        ]
        return tuple(NamedBarrier(name, i, threads) for i, (name, threads) in enumerate(sizes, start=1))

    # -- memory

    @property
    def token_tile_bytes(self) -> int:
        """One K block of a pool block: 128B-swizzled rows, then scale factors in the order of `sf_offset`."""
        return token_tile_bytes(self.block_m)

    @property
    def pool_rows(self) -> int:
        """Rows of the pool that no routing overflows, the same for all plans of a contract."""
        return pool_rows(self.contract)

    @cached_property
    def smem(self) -> Layout:
        return cta_smem(self.contract, self.block_m, self.stages, self.pull_bytes, self.trace)

    @cached_property
    def local(self) -> Layout:
        return local_layout(self.contract, self.block_m, self.l1_ring_blocks)

    @property
    def params(self) -> tuple[Field, ...]:
        return params_fields(self.contract.ranks, self.trace, tensor_maps=True)

    def weight_params(self, addresses: Mapping[str, int]) -> dict[str, int | TensorMap]:
        w13, w2 = self.weight_maps(addresses["w13"], addresses["w2"])
        scales = {name: addresses[name] for name in ("w13_sf", "w2_sf")}
        return {"w13_map": w13, "w2_map": w2, **scales}

    def weight_maps(self, w13: int, w2: int) -> tuple[TensorMap, TensorMap]:
        """Tensor maps of the weights at these addresses; a box is a stage's 128 rows x 128 of K, unpacked."""
        shape, layout = self.contract.shape, self.weight_layout

        def weight_map(address: int, k: int, n_tiles: int) -> TensorMap:
            rows = self.contract.local_experts * n_tiles * layout.block_n
            box = (BLOCK_K, BLOCK_N)
            return TensorMap(
                "u4x16_align16", address, (k, rows), (k // 2,), box, swizzle="128B", l2_promotion="256B"
            )

        return (
            weight_map(w13, shape.hidden, layout.n_tiles13),
            weight_map(w2, shape.intermediate, layout.n_tiles2),
        )

    # -- identity and limits

    def _derived(self) -> dict[str, Any]:
        return {
            **super()._derived(),
            "tensor_memory": [asdict(region) for region in self.tmem],
            "tensor_memory_columns": self.tmem_columns,
            "instruction_descriptor": f"{self.instruction.word():#010x}",
            "named_barriers": [asdict(barrier) for barrier in self.named_barriers],
        }

    def _check_form(self) -> None:
        arch = Arch.get(self.arch)
        if self.arch not in ARCHS or self.contract.format != FORMAT:
            raise PlanError(
                f"arch={self.arch!r}, format={self.contract.format!r}: "
                f"this plan form is {' or '.join(ARCHS)} with {FORMAT}"
            )
        if self.block_m not in LADDER:
            raise PlanError(f"block_m={self.block_m} is none of {LADDER}")
        if self.operand_order != "tokens_on_n":
            raise PlanError(
                f"operand_order={self.operand_order!r}: the MMA's 256-row side are weights: tokens_on_n"
            )
        if self.tmem_columns > arch.tmem_columns:
            raise PlanError(
                f"tensor memory: {self.tmem_columns} columns with block_m={self.block_m} and "
                f"stages={self.stages}, {self.arch} has {arch.tmem_columns}; use fewer stages"
            )
        if len(self.named_barriers) >= arch.named_barriers:
            used = len(self.named_barriers)
            raise PlanError(f"named barriers: {used} and barrier 0, {self.arch} has {arch.named_barriers}")


# Sizes


def token_sf_bytes(block_m: int) -> int:
    """Bytes of the 16-byte lines that the packed scale factors of `block_m` rows occupy."""
    return ceil_div(block_m, SF_ATOM_ROWS) * min(32, block_m) * 16


def token_tile_bytes(block_m: int) -> int:
    return block_m * BLOCK_K + token_sf_bytes(block_m)


def ring_blocks(contract: Contract, block_m: int, sms: int) -> tuple[int, str]:
    """Blocks of pulled rows that a plan has room for, and why."""
    return choose_ring_blocks(contract, block_m, sms, pool_rows(contract) // block_m, block_m - 1)


def pool_rows(contract: Contract) -> int:
    """Every token copy a rank can receive, each expert's rows starting a new block of whatever plan."""
    return align_up(contract.max_received + contract.local_experts * (LADDER[-1] - 1), LADDER_MULTIPLE)


def cta_smem(contract: Contract, block_m: int, stages: int, pull_bytes: int, trace: bool = False) -> Layout:
    """Shared memory of one CTA, pipeline first; both CTAs of a pair have the same map, as tcgen05 needs."""
    experts = contract.local_experts
    store_rows = min(STORE_ROWS, block_m // EPILOGUE_WARPGROUPS)
    # bfloat16 of 128 weight rows per token; routes are counted in it before there are results.
    staging = max(EPILOGUE_WARPGROUPS * STORE_BUFFERS * store_rows * BLOCK_N * 2, contract.shape.experts * 4)
    return smem_layout(
        ("weight_stages", "u8", (stages, BLOCK_N * BLOCK_K), 1024),
        ("token_stages", "u8", (stages, block_m // CLUSTER * BLOCK_K), 1024),
        ("weight_sf_stages", "u8", (stages, SF_ATOM_BYTES), 128),
        ("token_sf_stages", "u8", (stages, ceil_div(block_m, SF_ATOM_ROWS) * SF_ATOM_BYTES), 128),
        ("staging", "u8", (staging,), 128),
        ("pull", "u8", (DISPATCH_WARPS, pull_bytes), 128),
        ("amax", "f32", (STORE_BUFFERS, EPILOGUE_WARPS, store_rows), 16),
        ("expert_count", "u32", (experts,), 16),
        ("expert_block", "u32", (experts,), 16),
        ("sent", "u32", (contract.ranks, experts), 16),
        ("tile_tasks", "u32", (TILE_SLOTS, 4), 16),
        ("order", "u32", (ORDER_SLOTS, 4), 16),
        ("full", "u64", (stages,), 8),
        ("empty", "u64", (stages,), 8),
        ("tmem_full", "u64", (ACCUMULATORS,), 8),
        ("tmem_empty", "u64", (ACCUMULATORS,), 8),
        ("tile_full", "u64", (TILE_SLOTS,), 8),
        ("tile_empty", "u64", (TILE_SLOTS,), 8),
        ("tile_stored", "u64", (TILE_SLOTS,), 8),
        ("order_full", "u64", (ORDER_SLOTS,), 8),
        ("order_empty", "u64", (ORDER_SLOTS,), 8),
        ("pulled", "u64", (DISPATCH_WARPS,), 8),
        ("fetched", "u64", (EPILOGUE_WARPS,), 8),
        ("tmem_base", "u32", (1,), 16),
        # From here on the kernel zeroes everything at its start.
        ("cta_flags", "u32", (8,), 16),
        *((("trace_count", "u32", (16,), 16),) if trace else ()),
    )


def local_layout(contract: Contract, block_m: int, l1_ring_blocks: int) -> Layout:
    """Local workspace of one rank; up to the tiles the same for all plans: counters outlive a launch."""
    shape, rows = contract.shape, pool_rows(contract)
    blocks = rows // LADDER[0]
    return lay_out(
        ("launch", "u32", (32,)),
        ("send_count", "u32", (shape.experts,)),
        ("l1_arrival", "u32", (blocks,)),
        ("l2_arrival", "u32", (blocks,)),
        ("l2_finished", "u32", (blocks,)),
        ("row_source", "u64", (rows,)),
        ("row_weight", "f32", (rows,)),
        ("l1_tiles", "u8", (l1_ring_blocks, shape.hidden // SF_BLOCK, token_tile_bytes(block_m))),
        ("l2_tiles", "u8", (rows // block_m, shape.intermediate // SF_BLOCK, token_tile_bytes(block_m))),
    )


# Rules


def choose_block_m(contract: Contract, tokens: int) -> tuple[int, str]:
    """The smallest tile that holds an expert's rows with two standard deviations to spare, or least waste."""
    likely = likely_rows_per_expert(contract, tokens)
    expected = f"{rows_per_expert(contract, tokens):.1f} rows per expert expected"
    for block_m in LADDER:
        if likely <= block_m:
            return block_m, f"{expected}, {likely:.1f} with two standard deviations: one tile holds them"
    best = min(LADDER, key=lambda block_m: (padded_rows_cost(contract, tokens, block_m), -block_m))
    candidates = ", ".join(map(str, LADDER))
    return best, (
        f"{expected}: of {candidates}, the least padding, if a tile costs as much as {TILE_COST_ROWS} rows "
        "more"
    )


def choose_stages(arch: Arch, contract: Contract, block_m: int, pull_bytes: int) -> tuple[int, str]:
    """As many stages as shared memory holds beside the fixed regions, up to MAX_STAGES."""
    limit = arch.max_shared_bytes_per_block
    for stages in range(MAX_STAGES, MIN_STAGES - 1, -1):
        size = cta_smem(contract, block_m, stages, pull_bytes).size
        if size <= limit:
            more = cta_smem(contract, block_m, stages + 1, pull_bytes).size - size
            return stages, (
                f"{size} of {limit} bytes of shared memory, where E2M1 takes a byte per value; "
                f"{stage_limit(stages, MAX_STAGES, more)}"
            )
    fixed = cta_smem(contract, block_m, 0, pull_bytes).size
    raise PlanError(
        f"shared memory: {fixed} bytes of fixed regions leave no room for {MIN_STAGES} stages in {limit} "
        f"({contract.local_experts} of {contract.shape.experts} experts); spread the experts over more ranks"
    )


def choose_roles(contract: Contract) -> tuple[tuple[Role, ...], str]:
    """Three ``setmaxnreg`` budgets; with many experts per rank, the epilogue gives dispatch as much again."""
    many = contract.local_experts > MANY_EXPERTS
    dispatch, load, epilogue = (96, 40, 184) if many else (48, 40, 208)
    roles = (
        Role("dispatch", 0, DISPATCH_WARPS, dispatch, "waits for all ranks' routes, pulls tokens"),
        Role(
            "load_tokens",
            4,
            1,
            load,
            "fills its CTA's half of the rows and all SFs; leader: waits for the rows first",
        ),
        Role("load_weights", 5, 1, load, "fills its CTA's 128 weight rows and their scale factors"),
        Role(
            "issue_mma",
            6,
            1,
            load,
            "leader: scale factors to tensor memory, MMAs; follower: says what is full",
        ),
        Role("signal", 7, 1, load, "signals stored tiles to token loaders and home ranks"),
        Role(
            "epilogue",
            8,
            EPILOGUE_WARPS,
            epilogue,
            "publishes routes, pulls first rows; SwiGLU or bfloat16 home; combines",
        ),
    )
    granted = sum(role.registers * role.warps * 32 for role in roles)
    sign = ">" if many else "<="
    return roles, (
        f"128 x {dispatch} + 128 x {load} + 256 x {epilogue} = {granted:,} of the 65,536 registers of 512 "
        f"threads; {contract.local_experts} experts per rank {sign} {MANY_EXPERTS}"
    )


def make_sm100_plan(contract: Contract, arch: Arch, tokens: int, sms: int, block_m: int | None) -> Sm100Plan:
    """The plan for `tokens` tokens per rank on `sms` SMs; see `planning.make_plan`."""
    if sms < CLUSTER:
        raise PlanError(
            f"sms={sms}: a tile takes a cluster of {CLUSTER}; give the kernel at least {CLUSTER} SMs"
        )
    if block_m is None:
        block_m, block_reason = choose_block_m(contract, tokens)
    else:
        block_reason = "forced"
    pull_bytes, pull_reason = choose_pull_bytes(contract, MAX_PULL_BYTES)
    stages, stage_reason = choose_stages(arch, contract, block_m, pull_bytes)
    wave, wave_reason = choose_experts_per_wave(contract, sms, block_m, tokens, sms_each=CLUSTER)
    columns, columns_reason = choose_combine_columns(contract, sms * EPILOGUE_WARPS, tokens)
    ring, ring_reason = ring_blocks(contract, block_m, arch.sms)
    roles, role_reason = choose_roles(contract)
    plan = Sm100Plan(
        contract=contract,
        arch=arch.name,
        operand_order="tokens_on_n",
        block_m=block_m,
        stages=stages,
        experts_per_wave=wave,
        pull_bytes=pull_bytes,
        roles=roles,
        expected_tokens=tokens,
        l1_ring_blocks=ring,
        combine_columns=columns,
    )
    plan.validate()
    tmem = " + ".join(str(region.columns) for region in plan.tmem)
    most = f"min({contract.shape.top_k}, {contract.local_experts})"
    rows = (
        f"{contract.ranks} x {contract.max_tokens} tokens x {most} copies at most, and {LADDER[-1] - 1} rows "
        f"of padding per expert, up to a multiple of {LADDER_MULTIPLE}, the LCM of all block_m"
    )
    explained = {
        "block_m": (block_m, block_reason),
        "operand_order": (
            plan.operand_order,
            f"weights on the {UMMA_M}-row side, so {block_m} tokens need no padding",
        ),
        "cluster": (
            CLUSTER,
            "a pair of CTAs shares a tile: each loads its 128 weight rows and half of the tokens",
        ),
        "tmem_columns": (plan.tmem_columns, f"{tmem} (accumulators, scale factors), up to a power of two"),
        "stages": (stages, stage_reason),
        "experts_per_wave": (wave, wave_reason),
        "pull_bytes": (pull_bytes, pull_reason),
        "combine_columns": (columns, columns_reason),
        "l1_ring_blocks": (ring, ring_reason),
        "pool_rows": (plan.pool_rows, rows),
        "roles": (" + ".join(f"{role.warps * 32} x {role.registers}" for role in roles), role_reason),
    }
    return replace(
        plan, choices=tuple(Choice(name, str(value), why) for name, (value, why) in explained.items())
    )
