"""The table of all join points of a process.

The weaver chooses the attribute for each hook. The table attaches hooks to join points, installs these in
place of the originals, and rebinds all referrers in one pass for all points that changed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.attributes import (
    MISSING,
    PROPERTY_PARTS,
    AttributeReference,
    OwnDict,
    current,
    find,
    holds,
    inherited,
    is_class,
    namespace,
    with_nested,
)
from sgl_aspects.weaving.hooks import Advice, HookType
from sgl_aspects.weaving.joinpoints import UNKNOWN, FunctionJoinPoint, JoinPoint, Slot
from sgl_aspects.weaving.rebinding import Pair, describe, rebind
from sgl_aspects.weaving.replacements import ClassJoinPoint, exclusions_of, give_original

logger = logging.getLogger("sgl_aspects")


Refused = dict[Advice, HookError]


class JoinPointTable:
    """All join points. Not locked: the weaver serialises changes."""

    def __init__(self) -> None:
        self.points: dict[JoinPoint, int] = {}  # in order of creation, with the id of the original
        self.compiling: Any = None
        # What stood at points that `apply` has not rebound yet: more than that if it was interrupted.
        self.before: dict[tuple[JoinPoint, int], Any] = OwnDict()
        self._at: dict[Advice, list[tuple[JoinPoint, int]]] = {}
        self._here: dict[tuple[int, str, str], list[JoinPoint]] = {}
        # Replacements, and originals in modules, where one object often has several names.
        self._by_object: dict[int, JoinPoint] = {}
        self._over: dict[int, dict[JoinPoint, None]] = {}  # points, by the id of their original

    # -- reading ----------------------------------------------------------------------------------------

    def of(self, advice: Advice) -> list[tuple[JoinPoint, int]]:
        """Return the points of ``advice``, each with its number of calls before the advice was added."""
        return self._at.get(advice, [])

    def at(self, place: AttributeReference) -> list[JoinPoint]:
        """Return all points at ``place``, including those below another patch; the top one is last."""
        standing = self.known(place)
        below = [point for point in self._here.get(place.key, ()) if point is not standing]
        return below if standing is None else [*below, standing]

    def known(self, place: AttributeReference) -> JoinPoint | None:
        """Return the point installed at ``place`` now, under this name or another one; or None."""
        for point in reversed(self._here.get(place.key, ())):
            if current(place.owner, place.name) is _expected(point):
                return point
        other = self._by_object.get(id(place.raw))
        # Another name of a woven object.
        if other is None or other.standing is not place.raw or place.inherited:
            return None
        return other if other.place.part == place.part else None

    def displaced(self) -> Iterator[JoinPoint]:
        """Yield the points covered by another patch."""
        for points in self._here.values():
            if points[-1].displaced:
                yield points[-1]

    # -- attaching and detaching ------------------------------------------------------------------------

    def attach(self, advice: Advice, place: AttributeReference, *, rerun: bool = False) -> list[JoinPoint]:
        """Add ``advice`` to the point at ``place``, creating one if there is none; applies nothing.

        Returns the point, unless it was added before. A foreign patch over a join point is not woven again
        for the hooks below it.

        :param rerun: the module's code has just run again: the object at ``place`` is new, not a patch.
        :raises HookError: the object at ``place`` cannot take this hook, for any error.
        """
        here = self._here.get(place.key, ())
        if not rerun and any(advice in point.advices for point in here):
            return []
        point = self.known(place)
        if point is not None and advice in point.advices:
            return []
        entries = self._at.setdefault(advice, [])
        count = len(entries)
        try:
            if point is None:
                point = self._point_for(place)
            entries.append((point, point.calls))  # before the hook is there: it can always be removed
            point.add(advice)
        except Exception as error:
            del entries[count:]
            if isinstance(error, HookError):
                raise
            raise HookError(f"{place} cannot be hooked: {error!r}") from error
        self._warn_of_second_replace(advice, point)
        if point.installed and advice.hook_type is HookType.REPLACE:
            give_original(advice.hook, point.standing, point.original)
        if point not in self.points:
            for below in here:
                below.slot.superseded = True
            self._remember(point)
        return [point]

    def detach(self, advice: Advice) -> None:
        """Remove ``advice`` from all its points, which are to be applied then."""
        for point, _ in self.of(advice):
            point.remove(advice)
        self._at.pop(advice, None)

    def count_anew(self) -> None:
        """Start counting calls anew: a forked child reports its own, not its parent's."""
        for advice, entries in self._at.items():
            self._at[advice] = [(point, point.calls) for point, _ in entries]

    def _remember(self, point: JoinPoint) -> None:
        self._note_original(point)
        self._here.setdefault(point.place.key, []).append(point)
        self._by_object[id(point.replacement)] = point
        if not point.place.inherited:
            self._by_object.setdefault(id(point.original), point)

    def _point_for(self, place: AttributeReference) -> JoinPoint:
        """Create a point, before anything is registered."""
        if is_class(place.raw):
            return ClassJoinPoint(place)
        return FunctionJoinPoint(place, self._slot_of(place))

    def _slot_of(self, place: AttributeReference) -> Slot | None:
        """Return the slot of another part of the same property, if there is one."""
        for part in ("", *PROPERTY_PARTS):
            for point in self._here.get((id(place.owner), place.name, part), ()):
                if point.standing is place.raw:
                    return point.slot
        return None

    def _drop(self, point: JoinPoint) -> None:
        point.release()
        if point not in self.points:
            return
        here = self._here[point.place.key]
        here.remove(point)
        if not here:
            del self._here[point.place.key]
        self._forget_original(point)
        del self.points[point]
        for seen in (point.replacement, point.standing, point.original):
            if self._by_object.get(id(seen)) is point:
                del self._by_object[id(seen)]

    def _note_original(self, point: JoinPoint) -> None:
        self.points[point] = id(point.original)
        self._over.setdefault(id(point.original), {})[point] = None

    def _forget_original(self, point: JoinPoint) -> None:
        over = self._over[self.points[point]]
        del over[point]
        if not over:
            del self._over[self.points[point]]

    def _warn_of_second_replace(self, advice: Advice, point: JoinPoint) -> None:
        if advice.hook_type is not HookType.REPLACE:
            return
        earlier = [one for one in point.advices if one.hook_type is HookType.REPLACE and one is not advice]
        if earlier:
            logger.warning("%s overrides %s; removing it restores that one", advice, earlier[-1])
        owner, name = point.place.owner, point.place.name
        giving = self._by_object.get(id(owner))
        if giving is not None and giving.standing is owner and name in namespace(owner):
            for replacing in giving.advices:
                logger.warning("%s overrides %s of the class given by %s", advice, name, replacing)

    # -- applying ---------------------------------------------------------------------------------------

    def apply(self, points: Iterable[JoinPoint]) -> tuple[Refused, list[Advice] | None]:
        """Install or restore each point according to its hooks; all referrers are rebound in one pass.

        Returns the hooks whose attribute could not be written, and those on members of classes that were
        replaced or restored, which apply to the class that is installed now; None if there was no such class.
        """
        refused: Refused = {}
        pairs: list[Pair] = []
        installed: list[tuple[JoinPoint, str]] = []
        extra = {point: UNKNOWN for point, _ in self.before}
        unique = list(dict.fromkeys([*extra, *map(self._on_top, dict.fromkeys(points))]))
        changed: dict[int, tuple[JoinPoint, Any]] = {}
        for point in unique:
            extra.setdefault(point, point.extra)
            self.before[point, id(point.standing)] = point.standing
            if point.below is not point.original:
                self._change_original(point, point.below)
            try:
                point.apply(self.compiling)
            except Exception as error:  # noqa: BLE001  the engine's own __setattr__ may raise anything
                self._refuse(point, error, refused)
        for (point, _), before in self.before.items():
            after = point.standing  # only now: parts of a property share their attribute
            if before is after:
                continue
            changed[id(before)] = point, after
            pairs += point.pairs(before, after, extra[point], exclusions_of(point.advices))
            if point.installed:
                installed.append((point, describe(before)))
            if is_class(after):  # the installed class has changed
                self._by_object.pop(id(before), None)
                self._by_object[id(after)] = point
        stale = rebind(pairs)
        self.before.clear()
        for point, was in installed:
            names = {was, describe(point.inner)}
            point.stale[:0] = [one for one in stale if one.target in names]
        self._follow(changed)
        for point in unique:
            if not point.advices:
                self._drop(point)
        classes = [pair.old for pair in pairs if is_class(pair.old)]
        detached = [advice for cls in classes for advice in self._detach_members(cls, refused)]
        return refused, detached if classes else None

    def _on_top(self, point: JoinPoint) -> JoinPoint:
        """Return ``point``; if its attribute was patched while it was off, a new point with its hooks."""
        place = point.place
        if point.installed or not point.active or current(place.owner, place.name) is _expected(point):
            return point
        path = (place.name, place.part) if place.part else (place.name,)
        here = next(iter(find(place.owner, path)), None)
        if here is None:
            return point
        self._drop(point)
        moved = [anew for advice in self._detach_all(point) for anew in self.attach(advice, here)]
        return moved[-1] if moved else point

    def _refuse(self, point: JoinPoint, error: Exception, refused: Refused) -> None:
        """Detach the hooks of a point whose attribute cannot be written, as of a C type."""
        failure = HookError(f"{point.place} cannot be hooked: {error}")
        failure.__cause__ = error
        if not point.advices:
            logger.warning("%s cannot be restored: %s", point.place, error)
        for advice in self._detach_all(point):
            refused[advice] = failure

    def _detach_all(self, point: JoinPoint) -> list[Advice]:
        """Remove all hooks from ``point`` without applying it; returns them."""
        advices = list(point.advices)
        for advice in advices:
            self._at[advice] = [entry for entry in self._at[advice] if entry[0] is not point]
            point.remove(advice)
        return advices

    def _follow(self, changed: dict[int, tuple[JoinPoint, Any]]) -> None:
        """Update the originals of points whose original was replaced or restored.

        Hooks on an inherited ``Sub.m`` call the present ``Base.m``; a point over another one, the one below.

        :param changed: by the id of the object before, the point and its object now.
        """
        # All of them first: parts of a property share an original.
        followers: list[tuple[JoinPoint, Any]] = []
        for key, (cause, after) in changed.items():
            for point in self._over.get(key, ()):
                below = point.original if cause.place.inherited else after
                if below is point.replacement or below is point.standing:
                    continue
                if point.place.inherited:
                    below = inherited(point.place.owner, point.place.name)
                if below is not point.original and below is not MISSING:
                    followers.append((point, below))
        for point, below in followers:
            self._change_original(point, below)
            point.refresh(self.compiling)

    def _change_original(self, point: JoinPoint, below: Any) -> None:
        point.follow(below)
        if point in self.points:
            self._forget_original(point)
            self._note_original(point)

    def _detach_members(self, before: type, refused: Refused) -> list[Advice]:
        """Detach the hooks from the members of a class that was replaced or restored."""
        owners = with_nested([before])
        points = [point for point in self.points if holds(owners, point.place.owner)]
        advices = [advice for point in points for advice in self._detach_all(point)]
        refused_there, detached = self.apply(points)
        refused.update(refused_there)
        return list(dict.fromkeys([*advices, *(detached or ())]))


def _expected(point: JoinPoint) -> Any:
    """Return the entry in the dictionary of the point's owner, unless other code has changed it."""
    if not point.installed and point.place.inherited:
        return MISSING
    return point.standing
