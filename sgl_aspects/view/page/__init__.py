"""The report page: one HTML file that contains its data, style and program, and needs no network.

Texts in spans are untrusted. The page has them as compressed, base64-coded data, which cannot end a script or
a tag; the program displays them as text only; and the page's content security policy allows no other script.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources

from sgl_aspects.analysis.sources import Run
from sgl_aspects.view.payload import payload_of

STYLES = ("vendor/uPlot.min.css", "page.css")
# In order of dependency; they share one scope.
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "text.js",
    "model.js",
    "list.js",
    "plots.js",
    "overview.js",
    "requests.js",
    "steps.js",
    "others.js",
    "main.js",
)


def page_of(run: Run) -> str:
    """The whole page, as text in UTF-8."""
    style = "\n".join(_file(name) for name in STYLES)
    library, *files = (_file(name) for name in SCRIPTS)
    own = "".join(files)
    script = f'{library}\n(() => {{\n"use strict";\n{own}}})();\n'
    names = sorted(set(re.findall(r"\bnames\.([A-Z_]+)", own)))
    payload = payload_of(run, names)
    data = json.dumps(payload, separators=(",", ":"), allow_nan=False).encode("utf-8", "replace")
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    )
    parts = {
        "title": html.escape(f"{run.source} · sgl-aspects report"),
        "policy": policy,
        "style": style,
        "script": script,
        "data": base64.b64encode(gzip.compress(data, 6, mtime=0)).decode(),
    }
    # In one pass: inserted text is not searched for other parts.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _file("page.html"))


def page_of_both(before: Run, after: Run, rows: Sequence[Sequence[str]]) -> str:
    """Return a page with the table of a comparison, and the pages of both runs side by side below it."""
    headings = ("changed", "before", "after", "change", "interval")
    table = "".join(
        f"<tr>{''.join(f'<{cell}>{html.escape(text)}</{cell}>' for text in row)}</tr>"
        for cell, row in (("th", headings), *(("td", row) for row in rows))
    )
    frames = "".join(
        f'<section><h2>{html.escape(run.source)}</h2><iframe sandbox="allow-scripts" '
        f'srcdoc="{html.escape(page_of(run))}"></iframe></section>'
        for run in (before, after)
    )
    return re.sub(
        r"\{\{(\w+)\}\}", lambda found: {"table": table, "frames": frames}[found[1]], _file("both.html")
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    """Return the digest by which a content security policy allows an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
