"""What the site needs beside the pages: a first page, and links to files that are no pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST = "index.md"
_LINK = re.compile(r"(\]\(|(?:src|srcset|href)=\")(?!https?:|#|mailto:)([^)\s\"]+)")


def on_files(files: Any, config: Any) -> Any:
    """Make the README the first page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, FIRST, content=_within_docs((ROOT / "README.md").read_text())))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links to files outside of docs/ lead to the repository."""
    folder = (ROOT / "docs" / page.file.src_uri).parent
    url = (config.get("repo_url") or "").rstrip("/")

    def replaced(match: re.Match[str]) -> str:
        target = (folder / match[2].partition("#")[0]).resolve()
        if target.is_relative_to(ROOT / "docs") or not target.exists():
            return match[0]
        return f"{match[1]}{url}/blob/main/{target.relative_to(ROOT)}" if url else f"{match[1]}#"

    return _LINK.sub(replaced, markdown)


def _within_docs(text: str) -> str:
    return re.sub(r"(\]\(|=\")docs/", r"\1", re.sub(r"(\]\()(?!docs/|https?:|#)", r"\1../", text))
