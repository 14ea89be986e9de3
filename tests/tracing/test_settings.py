"""Settings that cannot work are errors at once, which name the choices and change nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.export import exporters
from sgl_aspects.tracing.plugin import activate
from sgl_aspects.tracing.session import attach_from_environment
from sgl_aspects.tracing.settings import TraceSettings
from tests.support.distributions import install


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("SGL_ASPECTS_TRACE", "5", "0, 1, 2, 3, 4"),
        ("SGL_ASPECTS_TRACE", "loud", "off"),
        ("OTEL_TRACES_EXPORTER", "otlp,zipkin", "otlp, console, otlp-json-file"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "http/protobuf, grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "udp", "http/protobuf, grpc"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318", "http://localhost:4318"),
        ("OTEL_SDK_DISABLED", "perhaps", "true, false"),
        ("SGL_ASPECTS_TRACE_FLUSH_SECONDS", "-1", "from 0 to 3600"),
        ("OTEL_EXPORTER_PROMETHEUS_PORT", "0", "from 1 to 65535"),
        ("SGL_ASPECTS_TRACE_FILE", "/nowhere/at/all.json", "writable folder"),
        *(("SGL_ASPECTS_TRACE_KEEP_SLOWER_THAN", each, "from 0 up") for each in ("-1", "soon", "inf", "nan")),
        ("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "perhaps", "span_only"),
        ("SGL_ASPECTS_TRACE_REDACT", "module", "module:function"),
        ("SGL_ASPECTS_TRACE_REDACT", ":function", "module:function"),
        ("SGL_ASPECTS_TRACE_CONTENT_LENGTH", "0", "whole number"),
    ],
)
def test_a_wrong_value_names_the_choices(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, choices: str
) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE", "on")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        TraceSettings.from_environment()
    assert choices in str(raised.value)
    assert name in str(raised.value) or "endpoint" in str(raised.value)
    assert value.partition(",")[2] in str(raised.value)


def test_a_timeline_that_cannot_be_written_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE", "1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "perfetto")
    monkeypatch.setenv("SGL_ASPECTS_TRACE_PERFETTO_FILE", "/nowhere/at/all.json")
    with pytest.raises(ConfigError, match=r"PERFETTO_FILE='/nowhere/at/all.json': name a file in a writable"):
        TraceSettings.from_environment()


def test_the_file_exporter_needs_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE", "1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp-json-file")
    with pytest.raises(ConfigError, match="SGL_ASPECTS_TRACE_FILE"):
        TraceSettings.from_environment()


@pytest.mark.parametrize("exporter", ["otlp", "otlp-json-file"])
def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exporter: str
) -> None:
    real = importlib.util.find_spec

    def find_spec(name: str, *rest: Any) -> Any:
        return None if name.startswith("opentelemetry.exporter") else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(
        ConfigError,
        match=r"pip install '?opentelemetry-exporter-otlp-.*: otlp\); level 0 runs hooks without tracing$",
    ):
        attach(exporters=[exporter], file=str(tmp_path / "traces.jsonl"))
    attach(exporters=["console"]).close()


def test_a_file_or_an_endpoint_chooses_its_exporter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, endpoint = str(tmp_path / "traces.jsonl"), "http://localhost:4318"

    def exporters() -> tuple[str, ...]:
        return TraceSettings.from_environment().exporters

    monkeypatch.setenv("SGL_ASPECTS_TRACE", "on")
    assert exporters() == ("otlp",)
    monkeypatch.setenv("SGL_ASPECTS_TRACE_FILE", file)
    assert exporters() == ("otlp-json-file",)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    assert exporters() == ("otlp", "otlp-json-file")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console, otlp")
    assert exporters() == ("console", "otlp")


def test_levels_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, level in {"on": 3, "ON": 3, "off": 0, "2": 2, "0": 0, "": 0}.items():
        monkeypatch.setenv("SGL_ASPECTS_TRACE", value)
        assert TraceSettings.from_environment().level == level
    monkeypatch.setenv("SGL_ASPECTS_TRACE", "on")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert TraceSettings.from_environment().level == 0


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"SGL_ASPECTS_TRACE": "off"},
        {"SGL_ASPECTS_TRACE": "on", "OTEL_SDK_DISABLED": "true"},
        {"SGL_ASPECTS_TRACE": "on", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_disabled_tracing_touches_nothing(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    before = len(aspects.report().hooks)
    activate()
    assert attach_from_environment() is None
    assert len(aspects.report().hooks) == before
    assert "ASPECTS_TRACE_RUN" not in os.environ


def test_a_refused_attach_leaves_nothing() -> None:
    before = len(aspects.report().hooks)
    for wrong in ({"level": 7}, {"exporters": ["jaeger"]}, {"endpoint": "localhost:1"}, {"file": "/no/file"}):
        with pytest.raises(ConfigError):
            attach(**wrong)
    assert len(aspects.report().hooks) == before
    assert "ASPECTS_TRACE_RUN" not in os.environ


def test_one_session_at_a_time_and_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE", "1")
    before = len(aspects.report().hooks)
    with attach(level=2, exporters=["console"]) as session:
        assert os.environ["SGL_ASPECTS_TRACE"] == "2"
        assert os.environ["ASPECTS_TRACE_RUN"] == session.run_folder
        assert os.stat(session.run_folder).st_mode & 0o777 == 0o700
        assert all(entry.stat().st_mode & 0o777 == 0o600 for entry in os.scandir(session.run_folder))
        assert len(aspects.report().hooks) > before
        with pytest.raises(ConfigError, match="close that session"):
            attach()
        activate()
    assert os.environ["SGL_ASPECTS_TRACE"] == "1"
    assert "ASPECTS_TRACE_RUN" not in os.environ
    assert not os.path.exists(session.run_folder)
    assert len(aspects.report().hooks) == before


def test_an_exporter_that_hangs_while_it_is_made_is_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = threading.Event()
    tmp_path.joinpath("slow_exporter.py").write_text("made = None\ndef Spans():\n    made.wait(60)\n")
    install(tmp_path, "slow-exporter", "[opentelemetry_traces_exporter]\nslow=slow_exporter:Spans\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.import_module("slow_exporter"), "made", made)
    monkeypatch.setattr(exporters, "_MAKING_SECONDS", 0.1)
    settings = TraceSettings.chosen({}, level=1, exporters=["slow"])
    with pytest.raises(ConfigError, match=r"of slow-exporter.* was not made within"):
        exporters.make_pipeline("slow", settings)
    made.set()
