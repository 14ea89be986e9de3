"""Functions that a user declared for tracing: ``[[trace]]`` in `aspects.toml`, see config.py."""

from __future__ import annotations

import enum
import inspect
import logging
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from time import monotonic_ns
from typing import Any

from sgl_aspects.config import RESULT, DeclaredTrace
from sgl_aspects.tracing.context import OpenSpan, given, innermost, leave
from sgl_aspects.tracing.record.recorder import Recorder, SpanWriter, in_sample
from sgl_aspects.tracing.records import AttributeValue, SpanType, error_type
from sgl_aspects.weaving import argument_reader

logger = logging.getLogger(__name__)

_LONGEST_TEXT = 1024
_LONGEST_LIST = 256
# Cap on combinations of names that the program sets on the spans of one function: a ring defines each once.
_MOST_COMBINATIONS = 64
_PLAIN = (bool, int, float, str)

Reader = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]
SpanOf = Callable[[Any], "OpenSpan | None"]


class _Recording(threading.local):
    """Whether this thread writes a span: what the recorder itself calls (`json.dumps`) has none."""

    is_active = False


_recording = _Recording()


class FunctionObserver:
    """Observes the functions of one ``[[trace]]``: a span for each call.

    Its parent is the enclosing traced function, else the running scheduler step, else the request whose id
    the declaration names; without any, it is a root with a trace of its own. ``span_of``: returns the span of
    the request with an id.
    """

    def __init__(self, recorder: Recorder, declared: DeclaredTrace, span_of: SpanOf = lambda _: None) -> None:
        self._recorder, self._declared, self._span_of = recorder, declared, span_of
        self.__qualname__, self.__module__ = declared.name or str(declared.target), declared.where

    def bound_to(self, function: Callable[..., Any]) -> TracedFunction:
        """Return the observer for one function; raises :class:`HookError` if an attribute names no parameter
        of it.
        """
        readers = [_reader(function, path) for path in self._declared.attributes.values()]
        name = self._declared.name or getattr(function, "__qualname__", "") or str(self._declared.target)
        # Untyped: the type at the end of a path is unknown until it is read.
        type = SpanType(name, dict.fromkeys(self._declared.attributes, object))
        is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        traced = TracedFunction(self._recorder, type, self._declared.level, readers, is_generator)
        if self._declared.request:
            rid = _reader(function, self._declared.request)
            traced.request_of = lambda args, kwargs: self._span_of(rid(args, kwargs, None))
        return traced

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Never called: each function has an observer of its own."""
        raise NotImplementedError

    def exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        """Never called: see ``enter``."""
        raise NotImplementedError


class TracedFunction:
    """Records the calls of one function."""

    def __init__(
        self, recorder: Recorder, type: SpanType, level: int, readers: Sequence[Reader], is_generator: bool
    ) -> None:
        self._recorder, self._readers = recorder, readers
        self._level, self._type = level, type
        self._write = recorder.spans(type)
        self._writes_with: dict[tuple[str, ...], SpanWriter] = {}
        # Not current while a generator is suspended: its caller's spans are not its children.
        self._is_generator = is_generator
        #: Returns the span of the call's request, if the declaration names one.
        self.request_of: Callable[[tuple[Any, ...], dict[str, Any]], OpenSpan | None] = lambda *_: None

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        if recorder.level < self._level or _recording.is_active:
            return None
        outer, is_current = innermost(), not self._is_generator
        if outer is None:
            outer = self.request_of(args, kwargs)
            # Not current without a trace: the scheduler does not have the request's, and must not propagate
            # another.
            is_current = is_current and (outer is None or outer.trace is not None)
        root_id, parent_id = (0, 0) if outer is None else outer[:2]
        span_id, start_ns = recorder.new_id(), monotonic_ns()
        if not root_id:
            if not in_sample(span_id, recorder.sample):
                return None
            root_id = span_id
            _recording.is_active = True
            try:
                recorder.announce(self._type, span_id, root_id, 0, start_ns)
            finally:
                _recording.is_active = False
        opened = None
        if is_current:
            trace = None if outer is None else outer.trace
            opened = recorder.enter(self._type, span_id, root_id, parent_id, start_ns, trace)
            given[span_id] = {}
        return opened, root_id, parent_id, span_id, start_ns, args, kwargs

    def exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        opened, root_id, parent_id, span_id, start_ns, args, kwargs = token
        end_ns = monotonic_ns()
        if opened is not None:
            leave(opened)
        write, values = self._write, [_plain(read(args, kwargs, result)) for read in self._readers]
        if opened is not None and (more := given.pop(span_id, None)):
            write, values = self._with(more, values)
        if self._is_generator and isinstance(error, GeneratorExit):
            error = None  # closed by its consumer
        _recording.is_active = True
        try:
            write(span_id, root_id, parent_id, start_ns, end_ns, values, error_type(error))
        finally:
            _recording.is_active = False

    def _with(
        self, more: dict[str, Any], values: list[AttributeValue]
    ) -> tuple[SpanWriter, list[AttributeValue]]:
        """Return the writer and the values of a span on which the program has set ``more`` attributes."""
        names = tuple(map(str, more))
        write = self._writes_with.get(names)
        if write is None:
            if len(self._writes_with) >= _MOST_COMBINATIONS:
                return self._write, values
            types = {**self._type.attributes, **dict.fromkeys(names, object)}
            write = self._writes_with[names] = self._recorder.spans(SpanType(self._type.name, types))
        found = dict(zip(self._type.attributes, values)) | dict(zip(names, map(_plain, more.values())))
        return write, [*found.values()]


def _reader(function: Callable[..., Any], path: tuple[str, ...]) -> Reader:
    (first, *rest), shown = path, ".".join(path)
    argument = None if first == RESULT else argument_reader(_handed_on_to(function), first)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        found = result if argument is None else argument(args, kwargs)
        for name in rest:
            if found is None:
                return None
            found = _step_into(found, name, shown)
        return found

    return read


def _handed_on_to(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the innermost function that gets the arguments unchanged: unwraps ``*args, **kwargs`` wrappers.

    ``torch.inference_mode``, ``torch.no_grad`` and most decorators are such wrappers.
    """
    while isinstance(function, types.FunctionType) and hasattr(function, "__wrapped__"):
        kinds = [one.kind for one in inspect.signature(function, follow_wrapped=False).parameters.values()]
        if kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
            break
        function = function.__wrapped__
    return function


@lru_cache(maxsize=1024)
def _warn_of_missing(path: str, why: str) -> None:
    logger.warning("[[trace]]: %s is left out: %s", path, why)


def _step_into(subject: Any, name: str, path: str) -> Any:
    """Return an attribute, or an item of a mapping or a sequence; None if there is none."""
    try:
        if isinstance(subject, Mapping):
            return subject[name]
        return subject[int(name)] if name.isdecimal() else getattr(subject, name)
    except AttributeError as error:  # perhaps mistyped
        _warn_of_missing(path, str(error))
        return None
    except Exception:  # noqa: BLE001  a property of the engine's may raise anything
        return None


def _plain(value: Any) -> AttributeValue:
    """Return a value that a span can hold; None for any other: reading a tensor would wait for the device."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, str):
        return str(value[:_LONGEST_TEXT])
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)) and value and type(value[0]) in (int, float, str):
        kind, some = type(value[0]), value[:_LONGEST_LIST]
        return [item[:_LONGEST_TEXT] if kind is str else item for item in some if type(item) is kind]
    return None
