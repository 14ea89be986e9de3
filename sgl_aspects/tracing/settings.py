"""Settings of tracing, read from the environment and checked in one place.

======================================  ==============================================================
``SGL_ASPECTS_TRACE``                   level: 0 or off, 1 request, 2 + scheduler, 3 or on + forward, 4
``SGL_ASPECTS_RECORDER``                ring (a file that a collector follows), sdk (the application's own
                                        ``TracerProvider``, in each process), or off
``SGL_ASPECTS_TRACE_FILE``              the file that the ``otlp-json-file`` exporter writes
``SGL_ASPECTS_TRACE_PERFETTO_FILE``     the file that the ``perfetto`` exporter writes (trace.json)
``SGL_ASPECTS_TRACE_FLUSH_SECONDS``     the longest that the end of a run waits for its exporters (3)
``SGL_ASPECTS_CONTROL_FROM``            a file or an address with levels for many hosts (run/fleet.py)
``SGL_ASPECTS_TRACE_KEEP_FAILED``       failed requests are kept regardless of the sampling (on)
``SGL_ASPECTS_TRACE_KEEP_SLOWER_THAN``  and those that took this many seconds or more (unset: none)
``SGL_ASPECTS_TRACE_CAUSES``            requests that took this many seconds or more say why (unset: none)
``SGL_ASPECTS_TRACE_TARGET_TTFT``       targets for the metric of goodput, in seconds: of the first token,
``SGL_ASPECTS_TRACE_TARGET_ITL``        and of a request's mean time between tokens (unset: none)
``SGL_ASPECTS_TRACE_REDACT``            module:function, from text to text, for prompts and answers, which
                                        ``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` turns on
``SGL_ASPECTS_TRACE_TENANT``            whom a request is for: the name of a header, or baggage:KEY (unset)
``SGL_ASPECTS_TRACE_CONTENT_LENGTH``    characters kept of a prompt and of an answer (4096)
``SGL_ASPECTS_TRACE_KEEP``              keep the run folder with its raw records (off)
``SGL_ASPECTS_TRACE_SUMMARY``           the collector reports at the end how many spans it delivered (off:
                                        only where something was lost)
``SGL_ASPECTS_TRACE_RUN``               the run folder; set by the first process for its children
``OTEL_TRACES_EXPORTER``                comma list of otlp, console, otlp-json-file, perfetto, and what
                                        installed packages have registered for OpenTelemetry; or none
                                        (unset: otlp, or what a file or an endpoint is given for)
``OTEL_METRICS_EXPORTER``               comma list of otlp, prometheus, console; or none
                                        (unset: otlp where the traces go there, and else none)
``OTEL_EXPORTER_PROMETHEUS_HOST``       where the page for Prometheus is served (127.0.0.1),
``OTEL_EXPORTER_PROMETHEUS_PORT``       and its port (9464)
``OTEL_TRACES_SAMPLER``                 and ``..._ARG``: always_on, always_off, traceidratio, and
                                        parentbased_ before each (parentbased_always_on)
``OTEL_PROPAGATORS``                    without tracecontext (none) a caller's ``traceparent`` is not read
``OTEL_EXPORTER_OTLP_PROTOCOL``         http/protobuf or grpc (``..._TRACES_PROTOCOL`` and
                                        ``..._METRICS_PROTOCOL`` go first)
``OTEL_EXPORTER_OTLP_ENDPOINT``         and every other OTLP variable: read by OpenTelemetry's exporters, and
                                        checked before (:mod:`~sgl_aspects.tracing.variables`), as are
                                        ``OTEL_BSP_…``, ``OTEL_METRIC_EXPORT_…`` and the limits of spans
``OTEL_SERVICE_NAME``                   and ``OTEL_RESOURCE_ATTRIBUTES``: read by OpenTelemetry's SDK
``OTEL_SEMCONV_STABILITY_OPT_IN``       gen_ai_latest_experimental: only the conventions' newest names
                                        (unset: ``gen_ai.system``, too)
``OTEL_SDK_DISABLED``                   true turns everything off
======================================  ==============================================================
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.packages import hint
from sgl_aspects.tracing.content import ContentCapture
from sgl_aspects.tracing.sampling import (
    PARENT_DECIDES,
    Sampler,
    sampler_from_environment,
    takes_callers_context,
)
from sgl_aspects.tracing.variables import (
    check_exported,
    check_otlp,
    normalise,
    opted_in,
    secrets,
    without_secrets,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

EXPORTERS = ("otlp", "console", "otlp-json-file", "perfetto")
METRIC_EXPORTERS = ("otlp", "prometheus", "console")
_SILENT = {"otlp", "otlp-json-file", "perfetto", "prometheus"}
RECORDERS = ("ring", "sdk", "off")
PROTOCOLS = ("http/protobuf", "grpc")
LEVELS = {"off": 0, "false": 0, "no": 0, "on": 3, "true": 3, "yes": 3, "0": 0, "1": 1, "2": 2, "3": 3, "4": 4}

#: The run folder, set by a run's first process for its children.
RUN = "SGL_ASPECTS_TRACE_RUN"
#: The files that `sgl-aspects run` has begun, one a line.
BEGUN = "SGL_ASPECTS_TRACE_BEGUN"
_METRICS_ENDPOINT = "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
_OTLP = ("opentelemetry.exporter.otlp.proto.common", "opentelemetry.proto", "google.protobuf")
#: Each exporter's distribution, and the modules that it imports: one may be missing on its own.
_PACKAGES = {
    "http/protobuf": (
        "opentelemetry-exporter-otlp-proto-http",
        ("opentelemetry.exporter.otlp.proto.http", *_OTLP, "requests"),
    ),
    "grpc": (
        "opentelemetry-exporter-otlp-proto-grpc",
        ("opentelemetry.exporter.otlp.proto.grpc", *_OTLP, "google.rpc", "grpc"),
    ),
    "otlp-json-file": ("opentelemetry-exporter-otlp-proto-http", _OTLP),
    "prometheus": (
        "opentelemetry-exporter-prometheus",
        ("opentelemetry.exporter.prometheus", "prometheus_client"),
    ),
}


@dataclass(frozen=True)
class TraceSettings:
    """One run's settings; ``endpoint`` None: OpenTelemetry's default."""

    level: int = 0
    disabled: bool = False
    recorder: str = "ring"
    exporters: tuple[str, ...] = ("otlp",)
    protocol: str = "http/protobuf"
    metric_exporters: tuple[str, ...] = ()
    metrics_protocol: str = "http/protobuf"
    prometheus_host: str = "127.0.0.1"
    prometheus_port: int = 9464
    sampler: Sampler = PARENT_DECIDES
    takes_context: bool = True
    keep_failed: bool = True
    keep_slower_than: float | None = None
    causes_slower_than: float | None = None
    #: Seconds to the first token, and between tokens.
    targets: tuple[float | None, float | None] = (None, None)
    content: ContentCapture | None = None
    tenant: str | None = None
    #: Values of OTEL_SEMCONV_STABILITY_OPT_IN.
    opted_in: tuple[str, ...] = ()
    endpoint: str | None = None
    metrics_endpoint: str | None = None
    file: str | None = None
    #: Files that `sgl-aspects run` has begun, for every program that it starts.
    begun: tuple[str, ...] = ()
    perfetto_file: str = "trace.json"
    flush_seconds: int = 3
    keep_run_folder: bool = False
    prints_summary: bool = False
    run_folder: str | None = None
    #: Whether processes record what only metrics need. Set by the first process for its children.
    has_metrics: bool = False
    #: Where they are read from.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_environment(cls) -> TraceSettings:
        """Read every variable of the table above; a value that is not allowed is a ``ConfigError``."""
        level = LEVELS[env.choice("SGL_ASPECTS_TRACE", tuple(LEVELS), "off")]
        recorder = env.choice("SGL_ASPECTS_RECORDER", RECORDERS, "ring")
        disabled = recorder == "off" or env.choice("OTEL_SDK_DISABLED", ("true", "false"), "false") == "true"
        file = env.text("SGL_ASPECTS_TRACE_FILE")
        base = env.text("OTEL_EXPORTER_OTLP_ENDPOINT")
        endpoint = env.text("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or base
        exporters = _named_exporters("OTEL_TRACES_EXPORTER") or _chosen_by(endpoint, file)
        protocol = env.choice("OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOLS, "http/protobuf")
        settings = cls(
            level=0 if disabled else level,
            disabled=disabled,
            recorder=recorder,
            exporters=exporters,
            protocol=env.choice("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", PROTOCOLS, "") or protocol,
            metric_exporters=_metric_exporters(exporters),
            metrics_protocol=env.choice("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", PROTOCOLS, "") or protocol,
            prometheus_host=env.text("OTEL_EXPORTER_PROMETHEUS_HOST") or "127.0.0.1",
            prometheus_port=env.integer("OTEL_EXPORTER_PROMETHEUS_PORT", 9464, minimum=1, maximum=65535),
            sampler=sampler_from_environment(),
            takes_context=takes_callers_context(),
            keep_failed=env.flag("SGL_ASPECTS_TRACE_KEEP_FAILED", True),
            keep_slower_than=env.number("SGL_ASPECTS_TRACE_KEEP_SLOWER_THAN"),
            causes_slower_than=env.number("SGL_ASPECTS_TRACE_CAUSES"),
            targets=(
                env.number("SGL_ASPECTS_TRACE_TARGET_TTFT"),
                env.number("SGL_ASPECTS_TRACE_TARGET_ITL"),
            ),
            content=ContentCapture.from_environment(),
            tenant=_tenant(env.text("SGL_ASPECTS_TRACE_TENANT")),
            opted_in=opted_in(),
            endpoint=endpoint,
            metrics_endpoint=env.text(_METRICS_ENDPOINT) or base,
            file=file,
            begun=tuple((env.text(BEGUN) or "").splitlines()),
            perfetto_file=env.text("SGL_ASPECTS_TRACE_PERFETTO_FILE") or "trace.json",
            flush_seconds=env.integer("SGL_ASPECTS_TRACE_FLUSH_SECONDS", 3, minimum=0, maximum=3600),
            keep_run_folder=env.flag("SGL_ASPECTS_TRACE_KEEP"),
            prints_summary=env.flag("SGL_ASPECTS_TRACE_SUMMARY"),
            run_folder=env.text(RUN),
            has_metrics=env.flag("SGL_ASPECTS_TRACE_METRICS"),
            environment=dict(env.current()),
        )
        # Children only record: the exporters were checked in the first process.
        return settings.checked() if settings.level and not settings.run_folder else settings

    @classmethod
    def chosen(
        cls,
        environment: Mapping[str, str],
        *,
        level: int | str,
        exporters: Sequence[str] | None = None,
        endpoint: str | None = None,
        file: str | None = None,
        service_name: str | None = None,
        prometheus: int | None = None,
    ) -> TraceSettings:
        """Read ``environment`` with these choices for a run of its own; None keeps the environment's value.

        :raises ConfigError: a choice that cannot work.
        """
        values = dict(environment)

        def put(name: str, value: str) -> None:
            values[env.spelled(name, values)] = value

        values.pop(env.spelled(RUN, values), None)
        put("SGL_ASPECTS_TRACE", str(level))
        if endpoint:
            values["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
            values.pop("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", None)  # it would take precedence
        if file:
            put("SGL_ASPECTS_TRACE_FILE", file)
        if exporters is None and (endpoint or file):
            exporters = _chosen_by(endpoint, file)
        if exporters is not None:
            named = exporters if isinstance(exporters, str) else ",".join(exporters)
            values["OTEL_TRACES_EXPORTER"] = named or "none"
        if service_name:
            values["OTEL_SERVICE_NAME"] = service_name
        with env.reading_from(values):
            if prometheus is not None:
                values["OTEL_EXPORTER_PROMETHEUS_PORT"] = str(prometheus)
                others = cls.from_environment().metric_exporters
                values["OTEL_METRICS_EXPORTER"] = ",".join(dict.fromkeys((*others, "prometheus")))
            settings = cls.from_environment()
        if settings.level:
            settings.require_port()
        return settings

    def checked(self) -> TraceSettings:
        """Return self without ``none``; raises ``ConfigError`` for a choice that cannot work."""
        if self.disabled or self.recorder == "sdk":
            return self  # nothing is exported here, or only by the application's provider
        exporters = _known("traces", self.exporters, EXPORTERS)
        metric_exporters = _known("metrics", self.metric_exporters, METRIC_EXPORTERS)
        if "prometheus" in metric_exporters:
            _require("prometheus", "the metrics exporter prometheus")
        check_exported(exports_metrics=bool(metric_exporters))
        if "otlp" in metric_exporters:
            _require(self.metrics_protocol, f"OTLP over {self.metrics_protocol}")
            check_otlp("METRICS", self.metrics_protocol, self.metrics_endpoint)
        if "otlp-json-file" in exporters:
            if not self.file:
                raise ConfigError(
                    "the exporter otlp-json-file needs a file: set SGL_ASPECTS_TRACE_FILE=traces.jsonl"
                )
            _require("otlp-json-file", "the exporter otlp-json-file")
        for variable, file in self.files().values():
            written = file if os.path.exists(file) else os.path.dirname(file) or "."
            if os.path.isdir(file) or not os.access(written, os.W_OK):
                raise ConfigError(f"{variable}={file!r}: name a file in a writable folder")
        if "otlp" in exporters:
            _require(self.protocol, f"OTLP over {self.protocol}")
            check_otlp("TRACES", self.protocol, self.endpoint)
        return replace(self, exporters=exporters, metric_exporters=metric_exporters)

    def require_port(self) -> None:
        """Raise ``ConfigError`` if the page for Prometheus cannot be served, before anything is started."""
        if "prometheus" not in self.metric_exporters:
            return
        host, port = self.prometheus_host, self.prometheus_port
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise self.port_error(error) from error

    def port_error(self, error: OSError) -> ConfigError:
        """Return the error of a port for Prometheus that cannot be used."""
        return ConfigError(
            f"metrics for Prometheus: port {self.prometheus_port} on {self.prometheus_host} cannot be used "
            f"({error.strerror or error}): choose another with OTEL_EXPORTER_PROMETHEUS_PORT or "
            "--prometheus PORT"
        )

    def files(self) -> dict[str, tuple[str, str]]:
        """Return what the exporters of spans write: by exporter, the file's variable and path."""
        files = {
            "otlp-json-file": ("SGL_ASPECTS_TRACE_FILE", self.file or ""),
            "perfetto": ("SGL_ASPECTS_TRACE_PERFETTO_FILE", self.perfetto_file),
        }
        return {name: file for name, file in files.items() if name in self.exporters}

    def destinations(self) -> list[str]:
        """Return where spans and metrics go: OTLP's endpoint first, files, names of other exporters."""
        places = {
            "otlp": self.otlp_endpoint(),
            "prometheus": f"http://{self.prometheus_host}:{self.prometheus_port}/metrics",
            **{name: path for name, (_, path) in self.files().items()},
        }
        names = {*self.exporters, *self.metric_exporters} - {"none"}
        return [places.get(name, name) for name in sorted(names, key=lambda name: (name != "otlp", name))]

    def otlp_endpoint(self) -> str:
        """Return the endpoint of the spans, without what may be secret; OpenTelemetry's own if unset."""
        default = "http://localhost:4317" if self.protocol == "grpc" else "http://localhost:4318"
        return without_secrets(self.endpoint or default, secrets())

    def prints(self) -> bool:
        """Return whether an exporter may write to standard output: the console's, and third-party ones."""
        return not {*self.exporters, *self.metric_exporters} <= _SILENT

    def collector_environment(self) -> dict[str, str]:
        """Return the environment in which ``from_environment`` makes these settings, for the collector."""
        values = dict(self.environment)
        normalise(values)
        values.pop(env.spelled(RUN, values), None)
        values["SGL_ASPECTS_TRACE"] = "off"  # the collector is not traced itself
        values.pop(env.spelled("SGL_ASPECTS_RUN", values), None)  # plugins are for the engine's processes
        for name in ("SGL_ASPECTS_API_KEY", "ASPECTS_API_KEY"):  # the server's own
            values.pop(name, None)
        return values


def _tenant(source: str | None) -> str | None:
    if source is not None and not re.fullmatch(r"(baggage:)?[A-Za-z0-9_.-]+", source):
        raise ConfigError(
            f"SGL_ASPECTS_TRACE_TENANT={source!r}: write a header's name, such as x-tenant, or baggage:KEY"
        )
    return source if source is None or ":" in source else source.lower()


def _chosen_by(endpoint: str | None, file: str | None) -> tuple[str, ...]:
    """Return the default exporters: those for a given endpoint or file; else OTLP."""
    if not file:
        return ("otlp",)
    return ("otlp", "otlp-json-file") if endpoint else ("otlp-json-file",)


def _metric_exporters(trace_exporters: Sequence[str]) -> tuple[str, ...]:
    """Return the exporters in ``OTEL_METRICS_EXPORTER``; unset, metrics go to OTLP if the traces do."""
    return _named_exporters("OTEL_METRICS_EXPORTER") or (("otlp",) if "otlp" in trace_exporters else ())


def _named_exporters(variable: str) -> tuple[str, ...]:
    """Return each name once, built-in ones in any case; () if the variable is unset or empty."""
    ours = {*EXPORTERS, *METRIC_EXPORTERS, "none"}
    named = env.names(variable) or ()
    return tuple(dict.fromkeys(name.lower() if name.lower() in ours else name for name in named))


def _known(signal: str, names: Sequence[str], ours: Sequence[str]) -> tuple[str, ...]:
    """Return the names without ``none``; raises ``ConfigError`` for one that nobody brings along."""
    found = tuple(name for name in names if name != "none")
    for name in found:
        if name not in ours and installed_exporter(signal, name) is None:
            raise ConfigError(
                f"OTEL_{signal.upper()}_EXPORTER names {name!r}: choose from {', '.join(ours)}, one that an "
                f"installed package brings along (opentelemetry_{signal}_exporter), or none"
            )
    return found


def installed_exporter(signal: str, name: str) -> EntryPoint | None:
    """Return the entry point registered for OpenTelemetry under this name; ``signal``: traces or metrics."""
    import importlib.metadata  # rarely needed: built-in names are looked up first

    group = f"opentelemetry_{signal}_exporter"
    return next(iter(importlib.metadata.entry_points(group=group, name=name)), None)


def _require(package: str, what: str) -> None:
    distribution, modules = _PACKAGES[package]
    missing = [name for name in modules if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"{what} needs packages that are not installed ({', '.join(missing)}): {hint(distribution)}; "
            "level 0 runs hooks without tracing"
        )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent package, or one that it imports
        return False
