"""A page in a real browser, with what it complains of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


class Looker:
    """An open page, with all of its errors and network requests."""

    def __init__(self, browser: Browser, file: Path, shows: str = "[role=grid]", **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page: Page = self.context.new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"file://{file}")
        self.page.wait_for_selector(shows, timeout=60_000)

    def wait_for_heading(self, begin: str) -> None:
        self.page.locator(f'.detail h2:text-matches("^{begin}")').wait_for()

    def check(self, name: str) -> None:
        """Nothing is wider than the screen; axe finds nothing serious; a picture, where they are wanted."""
        page = self.page
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
        if os.environ.get("SGL_ASPECTS_SCREENSHOTS"):
            folder = Path(os.environ["SGL_ASPECTS_SCREENSHOTS"])
            folder.mkdir(parents=True, exist_ok=True)
            page.wait_for_timeout(500)
            page.screenshot(path=folder / f"{name}.png")

    def check_with_axe(self) -> None:
        from axe_playwright_python.sync_playwright import Axe

        results = Axe().run(self.page).response
        assert len(results["passes"]) > 20
        serious = [found for found in results["violations"] if found["impact"] in ("serious", "critical")]
        assert not serious, [(found["id"], [node["html"] for node in found["nodes"]]) for found in serious]
