"""The report page of an engine whose passes run in several processes at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sgl_aspects.analysis.sources import Run
from sgl_aspects.analysis.spans import Span
from sgl_aspects.tracing.schema import DEVICE_TIME, MODE
from sgl_aspects.view.page import page_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
MS = 1_000_000


def span(name: str, span_id: str, parent: str, end: int, process_id: int, **more: Any) -> Span:
    attributes = {MODE: "decode", **more}
    return Span(name, "1", span_id, parent, False, 0, end * MS, attributes, (), process_id)


def test_the_slowest_worker_s_time_is_that_of_the_step(browser: Browser, tmp_path: Path) -> None:
    """Two passes of one worker add up; those of two run at once."""
    spans = [
        span("scheduler.step", "1", "", 100, 1),
        span("run_batch", "2", "1", 90, 1),
        *(span("forward", f"3{n}", "2", 20, 2, **{DEVICE_TIME: 0.02}) for n in range(2)),
        span("forward", "4", "2", 70, 3, **{DEVICE_TIME: 0.07}),
    ]
    (tmp_path / "report.html").write_text(page_of(Run("made up", spans)), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    facts = page.locator(".facts.wide")
    facts.wait_for()
    assert "70 %" in facts.inner_text()
    assert "110 %" not in facts.inner_text()
    page.close()
