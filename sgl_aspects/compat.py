"""Private names of other packages, each used here alone; tests/test_compat.py tells when one has moved."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import wrapt
import wrapt.importer  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)


def weak_methods(function: types.FunctionType) -> list[Any]:
    """The `weakref.WeakMethod` objects for methods of ``function``."""
    references = weakref.getweakrefs(function)
    held = gc.get_referrers(*references) if references else ()
    return [holder for holder in held if isinstance(holder, weakref.WeakMethod)]


def retarget_weak_method(weak_method: Any, function: types.FunctionType) -> None:
    """Let ``weak_method`` be one of ``function``."""
    weak_method._func_ref = weakref.ref(function, weak_method._func_ref.__callback__)


@functools.cache
def compiling_test(compiler: Any) -> Callable[[], bool]:
    """Says whether torch.compile traces what calls it, in one call of C where torch lets it be so.

    Every woven function asks at each call: two Python frames, as `torch.compiler.is_compiling` has, cost an
    engine's thread microseconds when its caches are cold.

    :param compiler: the module `torch.compiler`, with torch.compile loaded.
    """
    substitute = getattr(compiler, "substitute_in_graph", None)
    if substitute is not None:
        never: Callable[[], bool] = _Own().isdigit
        try:
            substitute(never, skip_signature_check=True)(_always)
        except (ImportError, TypeError, ValueError) as error:
            logger.debug("torch.compile takes no substitute for %r: %s", never, error)
        else:
            return never
    return compiler.is_compiling  # type: ignore[no-any-return]


def assume_constant_result(function: Callable[[], bool]) -> Callable[[], bool]:
    """Let torch.compile call ``function`` while it traces, as `torch.compiler.assume_constant_result` does.

    That one imports torch.compile's modules, which takes as long as importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Own(str):
    """Whose methods, written in C, are nobody else's: only our calls of one are replaced."""


def _always() -> bool:
    return True


def watch_torchscript(frontend: Any, compiled: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``compiled`` with each function that `torch.jit` parses; the function returned undoes it.

    :param frontend: the module `torch.jit.frontend`, whose functions look `parse_def` up in it.
    """
    parse_def = getattr(frontend, "parse_def", None)
    if parse_def is None:
        return lambda: None

    @functools.wraps(parse_def)
    def parse(function: Any) -> Any:
        compiled(function)
        return parse_def(function)

    def undo() -> None:
        if frontend.parse_def is parse:
            frontend.parse_def = parse_def

    frontend.parse_def = parse
    return undo


# -- the import system --------------------------------------------------------------------------------------

_bootstrap: Any = importlib._bootstrap


def before_each_search(begin: Callable[[], None]) -> Callable[[], None]:
    """Call ``begin`` before the finders are asked for a module; the function returned undoes it."""
    search = _bootstrap._find_spec

    @functools.wraps(search)
    def find_spec(*arguments: Any, **keywords: Any) -> Any:
        begin()
        return search(*arguments, **keywords)

    def undo() -> None:
        if _bootstrap._find_spec is find_spec:
            _bootstrap._find_spec = search

    _bootstrap._find_spec = find_spec
    return undo


def is_imported_elsewhere(name: str) -> bool:
    """Whether another thread is importing the module ``name``."""
    reference = _bootstrap._module_locks.get(name)
    lock = None if reference is None else reference()
    return getattr(lock, "owner", None) not in (None, threading.get_ident())


def is_initializing(spec: Any) -> bool:
    """Whether the code of the module of ``spec`` is still running."""
    return bool(getattr(spec, "_initializing", False))


def when_initialized(spec: Any, ready: Callable[[], None]) -> None:
    """Call ``ready`` once the code of the module of ``spec`` has run; not where it fails."""
    # The import machinery ends an import by setting `_initializing` to False; nothing else tells.
    plain = type(spec)
    if not hasattr(plain, "_initializing"):
        spec.__class__ = _watched(plain, ready)
    if not is_initializing(spec):  # its thread was done before we looked
        spec.__class__ = plain
        ready()


def _watched(plain: Any, ready: Callable[[], None]) -> type[ModuleSpec]:
    class Watched(plain):  # type: ignore[misc]
        @property
        def _initializing(self) -> bool:
            return bool(self.__dict__.get("_initializing", False))

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            self.__dict__["_initializing"] = value
            if not value:
                self.__class__ = plain
                if self.name in sys.modules:  # absent where the module's own code failed
                    ready()

    return Watched


# -- wrapt --------------------------------------------------------------------------------------------------


def wrapt_finder() -> Any:
    """wrapt's finder on `sys.meta_path`, or None."""
    return next((one for one in sys.meta_path if isinstance(one, wrapt.importer.ImportHookFinder)), None)


def unchained(loader: Any) -> Any:
    """The loader that wrapt's own stands for; others are returned as they are."""
    return loader.__wrapped__ if type(loader) is wrapt.importer._ImportHookChainedLoader else loader


def unregister_post_import_hook(hook: Callable[[Any], None], name: str) -> None:
    """Take a hook away that `wrapt.register_post_import_hook` was given and that has not been called."""
    with wrapt.importer._post_import_hooks_lock:
        hooks = wrapt.importer._post_import_hooks.get(name, [])
        if hook in hooks:
            hooks.remove(hook)
        if not hooks:
            wrapt.importer._post_import_hooks.pop(name, None)


def remove_wrapt_finder() -> bool:
    """Leave `sys.meta_path` without wrapt's finder; False where it has hooks of others to see to."""
    finder = wrapt_finder()
    with wrapt.importer._post_import_hooks_lock:
        if finder is None or wrapt.importer._post_import_hooks:
            return False
        sys.meta_path.remove(finder)
        wrapt.importer._post_import_hooks_init = False  # the next one to register brings it back
        return True


def runtime_context_class() -> type[Any] | None:
    """What `opentelemetry.context` keeps its current context by; None where a version keeps it elsewhere."""
    from opentelemetry import context

    try:
        from opentelemetry.context.context import _RuntimeContext
    except ImportError:
        return None
    is_there = isinstance(getattr(context, "_RUNTIME_CONTEXT", None), _RuntimeContext)
    return _RuntimeContext if is_there else None


def replace_runtime_context(replacement: Callable[[Any], Any]) -> None:
    """Put ``replacement(present one)`` in the place of what :func:`runtime_context_class` found."""
    from opentelemetry import context

    context._RUNTIME_CONTEXT = replacement(context._RUNTIME_CONTEXT)


# -- torch.compile ------------------------------------------------------------------------------------------


class TracedCode:
    """Which functions torch.compile has traced, as code of their own or within another function's.

    Known from the moment that this is made: what was compiled before may hold any function.

    :param earlier: torch.compile was reset, and so has forgotten what this has noted.
    """

    def __init__(self, earlier: TracedCode | None = None) -> None:
        guards, counters = sys.modules.get("torch._guards"), sys.modules.get("torch._dynamo.utils")
        context = getattr(guards, "TracingContext", None)
        frames = getattr(counters, "counters", {}).get("frames", {})
        # A counter of frames begun; Dynamo keeps it over a reset.
        self._is_complete = context is not None and (earlier is not None or not frames.get("total"))
        self._places: set[tuple[str, int, str]] = set()
        _tracing.record = self._places
        if context is not None and context.__init__ is not _begin_tracing:
            _tracing.begin = context.__init__
            context.__init__ = _begin_tracing

    def may_hold(self, function: Any) -> bool:
        """Whether compiled code may have the body of ``function``, or of what stands for it, in it."""
        if not isinstance(function, types.FunctionType) or not self._is_complete:
            return True
        return _place(function.__code__) in self._places


def _place(code: types.CodeType) -> tuple[str, int, str]:
    """What a function's code has in common with that of a woven function in its place."""
    return code.co_filename, code.co_firstlineno, code.co_name


class _tracing:  # noqa: N801  a namespace
    begin: Any = None
    record: set[tuple[str, int, str]]


class _NotedCode(list[Any]):
    def append(self, code: types.CodeType) -> None:
        _tracing.record.add(_place(code))
        super().append(code)


def _begin_tracing(context: Any, *arguments: Any, **keywords: Any) -> None:
    _tracing.begin(context, *arguments, **keywords)
    context.traced_code = _NotedCode(context.traced_code)
