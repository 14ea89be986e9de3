"""Flags of several commands: their types, and errors that name what was typed."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sgl_aspects.errors import AspectsError, ConfigError
from sgl_aspects.files import private
from sgl_aspects.terminal import printable, say

if TYPE_CHECKING:
    from sgl_aspects.analysis.sources import Run

_LARGE = 50_000_000  # bytes: some seconds
_Number = TypeVar("_Number", int, float)


def number(kind: Callable[[str], _Number], least: float, most: float, what: str) -> Callable[[str], _Number]:
    """Return the type of a flag: a number of this kind in these bounds, which an error calls ``what``."""

    def read(text: str) -> _Number:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text}: write {what}")

    return read


positive_integer = number(int, 1, math.inf, "a whole number from 1")
share = number(float, 0, 1, "a number from 0 to 1")


def writable_file(text: str) -> Path:
    """A file in a folder that exists: checked before the work, not after."""
    file = Path(os.path.expanduser(text))
    if os.path.isdir(file) or not os.path.isdir(file.parent):
        raise argparse.ArgumentTypeError(f"{text!r}: write a file in a folder that exists")
    return file


def write_text(file: Path, text: str) -> None:
    """Write a file that the user named (see :func:`private`). ConfigError if it cannot be written."""
    try:
        with open(file, "w", encoding="utf-8", opener=private) as output:
            output.write(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; name another file") from error


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


def read_runs(sources: Sequence[str]) -> Run:
    """Read the runs that a command was given, and announce a file that takes long.

    :raises ConfigError: one has nothing to read.
    """
    from sgl_aspects.analysis.sources import load_runs

    for source in sources:
        size = os.path.getsize(source) if os.path.isfile(source) else 0
        if size >= _LARGE:
            say(f"reading {printable(source)} ({size / 1e6:,.0f} MB) ...")
    return load_runs(sources)


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
