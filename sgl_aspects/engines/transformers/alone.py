"""Without continuous batching: requests wait for the one thread that runs them, and there are no steps.

Their ids are known where they are queued. The thread gets the settings of a generation, the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any, NamedTuple

from sgl_aspects.engines.base import Lifecycle, Outcome, Role
from sgl_aspects.engines.contract import Observation

_MANAGERS = "transformers.cli.serving.utils"
_MODEL = "transformers.generation.utils:GenerationMixin"

ROLES = {
    "queue_alone": Role((f"{_MANAGERS}:GenerateManager.generate_*streaming",)),
    "run_alone": Role((f"{_MODEL}.generate",)),
    "prefill_alone": Role((f"{_MODEL}._prefill",)),
    "last_output_alone": Role((f"{_MANAGERS}:DirectStreamer.end",)),
}


class _Running(NamedTuple):
    """The request that the thread works on, since when, and the arguments of its generation."""

    rid: str
    start_ns: int
    kwargs: dict[str, Any]

    def ended(self, result: Any = None) -> tuple[int | None, str]:
        """Return the number of new tokens so far, and why it ends; a result includes the prompt."""
        streamer, count = self.kwargs.get("streamer"), None
        if streamer is not None:
            count = int(streamer.total_tokens)
        elif result is not None:
            count = int(result.shape[-1]) - prompt_length(self.kwargs)
        return count, end_reason(count, self.kwargs["generation_config"].max_new_tokens)


class AloneObserver:
    """Reports requests to their tracker."""

    def __init__(self, trackers: Lifecycle, request: Callable[..., tuple[str, Any]]) -> None:
        """``request``: returns the id and the settings from a call that queues a request."""
        self._engine, self._requests, self._request = trackers.engine, trackers.requests, request
        self._is_recording = trackers.is_recording
        self._waiting: dict[int, str] = {}
        self._running: _Running | None = None

    def observations(self) -> Iterable[Observation]:
        return [
            Observation("queue_alone", self._queue_enter),
            Observation("run_alone", self._run_enter, self._run_exit),
            Observation("prefill_alone", self._prefill_enter, self._prefill_exit),
            Observation("last_output_alone", self._last_output_enter),
        ]

    def _queue_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_recording():
            rid, settings = self._request(args, kwargs)
            self._waiting[id(settings)] = rid
            self._requests.queued(rid)

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Running | None:
        rid = self._waiting.pop(id(kwargs.get("generation_config")), "")
        request = self._requests.requests.get(rid)
        if request is None:
            return None
        now = monotonic_ns()
        self._requests.launched(request, now)
        self._running = _Running(rid, now, kwargs)
        return self._running

    def _run_exit(self, running: _Running | None, result: Any, error: BaseException | None) -> None:
        if running is None:
            return
        self._running = None
        count, reason = running.ended(result)
        if error is None:
            self._requests.finished(running.rid, count, reason)
            return
        problem = type(error).__qualname__
        if self._engine.outcome(problem) is Outcome.ABORTED:
            self._requests.finished(running.rid, count, "abort", Outcome.ABORTED.problem)
        else:
            self._requests.finished(running.rid, count, None, problem)

    def _last_output_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End the request here: its caller may go before the function that runs it returns."""
        if self._running is not None:
            self._requests.finished(self._running.rid, *self._running.ended())

    def _prefill_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Running | None:
        return self._running

    def _prefill_exit(self, running: _Running | None, result: Any, error: BaseException | None) -> None:
        if running is not None:
            problem = "" if error is None else type(error).__qualname__
            self._requests.prompt_done(running.rid, prompt_length(running.kwargs), running.start_ns, problem)


def prompt_length(inputs: Any) -> int:
    ids = inputs["input_ids"]
    return len(ids) if isinstance(ids, list) else int(ids.shape[-1])


def end_reason(count: int | None, most: int | None) -> str:
    return "length" if most is not None and (count or 0) >= most else "stop"
