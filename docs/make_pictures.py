"""Makes the pictures of pages: the report of a run, its slowest request opened, in Chromium.

    python docs/make_pictures.py runs/demo-….otlp.jsonl

Writes docs/pictures/report-light.png, -dark.png and -narrow.png. The run is one of `sgl-aspects demo`.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from sgl_aspects.analysis.sources import load_run
from sgl_aspects.view.page import page_of

PICTURES = Path(__file__).parent / "pictures"
#: Name, colours, and pixels.
_SHOTS = (("light", "light", 1360, 960), ("dark", "dark", 1360, 960), ("narrow", "light", 390, 844))


def main(source: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder, "report.html")
        page_file.write_text(page_of(load_run(source)), encoding="utf-8")
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, scheme, width, height in _SHOTS:
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
            page.goto(f"file://{page_file}")
            page.locator('.requests [data-key="toFirst"] button').click()
            page.locator(".requests .list-rows [role=row]").first.click()
            page.locator("#slowest-step").wait_for()
            page.mouse.move(0, 0)
            page.wait_for_timeout(500)
            page.screenshot(path=PICTURES / f"report-{name}.png")
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
