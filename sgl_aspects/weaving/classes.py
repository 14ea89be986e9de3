"""Replacing a class: the new one stands wherever the old one stood."""

from __future__ import annotations

import abc
import logging
import weakref
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.hooks import Advice, innermost_first
from sgl_aspects.weaving.keeping import Kept, OwnHolders, kept_by
from sgl_aspects.weaving.places import Place, current
from sgl_aspects.weaving.rebind import Stale

logger = logging.getLogger("sgl_aspects")

_hooks: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that were ever meant to replace another one: they keep their bases, whatever stands there."""


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
        self.superseded = False
        """The code of the module ran again: another point has the place now."""
        self.stale: list[Stale] = []
        self._kept: Kept = frozenset()
        self._own: dict[type, OwnHolders] = {}
        self._subclasses: set[type] = set()  # of the replacement, before it stood here
        self._moved: set[type] = set()

    def own_containers(self) -> set[int]:
        """Ids of everything of ours that holds the original on purpose."""
        held: list[Any] = [self, self.__dict__, self.place, self.place.__dict__]
        held += [self._own, self._subclasses, self._moved]
        return {id(holder) for holder in held}

    @property
    def active(self) -> bool:
        return any(advice.enabled for advice in self.advices)

    def admit(self, advice: Advice) -> None:
        """Add a hook that replaces the class by a class, which is then no class of the engine.

        :raises HookError: it is a hook for functions.
        """
        if not advice.is_class_replacement:
            raise HookError(
                f"{self.place} is a class, and a class takes only REPLACE with a class; to hook what it "
                f"does, name one of its methods: '{self.place}.__init__'"
            )
        _hooks.add(advice.hook)
        if advice.hook in self._moved:
            self._move(advice.hook, self.replacement, self.original)
        self.advices.append(advice)

    def dismiss(self, advice: Advice) -> None:
        """Take a hook away."""
        self.advices.remove(advice)

    @property
    def keeps(self) -> Kept:
        """What rebinding leaves alone: what holds a replacement, or what a replacement holds, by itself."""
        self._kept |= kept_by(self.advices)
        return self._kept.union(*(own.kept for own in self._own.values()))

    @property
    def standing(self) -> type:
        """What stands at the place as far as we know."""
        return self.replacement if self.installed else self.original

    def refresh(self, compiling: Any = None) -> None:
        """Nothing to do: a class has no chain."""

    def release(self) -> None:
        """Nothing to do."""

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
            self._install(wanted)
        _forget_checks(self.original, self.replacement)

    def _install(self, replacement: type) -> None:
        if replacement not in self._own:
            self._own[replacement] = OwnHolders(replacement)
        self._subclasses = set(type.__subclasses__(replacement))
        setattr(self.place.owner, self.place.name, replacement)
        self.replacement = replacement
        self.installed = True
        subclasses: list[type] = type.__subclasses__(self.original)
        for subclass in subclasses:
            if subclass not in _hooks and not issubclass(replacement, subclass):
                self._move(subclass, self.original, replacement)

    def _move(self, subclass: type, old: type, new: type) -> None:
        """Let a subclass of ``old`` inherit from ``new``, where Python allows it."""
        bases = tuple(new if base is old else base for base in subclass.__bases__)
        try:
            subclass.__bases__ = bases
        except TypeError as error:
            fault = f"the bases of {subclass.__module__}:{subclass.__qualname__}: {error}"
            self.stale.append(Stale(str(self.place), fault))
            logger.warning("%s: %s", self.place, fault)
        else:
            (self._moved.discard if new is self.original else self._moved.add)(subclass)

    def _restore(self) -> None:
        self.installed = False
        self.stale.clear()
        subclasses: list[type] = type.__subclasses__(self.replacement)
        for subclass in subclasses:
            # Those it has had before are its own; all others were made, or moved, while it stood here.
            if subclass not in self._subclasses and subclass not in _hooks:
                self._move(subclass, self.replacement, self.original)
        if self.superseded or current(self.place.owner, self.place.name) is not self.replacement:
            logger.info("%s: somebody else's class stands there; it is left in place", self.place)
        elif self.place.inherited:
            delattr(self.place.owner, self.place.name)
        else:
            setattr(self.place.owner, self.place.name, self.original)

    @property
    def displaced(self) -> bool:
        return self.installed and current(self.place.owner, self.place.name) is not self.replacement


def _forget_checks(*classes: type) -> None:
    """Abstract base classes remember who was a subclass of theirs; now others are."""
    for base in {base for cls in classes for base in cls.__mro__ if isinstance(base, abc.ABCMeta)}:
        base._abc_caches_clear()  # type: ignore[attr-defined]
