"""Level 1, in a detokenizer with a process of its own: one span for each request over all its calls."""

from __future__ import annotations

from dataclasses import dataclass
from time import time_ns
from typing import Any

from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.observation import Observation
from sgl_aspects.tracing.records import RequestSeen
from sgl_aspects.tracing.schema import DETOKENIZE


@dataclass(eq=False)
class _Detokenized:
    """A request whose tokens become text; ``key`` is its name in this process's records."""

    key: int
    start_ns: int
    calls: int = 0
    busy_ns: float = 0.0


class DetokenizerObserver:
    """Spans ``detokenize``; the time of a call is shared out over the requests in it."""

    def __init__(self, trackers: Trackers) -> None:
        engine, recorder = trackers.engine, trackers.recorder
        self._recorder = recorder
        self._write = recorder.spans(DETOKENIZE)
        self._live: dict[str, _Detokenized] = {}
        self._batch = engine.call_reader("detokenize", "outputs")
        self._each = engine.reader("outputs.each")
        self._is_probe = engine.reader("rid.is_probe")

    def observations(self) -> list[Observation]:
        return [Observation("detokenize", self._enter, self._exit)]

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return time_ns(), args, kwargs

    def _exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        start_ns, args, kwargs = token
        now = time_ns()
        found = list(self._each(self._batch(args, kwargs, result)))
        share = (now - start_ns) / (len(found) or 1)
        for rid, reason in found:
            request = self._live.get(rid)
            if request is None:
                if self._is_probe(rid) or not self._recorder.level:
                    continue
                request = self._live[rid] = _Detokenized(self._recorder.new_id(), start_ns)
                self._recorder.write(RequestSeen(request.key, rid, start_ns))
            request.calls += 1
            request.busy_ns += share
            if reason is not None:
                del self._live[rid]
                values = (request.calls, request.busy_ns / 1e9)
                key = request.key
                self._write(self._recorder.new_id(), key, key, request.start_ns, now, values)
