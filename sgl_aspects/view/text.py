"""Formatting of numbers and names for a terminal."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Format a duration with three digits and a unit: ``"850 µs"``, ``"12.3 ms"``, ``"1.24 s"``."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if seconds < limit:
            value = seconds * factor
            return f"{value:.{_decimals(value)}f} {unit}"
    return f"{seconds:.{_decimals(seconds)}f} s"


def _decimals(value: float) -> int:
    return 2 if value < 9.995 else 1 if value < 99.95 else 0


def one_line(text: str, width: int) -> str:
    """Return the start of ``text`` on one line of at most ``width`` characters.

    Control characters are shown as dots: the text is untrusted.
    """
    line = "".join(letter if letter.isprintable() else "·" for letter in " ".join(text.split()))
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"
