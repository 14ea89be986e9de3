"""Reading one parameter of a call from the ``(args, kwargs)`` that hooks get."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from sgl_aspects.errors import HookError

ArgumentReader = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def argument_reader(function: Callable[..., Any], parameter: str) -> ArgumentReader:
    """Reads ``parameter`` of ``function``; None where a call leaves it out.

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
    if not isinstance(function, types.FunctionType):
        return _bound(signature, parameter)
    # Woven functions hand on required parameters by position and optional ones by keyword, see codegen.py.
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    if parameter not in positional:
        return _bound(signature, parameter) if _packs(signature.parameters[parameter]) else _named(parameter)
    return _at(positional.index(parameter), parameter)


def _packs(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _at(position: int, parameter: str) -> ArgumentReader:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[position] if position < len(args) else kwargs.get(parameter)

    return read


def _named(parameter: str) -> ArgumentReader:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs.get(parameter)

    return read


def _bound(signature: inspect.Signature, parameter: str) -> ArgumentReader:
    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return signature.bind(*args, **kwargs).arguments.get(parameter)
        except TypeError:  # the call itself will say so
            return None

    return read


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
