"""Messages of a collector about its exporters: on the engine's standard error, short, without secrets."""

from __future__ import annotations

import logging
import re

from sgl_aspects.terminal import printable, say
from sgl_aspects.tracing.variables import secrets, without_secrets

_LONGEST_LINE = 300
# urllib3's text about a connection that cannot be made: the address, and the reason at its end.
_ADDRESS = re.compile(r"HTTPS?ConnectionPool\(host='([^']+)', port=(\d+)\)")
_OBJECTS = re.compile(r"HTTPS?Connection(Pool)?\([^)]*\)|<urllib3[^>]*>")
_REASON = re.compile(r"Caused by .*?(?:Errno -?\d+\] )?([A-Za-z][^:\"'\]]*?)(?: \(_ssl[^)]*\))?[\"']?\)")
# Of the one, and of gRPC, whose text has the address before.
_CERTIFICATE = re.compile(r"(?:certificate verify failed|:CERTIFICATE_VERIFY_FAILED): (.*?)(?:\.? \(_ssl|:)")
_GRPC_ADDRESS = re.compile(r" to ([^\s,]+):(\d+), (?:error code|retrying)")
# OpenTelemetry's text about an exception, which is the reason.
_NO_CODE = " batch code: None, reason: "
# What a library says of an endpoint that speaks another protocol.
_OTHERWISE = {
    r"BadStatusLine('\x00": "gRPC: name its port for HTTP, such as 4318, or set {}=grpc",
    "Expected SETTINGS frame": "HTTP: name its port for gRPC, such as 4317, or set {}=http/protobuf",
    "wrong version number": "no TLS: write http:// instead of https://",
}
# Cap on the messages of one exporter, whose texts may vary.
_MOST_KINDS = 5


def report_line(text: str) -> None:
    """Write one line, without a backend's control characters."""
    say(f"sgl-aspects collector: {printable(text)}")


class FirstFailure(logging.Handler):
    """Reports each kind of failure once, in one line; OpenTelemetry would log each attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._reported: dict[str, set[str]] = {}
        self._secrets = secrets()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f" {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        text = without_secrets(_shortened(" ".join(text.split())), self._secrets)
        if len(text) > _LONGEST_LINE:
            text = text[:_LONGEST_LINE] + "…"
        kind, reported = re.sub(r"[\d.]+", "#", text), self._reported.setdefault(record.name, set())
        if kind not in reported and len(reported) < _MOST_KINDS:
            reported.add(kind)
            report_line(f"{text} (reported once)")


def _shortened(text: str) -> str:
    for sign, instead in _OTHERWISE.items():
        if sign in text:
            return f"the backend speaks {instead.format('OTEL_EXPORTER_OTLP_PROTOCOL')}"
    address = _ADDRESS.search(text) or _GRPC_ADDRESS.search(text)
    reason = _CERTIFICATE.search(text) or _REASON.search(_OBJECTS.sub("", text))
    if not address or not reason:
        return text.replace(_NO_CODE, ": ")
    where = f"{address[1]}:{address[2]}"
    if "Caused by ProxyError" in text:  # of https the address is the backend's, otherwise the proxy's
        if address[0].startswith("HTTPS"):
            return f"{where} cannot be reached through the proxy: {reason[1]}"
        where = f"the proxy {where}"
    is_unknown = re.match("self.signed|unable to get", reason[1])
    help = "; name the CA's file in OTEL_EXPORTER_OTLP_CERTIFICATE" if is_unknown else ""
    return f"{where} cannot be reached: {reason[1]}{help}"


def quiet_exporters() -> None:
    """Replace the exporters' own logging by :class:`FirstFailure`."""
    handler = FirstFailure()
    for name in ("opentelemetry", "sgl_aspects", "urllib3"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
