"""An engine's integration: which functions play which roles, and how to read their arguments.

An engine is one :class:`Engine`, found by the entry-point group ``sgl_aspects.engines`` (name → object). It
names functions as text: reading it imports nothing of the engine. The names of roles, arguments and
attributes are those of :mod:`.contract`. The observers of :mod:`sgl_aspects.tracing.observers` are written
against them, and fit every engine that has an integration.
"""

from __future__ import annotations

import enum
import importlib.util
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from sgl_aspects.engines.contract import ROLES, Observation, check_argument, check_attribute, check_role
from sgl_aspects.errors import ConfigError

#: ``(args, kwargs, result=None)`` → one value of a call: its arguments as the caller wrote them, and its
#: result, which on entry is None.
CallReader: TypeAlias = Callable[..., Any]
AttributeReader: TypeAlias = Callable[[Any], Any]
ValuesReader: TypeAlias = Callable[[Any], Sequence[Any]]

#: How the attributes of most engines are read, unless an integration defines it.
_USUAL: Mapping[str, str | AttributeReader] = {
    "request.is_single": lambda request: True,
    "http.headers": "headers",
}


class Outcome(str, enum.Enum):
    """How a request ended, in any engine's terms.

    FINISHED: at its length limit. STOPPED: by a stop token or text. ABORTED: by its caller or the server.
    FAILED: the engine could not answer it.
    """

    FINISHED = "finished"
    STOPPED = "stopped"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def problem(self) -> str:
        """Return its ``error.type``; "" if there is an answer."""
        return _PROBLEMS.get(self, "")


_PROBLEMS = {Outcome.ABORTED: "abort", Outcome.FAILED: "error"}
#: Reasons that most engines have from OpenAI's interface.
_OUTCOMES = {
    "length": Outcome.FINISHED,
    "stop": Outcome.STOPPED,
    "abort": Outcome.ABORTED,
    "error": Outcome.FAILED,
}


@dataclass(frozen=True)
class Role:
    """A function of the engine, by its target (alternates for its versions: the first that exists).

    ``parameters``: the arguments that its parameters are, in order, ``self`` included; ``"_"`` for one that
    no observer reads, and ``"state:request_state"`` where the engine's name differs. ``reads``: arguments
    that are not simply a parameter, each with its reader of the whole call. ``required``: without it the
    engine's requests or steps cannot be traced; a version that lacks it is an error. ``package``: of a
    library's function, the engine's package: where it is not installed, others that call it pay for no hook.
    """

    targets: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    reads: Mapping[str, CallReader] = field(default_factory=dict)
    required: bool = False
    package: str = ""

    def __post_init__(self) -> None:
        given: Any = self.targets
        if isinstance(given, str):  # a string would be one target per letter
            object.__setattr__(self, "targets", (given,))

    @property
    def arguments(self) -> list[str]:
        """The arguments that can be read of its calls."""
        return [name for name in (*self._positions(), *self.reads) if name != "_"]

    def position(self, argument: str) -> int:
        """Return an argument's index among the positional ones; beyond any if it has none."""
        positions = self._positions()
        return positions.index(argument) if argument in positions else sys.maxsize

    def reader(self, argument: str) -> CallReader:
        """Read an argument of a call; None if the role does not have it or the call leaves it out."""
        if argument in self.reads:
            return self.reads[argument]
        position = self.position(argument)
        if position == sys.maxsize:
            return _no_argument
        return parameter(position, self.parameters[position].partition(":")[2] or argument)

    def _positions(self) -> list[str]:
        return [parameter.partition(":")[0] for parameter in self.parameters]


@dataclass(frozen=True)
class Repeats:
    """How a batch shows that it only decodes the requests of the one before.

    For engines whose batch is a new object in each step: the compiled step path compares these attributes
    instead of calling ``batch.summary``.

    ``of``: the batch's attribute that has ``ids``, the list of the ids of its requests that are not new;
    ``count``: the batch's attribute with its number of tokens, then one for each request, and its drafts.
    ``unless``: a dictionary of the integration's; while it is filled, a batch is read in full.
    """

    of: str
    ids: str
    count: str
    unless: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Drafts:
    """Where the compiled step path finds a batch's drafts, instead of calling the integration's functions.

    Before a result is processed, in the order of ``repeats.ids``: ``of``, the batch's attribute with the
    tokens drafted for each request, by its id: they are among the batch's. ``rows``: the result's with the
    lists of tokens, the accepted ones and one more; ``row_of``: the index of each request there.
    Or afterwards: ``each``, the result's with the list of accepted tokens of each request, None without
    drafts; ``width``: that with the number of tokens drafted for each, and one.
    ``unless``: while the batch or the result has this attribute, they are read in Python.
    """

    of: str = ""
    rows: str = ""
    row_of: str = ""
    each: str = ""
    width: str = ""
    unless: str = ""


@dataclass(frozen=True)
class Engine:
    """One engine: its provider name for spans, its roles, and the attributes of its objects.

    ``attributes`` maps ``"batch.mode"`` to an attribute path (``"sampling_params.top_p"``) or to a function
    of the object. What an engine or a version lacks is left out, or read as None.
    ``observers``: the integration's own observations, beside the generic ones: ``(lifecycle) ->
    observations``; ``own_roles``: roles for them, under names of their own.
    ``outcomes``: the engine's reasons why a request ended, if they are not the usual ones: ``"length"``
    (finished), ``"stop"`` (stopped), ``"abort"`` (aborted), ``"error"`` (failed).
    ``repeats``: how a decode step is recognized cheaply; without it ``batch.summary`` or ``batch.mode`` and
    ``batch.reqs`` are read in each step. ``drafts``: likewise of steps with speculation.
    """

    name: str
    provider_name: str
    roles: Mapping[str, Role]
    attributes: Mapping[str, str | AttributeReader] = field(default_factory=dict)
    observers: Callable[[Lifecycle], Iterable[Observation]] | None = None
    own_roles: Mapping[str, Role] = field(default_factory=dict)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    repeats: Repeats | None = None
    drafts: Drafts = field(default_factory=Drafts)

    def __post_init__(self) -> None:
        for name in (self.name, self.provider_name):
            if not (isinstance(name, str) and name):
                raise ConfigError(f"engine {self.name!r}: its names must be non-empty texts, not {name!r}")
        for roles in (self.roles, self.own_roles):
            if not isinstance(roles, Mapping):
                raise ConfigError(f"engine {self.name!r}: roles = {roles!r}: write {{name: Role(...)}}")
            for name, role in roles.items():
                if not isinstance(role, Role):
                    raise ConfigError(
                        f"engine {self.name!r}: role {name!r} is {role!r}: write Role((target,))"
                    )
        try:
            self._check_names()
        except ConfigError as error:
            raise ConfigError(f"engine {self.name!r}: {error}") from None

    @property
    def every_role(self) -> dict[str, Role]:
        """All of its roles, its own ones included."""
        return {**self.roles, **self.own_roles}

    def outcome(self, reason: str) -> Outcome:
        """Return how a request ended, by the engine's reason: ``outcomes``, else the usual words."""
        return self.outcomes.get(reason) or _OUTCOMES.get(reason, Outcome.FINISHED)

    def has(self, name: str) -> bool:
        """Return whether the integration defines how to read ``"kind.attribute"``."""
        check_attribute(name)
        return name in self.attributes

    def position(self, role: str, argument: str) -> int:
        """Return an argument's index in the calls of a role; beyond any if it is not positional.

        For calls of each step: ``args[position]`` if ``args`` is that long, else ``call_reader``.
        """
        return self._role(role, argument).position(argument)

    def call_reader(self, role: str, argument: str) -> CallReader:
        """Return a reader of an argument from calls of the function in ``role``; it returns None where the
        engine has no such function or argument.
        """
        return self._role(role, argument).reader(argument)

    def reader(self, name: str) -> AttributeReader:
        """Return a reader of ``"kind.attribute"`` from an object of that kind; it returns None for a missing
        attribute.
        """
        get = _getter(self._source(name))

        def read(subject: Any) -> Any:
            try:
                return get(subject)
            except AttributeError:
                return None

        return read

    def values_reader(self, kind: str, names: Sequence[str]) -> ValuesReader:
        """Return a reader of several attributes of a kind of object, in order; None for missing ones."""
        sources = [self._source(f"{kind}.{name}") for name in names]
        getters = [_getter(source) for source in sources]
        readers = [self.reader(f"{kind}.{name}") for name in names]

        def read_all(subject: Any) -> Sequence[Any]:
            try:
                return [get(subject) for get in getters]
            except AttributeError:
                return [read(subject) for read in readers]

        return read_all

    def _source(self, name: str) -> str | AttributeReader:
        check_attribute(name)
        return self.attributes.get(name, _USUAL.get(name, _nothing))

    def _role(self, role: str, argument: str) -> Role:
        own = self.own_roles.get(role)
        if own is not None and argument in own.arguments:
            return own
        check_argument(role, argument)
        return self.roles.get(role, _ABSENT)

    def _check_names(self) -> None:
        for name, role in self.roles.items():
            check_role(name)
            for argument in role.arguments:
                check_argument(name, argument)
        for name in self.own_roles.keys() & ROLES.keys():
            raise ConfigError(f"own_roles: {name!r} is a role that other engines have, too: see roles")
        for name in self.attributes:
            check_attribute(name)
        if "receive_request" in self.roles and "request.rids" not in self.attributes:
            raise ConfigError(
                "receive_request: requests are told apart by 'request.rids': add it to the attributes"
            )


def is_at_hand(package: str) -> bool:
    """Return whether the package is loaded or can be; yes for ""."""
    return not package or package in sys.modules or importlib.util.find_spec(package) is not None


def parameter(position: int, name: str, of: AttributeReader | None = None) -> CallReader:
    """Return a reader of the parameter at this index (``self`` has 0); with ``of`` of what it returns."""

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Any:
        return args[position] if position < len(args) else kwargs.get(name)

    if of is None:
        return read
    return lambda args, kwargs, result=None: of(read(args, kwargs))


def returned(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Any:
    """Read what a call returned: a ``CallReader``."""
    return result


def shape_reader(position: int, attribute: str = "") -> CallReader:
    """Return a reader of the shape of a tensor, as in ``"16x576"``: the positional argument at this index, or
    an attribute of it. None where there is no tensor.
    """

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str | None:
        found = args[position] if position < len(args) else None
        shape = getattr(getattr(found, attribute, None) if attribute else found, "shape", None)
        return None if shape is None else "x".join(map(str, shape))

    return read


class TracedRequest(Protocol):
    """A request that the scheduler has: its open phase, and the one that follows its prompt."""

    phase: str
    after_prefill: str
    fed: int  # tokens of its prompt
    values: tuple[Any, ...]


class Requests(Protocol):
    """The requests of one scheduler, by id, and what can happen to them."""

    @property
    def requests(self) -> Mapping[str, TracedRequest]: ...

    def queued(self, rid: str) -> Any:
        """Open a request that the engine got, in the phase ``queue``."""

    def launched(self, request: Any, now: int) -> None:
        """Close the queue phase: the engine works on the prompt."""

    def prompt_done(self, rid: str, tokens: int, start_ns: int, problem: str) -> None:
        """End the prompt, which was fed to the model as a whole."""

    def begins_in(self, rid: str, phase: str, after_prefill: str = ...) -> None:
        """Relabel the queue phase: since it was queued the request has been in this phase."""

    def enter(self, rid: str, phase: str, problem: str = "", now: int = 0) -> None:
        """Change the open phase, which ended with ``problem`` if any."""

    def finished(
        self, rid: str, output_tokens: int | None, reason: str | None, problem: str = "", now: int = 0
    ) -> None:
        """Close the request, in any phase; no-op if it is unknown."""


class Calls(Protocol):
    """The part of :class:`sgl_aspects.tracing.lifecycle.CallTracker` that integrations use, by request id."""

    def sent_away(self, rid: str, scheduler: int) -> None: ...

    def add_times(self, rid: str, times: Sequence[float]) -> None: ...


class Lifecycle(Protocol):
    """The argument of ``Engine.observers``: :class:`sgl_aspects.tracing.lifecycle.Trackers`."""

    @property
    def engine(self) -> Engine: ...

    @property
    def calls(self) -> Calls: ...

    @property
    def requests(self) -> Requests: ...

    def is_recording(self) -> bool:
        """Return whether requests are recorded now."""

    def current_request(self) -> tuple[int, int, bool] | None:
        """Return trace id, span id and sampled flag of the request that the current span belongs to."""


def _getter(source: str | AttributeReader) -> AttributeReader:
    """Return a function that reads it, or raises ``AttributeError``."""
    if isinstance(source, str):
        return operator.attrgetter(source) if source else _itself
    return source


def _itself(subject: Any) -> Any:
    return subject


def _no_argument(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> None:
    return None


def _nothing(subject: Any) -> None:
    return None


_ABSENT = Role(())
