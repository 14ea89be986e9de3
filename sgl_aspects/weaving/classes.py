"""Replacing a class: the new one stands wherever the old one stood."""

from __future__ import annotations

import logging
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.hooks import Advice, innermost_first
from sgl_aspects.weaving.places import Place, current
from sgl_aspects.weaving.rebind import Stale

logger = logging.getLogger("sgl_aspects")


class ClassPoint:
    """A class that is replaced as a whole: the face of a join point, for REPLACE by classes only."""

    calls = 0

    def __init__(self, place: Place) -> None:
        self.place = place
        self.advices: list[Advice] = []
        self.original: type = place.raw
        self.inner = self.original
        self.replacement: type = self.original
        self.installed = False
        self._moved: list[tuple[type, tuple[type, ...]]] = []
        self.stale: list[Stale] = []

    def own_containers(self) -> set[int]:
        """Ids of everything of ours that holds the original on purpose."""
        return {id(holder) for holder in (self, self.__dict__, self.place, self.place.__dict__)}

    @property
    def active(self) -> bool:
        return any(advice.enabled for advice in self.advices)

    @staticmethod
    def check(advice: Advice, place: Place) -> None:
        """Raise :class:`HookError` unless ``advice`` replaces a class by a class."""
        if not advice.is_class_replacement:
            raise HookError(
                f"{place} is a class, and a class takes only REPLACE with a class; to hook what it does, "
                f"name one of its methods: '{place}.__init__'"
            )

    @property
    def standing(self) -> type:
        """What stands at the place as far as we know."""
        return self.replacement if self.installed else self.original

    def refresh(self, compiling: Any = None) -> None:
        """Nothing to do: a class has no chain."""

    def settle(self, compiling: Any = None) -> None:
        """Put the last enabled class in place, or the original back where none is enabled.

        :raises TypeError, AttributeError: the place cannot be written.
        """
        del compiling
        active = [advice for advice in innermost_first(self.advices) if advice.enabled]
        wanted = active[-1].hook if active else self.original
        if wanted is self.standing:
            return
        if self.installed:
            self._restore()
        if active:
            self.replacement = wanted
            self._install()

    def _install(self) -> None:
        setattr(self.place.owner, self.place.name, self.replacement)
        self.installed = True
        subclasses: list[type] = type.__subclasses__(self.original)
        for subclass in list(subclasses):
            if not issubclass(self.replacement, subclass):
                self._move(subclass)

    def _move(self, subclass: type) -> None:
        """Let a subclass of the old class inherit from the new one, where Python allows it."""
        bases = subclass.__bases__
        moved = tuple(self.replacement if base is self.original else base for base in bases)
        try:
            subclass.__bases__ = moved
        except TypeError as error:
            self.stale.append(Stale(str(self.place), f"the bases of {subclass.__qualname__}: {error}"))
        else:
            self._moved.append((subclass, bases))

    def _restore(self) -> None:
        self.installed = False
        for moved, bases in reversed(self._moved):
            moved.__bases__ = bases
        self._moved.clear()
        self.stale.clear()
        if current(self.place.owner, self.place.name) is not self.replacement:
            logger.info("%s: somebody else's class stands there; it is left in place", self.place)
        elif self.place.inherited:
            delattr(self.place.owner, self.place.name)
        else:
            setattr(self.place.owner, self.place.name, self.original)

    @property
    def displaced(self) -> bool:
        return self.installed and current(self.place.owner, self.place.name) is not self.replacement
