"""CUDA C++ of the emulator's tests to PTX."""

from functools import cache

from cuda.bindings import nvrtc

_PRELUDE = """typedef unsigned char u8; typedef unsigned short u16;
typedef unsigned u32; typedef unsigned long long u64;
#line 1
"""


def _check(result: tuple) -> tuple:
    assert result[0] == nvrtc.nvrtcResult.NVRTC_SUCCESS, result[0]
    return result[1:]


@cache
def to_ptx(source: str, arch: str = "sm_90a", *options: str) -> str:
    """PTX of a CUDA C++ source, with line information; ``u8`` to ``u64`` are defined."""
    (program,) = _check(nvrtc.nvrtcCreateProgram((_PRELUDE + source).encode(), b"test.cu", 0, [], []))
    flags = [f"--gpu-architecture={arch}", "-lineinfo", "-std=c++17", *options]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])[0]
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        (size,) = _check(nvrtc.nvrtcGetProgramLogSize(program))
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    (size,) = _check(nvrtc.nvrtcGetPTXSize(program))
    ptx = b" " * size
    _check(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx.rstrip(b"\0").decode()


PTX_HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"


def ptx_kernel(body: str, params: int = 1, registers: str = "", module: str = "") -> str:
    """A PTX kernel ``k`` with 64-bit parameters in %a0, %a1, ... and common registers declared."""
    loads = "".join(f"ld.param.u64 %a{i}, [p{i}];\n" for i in range(params))
    plist = ", ".join(f".param .u64 p{i}" for i in range(params))
    return f"""{PTX_HEADER}{module}
.visible .entry k({plist}) {{
.reg .pred %p<16>; .reg .b16 %h<32>; .reg .b32 %r<64>; .reg .b64 %rd<64>; .reg .f32 %f<64>; .reg .f64 %fd<16>;
.reg .b64 %a<8>; {registers}
{loads}{body}
ret;
}}
"""
