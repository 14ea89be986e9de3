"""The scheduler process as its owner sees it: start, send, receive, and notice its end.

One duplex pipe: its end tells either side that the other is gone, whatever killed it. A thread sends, so that
callers never wait for a busy scheduler; another one receives.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.resource_tracker
import os
import queue
import signal
import threading
import time
from multiprocessing.connection import wait
from typing import Any, Protocol

from sgl_aspects import errors
from sgl_aspects.errors import EngineError, SchedulerDiedError
from sgl_aspects.runtime.messages import FailureMessage, ReadyMessage, ShutdownRequest
from sgl_aspects.runtime.scheduler_process import run_scheduler_process
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
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe(duplex=True)
        self.process = context.Process(
            target=run_scheduler_process,
            args=(server_args, child_connection),
            name="sgl-aspects-scheduler",
            daemon=True,
        )
        try:
            _start_deaf_to_ctrl_c(self.process)
        except BaseException:
            self._connection.close()
            raise
        finally:
            child_connection.close()  # or the scheduler's death would not end the pipe

    def wait_until_ready(self, timeout: float) -> ReadyMessage:
        """Raises what the scheduler raised while starting, EngineError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            wait([self._connection, self.process.sentinel], timeout=_ALIVE_CHECK_SECONDS)
            if self._connection.poll(0) or not self.process.is_alive():
                message = self._receive()
                if isinstance(message, ReadyMessage):
                    return message
                raise self._start_error(message)
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
        self.process.join(timeout=_STOP_SECONDS if self._receiving else 0)
        self.kill()

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
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
        failure: FailureMessage | None = None
        while (message := self._receive()) is not None:
            if isinstance(message, FailureMessage):
                failure = message
            else:
                receiver.on_message(message)
        self.process.join(timeout=_STOP_SECONDS)
        self._outbox.put(ShutdownRequest())  # ends the sending thread
        receiver.on_death(self._death(failure))

    def _receive(self) -> Any:
        """The next message; None once the scheduler is gone."""
        try:
            while not self._connection.poll(_ALIVE_CHECK_SECONDS):
                if not self.process.is_alive():
                    return None
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    # -- ends ----------------------------------------------------------------------------------------

    def _death(self, failure: FailureMessage | None) -> SchedulerDiedError:
        if failure is not None:
            logger.error("the scheduler process failed:\n%s", failure.traceback)
            what = f"failed with {failure.error_type}: {failure.message}"
        elif self._closing:
            return SchedulerDiedError("the engine was shut down")
        else:
            what = _exit_in_words(self.process.exitcode)
        return SchedulerDiedError(f"the scheduler process {what}. Start a new Engine.")

    def _start_error(self, message: Any) -> Exception:
        """What to raise for a scheduler that failed while starting, or ended without a word."""
        if isinstance(message, FailureMessage):
            ours = getattr(errors, message.error_type, None)
            if isinstance(ours, type) and issubclass(ours, errors.AspectsError):
                return ours(message.message)
            logger.error("the scheduler process failed while starting:\n%s", message.traceback)
            return EngineError(
                f"the scheduler process failed while starting with {message.error_type}: {message.message}"
            )
        self.process.join(timeout=_STOP_SECONDS)
        return SchedulerDiedError(
            f"the scheduler process {_exit_in_words(self.process.exitcode)} before it was ready; its output "
            'is above. A script that makes an Engine must do so under `if __name__ == "__main__":`, because '
            "the scheduler process imports the script again."
        )


def _start_deaf_to_ctrl_c(process: Any) -> None:
    """Start with SIGINT blocked until the process ignores it by itself: Ctrl-C shows no traceback of it."""
    multiprocessing.resource_tracker.ensure_running()  # starting it later would unblock SIGINT again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_in_words(exit_code: int | None) -> str:
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
