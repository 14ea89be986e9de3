"""Flags of several commands: their types, and errors that name what was typed."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from sgl_aspects.errors import AspectsError


def positive_integer(text: str) -> int:
    """A whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number from 1")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: write a number from 0 to 1")
    return number


def writable_file(text: str) -> Path:
    """A file in a folder that exists: checked before the work, not after."""
    file = Path(os.path.expanduser(text))
    if os.path.isdir(file) or not os.path.isdir(file.parent):
        raise argparse.ArgumentTypeError(f"{text!r}: write a file in a folder that exists")
    return file


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Add the runs that a command reads."""
    parser.add_argument(
        "sources",
        nargs="*",
        default=[],
        metavar="RUN",
        help="files of the otlp-json-file exporter, or runs' folders, live or dead, of one or several hosts, "
        "or a process's id (the only run there is)",
    )


@contextlib.contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Have errors in the block name flags. ``flags``: by the variable or field that a flag sets."""
    try:
        yield
    except AspectsError as error:
        text = str(error)
        for name, flag in flags.items():
            text = re.sub(rf"\b{name}=", f"{flag} ", text)
            if "_" in name:  # otherwise it may be an ordinary word
                text = re.sub(rf"\b{name}\b", flag, text)
        raise type(error)(text) from error
