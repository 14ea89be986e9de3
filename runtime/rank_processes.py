"""The scheduler processes of one engine, one a rank, as their owner sees them."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.resource_tracker
import signal
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

from sgl_aspects.runtime.messages import FailureMessage
from sgl_aspects.runtime.rank_links import RankLinks
from sgl_aspects.runtime.scheduler_process import run_scheduler_process
from sgl_aspects.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)


class RankProcesses:
    """Started when it is made. ``connection`` is the pipe to rank 0, the only one that answers."""

    def __init__(self, server_args: ServerArgs) -> None:
        context = multiprocessing.get_context("spawn")
        count = server_args.tp_size
        #: The ranks meet at a file in it; gone with this object.
        self._folder = tempfile.TemporaryDirectory(prefix="sgl-aspects-") if count > 1 else None
        init_method = f"file://{self._folder.name}/ranks" if self._folder else ""
        to_owner = [context.Pipe(duplex=True) for _ in range(count)]
        between = [context.Pipe(duplex=False) for _ in range(1, count)]
        self._connections = [ours for ours, _ in to_owner]
        self.processes = []
        for rank in range(count):
            peers = [writer for _, writer in between] if rank == 0 else [between[rank - 1][0]]
            links = RankLinks(rank, count, init_method, peers)
            self.processes.append(
                context.Process(
                    target=run_scheduler_process,
                    args=(server_args, to_owner[rank][1], links),
                    name="sgl-aspects-scheduler" + (f"-{rank}" if count > 1 else ""),
                    daemon=True,
                )
            )
        self._failures: dict[int, FailureMessage] = {}
        try:
            for process in self.processes:
                _start_deaf_to_ctrl_c(process)
        except BaseException:
            self.kill()
            self.connection.close()
            raise
        finally:
            # Or the death of a process would not end its pipes.
            for end in [theirs for _, theirs in to_owner] + [end for pair in between for end in pair]:
                end.close()

    @property
    def connection(self) -> Connection:
        return self._connections[0]

    @property
    def sentinels(self) -> list[int]:
        return [process.sentinel for process in self.processes]

    def are_alive(self) -> bool:
        """Whether all of them are."""
        return all(process.is_alive() for process in self.processes)

    def join(self, timeout: float) -> None:
        """Wait until all have ended, so many seconds in all."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            if process.pid is not None:
                process.join()
        if self._folder is not None:
            self._folder.cleanup()

    def failed(self, failure: FailureMessage, rank: int = 0) -> None:
        """Remember the last word of a rank."""
        self._failures.setdefault(rank, failure)

    def cause(self) -> tuple[str, FailureMessage | None]:
        """Who ended first, in words, with the error that it named. Ask before :meth:`kill`.

        One that was killed says nothing, and those that waited for it fail because of that: it comes first.
        """
        for rank, connection in enumerate(self._connections[1:], 1):
            self._read_failure(rank, connection)
        killed = [rank for rank, process in enumerate(self.processes) if (process.exitcode or 0) < 0]
        if killed:
            return f"{self._name(killed[0])} {exit_in_words(self.processes[killed[0]].exitcode)}", None
        if self._failures:
            rank = min(self._failures, key=lambda rank: self._failures[rank].time_ns)
            failure = self._failures[rank]
            return f"{self._name(rank)} failed with {failure.error_type}: {failure.message}", failure
        ended = [rank for rank, process in enumerate(self.processes) if process.exitcode is not None]
        rank = ended[0] if ended else 0
        return f"{self._name(rank)} {exit_in_words(self.processes[rank].exitcode)}", None

    def _read_failure(self, rank: int, connection: Any) -> None:
        try:
            if connection.poll(0):
                self.failed(connection.recv(), rank)
        except (EOFError, OSError):
            logger.debug("rank %d said nothing", rank)

    def _name(self, rank: int) -> str:
        count = len(self.processes)
        return f"the scheduler process of rank {rank}" if count > 1 else "the scheduler process"


def _start_deaf_to_ctrl_c(process: Any) -> None:
    """Start with SIGINT blocked until the process ignores it by itself: Ctrl-C shows no traceback of it."""
    multiprocessing.resource_tracker.ensure_running()  # starting it later would unblock SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "closed its connection"
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = "unknown"
        hint = (
            " (if nobody did that by hand, the system may have run out of memory)"
            if name == "SIGKILL"
            else ""
        )
        return f"was killed by signal {-exit_code}, {name}{hint}"
    return f"ended with exit code {exit_code}"
