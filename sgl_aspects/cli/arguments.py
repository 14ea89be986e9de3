"""Types for ``add_argument(type=…)``, whose error messages name valid values."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def positive_integer(text: str) -> int:
    """A whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1")
    return number


def writable_file(text: str) -> Path:
    """A file in a folder that exists: checked before the work, not after."""
    file = Path(os.path.expanduser(text))
    if os.path.isdir(file) or not os.path.isdir(file.parent):
        raise argparse.ArgumentTypeError(f"{text!r}: write a file in a folder that exists")
    return file
