"""Makes docs/conformance/README.md of the reports beside it: what ran where and when.

sgl-aspects conformance --platform NAME --report docs/conformance/NAME.md
python docs/make_hardware.py
"""

from __future__ import annotations

import re
from pathlib import Path

from sgl_aspects.conformance.report import ReportHead
from sgl_aspects.platforms.builtins import BUILTIN_PLATFORMS

FOLDER = Path(__file__).parent / "conformance"
PAGE = "README.md"
HEAD = """# Hardware

Which platforms ran, where and when: by the reports in this folder that
[the conformance kit](../platforms.md#the-conformance-kit) wrote. `docs/make_hardware.py` makes this page.
"""
NEVER = """
## Never run

These have not run on their devices: there is no report. Their classes are tested against fakes of
the modules of torch that they call (`tests/platforms/test_devices.py`), which shows that they call what
those modules document, and no more. With such a device, run
`sgl-aspects conformance --platform NAME --report NAME.md` and send the file.
"""


def page(reports: Path = FOLDER) -> str:
    """The page for the reports in a folder."""
    found = {path.name: ReportHead.read(path) for path in sorted(reports.glob("*.md")) if path.name != PAGE}
    lines = [HEAD, "| platform | engine | devices | date | versions | checks | skipped |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for name, head in found.items():
        skipped = ", ".join(re.findall(r"^skip  (\S+)", (reports / name).read_text(), re.MULTILINE)) or "none"
        cells = (head.platform, head.engine, head.device, head.date, head.versions, head.result, skipped)
        lines.append(f"| [{cells[0]}]({name}) | {' | '.join(cells[1:])} |")
    ran = {head.platform for head in found.values()}
    never = [row for row in BUILTIN_PLATFORMS if row.name not in ran]
    if never:
        lines += [NEVER, "| platform | class |", "| --- | --- |"]
        lines += [f"| {row.name} | `{row.class_name}` |" for row in never]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (FOLDER / PAGE).write_text(page(), encoding="utf-8")
