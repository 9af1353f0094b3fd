"""Happens-before through mbarriers: release and acquire patterns, fences, scopes. Source: PTX ISA, "Memory
Consistency Model" (release and acquire patterns, morally strong operations) and mbarrier.arrive, test_wait."""

# ruff: noqa: E501 (embedded CUDA C++ and PTX)

from typing import NamedTuple

import numpy as np
import pytest
from cuda_source import to_ptx

from megagen.emulator import Machine
from megagen.errors import DataRace

SOURCE = r"""
__device__ void sync() { asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory"); }
extern "C" __global__ void __cluster_dims__(2) k(u32* data, u32* out, u32 producer) {
    __shared__ u64 barrier;
    const u32 own = (u32)__cvta_generic_to_shared(&barrier);
    u32 rank, mapped;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(mapped) : "r"(own));
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(own) : "memory");
    sync();
    if (threadIdx.x == 32 && rank == producer) {
        EARLY
        *data = 42;
        BEFORE
        asm volatile("mbarrier.arriveARRIVE.shared::cluster.b64 _, [%0];" :: "r"(mapped) : "memory");
    }
    if (threadIdx.x == 0 && rank == 0) {
        asm volatile("{.reg .pred p; W: mbarrier.try_wait.parityWAIT.shared::cta.b64 p, [%0], 0; @!p bra W;}" :: "r"(own) : "memory");
        AFTER
        *out = *data;
    }
    sync();
}
"""


class Handoff(NamedTuple):
    """Modifiers of arrive and wait, and the fences around them."""

    arrive: str
    wait: str
    before: str = ""
    after: str = ""
    early: str = ""  # before the data is written


def run(handoff: Handoff, producer: int) -> int:
    """What thread 0 of CTA 0 reads; thread 32 of CTA `producer` wrote 42."""
    source = SOURCE.replace("ARRIVE", handoff.arrive).replace("WAIT", handoff.wait)
    for place, fences in (("EARLY", handoff.early), ("BEFORE", handoff.before), ("AFTER", handoff.after)):
        source = source.replace(place, f'asm volatile("{fences}" ::: "memory");' if fences else "")
    machine = Machine("sm90", sms=2)
    data, out = (machine.alloc(0, 1, np.uint32) for _ in range(2))
    data.array[:] = 0
    machine.launch(machine.load(to_ptx(source)), "k", 2, 64, args=[[data, out, producer]])
    machine.run()
    return int(out.view[0])


CLUSTER, CTA = (".release.cluster", ".acquire.cluster"), (".release.cta", ".acquire.cta")
ORDERED_IN_A_CTA = [
    Handoff("", ""),
    Handoff(*CTA),
    Handoff(*CLUSTER),
    Handoff(".release.cluster", ".acquire.cta"),
    Handoff(".release.cta", ".acquire.cluster"),
    Handoff(".relaxed.cta", ".acquire.cta", "fence.acq_rel.cta;"),
    Handoff(".relaxed.cluster", ".acquire.cta", "fence.release.cluster;"),
    Handoff(".release.cta", ".relaxed.cta", after="fence.acq_rel.cta;"),
    Handoff(".relaxed.cta", ".relaxed.cta", "membar.cta;", "membar.cta;"),
]
ORDERED_IN_A_CLUSTER = [
    Handoff(*CLUSTER),
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.acq_rel.cluster;"),
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.release.cluster;"),
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.sc.sys;"),
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.acq_rel.cluster; fence.acq_rel.cta;"),
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.acq_rel.cluster; fence.acquire.cluster;"),
    Handoff(".release.cluster", ".relaxed.cluster", after="fence.acquire.cluster;"),
    Handoff(".release.cluster", ".relaxed.cluster", after="fence.acq_rel.cta; fence.acq_rel.gpu;"),
    Handoff(".relaxed.cluster", ".relaxed.cluster", "fence.release.cluster;", "fence.acquire.cluster;"),
]
UNORDERED_IN_A_CTA = [
    Handoff(".relaxed.cta", ".acquire.cta"),
    Handoff(".release.cta", ".relaxed.cta"),
    Handoff(".relaxed.cta", ".acquire.cta", "fence.acquire.cta;"),
    Handoff(".relaxed.cta", ".acquire.cta", "fence.proxy.async;"),
    Handoff(".relaxed.cta", ".acquire.cta", early="fence.acq_rel.cta;"),
    Handoff(".release.cta", ".relaxed.cta", after="fence.release.cta;"),
    Handoff(".release.cta", ".relaxed.cta", after="fence.proxy.async;"),
    Handoff(".relaxed.cta", ".relaxed.cta", "fence.acq_rel.cta;"),
]
UNORDERED_IN_A_CLUSTER = [
    # The scope of the arrive, of the wait, or of both leaves the other CTA out.
    Handoff("", ".acquire.cluster"),
    Handoff(".release.cluster", ""),
    Handoff(".release.cta", ".acquire.cluster"),
    Handoff(".release.cluster", ".acquire.cta"),
    Handoff(*CTA),
    # So does the scope of a fence, and of what it comes with.
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.acq_rel.cta;"),
    Handoff(".relaxed.cta", ".acquire.cluster", "fence.acq_rel.cluster;"),
    Handoff(".relaxed.cluster", ".acquire.cta", "fence.acq_rel.cluster;"),
    Handoff(".release.cluster", ".relaxed.cluster", after="fence.acq_rel.cta;"),
    Handoff(".release.cluster", ".relaxed.cta", after="fence.acq_rel.cluster;"),
    Handoff(".release.cta", ".relaxed.cluster", after="fence.acq_rel.cluster;"),
    # No fence, or none of the right kind, in the right place.
    Handoff(".relaxed.cluster", ".acquire.cluster"),
    Handoff(".release.cluster", ".relaxed.cluster"),
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.acquire.cluster;"),
    Handoff(".release.cluster", ".relaxed.cluster", after="fence.release.cluster;"),
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.proxy.async;"),
    Handoff(".relaxed.cluster", ".acquire.cluster", "fence.mbarrier_init.release.cluster;"),
    Handoff(".relaxed.cluster", ".acquire.cluster", early="fence.acq_rel.cluster;"),
]


@pytest.mark.parametrize("handoff", ORDERED_IN_A_CTA)
def test_ordered_in_a_cta(handoff: Handoff) -> None:
    assert run(handoff, producer=0) == 42


@pytest.mark.parametrize("handoff", ORDERED_IN_A_CLUSTER)
def test_ordered_in_a_cluster(handoff: Handoff) -> None:
    assert run(handoff, producer=1) == 42


@pytest.mark.parametrize("handoff", UNORDERED_IN_A_CTA)
def test_unordered_in_a_cta(handoff: Handoff) -> None:
    with pytest.raises(DataRace):
        run(handoff, producer=0)


@pytest.mark.parametrize("handoff", UNORDERED_IN_A_CLUSTER)
def test_unordered_in_a_cluster(handoff: Handoff) -> None:
    with pytest.raises(DataRace):
        run(handoff, producer=1)


INITIALIZATION = r"""
extern "C" __global__ void __cluster_dims__(2) k(u32* data) {
    __shared__ u64 barrier;
    u32 rank, mapped, own = (u32)__cvta_generic_to_shared(&barrier);
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(mapped) : "r"(own));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(own) : "memory");
    if (rank == 0) *data = 42;
    asm volatile("FENCE barrier.cluster.arrive.relaxed;\n barrier.cluster.wait.acquire;" ::: "memory");
    if (rank == 1) USE
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
}
"""
ARRIVE = (
    'asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" :: "r"(mapped) : "memory");'
)
READ = "data[1] = data[0];"


def initialize(fence: str, use: str) -> int:
    machine = Machine("sm90", sms=2)
    data = machine.alloc(0, 2, np.uint32)
    data.array[:] = 0
    source = INITIALIZATION.replace("FENCE", fence).replace("USE", use)
    machine.launch(machine.load(to_ptx(source)), "k", 2, 1, args=[[data]])
    machine.run()
    return int(data.view[1])


def test_a_fence_orders_a_relaxed_cluster_barrier() -> None:
    assert initialize("fence.acq_rel.cluster;", READ) == 42
    assert initialize("fence.acq_rel.cluster;", ARRIVE) == 0
    for fence in ("", "fence.acq_rel.cta;", "fence.acquire.cluster;"):
        for use in (READ, ARRIVE):
            with pytest.raises(DataRace):
                initialize(fence, use)


def test_a_fence_of_initializations_orders_nothing_else() -> None:
    assert initialize("fence.mbarrier_init.release.cluster;", ARRIVE) == 0
    with pytest.raises(DataRace):
        initialize("fence.mbarrier_init.release.cluster;", READ)
