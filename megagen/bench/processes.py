"""One process per GPU, with a deadline on all of it; what the processes find streams to the caller."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megagen import errors
from megagen.errors import DeviceError, MegagenError, MegaMoETimeout, PeerAborted

ENVIRONMENT = {
    # Nothing here uses NVLink multicast, and a broken use of it can take the GPUs of a host out of service.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    # Compile in the process itself: pools of compile processes would outlive one that is killed.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    # Several ranks on one GPU need a hardware queue each.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}

SILENCE_LIMIT_S = 150.0
"""Longest time that a group of processes may go without a message before it counts as hung."""

_EXIT_LIMIT_S = 10.0
_OTHER_ERRORS_S = 3.0
_MAX_ERROR_CHARS = 2000

Result = TypeVar("Result")
Message = dict[str, Any]


class Ranks:
    """This process's place among those of the group.

    Attributes:
        rank, world: as ``torch.distributed`` counts.
        device: this rank's GPU, or the CPU where there is none.
    """

    def __init__(self, rank: int, world: int, device: torch.device, outlet: Connection) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._outlet = outlet

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group for layers: None for one rank alone."""
        return dist.group.WORLD if self.world > 1 else None

    def report(self, kind: str, **content: Any) -> None:
        """Send a message to the caller of ``run_ranks``, from rank 0 only."""
        if self.rank == 0:
            self._outlet.send({"kind": kind, **content})

    def gather(self, value: Result) -> list[Result]:
        """Collective: every rank's value, in order of ranks."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def attempt(self, action: Callable[[], Result]) -> tuple[Result | None, str]:
        """Collective: do it on every rank; (None, what went wrong and where) if it failed on any of them.

        A rank that fails where others wait for it ends by their timeout, or by the caller's.
        """
        result, problem = None, ""
        try:
            result = action()
            self.synchronize()
        except Exception as error:
            _print_unexpected(error)
            problem = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(self.gather(problem)) if text]
        return (None, "; ".join(problems)) if problems else (result, "")


def run_ranks(
    work: Callable[[Ranks, Any], None],
    argument: Any,
    ranks: int,
    *,
    silence_limit_s: float = SILENCE_LIMIT_S,
    deadline: float = float("inf"),
) -> Iterator[Message]:
    """Run ``work(Ranks, argument)`` in one process per rank; yields what rank 0 reports, as it comes.

    Args:
        work: importable function; it and ``argument`` are pickled.
        silence_limit_s: longest time without a message.
        deadline: of ``time.monotonic``, for all of it.

    Raises:
        MegagenError: what a rank raised, as the same class.
        DeviceError: a rank died, or raised something else.
        MegaMoETimeout: nothing was heard for too long, or the deadline has passed.
    """
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes, inlets = [], {}
        try:
            for rank in range(ranks):
                inlet, outlet = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(rank, ranks, folder, outlet, work, argument)
                )
                process.start()
                outlet.close()  # so that the end of the process ends the pipe
                processes.append(process)
                inlets[inlet] = rank
            yield from _messages(inlets, processes, silence_limit_s, deadline)
            for process in processes:
                process.join(_EXIT_LIMIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _messages(
    inlets: dict[Connection, int], processes: list[Any], silence_limit_s: float, deadline: float
) -> Iterator[Message]:
    """Messages of all ranks until each has said that it is done.

    After an error the others may still say theirs: that of a rank which a peer stopped says least.
    """
    failed: list[MegagenError] = []
    while inlets:
        limit = _OTHER_ERRORS_S if failed else silence_limit_s
        ready = wait(list(inlets), timeout=max(0.0, min(limit, deadline - time.monotonic())))
        if not ready and failed:
            break
        if not ready:
            waiting = ", ".join(map(str, inlets.values()))
            in_time = time.monotonic() < deadline
            why = f"nothing was heard for {silence_limit_s:g} s" if in_time else "the time limit has passed"
            raise MegaMoETimeout(f"{why}; the processes of ranks {waiting} were stopped")
        for inlet in ready:
            assert isinstance(inlet, Connection)
            rank = inlets[inlet]
            try:
                message = inlet.recv()
            except (EOFError, OSError):
                del inlets[inlet]
                processes[rank].join(_EXIT_LIMIT_S)
                died = DeviceError(
                    f"the process of rank {rank} died with exit code {processes[rank].exitcode}; "
                    "what it wrote to standard error says more"
                )
                failed.append(died)
                continue
            if message["kind"] == "done":
                del inlets[inlet]
            elif message["kind"] == "error":
                del inlets[inlet]
                failed.append(_error(rank, message))
            else:
                yield message
    if failed:
        raise min(failed, key=lambda error: isinstance(error, PeerAborted))


def _error(rank: int, message: Message) -> MegagenError:
    kind = getattr(errors, message["error"], None)
    if kind is None:
        return DeviceError(f"rank {rank}: {message['error']}: {message['text']}")
    raised: MegagenError = kind(message["text"])
    return raised


def _rank_main(
    rank: int, world: int, folder: str, outlet: Connection, work: Callable[[Ranks, Any], None], argument: Any
) -> None:
    os.environ.update(ENVIRONMENT)
    try:
        ranks = _join(rank, world, folder, outlet)
        work(ranks, argument)
        outlet.send({"kind": "done"})
    except Exception as error:
        _print_unexpected(error)
        outlet.send({"kind": "error", "error": type(error).__name__, "text": str(error)[:_MAX_ERROR_CHARS]})
        os._exit(1)  # peers may be gone, so that leaving the group would hang
    outlet.close()
    dist.destroy_process_group()


def _print_unexpected(error: Exception) -> None:
    """The traceback of an error that is none of this package's own, on standard error."""
    if not isinstance(error, MegagenError):
        traceback.print_exception(error)
        sys.stderr.flush()


def _join(rank: int, world: int, folder: str, outlet: Connection) -> Ranks:
    options: dict[str, Any] = {}
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = options["device_id"] = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=SILENCE_LIMIT_S),
        **options,
    )
    return Ranks(rank, world, device, outlet)
