"""Every environment variable that sgl-aspects reads, parsed in one place.

A value that is not allowed is a :class:`~sgl_aspects.errors.ConfigError` that names the variable and
the choices; nothing falls back to a default in silence.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sgl_aspects.errors import ConfigError

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def text(name: str, default: str | None = None) -> str | None:
    """The value of ``name``, stripped; ``default`` where it is unset or empty."""
    value = os.environ.get(name, "").strip()
    return value or default


def choice(name: str, choices: Sequence[str], default: str) -> str:
    """One of ``choices``, compared without regard to case."""
    value = text(name)
    if value is None:
        return default
    if value.lower() not in choices:
        raise ConfigError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    return value.lower()


def flag(name: str, default: bool = False) -> bool:
    """A switch: 1/0, true/false, yes/no, on/off."""
    value = text(name)
    if value is None:
        return default
    lowered = value.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ConfigError(f"{name}={value!r}: write one of {', '.join(_TRUE + _FALSE)}")


def integer(name: str, default: int, *, minimum: int, maximum: int) -> int:
    """A whole number between ``minimum`` and ``maximum``, both included."""
    value = text(name)
    if value is None:
        return default
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if not minimum <= number <= maximum:
        raise ConfigError(f"{name}={value!r}: write a whole number from {minimum} to {maximum}")
    return number


def number(name: str, *, minimum: float = 0.0) -> float | None:
    """A number of ``minimum`` or more, such as seconds; None where the variable is unset."""
    value = text(name)
    if value is None:
        return None
    try:
        found = float(value)
    except ValueError:
        found = minimum - 1
    if not minimum <= found < float("inf"):
        raise ConfigError(f"{name}={value!r}: write a number from {minimum:g} up")
    return found


def names(name: str) -> tuple[str, ...] | None:
    """A comma-separated list; None where the variable is unset. Set but empty is the empty list."""
    value = os.environ.get(name)
    if value is None:
        return None
    return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)
