"""Attributes and classes that are made later: by a module's ``__getattr__``, or by deriving from a class.

Nothing is asked for on behalf of a hook: that might import half an engine. Instead the function that will
be called then is wrapped: a module's own ``__getattr__`` (PEP 562), the one of its class (as that of
transformers' lazy modules), and a class's ``__init_subclass__``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from sgl_aspects.weaving.hooks import Advice
from sgl_aspects.weaving.places import MISSING, bases, current, is_a, is_class, namespace

_GETATTR = "__getattr__"
_INIT_SUBCLASS = "__init_subclass__"


class LazyAttributes:
    """The modules that are waited for.

    :param made: called with a module's name and the module, when it has made what a hook waits for.
    """

    def __init__(self, made: Callable[[str, Any], None]) -> None:
        self._made = made
        self._wrapped: dict[int, _Wrapped] = {}  # by the id of what has the function: a module or a class
        self._wanted: dict[int, tuple[str, Any, set[str]]] = {}
        self._kept: list[tuple[dict[str, Any], str, Any]] = []

    def wait(self, name: str, module: Any, attribute: str) -> bool:
        """Wait for ``attribute``; False where ``module`` has it already, or makes none by itself."""
        owner = next((one for one in (module, *bases(type(module))) if self._makes(one)), None)
        if current(module, attribute) is not MISSING or owner is None:
            return False
        if id(owner) not in self._wrapped:
            self._wrapped[id(owner)] = _Wrapped(owner, _GETATTR, self._asking(owner))
        self._wanted.setdefault(id(module), (name, module, set()))[2].add(attribute)
        return True

    def restore(self) -> None:
        """Leave all modules as they were."""
        for wrapped in self._wrapped.values():
            wrapped.restore()
        for names, attribute, value in self._kept:
            if names.get(attribute, MISSING) is value:
                del names[attribute]
        self.__init__(self._made)  # type: ignore[misc]

    def _makes(self, owner: Any) -> bool:
        return id(owner) in self._wrapped or is_a(current(owner, _GETATTR), types.FunctionType)

    def _asking(self, owner: Any) -> Callable[..., Any]:
        function = current(owner, _GETATTR)

        @functools.wraps(function)
        def ask(*arguments: Any) -> Any:
            value = function(*arguments)
            module, attribute = arguments if is_class(owner) else (owner, *arguments)
            name, _, wanted = self._wanted.get(id(module), ("", None, ()))
            if attribute not in wanted:
                return value
            self._wanted[id(module)][2].discard(attribute)
            names = namespace(module)
            if attribute not in names:
                names[attribute] = value
                self._kept.append((names, attribute, value))
            self._made(name, module)
            return names[attribute]

        return ask


class Families:
    """The classes whose new subclasses hooks on ``Class+`` wait for.

    :param made: called with each new subclass, which is ready but for its decorators.
    """

    def __init__(self, made: Callable[[type], None]) -> None:
        self._made = made
        self._waiting: dict[type, dict[Advice, None]] = {}
        self._wrapped: dict[type, _Wrapped] = {}

    def wait(self, advice: Advice, base: type) -> None:
        """Wait for subclasses of ``base``."""
        self._waiting.setdefault(base, {})[advice] = None
        if base not in self._wrapped:
            try:
                self._wrapped[base] = _Wrapped(base, _INIT_SUBCLASS, classmethod(self._deriving(base)))
            except (TypeError, AttributeError):
                return  # a type made in C: its subclasses are found when their modules have loaded

    def forget(self, advice: Advice) -> None:
        """Wait no longer."""
        for base in [base for base, waiting in self._waiting.items() if waiting.pop(advice, True) is None]:
            if not self._waiting[base]:
                del self._waiting[base]
                if base in self._wrapped:
                    self._wrapped.pop(base).restore()

    def concerned(self, cls: type) -> list[Advice]:
        """The hooks that ``cls`` is about."""
        waiting = [self._waiting.get(base, {}) for base in bases(cls)]
        return list(dict.fromkeys(advice for advices in waiting for advice in advices))

    def _deriving(self, base: type) -> Callable[..., None]:
        own = current(base, _INIT_SUBCLASS)

        def init_subclass(cls: type, **options: Any) -> None:
            if own is MISSING:
                super(base, cls).__init_subclass__(**options)  # type: ignore[arg-type]
            else:
                own.__get__(None, cls)(**options)
            self._made(cls)

        return functools.wraps(own.__func__)(init_subclass) if is_a(own, classmethod) else init_subclass


class _Wrapped:
    """A function that ours stands in the place of."""

    def __init__(self, owner: Any, name: str, ours: Any) -> None:
        self._owner, self._name, self._ours = owner, name, ours
        self._before = current(owner, name)
        self._set(ours)

    def restore(self) -> None:
        if current(self._owner, self._name) is not self._ours:
            return  # somebody else has wrapped it since
        if self._before is MISSING:
            type.__delattr__(self._owner, self._name)
        else:
            self._set(self._before)

    def _set(self, value: Any) -> None:
        if is_class(self._owner):
            type.__setattr__(self._owner, self._name, value)
        else:
            namespace(self._owner)[self._name] = value
