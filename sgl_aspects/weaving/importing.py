"""Watching modules load: the callback runs right after a module's own code, before any importer sees it.

wrapt's post-import hooks do that. What they leave out is seen to here: names that only a pattern knows are
registered when such a module is looked for; a module that is reloaded, or of `importlib.util.LazyLoader`,
has its loader wrapped; one that is still being initialised is waited for.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

from sgl_aspects import compat
from sgl_aspects.weaving.places import namespace

Wanted = Callable[[str], bool]
Loaded = Callable[[str, Any], None]


class ModuleWatcher:
    """A finder for `sys.meta_path` that finds nothing itself: it has wrapt find, and adds a callback.

    :param wanted: asked for every module that is imported, without any lock of ours.
    :param loaded: called with the name and with what stands in `sys.modules`, in the importing thread,
        while that module's import lock is held.
    """

    def __init__(self, wanted: Wanted, loaded: Loaded) -> None:
        self._wanted = wanted
        self._loaded = loaded
        self._finding = threading.local()
        self._registered: dict[str, Any] = {}  # with wrapt
        self._brought_wrapt = False
        self._leave_searches: Callable[[], None] | None = None

    def install(self) -> None:
        """Watch from now on; does nothing where it is installed."""
        self._stand_first()
        if self._leave_searches is None:
            self._leave_searches = compat.before_each_search(self._stay_first)

    def uninstall(self) -> None:
        """Leave `sys.meta_path` as it was."""
        if self._leave_searches is not None:
            self._leave_searches()
            self._leave_searches = None
        while self in sys.meta_path:
            sys.meta_path.remove(self)
        for name, hook in self._registered.items():
            compat.unregister_post_import_hook(hook, name)
        self._registered.clear()
        if self._brought_wrapt:
            self._brought_wrapt = not compat.remove_wrapt_finder()

    def _stay_first(self) -> None:
        """Before finders that somebody has put in front since, which may find modules without asking us."""
        if self._leave_searches is not None:
            self._stand_first()

    def _stand_first(self) -> None:
        finders = sys.meta_path
        if not finders or finders[0] is not self:
            finders.insert(0, self)
            for index in [index for index, finder in enumerate(finders) if finder is self][:0:-1]:
                del finders[index]

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
            is_new = target is None and fullname not in sys.modules
            spec = self._find_by_wrapt(fullname) if is_new else None
            if spec is None:
                spec = self._find_elsewhere(fullname, path, target)
        finally:
            finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            self._attach(spec)
        return spec

    def _find_by_wrapt(self, fullname: str) -> ModuleSpec | None:
        """What wrapt's finder finds: its loader will call us."""
        if fullname not in self._registered:
            self._brought_wrapt |= compat.wrapt_finder() is None

            def hook(module: Any) -> None:
                self._registered.pop(fullname, None)
                self._loaded(fullname, sys.modules.get(fullname, module))

            self._registered[fullname] = hook
            wrapt.register_post_import_hook(hook, fullname)
        finder = compat.wrapt_finder()
        return None if finder is None else finder.find_spec(fullname)

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
            # wrapt would wake it.
            loader = spec.loader = compat.unchained(loader)
            # Its module wakes at the first attribute; the callback belongs there, and must not wake it.
            inner: Any = loader
            if not isinstance(inner.loader, _NotifyingLoader):
                inner.loader = _NotifyingLoader(inner.loader, self._loaded)
        elif not isinstance(loader, _NotifyingLoader) and compat.unchained(loader) is loader:
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
        while name not in sys.modules and compat.is_imported_elsewhere(name) and time.monotonic() < deadline:
            waited = True
            time.sleep(0.0002)
        found |= waited and name in sys.modules
    return found


_LONGEST_WAIT = 0.1


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
    compat.when_initialized(spec, lambda: loaded(spec.name, sys.modules[spec.name]))


def _is_lazy(module: Any) -> bool:
    # By its type: isinstance() would ask the module for its __class__, and so wake it.
    return type(module).__module__ == "importlib.util"


def _is_initialising(module: Any) -> bool:
    spec = namespace(module).get("__spec__")
    return compat.is_initializing(spec)
