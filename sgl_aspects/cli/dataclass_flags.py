"""Command-line flags read off a dataclass of settings: one for each field, described by its comment."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from typing import Any

_TYPES = {"int": int, "float": float, "str": str}


def add_flags(parser: argparse.ArgumentParser, settings: type[Any], *, but: tuple[str, ...] = ()) -> None:
    """Add a flag for each field of ``settings`` except those in ``but``. Flags not given are left out."""
    group = parser.add_argument_group(settings.__name__)
    comments = comments_of(settings)
    for field in _fields(settings):
        if field.name in but:
            continue
        kind = str(field.type).partition(" | ")[0]
        default = None if field.default is dataclasses.MISSING else field.default
        shown = comments.get(field.name, "") + ("" if default is None else f" Default: {default}.")
        options: dict[str, Any] = {"help": shown.strip().replace("%", "%%"), "default": argparse.SUPPRESS}
        if kind == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": _TYPES.get(kind, str), "metavar": kind.upper() if kind in _TYPES else "TEXT"}
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def given(arguments: argparse.Namespace, settings: type[Any]) -> dict[str, Any]:
    """Return the fields of ``settings`` that were given on the command line."""
    values = vars(arguments)
    return {field.name: values[field.name] for field in _fields(settings) if field.name in values}


def _fields(settings: type[Any]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(settings) if field.init]


def comments_of(settings: type[Any]) -> dict[str, str]:
    """Return the ``#:`` lines above each field; none if the source is not available."""
    try:
        lines = inspect.getsource(settings).splitlines()
    except OSError:
        return {}
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in lines:
        line = line.strip()
        if line.startswith("#: "):
            above.append(line[3:])
            continue
        if above and ":" in line:
            comments[line.partition(":")[0]] = " ".join(above)
        above = []
    return comments
