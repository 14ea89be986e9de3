"""OpenTelemetry's own variables, checked before anything starts: in the collector an error comes too late.

The exporters read them too, each differently: one fails at a value that another ignores. Here a value that
cannot work is a ``ConfigError`` that names the variable and never shows a header, which may be a secret.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import MutableMapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from sgl_aspects import env
from sgl_aspects.errors import ConfigError

logger = logging.getLogger(__name__)

_MOST = 1 << 31
_LIMITS = (
    "OTEL_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    "OTEL_SPAN_EVENT_COUNT_LIMIT",
    "OTEL_SPAN_LINK_COUNT_LIMIT",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
    "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
)
_EXEMPLARS = "OTEL_METRICS_EXEMPLAR_FILTER"
_CHOICES = {
    _EXEMPLARS: ("trace_based", "always_on", "always_off"),
    "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": ("cumulative", "delta", "lowmemory"),
    "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION": (
        "explicit_bucket_histogram",
        "base2_exponential_bucket_histogram",
    ),
}
_OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"
#: Opts in to the newest names of the GenAI conventions alone.
LATEST_NAMES = "gen_ai_latest_experimental"
# What other instrumentations read in the same variable.
_OF_OTHERS = ("http", "database", "messaging", "rpc", "code", "k8s")
_COMPRESSIONS = {"grpc": ("none", "gzip"), "http/protobuf": ("none", "gzip", "deflate")}
_QUEUE = 8192
_BATCH = 2048
# A shorter value is not a secret, and may occur in any word.
_SHORTEST_SECRET = 6
# In seconds here, but in milliseconds elsewhere.
_UNLIKELY_SECONDS = 1000
_SIGNALS = ("TRACES", "METRICS")
_PROBE_SECONDS = 0.3


def normalise(variables: MutableMapping[str, str]) -> None:
    """Normalise a collector's variables: an empty one is unset, by the specification.

    Blanks around a value are removed, and so are the parts of OpenTelemetry that the application configures
    itself.
    """
    for name in [name for name in variables if name.startswith("OTEL_")]:
        variables[name] = variables[name].strip()
        is_applications = name.startswith("OTEL_PYTHON_") and not name.startswith("OTEL_PYTHON_EXPORTER_")
        if is_applications or not variables[name]:
            del variables[name]
    if _EXEMPLARS in variables:  # the SDK accepts it in lower case only
        variables[_EXEMPLARS] = variables[_EXEMPLARS].lower()


class BatchSettings(NamedTuple):
    """Settings of a batch processor: queue size, batch size, and the longest delay in milliseconds."""

    queue: int
    batch: int
    delay: int

    @classmethod
    def from_environment(cls) -> BatchSettings:
        env.integer("OTEL_BSP_EXPORT_TIMEOUT", 30000, minimum=0, maximum=_MOST)  # the SDK ignores it
        queue = env.integer("OTEL_BSP_MAX_QUEUE_SIZE", _QUEUE, minimum=1, maximum=1 << 24)
        return cls(
            queue,
            env.integer(
                "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(_BATCH, (queue + 1) // 2), minimum=1, maximum=queue
            ),
            env.integer("OTEL_BSP_SCHEDULE_DELAY", 5000, minimum=1, maximum=_MOST),
        )


class SpanLimits(NamedTuple):
    """The limits on a span's contents; None: unlimited."""

    attributes: int | None = None
    length: int | None = None
    links: int | None = None

    @classmethod
    def from_environment(cls) -> SpanLimits:
        found = {name: _limit(name) for name in _LIMITS}
        attributes = found["OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"]
        length = found["OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT"]
        return cls(
            found["OTEL_ATTRIBUTE_COUNT_LIMIT"] if attributes is None else attributes,
            found["OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT"] if length is None else length,
            found["OTEL_SPAN_LINK_COUNT_LIMIT"],
        )


def _limit(name: str) -> int | None:
    return None if env.text(name) is None else env.integer(name, 0, minimum=0, maximum=_MOST)


class TlsFiles(NamedTuple):
    """The TLS files of a signal, None if unset: trusted certificates, client certificate and its key."""

    certificate: str | None
    client_certificate: str | None
    client_key: str | None


def tls_files(signal: str) -> TlsFiles:
    """Read the files of ``signal`` (TRACES or METRICS), whose own variables take precedence."""
    return TlsFiles(
        *(_named(signal, kind)[1] for kind in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"))
    )


def opted_in() -> tuple[str, ...]:
    """Read ``OTEL_SEMCONV_STABILITY_OPT_IN``: the conventions whose newest names are wanted."""
    return env.names(_OPT_IN) or ()


def warn_of_unknown(opted_in: tuple[str, ...]) -> None:
    """Log the values that no instrumentation knows: the variable is others', too, so it is not an error."""
    known = {LATEST_NAMES, *_OF_OTHERS, *(f"{name}/dup" for name in _OF_OTHERS)}
    unknown = [value for value in opted_in if value not in known]
    if unknown:
        logger.warning("%s: unknown %s; tracing reads %s", _OPT_IN, ", ".join(unknown), LATEST_NAMES)


def compression(signal: str, protocol: str) -> str:
    """Return ``none``, ``gzip``, or another value of the protocol."""
    name, _ = _named(signal, "COMPRESSION")
    return env.choice(name, _COMPRESSIONS[protocol], "none")


def check_exported(exports_metrics: bool) -> None:
    """Check the variables of every exporter. Raises ``ConfigError`` for a value that is not allowed."""
    BatchSettings.from_environment()
    SpanLimits.from_environment()
    for name, choices in _CHOICES.items():
        env.choice(name, choices, choices[0])
    if exports_metrics:
        env.integer("OTEL_METRIC_EXPORT_INTERVAL", 60000, minimum=1, maximum=_MOST)
        env.integer("OTEL_METRIC_EXPORT_TIMEOUT", 30000, minimum=1, maximum=_MOST)


def check_otlp(signal: str, protocol: str, endpoint: str | None) -> None:
    """Check those of OTLP for ``signal`` (TRACES or METRICS). Raises ``ConfigError``."""
    if endpoint:
        _check_endpoint(endpoint, protocol)
    _check_headers(_named(signal, "HEADERS")[0])
    name, _ = _named(signal, "TIMEOUT")
    seconds = env.number(name)
    if seconds == 0:
        raise ConfigError(f"{name}='0': write the seconds that a backend has for a batch, such as 10")
    if seconds is not None and seconds >= _UNLIKELY_SECONDS:
        hours = seconds / 3600
        logger.warning(
            "%s=%g: OpenTelemetry for Python takes it for seconds, %.1f hours", name, seconds, hours
        )
    compression(signal, protocol)
    for kind in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
        name, path = _named(signal, kind)
        if path is not None and not (os.path.isfile(path) and os.access(path, os.R_OK)):
            raise ConfigError(f"{name}={path!r}: there is no such file, or it cannot be read")
    _check_certificates(signal)


def unreachable(endpoint: str) -> OSError | None:
    """Return why nothing can be reached at the endpoint; None where something listens, or a proxy is used, or
    it is no host and port, as gRPC's ``unix:PATH``.
    """
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    try:
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        if host and port and (not getproxies() or proxy_bypass(host)):
            socket.create_connection((host, port), _PROBE_SECONDS).close()
    except OSError as error:
        return error
    except ValueError:
        pass  # a port that is none: reported with the settings
    return None


def refuses_connections(endpoint: str) -> bool:
    """Return whether nothing listens at the endpoint; False where a proxy is used or an answer is slow."""
    return isinstance(unreachable(endpoint), ConnectionRefusedError)


def secrets() -> list[str]:
    """Return the values that must not be printed: all headers, as written and as sent."""
    found: set[str] = set()
    for name in ("OTEL_EXPORTER_OTLP_HEADERS", *(f"OTEL_EXPORTER_OTLP_{s}_HEADERS" for s in _SIGNALS)):
        for pair in (env.text(name) or "").split(","):
            value = pair.partition("=")[2].strip() or pair.strip()
            sent = unquote(value).strip()
            found.update((value, sent, repr(sent)[1:-1], sent.partition(" ")[2]))
    return sorted((secret for secret in found if len(secret) >= _SHORTEST_SECRET), key=len, reverse=True)


def without_secrets(text: str, hidden: list[str]) -> str:
    """Return ``text`` with stars for the ``hidden`` values and for users, passwords and queries of URLs."""
    for secret in hidden:
        text = text.replace(secret, "***")
    text = re.sub(r"(?<=://)[^/\s@]+@", "***@", text)
    return re.sub(r"(/[^\s?'\"]*)\?[^\s'\")]+", r"\1?***", text)


def _named(signal: str, kind: str) -> tuple[str, str | None]:
    """Return the variable that applies, the signal's own or the general one, and its value."""
    own, of_all = f"OTEL_EXPORTER_OTLP_{signal}_{kind}", f"OTEL_EXPORTER_OTLP_{kind}"
    value = env.text(own)
    return (of_all, env.text(of_all)) if value is None else (own, value)


def _check_endpoint(endpoint: str, protocol: str) -> None:
    shown = without_secrets(endpoint, [])
    scheme = endpoint.partition("://")[0].lower()
    if protocol != "grpc" and scheme not in ("http", "https"):
        raise ConfigError(
            f"OTLP endpoint {shown!r}: write a URL such as http://localhost:4318, "
            "or set OTEL_EXPORTER_OTLP_PROTOCOL=grpc"
        )
    if scheme in ("http", "https"):
        try:
            parts = urlsplit(endpoint)
            is_right = bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", endpoint)
        except ValueError:
            is_right = False
        if not is_right:
            raise ConfigError(f"OTLP endpoint {shown!r}: write host and port, as in http://localhost:4318")
        if protocol == "grpc" and parts.username is not None:
            raise ConfigError(
                f"OTLP endpoint {shown!r}: gRPC sends no user; write OTEL_EXPORTER_OTLP_HEADERS instead"
            )


def _check_certificates(signal: str) -> None:
    """Check that the files are PEM certificates and keys without a password, since none could be typed in."""
    files = tls_files(signal)
    if not any(files):
        return
    import ssl

    if files.client_key and not files.client_certificate:
        name, _ = _named(signal, "CLIENT_KEY")
        raise ConfigError(f"{name} needs its certificate: set {name.replace('KEY', 'CERTIFICATE')}, too")
    kind, context = "CERTIFICATE", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if files.certificate:
            context.load_verify_locations(files.certificate)
        kind = "CLIENT_CERTIFICATE"
        if files.client_certificate:
            context.load_cert_chain(files.client_certificate, files.client_key, password="")
    except OSError as error:  # SSLError is a subclass
        name, path = _named(signal, kind)
        raise ConfigError(
            f"{name}={path!r}: no certificate can be read there, in PEM form and with its key ({error})"
        ) from error


def _check_headers(name: str) -> None:
    """Parse ``name=value,name=value``, values percent-encoded. An error gives the position."""
    pairs = (env.text(name) or "").split(",")
    for number, pair in enumerate(pairs, start=1):
        header, is_pair, value = (part.strip() for part in pair.partition("="))
        if not pair.strip():
            continue
        if not (is_pair and re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", header)):
            raise ConfigError(
                f"{name}: part {number} of {len(pairs)} is not a header: write name=value,name=value, "
                "and a comma within a value as %2C"
            )
        if re.search(r'[";\\]', value):
            raise ConfigError(f'{name}: in the value of {header!r} write " as %22, ; as %3B and \\ as %5C')
        if not re.fullmatch(r"[\t -~]*", unquote(value)):
            raise ConfigError(
                f"{name}: the value of {header!r} has characters that no header can carry: "
                "write it in ASCII, on one line"
            )
