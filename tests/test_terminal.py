"""Texts from outside do not control the terminal on which they are shown."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sgl_aspects.attach.process_tree import Process
from sgl_aspects.cli.live import follow_answers
from sgl_aspects.cli.main import main
from sgl_aspects.runtime import StreamChunk
from sgl_aspects.terminal import printable
from sgl_aspects.tracing.export.failures import FirstFailure
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import ProcessDescribed, RequestBegin
from tests.support.otlp_receiver import serving
from tests.support.simulated_run import SimulatedRun

TITLE, HIDDEN = "\x1b]0;owned\x07", "a\x9bb\u202ec\rd"


def test_only_line_feeds_stay() -> None:
    assert printable("plain ünïcödé 日本\n") == "plain ünïcödé 日本\n"
    assert printable(TITLE + HIDDEN) == "\\x1b]0;owned\\x07a\\x9bb\\u202ec\\rd"


def test_what_a_backend_answers_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.makeLogRecord({"name": "x", "msg": f"the backend rejected 1 spans: {TITLE}{HIDDEN}"})
    FirstFailure().emit(record)
    printed = capsys.readouterr().err
    assert "\\x1b]0;owned" in printed
    assert printable(printed) == printed


def test_another_users_command_line_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert Process(7, 1, 0, ("python", TITLE, "a\nb")).title == "python \\x1b]0;owned\\x07 a\\nb"
    assert main(["report", TITLE]) == 2
    printed = capsys.readouterr().err
    assert printable(printed) == printed


@pytest.mark.parametrize("command", ["hooks", "doctor"])
def test_a_report_of_hooks_is_escaped(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["tracing", "sgl-aspects"]
    hook: dict[str, Any] = {
        "target": f"{TITLE}:f",
        "hook": TITLE,
        "hook_type": "AFTER",
        "state": "PENDING",
        "source": source,
    }
    hook |= {"order": 0, "detail": "", "places": [], "calls": 0, "errors": 0, "required": False}
    report = {"hooks": [hook], "stale": [{"target": TITLE, "holder": HIDDEN}], "displaced": [TITLE]}
    process = {"process_id": 7, "command": TITLE, "ended": True, "report": report}
    (tmp_path / "7.hooks.json").write_text(json.dumps(process))
    main([command, "--from", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned" in printed
    assert printable(printed) == printed


def test_a_lock_file_of_hooks_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    places = {"pkg:gone": [HIDDEN, HIDDEN]}
    hook = {"target": "pkg:gone", "hook": TITLE, "hook_type": "after", "places": places}
    lock = tmp_path / "hooks.lock"
    lock.write_text(json.dumps({"version": 1, "hooks": [hook]}))
    assert main(["hooks", "lint", "--lock", str(lock), "--against", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned" in printed
    assert printable(printed) == printed


def test_the_name_of_a_host_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def of(host: str, span_id: str) -> dict[str, Any]:
        times = {"startTimeUnixNano": "1", "endTimeUnixNano": "2"}
        span = {"name": "x", "traceId": "01", "spanId": span_id, "kind": 2, **times}
        resource = {"attributes": [{"key": "host.name", "value": {"stringValue": host}}]}
        return {"resource": resource, "scopeSpans": [{"spans": [span]}]}

    file = tmp_path / "spans.jsonl"
    file.write_text(json.dumps({"resourceSpans": [of(TITLE, "01"), of(HIDDEN, "02")]}) + "\n")
    assert main(["report", str(file), "-o", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned" in printed
    assert printable(printed) == printed


def test_the_names_of_two_compared_runs_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, factor in (("before", 1), ("after", 3)):
        run = SimulatedRun(30)
        for _, span in run.spans:
            span["name"] += TITLE if span["name"] in ("schedule", "sample") else ""
            start, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
            span["endTimeUnixNano"] = str(start + (end - start) * factor)
        run.write(tmp_path / f"{name}.jsonl")
    files = [str(tmp_path / f"{name}.jsonl") for name in ("before", "after")]
    assert main(["report", "--compare", *files, "-o", str(tmp_path / "page.html")]) == 1
    printed = capsys.readouterr().out
    assert "schedule\\x1b]0;owned\\x07, " in printed
    assert printable(printed) == printed


def test_what_a_process_says_of_itself_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = RingRecorder(str(tmp_path), 1)
    assert recorder.open()
    recorder.write(ProcessDescribed({"process.pid": TITLE}))
    recorder.write(RequestBegin(5, "r", time.time_ns(), 7, 0, True, "", False, "chat", {}))
    assert main(["dump", "--run", str(tmp_path)]) == 0
    recorder.close()
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned" in printed
    assert printable(printed) == printed


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_a_model_answers_is_escaped(is_terminal: bool) -> None:
    class Handle:
        def __iter__(self) -> Iterator[StreamChunk]:
            yield StreamChunk("rid", TITLE, [1])

    output = io.StringIO()
    handles: Any = [Handle()]
    console = Console(file=output, width=60, force_terminal=is_terminal, color_system=None)
    follow_answers(console, ["prompt"], handles)
    assert "\\x1b]0;owned" in output.getvalue()
    assert TITLE not in output.getvalue()


class _Redirecting(BaseHTTPRequestHandler):
    """Answers with escape sequences, or with a redirect to another name, whose requests it keeps."""

    seen: list[str | None]
    redirects: bool

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"] or 0))
        self.do_GET()

    def do_GET(self) -> None:
        self.seen.append(self.headers["authorization"])
        self.send_response(302 if self.redirects else 200)
        port = self.headers["host"].rpartition(":")[2]
        self.send_header("location", f"http://localhost:{port}/elsewhere")
        self.end_headers()
        type(self).redirects = False
        self.wfile.write(TITLE.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


@pytest.mark.parametrize("redirects", [True, False])
def test_the_answer_of_a_server_is_escaped_and_its_redirect_gets_no_key(
    redirects: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGL_ASPECTS_API_KEY", "secret")
    _Redirecting.seen, _Redirecting.redirects = [], redirects
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Redirecting)
    with serving(server):
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert main(["control", "--profile", "1", "--server", url]) == (2 if redirects else 0)
    assert _Redirecting.seen == ["Bearer secret"]
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert "\\x1b]0;owned" in printed
    assert printable(printed) == printed
