"""Export pipelines: batches of collected spans to OpenTelemetry's exporters and the tracer's own, counted."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from sgl_aspects import compat
from sgl_aspects.tracing.export.failures import report_line
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.variables import BatchSettings

logger = logging.getLogger(__name__)

# Seconds in which an exporter's thread ran or slept without delivering: then it is taken for one that hangs.
_PATIENCE_SECONDS = 2.0
# Between looks whether a busy exporter has made room: a batch takes longer.
_ROOM_SECONDS = 0.01
# Links of a batch, at 45 bytes each: gRPC's servers refuse messages of more than 4 MB.
_MOST_LINKS = 16_384
# Seconds after which the processes that wait for the end of a run log the reason.
_SILENT_SECONDS = 1.0
# Seconds counted at most between two looks: this process may have been stopped.
_LONGEST_SECONDS = 0.05


class NoExporter(SpanExporter):
    """Replaces an exporter that could not be made: it delivers nothing."""

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        return SpanExportResult.FAILURE

    def shutdown(self) -> None: ...


class Pipeline:
    """One exporter behind its queue. ``offered`` = exported + not delivered, always.

    ``exporter``: takes what ``prepare`` makes of a span: in the thread that has made the span, as another
    processor would have to fetch each of its objects. ``take_rejected``: returns the number of spans in
    accepted messages that the backend rejected.
    """

    def __init__(
        self,
        name: str,
        exporter: SpanExporter,
        take_rejected: Callable[[], int] = lambda: 0,
        prepare: Callable[[CollectedSpan], Any] = CollectedSpan.readable,
    ) -> None:
        self.name = name
        self._exporter: Any = exporter
        self._take_rejected, self._prepare = take_rejected, prepare
        self._settings = BatchSettings.from_environment()
        self._queue: collections.deque[Any] = collections.deque()
        self._awake, self._is_closing, self._is_shut = threading.Event(), False, False
        self.offered = self.exported = 0
        #: The spans that were queued.
        self.given = 0
        self._failed = 0
        self._last_failed = False
        self._stuck_at = -1
        self.worker = threading.Thread(target=self._work, name=name, daemon=True)
        self.worker.start()

    def offer(self, spans: Sequence[CollectedSpan]) -> None:
        """Queue spans. Waits a little for a busy exporter; one that fails or hangs loses the rest."""
        self.offered += len(spans)
        while spans:
            self._wait_for_room()
            some = spans[: self._room()]
            if not some:
                return
            spans = spans[len(some) :]
            ready = [*self._prepared(some)]
            self.given += len(ready)
            self._queue.extend(ready)
            if len(self._queue) >= self._settings.batch:
                self._awake.set()

    def _prepared(self, spans: Sequence[CollectedSpan]) -> Iterator[Any]:
        for span in spans:
            try:
                yield self._prepare(span)
            except Exception:
                logger.exception("The span %s is lost to the exporter %s:", span.name, self.name)

    def _work(self) -> None:
        """Export a batch when it is full, the rest after each delay, everything at the end."""
        compat.suppress_instrumentation()
        while not self._is_closing:
            is_full = self._awake.wait(self._settings.delay / 1e3)
            self._awake.clear()
            while self._queue and (not is_full or len(self._queue) >= self._settings.batch):
                self._export()
        while self._queue and not self._is_shut:
            self._export()
        self.shutdown()

    def _export(self) -> None:
        batch = self._take_batch()
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(batch)
        except BaseException:  # any error: the thread goes on
            logger.exception("The exporter %s failed:", self.name)
        self._last_failed = result is not SpanExportResult.SUCCESS
        rejected = len(batch) if self._last_failed else min(self._take_rejected(), len(batch))
        self._failed += rejected
        self.exported += len(batch) - rejected

    def _take_batch(self) -> list[Any]:
        """Remove a batch from the queue: fewer where they have many links, for backends limit a message."""
        queue, batch, room = self._queue, list[Any](), _MOST_LINKS
        for _ in range(min(self._settings.batch, len(queue))):
            span = queue.popleft()
            batch.append(span)
            if span.links:
                room -= len(span.links)
                if room < 0:
                    break
        return batch

    def close(self) -> None:
        """Have ``worker`` send the queue, shut the exporter down, and end."""
        self._is_closing = True
        self._awake.set()

    def shutdown(self) -> None:
        """Shut the exporter down, which ends its waits between retries; the queue is given up."""
        if not self._is_shut:
            self._is_shut = True
            try:
                self._exporter.shutdown()
            except Exception:
                logger.exception("The exporter %s failed as it was shut down:", self.name)

    @property
    def done(self) -> int:
        """Return how many of ``given`` the exporter has taken or lost, in their order."""
        return self.exported + self._failed

    def _room(self) -> int:
        return max(0, self._settings.queue - self.given + self.done)

    def _wait_for_room(self) -> None:
        if self._room():
            return
        idle = Idleness(self)
        while not self._room() and not self._last_failed and self._stuck_at != self.done:
            if idle.seconds() > _PATIENCE_SECONDS:
                self._stuck_at = self.done  # until it delivers again
                return
            time.sleep(_ROOM_SECONDS)

    @property
    def lost(self) -> int:
        """Return the spans given up so far: refused, failed, or never queued."""
        return self._failed + self.offered - self.given

    @property
    def not_delivered(self) -> int:
        return self.offered - self.exported


class Idleness:
    """Seconds in which an exporter's thread ran or slept without taking spans, since it took some.

    Those in which it waited for a processor do not count: it does not hang. Without Linux's ``/proc`` all do.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._done = pipeline, pipeline.done
        self._waits = f"/proc/self/task/{pipeline.worker.native_id}/schedstat"
        self._seconds, self._latest = 0.0, self._now()

    def seconds(self) -> float:
        """Return them; to be called often."""
        now, done = self._now(), self._pipeline.done
        past, self._latest = min(now - self._latest, _LONGEST_SECONDS), now
        self._seconds = self._seconds + past if done == self._done else 0.0
        self._done = done
        return self._seconds

    def _now(self) -> float:
        """Return the time, less what the thread has waited for a processor so far."""
        try:
            with open(self._waits, "rb") as file:
                return time.monotonic() - int(file.read().split()[1]) / 1e9
        except OSError:  # not Linux, or the thread has ended
            return time.monotonic()


def close_all(pipelines: Sequence[Pipeline], seconds: float) -> None:
    """Send the queues of all pipelines at once; one whose thread runs or sleeps for ``seconds`` without
    delivering is given up.
    """
    for pipeline in pipelines:
        pipeline.close()
    begun = time.monotonic()
    idle = [(pipeline.worker, Idleness(pipeline)) for pipeline in pipelines]
    is_said = seconds <= _SILENT_SECONDS
    while busy := [thread for thread, past in idle if past.seconds() < seconds and thread.is_alive()]:
        if not is_said and time.monotonic() > begun + _SILENT_SECONDS:
            is_said, names = True, ", ".join(thread.name for thread in busy)
            until = f"given up when none is delivered for {seconds:g} s"
            report_line(f"{names}: sending the last spans takes long; {until}")
        busy[0].join(0.02)
    for pipeline in pipelines:
        if pipeline.worker.is_alive():
            pipeline.shutdown()
    for pipeline in pipelines:
        pipeline.worker.join(0.2)
