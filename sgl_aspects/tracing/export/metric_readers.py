"""Metric readers: OpenTelemetry's own for OTLP and the console, and a page for Prometheus."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from sgl_aspects import __version__
from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing.export.metrics import EngineMetrics
from sgl_aspects.tracing.export.prometheus_port import port_problem

if TYPE_CHECKING:
    from sgl_aspects.tracing.settings import TraceSettings


class MetricsPipeline:
    """The engine's metrics and their readers, which export every ``OTEL_METRIC_EXPORT_INTERVAL``."""

    def __init__(self, readers: Sequence[MetricReader], resource: Resource) -> None:
        self._readers = readers
        self._provider = MeterProvider(readers, resource, shutdown_on_exit=False)
        self.engine = EngineMetrics(self._provider.get_meter("sgl_aspects", __version__))

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


def make_reader(name: str, settings: TraceSettings) -> MetricReader:
    """Make OpenTelemetry's reader of that name, which reads all but ``settings`` from the environment."""
    if name == "prometheus":
        return _prometheus_reader(settings.prometheus_host, settings.prometheus_port)
    exporter: MetricExporter
    if name == "console":
        exporter = ConsoleMetricExporter(out=sys.stdout)
    elif name != "otlp":
        from sgl_aspects.tracing.export.registered import make_registered

        made = make_registered("metrics", name, ("shutdown",))
        if isinstance(made, MetricReader):
            return made
        exporter = made
    else:
        from sgl_aspects.tracing.export.otlp import Rejections, metric_exporter

        exporter = metric_exporter(settings.metrics_protocol, Rejections("METRICS"))
    return PeriodicExportingMetricReader(exporter)


def _prometheus_reader(host: str, port: int) -> MetricReader:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from prometheus_client import (
        GC_COLLECTOR,
        PLATFORM_COLLECTOR,
        PROCESS_COLLECTOR,
        REGISTRY,
        start_http_server,
    )

    # These metrics describe this process, and would be taken for the engine's.
    for own in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(own)
    try:
        server, _ = start_http_server(port, host)
    except OSError as error:
        raise ConfigError(port_problem(host, port, error)) from error

    class Page(PrometheusMetricReader):
        """Release the port before the end of the run is reported: the next run may need it at once."""

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
            super().shutdown(timeout_millis, **kwargs)
            server.socket.shutdown(socket.SHUT_RDWR)  # wakes its thread
            server.shutdown()
            server.server_close()

    page: MetricReader = Page()
    return page
