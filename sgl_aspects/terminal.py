"""Texts from outside, such as a server's message or another user's command line, on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with every character that could control a terminal escaped, but for line feeds."""
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)
