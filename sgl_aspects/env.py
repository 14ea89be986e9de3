"""Every environment variable that sgl-aspects reads, parsed in one place.

A variable ``SGL_ASPECTS_X`` may also be spelled ``ASPECTS_X``; if both are set, the longer name counts.
SGLang takes names that begin with ``SGL_`` for deprecated ones of its own and warns of each in every process,
so sgl-aspects sets the shorter names for the processes of an engine.

A value that is not allowed is a :class:`~sgl_aspects.errors.ConfigError` that names the variable and the
choices; there is no silent default.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator, Mapping, Sequence

from sgl_aspects.errors import ConfigError

_FAMILY, _PREFIX = "SGL_", "SGL_ASPECTS_"
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


_given: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "sgl_aspects_environment", default=None
)


@contextlib.contextmanager
def reading_from(environment: Mapping[str, str]) -> Iterator[None]:
    """Read this thread's settings from ``environment`` instead of the process's own, within the block.

    For a process that is attached to: its environment belongs to it, and other threads read it.
    """
    token = _given.set(environment)
    try:
        yield
    finally:
        _given.reset(token)


def current() -> Mapping[str, str]:
    """Return the environment that is read: the process's own, or what :func:`reading_from` was given."""
    given = _given.get()
    return os.environ if given is None else given


def spelled(name: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the spelling of ``name`` that is set, or to be set, in ``environment`` (the process's own)."""
    environment = current() if environment is None else environment
    if name in environment or not name.startswith(_PREFIX):
        return name
    return name.removeprefix(_FAMILY)


def shortened(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with each ``SGL_ASPECTS_X`` spelled ``ASPECTS_X``."""
    ours = {name: value for name, value in environment.items() if name.startswith(_PREFIX)}
    others = {name: value for name, value in environment.items() if name not in ours}
    return {**others, **{name.removeprefix(_FAMILY): value for name, value in ours.items()}}


def text(name: str, default: str | None = None) -> str | None:
    """Return the value of ``name``, stripped; ``default`` if it is unset or empty."""
    environment = current()
    value = environment.get(spelled(name, environment), "").strip()
    return value or default


def runtime_folder() -> str | None:
    """Return ``XDG_RUNTIME_DIR`` if it is this user's own.

    It may be another user's, as after ``sudo -E``, who could exchange what is made in it.
    """
    folder = text("XDG_RUNTIME_DIR")
    try:
        is_own = folder is not None and os.path.isabs(folder) and os.stat(folder).st_uid == os.geteuid()
    except OSError:
        return None
    return folder if is_own else None


def choice(name: str, choices: Sequence[str], default: str) -> str:
    """Return one of ``choices``, compared without regard to case."""
    value = text(name)
    if value is None:
        return default
    if value.lower() not in choices:
        raise ConfigError(f"{name}={value!r}: choose one of {', '.join(choices)}")
    return value.lower()


def flag(name: str, default: bool = False) -> bool:
    """Return a switch: 1/0, true/false, yes/no, on/off."""
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
    """Return a whole number between ``minimum`` and ``maximum``, both included."""
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
    """Return a number of at least ``minimum``, such as seconds; None if the variable is unset."""
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
    """Return a comma-separated list; None if the variable is unset. Set but empty is the empty list."""
    environment = current()
    value = environment.get(spelled(name, environment))
    if value is None:
        return None
    return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)
