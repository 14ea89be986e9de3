"""The package of docs/platforms.md, written from the page's text alone."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.distributions import install

PAGE = Path(__file__).resolve().parents[2] / "docs" / "platforms.md"


def write_package(site: Path) -> None:
    """Write the files that the page shows into ``site``, with the entry points of its pyproject.toml."""
    files = dict(re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    project = files.pop("pyproject.toml")
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    groups = re.findall(r'\[project\.entry-points\."(\S+)"\]\n(\w+) = "(\S+)"', project)
    lines = "".join(f"[{group}]\n{name} = {target}\n" for group, name, target in groups)
    install(site, "acme-platform", lines, version="1.0")
