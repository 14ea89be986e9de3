"""The weaver: attaches hooks to their targets, now or when a module loads.

The states of a hook, and what changes them::

    REMOVED --add--> PENDING --attach--> WOVEN <--set_enabled--> DISABLED
                        |---- the module is loaded and has no such attribute --> MISSING
                        |---- the attribute cannot take the hook --------------> FAILED
                        '---- a module loads, an attribute or a subclass is made: resolve again
    REMOVED <--remove--- every state

Each change has the same steps, and costs as much as it changes, however much is woven:

1. resolve (:func:`.resolve`, pure): the attributes that a target names in one module;
2. attach (:meth:`.JoinPointTable.attach`): the hook is added to the join point of each, which is made if
   there is none; nothing is installed yet;
3. apply (:meth:`.JoinPointTable.apply`): each join point that was touched installs its replacement, or puts
   the original back if no hook is active; then one pass rebinds the referrers of all of them;
4. detach (on removal, before 3): the hook leaves its join points; those without hooks are forgotten after 3.

All changes happen under one lock. No module is imported while it is held, so that it cannot deadlock with the
import system. Calls through woven functions take no lock.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sgl_aspects import compat
from sgl_aspects.errors import HookError, MissingTargetError, Stop
from sgl_aspects.weaving.attributes import (
    AttributeReference,
    Presence,
    class_name,
    find,
    is_class,
    is_module,
    resolve,
)
from sgl_aspects.weaving.changes import Changes
from sgl_aspects.weaving.hooks import Advice, HookType, State
from sgl_aspects.weaving.joinpoints import JoinPoint
from sgl_aspects.weaving.modules import (
    LazyAttributes,
    ModuleIndex,
    ModuleWatcher,
    SubclassWatcher,
    bases_of_family,
    is_ready,
    loaded,
    wait_for_imports,
    when_ready,
    why_not_importable,
)
from sgl_aspects.weaving.table import JoinPointTable
from sgl_aspects.weaving.targets import Target

logger = logging.getLogger("sgl_aspects")

_COMPILER = "torch._dynamo"
"""Once this module is loaded, torch.compile may trace a woven function."""

_SCRIPTING = "torch.jit.frontend"
"""Once this module is loaded, torch.jit may compile the source of a woven function, without its hooks."""

_MOST_RECOMPILED = 7
"""torch.compile compiles a function at most eight times, and fails then if it must have the whole graph."""

_LOST = (State.MISSING, State.FAILED)
"""No later import can make such a hook work."""


class Weaver:
    """Everything that is woven in this process.

    :ivar table: the join points, for others to read only.
    """

    def __init__(self) -> None:
        self._advices: dict[Advice, None] = {}
        self.table = JoinPointTable()
        self._changes = Changes(self.table.count_anew)
        self._index = ModuleIndex()
        self._chosen: dict[Advice, int] = {}  # which alternate is woven
        self._missing: dict[Advice, dict[int, str]] = {}  # alternates that no import can define, and why
        self._touched: list[JoinPoint] = []  # those to apply: after an interrupt, with the next change
        self._just_run: Any = None  # the module whose code has run in the current import
        self._watcher = ModuleWatcher(self._is_wanted, self._module_loaded)
        self._lazy = LazyAttributes(self._module_loaded)
        self._subclasses = SubclassWatcher(self._class_made)
        self._listeners: dict[str, list[Callable[[Any], None]]] = {}
        self._unwatch_scripting: Callable[[], None] | None = None
        self._warns_at_end = False
        self._recompiled: dict[tuple[int, str, str], int] = {}  # changes of functions that torch guards

    @property
    def lock(self) -> threading.RLock:
        """The lock held during every change; callers hold it to make several changes atomic."""
        return self._changes.lock

    # -- adding and removing ----------------------------------------------------------------------------

    def add(self, advices: Iterable[Advice], *, strict: bool = True) -> None:
        """Weave ``advices`` whose modules are loaded; the others wait.

        :param strict: all or nothing; otherwise a hook that fails is logged and stays in the report.
        :raises HookError: a hook cannot work on its target.
        :raises MissingTargetError: a required hook's module is loaded and has no such attribute.
        """
        advices = list(advices)
        fresh = [advice for advice in advices if advice.state is State.REMOVED]
        for advice in fresh:
            advice.state, advice.detail = State.PENDING, "another change of hooks is in progress"
        try:
            self._changes.run(self._add, advices, strict)
        except BaseException:
            for advice in fresh:  # without a call: this may be at the recursion limit
                if advice not in self._advices:
                    advice.state, advice.detail = State.REMOVED, ""
            raise
        wanted = [advice for advice in advices if advice.state is State.PENDING]
        if wait_for_imports(name for one in wanted for name in one.target.module_names):
            self._changes.run(self._look_again, wanted)

    def remove(self, advices: Iterable[Advice]) -> None:
        """Remove ``advices`` in reverse order; a target without hooks gets its original object back."""
        gone = list(advices)
        with self.lock:
            for advice in self._changes.withdraw(self._add, gone):
                advice.state, advice.detail = State.REMOVED, ""
            here = [advice for advice in gone if advice in self._advices]
            if here or self._touched:
                self._changes.run(self._remove, here)

    def set_enabled(self, advices: Iterable[Advice], enabled: bool) -> None:
        """Switch hooks off and on; they keep their place in the order."""
        self._changes.run(lambda advices, strict: self._switch(advices, enabled), list(advices))

    def _add(self, advices: list[Advice], strict: bool) -> None:
        new = [advice for advice in dict.fromkeys(advices) if advice not in self._advices]
        if not new:
            return
        for advice in new:
            self._advices[advice] = None
            self._index.add(advice)
            advice.state, advice.detail = State.PENDING, "its module is not loaded yet"
            if advice.target.has_module_pattern:
                advice.detail = "no loaded module has what the pattern names yet"
        self._watcher.install()
        if not self._warns_at_end:
            self._warns_at_end = True
            atexit.register(self._end)
        self._note_compiler()
        try:
            self._weave(self._in_loaded_modules(new), strict=strict)
            lost = [advice for advice in new if strict and advice.required and advice.state in _LOST]
            if lost:
                raise MissingTargetError(f"required {lost[0]}: {lost[0].detail}")
        except BaseException:
            self._remove(new)
            raise
        if _COMPILER in sys.modules:
            self._forget_compiled_code(new, [point for one in new for point, _ in self.table.of(one)])

    def _remove(self, advices: list[Advice], strict: bool = False) -> None:
        gone = [advice for advice in dict.fromkeys(reversed(advices)) if advice in self._advices]
        for advice in gone:
            self._detach(advice)
            for own in self._subclasses.forget(advice):
                self._detach(own)
            self._index.discard(advice)
            self._chosen.pop(advice, None)
            self._missing.pop(advice, None)
            # Last: if a KeyboardInterrupt comes before, the hook can be removed again.
            del self._advices[advice]
            advice.state, advice.detail, advice.enabled = State.REMOVED, "", True
        if not self._advices:
            for own in self._lazy.hooks.values():
                self._detach(own)
        points = list(self._touched)
        self._apply(strict=False)
        self._forget_compiled_code(gone, points)
        self._uninstall_watcher()
        if not self._advices:
            self._lazy.restore()
            if self._unwatch_scripting is not None:
                self._unwatch_scripting()
                self._unwatch_scripting = None

    def _switch(self, advices: list[Advice], enabled: bool) -> None:
        points = [point for advice in advices for point, _ in self.table.of(advice)]
        self._touched += points
        for advice in advices:
            advice.enabled = enabled
            if self.table.of(advice):
                advice.state = State.WOVEN if enabled else State.DISABLED
        self._apply(strict=False)
        self._forget_compiled_code(advices, points)

    def when_loaded(self, name: str, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with the module ``name`` once its code has run: at once if it has.

        An exception in it fails the import.
        """
        with self.lock:
            self._listeners.setdefault(name, []).append(callback)
            self._watcher.install()
            module = sys.modules.get(name)
        if module is not None and not is_ready(module):
            when_ready(module, self._module_loaded)
        elif module is not None:
            self._notify_listeners(name, module)

    def _notify_listeners(self, name: str, module: Any) -> None:
        with self.lock:
            callbacks = self._listeners.pop(name, [])
            self._uninstall_watcher()
        for callback in callbacks:
            callback(module)

    def _uninstall_watcher(self) -> None:
        if not (self._advices or self._listeners):
            self._watcher.uninstall()

    def apply(self) -> None:
        """Weave waiting hooks whose targets exist by now; safe to call at any time."""
        if self._advices:
            self._watcher.install()
        self._changes.run(self._look_again, self.advices)

    def _look_again(self, advices: list[Advice], strict: bool) -> None:
        here = [advice for advice in advices if advice in self._advices]
        self._weave(self._in_loaded_modules(here), strict=strict)

    # -- reading ----------------------------------------------------------------------------------------

    @property
    def advices(self) -> list[Advice]:
        with self.lock:
            return list(self._advices)

    def detail_of(self, advice: Advice) -> str:
        """Return why ``advice`` is not woven; for one that waits, whether its module can exist."""
        if advice.state is not State.PENDING:
            return advice.detail
        fault = why_not_importable(advice.target)
        return advice.detail + (f": {fault}" if fault else "")

    def _end(self) -> None:
        """At the program's end, warn of hooks whose module cannot exist, and of patterns without a match.

        Packages have hooks for engines that may not be installed: those are not mistakes.
        """
        for advice in self.advices:
            is_of_package = advice.source is not None and advice.source.dist_name
            if advice.state is not State.PENDING or is_of_package:
                continue
            if why_not_importable(advice.target) or advice.target.has_module_pattern:
                logger.warning("%s was never woven: %s", advice, self.detail_of(advice))

    @property
    def points(self) -> list[JoinPoint]:
        with self.lock:
            return list(self.table.points)

    def points_named(self, target: Target) -> list[JoinPoint]:
        """Return the join points of ``target`` in loaded modules, under whatever name they were woven."""
        with self.lock:
            found: dict[JoinPoint, None] = {}
            for name, module in loaded(target) if self.table.points else ():
                for path in target.attribute_paths(name):
                    for place in find(module, path):
                        found.update(dict.fromkeys(self.table.at(place)))
            return list(found)

    # -- modules as they load ---------------------------------------------------------------------------

    def _is_wanted(self, name: str) -> bool:
        # Called for every import, without the lock: it only reads.
        if name in (_COMPILER, _SCRIPTING) or name in self._listeners or self._index.wants(name):
            return True
        return bool(self._subclasses)  # any module may define a subclass, with a decorator

    def _module_loaded(self, name: str, module: Any) -> None:
        if module is None:
            return
        self._changes.run_or_defer(self._weave_loaded, [name, module])
        if name in self._listeners:
            self._notify_listeners(name, module)

    def _weave_loaded(self, loaded: list[Any], strict: bool) -> None:
        name, module = loaded
        self._just_run = module
        lost: list[Advice] = []
        try:
            if name in (_COMPILER, _SCRIPTING):
                self._note_compiler()
            concerned = self._index.concerned(name)
            self._weave([(advice, name, module) for advice in concerned], strict=strict)
            self._weave_subclasses(self._subclasses.classes_of(name, module), strict)
            lost = [advice for advice in concerned if advice.required and advice.state in _LOST]
        except Exception:
            logger.exception("hooks on %s failed; the import continues", name)
        finally:
            self._just_run = None
        if lost:
            _stop("; ".join(f"required {advice}: {advice.detail}" for advice in dict.fromkeys(lost)))

    def _class_made(self, cls: type) -> None:
        """Weave a new subclass for hooks on ``Class+``, before its ``class`` statement returns."""
        try:
            self._changes.run_or_defer(self._weave_subclasses, [cls])
        except Exception:
            logger.exception("hooks on %s failed", class_name(cls))

    def _weave_subclasses(self, classes: list[type], strict: bool) -> None:
        for advice, concerned in self._subclasses.concerned(classes).items():
            self._weave(self._in_loaded_modules([advice]), strict=strict, subclasses=concerned)

    def _scripted(self, function: Any) -> None:
        """Warn that torch.jit is about to compile the source of ``function``, without its hooks."""
        for point in self.table.points:
            if point.function is function and point.active:
                logger.warning(
                    "torch.jit compiles %s from its source, without its hooks: %s; hook what calls the "
                    "compiled function, or exclude this one with torch.jit.ignore",
                    point.place,
                    ", ".join(map(str, point.advices)),
                )

    def _note_compiler(self) -> None:
        if self._unwatch_scripting is None and _SCRIPTING in sys.modules:
            self._unwatch_scripting = compat.watch_torchscript(sys.modules[_SCRIPTING], self._scripted)
        compiler = sys.modules.get("torch.compiler")
        if self.table.compiling is None and _COMPILER in sys.modules and compiler is not None:
            self.table.compiling = compat.compiling_test(compiler)
            for point in self.table.points:
                point.refresh(self.table.compiling)

    def _forget_compiled_code(self, advices: Iterable[Advice], points: Iterable[JoinPoint]) -> None:
        """Reset torch.compile if its code may contain the old body of one of ``points``.

        It guards functions of a module and woven functions, but not the methods of a class; and it compiles
        a caller anew only a few times.
        """
        if _COMPILER not in sys.modules or all(one.hook_type is HookType.OBSERVE for one in advices):
            return
        stale = []
        for point in points:
            if is_class(point.inner) or not is_module(point.place.owner):
                stale.append(point.inner)
            else:
                changes = self._recompiled[point.place.key] = self._recompiled.get(point.place.key, 0) + 1
                if changes % _MOST_RECOMPILED == 0:
                    stale.append(point.inner)
        compat.forget_compiled(stale)

    def _in_loaded_modules(self, advices: Iterable[Advice]) -> Iterator[tuple[Advice, str, Any]]:
        """Yield the loaded modules that each hook may target; those being imported follow when ready."""
        for advice in list(advices):
            for name, module in loaded(advice.target):
                if module is self._just_run or is_ready(module):
                    yield advice, name, module
                else:
                    when_ready(module, self._module_loaded)

    # -- weaving ----------------------------------------------------------------------------------------

    def _weave(
        self,
        work: Iterable[tuple[Advice, str, Any]],
        *,
        strict: bool,
        subclasses: Sequence[type] | None = None,
    ) -> None:
        """Attach hooks to their targets in the modules of these names.

        Class replacements go first, so that hooks on methods apply to the replacement class.

        :param subclasses: only these subclasses of a ``Class+`` are looked at.
        """
        work = list(work)
        for classes in (True, False):
            for advice, name, module in work:
                if advice.is_class_replacement is classes:
                    self._weave_in(advice, name, module, strict=strict, subclasses=subclasses)
            self._apply(strict=strict)

    def _weave_in(
        self, advice: Advice, name: str, module: Any, *, strict: bool, subclasses: Sequence[type] | None
    ) -> None:
        for rank, alternate in enumerate(advice.target.alternates):
            resolution = resolve(alternate, name, module, subclasses)
            if resolution is None or self._chosen.get(advice, rank) < rank:
                continue
            for base in bases_of_family(alternate, module):
                own = self._subclasses.wait(advice, base)
                self._touched += self.table.attach(own, next(find(base, ("__init_subclass__",))))
            if resolution.presence is Presence.FOUND:
                self._attach(advice, rank, resolution.places, module, strict=strict)
            elif resolution.presence is Presence.LAZY:
                own = self._lazy.wait(name, module, alternate, resolution.places[0].owner)
                self._touched += self.table.attach(own, resolution.places[0])
                advice.detail = resolution.detail
            elif resolution.presence is Presence.ABSENT:
                self._note_missing(advice, rank, resolution.detail)

    def _attach(
        self, advice: Advice, rank: int, places: Iterable[AttributeReference], module: Any, *, strict: bool
    ) -> None:
        """Add ``advice`` to the join points at ``places``, which its alternate ``rank`` names."""
        if self._chosen.get(advice, rank) > rank:
            self._detach(advice)  # a better alternate was loaded
        self._chosen[advice] = rank
        faults: list[HookError] = []
        for place in places:
            try:
                # The module's code has just run again: its attributes are new, even those woven before.
                rerun = module is self._just_run and place.owner is module
                self._touched += self.table.attach(advice, place, rerun=rerun)
            except HookError as fault:
                faults.append(fault)
        if self.table.of(advice):
            advice.state = State.WOVEN if advice.enabled else State.DISABLED
            advice.detail = ""
        elif faults and "*" not in advice.target.alternates[rank].text:  # patterns skip unhookable objects
            self._fail(advice, faults[0], strict=strict)

    def _detach(self, advice: Advice) -> None:
        self._touched += [point for point, _ in self.table.of(advice)]
        self.table.detach(advice)

    def _apply(self, *, strict: bool) -> None:
        if not self._touched:
            return
        try:
            refused, detached = self.table.apply(self._touched)
        except RecursionError:  # the next change, from fewer frames, completes it
            raise
        except Exception:  # it would come again with each later change
            self.table.before.clear()
            self._touched.clear()
            raise
        self._touched.clear()
        if detached is not None:
            for advice in detached:
                advice.state, advice.detail = State.PENDING, "its class was replaced or restored"
            absent = [advice for advice in self._advices if advice.state is State.MISSING]
            self._weave(self._in_loaded_modules([*detached, *absent]), strict=False)
        for advice, fault in refused.items():
            # Subclasses of C types, which cannot be hooked, are found when their modules have loaded.
            if not self.table.of(advice) and advice in self._advices:
                self._fail(advice, fault, strict=strict)

    # -- hooks that cannot be woven ---------------------------------------------------------------------

    def _fail(self, advice: Advice, fault: HookError, *, strict: bool) -> None:
        known = advice.state is State.FAILED and advice.detail == str(fault)
        advice.state, advice.detail = State.FAILED, str(fault)
        if strict:
            raise fault
        if not known:
            self._report_lost(advice, "failed")

    def _note_missing(self, advice: Advice, rank: int, detail: str) -> None:
        if self.table.of(advice):
            return
        gone = self._missing.setdefault(advice, {})
        known = gone.get(rank) == detail
        gone[rank] = detail
        advice.detail = "; ".join(gone[rank] for rank in sorted(gone))
        if len(gone) < len(advice.target.alternates):
            advice.detail += "; the other alternates are not loaded yet"
            return
        advice.state = State.MISSING
        if not known and not advice.required:
            self._report_lost(advice, "is not woven")

    def _report_lost(self, advice: Advice, what: str) -> None:
        if advice.on_lost is not None:
            advice.on_lost(advice.detail)
        else:
            logger.warning("%s %s: %s", advice, what, advice.detail)


def _stop(message: str) -> None:
    """End the process: a required hook that is missing must not go unnoticed."""
    message += (
        ". Correct the target, add the name that this version has as an alternate ('a:f | b:g'), "
        "or do without required=True"
    )
    logger.critical("%s", message)
    error = Stop(message)
    if threading.current_thread() is threading.main_thread():
        raise error
    # SystemExit in another thread would end only that thread.
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
