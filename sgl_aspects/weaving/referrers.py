"""Referrers: the search for them on the heap, and those that keep an original."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import gc
import sys
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

from sgl_aspects import compat
from sgl_aspects.weaving.attributes import class_module, derives, is_a, is_class, namespace
from sgl_aspects.weaving.hooks import Advice, HookType

# -- the search ----------------------------------------------------------------------------------------------


class Pieces:
    """Searches of the heap with rests in between. ``longest``: processor seconds of the longest piece.

    After a few milliseconds of work the thread sleeps ``rest`` times as long, so that others get the GIL and
    a processor. It does not sleep after each piece, where others get the GIL anyway: each sleep ends with a
    wait for it, which is long on a machine with few processors and many programs.
    """

    def __init__(self, rest: float) -> None:
        self.longest, self._rest, self._worked = 0.0, rest, time.thread_time()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        end = time.thread_time()
        self.longest = max(self.longest, end - begin)
        if end - self._worked >= _WORK_SECONDS:
            time.sleep(self._rest * (end - self._worked))
            self._worked = time.thread_time()


_pieces: contextvars.ContextVar[Pieces | None] = contextvars.ContextVar("sgl_aspects_pieces", default=None)
_PIECE_OBJECTS = 4  # a pass over the heap takes 1.5 times as long for four objects as for one
_WORK_SECONDS = 0.005


@contextlib.contextmanager
def in_pieces(rest: float = 1.0) -> Iterator[Pieces]:
    """Split rebinding in the block into several passes over the heap: other threads run in between.

    For a process that serves; in total it takes longer than a single pass.
    """
    pieces = Pieces(rest)
    token = _pieces.set(pieces)
    try:
        yield pieces
    finally:
        _pieces.reset(token)


def is_in_pieces() -> bool:
    """Return whether the caller is within `in_pieces`."""
    return _pieces.get() is not None


def _piece() -> contextlib.AbstractContextManager[None]:
    pieces = _pieces.get()
    return contextlib.nullcontext() if pieces is None else pieces.one()


@contextlib.contextmanager
def unfrozen() -> Iterator[None]:
    """Undo `gc.freeze()`, which engines call, in the block: it hides objects from `gc.get_referrers()`.

    Afterwards all live objects are frozen, including those created since the engine froze the heap.
    """
    with _piece():
        is_frozen = compat.is_heap_frozen()
        if is_frozen:
            gc.collect()  # garbage must not be frozen
            _unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            with _piece():
                gc.collect(1)  # what the block made: the rest is in the oldest generation
                gc.freeze()


def _unfreeze() -> None:
    """Unfreeze the heap, and search all of it for garbage once much more was frozen than by the engine.

    Hooks are frozen with it, and whatever lives while one is woven: no other collection finds them later.
    """
    global _frozen_before
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    _frozen_before = _frozen_before or frozen
    if frozen > _frozen_before + _MOST_GROWTH:
        gc.collect()
        _frozen_before = 0  # it is counted the next time


_frozen_before = 0
_MOST_GROWTH = 10_000


def referrers(objects: list[Any]) -> list[Any]:
    """Return every tracked object that refers to one of ``objects``.

    Holds no other objects, unlike a list of `gc.get_objects()`: ``tuple(generator)`` raises SystemError in an
    engine's thread if its unfinished tuple is held, and a bytearray cannot grow while a memoryview of it is.
    """
    pieces = _pieces.get()
    size = (len(objects) or 1) if pieces is None else _PIECE_OBJECTS
    found: dict[int, Any] = {}
    for start in range(0, len(objects), size):
        # An explicit tuple, removed below: Python 3.13 would return the one that it creates for the call.
        arguments = tuple(objects[start : start + size])
        with _piece():
            found.update({id(referrer): referrer for referrer in gc.get_referrers(*arguments)})
        for own in (objects, arguments, found):
            found.pop(id(own), None)
    return list(found.values())


# -- what keeps the original ---------------------------------------------------------------------------------


Exclusions = frozenset[Any]
"""Ids of containers that are not changed at all, and pairs of a namespace's id and one name in it."""


def exclusions_of(advices: Iterable[Advice], *going: type) -> Exclusions:
    """Return ids not to rebind: of the hooks' containers, and of the namespaces of REPLACE hooks' modules.

    Valid now: a class contains others once its methods are woven. ``going``: classes of hooks that go.
    """
    kept: set[Any] = set()
    hooks = [(advice.hook, advice.hook_type is HookType.REPLACE) for advice in advices]
    for hook, replaces in (*hooks, *((cls, True) for cls in going)):
        kept.update(map(id, _containers_in(hook)))
        home = _namespace_of(hook) if replaces else None
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
    name: Any = class_module(hook) if is_class(hook) else getattr(hook, "__module__", None)
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
            parts = (member.fget, member.fset, member.fdel) if is_a(member, property) else (member,)
            for part in parts:
                if is_a(part, types.FunctionType):
                    yield from _containers_in(part)
    else:
        yield namespace(hook)


def own_referrers(cls: type) -> tuple[Exclusions, list[Any]]:
    """Return ids of what refers to ``cls`` before it replaces a class, and objects that keep them valid."""
    namespaces = {id(namespace(module)) for module in list(sys.modules.values())}
    containers: list[Any] = []
    kept: set[Any] = set()
    with unfrozen():
        found = gc.get_referrers(cls)
    for referrer in found:
        if id(referrer) in namespaces:
            kept.update((id(referrer), name) for name, value in list(referrer.items()) if value is cls)
        elif isinstance(referrer, (list, dict, set, types.CellType)):
            containers.append(referrer)
            kept.add(id(referrer))
    return frozenset(kept), containers
