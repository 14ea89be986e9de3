"""The contract of an engine's room: which functions play which roles, and how to read their arguments.

An engine is one :class:`Engine`, found by the entry-point group ``sgl_aspects.engines`` (name → object). It
names everything as text: reading it imports nothing of the engine. The observers of
:mod:`sgl_aspects.tracing.observers` are written against roles ("run_batch") and nouns ("batch"), and report
to the trackers of :mod:`sgl_aspects.tracing.lifecycle`; they fit every engine that has a room. A room adds
observers of its own for what generic ones cannot read (``Engine.observers``).
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeAlias

from sgl_aspects.errors import ConfigError
from sgl_aspects.generated import execute

logger = logging.getLogger("sgl_aspects")

#: ``(args, kwargs, result=None)`` → one value of a call: its arguments as the caller wrote them, and its
#: result, which on entry is None.
CallReader: TypeAlias = Callable[..., Any]
AttributeReader: TypeAlias = Callable[[Any], Any]
ValuesReader: TypeAlias = Callable[[Any], Sequence[Any]]

#: The entry-point group by which packages add engines.
GROUP = "sgl_aspects.engines"


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

    ``parameters``: the nouns of its parameters, in order, ``self`` included; the engine's own name for one
    follows a colon (``"state:request_state"``) if it differs. ``reads``: nouns that are not simply a
    parameter, each with its reader of the whole call. ``required``: without it the engine's requests or steps
    cannot be traced; a version that lacks it is an error.
    """

    targets: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    reads: Mapping[str, CallReader] = field(default_factory=dict)
    required: bool = False

    def __post_init__(self) -> None:
        given: Any = self.targets
        if isinstance(given, str):  # a string would be one target per letter
            object.__setattr__(self, "targets", (given,))

    def reader(self, noun: str) -> CallReader:
        """Read a noun from a call; None if the role does not have it or the call leaves it out."""
        if noun in self.reads:
            return self.reads[noun]
        nouns = [parameter.partition(":")[0] for parameter in self.parameters]
        if noun not in nouns:
            return _no_noun
        position = nouns.index(noun)
        name = self.parameters[position].partition(":")[2] or noun

        def read(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Any:
            return args[position] if position < len(args) else kwargs.get(name)

        return read


@dataclass(frozen=True)
class Engine:
    """One engine: its provider name for spans, its roles, and the attributes of its nouns.

    ``attributes`` maps ``"noun.attribute"`` to an attribute path (``"sampling_params.top_p"``) or to a
    function of the object. Attributes that an engine or a version lacks are left out, or read as None.
    ``observers``: observations of the room's own, beside the generic ones: ``(trackers) -> observations``.
    ``outcomes``: the engine's reasons why a request ended, if they are not the usual ones: ``"length"``
    (finished), ``"stop"`` (stopped), ``"abort"`` (aborted), ``"error"`` (failed).
    """

    name: str
    provider_name: str
    roles: Mapping[str, Role]
    attributes: Mapping[str, str | AttributeReader] = field(default_factory=dict)
    observers: Callable[[Any], Iterable[Any]] | None = None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (self.name, self.provider_name):
            if not (isinstance(name, str) and name):
                raise ConfigError(f"engine {self.name!r}: its names must be non-empty texts, not {name!r}")
        if not isinstance(self.roles, Mapping):
            raise ConfigError(f"engine {self.name!r}: roles = {self.roles!r}: write {{name: Role(...)}}")
        for name, role in self.roles.items():
            if not isinstance(role, Role):
                raise ConfigError(f"engine {self.name!r}: role {name!r} is {role!r}: write Role((target,))")

    def outcome(self, reason: str) -> Outcome:
        """Return how a request ended, by the engine's reason: ``outcomes``, else the usual words."""
        return self.outcomes.get(reason) or _OUTCOMES.get(reason, Outcome.FINISHED)

    def position(self, role: str, noun: str) -> int:
        """Return a noun's index among a call's positional arguments; beyond any if it is not positional.

        For calls of each step: ``args[position]`` if ``args`` is that long, else ``call_reader``.
        """
        found = self.roles.get(role)
        nouns = [name.partition(":")[0] for name in found.parameters] if found is not None else []
        return nouns.index(noun) if noun in nouns else sys.maxsize

    def call_reader(self, role: str, noun: str) -> CallReader:
        """Return a reader of a noun from calls of the function in ``role``; None if there is neither."""
        found = self.roles.get(role)
        return _no_noun if found is None else found.reader(noun)

    def reader(self, name: str, usual: str | AttributeReader | None = None) -> AttributeReader:
        """Return a reader of ``"noun.attribute"`` from a noun's object; it returns None for a missing
        attribute.

        ``usual``: how to read it unless the room defines it.
        """
        source = self.attributes.get(name, usual or _nothing)
        read: AttributeReader = _make_reader("{}", [source], _nothing)
        return read

    def values_reader(self, noun: str, names: Sequence[str]) -> ValuesReader:
        """Return a reader of several attributes of a noun's object, in order; None for missing ones."""
        each = [self.reader(f"{noun}.{name}") for name in names]
        sources = [self.attributes.get(f"{noun}.{name}", _nothing) for name in names]
        otherwise: ValuesReader = lambda subject: [read(subject) for read in each]  # noqa: E731
        read_all: ValuesReader = _make_reader("{}, " * len(names), sources, otherwise)
        return read_all


@functools.cache  # called with each forward pass
def platform_of(device: str) -> Any:
    """Return the platform of a device by PyTorch's name; importing it imports torch."""
    from sgl_aspects.engines import device as devices

    return devices.platform_of(device)


def find_engines() -> tuple[Engine, ...]:
    """Return every engine that has a room: the built-in ones, then those of installed packages, by name.

    An entry point that fails, is not an :class:`Engine`, or takes an existing name is logged and left out.
    """
    from sgl_aspects.engines import BUILT_IN

    found = {engine.name: engine for engine in BUILT_IN}
    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        where = f"entry point {point.name!r} of {GROUP} ({point.value}, {_distribution(point)})"
        try:
            engine = point.load()
            _check(engine, found)
        except KeyboardInterrupt:
            raise
        except ConfigError as error:
            logger.error("%s is left out; the other engines are traced: %s", where, error)
        except BaseException:  # any error of a package, which must not affect the other engines
            logger.exception("%s failed; the other engines are traced", where)
        else:
            found[engine.name] = engine
    return tuple(found.values())


def _check(engine: Any, found: Mapping[str, Engine]) -> None:
    if not isinstance(engine, Engine):
        raise ConfigError(f"it is {engine!r} ({type(engine).__name__}): name an Engine object")
    if engine.name in found:
        raise ConfigError(f"there is an engine named {engine.name!r} already: choose another name")


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"


_SOURCE = """
def read(subject):
    try:
        return {}
    except AttributeError:
        return otherwise(subject)
"""


def _make_reader(form: str, sources: Sequence[str | AttributeReader], otherwise: AttributeReader) -> Any:
    """Generate a function that reads all of them in one expression: it is called with each step."""
    known: dict[str, Any] = {"otherwise": otherwise}
    terms = []
    for number, source in enumerate(sources):
        if isinstance(source, str):
            terms.append(f"subject.{source}" if source else "subject")
        else:
            known[f"get_{number}"] = source
            terms.append(f"get_{number}(subject)")
    return execute(_SOURCE.format(form.format(*terms)), "attribute reader", known).pop("read")


def _no_noun(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> None:
    return None


def _nothing(subject: Any) -> None:
    return None
