"""The report page of an engine whose passes run in several processes at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sgl_aspects.analysis.sources import Run
from sgl_aspects.analysis.spans import Span
from sgl_aspects.tracing.schema import DEVICE_TIME, MODE, RANK
from sgl_aspects.view.page import page_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
MS = 1_000_000


def span(name: str, span_id: str, parent: str, end: int, process_id: int, **more: Any) -> Span:
    attributes, links = {MODE: "decode", **more}, more.pop("links", ())
    is_request = name == "chat"
    return Span(name, "1", span_id, parent, is_request, 0, end * MS, attributes, links, process_id)


def facts_of(browser: Browser, folder: Path, spans: list[Span]) -> dict[str, str]:
    """The figures at the top of the page, by what they are of."""
    (folder / "report.html").write_text(page_of(Run("made up", spans)), encoding="utf-8")
    page = browser.new_page()
    page.goto((folder / "report.html").as_uri())
    page.locator(".facts.wide").wait_for()
    names, texts = (page.locator(f".facts.wide {tag}").all_inner_texts() for tag in ("dt", "dd"))
    shown = page.locator("header").inner_text()
    page.close()
    return {**dict(zip(names, texts)), "header": shown}


@pytest.mark.parametrize(("rank", "share"), [("tp0 pp0", "70 %"), ("tp1 pp1", "90 %")])
def test_the_slowest_worker_s_time_is_that_of_the_step_and_stages_add_up(
    browser: Browser, tmp_path: Path, rank: str, share: str
) -> None:
    """Two passes of one worker add up; those of two run at once, but for those of two stages."""
    spans = [
        span("scheduler.step", "1", "", 100, 1),
        span("run_batch", "2", "1", 90, 1),
        *(span("forward", f"3{n}", "2", 10, 2, **{DEVICE_TIME: 0.01, RANK: rank}) for n in range(2)),
        span("forward", "4", "2", 70, 3, **{DEVICE_TIME: 0.07, RANK: "tp0 pp0"}),
    ]
    assert facts_of(browser, tmp_path, spans)["Device time"].startswith(share)


def test_the_time_in_steps_is_that_of_a_scheduler_on_average(browser: Browser, tmp_path: Path) -> None:
    """Of two ranks that run the same batches the one that answers counts."""
    spans = [
        *(span("chat", f"a{n}", "", 100, 1) for n in range(2)),
        *(span("decode", f"b{n}", f"a{n}", 50, 2 + n) for n in range(2)),
        span("scheduler.step", "1", "", 60, 2, links=("a0",)),
        span("scheduler.step", "2", "", 20, 3, links=("a1",)),
        span("scheduler.step", "3", "", 60, 4, links=("a0",)),  # follows process 2
        span("scheduler.step", "5", "", 90, 4),  # none of its requests is sampled
    ]
    facts = facts_of(browser, tmp_path, spans)
    assert facts["In scheduler steps"].startswith("40 %")
    assert "2 steps" in facts["header"]
