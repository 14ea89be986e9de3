"""Level 1, an engine without a scheduler: requests wait for the one thread that runs them."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines import Outcome
from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.requests import Chunk, ScheduledRequest
from sgl_aspects.tracing.records import error_type


class AloneObserver:
    """Reports requests to their tracker.

    ``key``: passed both to the function that queues a request and to the one that runs it.
    """

    def __init__(self, trackers: Trackers) -> None:
        engine = self._engine = trackers.engine
        self._recorder, self._requests = trackers.recorder, trackers.requests
        call = engine.call_reader
        self._rid = call("queue_alone", "rid")
        self._queued_key = call("queue_alone", "key")
        self._run_key = call("run_alone", "key")
        self._prompt_tokens = call("run_alone", "prompt_tokens")
        self._output_tokens = call("run_alone", "output_tokens")
        self._reason = call("run_alone", "finish_reason")
        self._waiting: dict[Any, str] = {}
        #: The request that is running, since when, and the call's arguments.
        self._running: tuple[ScheduledRequest, int, tuple[Any, ...], dict[str, Any]] | None = None

    def observations(self) -> list[Observation]:
        return [
            Observation("queue_alone", self._queue_enter),
            Observation("run_alone", self._run_enter, self._run_exit),
            Observation("prefill_alone", self._prefill_enter, self._prefill_exit),
            Observation("last_output_alone", self._last_output_enter),
        ]

    def _queue_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._recorder.level:
            rid = self._waiting[self._queued_key(args, kwargs)] = self._rid(args, kwargs)
            self._requests.queued(rid)

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rid = self._waiting.pop(self._run_key(args, kwargs), "")
        request = self._requests.requests.get(rid)
        if request is None:
            return None
        now = monotonic_ns()
        self._requests.launched(request, now)
        self._running = request, now, args, kwargs
        return self._running

    def _run_exit(self, running: Any, result: Any, error: BaseException | None) -> None:
        if running is None:
            return
        self._running = None
        request, _, args, kwargs = running
        count, problem = self._output_tokens(args, kwargs, result), error_type(error)
        if error is None:
            reason = self._reason(args, kwargs, result)
        else:
            is_aborted = self._engine.outcome(problem) is Outcome.ABORTED
            reason, problem = ("abort", Outcome.ABORTED.problem) if is_aborted else (None, problem)
        self._requests.finished(request.rid, count, reason, problem)

    def _last_output_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End the request here: its caller may go before the function that runs it returns."""
        if self._running is not None:
            request, _, args, kwargs = self._running
            count, reason = self._output_tokens(args, kwargs), self._reason(args, kwargs)
            self._requests.finished(request.rid, count, reason)

    def _prefill_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._running

    def _prefill_exit(self, running: Any, result: Any, error: BaseException | None) -> None:
        if running is not None:
            request, start_ns, args, kwargs = running
            chunk = Chunk(None, request, self._prompt_tokens(args, kwargs), start_ns, True)
            self._requests.prefilled([chunk], error_type(error))
