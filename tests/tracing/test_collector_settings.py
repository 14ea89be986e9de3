"""What a run's collector gets of the environment, and what of it is on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.tracing import attach
from tests.support.collectors import kill_collector_for_good
from tests.support.sessions import begin

SECRETS = {
    "SGL_ASPECTS_API_KEY": "s3cret-of-the-server",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20s3cret",
    "OTEL_EXPORTER_OTLP_METRICS_HEADERS": "x-api-key=s3cret",
    "OTEL_EXPORTER_VENDOR_TOKEN": "s3cret",
    "HTTPS_PROXY": "http://user:s3cret@proxy.example",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://user:s3cret@127.0.0.1:1/v1/metrics",
}


@pytest.fixture
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kept")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")


@pytest.mark.usefixtures("_secrets")
def test_no_secret_is_saved_and_the_servers_key_is_not_passed_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with attach(file=str(tmp_path / "traces.jsonl")) as session:
        begin(session, "r")()
        saved = Path(session.run_folder, "collector.json").read_text()
        environment = Path(f"/proc/{session.collector_process_id}/environ").read_text()
        kill_collector_for_good(session)
        assert main(["control", "--run", session.run_folder]) == 0
    assert "s3cret" not in saved
    assert json.loads(saved)["OTEL_SERVICE_NAME"] == "kept"
    assert "s3cret-of-the-server" not in environment
    assert "authorization=Bearer%20s3cret" in environment
    printed = capfd.readouterr().out
    assert "set OTEL_EXPORTER_OTLP_HEADERS, " in printed
    assert "HTTPS_PROXY" in printed
    assert "SGL_ASPECTS_API_KEY" not in printed


_NO_THREADS = """
import sys, threading
from sgl_aspects.collector import main
def start(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = start
main(sys.argv[1:])
"""


def test_a_limit_on_processes_is_said_to_be_one(tmp_path: Path) -> None:
    """Threads count: with the few that are left a collector can be started, but no exporter of it."""
    settings = {"OTEL_TRACES_EXPORTER": "otlp-json-file", "SGL_ASPECTS_TRACE_FILE": str(tmp_path / "f.jsonl")}
    words = [sys.executable, "-c", _NO_THREADS, str(tmp_path)]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, **settings}, check=False, timeout=60
    )
    assert "raise ulimit -u, or the pids.max of its container" in done.stderr
    assert "Traceback" not in done.stderr
