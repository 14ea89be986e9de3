"""Attributes that a module makes in its own `__getattr__` (PEP 562), when somebody first asks for them.

Nothing is asked for on behalf of a hook: that might import half an engine. Instead the module's function is
stood in for, until somebody asks; what it gives then stands in the module's dictionary, as most such
functions see to themselves, and can be woven like anything else there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from sgl_aspects.weaving.places import MISSING, current, is_a, namespace

_FUNCTION = "__getattr__"


class LazyAttributes:
    """The modules that are waited for.

    :param made: called with a module's name and the module, when it has made what a hook waits for.
    """

    def __init__(self, made: Callable[[str, Any], None]) -> None:
        self._made = made
        self._watched: dict[int, _Watched] = {}

    def wait(self, name: str, module: Any, attribute: str) -> bool:
        """Wait for ``attribute``; False where ``module`` has it already, or makes none by itself."""
        if current(module, attribute) is not MISSING:
            return False
        if id(module) not in self._watched:
            function = current(module, _FUNCTION)
            if not is_a(function, types.FunctionType):
                return False
            self._watched[id(module)] = _Watched(name, module, function, self._made)
        self._watched[id(module)].wanted.add(attribute)
        return True

    def restore(self) -> None:
        """Leave all modules as they were."""
        for watched in self._watched.values():
            watched.restore()
        self._watched.clear()


class _Watched:
    def __init__(self, name: str, module: Any, function: Any, made: Callable[[str, Any], None]) -> None:
        self.wanted: set[str] = set()
        self._module = module
        self._function = function
        self._kept: dict[str, Any] = {}
        names = namespace(module)

        @functools.wraps(function)
        def stand_in(attribute: str) -> Any:
            value = function(attribute)
            if attribute not in self.wanted:
                return value
            self.wanted.discard(attribute)
            if attribute not in names:
                names[attribute] = self._kept[attribute] = value
            made(name, module)
            return names[attribute]

        self._stand_in = stand_in
        names[_FUNCTION] = stand_in

    def restore(self) -> None:
        names = namespace(self._module)
        if names.get(_FUNCTION, MISSING) is self._stand_in:
            names[_FUNCTION] = self._function
        for attribute, value in self._kept.items():
            if names.get(attribute, MISSING) is value:
                del names[attribute]
