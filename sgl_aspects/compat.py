"""Private names of other packages, each used here alone; tests/test_compat.py fails when one has moved."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import logging
import opcode
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


# CPython 3.12 starts with some hundred frozen objects of its own; an engine's heap has many thousands.
_FROZEN_AT_START = 2_000


def is_heap_frozen() -> bool:
    """Return whether ``gc.freeze()`` was called. Counts the frozen objects one by one."""
    return gc.get_freeze_count() > _FROZEN_AT_START


def compiling_test(compiler: Any) -> Callable[[], bool]:
    """Return a test of whether torch.compile traces the caller, in one call of C where torch allows that.

    Every woven function calls it each time: two Python frames, as `torch.compiler.is_compiling` has, cost an
    engine's thread microseconds when its caches are cold.

    :param compiler: the module `torch.compiler`, with torch.compile loaded.
    :raises AttributeError: torch.compile is still being loaded.
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

    Torch's own function imports torch.compile's modules, which takes as long as importing torch.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class _Own(str):
    """A str subclass, so that torch.compile replaces calls of its C method only, not of every str."""


def _always() -> bool:
    return True


# -- frames -------------------------------------------------------------------------------------------------

HIDES_FRAMES = sys.version_info >= (3, 11) and sys.implementation.name == "cpython"


def hide_frame(code: types.CodeType, *lines: int) -> types.CodeType:
    """Return ``code`` with a frame that is invisible until a statement without effect on one of ``lines``.

    Until its instruction RESUME has run, CPython takes a frame for one that is not complete: tracebacks,
    `sys._getframe`, warnings and trace functions leave it out. RESUME is moved from the beginning to each
    of these, `pass` or a text, which compiles to one instruction NOP; a profiler sees the call begin there.
    Trace functions expect a line there and where the frame ends; what is before gets none, so a debugger does
    not stop at it. Code that has no such NOP is returned unchanged.
    """
    if not HIDES_FRAMES:
        return code
    nop, resume, *ends = (opcode.opmap[name] for name in ("NOP", "RESUME", "RETURN_VALUE", "RAISE_VARARGS"))
    instructions = bytearray(code.co_code)
    marked = [begin for begin, _, at in code.co_lines() if at in lines]
    begin = instructions[::2].index(resume) * 2
    if not marked or any(instructions[one] != nop for one in marked):
        return code
    instructions[begin : begin + 2] = nop, 0
    for one in marked:
        instructions[one : one + 2] = resume, 0
    # An entry for each instruction, as CPython's Objects/locations.md says: on the first line, or on none.
    # From Python 3.12 on handlers come after the first that shows the frame: what they call sees its line.
    lined = [2 * at >= marked[0] or one in (resume, *ends) for at, one in enumerate(instructions[::2])]
    table = [b"\xe8\0" if has_line else b"\xf8" for has_line in lined]
    return code.replace(co_code=bytes(instructions), co_linetable=b"".join(table))


# -- the import system --------------------------------------------------------------------------------------

_bootstrap: Any = importlib._bootstrap


def after_each_search(found: Callable[[ModuleSpec], None]) -> Callable[[], None]:
    """Call ``found`` with the spec of each module that is imported or reloaded; returns an undo function."""
    search = _bootstrap._find_spec

    @functools.wraps(search)
    def find_spec(name: str, path: Any, target: types.ModuleType | None = None) -> ModuleSpec | None:
        spec: ModuleSpec | None = search(name, path, target)
        if spec is not None:
            found(spec)
        return spec

    def undo() -> None:
        if _bootstrap._find_spec is find_spec:
            _bootstrap._find_spec = search

    _bootstrap._find_spec = find_spec
    return undo


def before_each_creation(begin: Callable[[ModuleSpec], None]) -> Callable[[], None]:
    """Call ``begin`` before `importlib.util.module_from_spec`; returns a function that undoes this."""
    make = importlib.util.module_from_spec

    @functools.wraps(make)
    def module_from_spec(spec: ModuleSpec) -> types.ModuleType:
        begin(spec)
        return make(spec)

    def undo() -> None:
        if importlib.util.module_from_spec is module_from_spec:
            importlib.util.module_from_spec = make

    importlib.util.module_from_spec = module_from_spec
    return undo


def is_initializing(spec: Any) -> bool:
    """Return whether the code of the module of ``spec`` is still running."""
    return bool(getattr(spec, "_initializing", False))


def when_initialized(spec: Any, ready: Callable[[], None]) -> None:
    """Call ``ready`` once the code of the module of ``spec`` has run; never if it fails."""
    # The import machinery ends an import by setting `_initializing` to False, which is the only sign of it.
    plain = type(spec)
    if not hasattr(plain, "_initializing"):
        spec.__class__ = _watched(plain, ready)
    if not is_initializing(spec):  # it ended before the class was changed
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
                if self.name in sys.modules:  # absent if the module's own code failed
                    ready()

    return Watched


# -- pytest -------------------------------------------------------------------------------------------------


def is_pytest_fixture(obj: Any) -> bool:
    """Return whether ``obj`` is what pytest collects as a fixture, and does not unless it has this type."""
    fixtures = sys.modules.get("_pytest.fixtures")
    return fixtures is not None and type(obj) is getattr(fixtures, "FixtureFunctionDefinition", None)


# -- OpenTelemetry ------------------------------------------------------------------------------------------


def runtime_context_class() -> type[Any] | None:
    """Return the class of `opentelemetry.context`'s storage; None if this version has another one."""
    from opentelemetry import context

    try:
        from opentelemetry.context.context import _RuntimeContext
    except ImportError:
        return None
    is_there = isinstance(getattr(context, "_RUNTIME_CONTEXT", None), _RuntimeContext)
    return _RuntimeContext if is_there else None


def replace_runtime_context(replacement: Callable[[Any], Any]) -> None:
    """Replace OpenTelemetry's context storage by ``replacement(present one)``."""
    from opentelemetry import context

    context._RUNTIME_CONTEXT = replacement(context._RUNTIME_CONTEXT)


def histogram_recorder(histogram: Any, attributes: Mapping[str, str]) -> Callable[[float], None]:
    """Return `histogram.record` with these attributes, which OpenTelemetry's SDK cleans and hashes at each
    call: that is nine tenths of its time. The amounts are finite and not negative.
    """
    record = functools.partial(histogram.record, attributes=attributes)
    try:
        from opentelemetry.sdk.metrics import AlwaysOnExemplarFilter
        from opentelemetry.sdk.metrics._internal._view_instrument_match import _hash_attributes

        consumer, points = histogram._measurement_consumer, []
        for storage in consumer._reader_storages.values():
            for match in storage._get_or_init_view_instrument_match(histogram):
                # A reader of differences begins anew at each collection.
                if match._reset_on_collect or isinstance(
                    consumer._sdk_config.exemplar_filter, AlwaysOnExemplarFilter
                ):
                    return record
                with match._lock:
                    point = match._get_or_create_aggregation(_hash_attributes(attributes), attributes)
                points.append(point.aggregate)
    except (ImportError, AttributeError, TypeError) as error:
        logger.debug("this version of OpenTelemetry records one by one: %s", error)
        return record
    measurement = types.SimpleNamespace()

    def record_all(amount: float) -> None:
        measurement.value = amount
        for aggregate in points:
            aggregate(measurement, False)

    return record_all


def gather_under(reader: Any, lock: AbstractContextManager[Any], after: Callable[[], None]) -> None:
    """Have a metric reader gather its figures, and call ``after`` then, while it holds ``lock``."""
    gather = reader._collect

    def gathered(*args: Any, **options: Any) -> Any:
        with lock:
            found = gather(*args, **options)
            after()
            return found

    reader._collect = gathered


# -- torch.compile ------------------------------------------------------------------------------------------


def forget_compiled(functions: Iterable[Any]) -> None:
    """Reset torch.compile if compiled code may contain one of ``functions``.

    Dynamo caches the instructions of each function that it has traced, including inlined ones. A function and
    its woven replacement have the same file, line and name.
    """
    reset = vars(sys.modules["torch._dynamo"]).get("reset")
    if reset is None:  # it is being imported
        return
    cache = traced_code()
    known = None if cache is None else {_place(key[0]) for key in cache.copy() if type(key) is tuple}
    for function in functions:
        plain = isinstance(function, types.FunctionType)
        if known is None or not plain or _place(function.__code__) in known:
            reset()
            if cache is not None:
                cache.clear()
            return


def traced_code() -> dict[Any, Any] | None:
    """Return Dynamo's cache of instructions, by (code, ...); None if this version of torch has none."""
    module = sys.modules.get("torch._dynamo.bytecode_transformation")
    cached = getattr(module, "_cached_cleaned_instructions", None)
    held = gc.get_referents(cached) if hasattr(cached, "cache_info") else ()
    attributes = getattr(cached, "__dict__", None)
    return next((one for one in held if type(one) is dict and one is not attributes), None)


def _place(code: types.CodeType) -> tuple[str, int, str]:
    return code.co_filename, code.co_firstlineno, code.co_name


def suppress_instrumentation() -> None:
    """Keep OpenTelemetry's instrumentations from tracing this thread, which exports spans."""
    context = importlib.import_module("opentelemetry.context")
    context.attach(context.set_value(context._SUPPRESS_INSTRUMENTATION_KEY, True))


class ProfilerEvent(NamedTuple):
    """An event of PyTorch's profiler, in nanoseconds of Unix time.

    ``kind``: "operator", "launch" (the host's call that gives the device work), "device" or "". A launch and
    what it launched have the same ``launch_id``; ``operator_id``: of an operator, or of the one it is for.
    """

    kind: str
    name: str
    start_ns: int
    duration_ns: int
    launch_id: int
    operator_id: int
    stream: int
    thread: int


_LAUNCHES = ("_runtime", "_driver")
_LAUNCH_NAMES = ("cuda", "cu", "hip")  # where this version of torch does not tell an event's kind
# What a device has beside its work.
_NO_WORK = frozenset(("cuda_sync", "cuda_event", "overhead"))


def profiler_is_running() -> bool:
    """Return whether PyTorch's profiler runs in this thread, of a process that has loaded it."""
    return bool(sys.modules["torch"]._C._autograd._profiler_enabled())


def name_module_calls(name_of: Callable[[Any], str]) -> Callable[[], None]:
    """Make each call of a PyTorch module a range of the profiler that runs in its thread, if one does.

    Returns a function that undoes it. Global module hooks would do harm here: torch.compile warns of them,
    and compiles again what was compiled without them. So would weaving it, which replaces the bound methods
    that compiled modules hold.
    """
    torch: Any = sys.modules["torch"]
    module_class, is_compiling = torch.nn.Module, torch.compiler.is_compiling
    original, open_range = module_class.__call__, torch._C._profiler._RecordFunctionFast
    is_over = False

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_over:  # the compiler reads this function, too
            return original(self, *args, **kwargs)
        with open_range(name_of(self)):
            return original(self, *args, **kwargs)

    def undo() -> None:
        nonlocal is_over
        is_over = True
        if module_class.__call__ is call:  # otherwise somebody else's function calls it
            module_class.__call__ = original

    module_class.__call__ = call
    return undo


def profiler_events(profile: Any) -> list[ProfilerEvent]:
    """Return the events of a ``torch.profiler.profile`` that was stopped.

    Its own ``events()`` takes ten times as long, in which an engine would wait.
    """
    return [_profiler_event(event) for event in profile.profiler.kineto_results.events()]


def _profiler_event(event: Any) -> ProfilerEvent:
    name, own, linked = event.name(), event.correlation_id(), event.linked_correlation_id()
    kind = event.activity_type() if hasattr(event, "activity_type") else ""
    if event.is_user_annotation() or kind in _NO_WORK:
        found = ""
    elif event.device_type().name != "CPU":
        found = "device"
    elif kind.endswith(_LAUNCHES) or (not kind and name.startswith(_LAUNCH_NAMES)):
        found = "launch"
    else:
        found = "operator" if kind in ("", "cpu_op") else ""
    launch_id, operator_id = (0, own) if found == "operator" else (own, linked)
    return ProfilerEvent(
        found,
        name,
        event.start_ns(),
        event.duration_ns(),
        launch_id,
        operator_id,
        event.device_resource_id(),
        event.start_thread_id(),
    )
