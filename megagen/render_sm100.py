"""What the templates take of a Blackwell plan: its constants, and what the common templates call things."""

from __future__ import annotations

from typing import Any

from megagen.constants import Constant
from megagen.planning.plan import BLOCK_K, ORDER_SLOTS, TILE_SLOTS
from megagen.planning.rules import PANEL_BLOCKS
from megagen.planning.sm100 import (
    ACCUMULATORS,
    BLOCK_N,
    CLUSTER,
    DISPATCH_WARPS,
    EPILOGUE_WARPGROUPS,
    EPILOGUE_WARPS,
    STORE_BUFFERS,
    UMMA_K,
    UMMA_M,
    InstructionDescriptor,
    Sm100Plan,
)


def sm100_parts(plan: Sm100Plan, common: tuple[str, ...]) -> tuple[str, ...]:
    """The templates of a kernel, in order."""
    return (
        "primitives/mbarrier.cuh.j2",
        "primitives/cluster.cuh.j2",
        "primitives/bulk_copy.cuh.j2",
        "primitives/tensor_copy.cuh.j2",
        "primitives/memory_order.cuh.j2",
        "primitives/data.cuh.j2",
        "primitives/tcgen05.cuh.j2",
        *(("common/trace_record.cuh.j2",) if plan.trace else ()),
        "sm100/scale_factors.cuh.j2",
        *common,
        "sm100/pair.cuh.j2",
        "sm100/load.cuh.j2",
        "common/combine.cuh.j2",
        "common/signal.cuh.j2",
        "sm100/issue_mma.cuh.j2",
        "common/epilogue.cuh.j2",
        "sm100/epilogue.cuh.j2",
        "common/finish.cuh.j2",
        "sm100/kernel.cuh.j2",
    )


def sm100_context(plan: Sm100Plan) -> dict[str, Any]:
    return {
        "load_columns": plan.store_rows,
        "worker": "epilogue",
        "tile_type": "Tile",
        "workers": "EPILOGUE",
        "worker_warps": EPILOGUE_WARPS,
        "worker_threads": EPILOGUE_WARPS * 32,
        "stage_consumer": "issue_mma",
        "dispatch_warps": DISPATCH_WARPS,
        "row_by_row": True,
        "warp_parameter": "u32 warp, ",
        "warp_argument": "warp, ",
        "sf_type": "u32",
        "sf_zero": "0",
        "sf_place": "sf_offset(pool_row % BLOCK_M)",
        "row_image": "ROW_IMAGE_BYTES",
        "wait_scope": ".acquire.cluster",
        "l1_stores_of_block": "L1_STORES",
        "l2_stores_of_block": "L2_STORES",
        "arrive_tile_empty": "arrive_at_leader",
    }


def sm100_tiles(plan: Sm100Plan) -> tuple[Constant, ...]:
    """Tiles, load pipeline and tensor memory."""
    tmem = {region.name: region for region in plan.tmem}
    return (
        Constant("CLUSTER", CLUSTER, "CTAs of a pair"),
        Constant("LEADER", 0, "rank in the pair of the CTA that takes tiles and issues MMAs"),
        Constant("FOLLOWER", 1, "rank of the other"),
        Constant("BLOCK_M", plan.block_m, "token rows of a tile"),
        Constant("LOAD_ROWS", plan.load_rows, "token rows that each CTA of a pair loads"),
        Constant("BLOCK_N", BLOCK_N, "weight rows of a tile per CTA"),
        Constant("UMMA_M", UMMA_M, "weight rows of a tile"),
        Constant("BLOCK_K", BLOCK_K, "K of a stage; bytes of a row in shared memory, one per value"),
        Constant("UMMA_K", UMMA_K, "K of one MMA, and of one scale factor"),
        Constant("STAGES", plan.stages, "stages of the load pipeline"),
        Constant("COMBINE_ROWS", plan.combine_rows, "rows of a unit that a warp fetches at once"),
        Constant("WEIGHT_STAGE_BYTES", plan.weight_stage_bytes, "a byte per E2M1 value"),
        Constant("WEIGHT_TRANSACTION_BYTES", plan.weight_transaction_bytes, "what their copy counts: packed"),
        Constant("WEIGHT_SF_BYTES", plan.weight_sf_bytes, "SFs of a CTA's weight rows for 128 of K"),
        Constant("TOKEN_STAGE_BYTES", plan.token_stage_bytes, "a CTA's half of the rows"),
        Constant(
            "TOKEN_SF_STAGE_BYTES", plan.token_sf_stage_bytes, "room for the SFs of all rows, in whole atoms"
        ),
        Constant(
            "TOKEN_SF_BYTES",
            plan.token_sf_bytes,
            "copied of it: BLOCK_M = 16 needs half of an atom",
        ),
        Constant("TOKEN_TILE_BYTES", plan.token_tile_bytes, "a K block of BLOCK_M rows, then their SFs"),
        Constant("ROW_IMAGE_BYTES", plan.block_m * BLOCK_K, "the rows of a token tile, without their SFs"),
        Constant("SF_ATOMS", plan.sf_atoms, "groups of SF_ATOM_ROWS token rows"),
        Constant("SF_ATOM_ROWS", 128, "rows whose SFs one copy brings to tensor memory"),
        Constant("SF_ATOM_BYTES", 512, "their SFs, four of UE8M0 each"),
        Constant("SF_ATOM_COLUMNS", 4, "columns of tensor memory for them"),
        Constant("TMEM_COLUMNS", plan.tmem_columns, "columns of tensor memory that are allocated"),
        Constant("TMEM_SF", tmem["stage_sf"].column, "first column of the SFs of stage 0"),
        Constant("TMEM_SF_COLUMNS", plan.sf_columns, "columns of a stage's SFs: weights, then tokens"),
        Constant("ACCUMULATORS", ACCUMULATORS, "tiles in tensor memory"),
        Constant(
            "OPERAND_DESCRIPTOR", f"{plan.operand_descriptor:#018x}ull", "128B-swizzled rows of 128 B", "u64"
        ),
        Constant("SF_DESCRIPTOR", f"{plan.sf_descriptor:#018x}ull", "16-byte lines", "u64"),
        Constant(
            "INSTRUCTION", f"{plan.instruction.word():#010x}", "E2M1 x E4M3, UE8M0, M = 256, N = BLOCK_M"
        ),
        Constant(
            "INSTRUCTION_SF_STEP", f"{_sf_step():#010x}", "next SF of the packed four, of both operands"
        ),
        Constant(
            "DESCRIPTOR_K_STEP", UMMA_K // 16, "16-byte units of a descriptor: UMMA_K bytes further in K"
        ),
        Constant("TILE_SLOTS", TILE_SLOTS, "tile tasks between the token loader and the other roles"),
        Constant("ORDER_SLOTS", ORDER_SLOTS, "tile tasks between the weight loader and the token loader"),
        Constant("L1_N_TILES", plan.weight_layout.n_tiles13, "tiles of UMMA_M weight rows per expert"),
        Constant("L2_N_TILES", plan.weight_layout.n_tiles2, "tiles of UMMA_M weight rows per expert"),
        Constant(
            "L1_STORES",
            plan.l2_arrivals,
            "arrivals that complete a block's rows for L2: L1_N_TILES from each CTA",
        ),
        Constant(
            "L2_STORES",
            CLUSTER * plan.weight_layout.n_tiles2,
            "arrivals that complete a block's outputs: L2_N_TILES from each CTA",
        ),
        Constant("EXPERTS_PER_WAVE", plan.experts_per_wave),
        Constant("PANEL_BLOCKS", PANEL_BLOCKS, "row blocks of an expert that are worked on together"),
        Constant("L1_RING_BLOCKS", plan.l1_ring_blocks, "blocks of pulled rows that there is room for"),
        Constant("STORE_ROWS", plan.store_rows, "tokens that an epilogue warpgroup stages at a time"),
        Constant("TOKEN_GROUPS", plan.store_rows // 8, "groups of 8 tokens among them"),
        Constant("STORE_BUFFERS", STORE_BUFFERS, "staging buffers per epilogue warpgroup"),
        Constant("STORE_BUFFER_BYTES", plan.store_rows * BLOCK_N * 2, "bfloat16 of BLOCK_N weight rows"),
    )


def _sf_step() -> int:
    """What leads from the descriptor of one SF id to that of the next."""
    return 1 << InstructionDescriptor.A_SF_ID_SHIFT | 1 << InstructionDescriptor.B_SF_ID_SHIFT


def sm100_threads(plan: Sm100Plan) -> tuple[Constant, ...]:
    """Warps, registers and named barriers."""
    roles = {role.name: role for role in plan.roles}
    first = {f"{role.name.upper()}_WARP": role.first_warp for role in plan.roles if role.warps == 1}
    notes = {
        "counts_known": "all threads: the schedule can start",
        "epilogue": "epilogue role",
        "roles_done": "all threads: every role of this SM has left",
        "epilogue_warpgroup_0": "and the next, one per epilogue warpgroup",
        "amax_pair_0": "and the next, one per pair of epilogue warps",
    }
    barriers = {barrier.name: barrier.id for barrier in plan.named_barriers}
    return (
        Constant("THREADS", plan.threads),
        Constant("FULL_WARP", "~0u"),
        Constant("DISPATCH_WARPS", DISPATCH_WARPS, "the first warps"),
        *(Constant(name, warp) for name, warp in first.items()),
        Constant("FIRST_EPILOGUE_WARP", roles["epilogue"].first_warp),
        Constant("EPILOGUE_WARPS", EPILOGUE_WARPS),
        Constant("EPILOGUE_THREADS", 32 * EPILOGUE_WARPS),
        Constant("EPILOGUE_WARPGROUPS", EPILOGUE_WARPGROUPS),
        Constant("DISPATCH_REGISTERS", roles["dispatch"].registers, "per thread", "int"),
        Constant("LOAD_REGISTERS", roles["load_tokens"].registers, "per thread", "int"),
        Constant("EPILOGUE_REGISTERS", roles["epilogue"].registers, "per thread", "int"),
        *(
            Constant(f"BARRIER_{name.removesuffix('_0').upper()}", barriers[name], note)
            for name, note in notes.items()
        ),
        Constant("ZEROED_BYTES", plan.smem.size - plan.smem["cta_flags"].offset, "from SMEM_CTA_FLAGS on"),
    )
