"""Cases of integer, bit, comparison, selection and warp instructions, one kernel per form.

Every thread applies the form to its element of the inputs, with all lanes of each warp active. The record
keeps a checksum per warp.
"""

import numpy as np

from . import streams
from .cases import DIGEST, EXACT, Argument, Case, Output
from .elementwise import OPERANDS

COUNT = 1024


def _inputs(operands: str) -> list[np.ndarray]:
    """Operand arrays by register constraint: random words, a quarter of them small, a quarter extreme."""
    arrays = []
    for position, constraint in enumerate(operands):
        seed = 600 + 10 * position
        if constraint == "f":
            arrays.append(streams.float32_bits(seed, COUNT, (118, 136)).view(np.float32))
            continue
        if constraint == "d":
            exponents = (1003 + streams.below(seed + 1, COUNT, 41)).astype(np.uint64) << np.uint64(52)
            arrays.append(
                (streams.words(seed, COUNT) & np.uint64(0x800FFFFFFFFFFFFF) | exponents).view(np.float64)
            )
            continue
        bits = np.dtype(OPERANDS[constraint][1]).itemsize * 8
        words = streams.words(seed, COUNT)
        small = streams.below(seed + 1, COUNT, 67).astype(np.uint64) - np.uint64(3)
        edges = np.array([0, 1, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - 1) - 1], np.uint64)
        extreme = edges[streams.below(seed + 2, COUNT, 5)]
        kind = streams.below(seed + 3, COUNT, 4)
        chosen = np.where(kind == 0, small, np.where(kind == 1, extreme, words))
        arrays.append((chosen & np.uint64(2**bits - 1)).astype(OPERANDS[constraint][1]))
    return arrays


def form_case(form: str, text: str, result: str, operands: str, group: str = "scalar") -> Case:
    """``text``: PTX with %0 for the result and %1, %2, ... for the operands."""
    name = "form_" + "".join(c if c.isalnum() else "_" for c in form)
    parameters = "".join(f", const {OPERANDS[c][0]}* in{i}" for i, c in enumerate(operands))
    bound = ", ".join(f'"{c}"(in{i}[at])' for i, c in enumerate(operands))
    source = f"""
extern "C" __global__ void {name}({OPERANDS[result][0]}* out{parameters})
{{
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    {OPERANDS[result][0]} value;
    asm volatile("{{{text}}}" : "={result}"(value) : {bound});
    out[at] = value;
}}
"""
    arguments: list[Argument] = [Output((COUNT // 32, 32), OPERANDS[result][1]), *_inputs(operands)]
    return Case(
        name=f"{group}/{form}",
        source=source,
        entry=name,
        arguments=lambda: arguments,
        grid=COUNT // 256,
        block=256,
        agreement=EXACT,
        keep=DIGEST,
        detail={"instruction": form},
    )


def _simple(form: str, result: str, operands: str) -> Case:
    places = "".join(f", %{i + 1}" for i in range(len(operands)))
    return form_case(form, f"{form} %0{places};", result, operands)


WIDTHS = {"16": "h", "32": "r", "64": "l"}


def integer_cases() -> list[Case]:
    cases = []
    for sign in "us":
        for bits, c in WIDTHS.items():
            kind = f"{sign}{bits}"
            for operation in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max", "sad"):
                arity = 3 if operation == "sad" else 2
                if operation in ("div", "rem"):  # a zero divisor is undefined
                    text = f".reg .{kind} d; or.b{bits} d, %2, 1; {operation}.{kind} %0, %1, d;"
                    cases.append(form_case(f"{operation}.{kind}", text, c, c * 2))
                    continue
                cases.append(_simple(f"{operation}.{kind}", c, c * arity))
            cases += [_simple(f"mad.lo.{kind}", c, c * 3), _simple(f"mad.hi.{kind}", c, c * 3)]
            cases += [_simple(f"shr.{kind}", c, c + "r")]
            if bits != "64":
                wide = {"16": "r", "32": "l"}[bits]
                cases += [_simple(f"mul.wide.{kind}", wide, c * 2)]
                cases += [_simple(f"mad.wide.{kind}", wide, c * 2 + wide)]
            if sign == "s":
                cases += [_simple(f"neg.{kind}", c, c), _simple(f"abs.{kind}", c, c)]
        cases += [_simple(f"{name}.{sign}32", "r", "rr") for name in ("mul24.lo", "mul24.hi")]
        cases += [_simple(f"{name}.{sign}32", "r", "rrr") for name in ("mad24.lo", "mad24.hi")]
        for other in "us":
            cases.append(_simple(f"dp4a.{sign}32.{other}32", "r", "rrr"))
            cases.append(_simple(f"dp2a.lo.{sign}32.{other}32", "r", "rrr"))
            cases.append(_simple(f"dp2a.hi.{sign}32.{other}32", "r", "rrr"))
        cases += [_simple(f"{name}.{sign}16x2", "r", "rr") for name in ("add", "min", "max")]
    cases += [
        _simple(form, "r", "rr") for form in ("add.sat.s32", "sub.sat.s32", "min.relu.s32", "max.relu.s32")
    ]
    cases.append(_simple("mad.hi.sat.s32", "r", "rrr"))
    carry = ".reg .u32 t; {0}.cc.u32 t, %1, %2; {1}.u32 %0, %3, t;"
    cases.append(form_case("add.cc addc", carry.format("add", "addc"), "r", "rrr"))
    cases.append(form_case("sub.cc subc", carry.format("sub", "subc"), "r", "rrr"))
    text = ".reg .u32 t; mad.lo.cc.u32 t, %1, %2, %3; madc.hi.u32 %0, %1, %2, t;"
    cases.append(form_case("mad.cc madc", text, "r", "rrr"))
    return cases


def bit_cases() -> list[Case]:
    cases = []
    for bits, c in WIDTHS.items():
        cases += [_simple(f"{name}.b{bits}", c, c * 2) for name in ("and", "or", "xor")]
        cases += [_simple(f"not.b{bits}", c, c), _simple(f"cnot.b{bits}", c, c)]
        cases += [_simple(f"shl.b{bits}", c, c + "r"), _simple(f"shr.b{bits}", c, c + "r")]
        if bits == "16":
            continue
        cases += [
            _simple(f"popc.b{bits}", "r", c),
            _simple(f"clz.b{bits}", "r", c),
            _simple(f"brev.b{bits}", c, c),
        ]
        cases += [_simple(f"bfi.b{bits}", c, c * 2 + "rr")]
        for sign in "us":
            cases += [_simple(f"bfind.{sign}{bits}", "r", c), _simple(f"bfind.shiftamt.{sign}{bits}", "r", c)]
            cases += [_simple(f"bfe.{sign}{bits}", c, c + "rr")]
    for table in (0x00, 0x96, 0xCA, 0xE8, 0x7F):
        cases.append(form_case(f"lop3.b32 {table:#x}", f"lop3.b32 %0, %1, %2, %3, {table};", "r", "rrr"))
    for direction in "lr":
        for mode in ("clamp", "wrap"):
            cases.append(_simple(f"shf.{direction}.{mode}.b32", "r", "rrr"))
    cases.append(_simple("prmt.b32", "r", "rrr"))
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        cases.append(_simple(f"prmt.b32.{mode}", "r", "rrr"))
    for mode in ("clamp", "wrap"):
        cases.append(_simple(f"bmsk.{mode}.b32", "r", "rr"))
        cases += [_simple(f"szext.{mode}.{kind}", "r", "rr") for kind in ("u32", "s32")]
    text = ".reg .b32 m, b; and.b32 b, %2, 31; {0}; fns.b32 %0, %1, b, m;"
    for offset in (1, -1, 3, 0):
        cases.append(form_case(f"fns.b32 {offset}", text.format(f"mov.b32 m, {offset}"), "r", "rr"))
    return cases


def compare_cases() -> list[Case]:
    cases = []
    choose = "selp.u32 %0, 1, 0, p;"
    for comparison in ("eq", "ne", "lt", "le", "gt", "ge"):
        for kind, c in (("s16", "h"), ("u32", "r"), ("s32", "r"), ("u64", "l"), ("s64", "l"), ("f32", "f")):
            text = f".reg .pred p; setp.{comparison}.{kind} p, %1, %2; {choose}"
            cases.append(form_case(f"setp.{comparison}.{kind}", text, "r", c * 2))
        cases.append(_simple(f"set.{comparison}.u32.s32", "r", "rr"))
        cases.append(_simple(f"set.{comparison}.f32.f32", "f", "ff"))
    for comparison in ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
        text = f".reg .pred p; setp.{comparison}.f32 p, %1, %2; {choose}"
        cases.append(form_case(f"setp.{comparison}.f32", text, "r", "ff"))
    for comparison in ("lo", "ls", "hi", "hs"):
        text = f".reg .pred p; setp.{comparison}.u32 p, %1, %2; {choose}"
        cases.append(form_case(f"setp.{comparison}.u32", text, "r", "rr"))
    for combine in ("and", "or", "xor"):
        text = (
            f".reg .pred p, q, r; setp.ne.b32 r, %3, 0; setp.lt.{combine}.s32 p|q, %1, %2, r; "
            "selp.u32 %0, 1, 0, p; @q add.u32 %0, %0, 2;"
        )
        cases.append(form_case(f"setp.lt.{combine}.s32", text, "r", "rrr"))
    cases += [_simple("slct.b32.s32", "r", "rrr"), _simple("slct.u64.s32", "l", "llr")]
    cases += [_simple("slct.b32.f32", "r", "rrf"), _simple("slct.f32.f32", "f", "fff")]
    for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        cases.append(
            form_case(f"testp.{test}.f32", f".reg .pred p; testp.{test}.f32 p, %1; {choose}", "r", "f")
        )
    cases += [_simple("copysign.f32", "f", "ff")]
    cases += [_simple(f"{name}{ftz}.f32", "f", "f") for name in ("neg", "abs") for ftz in ("", ".ftz")]
    for flags in ("", ".sat"):
        for kind in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"):
            if flags and kind == "s64":
                continue
            wide = kind[1:] == "64"
            text = f".reg .{kind} t; cvt{flags}.{kind}.s64 t, %1; cvt.{kind[0]}64.{kind} %0, t;"
            text = text if not wide else f"cvt{flags}.{kind}.s64 %0, %1;"
            if (flags, wide, kind) == ("", True, "s64"):
                continue
            cases.append(form_case(f"cvt{flags}.{kind}.s64", text, "l", "l"))
    for kind in ("u16", "s16", "u8", "s8"):
        third = ", %3" if kind.endswith("8") else ""
        form = f"cvt.pack.sat.{kind}.s32" + (".b32" if third else "")
        operands = "rrr" if third else "rr"
        cases.append(form_case(f"cvt.pack.sat.{kind}.s32", f"{form} %0, %1, %2{third};", "r", operands))
    return cases


def warp_cases() -> list[Case]:
    cases = []
    for mode in ("idx", "up", "down", "bfly"):
        for clamp in ("0x1f", "0x00", "0x181f", "0x1807"):
            text = (
                ".reg .pred p; .reg .b32 t, b; and.b32 b, %2, 31; "
                f"shfl.sync.{mode}.b32 t|p, %1, b, {clamp}, 0xffffffff; "
                "selp.b32 b, 0x80000000, 0, p; xor.b32 %0, t, b;"
            )
            cases.append(form_case(f"shfl.sync.{mode}.b32 {clamp}", text, "r", "rr"))
    odd = ".reg .pred p; .reg .b32 t; and.b32 t, %1, 1; setp.ne.b32 p, t, 0; "
    cases.append(form_case("vote.sync.ballot.b32", odd + "vote.sync.ballot.b32 %0, p, 0xffffffff;", "r", "r"))
    for mode in ("all", "any", "uni"):
        text = odd + f".reg .pred q; vote.sync.{mode}.pred q, p, 0xffffffff; selp.u32 %0, 1, 0, q;"
        cases.append(form_case(f"vote.sync.{mode}.pred", text, "r", "r"))
    few = ".reg .b32 t; and.b32 t, %1, 3; "
    cases.append(form_case("match.any.sync.b32", few + "match.any.sync.b32 %0, t, 0xffffffff;", "r", "r"))
    text = few + ".reg .pred p; match.all.sync.b32 %0|p, t, 0xffffffff; @p or.b32 %0, %0, 1;"
    cases.append(form_case("match.all.sync.b32", text, "r", "r"))
    text = ".reg .b64 t; and.b64 t, %1, 3; match.any.sync.b64 %0, t, 0xffffffff;"
    cases.append(form_case("match.any.sync.b64", text, "r", "l"))
    kinds = {"add": ("u32", "s32"), "min": ("u32", "s32"), "max": ("u32", "s32")}
    for operation in ("add", "min", "max", "and", "or", "xor"):
        for kind in kinds.get(operation, ("b32",)):
            form = f"redux.sync.{operation}.{kind}"
            cases.append(form_case(form, f"{form} %0, %1, 0xffffffff;", "r", "r"))
    text = ".reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, %1, 0, p;"
    cases.append(form_case("elect.sync", text, "r", "r"))
    text = ".reg .b32 t; activemask.b32 t; xor.b32 %0, t, %1;"
    cases.append(form_case("activemask.b32", text, "r", "r"))
    registers = ["laneid", "ntid.x", "ctaid.x", "nctaid.x", "tid.x", "tid.y"]
    registers += [f"lanemask_{relation}" for relation in ("eq", "le", "lt", "ge", "gt")]
    for register in registers:
        text = f"mov.u32 %0, %%{register}; add.u32 %0, %0, %1;"
        cases.append(form_case(f"mov.u32 %{register}", text, "r", "r"))
    for form, fragment in (
        ("movmatrix.sync.aligned.m8n8.trans.b16", "movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"),
        ("bar.red.popc.u32", odd + "barrier.cta.red.popc.aligned.u32 %0, 0, p;"),
        (
            "bar.red.and.pred",
            odd + ".reg .pred q; barrier.cta.red.and.aligned.pred q, 0, p; selp.u32 %0, 1, 0, q;",
        ),
    ):
        cases.append(form_case(form, fragment, "r", "r"))
    return cases


GROUPS = {"scalar": lambda: integer_cases() + bit_cases() + compare_cases() + warp_cases()}
