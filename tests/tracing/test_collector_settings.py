"""What a run's collector gets of the environment, and what of it is on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.tracing import attach
from tests.support.collectors import kill_collector_for_good
from tests.support.sessions import begin


def test_no_secret_is_saved_and_the_servers_key_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGL_ASPECTS_API_KEY", "s3cret-of-the-server")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    with attach(file=str(tmp_path / "traces.jsonl")) as session:
        begin(session, "r")()
        saved = b"".join(path.read_bytes() for path in Path(session.run_folder).iterdir() if path.is_file())
        environment = Path(f"/proc/{session.collector_process_id}/environ").read_text()
        kill_collector_for_good(session)
        assert main(["control", "--run", session.run_folder]) == 0
    assert b"s3cret" not in saved
    assert "s3cret-of-the-server" not in environment
    assert "authorization=Bearer%20s3cret" in environment
    printed = capfd.readouterr().out
    assert "set the variables of the run (OTEL_…, SGL_ASPECTS_TRACE_…) and start it again with " in printed
