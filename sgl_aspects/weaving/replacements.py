"""Class replacements, and the referrers that keep the original of a replacement."""

from __future__ import annotations

import abc
import functools
import gc
import logging
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.attributes import (
    PROPERTIES,
    AttributeReference,
    OwnDict,
    bases,
    class_module,
    class_name,
    derives,
    is_a,
    is_class,
    namespace,
)
from sgl_aspects.weaving.hooks import Advice, HookType, innermost_first
from sgl_aspects.weaving.joinpoints import Extra, JoinPoint, Slot
from sgl_aspects.weaving.rebinding import Exclusions, Pair, Stale, unfrozen

logger = logging.getLogger("sgl_aspects")

# -- exclusions ----------------------------------------------------------------------------------------------


def exclusions_of(advices: Iterable[Advice]) -> Exclusions:
    """Return the containers of the hooks themselves, for REPLACE hooks also of their modules: not rebound."""
    kept: set[Any] = set()
    for advice in advices:
        kept.update(map(id, _containers_in(advice.hook)))
        home = _namespace_of(advice.hook) if advice.hook_type is HookType.REPLACE else None
        if home is not None:
            kept.add(id(home))
    return frozenset(kept)


def give_original(hook: Any, standing: Any, original: Any) -> None:
    """Change references of a REPLACE hook and its module from the installed object to ``original``.

    A class that derives from the installed one keeps it.
    """
    if is_class(hook) and is_class(standing) and derives(hook, standing):
        return
    home = _namespace_of(hook)
    # Not in the defining module: there it is the attribute itself, not a copy.
    if home is not None and home.get("__name__") != getattr(standing, "__module__", None):
        for name in [name for name, value in list(home.items()) if value is standing]:
            home[name] = original
    for referrer in _containers_in(hook):
        if isinstance(referrer, types.CellType) and referrer.cell_contents is standing:
            referrer.cell_contents = original


def _namespace_of(hook: Any) -> dict[str, Any] | None:
    """Return the namespace of the module that defines ``hook``; None if it is not loaded."""
    try:
        name = class_module(hook) if is_class(hook) else hook.__module__
    except Exception:  # noqa: BLE001  a hook may answer in any way
        return None
    module = sys.modules.get(name) if is_a(name, str) else None
    return namespace(module) if module is not None else None


def _containers_in(hook: Any) -> Iterator[Any]:
    """Yield containers that live as long as the hook: exclusions are identified by id."""
    yield hook
    if is_a(hook, types.FunctionType):
        held = (hook.__closure__, hook.__defaults__, hook.__kwdefaults__, hook.__dict__)
        yield from (referrer for referrer in held if referrer is not None)
        yield from hook.__closure__ or ()
        if "__wrapped__" in hook.__dict__:
            yield from _containers_in(hook.__dict__["__wrapped__"])
    elif is_a(hook, types.MethodType):
        yield from _containers_in(hook.__func__)
        yield hook.__self__
        if not is_class(hook.__self__):
            yield namespace(hook.__self__)
    elif is_a(hook, functools.partial):
        yield from _containers_in(hook.func)
    elif is_class(hook):
        for member in namespace(hook).values():
            if is_a(member, (classmethod, staticmethod)):
                member = member.__func__
            parts = (member.fget, member.fset, member.fdel) if is_a(member, PROPERTIES) else (member,)
            for part in parts:
                if is_a(part, types.FunctionType):
                    yield from _containers_in(part)
    else:
        yield namespace(hook)


class _OwnReferrers:
    """The referrers of a class from before it replaced another one."""

    __slots__ = ("_containers", "cls", "kept")

    def __init__(self, cls: type) -> None:
        self.cls = cls
        namespaces = {id(namespace(module)) for module in list(sys.modules.values())}
        # Strong references, so that their ids are not reused.
        self._containers: list[Any] = []
        kept: set[Any] = set()
        with unfrozen():
            referrers = gc.get_referrers(cls)
        for referrer in referrers:
            if id(referrer) in namespaces:
                kept.update((id(referrer), name) for name, value in list(referrer.items()) if value is cls)
            elif isinstance(referrer, (list, dict, set, types.CellType)):
                self._containers.append(referrer)
                kept.add(id(referrer))
        self.kept: Exclusions = frozenset(kept)


# -- classes -------------------------------------------------------------------------------------------------

_BASES: Any = vars(type)["__bases__"]

_hooks: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()  # by id
"""Classes that were registered to replace another one: their bases are never changed."""


class ClassJoinPoint(JoinPoint):
    """A class that is replaced as a whole, by a class."""

    __slots__ = ("_kept", "_moved", "_own", "_replacement", "_subclasses")

    kind = "a class"

    def __init__(self, place: AttributeReference) -> None:
        super().__init__(place, place.raw, Slot(place))
        self._replacement: type = self.inner
        self._kept: Exclusions = frozenset()
        self._own: list[_OwnReferrers] = []
        self._subclasses = OwnDict()  # of the replacement, before it was installed, by id
        self._moved = OwnDict()  # by id

    @property
    def replacement(self) -> type:
        return self._replacement

    def add(self, advice: Advice) -> None:
        if not advice.is_class_replacement:
            raise HookError(
                f"{self.place} is a class, and a class takes only REPLACE with a class; to hook what it "
                f"does, name one of its methods: '{self.place}.__init__'"
            )
        _hooks[id(advice.hook)] = advice.hook
        if id(advice.hook) in self._moved:
            self._move(advice.hook, self._replacement, self.original)
        self.advices.append(advice)

    def pairs(self, before: Any, after: Any, extra: Extra, exclude: Exclusions) -> Iterator[Pair]:
        # Referrers of a replacement from before, and its own references, are not rebound.
        self._kept |= exclude
        yield Pair(before, after, extra[0], self._kept.union(*(own.kept for own in self._own)))

    def apply(self, compiling: Any = None) -> None:
        active = [advice for advice in innermost_first(self.advices) if advice.enabled]
        wanted = active[-1].hook if active else self.original
        if wanted is self.standing:
            return
        if self.standing is not self.original:  # after an interrupt, too
            self._restore()
        if active:
            self._install(wanted)
        # Abstract base classes cache the results of issubclass().
        for base in (*bases(self.original), *bases(self._replacement)):
            if is_a(base, abc.ABCMeta):
                base._abc_caches_clear()  # type: ignore[attr-defined]

    def _install(self, replacement: type) -> None:
        if not any(own.cls is replacement for own in self._own):
            self._own.append(_OwnReferrers(replacement))
        own: list[type] = type.__subclasses__(replacement)
        self._subclasses = OwnDict((id(subclass), subclass) for subclass in own)
        self._replacement = replacement
        self.slot.put("", replacement)
        self.installed = True
        subclasses: list[type] = type.__subclasses__(self.original)
        for subclass in subclasses:
            if id(subclass) not in _hooks and not derives(replacement, subclass):
                self._move(subclass, self.original, replacement)

    def _restore(self) -> None:
        self.stale.clear()
        subclasses: list[type] = type.__subclasses__(self._replacement)
        for subclass in subclasses:
            # Subclasses from before are its own; the others were created, or moved, while it was installed.
            if id(subclass) not in self._subclasses and id(subclass) not in _hooks:
                self._move(subclass, self._replacement, self.original)
        self.slot.take_out("")
        self.installed = False

    def _move(self, subclass: type, old: type, new: type) -> None:
        """Change the base of a subclass from ``old`` to ``new``, where Python allows it."""
        wanted = tuple(new if base is old else base for base in _BASES.__get__(subclass))
        try:
            _BASES.__set__(subclass, wanted)
        except TypeError as error:
            fault = f"the bases of {class_name(subclass)}: {error}"
            self.stale.append(Stale(str(self.place), fault))
            logger.warning("%s: %s", self.place, fault)
        else:
            self._moved.pop(id(subclass), None)
            if new is not self.original:
                self._moved[id(subclass)] = subclass
