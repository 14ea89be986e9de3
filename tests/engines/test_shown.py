"""top, report, Perfetto, metrics and Grafana's panels show the runs of every engine that has a room."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from sgl_aspects.analysis.sources import load_run
from sgl_aspects.engines import Engine, find_engines
from sgl_aspects.tracing import TraceSession, attach
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.requests import Chunk
from sgl_aspects.tracing.lifecycle.steps import figure, usage_figure
from sgl_aspects.tracing.options import TraceOptions
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.view.live import LiveRun
from sgl_aspects.view.payload import payload_of
from sgl_aspects.view.top_screen import screen
from tests.support.processes import free_port, wait_until

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "dashboard.json"
SECOND = 1_000_000_000
#: Where all is well there are none of them.
RARE = ("dropped", "preempt", "failed")


def live(engine: Engine, session: TraceSession) -> None:
    """The records of one request and its two steps, the same for every engine."""
    trackers = Trackers.of(engine, session.recorder, TraceOptions(measures=True))
    now = time.monotonic_ns() - SECOND
    call = trackers.calls.begin(object(), None, now, rid="r", operation="chat")
    trackers.calls.sent(call)
    request = trackers.requests.queued("r")
    for number, mode in enumerate(("extend", "decode")):
        start = now + (number + 1) * SECOND // 4
        trackers.steps.link([request.key])
        trackers.steps.schedule_start, trackers.steps.schedule_end = start - 2000, start - 1000
        step = trackers.steps.begin(start, request, mode, 1, 6)
        assert step is not None
        if not number:
            trackers.requests.launched(request, start)
        step.words[step.block + layout.FORWARD_START] = start + 1000
        step.words[step.block + layout.FORWARD_END] = step.words[step.block + layout.RUN_END] = start + 2000
        step.words[step.block + layout.STEP_NUMBER] = figure(number)
        step.store_queues(figure(3), figure(1), usage_figure(0.25))
        step.words[step.block + layout.PROCESS_START] = start + 3000
        trackers.steps.launched(step, step)
        trackers.steps.end(step, start + 4000)
        if not number:
            trackers.requests.prefilled([Chunk(None, request, 6, start, True)], now=start + 4000)
    trackers.requests.finished("r", 2, "length")
    call.first_ns, call.tokens = now + SECOND // 2, (6, 2, 3)
    trackers.calls.end(call, "length")


@pytest.mark.parametrize("engine", find_engines(), ids=lambda engine: engine.name)
def test_everything_shows_a_run(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, spans, timeline = free_port(), tmp_path / "spans.jsonl", tmp_path / "trace.json"
    monkeypatch.setenv("SGL_ASPECTS_TRACE_PERFETTO_FILE", str(timeline))
    monkeypatch.setenv("SGL_ASPECTS_TRACE_TARGET_TTFT", "1")  # goodput is one of the dashboard's
    exporters = ["otlp-json-file", "perfetto"]
    with attach(level=4, exporters=exporters, file=str(spans), prometheus=port) as session:
        assert session.run_folder is not None
        top = LiveRun(Path(session.run_folder))
        top.poll()
        live(engine, session)
        top.poll()
        console = Console(file=io.StringIO(), width=120)
        console.print(screen(top, top.controls(), 120, 40))
        assert isinstance(console.file, io.StringIO)
        shown = console.file.getvalue()
        top.close()
        page = ""
        panels = json.loads(DASHBOARD.read_text())["panels"]
        text = " ".join(target["expr"] for panel in panels for target in panel["targets"])
        asked = re.findall(r"\b((?:gen_ai|sgl_aspects)_\w+)(?=[\[{ )])", text)
        often = {name for name in asked if not any(part in name for part in RARE)}

        def is_counted() -> bool:
            nonlocal page
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer,
            ):
                page = answer.read().decode()
            return all(name in page for name in often)

        wait_until(is_counted)
    assert re.search(r"decode", shown), shown
    assert re.search(r"25\s*%", shown), shown  # of the KV cache
    report = payload_of(load_run(str(spans)))
    assert (len(report["requests"]), len(report["steps"])) == (1, 2)
    names = {event["name"] for event in json.loads(timeline.read_text())}
    assert {"scheduler.step", "forward", "queue", "prefill", "decode"} <= names
    assert f'gen_ai_provider_name="{engine.provider_name}"' in page
    assert often
