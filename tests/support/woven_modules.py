"""Modules made from source text for tests of weaving, and hooks that record their calls."""

from __future__ import annotations

import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects.weaving import weaver


@pytest.fixture(autouse=True)
def no_hook_is_left() -> Iterator[None]:
    """A test that fails halfway leaves its hooks; the next one starts without them."""
    yield
    weaver.remove(weaver.advices)
    assert aspects.report() == aspects.Report()


@contextmanager
def module_of(source: str, name: str = "engine") -> Iterator[Any]:
    """A loaded module with ``source`` as its code."""
    module: Any = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(textwrap.dedent(source), f"<{name}>", "exec"), module.__dict__)
        yield module
    finally:
        sys.modules.pop(name, None)


def advice(target: str, hook_type: aspects.HookType, hook: Any, **options: Any) -> aspects.Advice:
    return aspects.Advice(aspects.Target.parse(target), hook_type, hook, **options)


def around(target: str, hook: Callable[..., Any] | None = None, **options: Any) -> aspects.Advice:
    """An AROUND hook; without ``hook``, one that changes nothing."""
    return advice(target, aspects.HookType.AROUND, hook or hand_on, **options)


def hand_on(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


def hooked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mark the result: an AROUND hook whose calls a test can tell from those of the original."""
    return ("hooked", original(*args, **kwargs))


class Watch:
    """An observer that records every enter and exit."""

    def __init__(self) -> None:
        self.entered: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.left: list[tuple[Any, BaseException | None]] = []

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        self.entered.append((args, kwargs))
        return len(self.entered) - 1

    def exit(self, token: int, result: Any, error: BaseException | None) -> None:
        self.left.append((result, error))

    def on(self, target: str, **options: Any) -> aspects.Advice:
        return advice(target, aspects.HookType.OBSERVE, self, **options)


def stored(module: Any, path: str) -> Any:
    """The object at ``path`` in the dictionaries, descriptors unopened; None if there is none."""
    *owners, name = path.split(".")
    owner = module
    for part in owners:
        owner = getattr(owner, part)
    return vars(owner).get(name)
