"""Plans for Hopper (sm90): E4M3 x E4M3 with float32 block scales, WGMMA by two warpgroups of one CTA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megagen.arch import Arch
from megagen.contract import SF_BLOCK, Contract, Layout, align_up, lay_out
from megagen.errors import PlanError
from megagen.planning.plan import (
    BLOCK_K,
    ORDER_SLOTS,
    TILE_SLOTS,
    Choice,
    KernelPlan,
    OperandOrder,
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
from megagen.planning.workload import likely_rows_per_expert, row_distribution, rows_per_expert

WGMMA_M = 64
BLOCK_N = 256  # weight rows of a tile: one SF group of 128 intermediate columns, gate and up
SURPLUS_MARGIN = 1.02  # the kernel with surplus rows is up to 1 % slower where there are none
PULL_BUFFERS = 2  # token rows that a dispatch warp has in flight
MATH_WARPS = 8
WARP_STAGING_BYTES = 16 * 128  # 16 rows of 128 bytes
FULL_BLOCK_M = 2 * WGMMA_M  # WGMMA's M for each math warpgroup
SURPLUS_ROWS = 16  # that a tile may have beyond: for them registers and shared memory are left
LADDER = (16, 32, WGMMA_M, FULL_BLOCK_M, FULL_BLOCK_M + SURPLUS_ROWS)  # BLOCK_M values of sm90
LARGEST_BLOCK_M = LADDER[-1]
SMALLEST_BLOCK_M = LADDER[0]
MAX_STAGES = 4  # 128 KiB of weights on their way to each SM: more would only wait in the queues of HBM
MAX_PULL_BYTES = 7168  # two row buffers of this size leave room for the stages
MAX_PULL_BYTES_WITH_SURPLUS = 1792  # likewise, beside the largest tiles
KEPT_IN_L2 = 40 << 20  # bytes of activations that stay in L2 (50 MiB) beside a stream of weights


@dataclass(frozen=True)
class Sm90Plan(KernelPlan):
    """A plan of sm90.

    `evicts_lone_weights`: weights that only one row block reads are the first to leave L2.
    """

    evicts_lone_weights: bool = False

    @property
    def ladder(self) -> tuple[int, ...]:
        """The values of `block_m` that this architecture's kernels exist for."""
        return LADDER

    @property
    def rated_block_m(self) -> int:
        return FULL_BLOCK_M

    def expert_cost(self, tokens: int) -> float:
        return tiles_cost(self.contract, tokens, self.block_m)

    @property
    def weight_stage_bytes(self) -> int:
        return BLOCK_N * BLOCK_K

    @property
    def token_tile_bytes(self) -> int:
        return token_tile_bytes(self.block_m)

    @property
    def surplus_rows(self) -> int:
        """Rows of a tile that no math warpgroup has on M: both compute them with tokens on N."""
        return surplus_rows(self.block_m)

    @property
    def splits_columns(self) -> bool:
        """Whether both math warpgroups take all rows of every tile: they fit WGMMA's M."""
        return self.operand_order == "tokens_on_m" and self.block_m <= WGMMA_M

    @property
    def pool_rows(self) -> int:
        """Rows of the pool that no routing overflows, in whole blocks."""
        return pool_rows(self.contract, self.block_m)

    @cached_property
    def smem(self) -> Layout:
        """Shared-memory map of the CTA, bytes from the start of dynamic shared memory."""
        return cta_smem(
            self.contract, self.operand_order, self.block_m, self.stages, self.pull_bytes, self.trace
        )

    @cached_property
    def local(self) -> Layout:
        """Local workspace: plain device memory of this rank, zeroed once before the first launch."""
        return local_layout(self.contract, self.block_m, self.l1_ring_blocks)

    def _check_form(self) -> None:
        if self.arch != "sm90" or self.contract.format != "fp8_block":
            raise PlanError(
                f"arch={self.arch!r}, format={self.contract.format!r}: this plan form is sm90 with fp8_block"
            )
        if self.block_m not in LADDER:
            raise PlanError(f"block_m={self.block_m} is none of {LADDER}")
        if not isinstance(self.evicts_lone_weights, bool):
            raise PlanError(f"evicts_lone_weights={self.evicts_lone_weights!r} is neither True nor False")
        if (self.operand_order == "tokens_on_m") != (self.block_m >= WGMMA_M):
            raise PlanError(
                f"operand_order={self.operand_order!r} with block_m={self.block_m}: tokens_on_m tiles "
                "have 64, 128 (64 per math warpgroup) or 144 rows, tokens_on_n tiles 16 or 32"
            )


# Sizes


def surplus_rows(block_m: int) -> int:
    """Rows of a tile beyond those that the two math warpgroups have on M."""
    return max(0, block_m - FULL_BLOCK_M)


def activation_bytes(contract: Contract, tokens: int) -> int:
    """What a launch writes for its rows at even routing: pulled tokens, intermediate, expert outputs."""
    shape = contract.shape
    return tokens * shape.top_k * (shape.hidden + shape.intermediate + 2 * shape.hidden)


def token_tile_bytes(block_m: int) -> int:
    """One K block of a pool block: the rows' 128 bytes each, then a float32 scale factor each."""
    return block_m * (BLOCK_K + 4)


def pool_rows(contract: Contract, block_m: int) -> int:
    """Rows for every token copy a rank can receive, each expert's starting a new block of `block_m`."""
    worst = contract.max_received + contract.local_experts * (block_m - 1)
    return align_up(worst, block_m)


def ring_blocks(contract: Contract, block_m: int, sms: int) -> tuple[int, str]:
    """Blocks of pulled rows that a plan has room for, and why: surplus rows get no more of it."""
    padding = block_m - surplus_rows(block_m) - 1
    return choose_ring_blocks(contract, block_m, sms, pool_rows(contract, block_m) // block_m, padding)


def cta_smem(
    contract: Contract,
    operand_order: OperandOrder,
    block_m: int,
    stages: int,
    pull_bytes: int,
    trace: bool = False,
) -> Layout:
    """Shared memory of one CTA; see the region names in the generated source."""
    experts = contract.local_experts
    on_m = operand_order == "tokens_on_m"
    # Output staging: 16 rows per math warp, or 128 bytes per token and warpgroup. Routes are counted in it
    # before.
    staging = max(MATH_WARPS * WARP_STAGING_BYTES if on_m else 2 * block_m * 128, contract.shape.experts * 4)
    rows_on_n = surplus_rows(block_m) if on_m else block_m
    pair_amax = (("pair_amax", "f32", (MATH_WARPS, 8), 16),) if on_m else ()
    on_n = (("amax", "f32", (MATH_WARPS, rows_on_n), 16), ("inverse_sf", "f32", (rows_on_n,), 16))
    return smem_layout(
        ("weight_stages", "u8", (stages, BLOCK_N * BLOCK_K), 1024),
        ("token_stages", "u8", (stages, block_m * BLOCK_K), 1024),
        ("token_sf", "f32", (stages, block_m), 16),
        ("staging", "u8", (staging,), 128),
        ("pull", "u8", (PULL_BUFFERS, pull_bytes), 128),
        *pair_amax,
        *(on_n if rows_on_n else ()),
        ("expert_count", "u32", (experts,), 16),
        ("expert_block", "u32", (experts,), 16),
        ("sent", "u32", (contract.ranks, experts), 16),
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
        ("cta_flags", "u32", (8,), 16),
        *((("trace_count", "u32", (12,), 16),) if trace else ()),
    )


def local_layout(contract: Contract, block_m: int, l1_ring_blocks: int) -> Layout:
    """Local workspace of one rank for tiles of `block_m` rows.

    Everything up to the tiles is sized for any tile, so that all plans of a contract agree on where the
    counters lie, which stay zero between launches; the tiles hold nothing between launches. ``l1_tiles``,
    ``l2_tiles``: per pool block and K block, the token rows (128 bytes each) as they lie in shared memory,
    128B-swizzled, then their scale factors: one bulk copy fills a pipeline stage.
    """
    shape = contract.shape
    blocks = pool_rows(contract, SMALLEST_BLOCK_M) // SMALLEST_BLOCK_M
    rows = max(pool_rows(contract, size) for size in LADDER)
    own_blocks = pool_rows(contract, block_m) // block_m
    return lay_out(
        ("launch", "u32", (32,)),
        ("send_count", "u32", (shape.experts,)),
        ("l1_arrival", "u32", (blocks,)),
        ("l2_arrival", "u32", (blocks,)),
        ("l2_finished", "u32", (blocks,)),
        ("row_source", "u64", (rows,)),
        ("row_weight", "f32", (rows,)),
        ("l1_tiles", "u8", (l1_ring_blocks, shape.hidden // SF_BLOCK, token_tile_bytes(block_m))),
        ("l2_tiles", "u8", (own_blocks, shape.intermediate // SF_BLOCK, token_tile_bytes(block_m))),
    )


# Rules


def choose_block_m(contract: Contract, tokens: int) -> tuple[int, str]:
    """The smallest tile that holds an expert's rows with two standard deviations to spare.

    If none of up to 64 rows does, one of 128; with surplus rows, if they save enough second tiles.
    """
    likely = likely_rows_per_expert(contract, tokens)
    expected = f"{rows_per_expert(contract, tokens):.1f} rows per expert expected"
    for block_m in LADDER:
        if likely <= block_m <= WGMMA_M:
            return block_m, f"{expected}, {likely:.1f} with two standard deviations: one tile holds them"
    plain, surplus = (tiles_cost(contract, tokens, block_m) for block_m in LADDER[-2:])
    if surplus * SURPLUS_MARGIN < plain:
        return LARGEST_BLOCK_M, f"{expected}: {surplus:.2f} tiles' time each instead of {plain:.2f}"
    return FULL_BLOCK_M, f"{expected}: a large tile reuses weights most"


def tiles_cost(contract: Contract, tokens: int, block_m: int) -> float:
    """Expected time of an expert's tiles, in tiles of 65 to 128 rows."""

    def cost(rows: int) -> float:
        tiles, rest = divmod(rows, block_m)
        return tiles * tile_cost(block_m, block_m) + tile_cost(rest, block_m)

    return sum(share * cost(rows) for rows, share in row_distribution(contract, tokens))


TILE_COSTS = {16: 0.42, 32: 0.49, WGMMA_M: 0.63, FULL_BLOCK_M: 1.0, LARGEST_BLOCK_M: 1.38}
"""Time of a tile of up to so many rows. Measured on an H200 in L1 of `pro8`: 34.1 and 54.4 us with 64 and 128
in one run, 50.5 and 70 with 128 and 144 in another; 16 and 32 from layers of `flash8` with 8,192 tokens."""


def tile_cost(rows: int, block_m: int) -> float:
    """Time of a tile that holds so many rows, in tiles of 65 to 128 rows; 0 for none."""
    least = min(block_m, WGMMA_M)  # the kernel tells no fewer rows apart
    return min(cost for size, cost in TILE_COSTS.items() if max(rows, least) <= size) if rows else 0.0


def choose_operand_order(block_m: int) -> tuple[OperandOrder, str]:
    """Tokens on N below 64 rows, which is WGMMA's M.

    Not above: narrow WGMMAs and the scales of many tokens would take more than shared memory delivers.
    """
    if block_m < WGMMA_M:
        return "tokens_on_n", f"WGMMA's N goes in steps of 8, so {block_m} token rows need no padding to 64"
    return "tokens_on_m", "a thread scales 2 token rows instead of many; an SF group lies in one or two warps"


def choose_stages(
    arch: Arch, contract: Contract, order: OperandOrder, block_m: int, pull_bytes: int
) -> tuple[int, str]:
    """As many stages as shared memory holds beside the fixed regions, up to MAX_STAGES."""
    limit = arch.max_shared_bytes_per_block
    for stages in range(MAX_STAGES, 1, -1):
        size = cta_smem(contract, order, block_m, stages, pull_bytes).size
        if size <= limit:
            more = cta_smem(contract, order, block_m, stages + 1, pull_bytes).size - size
            return (
                stages,
                f"{size} of {limit} bytes of shared memory; {stage_limit(stages, MAX_STAGES, more)}",
            )
    fixed = cta_smem(contract, order, block_m, 0, pull_bytes).size
    raise PlanError(
        f"shared memory: {fixed} bytes of fixed regions leave no room for two stages in {limit} "
        f"({contract.local_experts} of {contract.shape.experts} experts); spread the experts over more ranks"
    )


def choose_prefetched_blocks(contract: Contract, block_m: int) -> tuple[int, str]:
    """About what HBM delivers to an SM until the routes of all ranks are known."""
    if block_m > 32:
        return 0, "with this many rows other things than the first weights take the time"
    blocks = min(5, contract.shape.hidden // BLOCK_K)
    return blocks, "come to the L2 cache until the routes of all ranks are known"


def choose_eviction(contract: Contract, block_m: int, tokens: int) -> tuple[bool, str]:
    """Whether weights that only one row block reads are the first to leave L2."""
    if block_m >= FULL_BLOCK_M:
        return True, "what stays are weights that several row blocks read"
    if activation_bytes(contract, tokens) <= KEPT_IN_L2:
        return True, "what stays are the activations, which are few enough"
    return False, "so many activations would be written back bit by bit between reads of weights"


def roles_sm90() -> tuple[tuple[Role, ...], str]:
    """One warpgroup loads, dispatches and signals, two compute."""
    roles = (
        Role(
            "load_tokens", 0, 1, 56, "walks the schedule, waits for rows, fills the token side of the stages"
        ),
        Role("load_weights", 1, 1, 56, "fills the weight side of the stages"),
        Role("dispatch", 2, 1, 56, "waits for all ranks' routes, pulls tokens"),
        Role("signal", 3, 1, 56, "signals stored tiles to token loaders and home ranks"),
        Role("math", 4, MATH_WARPS, 224, "publishes routes, pulls first rows; WGMMA and epilogues; combines"),
    )
    return (
        roles,
        "setmaxnreg: 128 x 56 + 256 x 224 = 64,512 registers of a 384-thread launch; SwiGLU spills below 216",
    )


def make_sm90_plan(contract: Contract, arch: Arch, tokens: int, sms: int, block_m: int | None) -> Sm90Plan:
    """The plan for `tokens` tokens per rank on `sms` SMs; see `planning.make_plan`."""
    if block_m is None:
        block_m, block_reason = choose_block_m(contract, tokens)
    else:
        block_reason = "forced"
    order, order_reason = choose_operand_order(block_m)
    pull_bytes, pull_reason = choose_pull_bytes(
        contract, MAX_PULL_BYTES_WITH_SURPLUS if surplus_rows(block_m) else MAX_PULL_BYTES
    )
    stages, stage_reason = choose_stages(arch, contract, order, block_m, pull_bytes)
    columns, columns_reason = choose_combine_columns(contract, sms * MATH_WARPS, tokens)
    wave, wave_reason = choose_experts_per_wave(contract, sms, block_m, tokens)
    roles, role_reason = roles_sm90()
    prefetched, prefetch_reason = choose_prefetched_blocks(contract, block_m)
    evicts, evict_reason = choose_eviction(contract, block_m, tokens)
    ring, ring_reason = ring_blocks(contract, block_m, arch.sms)
    plan = Sm90Plan(
        contract=contract,
        arch=arch.name,
        operand_order=order,
        block_m=block_m,
        stages=stages,
        experts_per_wave=wave,
        pull_bytes=pull_bytes,
        roles=roles,
        expected_tokens=tokens,
        l1_ring_blocks=ring,
        combine_columns=columns,
        prefetched_blocks=prefetched,
        evicts_lone_weights=evicts,
        choices=(
            Choice("block_m", str(block_m), block_reason),
            Choice("operand_order", order, order_reason),
            Choice("stages", str(stages), stage_reason),
            Choice("combine_columns", str(columns), columns_reason),
            Choice("experts_per_wave", str(wave), wave_reason),
            Choice("prefetched_blocks", str(prefetched), prefetch_reason),
            Choice("evicts_lone_weights", str(evicts), evict_reason),
            Choice("pull_bytes", str(pull_bytes), pull_reason),
            Choice("l1_ring_blocks", str(ring), ring_reason),
            Choice("roles", " + ".join(f"{r.warps * 32} x {r.registers}" for r in roles), role_reason),
        ),
    )
    plan.validate()
    return plan
