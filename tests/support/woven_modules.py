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

METHODS = """
import functools
def f(x=0, *, y=1): return ('f', x, y)
def g(): return 'g'
@functools.cache
def cached(): return 'cached'
class A:
    def m(self): return 'm'
    @functools.cached_property
    def lazy(self): return 'lazy'
    @functools.singledispatchmethod
    def dispatched(self, x): return 'dispatched'
class Sub(A): pass
class Other(A):
    @functools.cached_property
    def lazy(self): return 'other'
class Diamond(Sub, Other): pass
"""
"""Methods, and what functools makes of them, in a family of classes."""

ODD_DESCRIPTORS = """
import functools
class cached_property(property):  # with a constructor of its own, as werkzeug's
    def __init__(self, fget, name=None, doc=None):
        super().__init__(fget, doc=doc)
        self.__name__ = name or fget.__name__
        self.slot = "_cache_" + self.__name__
    def __get__(self, instance, owner=None):
        if instance is None: return self
        if self.slot not in vars(instance): vars(instance)[self.slot] = self.fget(instance)
        return vars(instance)[self.slot]
class tagged(classmethod):
    def __init__(self, tag, function):
        super().__init__(function)
        self.tag = tag
class slotted(staticmethod):
    __slots__ = ("tag",)
    def __init__(self, tag, function):
        super().__init__(function)
        self.tag = tag
class lazily(functools.cached_property):
    def __init__(self, function, unit):
        super().__init__(function)
        self.unit = unit
class Refusing(property):
    def __new__(cls, fget): return super().__new__(cls)
    def __init__(self, fget): super().__init__(fget)
    def __setattr__(self, name, value):
        if armed: raise RuntimeError("hands off")
        super().__setattr__(name, value)
armed = False
class Binder:  # no __call__, binds a callable
    def __init__(self, function): self.function = function
    def __get__(self, instance, owner=None):
        return functools.partial(self.function, owner if instance is None else instance)
class Raising:
    def __get__(self, instance, owner=None): raise RuntimeError("not now")
class Meta(type):
    def __getattribute__(cls, name): raise RuntimeError("not readable")
class Guarded(metaclass=Meta):
    def m(self): return "guarded"
class Forbidding(type):
    def __setattr__(cls, name, value): raise RuntimeError("no")
class Closed(metaclass=Forbidding):
    def m(self): return "closed"
class A:
    @cached_property
    def cached(self): "Documented."; return ["cached"]
    def _class(cls, x=1): return (cls.__name__, x)
    made = tagged("tag", _class)
    static = slotted("slot", lambda x=1: ("static", x))
    lazy = lazily(lambda self: ["lazy"], "ms")
    refusing = Refusing(lambda self: "refusing")
    bound = Binder(lambda subject, x=1: (getattr(subject, "__name__", "instance"), x))
    raising = Raising()
    def m(self): return "m"
lazily.__set_name__(vars(A)["lazy"], A, "lazy")
def f(x=0): return ("f", x)
armed = True
"""
"""Descriptors and classes with ways of their own: constructors, slots, refusals."""


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


def fixture_of(source: str) -> Any:
    """A fixture: a loaded module ``engine`` with ``source`` as its code."""

    @pytest.fixture
    def made() -> Iterator[Any]:
        with module_of(source) as module:
            yield module

    return made


def advice(target: str, hook_type: aspects.HookType, hook: Any, **options: Any) -> aspects.Advice:
    return aspects.Advice(aspects.Target.parse(target), hook_type, hook, **options)


def mark(*targets: str, name: str = "hook", **options: Any) -> aspects.Advice:
    """A hook that appends its name to the list that the target returns."""

    def hook(result: list[str], *args: Any, **kwargs: Any) -> list[str]:
        return [*result, name]

    return aspects.Advice(aspects.Target.parse(targets), aspects.HookType.AFTER, hook, **options)


def state(hook: aspects.Advice) -> aspects.State:
    """Its state now: mypy takes the attribute for one that stays as it was."""
    return hook.state


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
