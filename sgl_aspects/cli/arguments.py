"""Types for ``add_argument(type=…)``, whose messages say what to write."""

from __future__ import annotations

import argparse


def positive_integer(text: str) -> int:
    """A whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1")
    return number
