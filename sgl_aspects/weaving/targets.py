"""Targets: strings that name the functions of a hook.

    pkg.mod:Class.method          the canonical form: module, colon, attribute path
    pkg.mod.Class.method          SGLang's form: the end of the module is found as modules load
    pkg.models.**:*Model.forward  `*` within a segment, `**` over any number of module segments
    pkg.mod:Class+.method         the class and all its subclasses
    pkg.old:f | pkg.new:f         alternates: the first one that exists wins

Parsing a target imports nothing and inspects no module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from sgl_aspects.errors import TargetError

_FORMS = "write 'pkg.mod:Class.method' or 'pkg.mod.Class.method'"


class Alternate(NamedTuple):
    """One reading of a target: a module (or a pattern over modules) and an attribute path in it.

    For the dotted form ``module`` is None and ``path`` holds all segments.
    """

    module: str | None
    path: tuple[str, ...]
    text: str

    @property
    def has_module_pattern(self) -> bool:
        return self.module is not None and "*" in self.module

    @property
    def has_family(self) -> bool:
        """Return whether it names a class with its subclasses, which may be defined in any module."""
        return "+" in self.text

    def attribute_path(self, module_name: str) -> tuple[str, ...] | None:
        """Return the attribute path to look up in ``module_name``; None if this names another module."""
        if self.module is None:
            parts = module_name.split(".")
            if len(parts) < len(self.path) and list(self.path[: len(parts)]) == parts:
                return self.path[len(parts) :]
            return None
        if self.has_module_pattern:
            return self.path if names_module(self.module, module_name) else None
        return self.path if module_name == self.module else None

    def names_class(self, module_name: str, qualname: str) -> bool:
        """Return whether the pattern names an attribute of this class."""
        path, names = self.attribute_path(module_name), qualname.split(".")
        owners = (path or ())[: len(names)]
        if path is None or len(owners) < len(names) or len(path) == len(owners):
            return False
        return all(segment_regex(segment).fullmatch(name) for segment, name in zip(owners, names))

    @property
    def module_names(self) -> tuple[str, ...]:
        """Every plain module name that this alternate may be found in; none for a pattern."""
        if self.module is None:
            return tuple(accumulate(self.path[:-1], "{}.{}".format))
        return () if "*" in self.module else (self.module,)


class Target:
    """A parsed target: its alternates, best first.

    :ivar module_names: every plain module name that it may be found in.
    :ivar module_patterns: the module patterns of its other alternates.
    """

    __slots__ = ("alternates", "module_names", "module_patterns")

    def __init__(self, alternates: tuple[Alternate, ...]) -> None:
        self.alternates = alternates
        names = [alternate.module_names for alternate in alternates]
        self.module_names = names[0] if len(names) == 1 else tuple(dict.fromkeys(chain.from_iterable(names)))
        self.module_patterns = tuple(one.module or "" for one in alternates if one.has_module_pattern)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Target) and self.alternates == other.alternates

    def __hash__(self) -> int:
        return hash(self.alternates)

    def __repr__(self) -> str:
        return f"Target({self})"

    def __str__(self) -> str:
        return " | ".join(alternate.text for alternate in self.alternates)

    def attribute_paths(self, module_name: str) -> list[tuple[str, ...]]:
        """Return the attribute paths to look up in ``module_name``, best first; empty for another module."""
        paths = [alternate.attribute_path(module_name) for alternate in self.alternates]
        return [path for path in paths if path is not None]

    @classmethod
    def parse(cls, target: str | Iterable[str] | Target) -> Target:
        """Parse ``target``: a string with ``|`` between alternates, or several strings.

        Raises :class:`TargetError`, which names the string and the fault.
        """
        if isinstance(target, Target):
            return target
        if isinstance(target, str):
            return _parse(target)
        texts = tuple(target) if isinstance(target, Iterable) else ()
        if not texts or not all(isinstance(text, str) for text in texts):
            raise TargetError(f"target {target!r} is neither a text nor several texts; {_FORMS}")
        return cls(tuple(alternate for text in texts for alternate in _parse(text).alternates))


@lru_cache(maxsize=4096)
def _parse(text: str) -> Target:
    return Target(tuple([_parse_alternate(part.strip(), text) for part in text.split("|")]))


def _parse_alternate(text: str, whole: str) -> Alternate:
    module, colon, attributes = text.partition(":")
    if colon and all(map(str.isidentifier, text.replace(":", ".", 1).split("."))):  # the common case
        return Alternate(module, tuple(attributes.split(".")), text)
    if not colon:
        segments = tuple(text.split("."))
        if len(segments) < 2:
            raise TargetError(f"target {whole!r}: {text!r} has no module; {_FORMS}")
        if "*" in text or "+" in text:
            raise TargetError(f"target {whole!r}: wildcards need the colon form, 'pkg.**:Class.method'")
        _check_segments(segments, whole, pattern=False)
        return Alternate(None, segments, text)
    _check_segments(tuple(module.split(".")), whole, pattern=True, across=True)
    path = names = tuple(attributes.split("."))
    if "+" in attributes:
        names = tuple(segment.removesuffix("+") for segment in path)
    _check_segments(names, whole, pattern=True)
    if path[-1] != names[-1]:
        raise TargetError(f"target {whole!r}: '+' marks a class with its subclasses; add a method after it")
    return Alternate(module, path, text)


def _check_segments(segments: tuple[str, ...], whole: str, *, pattern: bool, across: bool = False) -> None:
    if all(map(str.isidentifier, segments)):
        return
    for segment in segments:
        name = segment.replace("*", "x") if pattern else segment
        if across and segment == "**":
            continue
        if "**" in segment:
            raise TargetError(f"target {whole!r}: '**' stands alone between dots of the module part")
        if not name.isidentifier():
            fault = f"{segment!r} is not an identifier" if segment else "a name is missing"
            raise TargetError(f"target {whole!r}: {fault}; {_FORMS}")


def stem(pattern: str) -> str:
    """Return the beginning of the names of all modules that ``pattern`` covers."""
    return pattern.partition("*")[0].rstrip(".")


def names_module(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` covers the module ``name``."""
    return _module_regex(pattern).fullmatch(name) is not None


@lru_cache(maxsize=1024)
def _module_regex(pattern: str) -> re.Pattern[str]:
    # "a.**.b" also covers "a.b": `**` matches any number of segments, including none.
    expression = re.escape(pattern).replace(r"\*\*\.", r"(?:[^.]+\.)*").replace(r"\.\*\*", r"(?:\.[^.]+)*")
    return re.compile(expression.replace(r"\*\*", r".*").replace(r"\*", r"[^.]*"))


@lru_cache(maxsize=1024)
def segment_regex(segment: str) -> re.Pattern[str]:
    """Return the expression that must match an attribute name in full for ``segment``."""
    return re.compile(re.escape(segment.removesuffix("+")).replace(r"\*", ".*"))
