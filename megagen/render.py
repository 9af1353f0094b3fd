"""Plan -> CUDA source. Everything was decided before: this file names the plan's numbers, and the templates
loop and substitute. What a kernel doesn't use of the constants and the functions is left out of it."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jinja2

from megagen import __version__, companion
from megagen.constants import Constant, ConstantGroup
from megagen.contract import SF_BLOCK, Contract, Layout
from megagen.files import templates_dir
from megagen.planning.plan import BLOCK_K, ORDER_SLOTS, TILE_SLOTS, KernelPlan
from megagen.planning.rules import PANEL_BLOCKS
from megagen.planning.sm90 import BLOCK_N, MATH_WARPS, PULL_BUFFERS, WARP_STAGING_BYTES, Sm90Plan
from megagen.planning.sm100 import Sm100Plan
from megagen.protocol import STATUS_FIELDS, TRACE_CAPACITY, Awaited, RoleId, TraceState
from megagen.render_sm100 import (
    sm100_context,
    sm100_parts,
    sm100_threads,
    sm100_tiles,
)

COMMON_PARTS = tuple(
    f"common/{part}.cuh.j2"
    for part in ("watchdog", "pipeline", "compute", "barriers", "scheduler", "publish", "dispatch")
)
"""Templates between the primitives and the load roles, the same on all architectures."""

ENTRY = "megamoe"
QUANTIZE_ENTRY = "quantize_inputs"
MAX_COLUMNS = 110
POLL_NS = 200
PREFETCH_PAUSE_NS = 600  # at 132 SMs somewhat less than HBM delivers
DRAIN_NS = 50_000  # far above the time that an issued bulk copy takes to land


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates_dir()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(plan: KernelPlan) -> str:
    """The CUDA source of the plan's kernel; self-contained, entry point `ENTRY`."""
    contract = plan.contract
    family = "sm100" if isinstance(plan, Sm100Plan) else "sm90"
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
            family=family,
            block_m=plan.block_m,
            hidden=contract.shape.hidden,
            top_k=contract.shape.top_k,
            ring=plan.is_ring,
            step_columns=plan.combine_step_columns,
            constants=constants(plan),
            params=plan.params,
            tracing=plan.trace,
            status=STATUS_FIELDS,
            **_context(plan),
        )
    )


def _context(plan: KernelPlan) -> dict[str, Any]:
    if isinstance(plan, Sm100Plan):
        return {"parts": sm100_parts(plan, COMMON_PARTS), **sm100_context(plan)}
    assert isinstance(plan, Sm90Plan)
    return _sm90_context(plan)


def _sm90_context(plan: Sm90Plan) -> dict[str, Any]:
    """What the templates take of a Hopper plan, and what the common ones call things there."""
    pull_pieces = plan.contract.shape.hidden // plan.pull_bytes
    rows_on_m = plan.operand_order == "tokens_on_m"
    rows_on_n = plan.surplus_rows if rows_on_m else plan.block_m
    orders = (*(("tokens_on_n",) if rows_on_n else ()), *(("tokens_on_m",) if rows_on_m else ()))
    return {
        "parts": (
            "primitives/mbarrier.cuh.j2",
            "primitives/bulk_copy.cuh.j2",
            "primitives/memory_order.cuh.j2",
            "primitives/data.cuh.j2",
            "primitives/wgmma.cuh.j2",
            *(("common/trace_record.cuh.j2",) if plan.trace else ()),
            *COMMON_PARTS,
            "sm90/load.cuh.j2",
            "common/combine.cuh.j2",
            "common/signal.cuh.j2",
            *(f"sm90/mma_{order}.cuh.j2" for order in orders),
            "common/epilogue.cuh.j2",
            *(f"sm90/epilogue_{order}.cuh.j2" for order in reversed(orders)),
            "sm90/math.cuh.j2",
            "common/finish.cuh.j2",
            "sm90/kernel.cuh.j2",
        ),
        "operand_order": plan.operand_order,
        "surplus": plan.surplus_rows > 0,
        "on_n": _names_on_n(plan.surplus_rows > 0),
        "rows_on_n": rows_on_n,
        "wgmma_ns": (*((rows_on_n,) if rows_on_n else ()), *((128,) if rows_on_m else ())),
        "worker": "math",
        "tile_type": "MathTile",
        "workers": "MATH",
        "worker_warps": MATH_WARPS,
        "worker_threads": MATH_WARPS * 32,
        "stage_consumer": "math",
        "dispatch_warps": 1,
        "row_by_row": pull_pieces > 1,
        "warp_parameter": "",
        "warp_argument": "",
        "sf_type": "float",
        "sf_zero": "0.0f",
        "sf_place": "pool_row % BLOCK_M * sizeof(float)",
        "row_image": "TOKEN_STAGE_BYTES",
        "wait_scope": "",
        "l1_stores_of_block": "L1_N_TILES",
        "l2_stores_of_block": "L2_N_TILES",
        "arrive_tile_empty": "mbarrier_arrive",
    }


def _names_on_n(surplus: bool) -> dict[str, str]:
    """What the part with tokens on N calls its rows, functions and types, alone or beside tokens on M."""
    suffix = "_surplus" if surplus else ""
    return {
        "rows": "SURPLUS_ROWS" if surplus else "BLOCK_M",
        "in_use": "rows" if surplus else "tile.rows",
        "suffix": suffix,
        "pad": " " * len(suffix),  # of continuation lines
        "half": "SurplusHalf" if surplus else "Half",
        "accumulators": "Surplus" if surplus else "Accumulators",
    }


def render_quantize(contract: Contract, arch: str) -> str:
    """The CUDA source of the companion kernel (`companion`); self-contained, entry point `QUANTIZE_ENTRY`."""
    shape = contract.shape
    problem = (
        Constant("HIDDEN", shape.hidden, "columns of a token", "u64"),
        Constant("HIDDEN_BLOCKS", shape.hidden // SF_BLOCK, "groups of 128 columns of a token"),
        Constant("SF_BLOCK", SF_BLOCK, "columns of a group"),
        Constant("TOP_K", shape.top_k, "experts per token"),
        Constant("INVALID_ID", companion.INVALID_ID, "what an id that does not fit 32 bits becomes", "i32"),
        Constant("THREADS", companion.THREADS),
        Constant("LANES_PER_GROUP", companion.LANES_PER_GROUP, "lanes of a group"),
        Constant("LANES_PER_SF", companion.lanes_per_sf(contract), "lanes whose columns share an SF"),
        Constant("COLUMNS_PER_LANE", SF_BLOCK // companion.LANES_PER_GROUP),
    )
    return _finish(
        _environment()
        .get_template("quantize.cu.j2")
        .render(
            name=companion.quantize_name(contract, arch),
            version=__version__,
            entry=QUANTIZE_ENTRY,
            lanes_per_group=companion.LANES_PER_GROUP,
            format=contract.format,
            sf_type="float" if contract.format == "fp8_block" else "u32",
            constants=(
                ConstantGroup("problem", problem),
                _offsets("symmetric buffer", "SYMM", contract.symm, "u64"),
            ),
            params=companion.QUANTIZE_FIELDS,
        )
    )


_BLANK_INSIDE = re.compile(r"\n\n+(?=[ }])")  # left by a line that a template leaves out
_COMMENT = re.compile(r"^( *)// \w.*(?:\n\1// \w.*)*", re.MULTILINE)
_NAME = re.compile(r"\b[A-Za-z_]\w*")
_LINE_DEFINITION = re.compile(r"(?:constexpr \w+|typedef .*|using|DEVICE .*?) \*?(\w+)(?: =|;|\(.*\}$)")
_FUNCTION = re.compile(r"^(?:template .*\n)?DEVICE [^(]*?(\w+)\(", re.MULTILINE)


@dataclass(frozen=True)
class _Piece:
    """A part of a source that defines `name`, or one that stays whatever happens (None)."""

    name: str | None
    text: str


def _finish(text: str) -> str:
    """Cleans up what the templates leave, and drops the definitions that nothing in the kernel uses."""
    text = "\n".join(line.rstrip() for line in text.splitlines())
    text = _COMMENT.sub(_wrapped, text)
    text = _BLANK_INSIDE.sub("\n", text)
    paragraphs = [_pieces(paragraph) for paragraph in re.split(r"\n\n+", text.strip())]
    used = _used_names([piece for paragraph in paragraphs for piece in paragraph])
    kept = []
    for paragraph in paragraphs:
        left = [piece for piece in paragraph if piece.name is None or piece.name in used]
        if len(left) == len(paragraph) or any(piece.name for piece in left):
            kept.append("\n".join(piece.text for piece in left))
    return "\n\n".join(kept) + "\n"


def _wrapped(comment: re.Match[str]) -> str:
    """The comment, wrapped anew if the names in it have made a line too long."""
    lines = comment[0].splitlines()
    if max(map(len, lines)) <= MAX_COLUMNS:
        return comment[0]
    start = f"{comment[1]}// "
    text = " ".join(line.removeprefix(start) for line in lines)
    return textwrap.fill(text, MAX_COLUMNS, initial_indent=start, subsequent_indent=start)


def _pieces(paragraph: str) -> list[_Piece]:
    """A paragraph of one-line definitions and comments is one piece a line, any other is one piece."""
    lines = paragraph.split("\n")
    found = [_LINE_DEFINITION.match(line) for line in lines]
    if all(match or line.startswith("//") for match, line in zip(found, lines)):
        return [_Piece(match and match[1], line) for match, line in zip(found, lines)]
    function = _FUNCTION.search(paragraph)
    return [_Piece(function and function[1], paragraph)]


def _used_names(pieces: list[_Piece]) -> set[str]:
    """Names that the pieces that stay mention, that the pieces that define those mention, and so on."""
    mentions: dict[str | None, set[str]] = {}
    for piece in pieces:
        mentions.setdefault(piece.name, set()).update(_NAME.findall(re.sub(r"//.*", "", piece.text)))
    used, waiting = set(mentions[None]), list(mentions[None])
    while waiting:
        new = mentions.get(waiting.pop(), set()) - used
        used |= new
        waiting += new
    return used


def constants(plan: KernelPlan) -> tuple[ConstantGroup, ...]:
    """The numbers of a plan as named constants, in the order in which a reader wants them."""
    if isinstance(plan, Sm100Plan):
        tiles, threads = sm100_tiles(plan), sm100_threads(plan)
    else:
        assert isinstance(plan, Sm90Plan)
        tiles, threads = _sm90_tiles(plan), _sm90_threads(plan)
    return (
        ConstantGroup("problem", _problem_constants(plan)),
        ConstantGroup("tiles and load pipeline", tiles),
        ConstantGroup("dispatch and combine", _token_constants(plan)),
        ConstantGroup("threads and barriers", threads),
        _offsets("shared memory", "SMEM", plan.smem, "u32"),
        _offsets("symmetric buffer", "SYMM", plan.contract.symm, "u64"),
        _offsets("local workspace", "LOCAL", plan.local, "u64"),
        ConstantGroup("words of launch and cta_flags", _word_constants(isinstance(plan, Sm100Plan))),
        *_CODES,
    )


def _problem_constants(plan: KernelPlan) -> tuple[Constant, ...]:
    contract, shape = plan.contract, plan.contract.shape
    limit = () if contract.clamp is None else (f"{contract.clamp!r}f",)
    return (
        Constant("HIDDEN", shape.hidden, "columns of a token"),
        Constant("INTERMEDIATE", shape.intermediate, "columns between the two GEMMs"),
        Constant("EXPERTS", shape.experts, "of all ranks together"),
        Constant("TOP_K", shape.top_k, "experts per token"),
        Constant("RANKS", contract.ranks),
        Constant("LOCAL_EXPERTS", contract.local_experts, "experts of this rank"),
        Constant("MAX_TOKENS", contract.max_tokens, "capacity per rank, tokens"),
        Constant("HIDDEN_BLOCKS", shape.hidden // SF_BLOCK, "K blocks of L1"),
        Constant("INTERMEDIATE_BLOCKS", shape.intermediate // SF_BLOCK, "K blocks of L2"),
        Constant("NO_EXPERT", "~0u"),
        *(Constant("SWIGLU_LIMIT", value, "clamp of gate and up", "float") for value in limit),
    )


def _sm90_tiles(plan: Sm90Plan) -> tuple[Constant, ...]:
    return (
        Constant("BLOCK_M", plan.block_m, "token rows of a tile"),
        Constant("FULL_ROWS", plan.block_m - plan.surplus_rows, "of them, with tokens on M"),
        Constant("SURPLUS_ROWS", plan.surplus_rows, "and the rest, with tokens on N"),
        Constant("BLOCK_N", BLOCK_N, "weight rows of a tile"),
        Constant("BLOCK_K", BLOCK_K, "bytes of K per stage, one byte per value"),
        Constant("WGMMA_K", 32, "K of one E4M3 WGMMA"),
        Constant("DESCRIPTOR_K_STEP", 2, "16-byte units of a descriptor: WGMMA_K bytes further in K"),
        Constant("DESCRIPTOR_64_ROWS", 64 * BLOCK_K // 16, "16-byte units: 64 weight rows further"),
        Constant("DESCRIPTOR_128_ROWS", 128 * BLOCK_K // 16, "16-byte units: 128 weight rows further"),
        Constant("HALVES", 2, "parts that a warpgroup multiplies in turn"),
        Constant("STAGES", plan.stages, "stages of the load pipeline"),
        Constant("WEIGHT_STAGE_BYTES", plan.weight_stage_bytes),
        Constant("TOKEN_TILE_BYTES", plan.token_tile_bytes, "a K block of BLOCK_M rows, then their SFs"),
        Constant("TOKEN_STAGE_BYTES", plan.block_m * BLOCK_K, "the rows of a token tile, without their SFs"),
        Constant("WARP_STAGING_BYTES", WARP_STAGING_BYTES, "16 rows of 128 bytes"),
        Constant("TILE_SLOTS", TILE_SLOTS, "tile tasks between the token loader and the math role"),
        Constant("ORDER_SLOTS", ORDER_SLOTS, "tile numbers between the weight loader and the token loader"),
        Constant("L1_N_TILES", plan.weight_layout.n_tiles13, "tiles of BLOCK_N weight rows per expert"),
        Constant("L2_N_TILES", plan.weight_layout.n_tiles2, "tiles of BLOCK_N weight rows per expert"),
        Constant("EXPERTS_PER_WAVE", plan.experts_per_wave),
        Constant("PANEL_BLOCKS", PANEL_BLOCKS, "row blocks of an expert that are worked on together"),
        Constant("L1_RING_BLOCKS", plan.l1_ring_blocks, "blocks of pulled rows that there is room for"),
        Constant(
            "PREFETCHED_BLOCKS", plan.prefetched_blocks, "K blocks of weights that go to the L2 cache first"
        ),
        Constant("PREFETCH_PAUSE_NS", PREFETCH_PAUSE_NS, "ns between two of them"),
    )


def _token_constants(plan: KernelPlan) -> tuple[Constant, ...]:
    shape, columns = plan.contract.shape, plan.combine_columns
    steps = columns // plan.combine_step_columns
    row_loads = min(shape.top_k, 24 // steps)
    return (
        Constant("LONE_PUBLISHER_ROUTES", plan.lone_publisher_routes, "up to so many, one SM publishes all"),
        Constant("PULL_BYTES", plan.pull_bytes, "piece of a token row that is pulled at a time"),
        Constant("PULL_PIECES", shape.hidden // plan.pull_bytes, "pieces of a token row"),
        Constant("PULL_BUFFERS", PULL_BUFFERS, "pieces in flight per SM"),
        Constant("SF_PER_LANE", -(-shape.hidden // SF_BLOCK // 32), "SFs of a token row per lane"),
        Constant("RANKS_PER_LANE", -(-plan.contract.ranks // 32), "source ranks that a lane looks after"),
        Constant("COMBINE_COLUMNS", columns, "columns of a unit: one token's, for one warp"),
        Constant("COMBINE_STEPS", steps, f"steps of {plan.combine_step_columns} columns in a unit"),
        Constant("STEP_BYTES", plan.combine_step_bytes, f"{plan.combine_step_columns} columns of bfloat16"),
        Constant("STEP_LANES", plan.combine_step_bytes // 16, "lanes that take part in a step"),
        Constant("UNITS_PER_TOKEN", shape.hidden // columns),
        Constant("UNIT_BYTES", 2 * columns, "a row's columns of a unit"),
        Constant("ROW_LOADS", row_loads, "rows that a warp loads at once"),
        Constant("POLL_NS", POLL_NS, "ns between looks for work of the signal role"),
        Constant(
            "DRAIN_NS",
            DRAIN_NS,
            "ns that a cancelled tile's copies have to land; they cannot be awaited",
        ),
    )


def _sm90_threads(plan: Sm90Plan) -> tuple[Constant, ...]:
    roles = {role.name: role for role in plan.roles}
    parted = "; BARRIER_MATH parts it from a pair's" if plan.surplus_rows else ""
    return (
        Constant("THREADS", plan.threads),
        Constant("FULL_WARP", "~0u"),
        Constant("LOAD_TOKENS_WARP", roles["load_tokens"].first_warp),
        Constant("LOAD_WEIGHTS_WARP", roles["load_weights"].first_warp),
        Constant("DISPATCH_WARP", roles["dispatch"].first_warp),
        Constant("SIGNAL_WARP", roles["signal"].first_warp),
        Constant("FIRST_MATH_WARP", roles["math"].first_warp),
        Constant("MATH_WARPS", roles["math"].warps),
        Constant("MATH_THREADS", 32 * roles["math"].warps),
        Constant("LOAD_REGISTERS", roles["load_tokens"].registers, "per thread", "int"),
        Constant("MATH_REGISTERS", roles["math"].registers, "per thread", "int"),
        Constant("BARRIER_COUNTS_KNOWN", 1, "all threads: the schedule can start"),
        Constant("BARRIER_MATH", 2, "math role"),
        Constant("BARRIER_ROLES_DONE", 3, "all threads: every role of this SM has left"),
        Constant("BARRIER_WARPGROUP", 4, f"and 5, one per math warpgroup{parted}"),
        Constant("BARRIER_PAIR", 4, "and 5 to 7, one per pair of math warps that share rows"),
        Constant("ZEROED_BYTES", plan.smem.size - plan.smem["cta_flags"].offset, "from SMEM_CTA_FLAGS on"),
    )


def _word_constants(pairs: bool) -> tuple[Constant, ...]:
    """`pairs`: a tile is taken by a pair of CTAs, not by one."""
    if pairs:
        takers, tiles = "pairs", "0; after a failure 1 + the tiles that the leader handed on"
    else:
        takers, tiles = "SMs", "tiles that the token loader handed on, and 1, once it has left"
    return (
        Constant("LAUNCH_NUMBER", 0, "launches completed on this buffer"),
        Constant("LAUNCH_FAILURES", 1, "failures so far; the first is reported"),
        Constant("LAUNCH_DROPPED", 2, "expert ids out of range so far"),
        Constant("LAUNCH_PUBLISHED", 3, "SMs that have published their routes"),
        Constant("LAUNCH_NEXT_TILE", 4, f"tiles taken by {takers} after their first"),
        Constant("LAUNCH_NEXT_UNIT", 5, "combine units taken by warps after their first"),
        Constant("LAUNCH_FINISHED", 6, "SMs all of whose roles have left"),
        Constant("CTA_FLAG_STOPPED", 0, "a wait gave up"),
        Constant("CTA_FLAG_LAST", 1, "this SM is the last of its rank"),
        Constant("CTA_FLAG_TILES", 2, tiles),
        Constant("CTA_FLAG_STUCK", 3, "what the math role waits for in vain, 0 if nothing"),
    )


_CODES = (
    ConstantGroup(
        "ids of roles, the same in all kernels",
        tuple(Constant(f"ROLE_{role.name}", int(role)) for role in RoleId),
    ),
    ConstantGroup(
        "what a wait awaits", tuple(Constant(f"AWAITED_{awaited.name}", int(awaited)) for awaited in Awaited)
    ),
    ConstantGroup(
        "trace",
        (
            Constant("TRACE_CAPACITY", TRACE_CAPACITY, "records per warp"),
            *(Constant(f"TRACE_{state.name}", int(state)) for state in TraceState),
        ),
    ),
)

_HOLDS = {
    "control": "[0] is the abort word: 1 + the rank that set it",
    "flags": "last barrier that each rank released",
    "pending": "expert outputs of a token not yet home",
    "recv_count": "routes, [bank][source rank][local expert]",
    "src_index": "[bank][local expert][source rank][slot]",
    "combine": "expert outputs, [k][token][column]",
    "launch": "LAUNCH_*",
    "send_count": "routes to an expert",
    "l1_arrival": "rows pulled of a pool block",
    "l2_arrival": "arrivals after L1 tiles of a pool block",
    "l2_finished": "arrivals after L2 tiles of a pool block",
    "row_source": "rank << 32 | k * MAX_TOKENS + token",
    "row_weight": "routing weight of a pool row",
    "l1_tiles": "[block of the ring][K block]",
    "l2_tiles": "[pool block][K block]",
}
"""What the regions of the symmetric buffer and the workspace hold, where their names don't say it."""


def _holds(region: str) -> str:
    return f": {_HOLDS[region]}" if region in _HOLDS else ""


def _offsets(memory: str, prefix: str, layout: Layout, ctype: str) -> ConstantGroup:
    return ConstantGroup(
        f"{memory}, {layout.size} bytes",
        tuple(
            Constant(
                f"{prefix}_{region.name.upper()}",
                region.offset,
                f"{region.dtype}[{']['.join(map(str, region.shape))}]{_holds(region.name)}",
                ctype,
            )
            for region in layout.regions
        ),
    )
