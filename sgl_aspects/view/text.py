"""Numbers and names as they are shown on a terminal."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Three digits and a unit: ``"850 µs"``, ``"12.3 ms"``, ``"1.24 s"``."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.{_decimals(value)}f} {unit}"
    return f"{seconds:.{_decimals(seconds)}f} s"


def _decimals(value: float) -> int:
    return 2 if value < 9.995 else 1 if value < 99.95 else 0


def one_line(text: str, width: int) -> str:
    """The beginning of ``text`` on one line of at most ``width`` characters.

    What a terminal would take for a command is shown as a dot: the text may be a stranger's.
    """
    line = "".join(letter if letter.isprintable() else "·" for letter in " ".join(text.split()))
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"
