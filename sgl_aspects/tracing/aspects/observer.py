"""The shape of an aspect's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Observation(NamedTuple):
    """An observer for the function that plays ``role``."""

    role: str
    enter: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    exit: Callable[[Any, Any, BaseException | None], None]


def nothing(token: Any, result: Any, error: BaseException | None) -> None:
    """The exit of an observer that does its work on entry."""


def error_type(error: BaseException | None) -> str:
    """What ``error.type`` says of an exception: its class, never its message, which may hold a prompt."""
    return "" if error is None else type(error).__qualname__
