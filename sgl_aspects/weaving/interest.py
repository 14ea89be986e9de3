"""Interest: which hooks a module that loads may be about.

Asked for every import of the process, so that it must answer at once: by the module's name for plain
targets, one by one only for patterns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from sgl_aspects.weaving.hooks import Advice
from sgl_aspects.weaving.places import bases, class_module, find, is_class, namespace
from sgl_aspects.weaving.targets import Alternate, Target


class Interest:
    """Hooks by the modules that they wait for."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[Advice, None]] = {}
        self._patterns: dict[Advice, None] = {}
        self._families: dict[Advice, None] = {}  # with `Class+`: any module may define a subclass

    def add(self, advice: Advice) -> None:
        """Wait for the modules of ``advice``."""
        for name in advice.target.module_names():
            self._by_name.setdefault(name, {})[advice] = None
        if advice.target.has_module_pattern:
            self._patterns[advice] = None
        if any(alternate.has_family for alternate in advice.target.alternates):
            self._families[advice] = None

    def discard(self, advice: Advice) -> None:
        """Wait no longer."""
        for name in advice.target.module_names():
            waiting = self._by_name.get(name, {})
            waiting.pop(advice, None)
            if not waiting:
                self._by_name.pop(name, None)
        self._patterns.pop(advice, None)
        self._families.pop(advice, None)

    def wants(self, name: str) -> bool:
        """Whether anybody may wait for the module ``name``; safe to ask without a lock."""
        return name in self._by_name or bool(self._patterns) or bool(self._families)

    def concerned(self, name: str, module: Any) -> Iterator[tuple[Advice, str, Any]]:
        """Each hook that ``module``, just loaded, may be about, and where its target is to be looked up."""
        for advice in {**self._by_name.get(name, {}), **self._patterns}:
            if advice.target.attribute_paths(name):
                yield advice, name, module
        defined = _classes_of(module, name) if self._families else []
        for advice in list(self._families):
            for home, base in _bases(advice):
                if home != name and any(base in bases(cls) for cls in defined):
                    yield advice, home, sys.modules[home]


def loaded(target: Target) -> Iterator[tuple[str, Any]]:
    """The loaded modules that ``target`` may be about."""
    modules = list(sys.modules) if target.has_module_pattern else []
    for name in dict.fromkeys(name for one in target.alternates for name in one.names_among(modules)):
        module = sys.modules.get(name)
        if module is not None and target.attribute_paths(name):
            yield name, module


def _bases(advice: Advice) -> Iterator[tuple[str, type]]:
    """The loaded classes that ``advice`` names as `Class+`, each with its module's name."""
    for alternate in advice.target.alternates:
        if alternate.has_family:
            for home, module in loaded(Target((alternate,))):
                yield from ((home, base) for base in bases_of_family(alternate, module))


def bases_of_family(alternate: Alternate, module: Any) -> list[type]:
    """The classes in ``module`` that ``alternate`` names as `Class+`."""
    if not alternate.has_family:
        return []
    end = next(index for index, part in enumerate(alternate.path) if part.endswith("+")) + 1
    path = tuple(part.removesuffix("+") for part in alternate.path[:end])
    return [place.raw for place in find(module, path) if is_class(place.raw)]


def _classes_of(module: Any, name: str) -> list[type]:
    """The classes that ``module`` defines, nested ones too."""
    found = [
        value for value in list(namespace(module).values()) if is_class(value) and class_module(value) == name
    ]
    for cls in found:
        found += [value for value in namespace(cls).values() if is_class(value) and value not in found]
    return found
