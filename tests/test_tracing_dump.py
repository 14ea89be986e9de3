"""The last seconds of a process, and timelines: from rings as their writers left them."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from sgl_aspects.tracing import attach
from sgl_aspects.tracing.run_reader import RunReader
from tests import workers
from tests.otlp_receiver import spans_of
from tests.test_tracing_collector import begin, read_file, run_scheduler
from tests.test_tracing_control import command

spawn = multiprocessing.get_context("spawn")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OTEL_", "SGL_ASPECTS_TRACE")):
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose scheduler was killed, after the collector had taken all that it wrote."""
    folder = tmp_path_factory.mktemp("run")
    process = spawn.Process(target=workers.record_like_a_scheduler, args=(str(folder), ["r1", "r2"], "kill"))
    process.start()
    process.join(60)
    process.close()
    reader = RunReader(str(folder))
    assert len(list(reader.poll())) == 9
    reader.close()
    return folder


def test_a_dead_process_as_text(killed: Path) -> None:
    done = command("dump", "--run", str(killed))
    assert done.returncode == 0, done.stderr
    names = [line.split(" ms  ")[1].split()[0] for line in done.stdout.splitlines()]
    assert sorted(names) == ["decode", "decode", "queue", "queue", "scheduler.step", "scheduler.step"]
    (unfinished,) = [line for line in done.stdout.splitlines() if "ERROR" in line]
    assert "unfinished=True" in unfinished
    assert "size=2" in done.stdout


def test_a_dead_process_as_otlp_json(killed: Path, tmp_path: Path) -> None:
    file = tmp_path / "last.jsonl"
    assert (
        command("dump", "--run", str(killed), "--format", "otlp-json", "--output", str(file)).returncode == 0
    )
    spans = [span for message in read_file(file) for span in spans_of(message)]
    assert len(spans) == 6
    assert len({span.trace_id for span in spans}) == 4  # two requests, two steps


def test_only_the_last_seconds(killed: Path) -> None:
    done = command("dump", "--run", str(killed), "--last", "0")
    assert [line.split(" ms  ")[1].split()[0] for line in done.stdout.splitlines()] == ["scheduler.step"]


def test_a_timeline_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.json"
    monkeypatch.setenv("SGL_ASPECTS_TRACE_PERFETTO_FILE", str(file))
    with attach(exporters=["perfetto"]) as session:
        end = begin(session, "r1")
        run_scheduler(session, ["r1"])
        end()
        live = command("dump", "--run", session.run_folder, "--format", "perfetto")
    for events in (json.loads(file.read_text()), json.loads(live.stdout)["traceEvents"]):
        spans = {event["name"]: event for event in events if event["ph"] == "X"}
        assert set(spans) == {"chat m", "queue", "decode", "scheduler.step"}
        request, step = spans["chat m"], spans["scheduler.step"]
        assert request["pid"] == os.getpid() != step["pid"]
        assert spans["queue"]["pid"] == step["pid"]
        assert spans["queue"]["tid"] == request["tid"] != step["tid"]
        assert request["ts"] <= spans["queue"]["ts"]
        assert request["args"]["gen_ai.request.id"] == "r1"
        named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
        assert {(event["pid"], event["tid"]) for event in spans.values()} <= named


def test_a_timeline_that_was_cut_short_misses_its_bracket_only(tmp_path: Path) -> None:
    from sgl_aspects.tracing.chrome_trace import ChromeTraceExporter

    exporter = ChromeTraceExporter(str(tmp_path / "trace.json"))
    exporter.export([])
    assert json.loads((tmp_path / "trace.json").read_text() + "]") == []
    exporter.shutdown()
    again = ChromeTraceExporter(str(tmp_path / "trace.json"))
    again.shutdown()
    assert json.loads((tmp_path / "trace.json").read_text()) == []
