"""Cases for cp.async.bulk.tensor in tiled mode, and which tensor maps the driver accepts."""

from dataclasses import replace

import numpy as np

from . import streams
from .cases import STATUS, Case, Output, TensorMapSpec

U8, U16, U32, S32, F16, F32, F64, BF16, F32_FTZ, TF32, TF32_FTZ = 0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12
ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
IMAGE_BYTES = 8192
FILLER = 0xCDCDCDCD


def source(rank: int, store: bool) -> str:
    """A kernel that loads a box into (or stores it from) shared memory, ``offset`` past a 1024-byte boundary.
    A load returns the whole shared image, which was filled with 0xCD before."""
    coordinates = ", ".join(f'"r"(coordinates[{i}])' for i in range(rank))
    name = f"tensor_{'store' if store else 'load'}_{rank}d"
    if store:
        places = ", ".join(f"%{i + 2}" for i in range(rank))
        body = f"""
    for (int i = threadIdx.x; i < {IMAGE_BYTES // 4}; i += 128) image[i] = shared_in[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {{
        asm volatile("cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group [%0, {{{places}}}], [%1];"
                     :: "l"(&map), "r"(base + offset), {coordinates} : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }}"""
        parameters = "const unsigned* shared_in, unsigned* tensor"
    else:
        places = ", ".join(f"%{i + 3}" for i in range(rank))
        body = f"""
    for (int i = threadIdx.x; i < {IMAGE_BYTES // 4}; i += 128) image[i] = {FILLER}u;
    const unsigned barrier = base + {IMAGE_BYTES};
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {{
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(barrier), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1, {{{places}}}], [%2];"
                     :: "r"(base + offset), "l"(&map), "r"(barrier), {coordinates} : "memory");
    }}
    unsigned done = 0;
    for (int tries = 0; !done && tries < 100000; ++tries) {{
        asm volatile("{{\\n.reg .pred p;\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\\n"
                     "selp.u32 %0, 1, 0, p;\\n}}"
                     : "=r"(done) : "r"(barrier) : "memory");
    }}
    __syncthreads();
    if (threadIdx.x == 0) out[{IMAGE_BYTES // 4}] = done;
    for (int i = threadIdx.x; i < {IMAGE_BYTES // 4}; i += 128) out[i] = image[i];"""
        parameters = "const unsigned* tensor, unsigned* out"
    return f"""
struct alignas(64) TensorMap {{ unsigned long long words[16]; }};

extern "C" __global__ void {name}(const __grid_constant__ TensorMap map, {parameters}, const int* coordinates,
                                  int offset, int bytes)
{{
    extern __shared__ unsigned char raw[];
    const unsigned raw_address = static_cast<unsigned>(__cvta_generic_to_shared(raw));
    const unsigned base = (raw_address + 1023) & ~1023u;
    unsigned* image = reinterpret_cast<unsigned*>(raw + (base - raw_address));
{body}
}}
"""


def box_bytes(spec: TensorMapSpec) -> int:
    """Bytes that a copy of the box counts."""
    elements = spec.box[0]
    for box, step in zip(spec.box[1:], spec.element_strides[1:], strict=True):
        elements *= -(-box // step)
    return elements * ELEMENT_BYTES[spec.type]


def dense(kind: int, sizes: tuple[int, ...], pad: int = 0) -> tuple[int, ...]:
    """Strides of a tensor whose rows are padded to a multiple of 16 bytes, plus ``pad`` bytes."""
    strides, pitch = [], -(-sizes[0] * ELEMENT_BYTES[kind] // 16) * 16 + pad
    for size in sizes[1:]:
        strides.append(pitch)
        pitch *= size
    return tuple(strides)


def tensor_bytes(spec: TensorMapSpec) -> int:
    row = spec.sizes[0] * ELEMENT_BYTES[spec.type]
    return -(-max(row, *(s * n for s, n in zip(spec.strides, spec.sizes[1:], strict=True)), 16) // 16) * 16


def tensor_map(kind, sizes, box, swizzle=0, pad=0, steps=None, fill=0, argument=1):
    return TensorMapSpec(
        argument,
        kind,
        tuple(sizes),
        dense(kind, tuple(sizes), pad),
        tuple(box),
        tuple(steps or [1] * len(sizes)),
        swizzle,
        0,
        fill,
    )


def copy_case(
    name: str,
    spec: TensorMapSpec,
    coordinates: tuple[int, ...],
    offset: int,
    store: bool,
    seed: int,
    data: np.ndarray | None = None,
) -> Case:
    rank, size = len(spec.sizes), tensor_bytes(spec)
    position = np.array(coordinates, np.int32)
    if store:
        shared = streams.uint32(seed, IMAGE_BYTES // 4)
        tensor = Output((size // 4,), np.uint32, np.full(size // 4, FILLER, np.uint32))
        arguments = [replace(spec, argument=2), shared, tensor, position, np.int32(offset), np.int32(0)]
    else:
        values = streams.uint8(seed, size) if data is None else data.view(np.uint8)[:size]
        output = Output((IMAGE_BYTES // 4 + 1,))
        arguments = [spec, values, output, position, np.int32(offset), np.int32(box_bytes(spec))]
    return Case(
        name=f"tensor_{'store' if store else 'load'}/{name}",
        source=source(rank, store),
        entry=f"tensor_{'store' if store else 'load'}_{rank}d",
        arguments=lambda: arguments,
        shared_bytes=IMAGE_BYTES + 1024 + 64,
        detail={"map": spec, "coordinates": coordinates, "offset": offset, "store": store},
    )


def copy_cases() -> list[Case]:
    layouts = [
        ("1d", tensor_map(U8, [100], [64]), (48,), 0),
        ("1d_negative", tensor_map(U32, [64], [32]), (-4,), 128),
        ("2d", tensor_map(U8, [96, 20], [48, 7]), (16, 3), 0),
        ("2d_corner", tensor_map(U16, [40, 9], [16, 8], pad=16), (32, 5), 256),
        ("2d_outside", tensor_map(U16, [40, 9], [16, 8]), (40, -9), 0),
        ("2d_element_stride", tensor_map(U8, [64, 30], [32, 16], steps=[1, 3]), (0, 2), 0),
        ("3d", tensor_map(U32, [12, 6, 5], [8, 3, 2]), (4, 4, 3), 0),
        ("3d_element_stride", tensor_map(U8, [32, 9, 8], [16, 4, 5], steps=[2, 2, 3]), (0, 1, -3), 0),
        ("4d", tensor_map(F16, [16, 5, 4, 3], [8, 2, 3, 2]), (8, -1, 2, 1), 0),
        ("5d", tensor_map(U8, [32, 4, 3, 3, 3], [16, 2, 2, 2, 2]), (16, 3, 1, 2, -1), 0),
        ("f64", tensor_map(F64, [10, 4], [4, 4]), (8, 1), 0),
    ]
    for swizzle, span in ((1, 32), (2, 64), (3, 128)):
        layouts += [
            (f"swizzle_{span}", tensor_map(U8, [256, 40], [span, 32], swizzle), (16, 4), 0),
            (f"swizzle_{span}_narrow", tensor_map(U8, [256, 40], [span // 2, 24], swizzle), (32, 0), 0),
            (f"swizzle_{span}_offset", tensor_map(F16, [128, 40], [span // 2, 9], swizzle), (96, 33), 384),
        ]
    cases = []
    for index, (name, spec, coordinates, offset) in enumerate(layouts):
        for store in (False, True) if min(coordinates) >= 0 else (False,):
            cases.append(copy_case(name, spec, coordinates, offset, store, 400 + index))
    values = streams.float32_bits(450, 1024)
    for name, kind in {
        "f16": F16,
        "f32": F32,
        "f64": F64,
        "bf16": BF16,
        "tf32": TF32,
        "f32_ftz": F32_FTZ,
        "tf32_ftz": TF32_FTZ,
    }.items():
        per_row = 64 // ELEMENT_BYTES[kind]
        for fill in (0, 1):
            spec = tensor_map(kind, [per_row, 16], [per_row, 16], fill=fill)
            cases.append(copy_case(f"{name}_fill_{fill}", spec, (per_row // 2, 1), 0, False, 451, values))
    spec = tensor_map(TF32, [16, 16], [16, 16])
    cases.append(copy_case("tf32", spec, (0, 0), 0, True, 460))
    spec = tensor_map(F32_FTZ, [16, 16], [16, 16])
    cases.append(copy_case("f32_ftz", spec, (0, 0), 0, True, 461))
    return cases


def fault_cases() -> list[Case]:
    """Copies that may fault: by alignment and sign of coordinates, by alignment in shared memory."""
    cases = []
    plain, swizzled = tensor_map(U8, [128, 16], [32, 8]), tensor_map(U8, [128, 16], [32, 8], swizzle=3)
    wide = tensor_map(F16, [64, 16], [16, 8])
    variants = [("column", plain, (x, 2), 0) for x in (1, 4, 8, 16, 24, 112, 120, 128)]
    variants += [("column f16", wide, (x, 2), 0) for x in (1, 4, 8, 12)]
    variants += [
        ("negative", plain, position, 0) for position in ((-16, 2), (-8, 2), (0, -1), (-32, -8), (-512, 0))
    ]
    variants += [
        ("beyond", plain, position, 0) for position in ((512, 0), (0, 16), (0, 1000), (2**31 - 16, 0))
    ]
    variants += [("shared", plain, (0, 0), offset) for offset in (16, 32, 64, 128)]
    variants += [("shared swizzled", swizzled, (0, 0), offset) for offset in (128, 256, 384, 512, 1024)]
    variants += [("1d", tensor_map(U8, [128], [32]), (x,), 0) for x in (0, 8, 16, 120)]
    for name, spec, coordinates, offset in variants:
        for store in (False, True):
            case = copy_case(f"{name} {coordinates} {offset}", spec, coordinates, offset, store, 480)
            cases.append(replace(case, keep=STATUS))
    return cases


def acceptance_specs() -> list[TensorMapSpec]:
    """Maps at and beyond each limit, and random mixtures. ``argument`` is an offset from an aligned base."""
    good = tensor_map(F16, [128, 64], [64, 32], 3, argument=0)
    specs = [good]
    changes: list[dict] = [{"argument": offset} for offset in (1, 8, 16, 32)]
    changes += [{"strides": (value,)} for value in (0, 8, 128, 264, 256, 1 << 39, (1 << 40) - 16, 1 << 40)]
    changes += [
        {"box": box} for box in ((0, 32), (4, 32), (8, 32), (12, 8), (64, 256), (64, 257), (72, 8), (128, 8))
    ]
    changes += [{"sizes": sizes} for sizes in ((0, 64), (1, 64), (1 << 32, 64), ((1 << 32) + 1, 64))]
    changes += [{"element_strides": steps} for steps in ((0, 1), (1, 0), (1, 8), (1, 9), (9, 1), (2, 2))]
    changes += [{"swizzle": value} for value in range(8)]
    changes += [{"interleave": value} for value in range(4)]
    changes += [{"fill": value} for value in range(3)]
    changes += [{"type": kind, "fill": fill} for kind in range(17) for fill in (0, 1)]
    specs += [replace(good, **change) for change in changes]
    for kind in (13, 14, 15):
        for swizzle in range(7):
            packed = TensorMapSpec(0, kind, (256, 64), (256,), (128, 16), (1, 1), swizzle)
            specs += [
                packed,
                replace(packed, sizes=(192, 64)),
                replace(packed, box=(64, 16)),
                replace(packed, argument=16),
                replace(packed, strides=(240,)),
            ]
    for interleave in (1, 2):
        for swizzle in range(4):
            for sizes in ((64, 16, 8), (64, 16)):
                specs.append(
                    TensorMapSpec(
                        0,
                        F16,
                        sizes,
                        (64, 1024)[: len(sizes) - 1],
                        (16, 8, 2)[: len(sizes)],
                        (1, 1, 1)[: len(sizes)],
                        swizzle,
                        interleave,
                    )
                )
    for seed in range(160):
        pick = streams.below(5000 + seed, 16, 1 << 20)
        rank = int(1 + pick[0] % 5)
        kind = int(pick[1] % 13)
        sizes = tuple(int(1 + pick[2 + d] % 300) for d in range(rank))
        strides = tuple(int(s) + (8 if pick[7] % 11 == 0 else 0) for s in dense(kind, sizes))
        box = tuple(
            int((1 + pick[8 + d] % 20) * (16 // min(16, ELEMENT_BYTES[kind]) if d == 0 else 1))
            for d in range(rank)
        )
        specs.append(
            TensorMapSpec(
                int(pick[13] % 2 * 16),
                kind,
                sizes,
                strides,
                box,
                (1,) * rank,
                int(pick[14] % 4),
                0,
                int(pick[15] % 3 == 0),
            )
        )
    for rows in (912, 913, 928, 960, 1020):  # boxes of 228 KiB and more
        specs.append(tensor_map(U8, [256, 1024, 4], [256, rows // 4, 4], argument=0))
    specs.append(tensor_map(U8, [256, 1024, 4], [240, 243, 4], argument=0))
    specs += [replace(good, swizzle=swizzle, box=(8, 256), interleave=0) for swizzle in range(4)]
    return specs


GROUPS = {"tensor_copies": copy_cases, "tensor_faults": fault_cases}
