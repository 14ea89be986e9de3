"""The scheduler processes of one engine, one a rank, as their owner sees them."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import signal
import tempfile
import time
from typing import Any

from sgl_aspects.isolated import safe_path
from sgl_aspects.runtime.messages import FailureMessage, RankLinks
from sgl_aspects.runtime.processes.worker import LEFT_TO_OWNER, run_scheduler_process
from sgl_aspects.runtime.server_args import ServerArgs

#: The most requests that are named of a batch that failed.
_NAMED = 8


class RankProcesses:
    """Starts the processes. The first of ``connections`` is the pipe to rank 0, which answers for all."""

    def __init__(self, server_args: ServerArgs) -> None:
        context = multiprocessing.get_context("spawn")
        count = server_args.tp_size
        #: The ranks meet at a file in it; it is deleted with this object.
        self._folder = tempfile.TemporaryDirectory(prefix="sgl-aspects-") if count > 1 else None
        init_method = f"file://{self._folder.name}/ranks" if self._folder else ""
        to_owner = [context.Pipe(duplex=True) for _ in range(count)]
        between = [context.Pipe(duplex=False) for _ in range(1, count)]
        self.connections = [ours for ours, _ in to_owner]
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
        #: The failure messages, by rank.
        self.failures: dict[int, FailureMessage] = {}
        try:
            with safe_path():
                for process in self.processes:
                    _start_with_signals_blocked(process)
        except BaseException:
            self.kill()
            self.connections[0].close()
            raise
        finally:
            # Otherwise the pipes of a dead process would stay open.
            for end in [theirs for _, theirs in to_owner] + [end for pair in between for end in pair]:
                end.close()

    def are_alive(self) -> bool:
        """Return whether all processes are alive."""
        return all(process.is_alive() for process in self.processes)

    def join(self, timeout: float) -> None:
        """Wait until all have ended, up to this number of seconds in all."""
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

    def cause(self) -> tuple[str, FailureMessage | None]:
        """Describe the process that ended first, with its error. Call before :meth:`kill`.

        One that was killed reports nothing, and those that waited for it fail because of that: it comes
        first.
        """
        for rank, connection in enumerate(self.connections[1:], 1):
            with contextlib.suppress(EOFError, OSError):  # it reported nothing
                if connection.poll(0):
                    self.failures[rank] = connection.recv()
        exits = {rank: process.exitcode for rank, process in enumerate(self.processes)}
        killed = [rank for rank, code in exits.items() if code is not None and code < 0]
        failure = None
        if self.failures and not killed:
            rank = min(self.failures, key=lambda rank: self.failures[rank].time_ns)
            failure = self.failures[rank]
            what = f"failed with {failure.error_type}: {failure.message} ({failure.place})"
            what += _at_work_on(failure.rids)
        else:
            ended = [rank for rank, code in exits.items() if code is not None]
            rank = (killed or ended or [0])[0]
            what = exit_in_words(exits[rank])
        who = f"the scheduler process of rank {rank}" if len(exits) > 1 else "the scheduler process"
        return f"{who} {what}", failure


def _at_work_on(rids: list[str]) -> str:
    if not rids:
        return ""
    named = ", ".join(map(repr, rids[:_NAMED]))
    more = f" and {len(rids) - _NAMED} more" if len(rids) > _NAMED else ""
    return f", at work on request{'s' if len(rids) > 1 else ''} {named}{more}"


def _start_with_signals_blocked(process: Any) -> None:
    """Start with the owner's signals blocked until the process ignores them by itself."""
    multiprocessing.resource_tracker.ensure_running()  # starting it later would unblock them again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEFT_TO_OWNER)
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
        hint = " (unless you killed it, the system may have run out of memory)" if name == "SIGKILL" else ""
        return f"was killed by signal {-exit_code}, {name}{hint}"
    return f"ended with exit code {exit_code}"
