"""Texts from outside, such as a server's message or another user's command line, on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with every character that could control a terminal escaped, but for line feeds."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def counted(number: int, noun: str) -> str:
    """Return the number with its noun in the singular or plural: ``"1 process"``, ``"2 processes"``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"
