"""The weaver: one machine that attaches hooks to their targets, now or when a module loads.

The life of one hook, and the files that its steps are in::

    add       Weaver.add             PENDING; the modules that it waits for are noted     modules, hooks
    resolve   pure                   the attributes that its target names in one module   attributes
    attach    JoinPoint for each     the hook is added: WOVEN; nothing is installed yet   joinpoints
                Slot                 the attribute, opened to the callable in it          descriptors
                WovenFunction        what will take its place, or a proxy                functions
    apply     JoinPoint.apply        the hooks become a chain, the chain code             chain, templates
                Slot.put             the replacement is installed
    rebind    one pass for all       other referrers of the original get it, too          rebinding, referrers
    detach    on removal             the hook leaves its join points; apply puts the original back where none
                                     is active, rebind undoes the rest, and join points without hooks go

What changes its state::

    REMOVED --add--> PENDING --attach--> WOVEN <--set_enabled--> DISABLED
    PENDING --> MISSING       its module is loaded and has no such attribute
    PENDING --> FAILED        the attribute cannot take the hook
    PENDING, MISSING, FAILED  are resolved again when a module that they name loads, when an attribute or a
                              subclass is made, and by :meth:`Weaver.apply`
    WOVEN --> PENDING         the class with the attribute was replaced, or restored; resolved at once
    any --remove--> REMOVED

The cost of a change does not grow with the number of hooks that are woven. The weaver alone changes the
state: the advices (their ``state``, ``detail``, ``rank``, ``absent`` and ``points``) and the join points. All
changes happen under one lock (:mod:`.changes`). No module is imported while it is held, so that it cannot
deadlock with the import system. Calls of woven functions take no lock.
"""

from __future__ import annotations

import atexit
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sgl_aspects.errors import HookError, MissingTargetError
from sgl_aspects.weaving.attributes import (
    AttributeReference,
    OwnDict,
    Presence,
    class_module,
    class_name,
    find,
    holds,
    is_class,
    namespace,
    resolve,
    with_nested,
)
from sgl_aspects.weaving.chain import Compiler
from sgl_aspects.weaving.changes import Changes
from sgl_aspects.weaving.hooks import LOST, Advice, HookType, State, innermost_first, stop_without
from sgl_aspects.weaving.joinpoints import JoinPoint, JoinPoints
from sgl_aspects.weaving.modules import (
    LazyAttributes,
    ModuleIndex,
    ModuleWatcher,
    SubclassWatcher,
    bases_of_family,
    covered_by_patterns,
    is_ready,
    loaded,
    warn_of_unwoven,
    when_ready,
)
from sgl_aspects.weaving.rebinding import Pair, describe, rebind
from sgl_aspects.weaving.referrers import give_original
from sgl_aspects.weaving.targets import Target

logger = logging.getLogger("sgl_aspects")


class Weaver:
    """Everything that is woven in this process."""

    def __init__(self) -> None:
        self._advices: dict[Advice, None] = {}
        self._points = JoinPoints()
        self._touched: dict[JoinPoint, None] = {}  # to be applied
        self._just_run: Any = None  # the module whose code has run in the current import
        self._rerun: Any = None  # the same, unless this is told again, as once it has made a lazy attribute
        self._changes = Changes(self._count_anew)
        self._index = ModuleIndex()
        self._watcher = ModuleWatcher(self._is_wanted, self._module_loaded)
        self._lazy = LazyAttributes(self._watcher.module_loaded)
        self._subclasses = SubclassWatcher(self._class_made)
        self._compiler = Compiler()
        self._warns_at_end = False

    @property
    def lock(self) -> threading.RLock:
        """The lock held during every change; callers hold it to make several changes atomic."""
        return self._changes.lock

    # -- changes ----------------------------------------------------------------------------------------

    def add(self, advices: Iterable[Advice], *, strict: bool = True) -> None:
        """Weave ``advices`` whose modules are loaded; the others wait.

        :param strict: all or nothing; otherwise a hook that fails is logged and stays in the report.
        :raises HookError: a hook cannot work on its target.
        :raises MissingTargetError: a required hook's module is loaded and has no such attribute.
        """
        advices = list(advices)
        for advice in advices:
            if advice.state is State.REMOVED:
                advice.state, advice.detail = State.PENDING, "another change of hooks is in progress"
        self._changes.run(self._add, advices, strict)

    def remove(self, advices: Iterable[Advice]) -> None:
        """Remove ``advices`` in reverse order; a target without hooks gets its original object back."""
        self._changes.run(self._remove, list(advices))

    def set_enabled(self, advices: Iterable[Advice], enabled: bool) -> None:
        """Switch hooks off and on; they keep their place in the order."""
        self._changes.run(lambda advices, strict: self._switch(advices, enabled), list(advices))

    def apply(self) -> None:
        """Weave waiting hooks whose targets exist by now; safe to call at any time."""
        if self._advices:
            self._watcher.install()
        self._changes.run(self._look_again, self.advices)

    def _add(self, advices: list[Advice], strict: bool) -> None:
        new = [advice for advice in dict.fromkeys(advices) if advice not in self._advices]
        if not new:
            return
        for advice in new:
            self._advices[advice] = None
            self._index.add(advice)
            pattern = "no loaded module has what the pattern names yet"
            waits = pattern if advice.target.module_patterns else "its module is not loaded yet"
            advice.state, advice.detail = State.PENDING, waits
        self._watcher.install()
        if not self._warns_at_end:
            self._warns_at_end = True
            atexit.register(lambda: warn_of_unwoven(self.advices))
        self._compiler.notice(self._points)
        try:
            self._weave(self._in_loaded_modules(new), strict=strict)
            lost = [advice for advice in new if strict and advice.required and advice.state in LOST]
            if lost:
                raise MissingTargetError(f"required {lost[0]}: {lost[0].detail}")
        except BaseException:
            self._remove(new)
            raise
        self._compiler.forget(new, [point for advice in new for point, _ in advice.points])

    def _remove(self, advices: list[Advice], strict: bool = False) -> None:
        gone = [advice for advice in dict.fromkeys(reversed(advices)) if advice in self._advices]
        if not gone:
            return
        for advice in gone:
            self._detach(advice)
            for own in self._subclasses.forget(advice):
                self._detach(own)
            self._index.discard(advice)
            del self._advices[advice]
            advice.forget()
        if not self._advices:
            for own in self._lazy.hooks.values():
                self._detach(own)
        applied = self._apply(strict=False)
        self._compiler.forget(gone, applied)
        if not self._advices:
            self._watcher.uninstall()
            self._lazy.clear()

    def _switch(self, advices: list[Advice], enabled: bool) -> None:
        for advice in [advice for advice in advices if advice in self._advices]:
            advice.enabled = enabled
            self._touched.update((point, None) for point, _ in advice.points)
            if advice.points:
                advice.state = State.WOVEN if enabled else State.DISABLED
        self._compiler.forget(advices, self._apply(strict=False))

    def _look_again(self, advices: list[Advice], strict: bool) -> None:
        here = [advice for advice in advices if advice in self._advices]
        self._weave(self._in_loaded_modules(here), strict=strict)

    def _count_anew(self) -> None:
        """Start counting calls anew: a forked child reports its own, not its parent's."""
        for advice in self._advices:
            advice.points = [(point, point.calls) for point, _ in advice.points]

    # -- modules and classes as they are made -----------------------------------------------------------

    def _is_wanted(self, name: str) -> bool:
        # Called for every import, without the lock: it only reads.
        return name == Compiler.MODULE or self._index.wants(name)

    def _module_loaded(self, name: str, module: Any, just_run: bool) -> None:
        self._changes.run_or_defer(self._weave_loaded, [name, module, just_run])

    def _weave_loaded(self, loaded: list[Any], strict: bool) -> None:
        name, module, just_run = loaded
        self._just_run, self._rerun = module, module if just_run else None
        concerned: list[Advice] = []
        try:
            self._compiler.notice(self._points)
            concerned = self._index.concerned(name)
            self._weave([(advice, name, module) for advice in concerned], strict=strict)
            self._weave_subclasses(self._subclasses.classes_of(name, module), strict)
        except Exception:
            logger.exception("hooks on %s failed; the import continues", name)
        finally:
            self._just_run = self._rerun = None
        lost = [advice for advice in concerned if advice.required and advice.state in LOST]
        if lost:
            stop_without(lost)

    def _class_made(self, cls: type) -> None:
        """Weave a new subclass for hooks on ``Class+``, before its ``class`` statement returns.

        Its decorators run afterwards: once the code of its module has run, the class is looked at again.
        """
        module = sys.modules.get(class_module(cls))
        if module is not None and not is_ready(module):
            when_ready(module, self._watcher.module_loaded)
        try:
            self._changes.run_or_defer(self._weave_subclasses, [cls])
        except Exception:
            logger.exception("hooks on %s failed", class_name(cls))

    def _weave_subclasses(self, classes: list[type], strict: bool) -> None:
        for advice, concerned in self._subclasses.concerned(classes).items():
            self._weave(self._in_loaded_modules([advice]), strict=strict, subclasses=concerned)

    def when_loaded(self, name: str, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with the module ``name`` once its code has run: at once if it has.

        An exception in it fails the import.
        """
        self._watcher.listen(name, callback)

    # -- 1. resolve -------------------------------------------------------------------------------------

    def _in_loaded_modules(self, advices: Sequence[Advice]) -> Iterator[tuple[Advice, str, Any]]:
        """Yield the loaded modules that each hook may target; those being imported follow when ready."""
        covered = covered_by_patterns(advice.target for advice in advices)
        for advice in advices:
            for name, module in loaded(advice.target, covered):
                if module is self._just_run or is_ready(module):
                    yield advice, name, module
                else:
                    when_ready(module, self._watcher.module_loaded)

    def _weave(
        self,
        work: Iterable[tuple[Advice, str, Any]],
        *,
        strict: bool,
        subclasses: Sequence[type] | None = None,
    ) -> None:
        """Resolve the targets of hooks in the modules of these names, attach the hooks, and apply them.

        Class replacements go first, so that hooks on methods apply to the replacement class.

        :param subclasses: only these subclasses of a ``Class+`` are looked at.
        """
        work = list(work)
        for replaces_class in (True, False):
            for advice, name, module in work:
                if advice.is_class_replacement is not replaces_class:
                    continue
                try:
                    for rank in range(len(advice.target.alternates)):
                        self._take(advice, rank, name, module, subclasses, strict=strict)
                except Exception as error:
                    if strict:
                        raise
                    logger.exception("%s failed in module %s", advice, name)
                    if advice.state is State.PENDING:
                        advice.state, advice.detail = State.FAILED, repr(error)
            if self._touched:  # outside `_take`: its locals would count as references
                self._apply(strict=strict)

    def _take(
        self,
        advice: Advice,
        rank: int,
        name: str,
        module: Any,
        subclasses: Sequence[type] | None,
        *,
        strict: bool,
    ) -> None:
        """Attach ``advice`` where its alternate ``rank`` is found in ``module``, or note why it is not."""
        alternate = advice.target.alternates[rank]
        found = resolve(alternate, name, module, subclasses)
        if found is None or (advice.rank is not None and rank > advice.rank):
            return
        for base in bases_of_family(alternate, module):
            made = self._subclasses.wait(advice, base)
            self._attach(made, next(find(base, ("__init_subclass__",))))
        if found.presence is Presence.LAZY:
            own = self._lazy.wait(name, module, alternate, found.places[0].owner)
            self._attach(own, found.places[0])
            if not alternate.has_module_pattern:  # such a module is only one of those that may have it
                advice.detail = found.detail
        elif found.presence is Presence.ABSENT:
            advice.note_absent(rank, found.detail)
        elif found.presence is Presence.FOUND:
            if advice.rank is not None and advice.rank > rank:
                self._detach(advice)  # a better alternate was loaded
            advice.rank = rank
            faults: list[HookError] = []
            for place in found.places:
                try:
                    # The module's code has just run again: its attributes are new, even those woven before.
                    self._attach(advice, place, rerun=module is self._rerun and place.owner is module)
                except HookError as fault:
                    faults.append(fault)
            if advice.points:
                advice.state = State.WOVEN if advice.enabled else State.DISABLED
                advice.detail = ""
            elif faults and "*" not in alternate.text:  # patterns skip unhookable objects
                advice.fail(faults[0], strict=strict)

    # -- 2. attach --------------------------------------------------------------------------------------

    def _attach(self, advice: Advice, place: AttributeReference, *, rerun: bool = False) -> None:
        """Add ``advice`` to the join point at ``place``, unless it is there; applies nothing.

        If another patch covers a join point, the hooks below it are not added again on top.

        :param rerun: the object at ``place`` is new, not a patch.
        :raises HookError: the object at ``place`` cannot take this hook, for any error.
        """
        if not rerun and any(advice in point.advices for point in self._points.at(place)):
            return
        point = self._points.standing_at(place)
        if point is not None and advice in point.advices:
            return
        try:
            if point is None:
                point = self._points.add(advice, place)
            else:
                point.add(advice)
        except Exception as error:
            if isinstance(error, HookError):
                raise
            raise HookError(f"{place} cannot be hooked: {error!r}") from error
        advice.points.append((point, point.calls))
        if advice.hook_type is HookType.REPLACE:
            ranked = [one for one in innermost_first(point.advices) if one.hook_type is HookType.REPLACE]
            if len(ranked) > 1:
                other = ranked[-2] if ranked[-1] is advice else advice
                logger.warning("%s overrides %s; removing it restores that one", ranked[-1], other)
            owner, name = point.place.owner, point.place.name
            for replacing in self._points.giving(owner) if name in namespace(owner) else ():
                logger.warning("%s overrides %s of the class given by %s", advice, name, replacing)
            if point.installed:
                give_original(advice.hook, point.standing, point.slot.original)
        self._touched[point] = None

    # -- 3. apply ---------------------------------------------------------------------------------------

    def _apply(self, *, strict: bool) -> list[JoinPoint]:
        """Install or restore each point that was touched; returns them. One pass rebinds all referrers."""
        # What a subclass inherits is changed before the subclass.
        points, self._touched = sorted(self._touched, key=lambda point: point.depth), {}
        refused: dict[Advice, HookError] = {}
        extra = {point: point.extra for point in points}  # counted first: the code below adds references
        if self._just_run is not None and any(count > 0 for counts in extra.values() for count in counts):
            gc.collect(1)  # now: the module's garbage still refers to the originals
            extra = {point: point.extra for point in points}
        before = OwnDict((point, point.standing) for point in points)
        for point in points:
            self._points.forget_objects(point)
            try:
                point.apply(self._compiler.guards)
            except Exception as error:  # noqa: BLE001  the engine's own __setattr__ may raise anything
                self._refuse(point, error, refused)
        for point in points:
            self._points.note_objects(point)
        # Once all are applied: the points of one property share its attribute.
        changed = [point for point in points if before[point] is not point.standing]
        pairs: list[Pair] = []
        for point in changed:
            pairs += point.pairs(before[point], extra[point])
        stale = rebind(pairs, self._points.note_remade)
        for point in changed:
            names = {describe(before[point]), describe(point.inner)} if point.installed else set()
            point.stale[:0] = [one for one in stale if one.target in names]
        for point in points:
            if not point.advices:
                point.release()
                self._points.discard(point)
        self._move_members([before[point] for point in changed if is_class(before[point])])
        for advice, fault in refused.items():
            # Subclasses of C types, which cannot be hooked, are found when their modules have loaded.
            if not advice.points and advice in self._advices:
                advice.fail(fault, strict=strict and not advice.target.module_patterns)
        return points

    def _refuse(self, point: JoinPoint, error: Exception, refused: dict[Advice, HookError]) -> None:
        """Detach the hooks of a point whose attribute cannot be written, as of a C type."""
        failure = HookError(f"{point.place} cannot be hooked: {error}")
        failure.__cause__ = error
        if not point.advices:
            logger.warning("%s cannot be restored: %s", point.place, error)
        refused.update(dict.fromkeys(self._detach_all(point), failure))

    def _move_members(self, classes: list[type]) -> None:
        """Weave the hooks on members of classes that were replaced or restored, on those installed now."""
        if not classes:
            return
        owners = with_nested(classes)
        moved: dict[Advice, None] = {}
        for point in [point for point in self._points if holds(owners, point.place.owner)]:
            self._touched[point] = None
            moved.update(dict.fromkeys(self._detach_all(point)))
        self._apply(strict=False)
        for advice in moved:
            advice.state, advice.detail = State.PENDING, "its class was replaced or restored"
        absent = [advice for advice in self._advices if advice.state is State.MISSING]
        self._weave(self._in_loaded_modules([*moved, *absent]), strict=False)

    # -- 4. detach --------------------------------------------------------------------------------------

    def _detach(self, advice: Advice) -> None:
        for point, _ in advice.points:
            point.remove(advice)
            self._touched[point] = None
        advice.points = []

    def _detach_all(self, point: JoinPoint) -> list[Advice]:
        """Remove all hooks from ``point`` without applying it; returns them."""
        advices = list(point.advices)
        for advice in advices:
            advice.points = [entry for entry in advice.points if entry[0] is not point]
            point.remove(advice)
        return advices

    # -- reading ----------------------------------------------------------------------------------------

    @property
    def advices(self) -> list[Advice]:
        with self.lock:
            return list(self._advices)

    @property
    def points(self) -> list[JoinPoint]:
        with self.lock:
            return list(self._points)

    def displaced(self) -> list[JoinPoint]:
        """Return the points that another patch covers."""
        with self.lock:
            return self._points.displaced()

    def points_named(self, target: Target) -> list[JoinPoint]:
        """Return the join points of ``target`` in loaded modules, under whatever name they were woven."""
        with self.lock:
            found: dict[JoinPoint, None] = {}
            for name, module in loaded(target, covered_by_patterns([target])):
                for path in target.attribute_paths(name):
                    for place in find(module, path):
                        points = (*self._points.at(place), self._points.standing_at(place))
                        found.update((point, None) for point in points if point is not None)
            return list(found)
