"""Texts from outside, such as a server's message or another user's command line, on a terminal."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Characters in a line of what another program reads: rich would break its lines after 80.
_PIPE_WIDTH = 500
_PLAIN = {"µ": "u", "–": "-", "─": "-", "…": "...", "→": "->", "×": "x", "├": "|", "└": "`", "▏": "|"}
_PLAIN |= dict.fromkeys("█▌▐", "#")


def printable(text: str) -> str:
    """Return ``text`` with every character that could control a terminal escaped, but for line feeds."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def say(text: str) -> None:
    """Write a line to standard error, if it can be written: one that is closed or full must stop nothing."""
    if sys.stderr is not None:  # None is standard output to ``print``
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """Return the number with its noun in the singular or plural: ``"1 process"``, ``"2 processes"``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def replace_unencodable() -> None:
    """Have the standard output replace what its encoding lacks: in UTF-8 halves of characters alone."""
    output = sys.stdout
    if isinstance(output, io.TextIOWrapper):
        codecs.register_error("sgl_aspects.plain", _replaced)
        output.reconfigure(errors="sgl_aspects.plain")


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lost = error.object[error.start : error.end]
    return "".join(_PLAIN.get(each, ascii(each)[1:-1]) for each in lost), error.end


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return lines whose columns are aligned, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    )


def table(first: str, *numbers: str) -> Table:
    """Return a table with a line below its headings; all columns but the first are aligned on the right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=False)
    made.add_column(first, no_wrap=True)
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def console() -> Console:
    """Return a console for tables on the standard output, whose lines break on a terminal only."""
    from rich.console import Console

    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it is closed
    return Console(highlight=False, width=None if is_terminal else _PIPE_WIDTH)
