"""The parts of an observer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Observation:
    """The advice for the function in ``role``; reports name it after its class.

    ``enter(args, kwargs) -> token``, ``exit(token, result, error)``; None: not called. ``level``: the lowest
    trace level at which it is woven. Levels 1 and 2 are always woven: one of them detects level changes.
    ``caller``: what calls them in C where they are the only hooks of a function.
    """

    role: str
    enter: Any
    exit: Any = None
    level: int = 1
    caller: Any = None

    def __post_init__(self) -> None:
        method = self.enter or self.exit
        owner = getattr(method, "__self__", None)
        if owner is not None:
            self.__qualname__, self.__module__ = type(owner).__qualname__, type(owner).__module__
        else:
            self.__qualname__, self.__module__ = method.__qualname__.rpartition(".")[0], method.__module__


def error_type(error: BaseException | None) -> str:
    """Return ``error.type``: the exception's class, never its message, which may hold a prompt."""
    return "" if error is None else type(error).__qualname__
