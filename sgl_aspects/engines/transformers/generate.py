"""Without continuous batching requests wait for the one thread that generates, and have it to themselves."""

from __future__ import annotations

from time import time_ns
from typing import Any

from sgl_aspects.engines.transformers.roles import TRANSFORMERS
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.requests import Chunk, ScheduledRequest
from sgl_aspects.tracing.observers.observation import Observation, error_type


class GenerateObserver:
    """Tells the tracker of requests what becomes of them; who asked is known by the settings' identity."""

    def __init__(self, trackers: Trackers) -> None:
        self._recorder, self._requests = trackers.recorder, trackers.requests
        self._asked = {
            role: TRANSFORMERS.call_reader(role, "request") for role in ("begin_request", "begin_stream")
        }
        self._waiting_rid = TRANSFORMERS.call_reader("wait", "state")
        self._waiting: dict[int, Any] = {}
        #: That which the thread works on now, and the tokens of its prompt.
        self._running: tuple[ScheduledRequest, int, int, Any] | None = None

    def observations(self) -> list[Observation]:
        return [
            *(Observation(role, self._ask_enter(role)) for role in self._asked),
            Observation("wait", self._wait_enter),
            Observation("generate", self._generate_enter, self._generate_exit),
            Observation("stream_end", self._stream_end_enter),
            Observation("generate_prefill", self._prefill_enter, self._prefill_exit),
            Observation("cancel_requests", None, self._cancel_exit),
        ]

    def _ask_enter(self, role: str) -> Any:
        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if type(args[0]).__name__ == "GenerateManager" and self._recorder.level:
                asked = self._asked[role](args, kwargs, None)
                self._waiting[id(asked.settings)] = asked
                self._requests.queued(asked.rid)

        return enter

    def _wait_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A scheduler gets a request, or one again that gave way."""
        rid = self._waiting_rid(args, kwargs, None).request_id
        if rid in self._requests.requests:
            self._requests.preempted(rid, None)
        elif self._recorder.level:
            self._requests.queued(rid)

    def _generate_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked = self._waiting.pop(id(kwargs.get("generation_config")), None)
        request = None if asked is None else self._requests.requests.get(asked.rid)
        if request is None:
            return None
        now = time_ns()
        self._requests.launched(request, now)
        self._running = request, asked.prompt_length, now, asked
        return asked

    def _generate_exit(self, asked: Any, result: Any, error: BaseException | None) -> None:
        if asked is None:
            return
        self._running = None
        count = int(result.shape[-1]) - asked.prompt_length if hasattr(result, "shape") else None
        reason = _reason(count, asked) if error is None else None
        cancelled = type(error).__name__ == "_GenerationCancelled"
        problem = "abort" if cancelled else error_type(error)
        self._requests.finished(asked.rid, count, "abort" if cancelled else reason, problem)

    def _stream_end_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Its last token has been streamed: its caller may go before the function that generates returns."""
        if self._running is not None:
            count, asked = args[0].total_tokens, self._running[3]
            self._requests.finished(asked.rid, count, _reason(count, asked))

    def _prefill_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._running

    def _prefill_exit(self, running: Any, result: Any, error: BaseException | None) -> None:
        if running is not None:
            request, tokens, start_ns, _ = running
            self._requests.prefilled([Chunk(None, request, tokens, start_ns, True)], error_type(error))

    def _cancel_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        for state in result or ():
            self._requests.finished(state.request_id, len(state.generated_tokens), "abort", "abort")


def _reason(count: int | None, asked: Any) -> str:
    return "length" if count is not None and count == asked.settings.max_new_tokens else "stop"
