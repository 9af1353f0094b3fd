"""Cases for wgmma.mma_async: arithmetic of every operand type, and the layouts of descriptors and fragments.

Each CTA copies its own image into shared memory, issues the instruction ``steps`` times along K with the
descriptors it is given, and writes its accumulator registers as ``d[cta][register][thread]``.
"""

from dataclasses import dataclass, replace

import numpy as np

from . import streams
from .cases import DIGEST, EXACT, MODEL, OUTPUT, Case, Output

ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "b1": 1}
SWIZZLE_FIELD = {0: 0, 128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class Form:
    """One wgmma instruction. ``rs``: A comes from registers."""

    n: int
    a: str
    b: str
    d: str = "f32"
    rs: bool = False
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    satfinite: bool = False

    @property
    def registers(self) -> int:
        return self.n // 4 if self.d == "f16" else self.n // 2

    @property
    def depth(self) -> int:
        return 256 if self.a == "b1" else 32 // ELEMENT_BYTES[self.a]

    @property
    def name(self) -> str:
        flags = "".join(
            letter
            for letter, on in zip(
                "rxytus",
                (self.rs, self.negate_a, self.negate_b, self.transpose_a, self.transpose_b, self.satfinite),
                strict=True,
            )
            if on
        )
        return f"m64n{self.n}k{self.depth}_{self.d}_{self.a}_{self.b}" + (f"_{flags}" if flags else "")

    def opcode(self) -> str:
        types = f"{self.d}.{self.a}.{self.b}"
        if self.a == "b1":
            types += ".and.popc"
        if self.satfinite:
            types += ".satfinite"
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.depth}.{types}"

    def immediates(self) -> str:
        if self.d == "s32":
            return ""
        scales = [-1 if self.negate_a else 1, -1 if self.negate_b else 1]
        transposes: list[int] = []
        if ELEMENT_BYTES[self.a] == 2:
            transposes = (
                [int(self.transpose_b)] if self.rs else [int(self.transpose_a), int(self.transpose_b)]
            )
        return "".join(f", {value}" for value in scales + transposes)


def source(form: Form) -> str:
    """The kernel of a form, without any header."""
    n, constraint = form.registers, "+f" if form.d == "f32" else "+r"
    value, to_value, to_bits = (
        ("float", "__uint_as_float", "__float_as_uint") if form.d == "f32" else ("unsigned", "", "")
    )
    accumulators = ", ".join(f"%{i}" for i in range(n))
    bind = ", ".join(f'"{constraint}"(acc[{i}])' for i in range(n))
    if form.rs:
        a_operand = "{" + ", ".join(f"%{n + i}" for i in range(4)) + "}"
        inputs = '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(desc_b), "r"(scale)'
        b_operand, predicate = f"%{n + 4}", f"%{n + 5}"
    else:
        a_operand, b_operand, predicate = f"%{n}", f"%{n + 1}", f"%{n + 2}"
        inputs = '"l"(desc_a), "l"(desc_b), "r"(scale)'
    return f"""
extern "C" __global__ void __launch_bounds__(128) {form.name}(
    const uint4* images, int image_bytes, const unsigned long long* descriptors, const unsigned* fragments,
    const unsigned* c, unsigned* d, int steps, int advance_a, int advance_b, int scale_first)
{{
    extern __shared__ unsigned char raw[];
    const unsigned raw_address = static_cast<unsigned>(__cvta_generic_to_shared(raw));
    const unsigned base = (raw_address + 1023) & ~1023u;
    uint4* image = reinterpret_cast<uint4*>(raw + (base - raw_address));
    const int units = image_bytes / 16;
    for (int i = threadIdx.x; i < units; i += 128) image[i] = images[blockIdx.x * units + i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    unsigned long long desc_a = descriptors[2 * blockIdx.x] + (base >> 4);
    unsigned long long desc_b = descriptors[2 * blockIdx.x + 1] + (base >> 4);
    const unsigned* fragment = fragments + blockIdx.x * 512 + threadIdx.x;
    unsigned a0 = fragment[0], a1 = fragment[128], a2 = fragment[256], a3 = fragment[384];
    (void)desc_a; (void)a0; (void)a1; (void)a2; (void)a3;
    const int offset = blockIdx.x * {n * 128} + threadIdx.x;
    {value} acc[{n}];
#pragma unroll
    for (int i = 0; i < {n}; ++i) acc[i] = {to_value}(c[offset + i * 128]);
    int scale = scale_first;
    for (int step = 0; step < steps; ++step) {{
#pragma unroll
        for (int i = 0; i < {n}; ++i) asm volatile("" : "{constraint}"(acc[i]) :: "memory");
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        asm volatile(
            "{{\\n.reg .pred p;\\nsetp.ne.b32 p, {predicate}, 0;\\n"
            "{form.opcode()} {{{accumulators}}}, {a_operand}, {b_operand}, p{form.immediates()};\\n}}\\n"
            : {bind} : {inputs});
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < {n}; ++i) asm volatile("" : "{constraint}"(acc[i]) :: "memory");
        desc_a += advance_a;
        desc_b += advance_b;
        scale = 1;
    }}
#pragma unroll
    for (int i = 0; i < {n}; ++i) d[offset + i * 128] = {to_bits}(acc[i]);
}}
"""


@dataclass(frozen=True)
class Operand:
    """A descriptor's fields in bytes; ``start`` is relative to the image. ``swizzle``: 0, 32, 64 or 128."""

    start: int
    leading: int
    stride: int
    swizzle: int
    base_offset: int = 0

    def bits(self) -> int:
        low = (self.start >> 4) | (self.leading >> 4) << 16 | (self.stride >> 4) << 32
        return low | self.base_offset << 49 | SWIZZLE_FIELD[self.swizzle] << 62


def _case(
    name,
    form,
    images,
    operands,
    c,
    steps=1,
    advance=(0, 0),
    scale=1,
    fragments=None,
    agreement=EXACT,
    keep=DIGEST,
):
    """``images``: uint8 [ctas, bytes]; ``operands``: (A, B) per CTA; ``c``: uint32 [ctas, registers, 128]."""
    ctas = len(images)
    descriptors = np.array([[a.bits(), b.bits()] for a, b in operands], np.uint64)
    if fragments is None:
        fragments = np.zeros((ctas, 4, 128), np.uint32)
    arguments = [
        images,
        np.int32(images.shape[1]),
        descriptors,
        fragments,
        c,
        Output((ctas, form.registers, 128)),
        np.int32(steps),
        np.int32(advance[0] >> 4),
        np.int32(advance[1] >> 4),
        np.int32(scale),
    ]
    return Case(
        name=name,
        source=source(form),
        entry=form.name,
        arguments=lambda: arguments,
        grid=ctas,
        shared_bytes=images.shape[1] + 1024,
        agreement=agreement,
        keep=keep,
        detail={"form": form},
    )


# --- values ------------------------------------------------------------------------------------------------


def fp8_values(kind: str, fmt: str, seed: int, rows: int, depth: int) -> np.ndarray:
    """FP8 codes [rows, depth] without NaN or infinity, of a kind that stresses one part of the sum."""
    count = rows * depth
    exponent_bits, mantissa_bits = (4, 3) if fmt == "e4m3" else (5, 2)
    top = (1 << exponent_bits) - (1 if fmt == "e4m3" else 2)
    sign = streams.below(seed, count, 2) << 7
    mantissa = streams.below(seed + 1, count, 1 << mantissa_bits)
    uniform = streams.below(seed + 2, count, top + 1)
    chance = streams.unit(seed + 3, count)
    if kind == "uniform":
        exponent = uniform
    elif kind == "bell":
        exponent = top // 2 + streams.below(seed + 4, count, 3) - streams.below(seed + 5, count, 4)
    elif kind == "equal":
        exponent = np.full(count, top // 2)
    elif kind == "mixed":
        exponent = np.where(chance < 0.1, top, streams.below(seed + 4, count, 3))
    elif kind == "subnormal":
        exponent = np.where(chance < 0.8, 0, 1)
    elif kind == "sparse":
        exponent = np.where(chance < 0.85, 0, uniform)
        mantissa = np.where(chance < 0.85, 0, mantissa)
    elif kind == "positive":
        exponent, sign = uniform, sign * 0
    elif kind == "pairs":  # successive k differ in the last mantissa bit only, so signs of B can cancel them
        exponent = np.repeat(uniform[: count // 2], 2)
        mantissa = np.repeat(mantissa[: count // 2], 2) ^ (streams.below(seed + 4, count, 8) == 0)
        sign = np.repeat(sign[: count // 2], 2)
    else:
        raise ValueError(f"unknown kind of values: {kind}")
    if fmt == "e4m3":
        mantissa = np.where((exponent == 15) & (mantissa == 7), 6, mantissa)
    return (sign | exponent << mantissa_bits | mantissa).astype(np.uint8).reshape(rows, depth)


def accumulators(kind: str, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """float32 bits of initial accumulators."""
    count = int(np.prod(shape))
    ranges = {
        "similar": (125, 137),
        "wide": (97, 157),
        "small": (90, 112),
        "large": (140, 160),
        "extreme": (1, 254),
        "tiny": (0, 40),
    }
    if kind == "zero":
        return np.zeros(shape, np.uint32)
    low, high = ranges[kind]
    bits = streams.uint32(seed, count) & np.uint32(0x807FFFFF)
    bits |= (low + streams.below(seed + 1, count, high - low + 1)).astype(np.uint32) << np.uint32(23)
    return bits.reshape(shape)


FP8_KINDS = [
    ("uniform", "zero"),
    ("bell", "zero"),
    ("equal", "zero"),
    ("mixed", "zero"),
    ("subnormal", "zero"),
    ("sparse", "zero"),
    ("positive", "zero"),
    ("pairs", "zero"),
    ("uniform", "similar"),
    ("bell", "similar"),
    ("equal", "similar"),
    ("pairs", "similar"),
    ("bell", "wide"),
    ("sparse", "wide"),
    ("bell", "small"),
    ("subnormal", "tiny"),
    ("bell", "large"),
    ("sparse", "extreme"),
]
FP8_FORMATS = [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2")]


def _plain_pair(n: int) -> tuple[Operand, Operand, int]:
    """A and B for K-major operands without swizzle, and the bytes of one step's A and B."""
    step = (64 + n) * 32
    return Operand(0, 128, 256, 0), Operand(2048, 128, 256, 0), step


def core_matrices(tile: np.ndarray) -> np.ndarray:
    """Arranges a [rows, 32]-byte tile as of K-major without swizzle: 8 x 16-byte blocks, two along K."""
    rows = len(tile)
    return np.ascontiguousarray(tile.reshape(rows // 8, 8, 2, 16).transpose(0, 2, 1, 3)).reshape(-1)


def plain_images(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Images of ``steps`` steps from byte operands [ctas, rows, steps * 32]."""
    images = []
    for cta in range(len(a)):
        parts = []
        for step in range(a.shape[2] // 32):
            columns = slice(32 * step, 32 * step + 32)
            parts += [core_matrices(a[cta][:, columns]), core_matrices(b[cta][:, columns])]
        images.append(np.concatenate(parts))
    return np.stack(images)


def fp8_cases() -> list[Case]:
    """About a million dot products of FP8 operands: lengths 32 to 256, by kind of values."""
    cases, n = [], 64
    form = Form(n, "e4m3", "e4m3")
    for index, (kind, c_kind) in enumerate(FP8_KINDS):
        for fmt_index, (a_fmt, b_fmt) in enumerate(FP8_FORMATS):
            ctas = (6, 3, 2, 3)[fmt_index]
            steps = (1, 4, 2, 8)[(index + fmt_index) % 4] if index % 2 else 1
            seed = 1000 * index + 100 * fmt_index + 7
            a = fp8_values(kind, a_fmt, seed, ctas * 64, 32 * steps).reshape(ctas, 64, -1)
            b = fp8_values("uniform" if kind == "mixed" else kind, b_fmt, seed + 50, ctas * n, 32 * steps)
            b = b.reshape(ctas, n, -1)
            if kind == "pairs":
                b[:, :, 1::2] = b[:, :, ::2] ^ 0x80
            form = replace(form, a=a_fmt, b=b_fmt)
            first, second, step = _plain_pair(n)
            c = accumulators(c_kind, seed + 90, (ctas, form.registers, 128))
            cases.append(
                _case(
                    f"fp8/{kind}_{c_kind}_{a_fmt}_{b_fmt}",
                    form,
                    plain_images(a, b),
                    [(first, second)] * ctas,
                    c,
                    steps,
                    (step, step),
                    int(c_kind != "zero"),
                    agreement=MODEL,
                    keep=OUTPUT,
                )
            )
    return cases


def _special_codes(fmt: str) -> np.ndarray:
    codes = {"e4m3": [0x7F, 0xFF, 0x00, 0x80, 0x38], "e5m2": [0x7C, 0xFC, 0x7F, 0x00, 0x80, 0x3C]}
    return np.array(codes[fmt], np.uint8)


def fp8_special_cases() -> list[Case]:
    """NaN, infinities and signed zeros in operands and accumulators; overflow; f16 accumulators; negation."""
    cases, n = [], 64
    first, second, _ = _plain_pair(n)
    for fmt in ("e4m3", "e5m2"):
        form = Form(n, fmt, fmt)
        a = fp8_values("bell", fmt, 31, 64, 32)
        b = fp8_values("bell", fmt, 32, n, 32)
        codes = _special_codes(fmt)
        a[::5, 3] = codes[np.arange(13) % len(codes)]
        b[::7, 3] = codes[np.arange(10) % len(codes)]
        a[1::9] = 0
        c = accumulators("similar", 33, (1, form.registers, 128))
        c[0, :4, ::3] = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0x80000000], np.uint32)[:, None]
        c[0, 4:8, ::5] = np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x807FFFFF], np.uint32)[:, None]
        cases.append(
            _case(
                f"fp8/special_{fmt}",
                form,
                plain_images(a[None], b[None]),
                [(first, second)],
                c,
                agreement=MODEL,
            )
        )
        zeros = np.zeros_like(a)
        cases.append(
            _case(
                f"fp8/zero_{fmt}",
                form,
                plain_images(zeros[None] | 0x80, b[None] & 0x7F),
                [(first, second)],
                c,
                agreement=MODEL,
            )
        )
        top = np.full_like(a, 0x7E if fmt == "e4m3" else 0x7B)
        huge = np.full_like(c, 0x7F7FFFFF)
        huge[:, ::2] = 0x7F000001
        cases.append(
            _case(
                f"fp8/overflow_{fmt}",
                form,
                plain_images(top[None], top[None]),
                [(first, second)],
                huge,
                agreement=MODEL,
            )
        )
        a, b = fp8_values("bell", fmt, 41, 128, 32), fp8_values("bell", fmt, 42, 2 * n, 32)
        images = plain_images(a.reshape(2, 64, 32), b.reshape(2, n, 32))
        for name, changes in {"a": {"negate_a": True}, "b": {"negate_b": True}}.items():
            negated = replace(form, **changes)
            c = accumulators("similar", 43, (2, form.registers, 128))
            cases.append(
                _case(f"fp8/negate_{name}_{fmt}", negated, images, [(first, second)] * 2, c, agreement=MODEL)
            )
        half = replace(form, d="f16")
        for kind in ("bell", "uniform", "subnormal", "pairs"):
            a = fp8_values(kind, fmt, 51, 4 * 64, 32).reshape(4, 64, 32)
            b = fp8_values(kind, fmt, 52, 4 * n, 32).reshape(4, n, 32)
            c = streams.uint32(53, 4 * half.registers * 128) & np.uint32(0xBFFFBFFF)  # finite pairs of f16
            c = c.reshape(4, half.registers, 128)
            cases.append(
                _case(
                    f"fp8/f16_{kind}_{fmt}",
                    half,
                    plain_images(a, b),
                    [(first, second)] * 4,
                    c,
                    agreement=MODEL,
                )
            )
    return cases


def _wide_values(fmt: str, kind: str, seed: int, rows: int) -> np.ndarray:
    """One step of 16- or 32-bit operands as bytes [rows, 32]."""
    per_row = 32 // ELEMENT_BYTES[fmt]
    count = rows * per_row
    exponent_bits, mantissa_bits = {"f16": (5, 10), "bf16": (8, 7), "tf32": (8, 10)}[fmt]
    bias = (1 << (exponent_bits - 1)) - 1
    spread = {"bell": 3, "equal": 1, "wide": 14, "subnormal": 2}[kind]
    base = 0 if kind == "subnormal" else bias - spread // 2
    exponent = base + streams.below(seed, count, spread)
    code = (streams.below(seed + 1, count, 2) << exponent_bits | exponent) << mantissa_bits
    code |= streams.below(seed + 2, count, 1 << mantissa_bits)
    if fmt == "tf32":  # the ignored low bits must not matter
        return (
            (code << 13 | streams.below(seed + 3, count, 1 << 13))
            .astype(np.uint32)
            .view(np.uint8)
            .reshape(rows, 32)
        )
    return code.astype(np.uint16).view(np.uint8).reshape(rows, 32)


def wide_cases() -> list[Case]:
    """f16, bf16 and tf32 operands with f32 and f16 accumulators."""
    cases, n, ctas = [], 32, 2
    first, second, _ = _plain_pair(n)
    for fmt, d in (("f16", "f32"), ("bf16", "f32"), ("tf32", "f32"), ("f16", "f16")):
        form = Form(n, fmt, fmt, d)
        for index, (kind, c_kind) in enumerate(
            (
                ("bell", "zero"),
                ("equal", "similar"),
                ("wide", "wide"),
                ("subnormal", "tiny"),
                ("bell", "small"),
            )
        ):
            seed = 70_000 + 100 * index
            a = _wide_values(fmt, kind, seed, ctas * 64).reshape(ctas, 64, 32)
            b = _wide_values(fmt, kind, seed + 50, ctas * n).reshape(ctas, n, 32)
            c = accumulators(c_kind, seed + 90, (ctas, form.registers, 128))
            if d == "f16" and c_kind != "zero":
                c = c.view(np.uint32) & np.uint32(0xBFFFBFFF)
            cases.append(
                _case(
                    f"wide/{fmt}_{d}_{kind}_{c_kind}",
                    form,
                    plain_images(a, b),
                    [(first, second)] * ctas,
                    c,
                    agreement=MODEL,
                )
            )
    return cases


def integer_cases() -> list[Case]:
    """s8, u8 and b1, with wrap-around and saturation of s32 accumulators."""
    cases, n = [], 32
    first, second, _ = _plain_pair(n)
    forms = [Form(n, a, b, "s32") for a in ("s8", "u8") for b in ("s8", "u8")]
    forms += [Form(n, "s8", "u8", "s32", satfinite=True), Form(n, "u8", "u8", "s32", satfinite=True)]
    forms += [Form(n, "b1", "b1", "s32")]
    for form in forms:
        a, b = streams.uint8(81, 64 * 32).reshape(1, 64, 32), streams.uint8(82, n * 32).reshape(1, n, 32)
        c = streams.uint32(83, form.registers * 128).reshape(1, form.registers, 128)
        c[:, ::2] |= np.uint32(0x7FFE0000)
        cases.append(_case(f"integer/{form.name}", form, plain_images(a, b), [(first, second)], c))
    return cases


# --- layouts -----------------------------------------------------------------------------------------------


def exact_image(fmt: str, seed: int, size: int) -> np.ndarray:
    """``size`` bytes of operands in {0, +-1, +-2, +-3}: their dot products are exact in every model."""
    codes = {
        "e4m3": (np.uint8, [0x00, 0x38, 0x40, 0x44, 0xB8, 0xC0, 0xC4, 0x80]),
        "e5m2": (np.uint8, [0x00, 0x3C, 0x40, 0x42, 0xBC, 0xC0, 0xC2, 0x80]),
        "s8": (np.uint8, [0, 1, 2, 3, 255, 254, 253, 7]),
        "u8": (np.uint8, [0, 1, 2, 3, 255, 254, 253, 7]),
        "b1": (np.uint8, [0, 1, 2, 3, 255, 254, 253, 7]),
        "f16": (np.uint16, [0x0000, 0x3C00, 0x4000, 0x4200, 0xBC00, 0xC000, 0xC200, 0x8000]),
        "bf16": (np.uint16, [0x0000, 0x3F80, 0x4000, 0x4040, 0xBF80, 0xC000, 0xC040, 0x8000]),
        "tf32": (
            np.uint32,
            [0, 0x3F800000, 0x40000000, 0x40400000, 0xBF800000, 0xC0000000, 0xC0400000, 0x80000000],
        ),
    }
    dtype, table = codes[fmt]
    chosen = np.array(table, dtype)[streams.below(seed, size // np.dtype(dtype).itemsize, 8)]
    return chosen.view(np.uint8)


def _k_major(
    swizzle: int, rows: int, start: int, gap: int = 0, k_offset: int = 0, base_offset: int = 0
) -> Operand:
    if swizzle == 0:
        return Operand(start, 128 + gap, 256 + 2 * gap, 0)
    return Operand(start + k_offset, 16, 8 * swizzle + gap, swizzle, base_offset)


def layout_cases() -> list[Case]:
    """Every N, both sources of A, each swizzle, both major-nesses, offsets inside the span, odd strides."""
    cases = []

    def add(name, form, operands, seed):
        images = np.stack([exact_image(form.a, seed + i, 65536) for i in range(len(operands))])
        c = np.zeros((len(operands), form.registers, 128), np.uint32)
        fragments = exact_image(form.a, seed + 77, len(operands) * 2048).view(np.uint32).reshape(-1, 4, 128)
        cases.append(_case(f"layout/{name}", form, images, operands, c, scale=0, fragments=fragments))

    for n in range(8, 257, 8):  # every N; S with 128-byte swizzle
        form = Form(n, "e4m3", "e4m3")
        add(form.name, form, [(_k_major(128, 64, 0), _k_major(128, n, 8192, k_offset=32))], 500 + n)
    for fmt in ("e4m3", "f16", "tf32", "s8"):
        d = "s32" if fmt == "s8" else "f32"
        form = Form(32, fmt, fmt, d)
        variants = []
        for swizzle in (0, 32, 64, 128):
            for k_offset in range(0, max(swizzle, 32), 32):
                variants.append((_k_major(swizzle, 64, 0, k_offset=k_offset), _k_major(swizzle, 32, 16384)))
                variants.append(
                    (_k_major(swizzle, 64, 4096, 1024), _k_major(swizzle, 32, 32768, 512, k_offset))
                )
        add(f"k_major_{form.name}", form, variants, 900)
        rs = replace(form, rs=True)
        add(f"registers_{rs.name}", rs, [(_k_major(128, 64, 0), _k_major(64, 32, 8192))], 950)
    # Patterns that don't start at a multiple of their period, with the base offset that the ISA prescribes.
    form = Form(16, "e4m3", "e4m3")
    shifted = [
        (_k_major(128, 64, 128 * lines, base_offset=lines), _k_major(128, 16, 16384)) for lines in range(1, 8)
    ]
    add(f"base_offset_{form.name}", form, shifted, 970)
    unshifted = [(_k_major(128, 64, 128 * lines), _k_major(128, 16, 16384)) for lines in range(1, 8)]
    add(f"no_base_offset_{form.name}", form, unshifted, 980)
    for fmt in ("f16", "bf16"):  # MN-major
        for transpose_a, transpose_b in ((True, True), (False, True), (True, False)):
            form = Form(128, fmt, fmt, transpose_a=transpose_a, transpose_b=transpose_b)
            variants = []
            for swizzle in (0, 32, 64, 128):
                # Leading and stride offsets differ, so that a confusion of the two shows.
                span = swizzle or 16
                mn = [Operand(start, 8 * span * 5, 8 * span * 2, swizzle) for start in (0, 32768)]
                k = [_k_major(swizzle, 64, start) for start in (0, 32768)]
                variants.append((mn[0] if transpose_a else k[0], mn[1] if transpose_b else k[1]))
            add(f"mn_major_{form.name}", form, variants, 1000)
        rs = Form(128, fmt, fmt, rs=True, transpose_b=True)
        add(f"registers_{rs.name}", rs, [(_k_major(128, 64, 0), Operand(32768, 4096, 1024, 128))], 1100)
    return cases


GROUPS = {
    "wgmma_fp8": fp8_cases,
    "wgmma_other": lambda: fp8_special_cases() + wide_cases() + integer_cases(),
    "wgmma_layout": layout_cases,
}
