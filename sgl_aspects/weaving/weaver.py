"""The weaver: brings hooks to the places that their targets name, now or when a module loads.

All changes happen under one lock. No module is ever imported while it is held, so that it cannot deadlock
with the import system. Calls through woven functions take no lock at all.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sgl_aspects.errors import AspectsError, HookError, MissingTargetError
from sgl_aspects.weaving.classes import ClassPoint
from sgl_aspects.weaving.hooks import Advice, HookType, State
from sgl_aspects.weaving.importing import ModuleWatcher, is_initialising, when_initialised
from sgl_aspects.weaving.joinpoint import JoinPoint
from sgl_aspects.weaving.places import Place, current, find, namespace
from sgl_aspects.weaving.rebind import Pair, Stale, describe, rebind
from sgl_aspects.weaving.references import extra_references
from sgl_aspects.weaving.targets import Alternate

logger = logging.getLogger("sgl_aspects")

Point = JoinPoint | ClassPoint

_COMPILER = "torch._dynamo"
"""Once this module is loaded, torch.compile may trace a woven function."""


class Weaver:
    """Everything that is woven in this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._advices: list[Advice] = []
        self._points: dict[tuple[int, str, str], Point] = {}
        self._at: dict[Advice, list[tuple[Point, int]]] = {}
        self._chosen: dict[Advice, int] = {}  # which alternate is woven
        self._lost: dict[Advice, set[int]] = {}  # which alternates nothing can bring any more
        self._names: set[str] = set()
        self._everything = 0
        self._compiling: Any = None
        self._watcher = ModuleWatcher(self._is_wanted, self._module_loaded)
        self._watched_names: dict[str, int] = {}
        self.stale: dict[tuple[int, str, str], list[Stale]] = {}
        if hasattr(os, "register_at_fork"):
            this = weakref.ref(self)

            def after_fork() -> None:
                weaver = this()
                if weaver is not None:
                    weaver._after_fork()

            os.register_at_fork(after_in_child=after_fork)

    # -- adding and taking away -------------------------------------------------------------------------

    def add(self, advices: Sequence[Advice]) -> None:
        """Weave ``advices`` where their modules are loaded, and let the others wait. All or nothing.

        :raises HookError: a hook cannot work on what its target names.
        :raises MissingTargetError: a required hook's module is loaded and has no such attribute.
        """
        with self._lock:
            new = [advice for advice in advices if advice not in self._at]
            for advice in new:
                self._advices.append(advice)
                self._at[advice] = []
                advice.state = State.PENDING
                advice.detail = "its module is not loaded yet"
                self._watch(advice, +1)
            self._watcher.install()
            self._note_compiler()
            try:
                self._weave(new, _modules_for(new), strict=True)
            except AspectsError:
                self.remove(new)
                raise
            self._forget_compiled_code([advice for advice in new if self._at[advice]])

    def remove(self, advices: Sequence[Advice]) -> None:
        """Take ``advices`` away, in reverse order; where none is left, the original object is back."""
        with self._lock:
            gone = [advice for advice in reversed(advices) if advice in self._at]
            points = [point for advice in gone for point, _ in self._at[advice]]
            for advice in gone:
                for point, _ in self._at.pop(advice):
                    point.advices.remove(advice)
                self._advices.remove(advice)
                self._chosen.pop(advice, None)
                self._lost.pop(advice, None)
                self._watch(advice, -1)
                advice.state, advice.detail = State.REMOVED, ""
            self._settle(points)
            self._forget_compiled_code(gone if points else ())
            if not self._advices:
                self._watcher.uninstall()

    def set_enabled(self, advices: Sequence[Advice], enabled: bool) -> None:
        """Switch hooks off and on; they keep their place in the order."""
        with self._lock:
            for advice in advices:
                advice.enabled = enabled
                if self._at.get(advice):
                    advice.state = State.WOVEN if enabled else State.DISABLED
            self._settle([point for advice in advices for point, _ in self._at.get(advice, ())])
            self._forget_compiled_code([advice for advice in advices if self._at.get(advice)])

    def apply(self) -> None:
        """Look again at everything that is loaded, for hooks that still wait; safe to call at any time."""
        with self._lock:
            if self._advices:
                self._watcher.install()
            self._weave(self._advices, _modules_for(self._advices), strict=False)

    # -- looking ----------------------------------------------------------------------------------------

    @property
    def advices(self) -> list[Advice]:
        with self._lock:
            return list(self._advices)

    def points_of(self, advice: Advice) -> list[tuple[Point, int]]:
        """Where ``advice`` is woven, each with the number of calls before it came."""
        with self._lock:
            return list(self._at.get(advice, ()))

    @property
    def points(self) -> list[Point]:
        with self._lock:
            return list(self._points.values())

    # -- modules as they load ---------------------------------------------------------------------------

    def _is_wanted(self, name: str) -> bool:
        # Called for every import, without the lock: only reads.
        return name in self._names or bool(self._everything)

    def _watch(self, advice: Advice, change: int) -> None:
        for alternate in advice.target.alternates:
            if alternate.has_module_pattern or any(part.endswith("+") for part in alternate.path):
                self._everything += change
            for name in alternate.module_names():
                count = self._watched_names.get(name, 0) + change
                self._watched_names[name] = count
                if count <= 0:
                    del self._watched_names[name]
        self._names = {*self._watched_names, _COMPILER}

    def _module_loaded(self, name: str, module: Any) -> None:
        if module is None:
            return
        with self._lock:
            if name == _COMPILER:
                self._note_compiler()
            try:
                self._weave(self._advices, {name: module}, strict=False)
            except Exception:
                logger.exception("hooks on %s failed; the import goes on", name)
            lost = [advice for advice in self._advices if advice.required and self._is_lost(advice)]
        if lost:
            _stop("; ".join(f"required {advice}: {advice.detail}" for advice in lost))

    def _note_compiler(self) -> None:
        compiler = sys.modules.get("torch.compiler")
        if self._compiling is None and _COMPILER in sys.modules and compiler is not None:
            self._compiling = namespace(compiler).get("is_compiling")
            for point in self._points.values():
                point.refresh(self._compiling)

    @staticmethod
    def _forget_compiled_code(advices: Sequence[Advice]) -> None:
        """What torch.compile made before may have a method's old body in it, and no guard would notice."""
        compiler = sys.modules.get(_COMPILER)
        if compiler is not None and any(advice.hook_type is not HookType.OBSERVE for advice in advices):
            reset = namespace(compiler).get("reset")
            if reset is not None:  # absent while torch._dynamo itself is being imported
                reset()

    def _after_fork(self) -> None:
        self._lock = threading.RLock()  # the parent's may be held by a thread that is not here

    # -- weaving ----------------------------------------------------------------------------------------

    def _weave(self, advices: Iterable[Advice], modules: dict[str, Any], *, strict: bool) -> None:
        """Bring each advice to its places in ``modules``.

        Class replacements go first: hooks on methods then find the class that stands there.
        """
        advices = list(advices)
        for group in (True, False):
            touched: list[Point] = []
            for advice in advices:
                if advice.is_class_replacement is group:
                    for name, module in modules.items():
                        touched += self._weave_in(advice, name, module, strict=strict)
            errors = self._settle(touched)
            if errors and strict:
                raise errors[0]

    def _weave_in(self, advice: Advice, name: str, module: Any, *, strict: bool) -> list[Point]:
        touched: list[Point] = []
        for rank, alternate in enumerate(advice.target.alternates):
            path = alternate.attribute_path(name)
            if path is None or self._chosen.get(advice, rank) < rank:
                continue
            places = [place for place in find(module, path) if not isinstance(place.raw, types.ModuleType)]
            if not places:
                self._note_missing(advice, alternate, name, module, strict=strict)
                continue
            if self._chosen.get(advice, rank) > rank:
                touched += self._leave(advice)  # a better alternate has turned up
            self._chosen[advice] = rank
            for place in places:
                touched += self._weave_at(advice, place, strict=strict, explicit="*" not in alternate.text)
        if "+" in str(advice.target) and not touched:
            touched += self._weave_new_subclasses(advice)
        return touched

    def _weave_new_subclasses(self, advice: Advice) -> list[Point]:
        """A module that the target does not name may still define a subclass of a class that it names."""
        touched: list[Point] = []
        for module_name, module in _modules_for([advice]).items():
            for alternate in advice.target.alternates:
                path = alternate.attribute_path(module_name)
                if path is not None and any(part.endswith("+") for part in path):
                    for place in find(module, path):
                        touched += self._weave_at(advice, place, strict=False, explicit=False)
        return touched

    def _weave_at(self, advice: Advice, place: Place, *, strict: bool, explicit: bool) -> list[Point]:
        """Add ``advice`` to the join point at ``place``, making it where there is none."""
        try:
            point = self._point_at(place)
            if isinstance(point, ClassPoint):
                ClassPoint.check(advice, place)
            elif advice.is_class_replacement:
                raise HookError(
                    f"{advice}: {place} is no class, so a class cannot replace it; pass a function"
                )
        except HookError as error:
            if not explicit:
                return []  # a pattern means what can be hooked
            advice.state, advice.detail = State.FAILED, str(error)
            if strict:
                raise
            logger.warning("%s failed: %s", advice, error)
            return []
        if advice in point.advices:
            return []
        self._warn_of_second_replace(advice, point)
        self._points[point.place.key] = point
        point.advices.append(advice)
        self._at[advice].append((point, point.calls))
        advice.state = State.WOVEN if advice.enabled else State.DISABLED
        advice.detail = ""
        return [point]

    def _point_at(self, place: Place) -> Point:
        known = self._points.get(place.key)
        if known is not None:
            standing = current(place.owner, place.name)
            if not known.installed or standing is known.replacement or known.place.raw is standing:
                return known
            # Reloaded or patched by somebody else: what stands there now is woven anew.
            self._forget(known)
            del self._points[known.place.key]
        for point in self._points.values():
            if point.installed and not place.inherited and point.replacement is place.raw:
                return point  # another name of something that is woven already
        if isinstance(place.raw, type):
            return ClassPoint(place)
        return JoinPoint(place)

    def _leave(self, advice: Advice) -> list[Point]:
        points = [point for point, _ in self._at[advice]]
        self._at[advice] = []
        for point in points:
            point.advices.remove(advice)
        return points

    def _note_missing(
        self, advice: Advice, alternate: Alternate, name: str, module: Any, *, strict: bool
    ) -> None:
        if self._at[advice]:
            return
        if is_initialising(module):
            when_initialised(module, self._module_loaded)
            return
        if alternate.has_module_pattern or (
            alternate.module is None and not _is_settled(alternate, name, module)
        ):
            return
        self._lost.setdefault(advice, set()).add(advice.target.alternates.index(alternate))
        advice.state = State.MISSING
        advice.detail = _what_is_there(alternate.attribute_path(name) or (), name, module)
        if strict and advice.required and self._is_lost(advice):
            raise MissingTargetError(f"required {advice}: {advice.detail}")

    def _is_lost(self, advice: Advice) -> bool:
        """Nothing that loads later can make ``advice`` work."""
        if advice.state is State.MISSING:
            return len(self._lost.get(advice, ())) == len(advice.target.alternates)
        return advice.state is State.FAILED

    # -- putting in place -------------------------------------------------------------------------------

    def _settle(self, points: Iterable[Point]) -> list[HookError]:
        """Make each point's place and all its holders agree with its hooks; one rebinding pass for all."""
        unique = list({id(point): point for point in points}.values())
        pairs: list[Pair] = []
        errors: list[HookError] = []
        installed: list[tuple[Point, str]] = []
        moved: list[type] = []
        for point in unique:
            extra = extra_references(point)
            before = point.standing
            try:
                point.settle(self._compiling)
            except (TypeError, AttributeError) as error:
                errors.append(self._refuse(point, error))
            after = point.standing
            if before is not after:
                pairs += _pairs(point, before, after, extra)
                if point.installed:
                    installed.append((point, describe(before)))
                if isinstance(point, ClassPoint):
                    moved.append(before)
        self._note_stale(installed, self._rebind(pairs))
        for point in unique:
            self._follow_inherited(point)
            if not point.advices:
                self._points.pop(point.place.key, None)
                self.stale.pop(point.place.key, None)
        for before in moved:
            errors += self._move_members(before)
        return errors

    def _refuse(self, point: Point, error: Exception) -> HookError:
        """The place cannot be written: a type made in C, a read-only instance."""
        failure = HookError(f"{point.place} cannot be hooked: {error}")
        for advice in self._forget(point):
            advice.state, advice.detail = State.FAILED, str(failure)
            logger.warning("%s failed: %s", advice, failure)
        return failure

    def _rebind(self, pairs: list[Pair]) -> list[Stale]:
        if not any(pair.extra for pair in pairs):
            return []
        ours = frozenset(key for point in self._points.values() for key in point.own_containers())
        return rebind(pairs, ours)

    def _note_stale(self, installed: list[tuple[Point, str]], found: list[Stale]) -> None:
        for point, before in installed:
            names = {before, describe(point.inner)}
            here = [stale for stale in found if stale.target in names]
            self.stale[point.place.key] = here + (point.stale if isinstance(point, ClassPoint) else [])

    def _move_members(self, before: type) -> list[HookError]:
        """A class was replaced: hooks on its methods go to the class that stands there now."""
        advices: list[Advice] = []
        points = [point for point in self._points.values() if point.place.owner is before]
        for point in points:
            advices += self._forget(point)
        errors = self._settle(points)
        self._weave(advices, _modules_for(advices), strict=False)
        return errors

    def _forget(self, point: Point) -> list[Advice]:
        """Take all hooks off ``point`` without settling it; returns them."""
        advices = list(point.advices)
        for advice in advices:
            self._at[advice] = [(other, calls) for other, calls in self._at[advice] if other is not point]
        point.advices.clear()
        return advices

    def _follow_inherited(self, changed: Point) -> None:
        """Hooks on ``Sub.m`` call what ``Base.m`` is now, hooked or not."""
        if not isinstance(changed, JoinPoint) or not isinstance(changed.place.owner, type):
            return
        for point in self._points.values():
            if not isinstance(point, JoinPoint) or not point.place.inherited or point is changed:
                continue
            if point.original is changed.original or point.original is changed.replacement:
                point.follow(changed.standing)
                point.refresh(self._compiling)

    def _warn_of_second_replace(self, advice: Advice, point: Point) -> None:
        if advice.hook_type is not HookType.REPLACE:
            return
        earlier = [other for other in point.advices if other.hook_type is HookType.REPLACE]
        if earlier:
            logger.warning("%s takes the place of %s; removing it brings that one back", advice, earlier[-1])
        owner, name = point.place.owner, point.place.name
        for other in self._points.values():
            if isinstance(other, ClassPoint) and other.replacement is owner and not point.place.inherited:
                logger.warning("%s overrides %s of the class that replaces %s", advice, name, other.place)


def _modules_for(advices: Iterable[Advice]) -> dict[str, Any]:
    """The loaded modules that any of ``advices`` may be about."""
    advices = list(advices)
    alternates = [alternate for advice in advices for alternate in advice.target.alternates]
    names: Iterable[str]
    if any(alternate.has_module_pattern for alternate in alternates):
        names = list(sys.modules)
    else:
        names = {name for alternate in alternates for name in alternate.module_names()}
    return {name: sys.modules[name] for name in names if sys.modules.get(name) is not None}


def _is_settled(alternate: Alternate, name: str, module: Any) -> bool:
    """For a dotted target: nothing that loads later can bring the attribute."""
    if "__path__" not in namespace(module):
        return True
    following = f"{name}.{alternate.path[name.count('.') + 1]}"
    if following in sys.modules:
        return False  # a longer reading of the target speaks for itself
    try:
        return importlib.util.find_spec(following) is None
    except (ImportError, ValueError):
        return False


def _what_is_there(path: tuple[str, ...], name: str, module: Any) -> str:
    names = [key for key in namespace(module) if not key.startswith("__")]
    close = difflib.get_close_matches(path[0], names, n=3)
    if path[0] in names:
        owner = current(module, path[0])
        names = [key for key in dir(owner) if not key.startswith("__")] if isinstance(owner, type) else []
        close = [f"{path[0]}.{key}" for key in difflib.get_close_matches(path[-1], names, n=3)]
    hint = f"; close names: {', '.join(close)}" if close else ""
    return f"module {name} is loaded and has no {'.'.join(path)}{hint}"


def _pairs(point: Point, before: Any, after: Any, extra: int) -> Iterator[Pair]:
    keep = 0
    for advice in point.advices:
        if advice.hook_type is HookType.REPLACE:
            # The module of a replacement calls the original on purpose.
            module = sys.modules.get(getattr(advice.hook, "__module__", None) or "")
            keep = id(namespace(module)) if module is not None else 0
    yield Pair(before, after, extra, keep)
    if isinstance(point, JoinPoint) and point.inner is not point.original:
        function = point.woven.function
        old, new = (point.inner, function) if point.installed else (function, point.inner)
        yield Pair(old, new, -1, keep)


def _stop(message: str) -> None:
    """End the process: a required hook that is missing must not go unnoticed."""
    logger.critical("%s", message)
    error = SystemExit(f"sgl-aspects: {message}")
    if threading.current_thread() is threading.main_thread():
        raise error
    # SystemExit in another thread would end only that thread.
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
