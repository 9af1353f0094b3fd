"""Cases of memory, atomic, matrix-move, barrier, bulk-copy and cluster instructions.

Each kernel has ``in`` (1024 random words) and writes ``out``; ``tid`` is the thread in the CTA. Results don't
depend on timing: where threads race, only the order-independent outcome is written.
"""

from . import streams
from .cases import DIGEST, EXACT, Case, Output

WORDS = 1024

PRELUDE = """
__device__ static unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ static void init_barrier(unsigned barrier, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
__device__ static void wait_parity(unsigned barrier, unsigned parity) {
    asm volatile("{\\n.reg .pred p;\\nagain:\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\\n"
                 "@!p bra again;\\n}" :: "r"(barrier), "r"(parity) : "memory");
}
"""


def case(
    name: str, body: str, *, outputs: int = WORDS, grid: int = 1, block: int = 128, prefix: str = ""
) -> Case:
    """``outputs`` words in all; the record keeps a checksum per 32. ``prefix``: attributes of the kernel."""
    entry = "memory_" + "".join(c if c.isalnum() else "_" for c in name)
    attributes = prefix or f"__launch_bounds__({block})"
    source = f"""{PRELUDE}
extern "C" __global__ void {attributes} {entry}(const unsigned* in, unsigned* out)
{{
    const unsigned tid = threadIdx.x;
    {body}
}}
"""
    values = streams.uint32(900, WORDS)
    shape = (outputs // 32, 32) if outputs % 32 == 0 else (1, outputs)
    arguments = [values, Output(shape)]
    return Case(
        name=f"memory/{name}",
        source=source,
        entry=entry,
        arguments=lambda: arguments,
        grid=grid,
        block=block,
        agreement=EXACT,
        keep=DIGEST,
    )


def access_cases() -> list[Case]:
    """Loads and stores of every width, vector and qualifier, through global, shared and local memory."""
    cases = []
    for kind, c in (("u8", "r"), ("s8", "r"), ("u16", "h"), ("s16", "h")):
        ctype = {"r": "unsigned", "h": "unsigned short"}[c]
        body = f"""
    {ctype} value;
    const char* from = reinterpret_cast<const char*>(in) + 2 * tid;
    asm volatile("ld.global.{kind} %0, [%1];" : "={c}"(value) : "l"(from));
    out[tid] = static_cast<int>(value);
    asm volatile("st.global.{kind} [%0], %1;"
                 :: "l"(reinterpret_cast<char*>(out + 128) + 4 * tid), "{c}"(value) : "memory");"""
        cases.append(case(f"ld st {kind}", body, outputs=256))
    for vector, width in (("v2.u32", 2), ("v4.u32", 4), ("v2.u64", 4), ("v4.u16", 2), ("v2.u8", 0)):
        if not width:
            continue
        count, kind = int(vector[1]), vector.split(".")[1]
        c, ctype = {
            "u32": ("r", "unsigned"),
            "u64": ("l", "unsigned long long"),
            "u16": ("h", "unsigned short"),
        }[kind]
        names = [f"v{i}" for i in range(count)]
        loads = ", ".join(f'"={c}"({name})' for name in names)
        stores = ", ".join(f'"{c}"({name})' for name in reversed(names))
        places = ", ".join(f"%{i}" for i in range(count))
        body = f"""
    {ctype} {", ".join(names)};
    asm volatile("ld.global.nc.{vector} {{{places}}}, [%{count}];" : {loads} : "l"(in + {width} * tid));
    asm volatile("st.global.{vector} [%{count}], {{{places}}};"
                 :: {stores}, "l"(out + {width} * tid) : "memory");"""
        cases.append(case(f"ld st {vector}", body, outputs=128 * width))
    for qualifier in (
        "volatile",
        "relaxed.cta",
        "relaxed.gpu",
        "relaxed.sys",
        "acquire.cta",
        "acquire.gpu",
        "acquire.sys",
        "weak",
        "ca",
        "cg",
        "cs",
        "lu",
        "cv",
        "L1::no_allocate",
        "L1::evict_last",
    ):
        position = (
            f"global.{qualifier}"
            if qualifier[:2] in ("ca", "cg", "cs", "lu", "cv", "L1")
            else f"{qualifier}.global"
        )
        body = f"""
    unsigned value;
    asm volatile("ld.{position}.b32 %0, [%1];" : "=r"(value) : "l"(in + tid) : "memory");
    out[tid] = value;"""
        cases.append(case(f"ld {position}", body, outputs=128))
    for qualifier in ("volatile", "relaxed.gpu", "relaxed.sys", "release.cta", "release.gpu", "release.sys"):
        body = f"""
    asm volatile("st.{qualifier}.global.b32 [%0], %1;" :: "l"(out + tid), "r"(in[tid]) : "memory");"""
        cases.append(case(f"st {qualifier}", body, outputs=128))
    body = """
    __shared__ unsigned buffer[256];
    const unsigned address = shared_address(buffer + (tid ^ 5));
    asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(in[tid]) : "memory");
    __syncthreads();
    unsigned value, generic;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared_address(buffer + tid)) : "memory");
    asm volatile("ld.b32 %0, [%1];" : "=r"(generic) : "l"(buffer + (tid ^ 1)) : "memory");
    out[2 * tid] = value;
    out[2 * tid + 1] = generic;"""
    cases.append(case("ld st shared generic", body, outputs=256))
    body = """
    unsigned local[16];
    for (int i = 0; i < 16; ++i) local[in[i] & 15] = in[tid + i], local[(in[i] + 3) & 15] ^= tid;
    for (int i = 0; i < 16; ++i) local[(in[tid] + i) & 15] += i;
    unsigned sum = 0;
    for (int i = 0; i < 16; ++i) sum = sum * 31 + local[(i + tid) & 15];
    out[tid] = sum;"""
    body = body.replace("unsigned local[16];", "unsigned local[16] = {};")
    cases.append(case("local memory", body, outputs=128))
    return cases


def atomic_cases() -> list[Case]:
    """Every operation and type on global and shared memory, each thread on its own word; reductions of all
    threads to a few words, where order doesn't show."""
    cases = []
    types = {
        "u32": ("add", "min", "max", "inc", "dec"),
        "s32": ("add", "min", "max"),
        "b32": ("and", "or", "xor", "exch", "cas"),
        "u64": ("add", "min", "max"),
        "s64": ("min", "max"),
        "b64": ("and", "or", "xor", "exch", "cas"),
        "f32": ("add",),
    }
    for space in ("global", "shared"):
        for kind, operations in types.items():
            wide = kind.endswith("64")
            c, ctype = (
                ("l", "unsigned long long")
                if wide
                else ("f", "float")
                if kind == "f32"
                else ("r", "unsigned")
            )
            for operation in operations:
                second = f', "{c}"(static_cast<{ctype}>(in[tid + 7]))' if operation == "cas" else ""
                place = ", %3" if operation == "cas" else ""
                own = "buffer + tid" if space == "shared" else f"reinterpret_cast<{ctype}*>(out + 256) + tid"
                address = f'"r"(shared_address({own}))' if space == "shared" else f'"l"({own})'
                start = f"static_cast<{ctype}>(in[tid + 3])"
                if operation == "cas":
                    start = f"(tid & 1 ? {start} : static_cast<{ctype}>(in[tid]))"
                setup = f"*({own}) = {start};"
                body = f"""
    __shared__ {ctype} buffer[128];
    {setup}
    __syncthreads();
    {ctype} old;
    asm volatile("atom.{space}.{operation}.{kind} %0, [%1], %2{place};"
                 : "={c}"(old) : {address}, "{c}"(static_cast<{ctype}>(in[tid])){second} : "memory");
    __syncthreads();
    reinterpret_cast<{ctype}*>(out)[tid] = old;
    const {ctype} after = *({own});
    __syncthreads();
    reinterpret_cast<{ctype}*>(out + 256)[tid] = after;"""
                body = body.replace(
                    "__shared__", "__shared__" if space == "shared" else "[[maybe_unused]] __shared__"
                )
                cases.append(case(f"atom.{space}.{operation}.{kind}", body, outputs=512))
    for form in (
        "red.global.add.u32",
        "red.release.gpu.global.add.u32",
        "red.relaxed.sys.global.add.s32",
        "red.global.or.b32",
        "red.global.max.u32",
    ):
        body = f"""
    asm volatile("{form} [%0], %1;" :: "l"(out + (tid & 3)), "r"(in[tid]) : "memory");"""
        cases.append(case(form, body, outputs=4))
    for semantics in ("relaxed", "acquire", "release", "acq_rel"):
        for scope in ("cta", "gpu", "sys"):
            form = f"atom.{semantics}.{scope}.global.add.u32"
            body = f"""
    unsigned old;
    asm volatile("{form} %0, [%1], %2;" : "=r"(old) : "l"(out + 128 + tid), "r"(in[tid]) : "memory");
    out[tid] = old;"""
            cases.append(case(form, body, outputs=256))
    for kind in ("noftz.f16x2", "noftz.bf16x2"):
        body = f"""
    out[128 + tid] = 0x3c003c00;
    unsigned old;
    asm volatile("atom.global.add.{kind} %0, [%1], %2;"
                 : "=r"(old) : "l"(out + 128 + tid), "r"(in[tid] & 0xbfffbfff) : "memory");
    out[tid] = old;"""
        cases.append(case(f"atom.global.add.{kind}", body, outputs=256))
    return cases


def matrix_cases() -> list[Case]:
    """ldmatrix and stmatrix."""
    cases = []
    for count in (1, 2, 4):
        for transposed in ("", ".trans"):
            registers = ", ".join(f"%{i}" for i in range(count))
            outs = ", ".join(f'"=r"(v[{i}])' for i in range(count))
            ins = ", ".join(f'"r"(v[{i}])' for i in range(count))
            body = f"""
    __shared__ __align__(16) unsigned buffer[1024];
    for (int i = tid; i < 1024; i += 32) buffer[i] = in[i];
    __syncwarp();
    unsigned v[{count}];
    asm volatile("ldmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 {{{registers}}}, [%{count}];"
                 : {outs} : "r"(shared_address(buffer + (tid * 7 % 32) * 8 + 256)) : "memory");
    for (int i = 0; i < {count}; ++i) out[i * 32 + tid] = v[i];
    for (int i = 0; i < {count}; ++i) v[i] = in[512 + i * 32 + tid];
    __syncwarp();
    asm volatile("stmatrix.sync.aligned.m8n8.x{count}{transposed}.shared.b16 [%{count}], {{{registers}}};"
                 :: {ins}, "r"(shared_address(buffer + (tid * 5 % 32) * 8 + 512)) : "memory");
    __syncwarp();
    for (int i = tid; i < 512; i += 32) out[128 + i] = buffer[512 + i];"""
            cases.append(case(f"ldmatrix stmatrix x{count}{transposed}", body, outputs=640, block=32))
    return cases


def barrier_cases() -> list[Case]:
    """mbarrier states, phases and counts; named barriers."""
    cases = []
    body = """
    __shared__ unsigned long long barrier;
    const unsigned at = shared_address(&barrier);
    if (tid == 0) {
        unsigned long long state;
        unsigned pending, done;
        init_barrier(at, 3);
        for (int i = 0; i < 7; ++i) {
            asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at) : "memory");
            asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
            asm volatile("{\\n.reg .pred p;\\nmbarrier.test_wait.shared::cta.b64 p, [%1], %2;\\n"
                         "selp.u32 %0, 1, 0, p;\\n}"
                         : "=r"(done) : "r"(at), "l"(state) : "memory");
            out[4 * i] = pending;
            out[4 * i + 1] = done;
            for (int parity = 0; parity < 2; ++parity) {
                asm volatile("{\\n.reg .pred p;\\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\\n"
                             "selp.u32 %0, 1, 0, p;\\n}" : "=r"(done) : "r"(at), "r"(parity) : "memory");
                out[4 * i + 2 + parity] = done;
            }
        }
    }"""
    cases.append(case("mbarrier arrive test_wait pending_count", body, outputs=28, block=32))
    body = """
    __shared__ unsigned long long barrier;
    const unsigned at = shared_address(&barrier);
    if (tid == 0) {
        unsigned done;
        init_barrier(at, 2);
        int step = 0;
        auto observe = [&] {
            for (int parity = 0; parity < 2; ++parity) {
                asm volatile("{\\n.reg .pred p;\\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\\n"
                             "selp.u32 %0, 1, 0, p;\\n}" : "=r"(done) : "r"(at), "r"(parity) : "memory");
                out[2 * step + parity] = done;
            }
            ++step;
        };
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 48;" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 32;" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 8;" :: "r"(at) : "memory");
        asm volatile("mbarrier.arrive_drop.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 8;" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 1;" :: "r"(at) : "memory");
        observe();
        asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(at) : "memory");
    }"""
    cases.append(case("mbarrier expect_tx complete_tx arrive_drop", body, outputs=18, block=32))
    body = """
    __shared__ unsigned long long barrier;
    __shared__ unsigned buffer[128];
    const unsigned at = shared_address(&barrier);
    if (tid == 0) init_barrier(at, 128);
    __syncthreads();
    for (unsigned phase = 0; phase < 5; ++phase) {
        buffer[tid] = in[tid + phase];
        asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" :: "r"(at) : "memory");
        wait_parity(at, phase & 1);
        out[phase * 128 + tid] = buffer[tid ^ 37];
        __syncthreads();
    }"""
    cases.append(case("mbarrier phases", body, outputs=640))
    body = """
    __shared__ unsigned buffer[128];
    if (tid < 64) {
        buffer[tid] = in[tid];
        asm volatile("barrier.cta.arrive 3, 128;" ::: "memory");
        asm volatile("barrier.cta.sync 4, 64;" ::: "memory");
        out[tid] = buffer[63 - tid];
    } else {
        asm volatile("barrier.cta.sync 3, 128;" ::: "memory");
        out[tid] = buffer[tid - 64] + 1;
    }"""
    cases.append(case("barrier arrive sync named", body, outputs=128))
    return cases


def copy_cases() -> list[Case]:
    """cp.async, bulk copies in each direction, and bulk reductions."""
    cases = []
    load = """
    __shared__ __align__(128) unsigned buffer[1024];
    __shared__ unsigned long long barrier;
    const unsigned at = shared_address(&barrier), data = shared_address(buffer);
    for (int i = tid; i < 1024; i += 128) buffer[i] = 0xcdcdcdcd;
    if (tid == 0) init_barrier(at, 1);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
"""
    body = (
        load
        + """
    if (tid == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1040;" :: "r"(at) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                     "[%0], [%1], 1024, [%2];"
                     :: "r"(data + 256), "l"(in + 64), "r"(at) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16, [%2];"
                     :: "r"(data), "l"(in), "r"(at) : "memory");
    }
    wait_parity(at, 0);
    for (int i = tid; i < 1024; i += 128) out[i] = buffer[i];"""
    )
    cases.append(case("cp.async.bulk load", body))
    store = """
    __shared__ __align__(128) unsigned buffer[1024];
    for (int i = tid; i < 1024; i += 128) {
        buffer[i] = in[i]VALUE;
        out[i] = START;
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    if (tid == 0) {
        asm volatile("COPY.bulk_groupKIND [%0], [%1], 1024;"
                     :: "l"(out + 128), "r"(shared_address(buffer + 256)) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_groupREAD 0;" ::: "memory");
    }"""

    def stores(copy: str, kind: str = "", value: str = "", start: str = "7", read: str = "") -> str:
        text = (
            store.replace("COPY", copy).replace("KIND", kind).replace("VALUE", value).replace("START", start)
        )
        return text.replace("READ", read)

    cases.append(case("cp.async.bulk store", stores("cp.async.bulk.global.shared::cta")))
    cases.append(
        case("cp.async.bulk store wait read", stores("cp.async.bulk.global.shared::cta", read=".read"))
    )
    reduce = "cp.reduce.async.bulk.global.shared::cta"
    for operation, kind in (
        ("add", "u32"),
        ("add", "s32"),
        ("add", "u64"),
        ("min", "u32"),
        ("max", "s32"),
        ("inc", "u32"),
        ("dec", "u32"),
        ("and", "b32"),
        ("or", "b32"),
        ("xor", "b64"),
    ):
        body = stores(reduce, f".{operation}.{kind}", start="in[i ^ 1] ^ in[i]")
        cases.append(case(f"cp.reduce.async.bulk {operation}.{kind}", body))
    for kind, start in (
        ("add.f32", "0x3f800000"),
        ("add.noftz.f16", "0x3c003c00"),
        ("add.noftz.bf16", "0x3f803f80"),
    ):
        body = stores(reduce, f".{kind}", " & 0xbfffbfff", start)
        cases.append(case(f"cp.reduce.async.bulk {kind}", body))
    for size in (4, 8, 16):
        for valid in (0, size // 2, size):
            cache = "cg" if size == 16 else "ca"
            body = f"""
    __shared__ __align__(16) unsigned buffer[512];
    for (int i = tid; i < 512; i += 128) buffer[i] = 0xcdcdcdcd;
    __syncthreads();
    asm volatile("cp.async.{cache}.shared.global [%0], [%1], {size}, %2;"
                 :: "r"(shared_address(buffer) + {size} * tid), "l"(in + {size // 4} * (tid ^ 3)),
                    "r"({valid}) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();
    for (int i = tid; i < 512; i += 128) out[i] = buffer[i];"""
            cases.append(case(f"cp.async {size} of {valid}", body, outputs=512))
    body = """
    __shared__ __align__(16) unsigned buffer[128];
    __shared__ unsigned long long barrier;
    const unsigned at = shared_address(&barrier);
    if (tid == 0) init_barrier(at, 128);
    __syncthreads();
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"(shared_address(buffer + tid)), "l"(in + 2 * tid) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(at) : "memory");
    wait_parity(at, 0);
    out[tid] = buffer[127 - tid];"""
    cases.append(case("cp.async.mbarrier.arrive.noinc", body, outputs=128))
    return cases


def cluster_cases() -> list[Case]:
    """Distributed shared memory in clusters of two and four."""
    cases = []
    setup = """
    __shared__ __align__(128) unsigned buffer[256];
    __shared__ unsigned long long barrier;
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    const unsigned peer = (rank + 1) % size, at = shared_address(&barrier);
    for (int i = tid; i < 256; i += 128) buffer[i] = 0;
    if (tid == 0) init_barrier(at, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    auto map = [](unsigned address, unsigned target) {
        unsigned mapped;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(target));
        return mapped;
    };
"""
    finish = """
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
    for (int i = tid; i < 256; i += 128) out[blockIdx.x * 256 + i] = buffer[i];"""
    bodies = {
        "st.shared::cluster": """
    asm volatile("st.shared::cluster.u32 [%0], %1;"
                 :: "r"(map(shared_address(buffer + tid), peer)), "r"(in[tid] + rank) : "memory");""",
        "ld.shared::cluster": """
    buffer[tid] = in[tid] ^ rank;
    asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
    unsigned value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(value) : "r"(map(shared_address(buffer + tid), peer)) : "memory");
    buffer[128 + tid] = value;""",
        "atom.shared::cluster": """
    [[maybe_unused]] unsigned old;
    asm volatile("atom.shared::cluster.add.u32 %0, [%1], %2;"
                 : "=r"(old) : "r"(map(shared_address(buffer + (tid & 7)), 0)), "r"(in[tid]) : "memory");
    asm volatile("red.relaxed.cluster.shared::cluster.max.u32 [%0], %1;"
                 :: "r"(map(shared_address(buffer + 8 + (tid & 7)), 0)), "r"(in[tid]) : "memory");""",
        "mbarrier.arrive.shared::cluster": """
    if (tid == 0) {
        asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                     :: "r"(map(at, peer)) : "memory");
    }
    wait_parity(at, 0);
    buffer[tid] = in[tid] + rank;""",
        "st.async": """
    if (tid == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" :: "r"(at) : "memory");
    }
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 :: "r"(map(shared_address(buffer + tid), peer)), "r"(in[tid] + rank), "r"(map(at, peer))
                 : "memory");
    wait_parity(at, 0);""",
        "red.async": """
    if (tid == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" :: "r"(at) : "memory");
    }
    asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 "
                 "[%0], %1, [%2];"
                 :: "r"(map(shared_address(buffer + (tid & 15)), peer)), "r"(in[tid]), "r"(map(at, peer))
                 : "memory");
    wait_parity(at, 0);""",
        "cp.async.bulk shared to shared": """
    for (int i = tid; i < 128; i += 128) buffer[i] = in[i] + rank;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (tid == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" :: "r"(at) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                     "[%0], [%1], 512, [%2];"
                     :: "r"(map(shared_address(buffer + 128), peer)), "r"(shared_address(buffer)),
                        "r"(map(at, peer)) : "memory");
    }
    wait_parity(at, 0);""",
        "cp.async.bulk multicast": """
    if (tid == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(at), "r"(256 * size) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                     "[%0], [%1], 256, [%2], %3;"
                     :: "r"(shared_address(buffer + 64 * rank)), "l"(in + 64 * rank), "r"(at),
                        "h"(static_cast<unsigned short>((1 << size) - 1)) : "memory");
    }
    wait_parity(at, 0);""",
        "special registers": """
    unsigned values[4];
    asm("mov.u32 %0, %%clusterid.x;" : "=r"(values[0]));
    asm("mov.u32 %0, %%nclusterid.x;" : "=r"(values[1]));
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(values[2]));
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(values[3]));
    if (tid < 4) buffer[tid] = values[tid];
    if (tid == 4) buffer[tid] = rank;
    if (tid == 5) buffer[tid] = size;""",
    }
    for name, body in bodies.items():
        for size in (2, 4):
            text = setup + body + finish
            cases.append(
                case(
                    f"{name} of {size}",
                    text,
                    outputs=4 * size * 128,
                    grid=2 * size,
                    prefix=f"__cluster_dims__({size}, 1, 1)",
                )
            )
    return cases


def control_cases() -> list[Case]:
    """Register reallocation, dependent launch, sleeping, fences, branches by table."""
    cases = []
    body = """
    if (tid < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;" ::: "memory");
        out[tid] = in[tid] * 3;
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 160;" ::: "memory");
        out[tid] = in[tid] * 5;
    }"""
    cases.append(case("setmaxnreg", body, outputs=256, block=256, prefix="__launch_bounds__(256, 2)"))
    fences = [
        "membar.cta",
        "membar.gl",
        "membar.sys",
        "fence.proxy.async",
        "fence.proxy.async.global",
        "fence.proxy.alias",
    ]
    fences += [
        f"fence.{semantics}.{scope}"
        for semantics in ("sc", "acq_rel")
        for scope in ("cta", "cluster", "gpu", "sys")
    ]
    lines = "\\n".join(f"{fence};" for fence in fences)
    body = f"""
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("nanosleep.u32 20;");
    asm volatile("{lines}" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("prefetch.global.L2 [%0];" :: "l"(in));
    asm volatile("prefetchu.L1 [%0];" :: "l"(in));
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], 256;" :: "l"(in));
    out[tid] = in[tid] + 1;"""
    cases.append(case("fences and hints", body, outputs=128))
    body = """
    unsigned value = in[tid];
    asm volatile("{\\n.reg .b32 i;\\nand.b32 i, %0, 3;\\n"
                 "table: .branchtargets first, second, third, fourth;\\n"
                 "brx.idx i, table;\\n"
                 "first: add.u32 %0, %0, 17;\\nbra.uni end;\\nsecond: mul.lo.u32 %0, %0, 5;\\nbra.uni end;\\n"
                 "third: not.b32 %0, %0;\\nbra.uni end;\\nfourth: shr.u32 %0, %0, 3;\\nend:\\n}"
                 : "+r"(value));
    out[tid] = value;"""
    cases.append(case("brx.idx", body, outputs=128))
    body = """
    unsigned value = in[tid], steps = 0;
    while (value > 1 && steps < 200) {
        value = value & 1 ? value / 2 + 1 : value / 3;
        if ((value & 7) == tid % 8) break;
        ++steps;
    }
    out[tid] = value * 256 + steps;"""
    cases.append(case("divergent loop", body, outputs=128))
    return cases


def memory_cases() -> list[Case]:
    return [
        *access_cases(),
        *atomic_cases(),
        *matrix_cases(),
        *barrier_cases(),
        *copy_cases(),
        *cluster_cases(),
        *control_cases(),
    ]


GROUPS = {"memory": memory_cases}
