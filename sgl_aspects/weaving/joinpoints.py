"""Join points: one woven attribute each, with its hooks and its original."""

from __future__ import annotations

import abc
import functools
import itertools
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.attributes import (
    MISSING,
    PROPERTY_PARTS,
    AttributeReference,
    OwnDict,
    bases,
    class_name,
    current,
    derives,
    holds,
    inherited,
    is_class,
    namespace,
)
from sgl_aspects.weaving.chain import build_chain
from sgl_aspects.weaving.descriptors import C_CALLABLES, Slot, callable_in, opened
from sgl_aspects.weaving.functions import Signature, WovenFunction
from sgl_aspects.weaving.hooks import Advice, FunctionKind, HookType, innermost_first
from sgl_aspects.weaving.rebinding import Pair, Stale
from sgl_aspects.weaving.referrers import Exclusions, exclusions_of, own_referrers

logger = logging.getLogger("sgl_aspects")

Extra = tuple[int, int]
"""The number of unaccounted references to an attribute's value, and to the callable in it; -1 if unknown."""

UNKNOWN: Extra = (-1, -1)


class JoinPoint(abc.ABC):
    """One woven attribute: its hooks, its original, and the replacement, installed while a hook is active.

    While none is, the identical original object is back. The weaver serialises all changes.

    :ivar inner: the hooked object; for a descriptor, the callable in it.
    :ivar stale: what still holds the object that was here before, and could not be changed.
    :ivar slot: the attribute; shared by the points for the parts of one property.
    """

    __slots__ = ("advices", "inner", "place", "slot", "stale")

    kind: str
    calls: Any = 0
    extra: Extra = UNKNOWN
    """The unaccounted references to what is installed now."""

    def __init__(self, place: AttributeReference, inner: Any, slot: Slot) -> None:
        self.place, self.inner, self.slot = place, inner, slot
        self.advices: list[Advice] = []
        self.stale: list[Stale] = []

    @property
    def installed(self) -> bool:
        """Return whether the replacement is installed; another patch may cover it."""
        return self.place.part in self.slot.occupants

    @property
    def standing(self) -> Any:
        """The object last installed here: the original, or the replacement."""
        return self.slot.standing

    @property
    def displaced(self) -> bool:
        """Return whether another object has replaced the installed one."""
        return self.installed and current(self.place.owner, self.place.name) is not self.standing

    @property
    def depth(self) -> float:
        """A number that is greater than those of the classes from which it is inherited."""
        owner = self.place.owner
        return (len(bases(owner)) if is_class(owner) else float("inf")) if self.place.inherited else 0

    @property
    def known_by(self) -> tuple[Any, ...]:
        """What identifies it, whatever attribute holds that: the attribute's value, the callable in it."""
        return () if self.slot.expected is MISSING else (self.standing,)

    @property
    def active(self) -> bool:
        return any(advice.enabled for advice in self.advices)

    @abc.abstractmethod
    def add(self, advice: Advice) -> None:
        """Add a hook.

        :raises HookError: this join point cannot take it.
        """

    def remove(self, advice: Advice) -> None:
        """Remove a hook, if it is there."""
        self.advices[:] = [one for one in self.advices if one is not advice]

    @abc.abstractmethod
    def apply(self, guarded: bool) -> None:
        """Install the replacement if a hook is active, otherwise the identical original.

        :raises Exception: the attribute cannot be written, or its owner refuses it.
        """

    @abc.abstractmethod
    def pairs(self, before: Any, extra: Extra) -> Iterator[Pair]:
        """Yield the pairs to rebind for ``before``, which was installed, with the references to it."""

    def refresh(self, guarded: bool = False) -> None:  # noqa: B027  not all need it
        """Run the hooks that are active now."""

    def release(self) -> None:  # noqa: B027  not all need it
        """Free what only hooks need: none will be added again."""


# -- functions -----------------------------------------------------------------------------------------------


class FunctionJoinPoint(JoinPoint):
    """A function, or another callable. ``function``: the woven function or proxy that replaces it."""

    __slots__ = ("_called", "_observers", "function", "woven")

    kind = "a generated function"

    def __init__(self, place: AttributeReference, slot: Slot) -> None:
        content, self._called, self.woven = slot.weave(place)
        super().__init__(place._replace(raw=slot.original), content, slot)
        self.function = self.woven.function
        self._observers: dict[Advice, Any] = {}  # those made by `bound_to` for this function

    @property
    def calls(self) -> int:
        return self.woven.calls

    @property
    def displaced(self) -> bool:
        return super().displaced or (self.installed and self.woven.is_patched)

    @property
    def known_by(self) -> tuple[Any, ...]:
        callable_ = (self.function if self.installed else self.inner,) if self._is_shared else ()
        return (*super().known_by, *callable_)

    @property
    def _is_shared(self) -> bool:
        """Return whether the callable in the attribute is hooked wherever it is used.

        A non-function inside a descriptor may be used elsewhere, unhooked: `property(len)`.
        """
        is_original = type(self.inner) is types.FunctionType or self.inner is self.slot.original
        return is_original and not self.place.inherited

    def add(self, advice: Advice) -> None:
        if advice.is_class_replacement:
            raise HookError(
                f"{advice}: {self.place} is not a class: a class cannot replace it; pass a function"
            )
        is_async = self.woven.kind is FunctionKind.COROUTINE
        may_be_async = advice.hook_type in (HookType.OBSERVE, HookType.REPLACE) or is_async
        if not may_be_async and FunctionKind.of(advice.hook) is FunctionKind.COROUTINE:
            raise HookError(
                f"{advice}: the hook is async, and {self.place} is not: its callers would get a coroutine. "
                "Write it as a plain def, or hook the async def that awaits this function"
            )
        if advice.hook_type is HookType.OBSERVE and hasattr(type(advice.hook), "bound_to"):
            self._observers[advice] = advice.hook.bound_to(self.inner)
        self.advices.append(advice)

    def remove(self, advice: Advice) -> None:
        super().remove(advice)
        self._observers.pop(advice, None)

    def refresh(self, guarded: bool = False) -> None:
        active = _once([advice for advice in innermost_first(self.advices) if advice.enabled])
        replaces = [advice for advice in active if advice.hook_type is HookType.REPLACE]
        observers = [advice for advice in active if advice.hook_type is HookType.OBSERVE]
        # The outermost REPLACE wins; the others stay registered and apply again when it is removed.
        chain = replaces[-1:] + [advice for advice in active if advice not in replaces + observers]
        is_async = self.woven.kind is FunctionKind.COROUTINE
        head = build_chain(self._called, self.inner, chain, awaits=is_async)
        caller = observers[0].caller if len(observers) == 1 else None
        self.woven.set_hooks(head, tuple(map(self._observing, reversed(observers))), guarded, caller)

    def _observing(self, advice: Advice) -> tuple[Any, Any, Any]:
        observer = self._observers.get(advice, advice.hook)
        return getattr(observer, "enter", None), getattr(observer, "exit", None), advice

    def release(self) -> None:
        self.woven.release(self._called, self.inner)

    def apply(self, guarded: bool) -> None:
        installs = self.active and not self.installed
        # Another patch on top may call the replacement, which stays until its last hook is removed.
        removes = not self.active and self.installed and not (self.advices and self.displaced)
        below = inherited(self.place.owner, self.place.name) if self.place.inherited else MISSING
        if (installs or removes) and below is not MISSING:  # the base may have another one by now
            self.slot.original = below
            self.inner, _ = opened(self.place._replace(raw=below))
        elif removes and self.inner is self.slot.original and type(self.inner) is not types.FunctionType:
            # Its owner may have removed a wrapper that was below.
            self.inner = self.slot.original = self.function.__wrapped__
        if installs or removes:
            self._exchange_attributes()
        self.refresh(guarded)
        if installs:
            self.slot.put(self.place.part, self.function)
        elif removes:
            self.slot.take_out(self.place.part)

    def _exchange_attributes(self) -> None:
        self.stale.clear()
        if type(self.woven) is WovenFunction and type(self.inner) is types.FunctionType:
            (self.woven.take_attributes if self.active else self.woven.give_attributes)(self.inner)

    def pairs(self, before: Any, extra: Extra) -> Iterator[Pair]:
        exclude = exclusions_of(self.advices)
        old, new = (self.inner, self.function) if self.installed else (self.function, self.inner)
        if not self.place.inherited:
            yield Pair(before, self.standing, extra[0], exclude)
            if not self._is_shared or self.inner is self.slot.original:
                return
        exclude |= {id(before), id(self.standing)}  # descriptors around old and new
        only = self.place.owner if self.place.inherited and self.installed else None
        if type(self.inner) not in C_CALLABLES:  # bound to an instance, they are C objects
            yield Pair(old, new, extra[1], exclude, only)

    @property
    def extra(self) -> Extra:  # type: ignore[override]
        kind, inherits = type(self.slot.original), self.place.inherited
        if kind not in _STAND_INS or self.place.binds_to_owner:
            return UNKNOWN
        owner: Any = self.place.owner
        if inherits and not self.installed:
            owner = next((one for one in bases(owner)[1:] if self.place.name in vars(one)), None)
        if (
            owner is None
            or not self.slot.occupants.keys() <= {self.place.part}  # other parts of the property
            or not getattr(sys, "_is_gil_enabled", lambda: True)()
            or current(owner, self.place.name) is not self.standing  # it holds another object
        ):
            return UNKNOWN
        # The woven function refers to the original and to itself, unless others have set these attributes.
        attributes = namespace(self.function)
        decorated = attributes.get("__wrapped__") is not self.inner
        signed = type(attributes.get("__signature__")) is Signature
        key: Any = (kind, self.place.part, inherits, self.installed, self.woven.applied, decorated, signed)
        outer, inner = (max(now - then, 0) for now, then in zip(self.count_references(), _measure(*key)))
        if outer == 1 and self._is_in_twin():
            return 0, inner if kind is not types.FunctionType else 0
        return outer, inner

    def _is_in_twin(self) -> bool:
        """Return whether an earlier class of this name has it: `@dataclass(slots=True)` makes a second."""
        owner, name = self.place.owner, self.place.name
        if not is_class(owner):
            return False
        siblings: list[Any] = type.__subclasses__((*bases(owner), object)[1])  # of `object` thousands: in C
        names = map(_NAME.__get__, siblings)
        named = itertools.compress(siblings, map(_NAME.__get__(owner).__eq__, names))
        pairs = itertools.pairwise(named)
        return any(two is owner and current(one, name) is self.standing for one, two in pairs)

    def count_references(self) -> Extra:
        """Return the numbers of references to what is installed, and to the callable in it."""
        return (
            sys.getrefcount(self.standing),
            sys.getrefcount(self.function if self.installed else self.inner),
        )


_NAME: Any = vars(type)["__name__"]
_STAND_INS: dict[type, Callable[[Callable[[], Any]], Any]] = {
    types.FunctionType: lambda make: make(),
    classmethod: lambda make: classmethod(make()),
    staticmethod: lambda make: staticmethod(make()),
    property: lambda make: property(make(), make(), make()),
    functools.cached_property: lambda make: functools.cached_property(make()),
    type(functools.lru_cache(len)): lambda make: functools.lru_cache(make()),
}
"""How to make an attribute's value, of each type whose references are counted, from functions."""


@functools.cache
def _measure(
    kind: type, part: str, inherits: bool, installed: bool, applied: bool, decorated: bool, signed: bool
) -> Extra:
    """Return the reference counts of such a value without other referrers than its owner and join point."""

    def make() -> Any:
        def function() -> None: ...

        if decorated:
            function.__dict__["__wrapped__"] = None
        if not signed:
            function.__dict__["__signature__"] = None
        return function

    owner = type("StandIn", (), {"f": _STAND_INS[kind](make)})
    raw = current(owner, "f")
    if inherits:
        owner = type("Derived", (owner,), {})
    place = AttributeReference(owner, "f", raw, inherits, part)
    point = FunctionJoinPoint(place, Slot(place))
    del raw, place
    if applied:
        point.refresh()
    if installed:
        point.slot.put(part, point.function)
    return point.count_references()


def _once(advices: list[Advice]) -> list[Advice]:
    """Drop duplicates of a hook that was added under two names of the same function: it runs once."""
    first = {(id(one.hook), one.hook_type): one.target for one in reversed(advices)}
    return [one for one in advices if one.target == first[id(one.hook), one.hook_type]]


# -- classes -------------------------------------------------------------------------------------------------


class ClassJoinPoint(JoinPoint):
    """A class that is replaced as a whole, by a class. Subclasses that exist keep the base that they have."""

    __slots__ = ("own",)

    kind = "a class"

    def __init__(self, place: AttributeReference, slot: Slot) -> None:
        super().__init__(place, place.raw, slot)
        self.own: dict[type, tuple[Exclusions, list[Any]]] = OwnDict()  # of hooks: `own_referrers`

    def add(self, advice: Advice) -> None:
        if not advice.is_class_replacement:
            raise HookError(
                f"{self.place} is a class, and a class takes only REPLACE with a class; to hook what it "
                f"does, name one of its methods: '{self.place}.__init__'"
            )
        self.advices.append(advice)

    def pairs(self, before: Any, extra: Extra) -> Iterator[Pair]:
        # Referrers of a replacement from before, and its own references, are not rebound.
        exclude = exclusions_of(self.advices, *() if before is self.slot.original else (before,))
        yield Pair(before, self.standing, extra[0], exclude.union(*(kept for kept, _ in self.own.values())))

    def apply(self, guarded: bool) -> None:
        active = [advice for advice in innermost_first(self.advices) if advice.enabled]
        wanted = active[-1].hook if active else self.slot.original
        if wanted is self.standing:
            return
        self.stale.clear()
        if self.installed:
            self.slot.take_out("")
        if active:
            if wanted not in self.own:
                self.own[wanted] = own_referrers(wanted)
            self.slot.put("", wanted)
            hooks = [advice.hook for advice in self.advices]
            for subclass in type.__subclasses__(self.slot.original):
                if not any(derives(hook, subclass) for hook in hooks):
                    fault = f"the bases of {class_name(subclass)}, which was defined before; replace it, too"
                    self.stale.append(Stale(str(self.place), fault))


class JoinPoints:
    """The join points of a weaver, by their attributes and by the objects that are one under any name."""

    def __init__(self) -> None:
        self._points: dict[JoinPoint, None] = {}
        self._at: dict[tuple[int, str, str], list[JoinPoint]] = {}  # by attribute, the latest last
        self._by_object: dict[int, JoinPoint] = {}

    def __iter__(self) -> Iterator[JoinPoint]:
        return iter(list(self._points))

    def at(self, place: AttributeReference) -> list[JoinPoint]:
        """Return the points made for the attribute at ``place``, the latest last."""
        return [*self._at.get(place.key, ())]

    def standing_at(self, place: AttributeReference) -> JoinPoint | None:
        """Return the point installed at ``place`` now, under this name or another one; or None."""
        for point in reversed(self.at(place)):
            if current(place.owner, place.name) is point.slot.expected:
                return point
        if self._beneath(place)[0].inherited:
            return None
        # Another name of a woven object, or another descriptor around it.
        for seen, part in ((callable_in(place), None), (place.raw, place.part)):
            other = self._by_object.get(id(seen))
            if other is not None and part in (None, other.place.part) and holds(other.known_by, seen):
                return other
        return None

    def giving(self, obj: Any) -> list[Advice]:
        """Return the hooks that have given this object to an attribute."""
        point = self._by_object.get(id(obj))
        return point.advices if point is not None and point.standing is obj else []

    def add(self, advice: Advice, place: AttributeReference) -> JoinPoint:
        """Return a new join point with its first hook, above those made for ``place`` before."""
        place, slot = self._beneath(place)
        point = ClassJoinPoint(place, slot) if is_class(place.raw) else FunctionJoinPoint(place, slot)
        point.add(advice)
        for below in self.at(place):
            if isinstance(below, ClassJoinPoint) and isinstance(point, ClassJoinPoint):
                below.slot.superseded = True  # both may have installed the same class
                point.own |= below.own
        self._points[point] = None
        self._at.setdefault(place.key, []).append(point)
        for seen in point.known_by:
            self._by_object.setdefault(id(seen), point)
        return point

    def discard(self, point: JoinPoint) -> None:
        """Remove ``point``."""
        del self._points[point]
        here = self._at[point.place.key]
        here.remove(point)
        if not here:
            del self._at[point.place.key]
        self.forget_objects(point)
        for other in self._parts_of(point.place):
            self.note_objects(other)

    def note_objects(self, point: JoinPoint) -> None:
        """Know ``point`` by its objects, which it has just changed."""
        self._by_object.update((id(seen), point) for seen in point.known_by)

    def forget_objects(self, point: JoinPoint) -> None:
        """Know ``point`` no longer by its objects, which change for all parts of a property."""
        for seen in point.known_by:
            known = self._by_object.get(id(seen))
            if known is not None and known.slot is point.slot:
                del self._by_object[id(seen)]

    def note_remade(self, old: Any, new: Any) -> None:
        """Note that rebinding has made the attribute of a join point anew, for another function in it."""
        point = self._by_object.pop(id(old), None)
        if point is not None and point.standing is old:
            point.slot.standing = new
            self._by_object[id(new)] = point

    def displaced(self) -> list[JoinPoint]:
        """Return the points that another patch covers."""
        return [points[-1] for points in self._at.values() if points[-1].displaced]

    def _beneath(self, place: AttributeReference) -> tuple[AttributeReference, Slot]:
        """Return ``place`` and its slot; it is inherited if another part of the property there was."""
        for point in self._parts_of(place):
            if point.standing is place.raw:
                return place._replace(inherited=point.place.inherited), point.slot
        return place, Slot(place)

    def _parts_of(self, place: AttributeReference) -> Iterator[JoinPoint]:
        """Yield the join points of the attribute at ``place``, for every part of a property."""
        for part in ("", *PROPERTY_PARTS):
            yield from self._at.get((id(place.owner), place.name, part), ())
