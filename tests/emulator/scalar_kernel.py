"""Runs one PTX instruction per lane on given bit patterns."""

from collections.abc import Sequence

import numpy as np
from cuda_source import ptx_kernel

from megagen.emulator import Machine

_LOAD = {
    "r": "cvt.u32.u64 %r{n}, %rd{n};",
    "l": "mov.b64 %rd{n}, %rd{n};",
    "h": "cvt.u16.u64 %h{n}, %rd{n};",
    "f": "cvt.u32.u64 %r{n}, %rd{n}; mov.b32 %f{n}, %r{n};",
    "d": "mov.b64 %fd{n}, %rd{n};",
    "p": "setp.ne.u64 %p{n}, %rd{n}, 0;",
}
_NAME = {"r": "%r{n}", "l": "%rd{n}", "h": "%h{n}", "f": "%f{n}", "d": "%fd{n}", "p": "%p{n}"}
_STORE = {
    "r": "cvt.u64.u32 %rd0, %r0;",
    "l": "mov.b64 %rd0, %rd0;",
    "h": "cvt.u64.u16 %rd0, %h0;",
    "f": "mov.b32 %r0, %f0; cvt.u64.u32 %rd0, %r0;",
    "d": "mov.b64 %rd0, %fd0;",
    "p": "selp.u64 %rd0, 1, 0, %p0;",
}


def evaluate(instruction: str, types: str, rows: Sequence[Sequence[int]], **options: object) -> list[int]:
    """Results of ``instruction``, in which {0} is the result and {1}, {2}, ... are operands; one row a lane.

    ``types`` has one letter for the result and each operand: r b32, l b64, h b16, f float32, d float64,
    p predicate.    Operands and results are bit patterns.
    """
    assert len(rows) <= 32
    operands = len(types) - 1
    names = [_NAME[letter].format(n=n) for n, letter in enumerate(types)]
    body = ["mov.u32 %r60, %tid.x; mul.wide.u32 %rd60, %r60, 8;"]
    for n in range(1, operands + 1):
        body.append(f"add.u64 %rd61, %a1, %rd60; ld.global.u64 %rd{n}, [%rd61+{(n - 1) * 256}];")
        body.append(_LOAD[types[n]].format(n=n))
    body.append(instruction.format(*names) + ("" if instruction.endswith("; }}") else ";"))
    body.append(_STORE[types[0]] + " add.u64 %rd61, %a0, %rd60; st.global.u64 [%rd61], %rd0;")
    machine = Machine("sm90", **options)
    module = machine.load(ptx_kernel("\n".join(body), 2))
    out = machine.alloc(0, 32, np.uint64)
    inputs = machine.alloc(0, (max(1, operands), 32), np.uint64)
    table = np.zeros((max(1, operands), 32), np.uint64)
    for lane, row in enumerate(rows):
        for n, value in enumerate(row):
            table[n, lane] = np.uint64(value % (1 << 64))
    inputs.array[:] = table
    machine.launch(module, "k", 1, 32, args=[[out, inputs]])
    machine.run()
    return [int(v) for v in out.view[: len(rows)]]
