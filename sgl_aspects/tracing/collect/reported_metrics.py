"""The collector's metrics: the pipeline that exports them, and the collector's own losses."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource

from sgl_aspects import __version__, compat
from sgl_aspects.files import write_private
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.export.metrics import EngineMetrics
from sgl_aspects.tracing.export.pipelines import Pipeline

_REPORTED = "metrics.json"


class CollectorMetrics:
    """The metrics of one run.

    A restarted collector begins its counters at 0, with a new start time, as any restarted process does. What
    was reported is kept in the run folder, so that a backend counts it once: the drops, which the writers
    count for the whole run, the last record of each ring, and the requests whose end waited then.
    """

    def __init__(
        self,
        folder: str,
        readers: Sequence[MetricReader],
        resource: Resource,
        targets: tuple[float | None, float | None] = (None, None),
    ) -> None:
        self._readers = readers
        provider = MeterProvider(readers, resource, shutdown_on_exit=False)
        self.engine = EngineMetrics(provider.get_meter("sgl_aspects", __version__), targets)
        self._reported = Path(folder, _REPORTED)
        self._before = self._last = 0
        self.counted: dict[str, int] = {}
        self.held: set[int] = set()
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            found = json.loads(self._reported.read_text())
            self._before = self._last = int(found["dropped"])
            self.counted, self.held = dict(found["counted"]), set(found["held"])

    def watch(self, reader: RunReader, held: Callable[[], list[int]], pipelines: Sequence[Pipeline]) -> None:
        """Count dropped, delivered and undelivered spans from now on, and note what is reported.

        ``held``: returns the requests whose end waits.
        """

        def dropped() -> Mapping[str, int]:
            self._last = reader.dropped
            return {"": max(0, self._last - self._before)}

        def note() -> None:
            counted = {ring.name: max(ring.taken, ring.counted) for ring in reader.open()}
            told = {"dropped": self._last, "counted": counted, "held": held()}
            with contextlib.suppress(OSError):  # the folder is removed when the run ends
                write_private(self._reported, json.dumps(told).encode())

        for each in self._readers:
            compat.gather_under(each, reader.lock, note)

        count = self.engine.count
        count(schema.RECORDS_DROPPED, "{record}", "Records that a process had no room for.", dropped)
        count(
            schema.SPANS_EXPORTED,
            "{span}",
            "Spans that an exporter delivered.",
            lambda: {pipeline.name: pipeline.exported for pipeline in pipelines},
        )
        count(
            schema.SPANS_DROPPED,
            "{span}",
            "Spans that an exporter could not deliver.",
            lambda: {pipeline.name: pipeline.lost for pipeline in pipelines},
        )

    def close(self, seconds: float) -> bool:
        """Send the last figures by all readers at once; False if one needs more than ``seconds``."""
        deadline = time.monotonic() + seconds
        most = max(1.0, seconds * 1000)
        threads = [
            threading.Thread(target=reader.shutdown, args=(most,), name="metrics", daemon=True)
            for reader in self._readers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
