"""What an engine's catalog is: which function plays which role, and where its objects keep what spans say.

Aspects are written against roles ("receive_request", "run_batch") and nouns ("request", "batch"), so they
fit every engine that has a catalog. A catalog names everything as text: reading it imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ArgumentReader = Callable[[tuple[Any, ...], dict[str, Any]], Any]
AttributeReader = Callable[[Any], Any]
ValuesReader = Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Role:
    """A function of the engine, by its target (alternates for its versions: the first that exists).

    ``parameters``: the nouns that its parameters stand for, in order, ``self`` included; the engine's own
    name for one goes after a colon (``"state:request_state"``) where it differs.
    """

    targets: tuple[str, ...]
    parameters: tuple[str, ...]

    def argument(self, noun: str) -> ArgumentReader:
        """Reads one parameter from a call's ``(args, kwargs)``; None where the call leaves it out."""
        nouns = [parameter.partition(":")[0] for parameter in self.parameters]
        position = nouns.index(noun)
        name = self.parameters[position].partition(":")[2] or noun

        def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args[position] if position < len(args) else kwargs.get(name)

        return read


@dataclass(frozen=True)
class Catalog:
    """One engine: its provider name for spans, its roles, and the attributes of its nouns.

    ``attributes`` maps ``"noun.attribute"`` to an attribute path (``"sampling_params.top_p"``) or to a
    function of the object. What an engine or a version does not have is left out, or reads as None.
    """

    engine: str
    provider_name: str
    roles: Mapping[str, Role]
    attributes: Mapping[str, str | AttributeReader] = field(default_factory=dict)

    def reader(self, name: str) -> AttributeReader:
        """Reads ``"noun.attribute"`` from a noun's object; None where the object does not have it."""
        source = self.attributes.get(name, _nothing)
        read: AttributeReader = _make_reader("{}", [source], _nothing)
        return read

    def values_reader(self, noun: str, names: Sequence[str]) -> ValuesReader:
        """Reads several attributes of a noun's object at once, in order; None for what it does not have."""
        each = [self.reader(f"{noun}.{name}") for name in names]
        sources = [self.attributes.get(f"{noun}.{name}", _nothing) for name in names]
        otherwise: ValuesReader = lambda subject: [read(subject) for read in each]  # noqa: E731
        read_all: ValuesReader = _make_reader("{}, " * len(names), sources, otherwise)
        return read_all


_SOURCE = """
def read(subject):
    try:
        return {}
    except AttributeError:
        return otherwise(subject)
"""


def _make_reader(form: str, sources: Sequence[str | AttributeReader], otherwise: AttributeReader) -> Any:
    """One function that reads all of them in one expression: it is called with each step of an engine."""
    known: dict[str, Any] = {"otherwise": otherwise}
    terms = []
    for number, source in enumerate(sources):
        if isinstance(source, str):
            terms.append(f"subject.{source}")
        else:
            known[f"get_{number}"] = source
            terms.append(f"get_{number}(subject)")
    exec(_SOURCE.format(form.format(*terms)), known)
    return known["read"]


def _nothing(subject: Any) -> None:
    return None
