"""What the exit of a CTA comes after. Shared memory is owned by an executing CTA (PTX ISA, "Shared State Space"), and
every access of another CTA must happen before the owner exits (CUDA programming guide, "Distributed Shared Memory")."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

import numpy as np
import pytest
from cuda_source import to_ptx

from megagen.emulator import Machine
from megagen.errors import MemoryFault

VISIT = r"""
extern "C" __global__ void __cluster_dims__(2) k(u32* out) {
    __shared__ u64 barrier; __shared__ u32 word;
    const u32 own = (u32)__cvta_generic_to_shared(&barrier), place = (u32)__cvta_generic_to_shared(&word);
    u32 rank, mapped_barrier, mapped_place, value = 0;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(mapped_barrier) : "r"(own));
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(mapped_place) : "r"(place));
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(own) : "memory");
        word = 1;
    }
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
    if (rank == 1 && threadIdx.x == 0) { VISITOR }
    if (rank == 0 && threadIdx.x == 0) { OWNER }
    END
    out[rank * 64 + threadIdx.x] = value;
}
"""
LOOK = 'asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(mapped_place) : "memory");'
ADD = 'asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], 1;" :: "r"(mapped_place) : "memory");'
STORE = 'asm volatile("st.shared::cluster.u32 [%0], 2;" :: "r"(mapped_place) : "memory");'
ARRIVE = 'asm volatile("mbarrier.arrive.ORDER.cluster.shared::cluster.b64 _, [%0];" :: "r"(mapped_barrier) : "memory");'
AWAIT = 'asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0; @!p bra W;}" :: "r"(own) : "memory");'
PAUSE = 'asm volatile("nanosleep.u32 100000;" ::: "memory");'
JOIN = 'asm volatile("barrier.cluster.arrive.release;\\n barrier.cluster.wait.acquire;" ::: "memory");'
RELEASE, RELAXED = ARRIVE.replace("ORDER", "release"), ARRIVE.replace("ORDER", "relaxed")


def visit(visitor: str, owner: str = "", end: str = "", seed: int = 0) -> None:
    """CTA 1 does something in the shared memory of CTA 0."""
    source = VISIT.replace("VISITOR", visitor).replace("OWNER", owner).replace("END", end)
    machine = Machine("sm90", sms=2, seed=seed)
    out = machine.alloc(0, 128, np.uint32)
    machine.launch(machine.load(to_ptx(source)), "k", 2, 64, args=[[out]])
    machine.run()


@pytest.mark.parametrize("access", [LOOK, ADD, STORE, RELAXED], ids=["load", "add", "store", "arrive"])
def test_a_cta_outlives_what_others_do_in_its_shared_memory(access):
    visit(access, end=JOIN)
    for seed in range(4):  # not a matter of luck: the owner exits long after the access
        with pytest.raises(MemoryFault, match="isn't ordered before the exit"):
            visit(access, PAUSE, seed=seed)
    with pytest.raises(MemoryFault, match="isn't ordered before the exit"):
        visit(access, end=JOIN.replace("arrive.release", "arrive.relaxed").replace("wait.acquire", "wait"))


def test_a_wait_orders_an_exit():
    """After what the arrive releases, and in any case after the arrive itself."""
    visit(STORE + RELEASE, AWAIT)
    visit(RELAXED, AWAIT)
    with pytest.raises(MemoryFault, match="isn't ordered before the exit"):
        visit(RELEASE + LOOK, AWAIT + PAUSE)
    with pytest.raises(MemoryFault, match="isn't ordered before the exit"):
        visit(LOOK + RELAXED, AWAIT + PAUSE)
