"""From finished spans to backends: OpenTelemetry's own batch processors and exporters, counted.

Each exporter has a pipeline of its own, so one that is down costs the others nothing.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)

from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing.export.failures import tell
from sgl_aspects.tracing.export.variables import BatchSettings
from sgl_aspects.tracing.settings import TraceSettings

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 2.0
# Who waits for the end of a run is told why after so long.
_SILENT_SECONDS = 1.0


def make_pipeline(name: str, settings: TraceSettings, *, append: bool = False) -> Pipeline:
    """The exporter of that name in its pipeline; endpoint, headers and the rest come from the environment.

    ``append``: a file goes on where an earlier collector of the run left it.
    """
    if name == "otlp":
        from sgl_aspects.tracing.export.otlp import Rejections, span_exporter

        rejections = Rejections("TRACES")
        return Pipeline(name, span_exporter(settings.protocol, rejections), rejections.take)
    return Pipeline(name, _make_exporter(name, settings, append=append))


def _make_exporter(name: str, settings: TraceSettings, *, append: bool) -> SpanExporter:
    if name == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    if name == "otlp-json-file":
        from sgl_aspects.tracing.export.otlp_file import OtlpJsonFileExporter

        try:
            append = append or settings.file in settings.begun
            return OtlpJsonFileExporter(settings.file or "", append=append)
        except OSError as error:
            raise ConfigError(f"SGL_ASPECTS_TRACE_FILE={settings.file!r}: {error.strerror}") from error
    if name == "perfetto":
        from sgl_aspects.tracing.export.chrome_trace import ChromeTraceExporter

        try:
            append = append or settings.perfetto_file in settings.begun
            return ChromeTraceExporter(settings.perfetto_file, append=append)
        except OSError as error:
            raise ConfigError(
                f"SGL_ASPECTS_TRACE_PERFETTO_FILE={settings.perfetto_file!r}: {error.strerror}"
            ) from error
    from sgl_aspects.tracing.export.registered import make_registered

    exporter: SpanExporter = make_registered("traces", name, ("export", "shutdown"))
    return exporter


class NoExporter(SpanExporter):
    """In the place of one that could not be made: it delivers nothing."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE

    def shutdown(self) -> None: ...


class CountingExporter(SpanExporter):
    """Passes spans on and counts what became of them.

    ``take_rejected``: how many of a message that a backend accepted it then rejected.
    """

    def __init__(self, inner: SpanExporter, take_rejected: Callable[[], int] = lambda: 0) -> None:
        self.inner = inner
        self._take_rejected = take_rejected
        self.exported = 0
        self.failed = 0
        self.last_failed = False
        self._down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self.inner.export(spans)
        except Exception:
            raise
        except BaseException as error:  # it would end the thread that exports
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:  # an exporter that raises has failed; the batch processor logs its exception
            self.last_failed = result is not SpanExportResult.SUCCESS
            if self.last_failed:
                self.failed += len(spans)
            else:
                rejected = min(self._take_rejected(), len(spans))
                self.failed += rejected
                self.exported += len(spans) - rejected
        return result

    def shutdown(self) -> None:
        if not self._down:
            self._down = True
            try:
                self.inner.shutdown()
            except Exception:
                logger.exception("An exporter failed as it was shut down.")

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self.inner.force_flush(timeout_millis)


class Pipeline:
    """One exporter behind its batch processor. ``offered`` = exported + not delivered, always."""

    def __init__(
        self, name: str, exporter: SpanExporter, take_rejected: Callable[[], int] = lambda: 0
    ) -> None:
        self.name = name
        self.counting = CountingExporter(exporter, take_rejected)
        settings = BatchSettings.from_environment()
        self.capacity = settings.queue
        self.processor = BatchSpanProcessor(
            self.counting,
            max_queue_size=settings.queue,
            schedule_delay_millis=settings.delay,
            max_export_batch_size=settings.batch,
        )
        self.offered = 0
        self._submitted = 0
        self._room = 0  # how many more there was room for when it was last asked
        self._stuck_at = -1

    def offer(self, span: ReadableSpan) -> None:
        """Hands a span over. Waits a little for a busy exporter; one that fails or hangs loses the span."""
        self.offered += 1
        if not self._room:
            self._wait_for_room()
            self._room = max(0, self.capacity - self._submitted + self._done())
            if not self._room:
                return
        self._room -= 1
        self._submitted += 1
        self.processor.on_end(span)

    def _done(self) -> int:
        return self.counting.exported + self.counting.failed

    def _is_full(self) -> bool:
        return self._submitted - self._done() >= self.capacity

    def _wait_for_room(self) -> None:
        if self.counting.last_failed or self._stuck_at == self._done():
            return
        done, deadline = self._done(), time.monotonic() + _PATIENCE_SECONDS
        while self._is_full() and not self.counting.last_failed:
            if self._done() != done:
                done, deadline = self._done(), time.monotonic() + _PATIENCE_SECONDS
            elif time.monotonic() > deadline:
                self._stuck_at = done  # until it moves again
                return
            time.sleep(0.002)

    @property
    def exported(self) -> int:
        return self.counting.exported

    @property
    def lost(self) -> int:
        """Given up so far: refused, failed, or never taken on."""
        return self.counting.failed + self.offered - self._submitted

    @property
    def not_delivered(self) -> int:
        return self.offered - self.counting.exported


def close_all(pipelines: Sequence[Pipeline], seconds: float) -> None:
    """Sends what is queued, all pipelines at once; one that delivers nothing for ``seconds`` is given up."""
    closing = []
    for pipeline in pipelines:
        thread = threading.Thread(target=pipeline.processor.shutdown, name=pipeline.name, daemon=True)
        thread.start()
        closing.append((pipeline, thread))
    begun = time.monotonic()
    delivered = [pipeline.exported for pipeline in pipelines]
    deadlines = [begun + seconds] * len(delivered)
    is_said = seconds <= _SILENT_SECONDS
    while True:
        now = time.monotonic()
        for index, pipeline in enumerate(pipelines):
            if pipeline.exported > delivered[index]:
                delivered[index], deadlines[index] = pipeline.exported, now + seconds
        busy = [thread for (_, thread), end in zip(closing, deadlines) if thread.is_alive() and now < end]
        if not busy:
            break
        if not is_said and now > begun + _SILENT_SECONDS:
            is_said, names = True, ", ".join(thread.name for thread in busy)
            until = f"given up when none is delivered for {seconds:g} s"
            tell(f"{names}: sending the last spans takes long; {until}")
        busy[0].join(0.02)
    for pipeline, thread in closing:
        if thread.is_alive():
            pipeline.counting.shutdown()  # ends waits between retries
    for _, thread in closing:
        thread.join(0.2)
