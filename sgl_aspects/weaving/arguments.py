"""Reading one parameter of a call from the ``(args, kwargs)`` that hooks get."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from sgl_aspects.errors import HookError

ArgumentReader = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def argument_reader(function: Callable[..., Any], parameter: str) -> ArgumentReader:
    """Reads ``parameter`` of ``function``: its default, or None, where a call leaves it out.

    :raises HookError: ``function`` has no such parameter, or does not say which it has.
    """
    try:
        # As it is called: what it wraps may have other parameters.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError) as error:
        raise HookError(
            f"no parameter {parameter!r} can be read: {function!r} does not say which it has"
        ) from error
    if parameter not in signature.parameters:
        choices = ", ".join(signature.parameters) or "it has none"
        raise HookError(f"{_name(function)} has no parameter {parameter!r}; choose from: {choices}")
    found = signature.parameters[parameter]
    if found.kind in (found.VAR_POSITIONAL, found.VAR_KEYWORD):
        return _bound(signature, parameter)
    default = None if found.default is found.empty else found.default
    positional = [one.name for one in signature.parameters.values() if one.kind in _POSITIONAL]
    if parameter not in positional:
        return lambda args, kwargs: kwargs.get(parameter, default)
    position = positional.index(parameter)
    if found.kind is found.POSITIONAL_ONLY:  # a keyword of this name belongs to **kwargs
        return lambda args, kwargs: args[position] if position < len(args) else default
    return lambda args, kwargs: args[position] if position < len(args) else kwargs.get(parameter, default)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _bound(signature: inspect.Signature, parameter: str) -> ArgumentReader:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return signature.bind(*args, **kwargs).arguments.get(parameter)
        except TypeError:  # the call itself will say so
            return None

    return read


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
