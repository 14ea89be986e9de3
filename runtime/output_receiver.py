"""Where the messages of the scheduler go, in the caller's process."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from typing import Any

from sgl_aspects.errors import SchedulerDiedError
from sgl_aspects.runtime.messages import StatsReply, StatsRequest, TokenOutput
from sgl_aspects.runtime.request_manager import RequestManager


class StatsCalls:
    """Questions to the scheduler that wait for their answer."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, int]]] = {}
        self._lock = threading.Lock()
        self._death: str | None = None

    def call(self, timeout: float | None = None) -> dict[str, int]:
        future: Future[dict[str, int]] = Future()
        with self._lock:
            if self._death is not None:
                raise SchedulerDiedError(self._death)
            number = next(self._numbers)
            self._waiting[number] = future
        self._send(StatsRequest(number))
        return future.result(timeout)

    def answered(self, reply: StatsReply) -> None:
        with self._lock:
            future = self._waiting.pop(reply.number)
        future.set_result(reply.stats)

    def scheduler_died(self, error: SchedulerDiedError) -> None:
        with self._lock:
            self._death = str(error)
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(SchedulerDiedError(self._death))


class OutputReceiver:
    """What the link's thread calls. It knows no Engine, so that a forgotten one can be collected."""

    def __init__(self, manager: RequestManager, stats_calls: StatsCalls) -> None:
        self._manager = manager
        self._stats_calls = stats_calls

    def on_message(self, message: list[TokenOutput] | StatsReply) -> None:
        if isinstance(message, StatsReply):
            self._stats_calls.answered(message)
            return
        for output in message:
            try:
                self._manager.handle_output(output)
            except Exception as error:  # noqa: BLE001 - of this request alone, and its caller is told
                self._manager.fail_request(output.rid, error)

    def on_death(self, error: SchedulerDiedError) -> None:
        self._manager.scheduler_died(error)
        self._stats_calls.scheduler_died(error)
