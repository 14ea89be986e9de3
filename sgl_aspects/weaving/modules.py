"""Import callbacks, the hooks that wait for a module, and attributes and subclasses created later."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import logging
import os
import pkgutil
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from itertools import accumulate, chain
from types import ModuleType
from typing import Any

import wrapt

from sgl_aspects import compat
from sgl_aspects.weaving.attributes import (
    MISSING,
    OwnDict,
    Presence,
    bases,
    class_module,
    find,
    is_class,
    namespace,
    resolve,
    similar,
    with_nested,
)
from sgl_aspects.weaving.hooks import Advice, HookType, State
from sgl_aspects.weaving.targets import Alternate, Target, names_module, stem

logger = logging.getLogger("sgl_aspects")

# -- imports -------------------------------------------------------------------------------------------------

Loaded = Callable[..., None]


class ModuleWatcher:
    """Notices when the code of a module has run, by wrapping its loader once it was found.

    Not with `wrapt.register_post_import_hook`, which misses reloads, loads lazy modules, and calls itself
    forever where another finder assigns to the loader that wrapt has wrapped.

    :param wanted: called for every module that is imported, without the weaver's lock.
    :param loaded: called with the name, the entry of `sys.modules`, and whether its code has just run, in the
        importing thread, under that module's import lock; then the callbacks of :meth:`listen` are.
    """

    def __init__(self, wanted: Callable[[str], bool], loaded: Loaded) -> None:
        self._wanted = wanted
        self._loaded = loaded
        self._is_needed = False
        self._listeners: dict[str, deque[Callable[[Any], None]]] = defaultdict(deque)
        self._leave: list[Callable[[], None]] = []

    def install(self) -> None:
        """Start watching; idempotent."""
        self._is_needed = True
        self._watch()

    def listen(self, name: str, callback: Callable[[Any], None]) -> None:
        """Call ``callback`` with the module ``name`` once its code has run: at once if it has."""
        self._listeners[name].append(callback)
        self._watch()
        module = sys.modules.get(name)
        if module is not None and is_ready(module):
            self._notify_listeners(name, module)
        elif module is not None:
            when_ready(module, self.module_loaded)

    def module_loaded(self, name: str, module: Any, just_run: bool = False) -> None:
        """Tell that the code of ``module`` has run; None: it is gone."""
        if module is not None:
            self._loaded(name, module, just_run)
            if name in self._listeners:
                self._notify_listeners(name, module)

    def _notify_listeners(self, name: str, module: Any) -> None:
        waiting = self._listeners[name]
        while waiting:  # without a lock: the thread that adds one looks here, too
            try:
                callback = waiting.popleft()
            except IndexError:  # another thread has taken it
                return
            if not self._is_needed:
                self.uninstall()
            callback(module)

    def _watch(self) -> None:
        if not self._leave:
            self._leave.append(compat.after_each_search(self._is_found))
            # `spec_from_file_location()` makes specs without a search.
            self._leave.append(compat.before_each_creation(self._is_found))

    def uninstall(self) -> None:
        """Stop watching, unless there are listeners."""
        self._is_needed = False
        if not any(list(self._listeners.values())):
            while self._leave:
                self._leave.pop()()

    def _is_found(self, spec: ModuleSpec) -> None:
        if self._listeners.get(spec.name) or self._wanted(spec.name):
            # A lazy loader calls another one when an attribute of the module is read.
            is_lazy = type(spec.loader) is importlib.util.LazyLoader
            _wrap_loader(spec.loader if is_lazy else spec, spec.name, self.module_loaded)


def _wrap_loader(holder: Any, name: str, loaded: Loaded) -> None:
    if hasattr(holder.loader, "exec_module") and type(holder.loader) is not _NotifyingLoader:
        holder.loader = _NotifyingLoader(name, holder.loader, loaded)


class _NotifyingLoader(wrapt.BaseObjectProxy):  # type: ignore[type-arg]
    """Wraps the loader of the module ``name`` until the module runs; the module sees the original loader.

    What others assign to it stays with it, and does not reach the loader that it calls.
    """

    def __init__(self, name: str, loader: Any, loaded: Loaded) -> None:
        super().__init__(loader)
        self._self_name, self._self_notify = name, loaded

    def exec_module(self, module: ModuleType) -> None:
        loader, name, notify = self.__wrapped__, self._self_name, self._self_notify
        spec: Any = module.__spec__
        if spec is not None and spec.loader is self:
            spec.loader = loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = loader
        loader.exec_module(module)
        notify(name, sys.modules.get(name, module), True)

    # Warnings and tracebacks leave out the frames of the import system, which they know by the file.
    exec_module.__code__ = exec_module.__code__.replace(co_filename="<frozen importlib._bootstrap>")


def is_ready(module: Any) -> bool:
    """Return whether the module's own code has run.

    False in a circular import, while another thread imports it, and for a module of
    `importlib.util.LazyLoader` that has not been accessed yet.
    """
    return not _is_lazy(module) and not compat.is_initializing(namespace(module).get("__spec__"))


def when_ready(module: Any, loaded: Loaded) -> None:
    """Call ``loaded`` once the code of ``module``, which is not :func:`is_ready`, has run. Never waits."""
    spec = object.__getattribute__(module, "__spec__")
    if _is_lazy(module):
        _wrap_loader(spec, spec.name, loaded)
    else:
        compat.when_initialized(spec, lambda: loaded(spec.name, sys.modules.get(spec.name)))


def _is_lazy(module: Any) -> bool:
    # By its type: isinstance() would read the module's __class__, and so load it.
    return type(module).__module__ == "importlib.util"


def why_not_importable(target: Target) -> str:
    """Return why no alternate's module can ever be imported, with close names; "" if one may be."""
    faults = []
    for alternate in target.alternates:
        # Of the dotted form, the first name at least is a module's; of a pattern, those before its wildcard.
        name = alternate.path[0] if alternate.module is None else alternate.module
        fixed = name.partition("*")[0].rpartition(".")[0] if alternate.has_module_pattern else name
        loaded = tuple(one for one in _prefixes(fixed) if sys.modules.get(one) is not None)
        faults.append(_fault_of(fixed, loaded, tuple(sys.path)) if fixed not in ("", *loaded) else "")
    return "" if "" in faults else "; ".join(dict.fromkeys(faults))


def why_absent(target: Target) -> str:
    """Return what the loaded modules that ``target`` names lack; "" if one has it, or may."""
    modules = [(name, module) for name, module in loaded(target, ()) if is_ready(module)]
    found = [resolve(one, name, module) for one in target.alternates for name, module in modules]
    absent = [one.detail for one in found if one is not None and one.presence is Presence.ABSENT]
    return "; ".join(absent) if len(absent) == len(target.alternates) else ""


def detail_of(advice: Advice) -> str:
    """Return why ``advice`` is not woven; for one that waits, whether its module can exist."""
    fault = why_not_importable(advice.target) if advice.state is State.PENDING else ""
    return advice.detail + (f": {fault}" if fault else "")


def warn_of_unwoven(advices: Iterable[Advice]) -> None:
    """At the program's end, warn of hooks whose module cannot exist, and of patterns without a match.

    Packages have hooks for engines that may not be installed: those are not mistakes.
    """
    for advice in advices:
        is_of_package = advice.source is not None and advice.source.dist_name
        if advice.state is not State.PENDING or is_of_package:
            continue
        if why_not_importable(advice.target) or advice.target.module_patterns:
            logger.warning("%s was never woven: %s", advice, detail_of(advice))


def _prefixes(name: str) -> Iterable[str]:
    return accumulate(name.split("."), "{}.{}".format)


@functools.lru_cache(maxsize=1024)
def _fault_of(name: str, loaded: tuple[str, ...], search_path: tuple[str, ...]) -> str:
    """Return why the module ``name`` cannot be imported; nothing is. The others are for the cache."""
    within: Any = None
    for prefix in _prefixes(name):
        module = sys.modules.get(prefix)
        if module is None:
            try:
                specs = (one.find_spec(prefix, within) for one in sys.meta_path if hasattr(one, "find_spec"))
                spec = next((found for found in specs if found is not None), None)
            except Exception:  # noqa: BLE001  another package's finder may raise anything
                return ""
            if spec is None:
                if within is None and any(map(os.path.exists, (f"{prefix}.py", f"{prefix}/__init__.py"))):
                    hint = f"Python does not look into {os.getcwd()}, which has it: add it to PYTHONPATH"
                    return f"no module {prefix} can be imported; {hint}"
                modules = {one.name for one in pkgutil.iter_modules(within)} - {"__main__"}
                if within is None:
                    modules |= sys.stdlib_module_names
                close = ", ".join(similar(prefix.rpartition(".")[2], sorted(modules)))
                return f"no module {prefix} can be imported" + (f"; close names: {close}" if close else "")
            within = spec.submodule_search_locations
        else:
            within = namespace(module).get("__path__")
        if within is None and prefix != name:
            return f"{prefix} is not a package, so no module {name} can be imported"
    return ""


# -- hooks by module -----------------------------------------------------------------------------------------


class ModuleIndex:
    """Hooks, by the modules that they wait for."""

    def __init__(self) -> None:
        self._by_name: dict[str, dict[Advice, None]] = {}
        self._by_pattern: dict[str, dict[Advice, None]] = {}
        self._stems: tuple[str, ...] | None = ()  # how names may begin that fit a pattern; None: not known

    def add(self, advice: Advice) -> None:
        """Add ``advice``, to wait for its modules."""
        for name in advice.target.module_names:
            self._by_name.setdefault(name, {})[advice] = None
        for pattern in advice.target.module_patterns:
            self._by_pattern.setdefault(pattern, {})[advice] = None
            self._stems = None

    def discard(self, advice: Advice) -> None:
        """Remove ``advice``."""
        names, patterns = advice.target.module_names, advice.target.module_patterns
        for index, keys in ((self._by_name, names), (self._by_pattern, patterns)):
            for key in keys:
                waiting = index.get(key, {})
                waiting.pop(advice, None)
                if not waiting:
                    index.pop(key, None)
        if patterns:
            self._stems = None

    def wants(self, name: str) -> bool:
        """Return whether a hook waits for the module ``name``; safe without a lock."""
        stems = self._stems
        if stems is None:
            stems = self._stems = tuple(map(stem, list(self._by_pattern)))
        return name in self._by_name or (name.startswith(stems) and any(self._patterns_of(name)))

    def _patterns_of(self, name: str) -> Iterator[str]:
        return (pattern for pattern in list(self._by_pattern) if names_module(pattern, name))

    def concerned(self, name: str) -> list[Advice]:
        """Return the hooks that wait for the module ``name``."""
        by_pattern = (self._by_pattern[pattern] for pattern in self._patterns_of(name))
        return list(dict.fromkeys(chain(self._by_name.get(name, ()), *by_pattern)))


def loaded(target: Target, covered: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the loaded modules that ``target`` may name; ``covered``: candidate names for its patterns."""
    patterns = target.module_patterns
    fitting = [name for name in covered if any(names_module(one, name) for one in patterns)]
    for name in dict.fromkeys((*target.module_names, *fitting)):
        module = sys.modules.get(name)
        if module is not None:
            yield name, module


def covered_by_patterns(targets: Iterable[Target]) -> list[str]:
    """Return the names of loaded modules that patterns of ``targets`` may cover."""
    stems = tuple({stem(pattern) for one in targets for pattern in one.module_patterns})
    names = list(sys.modules) if stems else []  # may have keys of other types
    return [name for name in names if type(name) is str and name.startswith(stems)]


def bases_of_family(alternate: Alternate, module: Any) -> list[type]:
    """Return the classes in ``module`` that ``alternate`` names as `Class+`."""
    if not alternate.has_family:
        return []
    end = next(index for index, part in enumerate(alternate.path) if part.endswith("+")) + 1
    path = tuple(part.removesuffix("+") for part in alternate.path[:end])
    return [place.raw for place in find(module, path) if is_class(place.raw)]


# -- attributes and subclasses created later -----------------------------------------------------------------


def _own_hook(hook_type: HookType, hook: Callable[..., Any]) -> Advice:
    """Return an outermost hook of the weaver itself, which attaches it; it is not in reports."""
    return Advice(Target(()), hook_type, hook, order=sys.maxsize)


class LazyAttributes:
    """Attributes that modules create on first access, and that hooks wait for.

    :param made: called with a module's name and the module, when it has created such an attribute.
    :ivar hooks: the weaver's own hooks on ``__getattr__``, by the id of its owner: a module or a class.
    """

    def __init__(self, made: Callable[[str, Any], None]) -> None:
        self._made = made
        self.hooks: dict[int, Advice] = {}
        self._wanted: dict[int, tuple[str, Any, set[str]]] = {}
        self._kept = OwnDict()  # by module and attribute

    def wait(self, name: str, module: Any, alternate: Alternate, owner: Any) -> Advice:
        """Wait for what ``alternate`` names in ``module``; returns the hook for ``__getattr__`` there."""
        attribute = (alternate.attribute_path(name) or ("",))[0].removesuffix("+")
        self._wanted.setdefault(id(module), (name, module, set()))[2].add(attribute)
        return self.hooks.setdefault(id(owner), _own_hook(HookType.NATIVE, self._around_getattr(owner)))

    def clear(self) -> None:
        """Stop waiting, and remove what modules would make again: the last hook has gone."""
        for (key, attribute), value in self._kept.items():
            names = namespace(self._wanted[key][1])
            if names.get(attribute, MISSING) is value:
                del names[attribute]
        for held in (self.hooks, self._wanted, self._kept):
            held.clear()

    def _around_getattr(self, owner: Any) -> Callable[..., Any]:
        # Of the native contract: the arguments of an AFTER hook would be one more referrer of the new value.
        def around(proceed: Any, args: Any, kwargs: Any) -> Any:
            value = proceed(args, kwargs)
            module, attribute = args if is_class(owner) else (owner, *args)
            name, _, wanted = self._wanted.get(id(module), ("", None, set()))
            if attribute not in wanted:
                return value
            wanted.discard(attribute)
            names = namespace(module)
            if attribute not in names:
                names[attribute] = self._kept[id(module), attribute] = value
            del value
            self._made(name, module)
            return names[attribute]

        return around


class SubclassWatcher:
    """Classes for whose new subclasses hooks on ``Class+`` wait.

    :param made: called with each new subclass, before its decorators run.
    """

    def __init__(self, made: Callable[[type], None]) -> None:
        self._made = made
        # By id: a class may have no hash.
        self._bases: dict[int, tuple[type, Advice, dict[Advice, None]]] = {}

    def wait(self, advice: Advice, base: type) -> Advice:
        """Wait for subclasses of ``base``; returns the hook for its ``__init_subclass__``."""
        own = _own_hook(HookType.AFTER, lambda result, cls, **options: self._made(cls))
        _, own, waiting = self._bases.setdefault(id(base), (base, own, {}))
        waiting[advice] = None
        return own

    def forget(self, advice: Advice) -> Iterator[Advice]:
        """Stop waiting for subclasses on behalf of ``advice``; yields the hooks not needed any more."""
        for key, (_, own, waiting) in list(self._bases.items()):
            if list(waiting) == [advice]:
                yield own
                del self._bases[key]
            waiting.pop(advice, None)

    def concerned(self, classes: Iterable[type]) -> dict[Advice, list[type]]:
        """Return the hooks that wait for some of ``classes``, with these."""
        found: dict[Advice, list[type]] = {}
        for cls in classes:
            above = [self._bases[id(base)][2] for base in bases(cls) if id(base) in self._bases]
            for advice in dict.fromkeys(advice for waiting in above for advice in waiting):
                found.setdefault(advice, []).append(cls)
        return found

    def classes_of(self, name: str, module: Any) -> list[type]:
        """Return the classes of ``module``, whose decorators have run by now; none if no hook waits."""
        if not self._bases:
            return []
        found = [value for value in list(namespace(module).values()) if is_class(value)]
        return with_nested(cls for cls in found if class_module(cls) == name)
