"""Join points: one woven place each, the hooks that are active there, and the way back."""

from __future__ import annotations

import abc
import dataclasses
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
    AttributeReference,
    bases,
    class_module,
    class_name,
    current,
    derives,
    holds,
    is_a,
    is_class,
    namespace,
)
from sgl_aspects.weaving.hooks import build_chain, own_containers
from sgl_aspects.weaving.descriptors import Slot, open_attribute
from sgl_aspects.weaving.functions import FunctionKind, WovenFunction
from sgl_aspects.weaving.hooks import Advice, HookType, innermost_first
from sgl_aspects.weaving.rebinding import Pair, Stale, unfrozen

logger = logging.getLogger("sgl_aspects")

# -- what goes on holding an original that is replaced -------------------------------------------------------

Exclusions = frozenset[Any]
"""Ids of containers that are left alone as a whole, and pairs of a namespace's id and one name in it."""

_CONTAINERS = (list, dict, set, types.CellType)


def exclusions_of(advices: Iterable[Advice]) -> Exclusions:
    """What the hooks of ``advices`` hold of their own: for REPLACE hooks, their modules too."""
    kept: set[Any] = set()
    for advice in advices:
        kept.update(id(holder) for holder in _holders_in(advice.hook))
        if advice.hook_type is HookType.REPLACE:
            home = _namespace_of(advice.hook)
            if home is not None:
                kept.add(id(home))
    return frozenset(kept)


def give_original(hook: Any, standing: Any, original: Any) -> None:
    """Let a hook that is about to replace ``original`` hold it, where it was given what stands there now.

    A class that derives from the one that stands there means that one, and keeps it.
    """
    if is_class(hook) and is_class(standing) and derives(hook, standing):
        return
    home = _namespace_of(hook)
    # In the module that defines it, it is the original and not a copy.
    if home is not None and home.get("__name__") != getattr(standing, "__module__", None):
        for name in [name for name, value in list(home.items()) if value is standing]:
            home[name] = original
    for holder in _holders_in(hook):
        if isinstance(holder, types.CellType) and holder.cell_contents is standing:
            holder.cell_contents = original


def _namespace_of(hook: Any) -> dict[str, Any] | None:
    """The namespace of the module that ``hook`` was defined in; None where it is not loaded."""
    try:
        name = class_module(hook) if is_class(hook) else hook.__module__
    except Exception:  # noqa: BLE001  a hook may answer in any way
        return None
    module = sys.modules.get(name) if is_a(name, str) else None
    return namespace(module) if module is not None else None


def _holders_in(hook: Any) -> Iterator[Any]:
    """Only what lives as long as the hook does: what is kept is known by its id."""
    yield hook
    if is_a(hook, types.FunctionType):
        held = (hook.__closure__, hook.__defaults__, hook.__kwdefaults__, hook.__dict__)
        yield from (holder for holder in held if holder is not None)
        yield from hook.__closure__ or ()
        if "__wrapped__" in hook.__dict__:
            yield from _holders_in(hook.__dict__["__wrapped__"])
    elif is_a(hook, types.MethodType):
        yield from _holders_in(hook.__func__)
        yield hook.__self__
        if not is_class(hook.__self__):
            yield namespace(hook.__self__)
    elif is_a(hook, functools.partial):
        yield from _holders_in(hook.func)
    elif is_class(hook):
        for member in namespace(hook).values():
            for function in _functions_of(member):
                yield from _holders_in(function)
    else:
        yield namespace(hook)


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    if is_a(member, (classmethod, staticmethod)):
        member = member.__func__
    parts = (member.fget, member.fset, member.fdel) if is_a(member, property) else (member,)
    yield from (part for part in parts if is_a(part, types.FunctionType))


class OwnHolders:
    """What holds a class before it replaces another one."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        namespaces = {id(namespace(module)) for module in list(sys.modules.values())}
        # Strong references, so that no other container can get the id of one of them.
        self._containers: list[Any] = []
        kept: set[Any] = set()
        with unfrozen():
            holders = gc.get_referrers(cls)
        for holder in holders:
            if id(holder) in namespaces:
                kept.update((id(holder), name) for name, value in list(holder.items()) if value is cls)
            elif isinstance(holder, _CONTAINERS):
                self._containers.append(holder)
                kept.add(id(holder))
        self.kept: Exclusions = frozenset(kept)


# -- functions -----------------------------------------------------------------------------------------------


class JoinPoint:
    """One woven attribute: its hooks, its original, and what stands there instead while a hook is active.

    While none is, the identical original object is back. The weaver serialises all changes. What is here is
    what the table, the weaver and the reports know of a join point.
    """

    place: AttributeReference
    advices: list[Advice]
    inner: Any  # what is hooked: for a descriptor, the callable in it
    installed = False
    kind = "a generated function"
    slot: Slot | None = None
    function: Any = None  # the woven one
    calls: Any = 0

    @property
    def original(self) -> Any:
        """What stood here before; for a place that is inherited, what the base has now."""
        raise NotImplementedError

    @property
    def standing(self) -> Any:
        """What stands at the place as far as we know: the original, or ours."""
        raise NotImplementedError

    @property
    def replacement(self) -> Any:
        """Ours, whether it stands there or not."""
        raise NotImplementedError

    @property
    def displaced(self) -> bool:
        """Somebody else's object stands where ours was put."""
        raise NotImplementedError

    @property
    def active(self) -> bool:
        return any(advice.enabled for advice in self.advices)

    def add(self, advice: Advice) -> None:
        """Add a hook.

        :raises HookError: this join point cannot take it.
        """
        raise NotImplementedError

    def remove(self, advice: Advice) -> None:
        """Take a hook away."""
        self.advices.remove(advice)

    def apply(self, compiling: Any = None) -> None:
        """Put ours in place while a hook is active, the identical original while none is.

        :raises Exception: the place cannot be written, or its owner does not want it to be.
        """
        raise NotImplementedError

    def pairs(self, before: Any, after: Any, extra: int) -> Iterator[Pair]:
        """What holders of ``before`` shall hold; ``extra`` references to it have no known holder."""
        raise NotImplementedError

    def own_containers(self) -> set[int]:
        """Ids of everything of ours that holds the original on purpose."""
        raise NotImplementedError

    def refresh(self, compiling: Any = None) -> None:
        """Run the hooks that are active now."""

    def release(self) -> None:
        """No hook will come here any more."""

    def supersede(self) -> None:
        """The code of the module ran again: another join point has the place now."""

    def follow(self, below: Any) -> None:
        """Call ``below`` from now on: what the base class has has been hooked, or is plain again."""

    @property
    def extra_references(self) -> int:
        """How many references to what stands here have no known holder; -1 where nobody can tell."""
        return -1

    @property
    def stale(self) -> list[Stale]:
        """What could not be changed when it was put in place, besides holders."""
        return []


class FunctionJoinPoint(JoinPoint):
    """A function, or another callable.

    :param slot: shared by the points for the parts of one property.
    """

    slot: Slot

    def __init__(self, place: AttributeReference, slot: Slot | None = None) -> None:
        if slot is not None:
            place = dataclasses.replace(place, raw=slot.original)
        self.place = place
        self.advices: list[Advice] = []
        opened = open_attribute(place)
        self.inner = opened.content
        self._called = opened.called
        self.woven = opened.weave(str(place))
        self.slot = slot or Slot(place, opened.rebuild)
        self._head: Any = self._called
        self._observers: dict[Advice, Any] = {}
        self.function = self.woven.function
        self.slot.with_occupant(place.part, self.function)  # may fail: now, not when it is registered

    def add(self, advice: Advice) -> None:
        # An observer that wants to know its function is asked for the one for this function.
        if advice.is_class_replacement:
            raise HookError(
                f"{advice}: {self.place} is not a class: a class cannot replace it; pass a function"
            )
        self._check_async(advice)
        if advice.hook_type is HookType.OBSERVE and hasattr(type(advice.hook), "bound_to"):
            self._observers[advice] = advice.hook.bound_to(self.inner)
        self.advices.append(advice)

    def _check_async(self, advice: Advice) -> None:
        if (
            advice.hook_type in (HookType.OBSERVE, HookType.REPLACE)
            or self.woven.kind is FunctionKind.COROUTINE
        ):
            return
        if FunctionKind.of(advice.hook) is FunctionKind.COROUTINE:
            raise HookError(
                f"{advice}: the hook is async, and {self.place} is not: its callers would get a coroutine. "
                "Write it as a plain def, or hook the async def that awaits this function"
            )

    def remove(self, advice: Advice) -> None:
        super().remove(advice)
        self._observers.pop(advice, None)

    @property
    def original(self) -> Any:
        return self.slot.original

    @property
    def standing(self) -> Any:
        return self.slot.standing

    @property
    def replacement(self) -> Any:
        return self.slot.with_occupant(self.place.part, self.woven.function)

    def own_containers(self) -> set[int]:
        held: list[Any] = [self, self.__dict__, self.place, self.place.__dict__]
        held += [*own_containers(self._head), *self.slot.own_containers()]
        held += [self.woven, *self.woven.own_containers()]
        if self._called is not self.inner and type(self._called) is types.FunctionType:
            held += [self._called.__dict__, *(self._called.__closure__ or ())]
        # A function holds nothing itself: its dictionary, closure and defaults do, and those are users'.
        return {id(holder) for holder in held if type(holder) is not types.FunctionType}

    def follow(self, below: Any) -> None:
        opened = open_attribute(dataclasses.replace(self.place, raw=below))
        self.inner, self._called = opened.content, opened.called
        self.slot.follow(below, opened.rebuild)

    @property
    def calls(self) -> int:
        return self.woven.calls

    def refresh(self, compiling: Any = None) -> None:
        active = _once([advice for advice in innermost_first(self.advices) if advice.enabled])
        replaces = [advice for advice in active if advice.hook_type is HookType.REPLACE]
        behavioural = [
            advice for advice in active if advice.hook_type not in (HookType.REPLACE, HookType.OBSERVE)
        ]
        # The last REPLACE wins; the earlier ones stay registered and come back when it goes.
        behavioural = replaces[-1:] + behavioural
        observers = [advice for advice in reversed(active) if advice.hook_type is HookType.OBSERVE]
        self._head = build_chain(self._called, behavioural, awaits=self.woven.kind is FunctionKind.COROUTINE)
        self.woven.set_hooks(self._head, tuple(map(self._observing, observers)), compiling)

    def _observing(self, advice: Advice) -> tuple[Any, Any, Any]:
        observer = self._observers.get(advice, advice.hook)
        return getattr(observer, "enter", None), getattr(observer, "exit", None), _Failed(advice)

    def release(self) -> None:
        self.woven.release(self._called)

    def apply(self, compiling: Any = None) -> None:
        self.refresh(compiling)
        if self.active and not self.installed:
            self._exchange_attributes()
            self.slot.put(self.place.part, self.woven.function)
            self.installed = True
        elif not self.active and self.installed and not (self.advices and self.displaced):
            # Under somebody's patch, ours stays where that patch calls it, until its last hook has gone.
            self.installed = False
            self._exchange_attributes()
            self.slot.take_out(self.place.part)

    def _exchange_attributes(self) -> None:
        if isinstance(self.woven, WovenFunction) and isinstance(self.inner, types.FunctionType):
            if self.active:
                self.woven.take_attributes(self.inner)
            else:
                self.woven.give_attributes(self.inner)

    def pairs(self, before: Any, after: Any, extra: int) -> Iterator[Pair]:
        ours, exclude = self.woven.function, exclusions_of(self.advices)
        old, new = (self.inner, ours) if self.installed else (ours, self.inner)
        if self.place.inherited:
            yield Pair(old, new, -1, exclude, self.place.owner if self.installed else None)
            return
        yield Pair(before, after, extra, exclude)
        if self.inner is not self.original:
            yield Pair(old, new, -1, exclude)

    @property
    def displaced(self) -> bool:
        return self.installed and not self.slot.is_ours

    @property
    def extra_references(self) -> int:
        if type(self.original) is not types.FunctionType or self.place.inherited:
            return -1
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            return -1
        if current(self.place.owner, self.place.name) is not self.standing:
            return -1  # it does not stand in its own attribute, so that this is not a holder
        key = (self.installed, self.woven.applied)
        if key not in _baselines:
            _baselines[key] = _measure(*key)
        return max(self.count_references() - _baselines[key], 0)

    def count_references(self) -> int:
        return sys.getrefcount(self.replacement if self.installed else self.original)


def _once(advices: list[Advice]) -> list[Advice]:
    """Leave out a hook that came here under two names of the same function: it runs once."""
    first: dict[tuple[int, HookType], Advice] = {}
    for advice in advices:
        first.setdefault((id(advice.hook), advice.hook_type), advice)
    return [
        advice
        for advice in advices
        if (one := first[id(advice.hook), advice.hook_type]) is advice or one.target == advice.target
    ]


class _Failed:
    """Handles an observer's exception; answers itself, which marks that observer as not entered."""

    __slots__ = ("advice",)

    def __init__(self, advice: Advice) -> None:
        self.advice = advice

    def __call__(self, error: Exception) -> _Failed:
        self.advice.record_error(error)
        return self


# -- counting references -------------------------------------------------------------------------------------

_baselines: dict[tuple[bool, bool], int] = {}


def _measure(installed: bool, applied: bool) -> int:
    home = types.ModuleType("stand_in")
    exec("def f(): pass", home.__dict__)
    point = FunctionJoinPoint(AttributeReference(home, "f", home.__dict__["f"]))
    if applied:
        point.refresh()
    if installed:
        point.slot.put("", point.woven.function)
        point.installed = True
    return point.count_references()


# -- classes -------------------------------------------------------------------------------------------------


_hooks: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()  # by id
"""Classes that were ever meant to replace another one: they keep their bases, whatever stands there."""


_BASES: Any = vars(type)["__bases__"]


class ClassJoinPoint(JoinPoint):
    """A class that is replaced as a whole, by a class."""

    kind = "a class"

    def __init__(self, place: AttributeReference) -> None:
        self.place = place
        self.advices: list[Advice] = []
        self.inner: type = place.raw
        self._replacement: type = self.inner
        self._superseded = False
        self._stale: list[Stale] = []
        self._kept: Exclusions = frozenset()
        self._own: list[OwnHolders] = []
        self._subclasses: list[type] = []  # of the replacement, before it stood here
        self._moved: list[type] = []

    @property
    def original(self) -> type:
        return self.inner

    @property
    def replacement(self) -> type:
        return self._replacement

    @property
    def standing(self) -> type:
        return self._replacement if self.installed else self.inner

    @property
    def stale(self) -> list[Stale]:
        return self._stale

    def supersede(self) -> None:
        self._superseded = True

    def own_containers(self) -> set[int]:
        held: list[Any] = [self, self.__dict__, self.place, self.place.__dict__]
        held += [self._own, self._subclasses, self._moved]
        return {id(holder) for holder in held}

    def add(self, advice: Advice) -> None:
        if not advice.is_class_replacement:
            raise HookError(
                f"{self.place} is a class, and a class takes only REPLACE with a class; to hook what it "
                f"does, name one of its methods: '{self.place}.__init__'"
            )
        _hooks[id(advice.hook)] = advice.hook
        if holds(self._moved, advice.hook):
            self._move(advice.hook, self._replacement, self.original)
        self.advices.append(advice)

    def pairs(self, before: Any, after: Any, extra: int) -> Iterator[Pair]:
        # What holds a replacement, or what a replacement holds, by itself.
        self._kept |= exclusions_of(self.advices)
        yield Pair(before, after, extra, self._kept.union(*(own.kept for own in self._own)))

    def apply(self, compiling: Any = None) -> None:
        active = [advice for advice in innermost_first(self.advices) if advice.enabled]
        wanted = active[-1].hook if active else self.original
        if wanted is self.standing:
            return
        if self.installed:
            self._restore()
        if active:
            self._install(wanted)
        _forget_checks(self.original, self._replacement)

    def _install(self, replacement: type) -> None:
        if not any(own.cls is replacement for own in self._own):
            self._own.append(OwnHolders(replacement))
        self._subclasses = type.__subclasses__(replacement)
        setattr(self.place.owner, self.place.name, replacement)
        self._replacement = replacement
        self.installed = True
        subclasses: list[type] = type.__subclasses__(self.original)
        for subclass in subclasses:
            if id(subclass) not in _hooks and not derives(replacement, subclass):
                self._move(subclass, self.original, replacement)

    def _move(self, subclass: type, old: type, new: type) -> None:
        """Let a subclass of ``old`` inherit from ``new``, where Python allows it."""
        wanted = tuple(new if base is old else base for base in _BASES.__get__(subclass))
        try:
            _BASES.__set__(subclass, wanted)
        except TypeError as error:
            fault = f"the bases of {class_name(subclass)}: {error}"
            self._stale.append(Stale(str(self.place), fault))
            logger.warning("%s: %s", self.place, fault)
        else:
            self._moved = [one for one in self._moved if one is not subclass]
            self._moved += [] if new is self.original else [subclass]

    def _restore(self) -> None:
        self.installed = False
        self._stale.clear()
        subclasses: list[type] = type.__subclasses__(self._replacement)
        for subclass in subclasses:
            # Those it has had before are its own; all others were made, or moved, while it stood here.
            if not holds(self._subclasses, subclass) and id(subclass) not in _hooks:
                self._move(subclass, self._replacement, self.original)
        if self._superseded or current(self.place.owner, self.place.name) is not self._replacement:
            logger.info("%s: somebody else's class stands there; it is left in place", self.place)
        elif self.place.inherited:
            delattr(self.place.owner, self.place.name)
        else:
            setattr(self.place.owner, self.place.name, self.original)

    @property
    def displaced(self) -> bool:
        return self.installed and current(self.place.owner, self.place.name) is not self._replacement


def _forget_checks(*classes: type) -> None:
    """Abstract base classes remember who was a subclass of theirs; now others are."""
    for base in [base for cls in classes for base in bases(cls) if is_a(base, abc.ABCMeta)]:
        base._abc_caches_clear()  # type: ignore[attr-defined]
