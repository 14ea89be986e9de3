"""The files that exporters write: several collectors may, and the disk may be full."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import SpanContext, TraceFlags

from sgl_aspects.tracing import attach
from sgl_aspects.tracing.export.chrome_trace import ChromeTraceExporter
from sgl_aspects.tracing.export.otlp_file import OtlpJsonFileExporter
from tests.support.processes import command, wait_until
from tests.support.sessions import begin


def span(name: str) -> ReadableSpan:
    return ReadableSpan(name, SpanContext(1, 2, False, TraceFlags(1)), start_time=1000, end_time=2000)


def names_of_timeline(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X"]


def names_of_lines(path: Path) -> list[str]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [one["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["name"] for one in lines]


KINDS = [(ChromeTraceExporter, names_of_timeline), (OtlpJsonFileExporter, names_of_lines)]


@pytest.mark.parametrize(("exporter", "names_of"), KINDS)
def test_a_file_is_complete_after_each_export_by_any_collector(
    tmp_path: Path, exporter: type[Any], names_of: Callable[[Path], list[str]]
) -> None:
    path = tmp_path / "file"
    path.write_text("of the last time")
    one: SpanExporter = exporter(str(path))
    assert names_of(path) == []
    other: SpanExporter = exporter(str(path), append=True)
    for writer, name in ((one, "a"), (other, "b"), (one, "c")):
        writer.export([span(name)])
    one.shutdown()
    other.export([span("d")])
    assert names_of(path) == ["a", "b", "c", "d"]
    other.shutdown()
    exporter(str(path)).shutdown()
    assert names_of(path) == []


@pytest.mark.parametrize(("exporter", "names_of"), KINDS)
def test_what_a_full_disk_takes_in_part_is_taken_back(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exporter: type[Any],
    names_of: Callable[[Path], list[str]],
) -> None:
    """Spans reported as lost do not appear later, and the following ones are intact."""
    path, write = tmp_path / "file", os.pwrite
    writer: SpanExporter = exporter(str(path))
    writer.export([span("a")])
    room = [10]

    def full(descriptor: int, data: bytes, position: int) -> int:
        count = min(len(data), room[0]) if len(data) > 3 else len(data)
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= count
        return write(descriptor, data[:count], position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space"):
            writer.export([span("b")])
    assert names_of(path) == ["a"]
    writer.export([span("c")])
    writer.shutdown()
    assert names_of(path) == ["a", "c"]


@pytest.mark.parametrize(("exporter", "names_of"), KINDS)
@pytest.mark.parametrize("cut", [1, 3, 20, 100])
def test_an_addition_that_was_cut_off_is_removed_by_the_next_collector(
    tmp_path: Path, exporter: type[Any], names_of: Callable[[Path], list[str]], cut: int
) -> None:
    path = tmp_path / "file"
    first: SpanExporter = exporter(str(path))
    first.export([span("a")])
    first.export([span("b")])
    first.shutdown()
    os.truncate(path, path.stat().st_size - cut)
    next_one: SpanExporter = exporter(str(path), append=True)
    next_one.export([span("c")])
    next_one.shutdown()
    assert names_of(path) in (["a", "c"], ["a", "b", "c"])


@pytest.mark.parametrize("exporter", ["otlp-json-file", "perfetto"])
def test_a_file_that_another_run_writes_is_refused_and_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exporter: str
) -> None:
    path = tmp_path / "traces"
    for variable in ("SGL_ASPECTS_TRACE_PERFETTO_FILE", "SGL_ASPECTS_TRACE_FILE"):
        monkeypatch.setenv(variable, str(path))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    program = ("run", "--", sys.executable, "-c", "print('ran')")
    with attach() as session:
        begin(session, "of-the-first")()
        collector = session.collector_process_id
        wait_until(path.exists)
        second = command(*program)
    assert (second.returncode, second.stdout) == (2, "")
    assert f"{path}: process {collector} of another run writes to it" in second.stderr
    assert "of-the-first" in path.read_text()
    assert command(*program).stdout == "ran\n"
    assert "of-the-first" not in path.read_text()


@pytest.mark.parametrize(("exporter", "names_of"), KINDS)
def test_a_file_system_without_locks_takes_spans(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exporter: type[Any],
    names_of: Callable[[Path], list[str]],
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    for name in ("flock", "lockf", "fcntl"):
        monkeypatch.setattr(fcntl, name, refuse)
    writer: SpanExporter = exporter(str(tmp_path / "file"))
    writer.export([span("a")])
    writer.shutdown()
    assert names_of(tmp_path / "file") == ["a"]


def test_a_pipe_is_refused_unless_it_is_standard_output(tmp_path: Path) -> None:
    """Spans that nobody reads would count as delivered; a shell's ``>(…)`` is not there for the collector."""
    named = tmp_path / "pipe"
    os.mkfifo(named)
    reading, writing = os.pipe()
    for path in (named, f"/proc/{os.getpid()}/fd/{writing}"):
        words = ("run", f"--file={path}", "--", sys.executable, "-c", "print('ran')")
        refused = command(*words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"{path}: it is a pipe; name a file, or write to /dev/stdout" in refused.stderr
    os.close(reading)
    os.close(writing)
    assert command("run", "--file=/dev/stdout", "--", sys.executable, "-c", "").returncode == 0  # a pipe, too


def test_a_file_that_another_container_writes_is_not_said_to_be_process_0s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux says 0 for the holder of a lock that has no id here, and less for one on another host."""
    monkeypatch.setattr("sgl_aspects.tracing.export.shared_file.lock_holder", lambda *_: 0)
    with pytest.raises(OSError, match="another container or host writes to it; name another file"):
        OtlpJsonFileExporter(str(tmp_path / "file"))
