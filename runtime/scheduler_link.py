"""The scheduler as its owner sees it: start, send, receive, and notice its end.

One duplex pipe: its end tells either side that the other is gone, whatever killed it. A thread sends, so that
callers never wait for a busy scheduler; another one receives.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from multiprocessing.connection import wait
from typing import Any, Protocol

from sgl_aspects import errors
from sgl_aspects.errors import EngineError, SchedulerDiedError
from sgl_aspects.runtime.messages import FailureMessage, ReadyMessage, ShutdownRequest
from sgl_aspects.runtime.rank_processes import RankProcesses
from sgl_aspects.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: The pipe tells of the scheduler's death at once, unless a forked process holds it open: then this does.
_ALIVE_CHECK_SECONDS = 1.0
#: How long a scheduler that was told to stop may take before it is killed: it finishes the step it is in.
_STOP_SECONDS = 5.0


class Receiver(Protocol):
    """Called in the thread that receives: with each message, and once, last, when the scheduler is gone."""

    def on_message(self, message: Any) -> None: ...

    def on_death(self, error: SchedulerDiedError) -> None: ...


class SchedulerLink:
    """Starts the process when it is made; then ``wait_until_ready``, ``start``, and in the end ``close``."""

    def __init__(self, server_args: ServerArgs) -> None:
        self._owner_pid = os.getpid()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._receiving: threading.Thread | None = None
        self._closing = False
        self.ranks = RankProcesses(server_args)
        self._connection = self.ranks.connection

    def wait_until_ready(self, timeout: float) -> ReadyMessage:
        """Raises what the scheduler raised while starting, EngineError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            wait([self._connection, *self.ranks.sentinels], timeout=_ALIVE_CHECK_SECONDS)
            if self._connection.poll(0) or not self.ranks.are_alive():
                message = self._receive()
                if isinstance(message, ReadyMessage):
                    return message
                if isinstance(message, FailureMessage):
                    self.ranks.failed(message)
                raise self._start_error()
        raise EngineError(
            f"the scheduler process did not load the model within {timeout:g} s: raise startup_timeout, "
            "or look at its output above"
        )

    def start(self, receiver: Receiver) -> None:
        """From now on messages go both ways."""
        threading.Thread(target=self._send_loop, name="sgl-aspects-send", daemon=True).start()
        self._receiving = threading.Thread(
            target=self._receive_loop, args=(receiver,), name="sgl-aspects-receive", daemon=True
        )
        self._receiving.start()

    def send(self, message: Any) -> None:
        """Returns at once; a message to a scheduler that is gone is dropped, the receiver is told of that."""
        self._outbox.put(message)

    def close(self) -> None:
        """Ask the scheduler to stop, kill it where it does not. The receiver is told before this returns."""
        if self._closing or os.getpid() != self._owner_pid:  # a forked child does not own the scheduler
            return
        self._closing = True
        self._outbox.put(ShutdownRequest())
        self.ranks.join(timeout=_STOP_SECONDS if self._receiving else 0)
        self.kill()

    def kill(self) -> None:
        self.ranks.kill()
        if self._receiving is not None and self._receiving is not threading.current_thread():
            self._receiving.join()

    # -- threads -------------------------------------------------------------------------------------

    def _send_loop(self) -> None:
        while True:
            message = self._outbox.get()
            try:
                self._connection.send(message)
            except OSError:  # the scheduler is gone: the other thread says so to everyone
                return
            if isinstance(message, ShutdownRequest):
                return

    def _receive_loop(self, receiver: Receiver) -> None:
        while (message := self._receive()) is not None:
            if isinstance(message, FailureMessage):
                self.ranks.failed(message)
            else:
                receiver.on_message(message)
        # One that has failed ends soon. Where another did, those that wait for it may never.
        self.ranks.processes[0].join(_STOP_SECONDS if self.ranks.are_alive() else _ALIVE_CHECK_SECONDS)
        self._outbox.put(ShutdownRequest())  # ends the sending thread
        death = self._death()
        if not self._closing:
            self.ranks.kill()
        receiver.on_death(death)

    def _receive(self) -> Any:
        """The next message; None once the scheduler is gone."""
        try:
            while not self._connection.poll(_ALIVE_CHECK_SECONDS):
                if not self.ranks.are_alive():
                    return None
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    # -- ends ----------------------------------------------------------------------------------------

    def _death(self) -> SchedulerDiedError:
        what, failure = self.ranks.cause()
        if failure is not None:
            logger.error("%s\n%s", what, failure.traceback)
        elif self._closing:
            return SchedulerDiedError("the engine was shut down")
        return SchedulerDiedError(f"{what}. Start a new Engine.")

    def _start_error(self) -> Exception:
        """What to raise for a scheduler that failed while starting, or ended without a word."""
        self.ranks.join(_ALIVE_CHECK_SECONDS if len(self.ranks.processes) > 1 else _STOP_SECONDS)
        what, failure = self.ranks.cause()
        if failure is not None:
            ours = getattr(errors, failure.error_type, None)
            if isinstance(ours, type) and issubclass(ours, errors.AspectsError):
                return ours(failure.message)
            logger.error("%s\n%s", what, failure.traceback)
            return EngineError(f"{what} (while starting)")
        return SchedulerDiedError(
            f"{what} before it was ready; its output is above. A script that makes an Engine must do so "
            'under `if __name__ == "__main__":`, because the scheduler process imports the script again.'
        )
