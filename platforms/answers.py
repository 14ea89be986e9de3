"""Calls of a platform's methods whose errors name the class and the method."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sgl_aspects.errors import AspectsError, PlatformError, PlatformTypeError
from sgl_aspects.platforms.discovery import resolve_qualified_name


def name_of(method: Callable[..., Any]) -> str:
    """Return ``"pkg.mod.Class.method()"``, with the class that the platform is an instance of."""
    cls = type(getattr(method, "__self__", None))
    return f"{cls.__module__}.{cls.__qualname__}.{method.__name__}()"


def answer_of(kind: Any, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call ``method`` and return its answer.

    Raises PlatformTypeError if it is not a ``kind``, as in ``isinstance``; PlatformError from any error of
    the method but NotImplementedError, which names what is missing.
    """
    try:
        answer = method(*args, **kwargs)
    except (AspectsError, NotImplementedError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit would end the engine without an error
        raise PlatformError(f"{name_of(method)} failed: {type(error).__name__}: {error}") from error
    if isinstance(answer, kind):
        return answer
    kinds = kind if isinstance(kind, tuple) else (kind,)
    names = [f"{each.__module__}.{each.__name__}".replace("builtins.", "") for each in kinds]
    raise PlatformTypeError(f"{name_of(method)} returned {answer!r}, and {' or '.join(names)} is needed")


def class_of(
    method: Callable[..., Any],
    /,
    *args: Any,
    has: tuple[str, ...] = (),
    usual: type | None = None,
    **kwargs: Any,
) -> Any:
    """Call a factory and return its class. ``has``: what the class needs; ``usual``: the class for None."""
    answer = answer_of(object, method, *args, **kwargs)
    return usual if answer is None and usual is not None else class_named(answer, method, has)


def class_named(answer: type | str, method: Callable[..., Any], has: tuple[str, ...] = ()) -> Any:
    """Return the class that a factory's answer names."""
    try:
        found = resolve_qualified_name(answer)
    except PlatformError as error:
        raise type(error)(f"{name_of(method)}: {error}") from error
    missing = ", ".join(name for name in has if not callable(getattr(found, name, None)))
    if missing:
        raise PlatformTypeError(
            f"{name_of(method)} names {found.__module__}:{found.__qualname__}, which has no {missing}: "
            f"such a class has {', '.join(has)}"
        )
    return found


def made_by(method: Callable[..., Any], cls: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Make an object of the class that a factory named. PlatformTypeError if it takes other arguments."""
    try:
        inspect.signature(cls).bind(*args, **kwargs)
    except ValueError:  # compiled, and without a signature
        pass
    except TypeError as error:
        raise PlatformTypeError(
            f"{name_of(method)} names {cls.__module__}:{cls.__qualname__}, which cannot be made as engines "
            f"do, with {', '.join([*(type(each).__name__ for each in args), *kwargs])}: {error}"
        ) from error
    return cls(*args, **kwargs)
