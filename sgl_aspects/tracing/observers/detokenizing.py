"""Level 1, the process that detokenizes."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Trackers


class DetokenizerObserver:
    """In a process that detokenizes many requests in one call: its time is divided among them."""

    def __init__(self, trackers: Trackers) -> None:
        engine = trackers.engine
        self._recorder, self._calls = trackers.recorder, trackers.calls
        self._batch = engine.call_reader("detokenize", "outputs")
        self._each = engine.reader("outputs.each")
        self._is_probe = engine.reader("rid.is_probe")

    def observations(self) -> list[Observation]:
        return [Observation("detokenize", self._enter, self._exit)]

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return monotonic_ns(), args, kwargs

    def _exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        (start_ns, args, kwargs), now, calls = token, monotonic_ns(), self._calls
        found = list(self._each(self._batch(args, kwargs, result)))
        share = (now - start_ns) // (len(found) or 1)
        for rid, reason in found:
            if rid in calls.detokenizing or (self._recorder.level and not self._is_probe(rid)):
                calls.detokenized_here(rid, start_ns, now, share, is_last=reason is not None)
