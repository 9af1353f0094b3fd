"""The status block: what a kernel reports of a launch, and the exception that it means."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megagen.errors import InputError, MegagenError, MegaMoETimeout, PeerAborted
from megagen.protocol import AWAITED_TEXT, STATUS_FIELDS, STUCK_BITS, Awaited, RoleId

_WORD = {field.name: index for index, field in enumerate(STATUS_FIELDS)}


class StatusBlock:
    """A status block in pinned host memory, which kernels write while the host reads.

    Attributes:
        address: what kernels are given.
        words: the block as numbers.
        quiet: the block's bytes while it holds nothing that an exception has not told of.
    """

    def __init__(self) -> None:
        pinned = torch.cuda.is_available()
        self._memory = torch.zeros(len(STATUS_FIELDS), dtype=torch.int32, pin_memory=pinned)
        self.address = self._memory.data_ptr()
        self.words = memoryview(self._memory.numpy().data).cast("B").cast("I")
        self._expect(dropped_ids=0)

    def clear(self) -> None:
        self._memory.zero_()
        self._expect(dropped_ids=0)

    def record(self) -> dict[str, int]:
        """Every field by its name."""
        return {name: self.words[index] for name, index in _WORD.items()}

    def take_error(self, rank: int, timeout_s: float) -> MegagenError | None:
        """The exception that the block calls for, None if all is well. Dropped ids are reported once."""
        record = self.record()
        if record["stuck"]:
            return stuck(rank, record["stuck"], timeout_s)
        if record["code"]:
            return failure(record, timeout_s)
        if record["aborted_by"]:
            return peer_aborted(rank, record["aborted_by"] - 1)
        dropped = (record["dropped_ids"] - self._reported_drops) % (1 << 32)
        if dropped:
            self._expect(record["dropped_ids"])
            return InputError(
                f"topk_ids: rank {rank} dropped {dropped} ids that name no expert since the last report; "
                "give -1 for no expert, or an expert of the shape"
            )
        return None

    def _expect(self, dropped_ids: int) -> None:
        """From now on this count of dropped ids, and nothing else, is no news."""
        self._reported_drops = dropped_ids
        values = [dropped_ids if name == "dropped_ids" else 0 for name in _WORD]
        self.quiet = b"".join(value.to_bytes(4, "little") for value in values)


def failure(record: Mapping[str, int], timeout_s: float) -> MegagenError:
    """The exception of a status record whose ``code`` is set."""
    awaited = Awaited(record["code"])
    if awaited is Awaited.NUM_TOKENS_IN_RANGE:
        return InputError(
            f"num_tokens={record['seen']} on rank {record['rank']} is above {record['expected']}, the rows "
            "that the call or the buffer has; nothing was computed. reset() on all ranks, then go on"
        )
    text = (
        f"rank {record['rank']}, SM {record['sm']}, role {RoleId(record['role']).name.lower()}: waited more "
        f"than {timeout_s:g} s for {AWAITED_TEXT[awaited].format(peer=record['peer'])} "
        f"(expected {record['expected']}, seen {record['seen']}, launch {record['launch']})"
    )
    if awaited is Awaited.RANK_BEFORE_PULL:
        text += f"; rank {record['peer']} has not made this call, has died or hangs"
    return MegaMoETimeout(f"{text}. Every rank must call; reset() on all ranks makes the buffer usable again")


def stuck(rank: int, word: int, timeout_s: float) -> MegaMoETimeout:
    """The exception of a kernel that trapped: a role never did what the protocol promises."""
    parts = []
    for width in reversed(STUCK_BITS):
        parts.append(word & (1 << width) - 1)
        word >>= width
    sm, index, awaited, role = parts
    return MegaMoETimeout(
        f"rank {rank}, SM {sm}, role {RoleId(role).name.lower()}: waited more than {2 * timeout_s:g} s for "
        f"{AWAITED_TEXT[Awaited(awaited)].format(peer=index)}, which another role of its SM owes it: a "
        "defect of the kernel, or a copy that never ended. It trapped; the process can't use the GPU any more"
    )


def peer_aborted(rank: int, by: int) -> PeerAborted:
    """The exception of a rank that another one stopped."""
    return PeerAborted(
        f"rank {by} stopped the launch in which rank {rank} took part; rank {by} says why. "
        "reset() on all ranks makes the buffer usable again"
    )
