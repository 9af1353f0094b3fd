"""Waiting for a GPU from the host, with a deadline: nothing here blocks for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from megagen.errors import DeviceError

_PROBE_INTERVAL_S = 0.25
_COPY_LIMIT_S = 2.0
_LONGEST_PAUSE_S = 1e-3


class Progress:
    """Two words of device memory, read while kernels run: launches completed, and who aborted.

    A copy engine reads them on a stream that runs nothing else, so neither a running kernel nor one that
    can't start is in the way.
    """

    def __init__(self, launches: torch.Tensor, abort: torch.Tensor, stream: torch.cuda.Stream) -> None:
        self._sources = (launches, abort)
        self._words = torch.zeros(2, dtype=torch.int32, pin_memory=True)
        self._stream = stream

    def launches(self) -> int:
        """Launches that this rank has completed."""
        return self._read(0)

    def aborted_by(self) -> int:
        """1 + the rank that stopped a launch, 0 if none did."""
        return self._read(1)

    def _read(self, index: int) -> int:
        with torch.cuda.stream(self._stream):
            self._words[index : index + 1].copy_(self._sources[index], non_blocking=True)
        event = self._stream.record_event()
        if not _poll(event.query, time.monotonic() + _COPY_LIMIT_S):
            device = self._sources[0].device
            raise DeviceError(f"{device} has not copied 4 bytes for {_COPY_LIMIT_S:g} s; it hangs")
        return int(self._words[index])


def wait_for_streams(
    streams: Sequence[torch.cuda.Stream], progress: Callable[[], int], limit_s: float
) -> bool:
    """Wait for all work queued so far; False if ``progress()`` has kept one value for ``limit_s`` meanwhile.

    Raises:
        DeviceError: a kernel faulted, or another error that the context does not survive.
    """
    try:
        events = [stream.record_event() for stream in streams]

        def done() -> bool:
            return all(event.query() for event in events)

        value, since = None, time.monotonic()
        while not _poll(done, min(time.monotonic() + _PROBE_INTERVAL_S, since + limit_s)):
            now = time.monotonic()
            latest = progress()
            if latest != value:
                value, since = latest, now
            elif now - since >= limit_s:
                return False
    except RuntimeError as error:
        raise DeviceError(f"the GPU failed: {error}") from error
    return True


def _poll(done: Callable[[], bool], deadline: float) -> bool:
    """Whether ``done()`` came true before the deadline (of ``time.monotonic``)."""
    pause = 1e-5
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
    return True
