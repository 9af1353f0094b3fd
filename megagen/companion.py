"""The companion kernel: puts a call's inputs into the symmetric buffer, quantizing bfloat16 tokens.

What its source (``templates/quantize.cu.j2``), its build and its launch share. It depends on the layout of
the symmetric buffer only, so every plan of a contract uses the same one.
"""

from megagen.contract import SF_BLOCK, Contract, ceil_div
from megagen.protocol import Field

THREADS = 256
LANES_PER_GROUP = 16  # of 128 columns: 8 columns (16 bytes of bfloat16) each
CTAS_PER_SM = 8  # as many as an SM holds
INVALID_ID = -2  # stands for an id that does not fit 32 bits; the layer's kernel drops and counts it

QUANTIZE_FIELDS = (
    Field("x", "u64", "tokens: bfloat16, or E4M3 if x_sf is set"),
    Field("x_sf", "u64", "scale factors of E4M3 tokens: 4 bytes each, [tokens][H / 128], or 0"),
    Field("row_bytes", "u64", "from one row of x to the next"),
    Field("topk_ids", "u64", "[tokens][TOP_K]"),
    Field("topk_weights", "u64", "[tokens][TOP_K]"),
    Field("symm", "u64", "this rank's symmetric buffer"),
    Field("num_tokens_ptr", "u64", "device u32 with the token count, or 0 to use num_tokens"),
    Field("num_tokens", "u32", "tokens of this rank (an upper bound if num_tokens_ptr is set)"),
    Field("ids_are_int64", "u32", "1 if topk_ids are int64, 0 if int32"),
    Field("weights_are_bf16", "u32", "1 if topk_weights are bfloat16, 0 if float32"),
)
"""The kernel's one parameter, a struct."""


def quantize_name(contract: Contract, arch: str) -> str:
    """Base name of the companion kernel's files; contracts with the same symmetric buffer share it."""
    s = contract.shape
    size = f"h{s.hidden}e{s.experts}k{s.top_k}-ep{contract.ranks}-t{contract.max_tokens}"
    return f"quantize-{size}-{contract.format}-{arch}"


def lanes_per_sf(contract: Contract) -> int:
    """Lanes whose columns share an SF: all of a group, or with an SF per 32 columns a quarter of it."""
    return LANES_PER_GROUP if contract.format == "fp8_block" else LANES_PER_GROUP // 4


def quantize_ctas(hidden: int, tokens: int, sms: int) -> int:
    """CTAs for ``tokens`` tokens: a half-warp per SF group, no more than ``sms`` SMs hold at once."""
    lanes = tokens * (hidden // SF_BLOCK) * LANES_PER_GROUP
    return max(1, min(ceil_div(lanes, THREADS), CTAS_PER_SM * sms))
