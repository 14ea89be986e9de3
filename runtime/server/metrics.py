"""The engine's counts and the server's own as Prometheus text."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_aspects.errors import SchedulerDiedError
from sgl_aspects.runtime.engine import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
#: The scheduler answers between two steps; a scrape does not wait longer, and goes without its gauges.
_STATS_SECONDS = 5.0


class ServerMetrics:
    """A registry of the server's measurements; the engine's own counts are read at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.responses = Counter(
            "sgl_aspects_http_responses",
            "HTTP responses by path and status.",
            ("path", "status"),
            registry=self._registry,
        )
        self.first_byte = self._seconds(
            "time_to_first_byte",
            "From the request to the first byte of a successful answer; of a stream: its first token.",
        )
        self.duration = self._seconds("duration", "From the request to the last byte of a successful answer.")

    def _seconds(self, name: str, help: str) -> Histogram:
        name = f"sgl_aspects_http_{name}_seconds"
        return Histogram(name, help, ("path",), buckets=_SECONDS, registry=self._registry)

    def text(self) -> bytes:
        """Queries the engine, which may take seconds: do not call it in the event loop."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Describe the metrics without querying the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Collect, at each scrape."""
        counters = self._engine.counters
        yield _counter("requests_received", "Requests that the engine took in.", counters.received_requests)
        finished = CounterMetricFamily(
            "sgl_aspects_requests_finished", "Requests that ended, by reason.", labels=["reason"]
        )
        for reason, count in list(counters.finished_requests.items()):
            finished.add_metric([reason], count)
        yield finished
        yield _counter("prompt_tokens", "Prompt tokens of finished requests.", counters.prompt_tokens)
        yield _counter("cached_tokens", "Of these, found in the prefix cache.", counters.cached_tokens)
        yield _counter("output_tokens", "Output tokens of finished requests.", counters.output_tokens)
        yield GaugeMetricFamily(
            "sgl_aspects_up", "1 while the engine can serve.", float(self._engine.failure is None)
        )
        try:
            stats = self._engine.stats(timeout=_STATS_SECONDS)
        except (SchedulerDiedError, TimeoutError):
            return
        for name, value in stats.items():
            yield GaugeMetricFamily(f"sgl_aspects_scheduler_{name}", "See Engine.stats().", value)


def _counter(name: str, help: str, value: int) -> Metric:
    return CounterMetricFamily(f"sgl_aspects_{name}", help, value)


class MeasureResponses:
    """ASGI middleware. Paths that are not ``known`` are counted as one: clients can invent any number."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, known: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, metrics = time.perf_counter(), self._metrics
        path = scope["path"] if scope["path"] in self._known else "other"
        status = 0

        async def measured(message: Message) -> None:
            nonlocal status
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status == 200 and not message.get("more_body", False):
                metrics.duration.labels(path).observe(time.perf_counter() - begin)
            if message["type"] == "http.response.start" and status == 200:
                metrics.first_byte.labels(path).observe(time.perf_counter() - begin)

        try:
            await self._app(scope, receive, measured)
        finally:
            metrics.responses.labels(path, str(status or 499)).inc()
