#!/usr/bin/env python3
"""Runs the emulator's hardware cases on a GPU and writes their outputs to tests/emulator/hw/records/.

    python scripts/record_hardware.py             record every group (needs an sm_90 GPU)
    python scripts/record_hardware.py --compile   only compile the kernels, which needs no GPU
    python scripts/record_hardware.py --group wgmma_fp8 --group conversions

Needs numpy and cuda-bindings with NVRTC. A case that fails is reported and left out; the exit status is 1.
Each case runs twice and must give the same bits. Cases run in a worker process: a fault ends a process's use
of the GPU, so after a failure the next case gets a new worker.
"""

import argparse
import ctypes
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "emulator"))
from hw import corpus, records
from hw.cases import STATUS, Case, Output, TensorMapSpec
from hw.tensor_copy_cases import acceptance_specs

ARCHITECTURE = "sm_90a"
SIZE_LIMIT = 4 << 20
# What a copy with impossible operands gives.
FAULTS = ("CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS")
TIMEOUT_S = 30  # for one case, the start of its worker included


class CaseError(Exception):
    """A case that didn't compile or run."""


def check(result: tuple) -> Any:
    """The values of a driver or NVRTC call, or CaseError."""
    status, *values = result
    if int(status) != 0:
        raise CaseError(f"{status!r}")
    return values[0] if len(values) == 1 else values


def compile_source(source: str) -> bytes:
    """Cubin of one translation unit."""
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"case.cu", 0, [], []))
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++17", b"--fmad=false"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(status) != 0:
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise CaseError(f"NVRTC: {bytes(log).decode(errors='replace').strip()}")
    cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program)))
    check(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def compile_all(cases: list[Case]) -> dict[str, bytes | CaseError]:
    """Cubins by source. Compiles in threads: NVRTC calls release the interpreter lock."""

    def attempt(source: str) -> bytes | CaseError:
        try:
            return compile_source(source)
        except CaseError as error:
            return error

    sources = list(dict.fromkeys(case.source for case in cases))
    with ThreadPoolExecutor() as pool:
        return dict(zip(sources, pool.map(attempt, sources), strict=True))


def encode_tensor_map(spec: TensorMapSpec, address: int) -> bytes:
    """The driver's 128 bytes for a map; CaseError if the driver refuses."""
    rank = len(spec.sizes)
    strides = spec.strides or (16,)  # the driver wants an array for rank 1 too
    result = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType(spec.type), rank, address,
        [driver.cuuint64_t(v) for v in spec.sizes], [driver.cuuint64_t(v) for v in strides],
        [driver.cuuint32_t(v) for v in spec.box], [driver.cuuint32_t(v) for v in spec.element_strides],
        driver.CUtensorMapInterleave(spec.interleave), driver.CUtensorMapSwizzle(spec.swizzle),
        driver.CUtensorMapL2promotion(0), driver.CUtensorMapFloatOOBfill(spec.fill),
    )  # fmt: skip
    return ctypes.string_at(check(result).getPtr(), 128)


class Gpu:
    """Device 0 in its primary context."""

    def __init__(self) -> None:
        check(driver.cuInit(0))
        self.device = check(driver.cuDeviceGet(0))
        self.functions: dict[tuple[str, str], object] = {}
        check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(self.device))))

    def describe(self) -> dict:
        name = check(driver.cuDeviceGetName(100, self.device))
        attribute = driver.CUdevice_attribute
        major, minor = (
            check(driver.cuDeviceGetAttribute(a, self.device))
            for a in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return {
            "device": name.decode().strip("\0 "),
            "compute_capability": [major, minor],
            "driver": check(driver.cuDriverGetVersion()),
            "nvrtc": list(check(nvrtc.nvrtcVersion())),
            "architecture": ARCHITECTURE,
        }

    def function(self, case: Case, cubin: bytes) -> Any:
        key = (case.source, case.entry)
        if key not in self.functions:
            module = check(driver.cuModuleLoadData(cubin))
            function = check(driver.cuModuleGetFunction(module, case.entry.encode()))
            self.functions[key] = function
        function = self.functions[key]
        if case.shared_bytes > 48 * 1024:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, limit, case.shared_bytes))
        return function

    def run(self, case: Case, cubin: bytes) -> list[np.ndarray]:
        """Launches a case; its outputs in order."""
        function = self.function(case, cubin)
        arguments = case.arguments()
        buffers: dict[int, int] = {}
        try:
            for position, argument in enumerate(arguments):
                data = argument
                if isinstance(argument, Output):
                    start = argument.initial
                    data = np.zeros(argument.shape, argument.dtype) if start is None else start
                if isinstance(data, np.ndarray):
                    data = np.ascontiguousarray(data)
                    buffers[position] = int(check(driver.cuMemAlloc(max(data.nbytes, 16))))
                    check(driver.cuMemcpyHtoD(buffers[position], data.ctypes.data, data.nbytes))
            values = [self.parameter(argument, i, buffers) for i, argument in enumerate(arguments)]
            pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
            check(
                driver.cuLaunchKernel(
                    function,
                    case.grid,
                    1,
                    1,
                    case.block,
                    1,
                    1,
                    case.shared_bytes,
                    0,
                    ctypes.addressof(pointers),
                    0,
                )
            )
            check(driver.cuCtxSynchronize())
            outputs = []
            for position, argument in enumerate(arguments):
                if isinstance(argument, Output):
                    result = np.empty(argument.shape, argument.dtype)
                    check(driver.cuMemcpyDtoH(result.ctypes.data, buffers[position], result.nbytes))
                    outputs.append(result)
            return outputs
        finally:
            for address in buffers.values():
                driver.cuMemFree(address)

    @staticmethod
    def parameter(argument: Any, position: int, buffers: dict[int, int]) -> ctypes.Array | ctypes.c_uint64:
        """A ctypes object that holds the kernel parameter's bytes."""
        if position in buffers:
            return ctypes.c_uint64(buffers[position])
        if isinstance(argument, TensorMapSpec):
            return ctypes.create_string_buffer(encode_tensor_map(argument, buffers[argument.argument]), 128)
        data = np.asarray(argument).tobytes()
        return ctypes.create_string_buffer(data, len(data))


def work(connection: Connection, group: str) -> None:
    """The worker: answers (case name, cubin) with the outputs of two runs. It ends with the first error."""
    cases = {case.name: case for case in corpus.groups()[group]()}
    try:
        gpu = Gpu()
        while True:
            name, cubin = connection.recv()
            connection.send([gpu.run(cases[name], cubin), gpu.run(cases[name], cubin)])
    except CaseError as error:
        connection.send(str(error))
    except EOFError:  # the parent is done
        pass


class Worker:
    """Runs cases of one group in another process, which is replaced after a failure."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.process: BaseProcess | None = None

    def run(self, case: Case, cubin: bytes) -> list[list[np.ndarray]]:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=work, args=(theirs, self.group), daemon=True)
            self.process.start()
            theirs.close()
        self.connection.send((case.name, cubin))
        try:
            answer = (
                self.connection.recv() if self.connection.poll(TIMEOUT_S) else f"no answer in {TIMEOUT_S} s"
            )
        except EOFError:
            answer = "the worker process died"
        if isinstance(answer, str):
            self.close()
            raise CaseError(answer)
        return answer

    def close(self) -> None:
        if self.process is not None:
            self.connection.close()
            self.process.join(5)
            self.process.kill()
            self.process = None


def record_group(group: str, cases: list[Case], cubins: dict, meta: dict) -> bool:
    """Runs and saves one group; False if a case failed."""
    outputs, checksums, failed = {}, {}, 0
    worker = Worker(group)
    for case in cases:
        try:
            cubin = cubins[case.source]
            if isinstance(cubin, CaseError):
                raise cubin
            first, second = worker.run(case, cubin)
            if any(a.tobytes() != b.tobytes() for a, b in zip(first, second, strict=True)):
                raise CaseError("two runs gave different bits")
            outputs[case.name] = [records.condense(case, value) for value in first]
            checksums[case.name] = records.checksum(case)
        except CaseError as error:
            if case.keep == STATUS and any(fault in str(error) for fault in FAULTS):
                outputs[case.name] = [np.ones(1, np.uint32)]
                checksums[case.name] = records.checksum(case)
                continue
            failed += 1
            print(f"  FAILED {case.name}: {error}", flush=True)
    worker.close()
    path = records.save(group, outputs, checksums, meta)
    print(f"{group}: {len(outputs)} cases, {failed} failed, {path.stat().st_size / 1024:.0f} KiB", flush=True)
    return failed == 0


def record_acceptance(gpu: Gpu) -> bool:
    """Which tensor maps the driver accepts, as one array of 0 and 1."""
    base = int(check(driver.cuMemAlloc(1 << 20)))
    accepted = []
    for spec in acceptance_specs():
        try:
            encode_tensor_map(spec, base + spec.argument)
            accepted.append(1)
        except (CaseError, ValueError, OverflowError):  # the bindings refuse numbers that no enumerator has
            accepted.append(0)
    driver.cuMemFree(base)
    path = records.save(
        "tensor_maps", {"accepted": [np.array(accepted, np.uint8)]}, {"accepted": 0}, gpu.describe()
    )
    print(
        f"tensor_maps: {sum(accepted)} of {len(accepted)} accepted, {path.stat().st_size} bytes", flush=True
    )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true", help="compile the kernels, run nothing")
    parser.add_argument("--group", action="append", help="record only this group; may be repeated")
    options = parser.parse_args()
    started = time.monotonic()
    groups = {
        name: build() for name, build in corpus.groups().items() if not options.group or name in options.group
    }
    every = [case for cases in groups.values() for case in cases]
    cubins = compile_all(every)
    errors = {source: error for source, error in cubins.items() if isinstance(error, CaseError)}
    print(
        f"{len(cubins)} kernels compiled, {len(errors)} failed, {time.monotonic() - started:.1f} s",
        flush=True,
    )
    for case in {case.source: case for case in every if case.source in errors}.values():
        print(f"  {case.name}: {errors[case.source]}")
    if options.compile:
        return 1 if errors else 0
    gpu = Gpu()
    print(gpu.describe(), flush=True)
    good = [record_group(name, cases, cubins, gpu.describe()) for name, cases in groups.items()]
    if not options.group or "tensor_maps" in options.group:
        good.append(record_acceptance(gpu))
    size = sum(path.stat().st_size for path in records.FOLDER.glob("*.npz"))
    print(f"{size / 1024:.0f} KiB in all, {time.monotonic() - started:.1f} s")
    if size > SIZE_LIMIT:
        print(f"records exceed {SIZE_LIMIT} bytes")
    return 0 if all(good) and size <= SIZE_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
