"""Recorded outputs: one compressed file per group of cases.

Arrays are stored as byte planes (all lowest bytes, then all second bytes, ...), which compress better than
words. Each case carries a checksum of its source and inputs, so that a record of other inputs is noticed.
"""

import json
import os
import zlib
from pathlib import Path

import numpy as np

from .cases import OUTPUT, STATUS, Case, Output, TensorMapSpec

FOLDER = Path(__file__).parent / "records"


def checksum(case: Case) -> int:
    """CRC-32 of everything that determines a case's output."""
    crc = zlib.crc32(f"{case.source}|{case.entry}|{case.grid}|{case.block}|{case.shared_bytes}".encode())
    for argument in case.arguments():
        if isinstance(argument, Output):
            start = b"" if argument.initial is None else argument.initial.tobytes()
            crc = zlib.crc32(f"{argument.shape}{np.dtype(argument.dtype)}".encode() + start, crc)
        elif isinstance(argument, TensorMapSpec):
            crc = zlib.crc32(repr(argument).encode(), crc)
        else:
            crc = zlib.crc32(np.ascontiguousarray(argument).tobytes(), crc)
    return crc


def condense(case: Case, output: np.ndarray) -> np.ndarray:
    """What a record keeps of the output of a launch that didn't fault."""
    if case.keep == STATUS:
        return np.zeros(1, np.uint32)
    if case.keep == OUTPUT:
        return output
    rows = np.ascontiguousarray(output).reshape(-1, output.shape[-1])
    return np.array([zlib.crc32(row.tobytes()) for row in rows], np.uint32).reshape(output.shape[:-1])


def save(group: str, outputs: dict[str, list[np.ndarray]], checksums: dict[str, int], meta: dict) -> Path:
    """Writes ``records/<group>.npz`` atomically; ``outputs`` maps case names to their output arrays."""
    FOLDER.mkdir(exist_ok=True)
    arrays, index = {}, {}
    for name, values in outputs.items():
        index[name] = {
            "checksum": checksums[name],
            "outputs": [[str(v.dtype), list(v.shape)] for v in values],
        }
        for position, value in enumerate(values):
            planes = np.ascontiguousarray(value).reshape(-1).view(np.uint8).reshape(-1, value.dtype.itemsize)
            arrays[f"{name}/{position}"] = np.ascontiguousarray(planes.T)
    arrays["index"] = np.frombuffer(json.dumps({"meta": meta, "cases": index}).encode(), np.uint8)
    path, temporary = FOLDER / f"{group}.npz", FOLDER / f"{group}.tmp.npz"
    np.savez_compressed(temporary, **arrays)
    os.replace(temporary, path)
    return path


def load(group: str) -> tuple[dict[str, list[np.ndarray]], dict[str, int], dict]:
    """Outputs and checksums per case name, and the record's ``meta``. FileNotFoundError if never recorded."""
    with np.load(FOLDER / f"{group}.npz") as data:
        description = json.loads(bytes(data["index"]))
        outputs, checksums = {}, {}
        for name, entry in description["cases"].items():
            checksums[name] = entry["checksum"]
            outputs[name] = [
                np.ascontiguousarray(data[f"{name}/{position}"].T).reshape(-1).view(dtype).reshape(shape)
                for position, (dtype, shape) in enumerate(entry["outputs"])
            ]
    return outputs, checksums, description["meta"]
