"""The scheduler as its owner sees it: start, send, receive, and notice its end.

One duplex pipe: when it closes, either side sees that the other is gone, whatever killed it. A thread sends,
so that callers never wait for a busy scheduler; another one receives.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import pickle
import queue
import threading
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from sgl_aspects import errors
from sgl_aspects.errors import EngineError, SchedulerDiedError
from sgl_aspects.platforms import current_platform_choice
from sgl_aspects.runtime.messages import (
    FailureMessage,
    ProfileRequest,
    ReadyMessage,
    Reply,
    ShutdownRequest,
    StatsRequest,
    UpdateWeightsRequest,
)
from sgl_aspects.runtime.processes.ranks import RankProcesses
from sgl_aspects.runtime.server_args import ServerArgs

if TYPE_CHECKING:
    from sgl_aspects.runtime.frontend.manager import RequestManager

logger = logging.getLogger(__name__)

#: The pipe closes at the scheduler's death, unless a forked process holds it open: then this reports it.
_ALIVE_CHECK_SECONDS = 1.0
#: Seconds that a stopping scheduler may take before it is killed: it finishes its current step.
_STOP_SECONDS = 5.0


class SchedulerLink:
    """Starts the process when it is made; then ``wait_until_ready``, ``start``, and in the end ``close``."""

    def __init__(self, server_args: ServerArgs) -> None:
        self._owner_pid = os.getpid()
        #: Messages as bytes; None ends the thread that sends.
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._receiving: threading.Thread | None = None
        self._closing = False
        #: Questions that wait for their answer, by number.
        self._questions: dict[int, concurrent.futures.Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        #: Why the scheduler no longer answers.
        self._death: str | None = None
        self.ranks = RankProcesses(server_args)
        self._connection = self.ranks.connections[0]

    def wait_until_ready(self, timeout: float) -> ReadyMessage:
        """Raises what the scheduler raised while starting, EngineError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            sentinels = [process.sentinel for process in self.ranks.processes]
            wait([self._connection, *sentinels], timeout=_ALIVE_CHECK_SECONDS)
            if self._connection.poll(0) or not self.ranks.are_alive():
                message = self._receive()
                if isinstance(message, ReadyMessage):
                    return message
                raise self._start_error()
        raise EngineError(
            f"the scheduler process did not load the model within {timeout:g} s: raise startup_timeout, "
            "or look at its output above"
        )

    def start(self, manager: RequestManager) -> None:
        """Start the threads; ``manager`` gets the outputs, and is notified of the death."""
        threading.Thread(target=self._send_loop, name="sgl-aspects-send", daemon=True).start()
        self._receiving = threading.Thread(
            target=self._receive_loop, args=(manager,), name="sgl-aspects-receive", daemon=True
        )
        self._receiving.start()

    def send(self, message: Any) -> None:
        """Queue a message; one to a scheduler that is gone is dropped, and the receiver is notified."""
        # here, where the caller gets the error of an object that cannot be pickled
        self._outbox.put(pickle.dumps(message))

    def ask(
        self, question: ProfileRequest | StatsRequest | UpdateWeightsRequest, timeout: float | None = None
    ) -> Any:
        """Return the answer's value; raises the error that it carries, and TimeoutError when it is late."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        with self._lock:
            if self._death is not None:
                raise SchedulerDiedError(self._death)
            question.number = next(self._numbers)
            self._questions[question.number] = future
        self.send(question)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:  # before Python 3.11 not the built-in one
            raise TimeoutError(f"the scheduler did not answer within {timeout:g} s") from None

    def close(self) -> None:
        """Stop the scheduler, or else kill it. The receiver is notified before this returns."""
        if self._closing or os.getpid() != self._owner_pid:  # a forked child does not own the scheduler
            return
        self._closing = True
        self.send(ShutdownRequest())
        self.ranks.join(timeout=_STOP_SECONDS if self._receiving else 0)
        self.kill()

    def kill(self) -> None:
        self.ranks.kill()
        if self._receiving is not None and self._receiving is not threading.current_thread():
            self._receiving.join()

    # -- threads -------------------------------------------------------------------------------------

    def _send_loop(self) -> None:
        with contextlib.suppress(OSError):  # the scheduler is gone: the other thread notifies everyone
            while (message := self._outbox.get()) is not None:
                self._connection.send_bytes(message)

    def _receive_loop(self, manager: RequestManager) -> None:
        while (message := self._receive()) is not None:
            if isinstance(message, Reply):
                self._answer(message)
            else:
                manager.handle_outputs(message)
        # A failed process ends soon. Those that wait for a failed one may never end.
        self.ranks.processes[0].join(_STOP_SECONDS if self.ranks.are_alive() else _ALIVE_CHECK_SECONDS)
        self._outbox.put(None)
        death = self._why_it_ended()
        if not self._closing:
            self.ranks.kill()
        manager.scheduler_died(death)
        with self._lock:
            self._death = str(death)
        for question in self._questions.values():  # no other comes from now on
            question.set_exception(SchedulerDiedError(self._death))

    def _answer(self, reply: Reply) -> None:
        with self._lock:
            question = self._questions.pop(reply.number)
        if reply.error is None:
            question.set_result(reply.value)
        else:
            question.set_exception(reply.error)

    def _receive(self) -> Any:
        """Return the next message; None once the scheduler is gone, or has sent its last error."""
        try:
            while not self._connection.poll(_ALIVE_CHECK_SECONDS):
                if not self.ranks.are_alive():
                    return None
            message = self._connection.recv()
        except (EOFError, OSError):
            return None
        if isinstance(message, FailureMessage):
            self.ranks.failures[0] = message
            return None
        return message

    # -- ends ----------------------------------------------------------------------------------------

    def _why_it_ended(self) -> SchedulerDiedError:
        what, failure = self.ranks.cause()
        if failure is not None:
            logger.error("%s\n%s", what, failure.traceback)
            what += _advice()
        elif self._closing:
            return SchedulerDiedError("the engine was shut down")
        return SchedulerDiedError(f"{what}. Start a new Engine.")

    def _start_error(self) -> Exception:
        """Return the error of a scheduler that failed while starting, or ended without a message."""
        self.ranks.join(_ALIVE_CHECK_SECONDS if len(self.ranks.processes) > 1 else _STOP_SECONDS)
        what, failure = self.ranks.cause()
        if failure is not None:
            ours = getattr(errors, failure.error_type, None)
            if isinstance(ours, type) and issubclass(ours, errors.AspectsError):
                if ours is errors.PlatformError:  # a vendor's method failed: its lines are in there
                    logger.error("%s", failure.traceback)
                return ours(failure.message)
            logger.error("%s\n%s", what, failure.traceback)
            return EngineError(f"{what} (while starting)")
        return SchedulerDiedError(
            f"{what} before it was ready; its output is above. A script that makes an Engine must do so "
            'under `if __name__ == "__main__":`, because the scheduler process imports the script again.'
        )


def _advice() -> str:
    """Return the next step after an error on a vendor's platform: a class of its may have caused it."""
    choice = current_platform_choice()
    if not any(each.chosen and each.source != "built-in" for each in choice.candidates):
        return ""
    return f". Platform {choice.name!r} is a vendor's: `sgl-aspects conformance` checks its methods"
