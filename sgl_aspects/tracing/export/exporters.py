"""Exporters by their names: OpenTelemetry's own, ours for files, a page for Prometheus, and registered ones.

Endpoints, headers and the rest are variables that the exporters read.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing.export.chrome_trace import ChromeTraceExporter
from sgl_aspects.tracing.export.otlp_file import OtlpJsonFileExporter
from sgl_aspects.tracing.export.pipelines import Pipeline
from sgl_aspects.tracing.settings import installed_exporter

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from sgl_aspects.tracing.settings import TraceSettings

#: Seconds that a registered exporter may take to be made: the other exporters wait for it.
_MAKING_SECONDS = 10.0
_FILES = {"otlp-json-file": OtlpJsonFileExporter, "perfetto": ChromeTraceExporter}


def make_pipeline(name: str, settings: TraceSettings, *, append: bool = False) -> Pipeline:
    """Make the exporter of spans of that name, and its pipeline.

    ``append``: a file goes on after the output of the run's earlier collector.
    """
    if name == "otlp":
        from sgl_aspects.tracing.export.otlp import Rejections, span_exporter
        from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder

        rejections, encoder = Rejections("TRACES"), SpanEncoder()
        exporter = span_exporter(settings.protocol, rejections, encoder)
        return Pipeline(name, exporter, rejections.take, encoder.span)
    return Pipeline(name, _span_exporter(name, settings, append=append))


def _span_exporter(name: str, settings: TraceSettings, *, append: bool) -> SpanExporter:
    if name == "console":
        return ConsoleSpanExporter(out=sys.stdout)
    if name not in _FILES:
        exporter: SpanExporter = _registered("traces", name, ("export", "shutdown"))
        return exporter
    make, (variable, path) = _FILES[name], settings.files()[name]
    try:
        return make(path, append=append or path in settings.begun)
    except OSError as error:
        raise ConfigError(f"{variable}={path!r}: {error.strerror}") from error


def make_reader(name: str, settings: TraceSettings) -> MetricReader:
    """Make the reader of metrics of that name, which sends them every ``OTEL_METRIC_EXPORT_INTERVAL``."""
    if name == "prometheus":
        return _prometheus_reader(settings)
    exporter: MetricExporter
    if name == "console":
        exporter = ConsoleMetricExporter(out=sys.stdout)
    elif name == "otlp":
        from sgl_aspects.tracing.export.otlp import Rejections, metric_exporter

        exporter = metric_exporter(settings.metrics_protocol, Rejections("METRICS"))
    else:
        made = _registered("metrics", name, ("shutdown",))
        if isinstance(made, MetricReader):
            return made
        exporter = made
    return PeriodicExportingMetricReader(exporter)


def _prometheus_reader(settings: TraceSettings) -> MetricReader:
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
        server, _ = start_http_server(settings.prometheus_port, settings.prometheus_host)
    except OSError as error:
        raise settings.port_error(error) from error

    class Page(PrometheusMetricReader):
        """Release the port before the end of the run is reported: the next run may need it at once."""

        def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
            super().shutdown(timeout_millis, **kwargs)
            server.socket.shutdown(socket.SHUT_RDWR)  # wakes its thread
            server.shutdown()
            server.server_close()

    page: MetricReader = Page()
    return page


def _registered(signal: str, name: str, methods: tuple[str, ...]) -> Any:
    """Make the exporter of the entry point ``name``; ``signal``: traces or metrics.

    :raises ConfigError: it is not installed, raises, takes too long, or lacks one of ``methods``.
    """
    point = installed_exporter(signal, name)
    if point is None:
        raise ConfigError(f"OTEL_{signal.upper()}_EXPORTER names {name!r}, which is no longer installed")
    distribution = point.dist.name if point.dist is not None else "an unknown distribution"
    exporter = f"the exporter {name!r} ({point.value} of {distribution})"
    made, fault = _made(point, name)
    if fault is not None:
        raise ConfigError(f"{exporter} cannot be made: {type(fault).__name__}: {fault}") from fault
    if made is None:
        raise ConfigError(f"{exporter} was not made within {_MAKING_SECONDS:g} s")
    lacking = [method for method in methods if not callable(getattr(made, method, None))]
    if lacking:
        raise ConfigError(f"{exporter} made {made!r}, which has no {lacking[0]}()")
    return made


def _made(point: EntryPoint, name: str) -> tuple[Any, BaseException | None]:
    """Call what another package registered, in a thread that may hang; return its result or error."""
    made: list[Any] = [None]
    faults: list[BaseException | None] = [None]

    def make() -> None:
        try:
            made[0] = point.load()()
        except BaseException as error:  # noqa: BLE001  # sys.exit among them: its caller reports it
            faults[0] = error

    maker = threading.Thread(target=make, name=f"make {name}", daemon=True)
    maker.start()
    maker.join(_MAKING_SECONDS)
    return made[0], faults[0]
