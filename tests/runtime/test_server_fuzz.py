"""The server against random requests: made by schemathesis from its own OpenAPI document."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.http_server import serving
from tests.support.processes import finished, wait_until
from tests.support.tiny_models import make_llama

#: Not checked: that every valid body is answered. Limits of the model are not in the document.
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_request_makes_it_fail_hang_or_leak(tmp_path: Path) -> None:
    """But for a profile, under which the steps of all that follows take many times as long."""
    make_llama(tmp_path / "tiny", max_position_embeddings=256)
    with serving(tmp_path / "tiny", tmp_path / "log", "--max-total-tokens", "4096") as server:
        report = finished(
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            *("--checks", ",".join(CHECKS)),
            *("--exclude-path", "/start_profile"),
            *("--max-time", "180", "--request-timeout", "90", "--seed", "1", "--no-color"),
            *("--continue-on-failure", "--suppress-health-check", "all", "--generation-database", "none"),
            f"http://127.0.0.1:{server.port}/openapi.json",
            cwd=tmp_path,
            seconds=550,
        )
        assert report.returncode == 0, report.stdout[-6000:] + report.stderr[-2000:]
        assert server.metrics()["sgl_aspects_requests_received_total"] > 20
        wait_until(server.is_quiet)
        assert server.stop() == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
