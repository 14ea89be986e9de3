"""Where the messages of the scheduler go, in the caller's process."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Any

from sgl_aspects import errors
from sgl_aspects.errors import SchedulerDiedError
from sgl_aspects.runtime.messages import Reply, StatsRequest, TokenOutput, UpdateWeightsRequest
from sgl_aspects.runtime.request_manager import RequestManager


class Questions:
    """Questions to the scheduler that wait for their answer."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._death: str | None = None

    def ask(self, question: StatsRequest | UpdateWeightsRequest, timeout: float | None = None) -> Any:
        """The answer's value, or the error that it brings; TimeoutError after so many seconds."""
        future: Future[Any] = Future()
        with self._lock:
            if self._death is not None:
                raise SchedulerDiedError(self._death)
            question.number = next(self._numbers)
            self._waiting[question.number] = future
        self._send(question)
        return future.result(timeout)

    def answered(self, reply: Reply) -> None:
        with self._lock:
            future = self._waiting.pop(reply.number)
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(getattr(errors, reply.error_type)(reply.error))

    def scheduler_died(self, error: SchedulerDiedError) -> None:
        with self._lock:
            self._death = str(error)
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(SchedulerDiedError(self._death))


class OutputReceiver:
    """What the link's thread calls. It knows no Engine, so that a forgotten one can be collected."""

    def __init__(self, manager: RequestManager, questions: Questions) -> None:
        self._manager = manager
        self._questions = questions

    def on_message(self, message: list[TokenOutput] | Reply) -> None:
        if isinstance(message, Reply):
            self._questions.answered(message)
            return
        for output in message:
            try:
                self._manager.handle_output(output)
            except Exception as error:  # noqa: BLE001 - of this request alone, and its caller is told
                self._manager.fail_request(output.rid, error)

    def on_death(self, error: SchedulerDiedError) -> None:
        self._manager.scheduler_died(error)
        self._questions.scheduler_died(error)
