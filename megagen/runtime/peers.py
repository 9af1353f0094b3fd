"""How the ranks of a group talk on the host while they are set up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from megagen.contract import Contract
from megagen.errors import ContractMismatch, PeerAborted

T = TypeVar("T")


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


def together(peers: Peers, step: str, make: Callable[[], T]) -> list[T]:
    """Everybody's ``make()``, by rank: a step of the set-up that succeeds on all ranks or fails on all.

    Raises:
        PeerAborted: it failed on another rank; on that rank, what ``make`` raised.
    """
    value, problem = None, None
    try:
        value = make()
    except Exception as error:  # whatever it is, the others must not wait for ever
        problem = error
    reports = peers.gather((value, str(problem) if problem else ""))
    if problem is not None:
        raise problem
    for rank, (_, text) in enumerate(reports):
        if text:
            raise PeerAborted(f"rank {rank} failed while {step}: {text}")
    return [made for made, _ in reports]


def agree_on(contract: Contract, peers: Peers) -> None:
    """Collective. ContractMismatch on every rank unless all have this contract; names a difference."""
    reports = peers.gather((contract.hash, contract.to_dict()))
    first_hash, first = reports[0]
    for rank, (other_hash, other) in enumerate(reports):
        if other_hash == first_hash:
            continue
        differences = [
            f"{key}: {first.get(key)} on rank 0, {other.get(key)} on rank {rank}"
            for key in sorted(first.keys() | other.keys())
            if first.get(key) != other.get(key)
        ]
        raise ContractMismatch(
            f"ranks 0 and {rank} disagree on {'; '.join(differences) or 'the buffer layout'}; "
            "give every rank the same arguments and the same megagen"
        )
