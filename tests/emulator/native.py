"""The emulator's header-only libraries (numerics, wgmma, tensor maps) called through a small C API.

The shared object is compiled once per state of the sources, into the folder ``build/`` of the repository.
"""

import ctypes
import hashlib
import os
import struct
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "megagen" / "emulator" / "csrc"
SOURCES = [
    "testing_capi.cpp",
    "float_formats.hpp",
    "numerics.hpp",
    "shared_swizzle.hpp",
    "tensor_map.hpp",
    "wgmma.hpp",
    "wgmma_layout.hpp",
]

FORMATS = ("f64", "f32", "tf32", "f16", "bf16", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "ue8m0")
ROUNDINGS = ("rn", "rz", "rm", "rp", "rna")
OPERATIONS = ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")
HALF_OPERATIONS = ("add", "sub", "mul", "fma", "min", "max")
FUNCTIONS = ("ex2", "rcp", "sqrt", "rsqrt", "lg2", "sin", "cos", "tanh", "div", "div_full")
WGMMA_TYPES = ("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "b1")
ACCUMULATORS = ("f32", "f16", "s32")


@cache
def library() -> ctypes.CDLL:
    digest = hashlib.sha256(b"".join((CSRC / name).read_bytes() for name in SOURCES)).hexdigest()[:16]
    path = ROOT / "build" / "emulator-tests" / f"capi-{digest}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        command = [
            "g++",
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-o",
            temporary,
        ]
        subprocess.run([*command, CSRC / SOURCES[0]], check=True)
        os.replace(temporary, path)
    loaded = ctypes.CDLL(str(path))
    loaded.mg_wgmma_invalid.restype = ctypes.c_char_p
    return loaded


def _pointer(array: np.ndarray | None):
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)


def _apply(function: str, settings: tuple, inputs: list[np.ndarray], dtype) -> np.ndarray:
    """Calls an elementwise C function: settings, input pointers, output pointer, count."""
    arrays = [np.ascontiguousarray(a) for a in inputs]
    out = np.empty(arrays[0].shape, dtype)
    pointers = [_pointer(a) for a in arrays]
    getattr(library(), function)(*map(int, settings), *pointers, _pointer(out), ctypes.c_int64(out.size))
    return out


def encode(values, fmt: str, rounding: str = "rn", satfinite: bool = False, relu: bool = False) -> np.ndarray:
    settings = (FORMATS.index(fmt), ROUNDINGS.index(rounding), satfinite, relu)
    return _apply("mg_encode", settings, [np.asarray(values, np.float64)], np.uint64)


def decode(codes, fmt: str) -> np.ndarray:
    return _apply("mg_decode", (FORMATS.index(fmt),), [np.asarray(codes).astype(np.uint64)], np.float64)


def encode_x2(
    high, low, fmt: str, rounding: str = "rn", satfinite: bool = False, relu: bool = False
) -> np.ndarray:
    settings = (FORMATS.index(fmt), ROUNDINGS.index(rounding), satfinite, relu)
    return _apply(
        "mg_encode_x2", settings, [np.asarray(high, np.float64), np.asarray(low, np.float64)], np.uint32
    )


def convert_x2(
    codes, source: str, target: str, rounding: str = "rn", satfinite: bool = False, relu: bool = False
) -> np.ndarray:
    settings = (FORMATS.index(source), FORMATS.index(target), ROUNDINGS.index(rounding), satfinite, relu)
    return _apply("mg_convert_x2", settings, [np.asarray(codes).astype(np.uint32)], np.uint32)


def arithmetic(
    operation: str, operands: list[np.ndarray], rounding: str = "rn", ftz: bool = False, sat: bool = False
) -> np.ndarray:
    padded = [np.asarray(a, np.float32) for a in (*operands, operands[0], operands[0])][:3]
    settings = (OPERATIONS.index(operation), ROUNDINGS.index(rounding), ftz, sat)
    return _apply("mg_arithmetic", settings, padded, np.float32)


def extremum(operation: str, a, b, ftz: bool = False, nan: bool = False, xorsign: bool = False) -> np.ndarray:
    inputs = [np.asarray(a, np.float32), np.asarray(b, np.float32)]
    return _apply("mg_extremum", (operation == "max", ftz, nan, xorsign), inputs, np.float32)


def half(
    operation: str,
    fmt: str,
    operands: list[np.ndarray],
    ftz=False,
    sat=False,
    relu=False,
    nan=False,
    xorsign=False,
) -> np.ndarray:
    padded = [np.asarray(a, np.uint16) for a in (*operands, operands[0])][:3]
    settings = (HALF_OPERATIONS.index(operation), FORMATS.index(fmt), ftz, sat, relu, nan, xorsign)
    return _apply("mg_half", settings, padded, np.uint16)


def approximate(function: str, operands: list[np.ndarray], ftz: bool = False) -> np.ndarray:
    padded = [np.asarray(a, np.float32) for a in (*operands, operands[0])][:2]
    return _apply("mg_approximate", (FUNCTIONS.index(function), ftz), padded, np.float32)


def half_approximate(function: str, fmt: str, a, ftz: bool = False) -> np.ndarray:
    settings = (FUNCTIONS.index(function), FORMATS.index(fmt), ftz)
    return _apply("mg_half_approximate", settings, [np.asarray(a, np.uint16)], np.uint16)


def to_tf32(bits, rounding: str, satfinite: bool = False, relu: bool = False) -> np.ndarray:
    settings = (ROUNDINGS.index(rounding), satfinite, relu)
    return _apply("mg_to_tf32", settings, [np.asarray(bits, np.uint32)], np.uint32)


def to_integer(values, rounding: str, bits: int, signed: bool, from_f64: bool = False) -> np.ndarray:
    settings = (ROUNDINGS.index(rounding), bits, signed, from_f64)
    return _apply("mg_to_integer", settings, [np.asarray(values, np.float64)], np.int64)


def from_integer(magnitude, negative, fmt: str, rounding: str) -> np.ndarray:
    inputs = [np.asarray(magnitude, np.uint64), np.asarray(negative, np.uint8)]
    return _apply("mg_from_integer", (FORMATS.index(fmt), ROUNDINGS.index(rounding)), inputs, np.uint64)


def round_to_integral(values, rounding: str) -> np.ndarray:
    return _apply(
        "mg_round_to_integral", (ROUNDINGS.index(rounding),), [np.asarray(values, np.float64)], np.float64
    )


@dataclass(frozen=True)
class Model:
    """Parameters of wgmma::AccumulationModel."""

    fraction_bits: int
    result_fraction_bits: int
    terms: int


def _wgmma_struct(n, a, b, d, scale_d, negate_a, negate_b, transpose_a, transpose_b, satfinite, model):
    values = [n, WGMMA_TYPES.index(a), WGMMA_TYPES.index(b), ACCUMULATORS.index(d)]
    values += [int(v) for v in (scale_d, negate_a, negate_b, transpose_a, transpose_b, satfinite)]
    values += [model.fraction_bits, model.result_fraction_bits, model.terms] if model else [0, 0, 0]
    return (ctypes.c_int32 * 13)(*values)


def wgmma(
    n: int,
    a: str,
    b: str,
    shared: np.ndarray,
    desc_a: int,
    desc_b: int,
    d_registers: np.ndarray,
    *,
    d: str = "f32",
    fragments: np.ndarray | None = None,
    scale_d: bool = True,
    negate_a: bool = False,
    negate_b: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    satfinite: bool = False,
    model: Model | None = None,
) -> np.ndarray:
    """Registers of D, uint32 [registers, 128], after one instruction. ``model=None``: Hopper's."""
    form = _wgmma_struct(n, a, b, d, scale_d, negate_a, negate_b, transpose_a, transpose_b, satfinite, model)
    out = np.ascontiguousarray(d_registers, np.uint32).copy()
    shared = np.ascontiguousarray(shared, np.uint8)
    fragments = None if fragments is None else np.ascontiguousarray(fragments, np.uint32)
    library().mg_wgmma(
        ctypes.byref(form),
        _pointer(shared),
        ctypes.c_uint64(desc_a),
        ctypes.c_uint64(desc_b),
        _pointer(fragments),
        _pointer(out),
    )
    return out


def wgmma_invalid(n: int, a: str, b: str, d: str = "f32", **flags: bool) -> str | None:
    names = ("scale_d", "negate_a", "negate_b", "transpose_a", "transpose_b", "satfinite")
    message = library().mg_wgmma_invalid(
        ctypes.byref(_wgmma_struct(n, a, b, d, *(flags.get(name, False) for name in names), None))
    )
    return message.decode() if message else None


def wgmma_ranges(descriptor: int, mn_major: bool, first_row: int, last_row: int) -> list[tuple[int, int]]:
    out = np.zeros((4096, 2), np.uint32)
    count = library().mg_wgmma_ranges(
        ctypes.c_uint64(descriptor), int(mn_major), first_row, last_row, _pointer(out), len(out)
    )
    return [(int(begin), int(end)) for begin, end in out[:count]]


def tensor_map(
    type: int,
    sizes,
    strides,
    box,
    element_strides=None,
    *,
    address: int = 0,
    swizzle: int = 0,
    interleave: int = 0,
    fill: int = 0,
) -> bytes:
    """The emulator's 128 bytes, as documented in tensor_map.hpp."""
    rank = len(sizes)
    steps = element_strides or [1] * rank

    def padded(values, count):
        return [*values, *[0] * (count - len(values))]

    return struct.pack(
        "<IB5B6xQ5Q4Q5H5B17x",
        0x50414D54,
        1,
        type,
        rank,
        interleave,
        swizzle,
        fill,
        address,
        *padded(sizes, 5),
        *padded(strides, 4),
        *padded(box, 5),
        *padded(steps, 5),
    )


def tensor_validate(encoded: bytes, compute_capability: int = 100) -> str:
    """The violated rule, or an empty string. ValueError if the bytes are no tensor map."""
    message = ctypes.create_string_buffer(256)
    if library().mg_tensor_validate(encoded, compute_capability, message, len(message)) != 0:
        raise ValueError("not a tensor map")
    return message.value.decode()


def tensor_round_trip(encoded: bytes) -> bytes:
    out = ctypes.create_string_buffer(128)
    library().mg_tensor_round_trip(encoded, out)
    return out.raw


def tensor_bytes(encoded: bytes) -> tuple[int, int]:
    """Bytes of the box in shared memory, and bytes that a transaction counts."""
    shared, transaction = ctypes.c_uint32(), ctypes.c_uint32()
    library().mg_tensor_bytes(encoded, ctypes.byref(shared), ctypes.byref(transaction))
    return shared.value, transaction.value


def _position(coordinates) -> np.ndarray:
    return np.array([*coordinates, *[0] * (5 - len(coordinates))], np.int32)


def tensor_copy_violation(encoded: bytes, coordinates, shared: int = 0, store: bool = False) -> str:
    """Why a copy faults, or an empty string."""
    message = ctypes.create_string_buffer(256)
    library().mg_tensor_copy_violation(
        encoded, _pointer(_position(coordinates)), ctypes.c_uint32(shared), store, message, len(message)
    )
    return message.value.decode()


def tensor_runs(encoded: bytes, coordinates, shared: int = 0, store: bool = False) -> np.ndarray:
    """Runs of a copy as rows (global address, shared address, bytes, in bounds)."""
    out = np.zeros((65536, 4), np.int64)
    count = library().mg_tensor_runs(
        encoded, _pointer(_position(coordinates)), ctypes.c_uint32(shared), store, _pointer(out), len(out)
    )
    assert count <= len(out)
    return out[:count]


def tensor_fill(encoded: bytes, count: int) -> np.ndarray:
    out = np.full(count, 0xAA, np.uint8)
    library().mg_tensor_fill(encoded, _pointer(out), count)
    return out


def tensor_convert(type: int, values: np.ndarray) -> np.ndarray:
    out = np.ascontiguousarray(values).copy()
    library().mg_tensor_convert(type, _pointer(out), out.nbytes)
    return out
