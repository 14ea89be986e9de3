"""Watching modules load: the callback runs right after a module's own code, before any importer sees it.

wrapt's post-import hooks are not used, because they fire at once for a module that is still being
initialised, forget a module after its first load (so reloading loses every hook), know only plain names,
and can neither be removed nor leave `sys.meta_path` as it was.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from sgl_aspects.weaving.places import namespace

Wanted = Callable[[str], bool]
Loaded = Callable[[str, Any], None]


class ModuleWatcher:
    """A finder for `sys.meta_path` that finds nothing itself: it lets the others find, and adds a callback.

    :param wanted: asked for every module that is imported, without any lock of ours.
    :param loaded: called with the name and with what stands in `sys.modules`, in the importing thread,
        while that module's import lock is held.
    """

    def __init__(self, wanted: Wanted, loaded: Loaded) -> None:
        self._wanted = wanted
        self._loaded = loaded
        self._finding = threading.local()

    def install(self) -> None:
        """Watch from now on; does nothing where it is installed."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Leave `sys.meta_path` as it was."""
        while self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._wanted(fullname):
            return None
        finding: set[str] = self._finding.__dict__.setdefault("names", set())
        if fullname in finding:
            return None  # another watcher is asking everybody on our behalf
        finding.add(fullname)
        try:
            spec = self._find_elsewhere(fullname, path, target)
        finally:
            finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._attach(spec)
        return spec

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self:
                continue
            spec: ModuleSpec | None = None
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
            elif hasattr(finder, "find_module") and sys.version_info < (3, 12):
                loader = finder.find_module(fullname, path)
                spec = None if loader is None else importlib.util.spec_from_loader(fullname, loader)
            if spec is not None:
                return spec
        return None

    def _attach(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        if isinstance(loader, importlib.util.LazyLoader):
            # Its module wakes at the first attribute; the callback belongs there, and must not wake it.
            inner: Any = loader
            if not isinstance(inner.loader, _NotifyingLoader):
                inner.loader = _NotifyingLoader(inner.loader, self._loaded)
        elif not isinstance(loader, _NotifyingLoader):
            spec.loader = _NotifyingLoader(loader, self._loaded)  # type: ignore[assignment]


class _NotifyingLoader:
    """Stands for a loader until it runs the module; the module itself sees only its own loader."""

    def __init__(self, loader: Any, loaded: Loaded) -> None:
        self._loader = loader
        self._notify = loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        module: ModuleType | None = create(spec) if create is not None else None
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        name = spec.name if spec is not None else module.__name__
        self._step_aside(module)
        if hasattr(self._loader, "exec_module"):
            self._loader.exec_module(module)
        else:  # a loader from before PEP 451: it makes and registers the module itself
            sys.modules.pop(name, None)
            self._loader.load_module(name)
        self._notify(name, sys.modules.get(name, module))

    def _step_aside(self, module: ModuleType) -> None:
        spec: Any = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader


def until_registered(names: Iterable[str]) -> bool:
    """Let other threads go on that have looked for one of these modules, and have not made it yet.

    Such a thread asked us whether anybody wants the module before somebody did, so that nobody would notice
    it load; once it stands in `sys.modules`, :func:`when_ready` does. True where one is there now. Bounded:
    what an import waits for may be us.
    """
    found = False
    deadline = time.monotonic() + _LONGEST_WAIT
    for name in names:
        waited = False
        while name not in sys.modules and _is_sought_elsewhere(name) and time.monotonic() < deadline:
            waited = True
            time.sleep(0.0002)
        found |= waited and name in sys.modules
    return found


_LONGEST_WAIT = 0.1
# Each module's lock, while somebody imports it (a weak reference to it, or nothing).
_locks: dict[str, Any] = getattr(importlib._bootstrap, "_module_locks", {})


def _is_sought_elsewhere(name: str) -> bool:
    lock = _locks.get(name, _no_lock)()
    return getattr(lock, "owner", None) not in (None, threading.get_ident())


def _no_lock() -> None:
    return None


def is_ready(module: Any) -> bool:
    """Whether the module's own code has run.

    Not so in a circular import, while another thread imports it, and for a module of
    `importlib.util.LazyLoader` that nobody has used yet.
    """
    return not _is_lazy(module) and not _is_initialising(module)


def when_ready(module: Any, loaded: Loaded) -> None:
    """Call ``loaded`` once the code of ``module``, for which :func:`is_ready` is False, has run.

    Nothing is woken and nothing is waited for.
    """
    spec = object.__getattribute__(module, "__spec__")
    if _is_lazy(module):
        if not isinstance(spec.loader, _NotifyingLoader):
            spec.loader = _NotifyingLoader(spec.loader, loaded)
        return
    # The machinery ends an import by setting `_initializing` to False; nothing else tells.
    plain = type(spec)
    if not hasattr(plain, "_initializing"):
        spec.__class__ = _watched(plain, loaded)
    if not _is_initialising(module):  # its thread was done before we looked
        spec.__class__ = plain
        loaded(spec.name, module)


def _is_lazy(module: Any) -> bool:
    # By its type: isinstance() would ask the module for its __class__, and so wake it.
    return type(module).__module__ == "importlib.util"


def _is_initialising(module: Any) -> bool:
    spec = namespace(module).get("__spec__")
    return bool(getattr(spec, "_initializing", False))


def _watched(plain: Any, loaded: Loaded) -> type[ModuleSpec]:
    class Watched(plain):  # type: ignore[misc]
        @property
        def _initializing(self) -> bool:
            return bool(self.__dict__.get("_initializing", False))

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__dict__["_initializing"] = value
            if not value:
                self.__class__ = plain
                # Absent where the module's own code failed.
                if self.name in sys.modules:
                    loaded(self.name, sys.modules[self.name])

    return Watched
