"""Plan -> CUDA source. Everything was decided before: this file names the plan's numbers, and the templates loop and substitute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from megagen import __version__, companion
from megagen.contract import SF_BLOCK, Contract
from megagen.errors import PlanError
from megagen.planning.plan import (
    BLOCK_K,
    BLOCK_N,
    EARLY_UNITS,
    MATH_WARPS,
    ORDER_SLOTS,
    PULL_BUFFERS,
    TILE_SLOTS,
    WARP_STAGING_BYTES,
    KernelPlan,
)
from megagen.protocol import STATUS_FIELDS, TRACE_CAPACITY, Awaited, RoleId, TraceState, params_fields

ENTRY = "megamoe"
QUANTIZE_ENTRY = "quantize_inputs"
LONE_PUBLISHER_ROUTES = 1024  # four per thread of one SM: quicker than a count over all SMs
POLL_NS = 200
DRAIN_NS = 50_000  # far above the time that an issued bulk copy takes to land


@dataclass(frozen=True)
class Constant:
    """One named number of the source; `comment` gives its unit or meaning."""

    name: str
    value: str
    comment: str = ""
    ctype: str = "u32"


@dataclass(frozen=True)
class ConstantGroup:
    title: str
    constants: tuple[Constant, ...]


def templates_dir() -> Path:
    """The templates: inside the package when installed, beside it in a source tree."""
    installed = Path(__file__).parent / "templates"
    return installed if installed.is_dir() else Path(__file__).parent.parent / "templates"


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
    )


def render(plan: KernelPlan) -> str:
    """The CUDA source of the plan's kernel; self-contained, entry point `ENTRY`.

    Raises PlanError for an architecture whose kernels can be planned only.
    """
    if plan.arch != "sm90":
        raise PlanError(f"arch={plan.arch!r}: there are templates for sm90 only, so this plan can't be rendered")
    contract = plan.contract
    return _finish(
        _environment()
        .get_template("kernel.cu.j2")
        .render(
            plan=plan,
            version=__version__,
            entry=ENTRY,
            shape=contract.shape,
            ranks=contract.ranks,
            local_experts=contract.local_experts,
            max_tokens=contract.max_tokens,
            format=contract.format,
            sf_group=contract.sf_group,
            activation=contract.activation,
            clamp=contract.clamp,
            operand_order=plan.operand_order,
            block_m=plan.block_m,
            hidden=contract.shape.hidden,
            top_k=contract.shape.top_k,
            wgmma_n=128 if plan.operand_order == "tokens_on_m" else plan.block_m,
            pull_pieces=contract.shape.hidden // plan.pull_bytes,
            combine_columns=plan.combine_columns,
            math_warps=MATH_WARPS,
            math_threads=MATH_WARPS * 32,
            constants=constants(plan),
            params=params_fields(contract.ranks, plan.trace),
            tracing=plan.trace,
            status=STATUS_FIELDS,
        )
    )


def render_quantize(contract: Contract) -> str:
    """The CUDA source of the companion kernel (`companion`); self-contained, entry point `QUANTIZE_ENTRY`."""
    shape = contract.shape
    regions = tuple(contract.symm[name] for name in ("x", "x_sf", "topk_ids", "topk_weights"))
    problem = (
        Constant("HIDDEN", str(shape.hidden), "columns of a token", "u64"),
        Constant("HIDDEN_BLOCKS", str(shape.hidden // SF_BLOCK), "scale factors of a token"),
        Constant("SF_BLOCK", str(SF_BLOCK), "columns that share one"),
        Constant("TOP_K", str(shape.top_k), "experts per token"),
        Constant("INVALID_ID", str(companion.INVALID_ID), "what an id that does not fit 32 bits becomes", "i32"),
        Constant("THREADS", str(companion.THREADS)),
        Constant("LANES_PER_GROUP", str(companion.LANES_PER_GROUP), "lanes of one SF group"),
        Constant("COLUMNS_PER_LANE", str(SF_BLOCK // companion.LANES_PER_GROUP)),
    )
    return _finish(
        _environment()
        .get_template("quantize.cu.j2")
        .render(
            name=companion.quantize_name(contract),
            version=__version__,
            entry=QUANTIZE_ENTRY,
            lanes_per_group=companion.LANES_PER_GROUP,
            constants=(
                ConstantGroup("problem", problem),
                ConstantGroup(
                    "symmetric buffer, bytes",
                    tuple(_offsets("SYMM", regions, f"{contract.symm.size} in all", "u64")),
                ),
            ),
            params=companion.QUANTIZE_FIELDS,
        )
    )


def _finish(text: str) -> str:
    lines = [line.rstrip() for line in text.splitlines()]
    return "\n".join(line for i, line in enumerate(lines) if line or (i and lines[i - 1])) + "\n"


def constants(plan: KernelPlan) -> tuple[ConstantGroup, ...]:
    """The numbers of a plan as named constants, in the order in which a reader wants them."""
    contract, shape = plan.contract, plan.contract.shape
    weights = plan.weight_layout
    roles = {role.name: role for role in plan.roles}
    columns = plan.combine_columns
    on_m = plan.operand_order == "tokens_on_m"
    half_rows = 128 if on_m else 64  # weight rows of half a warpgroup's part of the tile
    groups = [
        ConstantGroup(
            "problem",
            (
                Constant("HIDDEN", str(shape.hidden), "columns of a token"),
                Constant("INTERMEDIATE", str(shape.intermediate), "columns between the two GEMMs"),
                Constant("EXPERTS", str(shape.experts), "of all ranks together"),
                Constant("TOP_K", str(shape.top_k), "experts per token"),
                Constant("RANKS", str(contract.ranks)),
                Constant("LOCAL_EXPERTS", str(contract.local_experts), "experts of this rank"),
                Constant("MAX_TOKENS", str(contract.max_tokens), "capacity per rank"),
                Constant("HIDDEN_BLOCKS", str(shape.hidden // SF_BLOCK), "K blocks of L1"),
                Constant("INTERMEDIATE_BLOCKS", str(shape.intermediate // SF_BLOCK), "K blocks of L2"),
                Constant("NO_EXPERT", "~0u"),
                *(
                    (Constant("SWIGLU_LIMIT", f"{contract.clamp!r}f", "clamp of gate and up", "float"),)
                    if contract.clamp is not None
                    else ()
                ),
            ),
        ),
        ConstantGroup(
            "tiles and pipeline",
            (
                Constant("BLOCK_M", str(plan.block_m), "token rows of a tile"),
                Constant("BLOCK_N", str(BLOCK_N), "weight rows of a tile"),
                Constant("BLOCK_K", str(BLOCK_K), "bytes of K per stage"),
                Constant("WGMMA_K", "32", "K of one E4M3 WGMMA"),
                Constant("DESCRIPTOR_K_STEP", "2", "32 bytes further in K, in 16-byte units of a descriptor"),
                Constant("DESCRIPTOR_HALF", str(half_rows * BLOCK_K // 16), f"the second half, {half_rows} rows further"),
                Constant("STAGES", str(plan.stages)),
                Constant("WEIGHT_STAGE_BYTES", str(plan.weight_stage_bytes)),
                Constant("TOKEN_TILE_BYTES", str(plan.token_tile_bytes), "token rows of a K block and their scale factors"),
                Constant("TOKEN_STAGE_BYTES", str(plan.smem["token_stages"].shape[1]), "the same, aligned for the 128B swizzle"),
                Constant("ROW_IMAGE_BYTES", str(plan.block_m * BLOCK_K), "the token rows alone"),
                *((Constant("WARP_STAGING_BYTES", str(WARP_STAGING_BYTES), "16 rows of 128 bytes"),) if on_m else ()),
                Constant("TILE_SLOTS", str(TILE_SLOTS), "tile tasks between token loader and math"),
                Constant("L1_N_TILES", str(weights.n_tiles13)),
                Constant("L2_N_TILES", str(weights.n_tiles2)),
                Constant("EXPERTS_PER_WAVE", str(plan.experts_per_wave)),
                Constant("PULL_BYTES", str(plan.pull_bytes), "piece of a token row pulled at a time"),
                *(
                    (Constant("PULL_PIECES", str(shape.hidden // plan.pull_bytes)),)
                    if shape.hidden != plan.pull_bytes
                    else ()
                ),
                Constant("PULL_BUFFERS", str(PULL_BUFFERS), "token rows in flight per SM"),
                Constant("ORDER_SLOTS", str(ORDER_SLOTS), "tile numbers between weight loader and token loader"),
                Constant("SF_PER_LANE", str(-(-shape.hidden // SF_BLOCK // 32)), "scale factors of a token row per lane"),
                Constant("LONE_PUBLISHER_ROUTES", str(LONE_PUBLISHER_ROUTES), "up to so many, one SM publishes all"),
                Constant("RANKS_PER_LANE", str(-(-contract.ranks // 32)), "source ranks that a lane looks after"),
                Constant("COMBINE_COLUMNS", str(columns), "columns of one token per warp"),
                Constant("COMBINE_STEPS", str(max(1, columns // 256)), "steps of 256 columns"),
                Constant("UNITS_PER_TOKEN", str(shape.hidden // columns)),
                Constant("EARLY_UNITS", str(EARLY_UNITS), "units of an SM that may be combined while tiles are computed"),
                Constant("EARLY_LOADS", str(min(shape.top_k, 4)), "rows in flight per warp then"),
                Constant("LATE_LOADS", str(min(shape.top_k, 24 // max(1, columns // 256))), "and at the end, per step"),
                Constant("STEP_BYTES", "512", "256 columns of bfloat16"),
                Constant("LOOKS_PER_SCAN", "4", "looks for finished tiles per look for finished tokens"),
                Constant("POLL_NS", str(POLL_NS), "ns between looks for work of the combine role"),
                Constant("DRAIN_NS", str(DRAIN_NS), "ns, after a stop"),
            ),
        ),
        ConstantGroup(
            "threads and barriers",
            (
                Constant("THREADS", str(plan.threads)),
                Constant("FULL_WARP", "~0u"),
                Constant("LOAD_TOKENS_WARP", str(roles["load_tokens"].first_warp)),
                Constant("DISPATCH_WARP", str(roles["dispatch"].first_warp)),
                Constant("COMBINE_WARP", str(roles["combine"].first_warp)),
                Constant("FIRST_MATH_WARP", str(roles["math"].first_warp)),
                Constant("MATH_WARPS", str(roles["math"].warps)),
                Constant("MATH_THREADS", str(32 * roles["math"].warps)),
                Constant("LOAD_REGISTERS", str(roles["load_tokens"].registers), "", "int"),
                Constant("MATH_REGISTERS", str(roles["math"].registers), "", "int"),
                Constant("BARRIER_COUNTS_KNOWN", "1", "all threads: the schedule can start"),
                Constant("BARRIER_MATH", "2", "math role"),
                Constant("BARRIER_ROLES_DONE", "3", "all threads: every role of this SM has left"),
                *(
                    (Constant("BARRIER_WARPGROUP", "4", "and 5, one per math warpgroup"),)
                    if not on_m
                    else ()
                ),
            ),
        ),
        ConstantGroup(
            "shared memory, bytes",
            (
                *_offsets("SMEM", plan.smem.regions, f"{plan.smem.size} in all"),
                Constant("ZEROED_BYTES", str(plan.smem.size - plan.smem["cta_flags"].offset), "from SMEM_CTA_FLAGS on"),
            ),
        ),
        ConstantGroup(
            "symmetric buffer, bytes", tuple(_offsets("SYMM", contract.symm.regions, f"{contract.symm.size} in all", "u64"))
        ),
        ConstantGroup(
            "local workspace, bytes", tuple(_offsets("LOCAL", plan.local.regions, f"{plan.local.size} in all", "u64"))
        ),
        ConstantGroup(
            "words and codes",
            (
                Constant("LAUNCH_NUMBER", "0", "words of the launch region: launches completed on this buffer"),
                Constant("LAUNCH_FAILURES", "1", "failures so far; the first is reported"),
                Constant("LAUNCH_DROPPED", "2", "expert ids out of range so far"),
                Constant("LAUNCH_PUBLISHED", "3", "SMs that have published their routes"),
                Constant("LAUNCH_NEXT_TILE", "4", "tiles taken by SMs"),
                Constant("LAUNCH_FINISHED", "5", "SMs all of whose roles have left"),
                Constant("CTA_FLAG_STOPPED", "0", "words of cta_flags: a wait gave up"),
                Constant("CTA_FLAG_LAST", "1", "this SM is the last of its rank"),
                Constant("CTA_FLAG_STUCK", "2", "role, awaited and index of a phase that never completed, 0 if none"),
                Constant("CTA_NEXT_UNIT", "3", "combine units handed out after the last tile"),
                *(Constant(f"ROLE_{role.name}", str(int(role))) for role in RoleId if role != RoleId.LOAD_WEIGHTS),
                *(Constant(f"AWAITED_{a.name}", str(int(a))) for a in Awaited),
                *(_trace_constants() if plan.trace else ()),
            ),
        ),
    ]
    return tuple(groups)


def _trace_constants() -> list[Constant]:
    states = [Constant(f"TRACE_{state.name}", str(int(state))) for state in TraceState]
    return [Constant("TRACE_CAPACITY", str(TRACE_CAPACITY), "records per warp"), *states]


def _offsets(prefix: str, regions: tuple[Any, ...], total: str, ctype: str = "u32") -> list[Constant]:
    described = []
    for i, region in enumerate(regions):
        comment = f"{region.dtype}[{']['.join(map(str, region.shape))}]"
        if i == len(regions) - 1:
            comment += f"; {total}"
        described.append(Constant(f"{prefix}_{region.name.upper()}", str(region.offset), comment, ctype))
    return described
