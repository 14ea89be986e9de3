"""What ``/proc`` tells of a process."""

from __future__ import annotations

from pathlib import Path


def stat_of(folder: str | Path) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the process's name: its state, its parent, and so on.

    :param folder: ``/proc/PID``.
    :raises OSError: there is no such process.
    """
    text = Path(folder, "stat").read_text(errors="replace")
    return text[text.rindex(")") + 2 :].split()  # the name may be any bytes, with parentheses
