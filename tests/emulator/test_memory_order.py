"""Happens-before: what synchronizes, what doesn't, in which scope."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import to_ptx

from megagen.emulator import Machine
from megagen.errors import DataRace

HANDOFF = r"""
extern "C" __global__ void k(u32* data, u32* flag, u32* out, u32 producer) {
    const u32 me = BLOCK;
    u32 seen = 0;
    if (me == producer) {
        *data = 42;
        RELEASE
    } else {
        do { ACQUIRE } while (!seen);
        AFTER
        *out = *data;
    }
}
"""
SPLIT = "st.release.{0}.global.u32 [%0], 1;"


def handoff(
    release: str, acquire: str, after: str = "", *, across: str = "ctas", seed: int = 0, **options: object
) -> int:
    """A value handed from one thread to another; `release` and `acquire` are PTX with the flag's address as %0 (%1)."""
    source = HANDOFF.replace(
        "BLOCK", {"ctas": "blockIdx.x", "threads": "threadIdx.x / 32", "ranks": "(data[2] == 9)"}[across]
    )
    source = source.replace("RELEASE", f'asm volatile("{release}" :: "l"(flag) : "memory");')
    source = source.replace("ACQUIRE", f'asm volatile("{acquire}" : "=r"(seen) : "l"(flag) : "memory");')
    source = source.replace("AFTER", f'asm volatile("{after}" ::: "memory");' if after else "")
    ranks = 2 if across == "ranks" else 1
    machine = Machine("sm90", ranks=ranks, sms=2, seed=seed, **options)
    data, flag, out = (machine.alloc(0, 4, np.uint32) for _ in range(3))
    for buffer in (data, flag, out):
        buffer.array[:] = 0
    grid, block = (2, 1) if across == "ctas" else (1, 64 if across == "threads" else 1)
    module = machine.load(to_ptx(source.replace("BLOCK", "blockIdx.x")))
    if across == "ranks":
        source = source.replace("(data[2] == 9)", "producer")
        module = machine.load(to_ptx(source.replace("me == producer", "me == 1")))
        machine.launch(module, "k", 1, 1, args=[[data, flag, out, 1], [data, flag, out, 0]])
    else:
        machine.launch(module, "k", grid, block, args=[[data, flag, out, 0]])
    machine.run()
    return int(out.view[0])


ORDERED = [
    ("st.release.gpu.global.u32 [%0], 1;", "ld.acquire.gpu.global.u32 %0, [%1];", "", "ctas"),
    ("st.release.sys.global.u32 [%0], 1;", "ld.acquire.sys.global.u32 %0, [%1];", "", "ranks"),
    ("st.release.cta.global.u32 [%0], 1;", "ld.acquire.cta.global.u32 %0, [%1];", "", "threads"),
    ("red.release.gpu.global.add.u32 [%0], 1;", "ld.acquire.gpu.global.u32 %0, [%1];", "", "ctas"),
    ("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%0], 1;", "ld.relaxed.gpu.global.u32 %0, [%1];", "fence.acq_rel.gpu;", "ctas"),
    ("membar.gl; st.volatile.global.u32 [%0], 1;", "ld.volatile.global.u32 %0, [%1];", "membar.gl;", "ctas"),
    ("fence.sc.sys; red.relaxed.sys.global.or.b32 [%0], 1;", "ld.relaxed.sys.global.u32 %0, [%1];", "fence.sc.sys;", "ranks"),
    ("st.release.gpu.global.u32 [%0], 1;", "atom.acquire.gpu.global.or.b32 %0, [%1], 0;", "", "ctas"),
    ("atom.acq_rel.gpu.global.exch.b32 _, [%0], 1;", "atom.acq_rel.gpu.global.add.u32 %0, [%1], 0;", "", "ctas"),
]  # fmt: skip
UNORDERED = [
    ("st.relaxed.gpu.global.u32 [%0], 1;", "ld.acquire.gpu.global.u32 %0, [%1];", "", "ctas"),
    ("st.release.gpu.global.u32 [%0], 1;", "ld.relaxed.gpu.global.u32 %0, [%1];", "", "ctas"),
    ("st.release.cta.global.u32 [%0], 1;", "ld.acquire.cta.global.u32 %0, [%1];", "", "ctas"),
    ("st.release.gpu.global.u32 [%0], 1;", "ld.acquire.gpu.global.u32 %0, [%1];", "", "ranks"),
    ("fence.acq_rel.cta; st.relaxed.gpu.global.u32 [%0], 1;", "ld.relaxed.gpu.global.u32 %0, [%1];", "fence.acq_rel.gpu;", "ctas"),
    ("fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%0], 1;", "ld.relaxed.gpu.global.u32 %0, [%1];", "", "ctas"),
    ("st.volatile.global.u32 [%0], 1;", "ld.volatile.global.u32 %0, [%1];", "membar.gl;", "ctas"),
    ("st.global.u32 [%0], 1;", "ld.acquire.gpu.global.u32 %0, [%1];", "", "ctas"),
]  # fmt: skip


@pytest.mark.parametrize(("release", "acquire", "after", "across"), ORDERED)
def test_ordered(release: str, acquire: str, after: str, across: str) -> None:
    for seed in range(4):
        assert handoff(release, acquire, after, across=across, seed=seed) == 42


@pytest.mark.parametrize(("release", "acquire", "after", "across"), UNORDERED)
def test_unordered(release: str, acquire: str, after: str, across: str) -> None:
    with pytest.raises(DataRace):
        handoff(release, acquire, after, across=across)


def test_race_checking_can_be_turned_off() -> None:
    assert handoff(*UNORDERED[0][:3], races=False) == 42


def run(body: str, block: int = 64, grid: int = 1, words: int = 64, **options: object) -> np.ndarray:
    """``k(u32* out)`` with t the thread and a shared array s[256]; returns out."""
    source = f'extern "C" __global__ void k(u32* out) {{ __shared__ u32 s[256]; const u32 t = threadIdx.x; {body} }}'
    machine = Machine("sm90", sms=2, **options)
    out = machine.alloc(0, words, np.uint32)
    out.array[:] = 0
    machine.launch(machine.load(to_ptx(source), source), "k", grid, block, args=[[out]])
    machine.run()
    return out.view.copy()


def test_a_barrier_orders_a_cta() -> None:
    assert list(run("s[t] = t; __syncthreads(); out[t] = s[63 - t];")) == list(range(63, -1, -1))
    with pytest.raises(
        DataRace,
        match=r"by rank 0 SM 0 warp \d lane \d+ at PTX line \d+ .*test\.cu:1.* isn't ordered after the",
    ):
        run("s[t] = t; out[t] = s[63 - t];")


def test_a_missing_second_barrier_is_found() -> None:
    body = "for (u32 i = 0; i < 3; i++) {{ s[t] = t + i; __syncthreads(); out[t] += s[(t + 32) % 64]; {} }}"
    run(body.format("__syncthreads();"))
    with pytest.raises(DataRace, match=r"isn't ordered after the"):
        for seed in range(10):
            run(body.format(""), seed=seed)


def test_lanes_are_threads_of_their_own() -> None:
    exchange = "s[t] = t; {} out[t] = s[t ^ 1];"
    run(exchange.format("__syncwarp();"), block=32, words=32)
    with pytest.raises(DataRace):
        run(exchange.format(""), block=32, words=32)
    # Collectives exchange values; they order no memory, unless that is asked for.
    vote = exchange.format("__any_sync(~0u, t);")
    with pytest.raises(DataRace):
        run(vote, block=32, words=32)
    run(vote, block=32, words=32, collectives_order=True)


def test_a_lane_releases_what_it_knows_only() -> None:
    body = r"""
    s[t] = t; if (t == 0) s[64] = 0; {} __syncthreads();
    if (t < 32) {{
        s[t] += 1; {}
        if (t == 0) asm volatile("st.release.cta.shared.u32 [%0], 1;" :: "r"((u32)__cvta_generic_to_shared(&s[64])) : "memory");
    }} else {{
        u32 seen;
        do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"((u32)__cvta_generic_to_shared(&s[64])) : "memory"); while (!seen);
        out[t] = s[t - 32];
    }}"""
    assert list(run(body.format("", "__syncwarp();"))[32:]) == list(range(1, 33))
    with pytest.raises(DataRace):
        run(body.format("", ""))


def test_release_sequences_pass_through_other_threads_atomics() -> None:
    # Threads of three warps add to a counter with release; whoever sees 3 has acquired from all.
    body = r"""
    const u32 c = (u32)__cvta_generic_to_shared(&s[200]);
    if (t == 0) s[200] = 0;
    __syncthreads();
    if (t % 32 == 0 && t < 96) {{ s[t / 32] = 7 + t / 32; asm volatile("red.{0}.cta.shared.add.u32 [%0], 1;" :: "r"(c) : "memory"); }}
    if (t == 96) {{
        u32 seen;
        do asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(c) : "memory"); while (seen != 3);
        out[0] = s[0] + s[1] + s[2];
    }}"""
    for seed in range(5):
        assert run(body.format("release"), block=128, seed=seed)[0] == 24
    with pytest.raises(DataRace):
        run(body.format("relaxed"), block=128)


def test_atomics_do_not_race_but_mixed_accesses_do() -> None:
    assert run("atomicAdd(out, 1);")[0] == 64
    with pytest.raises(DataRace):
        run("atomicAdd(out, 1); if (t == 40) out[1] = out[0];")
    with pytest.raises(DataRace):
        run("if (t == 40) out[0] = 0; atomicAdd(out, 1);")


def test_atomics_of_too_small_a_scope_race() -> None:
    add = 'asm volatile("red.relaxed.{}.global.add.u32 [%0], 1;" :: "l"(out) : "memory");'
    assert run(add.format("gpu"), grid=2)[0] == 128
    with pytest.raises(DataRace, match=r"both are strong, but not in one scope"):
        run(add.format("cta"), grid=2)


def test_bytes_of_a_word_are_checked_on_their_own() -> None:
    body = (
        "((unsigned char*)s)[t] = t; __syncthreads(); out[t] = ((unsigned char*)s)[t ^ 1] + ((u16*)s)[t / 2];"
    )
    run(body)
    run("((unsigned char*)out)[t] = t;")
    with pytest.raises(DataRace):
        run("((unsigned char*)s)[t] = t; out[t] = ((unsigned char*)s)[t ^ 1];")


def test_all_lanes_storing_to_one_address_is_not_a_race() -> None:
    assert run("out[0] = 5;", block=32)[0] == 5
    with pytest.raises(DataRace):
        run("out[0] = 5;", block=64)


def test_reads_do_not_race() -> None:
    run("if (t == 0) s[0] = 3; __syncthreads(); out[t] = s[0];", block=64)
