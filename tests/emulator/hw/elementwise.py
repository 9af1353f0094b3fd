"""Cases of instructions that map registers to registers: conversions, arithmetic, approximate functions.

Every kernel applies one instruction to each element of its input arrays. ``detail`` names the form, which a
replay through the libraries looks up.
"""

import numpy as np

from . import streams
from .cases import APPROXIMATE, EXACT, Argument, Case, Output

# Register constraint, C type and numpy type of operands by their width or class.
OPERANDS = {
    "f": ("float", np.float32),
    "r": ("unsigned", np.uint32),
    "h": ("unsigned short", np.uint16),
    "l": ("unsigned long long", np.uint64),
    "d": ("double", np.float64),
}


def source(name: str, instruction: str, result: str, operands: str) -> str:
    """A kernel ``out[i] = instruction(in0[i], in1[i], ...)``; ``result``, ``operands``: constraints."""
    parameters = "".join(f", const {OPERANDS[c][0]}* in{i}" for i, c in enumerate(operands))
    places = "".join(f", %{i + 1}" for i in range(len(operands)))
    bound = ", ".join(f'"{c}"(in{i}[at])' for i, c in enumerate(operands))
    return f"""
extern "C" __global__ void {name}(int count{parameters}, {OPERANDS[result][0]}* out)
{{
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    {OPERANDS[result][0]} value;
    asm volatile("{instruction} %0{places};" : "={result}"(value) : {bound});
    out[at] = value;
}}
"""


def _case(group, instruction, result, inputs, agreement=EXACT, **detail):
    """``inputs``: (constraint, array) pairs of equal length."""
    name = instruction.replace(".", "_").replace("::", "_")
    count = len(inputs[0][1])
    arguments: list[Argument] = [np.int32(count)]
    arguments += [np.ascontiguousarray(array).view(OPERANDS[c][1]) for c, array in inputs]
    arguments.append(Output((count,), OPERANDS[result][1]))
    return Case(
        name=f"{group}/{instruction}",
        source=source(name, instruction, result, "".join(c for c, _ in inputs)),
        entry=name,
        arguments=lambda: arguments,
        grid=-(-count // 256),
        block=256,
        agreement=agreement,
        detail={"instruction": instruction, **detail},
    )


def conversion_cases() -> list[Case]:
    cases = []
    narrow = {
        "f16": (103, 144),
        "bf16": (0, 255),
        "e4m3x2": (115, 137),
        "e5m2x2": (108, 144),
        "tf32": (0, 255),
    }

    def f32(seed, target, count=4096):
        return streams.float32_bits(seed, count, narrow[target])

    for target in ("f16", "bf16"):
        for rounding in ("rn", "rz"):
            for flags in ("", ".relu", ".satfinite", ".relu.satfinite"):
                instruction = f"cvt.{rounding}{flags}.{target}.f32"
                cases.append(_case("convert", instruction, "h", [("f", f32(1, target))]))
                if rounding == "rn" and flags in ("", ".relu"):
                    pair = [("f", f32(2, target, 2048)), ("f", f32(3, target, 2048))]
                    cases.append(_case("convert", f"cvt.{rounding}{flags}.{target}x2.f32", "r", pair))
    for rounding in ("rna", "rn", "rz"):
        cases.append(_case("convert", f"cvt.{rounding}.tf32.f32", "r", [("f", f32(4, "tf32"))]))
    cases.append(_case("convert", "cvt.rn.relu.tf32.f32", "r", [("f", f32(4, "tf32"))]))
    cases.append(_case("convert", "cvt.rna.satfinite.tf32.f32", "r", [("f", f32(4, "tf32"))]))
    every = np.arange(65536, dtype=np.uint32)
    for target in ("e4m3x2", "e5m2x2"):
        for flags in ("", ".relu"):
            pair = [("f", f32(5, target)), ("f", f32(6, target))]
            cases.append(_case("convert", f"cvt.rn.satfinite{flags}.{target}.f32", "h", pair))
            both = every | (every ^ np.uint32(0x5555)) << np.uint32(16)
            cases.append(_case("convert", f"cvt.rn.satfinite{flags}.{target}.f16x2", "h", [("r", both)]))
            cases.append(
                _case("convert", f"cvt.rn{flags}.f16x2.{target}", "r", [("h", every.astype(np.uint16))])
            )
    cases.append(_case("convert", "cvt.f32.f16", "f", [("h", every.astype(np.uint16))]))
    cases.append(_case("convert", "cvt.f32.bf16", "f", [("h", every.astype(np.uint16))]))
    for rounding in ("rn", "rz", "rm", "rp"):  # doubles that f32 can't hold
        with np.errstate(invalid="ignore"):
            double = streams.float32_bits(7, 2048).view(np.float32).astype(np.float64).view(np.uint64)
        double ^= streams.words(8, 2048) >> np.uint64(36)
        cases.append(_case("convert", f"cvt.{rounding}.f32.f64", "f", [("d", double)]))
        integers = streams.words(9, 2048) >> streams.below(10, 2048, 64).astype(np.uint64)
        for kind, constraint in (("s32", "r"), ("u32", "r"), ("s64", "l"), ("u64", "l")):
            values = integers if constraint == "l" else integers.astype(np.uint32)
            cases.append(_case("convert", f"cvt.{rounding}.f32.{kind}", "f", [(constraint, values)]))
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        values = streams.float32_bits(11, 2048, (110, 195))
        for kind, constraint in (("s32", "r"), ("u32", "r"), ("s64", "l"), ("u64", "l")):
            cases.append(_case("convert", f"cvt.{rounding}.{kind}.f32", constraint, [("f", values)]))
        cases.append(
            _case("convert", f"cvt.{rounding}.ftz.s32.f32", "r", [("f", streams.float32_bits(12, 512))])
        )
        cases.append(_case("convert", f"cvt.{rounding}.f32.f32", "f", [("f", values)]))
    cases.append(
        _case("convert", "cvt.sat.f32.f32", "f", [("f", streams.float32_bits(13, 2048, (100, 140)))])
    )
    cases.append(
        _case("convert", "cvt.ftz.sat.f32.f32", "f", [("f", streams.float32_bits(13, 2048, (0, 140)))])
    )
    return cases


def _pairs(seed: int, count: int) -> list[np.ndarray]:
    """Three float32 arrays whose products and sums cover alignment, cancellation, overflow and underflow."""
    a = streams.float32_bits(seed, count, (90, 164))
    b = streams.float32_bits(seed + 10, count, (90, 164))
    b[:18] = np.roll(b[:18], 5)
    extreme = streams.below(seed + 20, count, 4) == 0
    a = np.where(extreme, streams.uint32(seed + 21, count), a)
    b = np.where(streams.below(seed + 22, count, 4) == 0, streams.uint32(seed + 23, count), b)
    with np.errstate(all="ignore"):
        product = (a.view(np.float32) * b.view(np.float32)).view(np.uint32)
    near = (product ^ np.uint32(0x80000000)) + streams.below(seed + 24, count, 5).astype(np.uint32)
    c = np.where(
        streams.below(seed + 25, count, 2) == 0, near, streams.float32_bits(seed + 26, count, (60, 190))
    )
    return [a, b, c]


def arithmetic_cases() -> list[Case]:
    cases, count = [], 1024
    a, b, c = (("f", array) for array in _pairs(200, count))
    close = ("f", (a[1] ^ np.uint32(0x80000000)) + streams.below(230, count, 3).astype(np.uint32))
    for rounding in ("rn", "rz", "rm", "rp"):
        for flags in ("", ".ftz", ".sat"):
            if flags == ".sat" and rounding != "rn":
                continue
            cases.append(_case("arithmetic", f"add.{rounding}{flags}.f32", "f", [a, close if flags else c]))
            cases.append(_case("arithmetic", f"mul.{rounding}{flags}.f32", "f", [a, b]))
            cases.append(_case("arithmetic", f"fma.{rounding}{flags}.f32", "f", [a, b, c]))
        cases.append(_case("arithmetic", f"div.{rounding}.f32", "f", [a, b]))
        cases.append(_case("arithmetic", f"rcp.{rounding}.f32", "f", [a]))
        cases.append(_case("arithmetic", f"sqrt.{rounding}.f32", "f", [a]))
    for operation in ("min", "max"):
        for flags in ("", ".ftz", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs"):
            cases.append(_case("arithmetic", f"{operation}{flags}.f32", "f", [a, b]))
    half = [("h", streams.uint32(240 + i, count).astype(np.uint16)) for i in range(3)]
    packed = [("r", streams.uint32(250 + i, count)) for i in range(3)]
    for kind in ("f16", "bf16"):
        for operation, arity in (("add", 2), ("sub", 2), ("mul", 2)):
            rounding = ".rn"
            cases.append(_case("arithmetic", f"{operation}{rounding}.{kind}", "h", half[:arity]))
            cases.append(_case("arithmetic", f"{operation}{rounding}.{kind}x2", "r", packed[:arity]))
        cases.append(_case("arithmetic", f"fma.rn.{kind}", "h", half))
        cases.append(_case("arithmetic", f"fma.rn.relu.{kind}", "h", half))
        cases.append(_case("arithmetic", f"fma.rn.{kind}x2", "r", packed))
        for operation in ("min", "max"):
            for flags in ("", ".NaN", ".xorsign.abs"):
                cases.append(_case("arithmetic", f"{operation}{flags}.{kind}", "h", half[:2]))
    for flags in (".ftz", ".sat", ".ftz.sat"):
        cases.append(_case("arithmetic", f"add{flags}.f16", "h", half[:2]))
        cases.append(_case("arithmetic", f"fma.rn{flags}.f16", "h", half))
    return cases


def approximate_cases() -> list[Case]:
    """Approximate functions. ``detail["bound"]`` is the ISA's bound on the error: (kind, value)."""
    cases, count = [], 4096

    def add(instruction, exponents, bound, result="f", values=None):
        if values is None:
            values = streams.float32_bits(300, count, exponents)
        cases.append(_case("approximate", instruction, result, [(result, values)], APPROXIMATE, bound=bound))

    for ftz in ("", ".ftz"):
        add(f"ex2.approx{ftz}.f32", (100, 134), ("relative", 2.0**-22))
        add(f"lg2.approx{ftz}.f32", (0, 254), ("absolute_or_relative", 2.0**-22))
        add(f"rcp.approx{ftz}.f32", (0, 254), ("ulp", 1))
        add(f"rsqrt.approx{ftz}.f32", (0, 254), ("relative", 2.0**-22.4))
        add(f"sqrt.approx{ftz}.f32", (0, 254), ("relative", 2.0**-23))
        add(f"sin.approx{ftz}.f32", (100, 130), ("sine", 2.0**-20.5))
        add(f"cos.approx{ftz}.f32", (100, 130), ("sine", 2.0**-20.5))
        a, b, _ = _pairs(310, count)
        for form in ("approx", "full"):
            name = f"div.{form}{ftz}.f32"
            cases.append(_case("approximate", name, "f", [("f", a), ("f", b)], APPROXIMATE, bound=("ulp", 2)))
    add("tanh.approx.f32", (100, 132), ("relative", 2.0**-11))
    every = np.arange(65536, dtype=np.uint16)
    for instruction, bound in (
        ("tanh.approx.f16", ("absolute", 2.0**-10.987)),
        ("tanh.approx.bf16", ("absolute", 2.0**-8)),
        ("ex2.approx.f16", ("relative", 2.0**-9.9)),
        ("ex2.approx.ftz.bf16", ("relative", 2.0**-7)),
    ):
        add(instruction, None, bound, "h", every)
    return cases


GROUPS = {
    "conversions": conversion_cases,
    "arithmetic": arithmetic_cases,
    "approximations": approximate_cases,
}
