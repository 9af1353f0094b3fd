"""Which GPUs reach each other's memory: all of a group must share one NVLink domain."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megagen.errors import NVLinkDomainError
from megagen.runtime.driver import Gpu


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs.

    Attributes:
        host: name and boot id of the machine.
        gpu: UUID of its GPU.
        fabric: cluster and clique of a multi-node NVLink fabric, "" where there is none.
        unreachable: UUIDs of the GPUs of its host whose memory its own can't map.
    """

    host: str
    gpu: str
    fabric: str
    unreachable: tuple[str, ...]


def place_of(gpu: Gpu) -> RankPlace:
    """Where this process's rank runs."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.is_file() else ''}".strip()
    others = [index for index in range(torch.cuda.device_count()) if index != gpu.index]
    apart = [index for index in others if not torch.cuda.can_device_access_peer(gpu.index, index)]
    return RankPlace(host, _uuid(gpu.index), _fabric(gpu), tuple(_uuid(index) for index in apart))


def check_one_domain(places: Sequence[RankPlace]) -> None:
    """Refuses a group whose GPUs can't all map each other's memory; every rank comes to the same result.

    Raises:
        NVLinkDomainError: names two ranks, and what is between them.
    """
    for rank, place in enumerate(places):
        for other, peer in enumerate(places[:rank]):
            reason = _between(peer, place)
            if reason:
                raise NVLinkDomainError(
                    f"group: ranks {other} and {rank} {reason}; all ranks of a layer must be in one NVLink "
                    "domain, so make one group per domain (torch.distributed.new_group)"
                )


def _between(a: RankPlace, b: RankPlace) -> str:
    """Why two ranks can't share memory; empty if they can."""
    if a.host != b.host:
        if a.fabric and a.fabric == b.fabric:
            return ""
        return f"are on different hosts ({a.host} and {b.host}) without a common NVLink fabric"
    if a.gpu == b.gpu:
        return f"use the same GPU {a.gpu}, where MegaMoE.local_group puts several ranks on one"
    if a.gpu in b.unreachable or b.gpu in a.unreachable:
        return f"have GPUs without peer access to each other ({a.gpu} and {b.gpu})"
    return ""


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _fabric(gpu: Gpu) -> str:
    """Cluster and clique of the GPU's NVLink fabric as NVML reports them; "" without one."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        info = nvml.device_get_gpu_fabric_info_v(nvml.device_get_handle_by_uuid(f"GPU-{_uuid(gpu.index)}"))
        cluster = bytes(info.cluster_uuid)
    except Exception:  # NVML has errors of its own; without its word, ranks on different hosts are refused
        return ""
    return f"{cluster.hex()}/{info.clique_id}" if any(cluster) else ""
