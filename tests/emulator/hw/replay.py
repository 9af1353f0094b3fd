"""Computes what the kernels of the hardware cases compute, with the emulator's libraries instead of a GPU."""

import re
import struct
from collections.abc import Callable

import native
import numpy as np

from . import tensor_copy_cases
from .cases import Case, Output, TensorMapSpec

PACKED = {"f16x2": "f16", "bf16x2": "bf16", "e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def inputs(case: Case) -> list[np.ndarray]:
    return [a for a in case.arguments() if isinstance(a, np.ndarray)]


def replay(case: Case) -> np.ndarray:
    """The case's output as the libraries have it."""
    kind = case.name.split("/")[0]
    if "form" in case.detail:
        return _wgmma(case)
    if kind in ("tensor_load", "tensor_store"):
        return _tensor_copy(case)
    rules: list[tuple[str, Callable]] = {
        "convert": _CONVERSIONS,
        "arithmetic": _ARITHMETIC,
        "approximate": _APPROXIMATE,
    }[kind]
    for pattern, function in rules:
        match = re.fullmatch(pattern, case.detail["instruction"])
        if match:
            return function(match, inputs(case))
    raise LookupError(f"no replay for {case.detail['instruction']}")


def _flags(text: str) -> dict[str, bool]:
    present = text.split(".")
    return {name: name in present for name in ("ftz", "sat", "relu", "satfinite", "NaN", "xorsign")}


def _widen(array: np.ndarray) -> np.ndarray:
    """float32 as float64; NaN stays NaN."""
    with np.errstate(invalid="ignore"):
        return array.view(np.float32).astype(np.float64)


def _to_narrow(match, arrays):
    flags, fmt = _flags(match["flags"]), match["fmt"]
    settings = (match["rounding"], flags["satfinite"], flags["relu"])
    if fmt == "tf32":
        return native.to_tf32(arrays[0].view(np.uint32), *settings)
    return native.encode(_widen(arrays[0]), fmt, *settings).astype(np.uint16)


def _to_pair(match, arrays):
    flags = _flags(match["flags"])
    high, low = _widen(arrays[0]), _widen(arrays[1])
    packed = native.encode_x2(
        high, low, PACKED[match["fmt"]], match["rounding"], flags["satfinite"], flags["relu"]
    )
    return packed.astype(np.uint16 if match["fmt"].startswith("e") else np.uint32)


def _pair_to_pair(match, arrays):
    flags = _flags(match["flags"])
    source, target = PACKED[match["source"]], PACKED[match["target"]]
    packed = native.convert_x2(arrays[0], source, target, "rn", flags["satfinite"], flags["relu"])
    return packed.astype(np.uint16 if target.startswith("e") else np.uint32)


def _half_to_float(match, arrays):
    return native.encode(native.decode(arrays[0], match["fmt"]), "f32").astype(np.uint32).view(np.float32)


def _double_to_float(match, arrays):
    values = arrays[0].view(np.float64)
    return native.encode(values, "f32", match["rounding"]).astype(np.uint32).view(np.float32)


def _integer_to_float(match, arrays):
    bits, signed = int(match["bits"]), match["sign"] == "s"
    values = arrays[0].view(np.int32 if bits == 32 else np.int64) if signed else arrays[0]
    negative = values < 0
    magnitude = np.where(negative, -(values.astype(np.int64)), values).astype(np.uint64) if signed else values
    return (
        native.from_integer(magnitude, negative, "f32", match["rounding"]).astype(np.uint32).view(np.float32)
    )


def _float_to_integer(match, arrays):
    values = _flush(arrays[0].view(np.float32), match["ftz"])
    integers = native.to_integer(_widen(values), match["rounding"], int(match["bits"]), match["sign"] == "s")
    return integers.view(np.uint64) if match["bits"] == "64" else integers.astype(np.uint32)


def _flush(values, ftz):
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values) if ftz else values


def _float_integral(match, arrays):
    rounded = native.round_to_integral(_widen(arrays[0]), match["rounding"])
    return native.encode(rounded, "f32").astype(np.uint32).view(np.float32)


def _float_saturate(match, arrays):
    values = arrays[0].view(np.float32)
    return native.arithmetic("mul", [values, np.ones_like(values)], "rn", bool(match["ftz"]), True)


_CONVERSIONS = [
    (r"cvt\.(?P<rounding>rn|rz|rna)(?P<flags>(\.\w+)*?)\.(?P<fmt>f16|bf16|tf32)\.f32", _to_narrow),
    (r"cvt\.(?P<rounding>rn)(?P<flags>(\.\w+)*?)\.(?P<fmt>\w+x2)\.f32", _to_pair),
    (r"cvt\.rn(?P<flags>(\.\w+)*?)\.(?P<target>\w+x2)\.(?P<source>\w+x2)", _pair_to_pair),
    (r"cvt\.f32\.(?P<fmt>f16|bf16)", _half_to_float),
    (r"cvt\.(?P<rounding>r[nzmp])\.f32\.f64", _double_to_float),
    (r"cvt\.(?P<rounding>r[nzmp])\.f32\.(?P<sign>[su])(?P<bits>32|64)", _integer_to_float),
    (r"cvt\.(?P<rounding>r[nzmp])i(?P<ftz>\.ftz)?\.(?P<sign>[su])(?P<bits>32|64)\.f32", _float_to_integer),
    (r"cvt\.(?P<rounding>r[nzmp])i\.f32\.f32", _float_integral),
    (r"cvt(?P<ftz>\.ftz)?\.sat\.f32\.f32", _float_saturate),
]


def _float_operation(match, arrays):
    flags = _flags(match["flags"])
    operands = [a.view(np.float32) for a in arrays]
    return native.arithmetic(match["operation"], operands, match["rounding"], flags["ftz"], flags["sat"])


def _float_extremum(match, arrays):
    flags = _flags(match["flags"])
    a, b = (x.view(np.float32) for x in arrays)
    return native.extremum(match["operation"], a, b, flags["ftz"], flags["NaN"], flags["xorsign"])


def _half_operation(match, arrays):
    flags = _flags(match["flags"])
    halves = [np.ascontiguousarray(a).view(np.uint16) for a in arrays]
    out = native.half(
        match["operation"],
        match["fmt"],
        halves,
        flags["ftz"],
        flags["sat"],
        flags["relu"],
        flags["NaN"],
        flags["xorsign"],
    )
    return out.view(np.uint32) if match["pair"] else out


_ARITHMETIC = [
    (
        r"(?P<operation>add|mul|fma|div|rcp|sqrt)\.(?P<rounding>r[nzmp])(?P<flags>(\.\w+)*)\.f32",
        _float_operation,
    ),
    (r"(?P<operation>min|max)(?P<flags>(\.\w+)*)\.f32", _float_extremum),
    (r"(?P<operation>\w+?)(?P<flags>(\.\w+)*)\.(?P<fmt>b?f16)(?P<pair>x2)?", _half_operation),
]


def _float_function(match, arrays):
    name = "div_full" if match["form"] == "full" else match["function"]
    return native.approximate(name, [a.view(np.float32) for a in arrays], bool(match["ftz"]))


def _half_function(match, arrays):
    return native.half_approximate(match["function"], match["fmt"], arrays[0], bool(match["ftz"]))


_APPROXIMATE = [
    (r"(?P<function>\w+)\.(?P<form>approx|full)(?P<ftz>\.ftz)?\.f32", _float_function),
    (r"(?P<function>\w+)\.approx(?P<ftz>\.ftz)?\.(?P<fmt>b?f16)", _half_function),
]


def _wgmma(case: Case, model: native.Model | None = None) -> np.ndarray:
    form = case.detail["form"]
    images, _, descriptors, fragments, c, _, steps, advance_a, advance_b, scale = case.arguments()
    results = []
    for cta in range(case.grid):
        registers = c[cta]
        desc_a, desc_b = (int(bits) for bits in descriptors[cta])
        for step in range(int(steps)):
            registers = native.wgmma(
                form.n,
                form.a,
                form.b,
                images[cta],
                desc_a,
                desc_b,
                registers,
                d=form.d,
                fragments=fragments[cta] if form.rs else None,
                scale_d=bool(step or scale),
                negate_a=form.negate_a,
                negate_b=form.negate_b,
                transpose_a=form.transpose_a,
                transpose_b=form.transpose_b,
                satfinite=form.satfinite,
                model=model,
            )
            desc_a, desc_b = desc_a + int(advance_a), desc_b + int(advance_b)
        results.append(registers)
    return np.stack(results)


def encoded_map(spec: TensorMapSpec, address: int = 0) -> bytes:
    return native.tensor_map(
        spec.type,
        spec.sizes,
        spec.strides,
        spec.box,
        spec.element_strides,
        address=address,
        swizzle=spec.swizzle,
        interleave=spec.interleave,
        fill=spec.fill,
    )


def acceptable(spec: TensorMapSpec) -> bool:
    """Whether the rules of sm_90 allow a map at an aligned base plus ``spec.argument`` bytes."""
    try:
        return native.tensor_validate(encoded_map(spec, 1 << 20 | spec.argument), 90) == ""
    except struct.error:  # a field that the encoding can't hold
        return False


def copy_faults(case: Case) -> bool:
    detail = case.detail
    encoded = encoded_map(detail["map"])
    violation = native.tensor_copy_violation(
        encoded, detail["coordinates"], detail["offset"], detail["store"]
    )
    return violation != ""


def _tensor_copy(case: Case) -> np.ndarray:
    detail, arguments = case.detail, case.arguments()
    spec: TensorMapSpec = detail["map"]
    encoded = encoded_map(spec)
    runs = native.tensor_runs(encoded, detail["coordinates"], detail["offset"], detail["store"])
    if detail["store"]:
        shared, output = arguments[1].view(np.uint8), arguments[2]
        assert isinstance(output, Output) and output.initial is not None
        tensor = output.initial.copy().view(np.uint8)
        for address, at, size, inside in runs:
            if inside:
                tensor[address : address + size] = shared[at : at + size]
        return tensor.view(np.uint32)
    tensor = arguments[1].view(np.uint8)
    image = np.full(tensor_copy_cases.IMAGE_BYTES // 4, tensor_copy_cases.FILLER, np.uint32).view(np.uint8)
    for address, at, size, inside in runs:
        if inside:
            image[at : at + size] = native.tensor_convert(spec.type, tensor[address : address + size])
        else:
            image[at : at + size] = native.tensor_fill(encoded, int(size))
    done = np.array([1], np.uint32)
    return np.concatenate([image.view(np.uint32), done])
