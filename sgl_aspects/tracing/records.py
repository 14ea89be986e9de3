"""The kinds of record that a traced process writes and the collector reads.

Ids are 64-bit numbers, unique in the run. A *root* is a span with a trace of its own (a request, a scheduler
step). In the process that received it, a request's root id is the span id of its span; any other process
gives the request a key of its own and records it once (``RequestSeen``), so that the engine's messages need
not carry ids. Times are nanoseconds: of the monotonic clock when written, of Unix time when read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

#: The error of a span whose process ended first.
UNFINISHED = "unfinished"

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
AttributeValue: TypeAlias = "str | bool | int | float | list[str] | list[int] | list[float] | None"


def error_type(error: BaseException | None) -> str:
    """Return ``error.type``: the exception's class, never its message, which may hold a prompt."""
    return "" if error is None else type(error).__qualname__


def encodable(value: Any) -> Any:
    """Return valid UTF-8, numbers of 64 bits, or lists of these, for an exporter.

    A value that it has no form for would cost it the whole batch.
    """
    kind = value.__class__
    if kind is str:
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if value is None or kind is float or kind is bool or (kind is int and -(1 << 63) <= value < 1 << 63):
        return value
    if kind is list or kind is tuple:
        return [encodable(str(each) if isinstance(each, (list, tuple)) else each) for each in value]
    return encodable(str(value))


class Latest(dict[_Key, _Value]):
    """What is known from the latest records, by key: beyond ``most`` entries the first is forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]


@dataclass(frozen=True, eq=False)
class SpanType:
    """A kind of span: its name, and the types of its attributes, in order.

    Any value may be None. ``object`` stands for a type that is known when the value is.
    """

    name: str
    attributes: Mapping[str, type] = field(default_factory=dict)


class RequestBegin(NamedTuple):
    """A request was received: the start of its root span and its trace."""

    span_id: int
    request_id: str
    start_ns: int
    trace_id: int
    parent_id: int
    sampled: bool
    trace_state: str
    remote: bool
    name: str
    attributes: dict[str, AttributeValue]


class RequestSent(NamedTuple):
    """The request is about to be sent to another process."""

    span_id: int


class RequestSeen(NamedTuple):
    """Another process got the request with this id; from here on its records call it ``key``.

    Requests that reuse an id are distinguished by time: it is the one open then, else the latest unclaimed
    one, whose caller had left.
    """

    key: int
    request_id: str
    time_ns: int


class SpanBegin(NamedTuple):
    """A span has begun: written for roots and long spans only, so that unfinished ones can be shown."""

    type: SpanType
    span_id: int
    root_id: int
    parent_id: int
    start_ns: int


class SpanEnd(NamedTuple):
    """A whole span. ``parent_id`` 0: it is a root. ``error``: the ``error.type``, "" for none.

    ``values`` are in the order of ``type.attributes``; None leaves an attribute out, and so does a list that
    ends before it. ``links`` are root ids or keys. ``span_id`` 0: not a span but figures alone,
    of a step that is not traced, or of a phase on another host.
    """

    type: SpanType
    span_id: int
    root_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    values: Sequence[AttributeValue] = ()
    error: str = ""
    links: Sequence[int] = ()


class RequestElsewhere(NamedTuple):
    """Replaces ``RequestSeen`` for a request that another host received and whose span context was sent
    along.
    """

    key: int
    trace_id: int
    span_id: int
    sampled: bool


class ProcessDescribed(NamedTuple):
    """Attributes of the writing process's resource, such as its rank and its server's model."""

    attributes: dict[str, AttributeValue]


#: The rarer records; spans are written separately (:mod:`.record.recorder`).
Event: TypeAlias = "RequestBegin | RequestSent | RequestSeen | RequestElsewhere | ProcessDescribed"
Record: TypeAlias = "Event | SpanBegin | SpanEnd"
