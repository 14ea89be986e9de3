"""The port of the Prometheus page, checked in the first process, so that its user sees the error."""

from __future__ import annotations

import socket

from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing.settings import TraceSettings


def require_port(settings: TraceSettings) -> None:
    """Raise ``ConfigError`` if the Prometheus page cannot be served, before anything is started."""
    if "prometheus" not in settings.metric_exporters:
        return
    host, port = settings.prometheus_host, settings.prometheus_port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(port_problem(host, port, error)) from error


def port_problem(host: str, port: int, error: OSError) -> str:
    """Return the message about a port that cannot be used."""
    return (
        f"metrics for Prometheus: port {port} on {host} cannot be used ({error.strerror or error}): choose "
        "another with OTEL_EXPORTER_PROMETHEUS_PORT or --prometheus PORT"
    )
