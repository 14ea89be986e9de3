"""The report page in a real browser: from the slowest request to its slowest step, by mouse and by keys.

Needs Chromium (Debian: ``apt-get install chromium``) and playwright and axe-playwright-python.
SGL_ASPECTS_SCREENSHOTS names a folder that keeps the screenshots.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sgl_aspects.analysis.sources import Run, load_run
from sgl_aspects.analysis.spans import Span
from sgl_aspects.tracing.schema import (
    ATTACHED_FLAG,
    IDLE_HOST,
    KERNEL_LAYER,
    MODE,
    OPERATOR_NAME,
    REQUEST_ID,
)
from sgl_aspects.view.page import page_of
from tests.support.looker import Looker
from tests.support.simulated_run import HOSTILE, SimulatedRun

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow
SIZES = {"desktop": (1440, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("simulated"), 300)


def write_page(folder: Path, requests: int) -> Path:
    run = load_run(str(SimulatedRun(requests).write(folder / "run.otlp.jsonl")))
    (folder / "report.html").write_text(page_of(run), encoding="utf-8")
    return folder / "report.html"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_from_the_slowest_request_to_its_slowest_step(
    browser: Browser, simulated: Path, scheme: Any, size: str
) -> None:
    width, height = SIZES[size]
    looker = Looker(
        browser,
        simulated,
        color_scheme=scheme,
        viewport={"width": width, "height": height},
        bypass_csp=True,  # axe is a script of ours, not of the page
    )
    page = looker.page
    looker.check(f"overview-{size}-{scheme}")
    looker.check_with_axe()
    rows = page.locator(".requests .list-rows [role=row]")
    durations = [seconds(text) for text in page.locator(".requests .cell.strong").all_inner_texts()[1:]]
    assert len(durations) > 5
    assert durations == sorted(durations, reverse=True)
    rows.first.click()
    looker.wait_for_heading("Request ")
    assert "the median duration, mostly because of decode" in page.locator(".verdict").inner_text()
    culprits = "cells => cells.filter(cell => cell.innerText).map(cell => cell.clientWidth)"
    assert all(width > 100 for width in page.eval_on_selector_all(".causes .muted", culprits))
    looker.check(f"request-{size}-{scheme}")
    looker.check_with_axe()
    steps = page.locator(".detail .steps .cell.strong").all_inner_texts()[1:]
    slowest = page.locator("#slowest-step")
    assert slowest.inner_text().startswith("Its slowest step: ")
    assert steps[0] in slowest.inner_text()
    slowest.click()
    looker.wait_for_heading("Step ")
    assert "the median mixed step" in page.locator(".verdict").inner_text()
    looker.check(f"step-{size}-{scheme}")
    looker.check_with_axe()
    # And back again: whom it kept waiting.
    page.locator(".detail .brief .list-rows [role=row]").first.click()
    looker.wait_for_heading("Request ")
    page.go_back()
    looker.wait_for_heading("Step ")
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) > 380) == (scheme == "light")
    assert looker.complaints == []
    assert looker.asked == [f"file://{simulated}"]


def seconds(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]


def test_by_keys_alone(browser: Browser, simulated: Path) -> None:
    looker = Looker(browser, simulated)
    page = looker.page
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "row":
            break
    at = "document.activeElement.getAttribute('aria-rowindex')"
    assert page.evaluate(at) == "2"
    for key, expected in (("End", "301"), ("Home", "2"), ("ArrowDown", "3"), ("ArrowUp", "2")):
        page.keyboard.press(key)
        assert page.evaluate(at) == expected
    page.keyboard.press("Enter")
    looker.wait_for_heading("Request ")
    for _ in range(5):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "slowest-step":
            break
    page.keyboard.press("Enter")
    looker.wait_for_heading("Step ")
    page.keyboard.press("Escape")
    looker.wait_for_heading("Find the slow phase")
    assert looker.complaints == []


def test_sorting_and_filtering(browser: Browser, simulated: Path) -> None:
    looker = Looker(browser, simulated)
    page = looker.page
    head = page.locator('.requests [role=columnheader][data-key="toFirst"]')
    for order in ("descending", "ascending"):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == order
        rows = page.locator(".requests .list-rows [role=row]").all()
        found = [
            (int(row.get_attribute("aria-rowindex") or 0), row.locator(".cell").nth(3).inner_text())
            for row in rows
        ]
        times = [seconds(text) for _, text in sorted(found)]
        assert times == sorted(times, reverse=order == "descending")
    over = page.locator(".cards .u-over").first
    box = over.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] - 4)
    chip = page.locator(".chips button")
    chip.wait_for()
    assert chip.inner_text().startswith("Time to first token ")
    rows_left = int(page.locator(".requests[role=grid]").get_attribute("aria-rowcount") or 0)
    assert 1 < rows_left < 301
    chip.click()
    assert page.locator(".requests[role=grid]").get_attribute("aria-rowcount") == "301"
    assert looker.complaints == []


def test_a_step_is_opened_from_its_point_in_the_plot(browser: Browser, simulated: Path) -> None:
    looker = Looker(browser, simulated)
    page = looker.page
    over = page.locator("section .u-over").nth(3)
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    opened = False
    for part in range(5, 95, 3):  # along the bottom, where the short steps are
        page.mouse.move(box["x"] + box["width"] * part / 100, box["y"] + box["height"] - 8)
        if page.evaluate("document.querySelector('.readout').textContent").startswith("Step "):
            page.mouse.click(box["x"] + box["width"] * part / 100, box["y"] + box["height"] - 8)
            opened = True
            break
    assert opened
    looker.wait_for_heading("Step ")
    assert looker.complaints == []


def test_a_hundred_thousand_spans(browser: Browser, tmp_path: Path) -> None:
    looker = Looker(browser, write_page(tmp_path, 6300))
    page = looker.page
    assert (
        int(page.locator("header p").first.inner_text().split(" spans")[0].split()[-1].replace(",", "")) > 1e5
    )
    assert page.locator("*").count() < 3000
    page.locator(".requests .list-rows").evaluate("element => element.scrollTop = 1e9")
    page.locator('.requests [aria-rowindex="6301"]').click()
    looker.wait_for_heading("Request ")
    page.locator("#slowest-step").click()
    looker.wait_for_heading("Step ")
    assert page.locator("*").count() < 3000
    assert looker.complaints == []


def test_text_of_strangers_is_shown_as_text(browser: Browser, tmp_path: Path) -> None:
    spans = []
    for number, text in enumerate(HOSTILE):
        name = text.encode("utf-8", "replace").decode()
        attributes = {"gen_ai.request.model": name, "gen_ai.request.id": name, name: name, "error.type": name}
        mode = {"sgl_aspects.forward.mode": name}
        spans += [
            Span(name, name, f"r{number}", "", True, 5, 1000 + number, attributes, (), 0, True),
            Span(name, name, f"c{number}", f"r{number}", False, 6, 900, {name: name}, ()),
            Span("scheduler.step", name, f"s{number}", "", False, 6, 900, mode, (f"r{number}",)),
            Span(name, name, f"t{number}", f"s{number}", False, 6, 900, {}, ()),
        ]
    file = tmp_path / "report.html"
    file.write_text(page_of(Run(HOSTILE[0], spans)), encoding="utf-8")
    looker = Looker(browser, file)
    page = looker.page
    title = page.title()
    for row in range(len(HOSTILE)):
        page.locator(f'.requests [aria-rowindex="{row + 2}"]').first.click()
        looker.wait_for_heading("Request ")
        page.locator("#slowest-step").click()
        looker.wait_for_heading("Step ")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2
    assert page.title() == title != "broken"
    assert HOSTILE[0] in page.locator(".detail").inner_text() + page.locator("h1").inner_text()
    assert looker.complaints == []


def test_requests_are_searched_by_any_text_of_theirs_and_by_their_duration(
    browser: Browser, tmp_path: Path
) -> None:
    spans = [
        Span("chat mine", f"{number:032x}", f"{number:016x}", "", True, 0, seconds * 10**9, attributes, ())
        for number, (seconds, attributes) in enumerate(
            [
                (1, {"gen_ai.request.id": "one", "tenant": "Alice"}),
                (2, {"gen_ai.request.id": "two", "tenant": "Alice", "gen_ai.request.model": "adapter-7"}),
                (3, {"gen_ai.request.id": "three", "tenant": "Bob", "error.type": "abort"}),
            ],
            1,
        )
    ]
    file = tmp_path / "report.html"
    file.write_text(page_of(Run("run", spans)), encoding="utf-8")
    looker = Looker(browser, file, bypass_csp=True)
    search = looker.page.get_by_role("searchbox", name="Search requests")
    durations = looker.page.locator(".requests .list-rows .cell.strong")
    for query, expected in {
        "alice": ["2.00 s", "1.00 s"],
        "tenant=alice >1500ms": ["2.00 s"],
        "adapter-7": ["2.00 s"],
        "<2s": ["1.00 s"],
        f"{3:032x}": ["3.00 s"],
        "abort": ["3.00 s"],
        "nobody": [],
        "": ["3.00 s", "2.00 s", "1.00 s"],
    }.items():
        search.fill(query)
        assert durations.all_inner_texts() == expected, query
    search.fill("alice")
    assert looker.page.locator(".chips").inner_text() == "2 requests of 3"
    looker.check_with_axe()
    assert looker.complaints == []
    looker.context.close()


def test_a_request_that_was_refused_is_no_model_and_no_failure(browser: Browser, tmp_path: Path) -> None:
    good = {"gen_ai.request.model": "mine", "gen_ai.request.id": "good"}
    refused = {"http.response.status_code": 400, "error.type": "400"}
    left = {**good, "error.type": "abort"}
    spans = [
        Span("chat mine", "a" * 32, "1" * 16, "", True, 10, 2_000_000_000, good, ()),
        Span("chat", "b" * 32, "2" * 16, "", True, 20, 3_000_000, refused, ()),
        Span("chat", "d" * 32, "4" * 16, "", True, 30, 4_000_000, left, (), is_error=True),
        Span("scheduler.step", "c" * 32, "3" * 16, "", False, 5_000_000_000, 10, {}, ()),
    ]
    file = tmp_path / "report.html"
    file.write_text(page_of(Run("run", spans)), encoding="utf-8")
    looker = Looker(browser, file)
    assert looker.page.inner_text("h1") == "mine"
    assert "none failed, 1 refused, 1 left" in looker.page.inner_text(".facts.wide")
    looker.page.click(".list-rows .list-row >> nth=0")
    looker.page.wait_for_selector("dl.causes")
    assert "in the front end" in looker.page.inner_text("dl.causes")
    looker.context.close()


def test_the_phases_of_an_image_have_colours(browser: Browser, tmp_path: Path) -> None:
    phases = ["queue", "encode", "denoise", "decode_latents"]
    spans = [
        Span("generate_content", "t", "r", "", True, 0, 4 * 10**9, {"gen_ai.request.id": "drawn"}, ()),
        *(
            Span(name, "t", name, "r", False, at * 10**9, (at + 1) * 10**9, {}, ())
            for at, name in enumerate(phases)
        ),
        Span("scheduler.step", "s", "s", "", False, 2 * 10**9, 3 * 10**9, {MODE: "denoise"}, ("r",)),
    ]
    file = tmp_path / "report.html"
    file.write_text(page_of(Run("run", spans)), encoding="utf-8")
    looker = Looker(browser, file, bypass_csp=True)
    colour = "(bar) => getComputedStyle(bar).backgroundColor"
    bars = looker.page.locator(".requests .bar").all()
    assert len({bar.evaluate(colour) for bar in bars} - {"rgba(0, 0, 0, 0)"}) == 4
    assert looker.page.locator(".legend").first.inner_text().split("\n") == [*phases[:3], "decode latents"]
    assert looker.page.locator(".mode i").first.evaluate(colour) == bars[2].evaluate(colour)
    looker.page.locator(".requests .list-rows [role=row]").first.click()
    looker.wait_for_heading("Request ")
    assert looker.page.locator(".waterfall .bar").nth(2).evaluate(colour) == bars[2].evaluate(colour)
    looker.check("image")
    looker.check_with_axe()
    assert looker.complaints == []


def test_kernels_of_a_profiled_step_by_operator_and_by_layer(browser: Browser, tmp_path: Path) -> None:
    layers = ["model.layers.0.mlp", "model.layers.1.mlp", "lm_head", None, "replayed graph"]
    spans = [
        Span("scheduler.step", "t", "1", "", False, 0, 10**7, {}, ()),
        Span("forward", "t", "2", "1", False, 0, 10**7, {}, ()),
    ]
    for number, layer in enumerate(layers):
        attributes = {KERNEL_LAYER: layer, OPERATOR_NAME: "mm", IDLE_HOST: 0.001}
        start = 2 * number * 10**6
        found = {name: value for name, value in attributes.items() if value}
        spans.append(Span("kernel", "t", f"k{number}", "2", False, start, start + 10**6, found, ()))
    file = tmp_path / "report.html"
    file.write_text(page_of(Run("run", spans)), encoding="utf-8")
    looker = Looker(browser, file, bypass_csp=True)
    looker.page.locator(".steps .list-rows [role=row]").first.click()
    looker.wait_for_heading("Step ")

    def rows(what: str) -> list[list[str]]:
        found = looker.page.locator(f'[aria-label="Kernels by {what}"] tr').all()
        return [row.locator("td").all_inner_texts() for row in found[1:]]

    assert rows("operator") == [
        ["mm", "5", "5.00 ms", "50 %"],
        ["idle: the host was late", "", "5.00 ms", "50 %"],
    ]
    assert rows("layer") == [
        ["model.layers.*.mlp", "2", "2.00 ms", "20 %"],
        *([name, "1", "1.00 ms", "10 %"] for name in ("lm_head", "no module", "replayed graph")),
    ]
    looker.page.locator(".kernels summary").click()
    opened = rows("layer")[0][0]
    assert all(f"model.layers.{number}.mlp: 1.00 ms" in opened for number in range(2))
    looker.check("kernels")
    looker.check_with_axe()
    assert looker.complaints == []


def test_nothing_was_recorded(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text(page_of(Run("run", [])), encoding="utf-8")
    looker = Looker(browser, file, "#app main")
    looker.page.get_by_text("No request was recorded").wait_for()
    looker.page.get_by_text("No scheduler step was recorded").wait_for()
    assert looker.complaints == []


def test_functions_of_ones_own_are_all_that_was_recorded(browser: Browser, tmp_path: Path) -> None:
    spans = [
        Span("mine", "t", "1", "", False, 5, 5, {}, ()),
        Span("look up", "t", "2", "1", False, 5, 5, {"key": "a", "found": [1, 2]}, ()),
    ]
    file = tmp_path / "report.html"
    file.write_text(page_of(Run("run", spans)), encoding="utf-8")
    looker = Looker(browser, file, bypass_csp=True)
    looker.page.get_by_role("button", name="Open the slowest: mine").click()
    looker.wait_for_heading("mine")
    assert "key a · found 1, 2" in looker.page.locator(".detail").inner_text()
    assert looker.page.get_by_text("Time to first token").count() == 0
    looker.check_with_axe()
    assert looker.complaints == []


def test_a_request_that_an_attach_met_under_way_is_listed_last(browser: Browser, tmp_path: Path) -> None:
    """The time that was seen of it is no latency: it is not the slowest, and not in the distribution."""
    ids = {"part": 9_000_000, "slow": 5_000_000, "quick": 1_000_000}
    spans = [
        Span("chat", f"{at}", f"{at}", "", True, 0, ns, {REQUEST_ID: name, ATTACHED_FLAG: name == "part"}, ())
        for at, (name, ns) in enumerate(ids.items(), 1)
    ]
    file = tmp_path / "report.html"
    file.write_text(page_of(Run("run", spans)), encoding="utf-8")
    looker = Looker(browser, file)
    shown = looker.page.locator(".requests .list-rows .cell.strong").all_inner_texts()
    assert shown == ["5.00 ms", "1.00 ms", "9.00 ms"]
    looker.page.get_by_role("button", name="Open the slowest: 5.00 ms").click()
    looker.wait_for_heading("Request slow")
    assert "p99 4.96 ms" in str(looker.page.get_by_label("Duration: p50").get_attribute("aria-label"))
    assert looker.complaints == []
