"""How the ranks of a group talk on the host while they are set up."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist


class Peers(Protocol):
    """The ranks of a group as one of them sees them."""

    rank: int
    ranks: int

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank. Collective; also a barrier."""
        ...


class OneProcess:
    """Ranks that live in this process and are set up alike: one alone, or a local group."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.ranks


class ProcessGroupPeers:
    """One rank per process, in a ``torch.distributed`` group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values


def peers_of(group: dist.ProcessGroup | None) -> Peers:
    """The ranks of a group; None is this process alone."""
    if group is None or dist.get_world_size(group) == 1:
        return OneProcess()
    return ProcessGroupPeers(group)
