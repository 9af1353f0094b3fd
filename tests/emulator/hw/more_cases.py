"""Cases of the forms that no other group covers: float64, halves, vector atomics, policies, spellings, tensor
reductions."""

from dataclasses import replace

import numpy as np

from . import streams
from .cases import Case, Output, TensorMapSpec
from .memory_cases import case as kernel
from .scalar_cases import form_case
from .tensor_copy_cases import F16, S32, U8, copy_case, dense, tensor_map


def _simple(form: str, result: str, operands: str) -> Case:
    places = "".join(f", %{i + 1}" for i in range(len(operands)))
    return form_case(form, f"{form} %0{places};", result, operands, "more")


def arithmetic_cases() -> list[Case]:
    cases = []
    for rounding in ("rn", "rz", "rm", "rp"):
        cases += [_simple(f"{name}.{rounding}.f64", "d", "dd") for name in ("add", "sub", "mul", "div")]
        cases += [_simple(f"fma.{rounding}.f64", "d", "ddd"), _simple(f"mad.{rounding}.f64", "d", "ddd")]
        cases += [_simple(f"sub.{rounding}.f32", "f", "ff"), _simple(f"mad.{rounding}.f32", "f", "fff")]
        cases.append(_simple(f"rcp.{rounding}.f64", "d", "d"))
        root = f"sqrt.{rounding}.f64 %0, t;"
        cases.append(
            form_case(f"sqrt.{rounding}.f64", f".reg .f64 t; abs.f64 t, %1; {root}", "d", "d", "more")
        )
    cases += [_simple(f"{name}.f64", "d", "d") for name in ("abs", "neg")]
    cases += [_simple(f"{name}.f64", "d", "dd") for name in ("min", "max", "copysign")]
    cases += [_simple(f"sub.{flags}.f32", "f", "ff") for flags in ("rn.ftz", "rn.sat")]
    for kind, c in (("f16", "h"), ("bf16", "h"), ("f16x2", "r"), ("bf16x2", "r")):
        cases += [_simple(f"{name}.{kind}", c, c) for name in ("neg", "abs")]
        cases += [_simple(f"{name}.{kind}", c, c * 2) for name in ("min", "max")]
    for comparison in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "ltu", "num", "nan"):
        for kind in ("f16", "bf16"):
            text = f".reg .pred p; setp.{comparison}.{kind} p, %1, %2; selp.u32 %0, 1, 0, p;"
            cases.append(form_case(f"setp.{comparison}.{kind}", text, "r", "hh", "more"))
    text = ".reg .pred p, q; setp.lt.f16x2 p|q, %1, %2; selp.u32 %0, 1, 0, p; @q add.u32 %0, %0, 2;"
    cases.append(form_case("setp.lt.f16x2", text, "r", "rr", "more"))
    for form in ("bar.red.and.pred", "bar.red.or.pred"):
        text = (
            ".reg .pred p, q; .reg .b32 t; and.b32 t, %1, 1; setp.ne.b32 p, t, 0; "
            f"{form} q, 0, p; selp.u32 %0, 1, 0, q;"
        )
        cases.append(form_case(form, text, "r", "r", "more"))
    text = ".reg .pred p; .reg .b32 t; and.b32 t, %1, 1; setp.ne.b32 p, t, 0; bar.red.popc.u32 %0, 0, p;"
    cases.append(form_case("bar.red.popc.u32", text, "r", "r", "more"))
    return cases


def _kernel(name: str, body: str, **options) -> Case:
    return replace(kernel(name, body, **options), name=f"more/{name}")


def atomic_cases() -> list[Case]:
    cases = []
    for form, count, c in (("add.v2.f32", 2, "f"), ("add.v4.f32", 4, "f"), ("add.noftz.v2.f16x2", 2, "r")):
        ctype = {"f": "float", "r": "unsigned"}[c]
        places = ", ".join(f"%{i}" for i in range(count))
        values = ", ".join(f"%{count + 1 + i}" for i in range(count))
        loads = ", ".join(f'"={c}"(old[{i}])' for i in range(count))
        stores = ", ".join(f'"{c}"(value(in[tid + {i}]))' for i in range(count))
        body = f"""
    {ctype} old[{count}];
    auto value = [](unsigned word) {{ return static_cast<{ctype}>(word & 0x3fff3fff); }};
    {ctype}* own = reinterpret_cast<{ctype}*>(out) + {count} * tid;
    for (int i = 0; i < {count}; ++i) own[i] = value(in[128 + tid + i]);
    asm volatile("atom.global.{form} {{{places}}}, [%{count}], {{{values}}};"
                 : {loads} : "l"(own), {stores} : "memory");
    asm volatile("red.global.{form} [%0], {{{", ".join(f"%{i + 1}" for i in range(count))}}};"
                 :: "l"(own), {stores} : "memory");
    for (int i = 0; i < {count}; ++i) reinterpret_cast<{ctype}*>(out)[512 + {count} * tid + i] = old[i];"""
        cases.append(_kernel(f"atom red {form}", body))
    for operation in ("exch", "cas"):
        second = "mov.b128 c, {%3, %2};" if operation == "cas" else ""
        place = ", c" if operation == "cas" else ""
        body = f"""
    auto wide = [](unsigned word) {{ return static_cast<unsigned long long>(word); }};
    unsigned long long low, high;
    unsigned long long* own = reinterpret_cast<unsigned long long*>(out) + 2 * tid;
    own[0] = tid & 1 ? 5 : in[tid], own[1] = tid & 1 ? 6 : in[tid + 1];
    asm volatile("{{\\n.reg .b128 a, b, c;\\nmov.b128 b, {{%2, %3}};\\n{second}\\n"
                 "atom.global.{operation}.b128 a, [%4], b{place};\\nmov.b128 {{%0, %1}}, a;\\n}}"
                 : "=l"(low), "=l"(high)
                 : "l"(wide(in[tid])), "l"(wide(in[tid + 1])), "l"(own)
                 : "memory");
    reinterpret_cast<unsigned long long*>(out)[256 + 2 * tid] = low;
    reinterpret_cast<unsigned long long*>(out)[257 + 2 * tid] = high;"""
        cases.append(_kernel(f"atom.{operation}.b128", body))
    for form, value in (
        ("red.global.inc.u32", "37u"),
        ("red.global.dec.u32", "37u"),
        ("red.relaxed.gpu.global.add.noftz.f16x2", "0x3c004000u"),
        ("red.global.add.noftz.bf16x2", "0x3f804000u"),
        ("red.shared.xor.b32", "in[tid]"),
    ):
        target = "shared_address(cells + (tid & 3))" if "shared" in form else "out + (tid & 3)"
        c = "r" if "shared" in form else "l"
        body = f"""
    __shared__ unsigned cells[4];
    if (tid < 4) cells[tid] = 0;
    __syncthreads();
    asm volatile("{form} [%0], %1;" :: "{c}"({target}), "r"({value}) : "memory");
    __syncthreads();
    if (tid < 4) out[4 + tid] = cells[tid];"""
        cases.append(_kernel(form, body, outputs=8))
    return cases


def access_cases() -> list[Case]:
    body = """
    unsigned long long even, cut;
    unsigned value, other, hinted;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 0.5;" : "=l"(even));
    asm volatile("createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %0, [%1], 512, 1024;"
                 : "=l"(cut) : "l"(in));
    asm volatile("ld.mmio.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(in + tid) : "memory");
    asm volatile("ldu.global.u32 %0, [%1];" : "=r"(other) : "l"(in + tid + 1));
    asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;"
                 : "=r"(hinted) : "l"(in + tid + 2), "l"(even) : "memory");
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" :: "l"(in) : "memory");
    asm volatile("pmevent 3;");
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;"
                 :: "l"(out + tid), "r"(value + other), "l"(cut) : "memory");
    asm volatile("st.mmio.relaxed.sys.global.u32 [%0], %1;"
                 :: "l"(out + 128 + tid), "r"(hinted) : "memory");"""
    cases = [_kernel("policies mmio ldu", body, outputs=256)]
    body = """
    __shared__ unsigned cell;
    unsigned mine = in[0];
    auto spaces = [](const void* p) {
        unsigned found = 0;
        SPACES
        return found;
    };
    unsigned long long generic;
    const unsigned long long window = shared_address(&cell);
    asm volatile("cvta.shared.u64 %0, %1;" : "=l"(generic) : "l"(window));
    out[tid] = spaces(in + tid);
    out[128 + tid] = spaces(&cell);
    out[256 + tid] = spaces(&mine);
    out[384 + tid] = generic == reinterpret_cast<unsigned long long>(&cell);"""
    test = (
        'asm volatile("{{\\n.reg .pred p;\\nisspacep.{} p, %1;\\n@p or.b32 %0, %0, {};\\n}}" '
        ': "+r"(found) : "l"(p));'
    )
    spaces = ("global", "shared", "local", "const")
    body = body.replace("SPACES", "\n".join(test.format(s, 1 << i) for i, s in enumerate(spaces)))
    cases.append(_kernel("isspacep cvta", body, outputs=512))
    body = """
    out[tid] = 7;
    if (tid & 1) asm volatile("exit;");
    out[tid] = in[tid];"""
    cases.append(_kernel("exit", body, outputs=128))
    body = """
    extern __device__ unsigned twice_plus(unsigned, unsigned);
    out[tid] = twice_plus(in[tid], tid) ^ twice_plus(tid, in[tid]);"""
    made = _kernel("call", body, outputs=128)
    function = (
        "__device__ __noinline__ unsigned twice_plus(unsigned a, unsigned b) { return 2 * a + b / 3; }\n"
    )
    source = function + made.source.replace(
        "    extern __device__ unsigned twice_plus(unsigned, unsigned);\n", ""
    )
    cases.append(replace(made, source=source))
    body = """
    __shared__ __align__(16) unsigned buffer[512];
    for (int i = tid; i < 512; i += 128) buffer[i] = 0xcdcdcdcd;
    __syncthreads();
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(shared_address(buffer) + 16 * tid), "l"(in + 4 * (tid ^ 3)) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");
    __syncthreads();
    for (int i = tid; i < 512; i += 128) out[i] = buffer[i];"""
    cases.append(_kernel("cp.async.wait_all", body, outputs=512))
    body = """
    __shared__ __align__(128) unsigned buffer[256];
    __shared__ unsigned long long barrier;
    unsigned rank, target, owner;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const unsigned at = shared_address(&barrier);
    for (int i = tid; i < 256; i += 128) buffer[i] = in[i] + rank;
    if (tid == 0) init_barrier(at, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(target) : "r"(shared_address(buffer + 128)), "r"(rank ^ 1));
    asm("getctarank.shared::cluster.u32 %0, %1;" : "=r"(owner) : "r"(target));
    if (tid == 0) {
        unsigned remote;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(at), "r"(rank ^ 1));
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" :: "r"(at) : "memory");
        asm volatile("FORM [%0], [%1], 512, [%2];"
                     :: "r"(target), "r"(shared_address(buffer)), "r"(remote) : "memory");
    }
    wait_parity(at, 0);
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
    for (int i = tid; i < 256; i += 128) out[blockIdx.x * 256 + i] = buffer[i] ^ owner;"""
    for operation in ("add.u32", "xor.b32", "max.u32"):
        form = f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{operation}"
        text = body.replace("FORM", form)
        name = f"cp.reduce.async.bulk shared {operation}"
        cases.append(_kernel(name, text, outputs=512, grid=2, prefix="__cluster_dims__(2, 1, 1)"))
    return cases


def tensor_reduction_cases() -> list[Case]:
    """A box of 32-bit integers in shared memory added to, or compared with, a tensor of two dimensions."""
    cases = []
    for operation in ("add", "min", "max", "and", "or", "xor"):
        name = f"tensor_reduce_{operation}"
        source = f"""
struct alignas(64) TensorMap {{ unsigned long long words[16]; }};

extern "C" __global__ void {name}(const __grid_constant__ TensorMap map, const unsigned* in, unsigned* out)
{{
    __shared__ __align__(128) unsigned box[128];
    box[threadIdx.x] = in[threadIdx.x];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {{
        const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(box));
        asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
        asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {{%1, %1}}];"
                     :: "l"(&map), "r"(0) : "memory");
        asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.bulk_group "
                     "[%0, {{%2, %3}}], [%1];"
                     :: "l"(&map), "r"(from), "r"(12), "r"(3) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }}
}}
"""
        sizes = (22, 16)
        spec = TensorMapSpec(2, S32, sizes, dense(S32, sizes), (16, 8), (1, 1))
        start = streams.uint32(970, 24 * 16)
        arguments = [spec, streams.uint32(971, 128), Output((24 * 16,), np.uint32, start)]
        cases.append(Case(f"more/tensor {operation}", source, name, lambda arguments=arguments: arguments))
    return cases


def tensor_edge_cases() -> list[Case]:
    """Stores and loads across the end of rows that are no multiple of 16 bytes."""
    maps = {
        "1d": (tensor_map(U8, [90], [64]), (48,)),
        "1d beyond": (tensor_map(U8, [35], [64]), (0,)),
        "2d": (tensor_map(U8, [90, 9], [64, 4]), (48, 7)),
        "2d padded": (tensor_map(F16, [33, 9], [32, 4], pad=32), (16, 2)),
        "3d": (tensor_map(F16, [13, 5, 3], [8, 2, 2]), (8, 4, 1)),
    }
    cases = []
    for name, (spec, coordinates) in maps.items():
        for store in (False, True):
            made = copy_case(f"edge {name}", spec, coordinates, 0, store, 980)
            cases.append(replace(made, name=f"more/{'store' if store else 'load'} edge {name}"))
    return cases


def more_cases() -> list[Case]:
    return [
        *arithmetic_cases(),
        *atomic_cases(),
        *access_cases(),
        *tensor_reduction_cases(),
        *tensor_edge_cases(),
    ]


GROUPS = {"more": more_cases}
