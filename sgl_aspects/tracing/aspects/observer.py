"""The shape of an aspect's parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class Observation:
    """An observer for the function that plays ``role``; reports name it after its aspect."""

    role: str
    enter: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    exit: Callable[[Any, Any, BaseException | None], None]

    def __post_init__(self) -> None:
        method = self.enter if inspect.ismethod(self.enter) else self.exit
        self.__qualname__, self.__module__ = method.__qualname__.rpartition(".")[0], method.__module__


def nothing(token: Any, result: Any, error: BaseException | None) -> None:
    """The exit of an observer that does its work on entry."""


def error_type(error: BaseException | None) -> str:
    """What ``error.type`` says of an exception: its class, never its message, which may hold a prompt."""
    return "" if error is None else type(error).__qualname__
