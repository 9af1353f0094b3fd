"""What all ranks must agree on: the Contract, and the layout of the symmetric buffer that follows from it.

Nothing here depends on a plan. Tiles, stages, schedules and SM counts are local to a rank; everything that
a peer reads, writes or waits for is described in this file, and ``Contract.hash`` is compared when the
ranks meet.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from megagen.errors import ShapeError
from megagen.shape import MoEShape

PROTOCOL_VERSION = 2
MAX_RANKS = 72  # one NVLink domain of today's largest systems
SF_BLOCK = 128  # columns of K that share one activation scale factor, and the edge of a weight scale block
REGION_ALIGN = 1024  # bytes; every region starts on it, so that bulk copies and 16-byte accesses are aligned

FORMATS = ("fp8_block", "mxfp8_mxfp4")
ACTIVATIONS = ("fast", "exact")


def align_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


@dataclass(frozen=True)
class Region:
    """A named piece of a buffer: `offset` and `size` in bytes; `shape` and `dtype` say how to view it."""

    name: str
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def end(self) -> int:
        return self.offset + self.size


@dataclass(frozen=True)
class Layout:
    """Regions of one buffer, in order, without overlap; `size` is the whole buffer in bytes."""

    regions: tuple[Region, ...]
    size: int

    def __getitem__(self, name: str) -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return any(region.name == name for region in self.regions)


DTYPE_BYTES = {"u8": 1, "e4m3": 1, "bf16": 2, "u32": 4, "i32": 4, "f32": 4, "u64": 8}


def lay_out(*entries: tuple[str, str, tuple[int, ...]], alignment: int = REGION_ALIGN) -> Layout:
    """Places (name, dtype, shape) entries one after the other, each aligned to `alignment` bytes."""
    regions, offset = [], 0
    for name, dtype, shape in entries:
        size = DTYPE_BYTES[dtype]
        for extent in shape:
            size *= extent
        regions.append(Region(name, offset, size, shape, dtype))
        offset = align_up(offset + size, alignment)
    return Layout(tuple(regions), max(offset, alignment))


@dataclass(frozen=True)
class Contract:
    """The cross-rank agreement for one layer shape.

    `max_tokens` is the capacity per rank. `sf_group` is the number of intermediate columns that share one
    scale factor in ``fp8_block`` (``mxfp8_mxfp4`` has one per 32). `activation` is the form of SiLU
    (``fast``: ex2/rcp approximations; ``exact``: expf and IEEE division); `clamp` limits gate from above
    and up on both sides before it, or is None.
    """

    shape: MoEShape
    ranks: int
    max_tokens: int
    format: str = "fp8_block"
    sf_group: int = 128
    activation: str = "fast"
    clamp: float | None = None

    def __post_init__(self) -> None:
        self.shape.experts_per_rank(self.ranks)
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ShapeError(f"ranks={self.ranks}: a group has 1 to {MAX_RANKS} ranks (one NVLink domain)")
        if self.max_tokens < 1:
            raise ShapeError(f"max_tokens={self.max_tokens}: the buffer must hold at least one token")
        if self.max_tokens * self.shape.top_k >= 1 << 31:
            raise ShapeError(
                f"max_tokens={self.max_tokens} x top_k={self.shape.top_k} does not fit the 31 bits of a "
                "token-slot index; split the batch into several calls"
            )
        if self.format not in FORMATS:
            raise ShapeError(f"format={self.format!r} is none of {', '.join(FORMATS)}")
        if self.sf_group != 128:
            raise ShapeError(
                f"sf_group={self.sf_group}: fp8_block kernels are generated for sf_group=128 only, "
                "and mxfp8_mxfp4 has no choice; leave it out"
            )
        if self.activation not in ACTIVATIONS:
            raise ShapeError(f"activation={self.activation!r} is none of {', '.join(ACTIVATIONS)}")
        if self.clamp is not None and not self.clamp > 0:
            raise ShapeError(f"clamp={self.clamp}: must be positive, or None for no clamp")

    @property
    def local_experts(self) -> int:
        """Experts per rank, E/R."""
        return self.shape.experts_per_rank(self.ranks)

    @property
    def max_received(self) -> int:
        """Most token copies that a rank can receive in a launch: once per token and local expert."""
        return self.ranks * self.max_tokens * min(self.shape.top_k, self.local_experts)

    @cached_property
    def symm(self) -> Layout:
        """Symmetric buffer: only what peers touch.

        ``control``: word 0 is the abort word: rank + 1 of who stopped the launch, 0 if none.
        ``flags[source]``: barrier sequence number, released by that source.
        ``pending[token]``: expert outputs of this rank's token that are not home yet; zero between launches.
        ``x_sf``: float32 per 128 columns, or four packed UE8M0, lowest columns in the lowest byte.
        ``recv_count[launch parity][source][local expert]``: tokens that the source sends to the expert.
        ``src_index[launch parity][local expert][source][slot]``: low word token * K + k, high word the
        float32 routing weight (duplicates folded).
        ``combine[k][token][H]``: bfloat16 expert outputs, pushed by the experts' ranks.
        """
        s, e, t, r = self.shape, self.local_experts, self.max_tokens, self.ranks
        return lay_out(
            ("control", "u32", (32,)),
            ("flags", "u32", (r,)),
            ("pending", "u32", (t,)),
            ("recv_count", "u32", (2, r, e)),
            ("src_index", "u64", (2, e, r, t)),
            ("x", "e4m3", (t, s.hidden)),
            ("x_sf", "f32" if self.format == "fp8_block" else "u32", (t, s.hidden // SF_BLOCK)),
            ("topk_ids", "i32", (t, s.top_k)),
            ("topk_weights", "f32", (t, s.top_k)),
            ("combine", "bf16", (s.top_k, t, s.hidden)),
        )

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON and hashing."""
        return {**asdict(self), "protocol": PROTOCOL_VERSION}

    @classmethod
    def from_dict(cls, values: dict) -> Contract:
        """Inverse of `to_dict`; refuses another protocol version."""
        values = dict(values)
        version = values.pop("protocol", None)
        if version != PROTOCOL_VERSION:
            raise ShapeError(
                f"protocol={version}: this megagen speaks version {PROTOCOL_VERSION}; "
                "generate the kernels again"
            )
        return cls(**{**values, "shape": MoEShape(**values["shape"])})

    @cached_property
    def hash(self) -> str:
        """SHA-256 over the contract and the symmetric buffer's offsets: equal on all ranks or refused."""
        layout = [(r.name, r.offset, r.size) for r in self.symm.regions]
        return hashlib.sha256(json.dumps([self.to_dict(), layout], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class WeightLayout:
    """How a rank's expert weights lie in memory; depends on shape, format and architecture, not on a plan.

    Hopper ``fp8_block``: per expert, tiles of `block_n` rows x 128 bytes of K, 128B-swizzled (row r keeps
    its 16-byte chunk c at chunk c XOR (r mod 8)), K blocks of one row tile after each other, so that a
    pipeline stage is one contiguous run of 32 KiB. Gate and up rows are interleaved by 8. The rows of w2
    are padded with zeros to whole tiles. Scale factors: one pair per (tile, K block); w13: (gate, up), w2:
    (first, second 128 rows).

    Blackwell ``mxfp8_mxfp4``: row-major packed E2M1, since only a tensor map can unpack it; gate and up
    interleaved and w2 padded likewise. Scale factors: per tile and K block, for each CTA of a pair its 128
    rows' four packed UE8M0, in the order of `planning.sm100.sf_offset`: a pipeline stage is one contiguous
    run of 512 bytes.
    """

    shape: MoEShape
    local_experts: int
    format: str = "fp8_block"
    block_n: int = 256

    @property
    def n_tiles13(self) -> int:
        """Row tiles of the interleaved gate and up matrix [2I, H]."""
        return 2 * self.shape.intermediate // self.block_n

    @property
    def n_tiles2(self) -> int:
        """Row tiles of the down matrix [H, I], the last one padded."""
        return ceil_div(self.shape.hidden, self.block_n)

    @cached_property
    def regions(self) -> Layout:
        """``w13``, ``w13_sf``, ``w2``, ``w2_sf``; each is a tensor of its own: offsets are not used."""
        h, i = self.shape.hidden // SF_BLOCK, self.shape.intermediate // SF_BLOCK
        e, n = self.local_experts, self.block_n
        if self.format == "mxfp8_mxfp4":
            return lay_out(
                ("w13", "u8", (e, self.n_tiles13 * n, self.shape.hidden // 2)),
                ("w13_sf", "u32", (e, self.n_tiles13, h, n // 128, 128)),
                ("w2", "u8", (e, self.n_tiles2 * n, self.shape.intermediate // 2)),
                ("w2_sf", "u32", (e, self.n_tiles2, i, n // 128, 128)),
            )
        return lay_out(
            ("w13", "e4m3", (e, self.n_tiles13, h, n, SF_BLOCK)),
            ("w13_sf", "f32", (e, self.n_tiles13, h, 2)),
            ("w2", "e4m3", (e, self.n_tiles2, i, n, SF_BLOCK)),
            ("w2_sf", "f32", (e, self.n_tiles2, i, 2)),
        )

    @property
    def name(self) -> str:
        """Identifies the layout in manifests: another name means that weights must be transformed again."""
        order = "swizzle128" if self.format == "fp8_block" else "packed-sf4x32"
        return f"{self.format}-n{self.block_n}-k{SF_BLOCK}-{order}-gate8"
