"""``sgl-aspects report --compare A B``: what changed between two runs, as a table and as a page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_aspects.cli.arguments import read_runs
from sgl_aspects.errors import ConfigError
from sgl_aspects.view.text import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sgl_aspects.analysis.comparison import Change
    from sgl_aspects.analysis.sources import Run


def load(*sources: str) -> Run:
    """Read the runs of a command line; an error if they hold no spans."""
    found = read_runs(sources)
    if not found.spans:
        raise ConfigError(
            f"{found.source} holds no spans: has the engine served a request since tracing began?"
        )
    return found


def load_one(source: str) -> Run:
    """Read a file, a run's folder, or a folder with the files of one run's hosts."""
    folder = Path(os.path.expanduser(source))
    files = sorted(map(str, folder.glob("*.jsonl"))) if folder.is_dir() else []
    return load(*(files or [source]))


def changes_of(before: Run, after: Run) -> list[Change]:
    """Compare two runs."""
    from sgl_aspects.analysis.comparison import Measures, compare

    changes = compare(Measures.of(before.spans), Measures.of(after.spans))
    if not changes:
        raise ConfigError(
            "the runs have nothing to compare: each needs 20 requests or steps of the same kinds "
            "(level 2 and more record steps)"
        )
    return changes


def rows_of(changes: Sequence[Change]) -> list[tuple[str, str, str, str, str]]:
    """Return (measure, before, after, change, interval) of each change, certain ones only."""
    return [
        (
            change.measure,
            duration(change.before),
            duration(change.after),
            f"{change.share:+.1%}",
            f"{change.low:+.1%} to {change.high:+.1%}",
        )
        for change in changes
        if change.is_certain
    ]


def show(before: Run, after: Run, changes: Sequence[Change], share: float) -> int:
    """Print the certain changes, the surest first. Exit status 1 for a regression beyond ``share``."""
    from rich.markup import escape

    from sgl_aspects.analysis.comparison import regressions
    from sgl_aspects.terminal import console, printable, table

    def plain(text: str) -> str:  # names are from a file
        return escape(printable(text))

    output = console()
    rows, worse = rows_of(changes), regressions(changes, share)
    output.print(plain(f"{len(changes)} measures compared, {len(rows)} changed: {after.source}"), end=" ")
    output.print(plain(f"against {before.source}"))
    if rows:
        shown = table("changed", "before", "after", "change", "interval")
        for row in rows:
            shown.add_row(*map(plain, row))
        output.print(shown)
    if worse:
        names = ", ".join(change.measure for change in worse)
        output.print(plain(f"Regressions beyond {share:.1%}: {names}"), style="bold red", soft_wrap=True)
    return 1 if worse else 0
