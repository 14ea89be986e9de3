"""Fingerprints of hooked functions: whether a hook fits another version of its target, from source alone."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile, zip_longest
from typing import NamedTuple

from sgl_aspects.engines.source import Definition, Source
from sgl_aspects.errors import ConfigError

_REPLACE = "replace"
# Parts of a syntax tree that say nothing about what the code does, or that not every version of Python has.
_IGNORED = {"type_comment", "type_params", "ctx", "kind", "returns", "annotation"}

_DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Change(str, Enum):
    """How a place differs between the version that was locked and another one."""

    UNCHANGED = "unchanged"
    BODY = "body changed"
    EXTENDED = "optional parameters added"
    SIGNATURE = "signature changed"
    MOVED = "moved"
    GONE = "gone"
    CONFLICT = "in conflict"


class Fingerprint(NamedTuple):
    """A definition: its parameters without annotations, and a hash of its code without docstrings."""

    signature: str
    digest: str

    @classmethod
    def of(cls, node: ast.stmt) -> Fingerprint:
        """Return the fingerprint of a function, a class or an assignment.

        :raises ConfigError: it is nested more deeply than Python recurses.
        """
        try:
            return cls._of(node)
        except RecursionError as error:
            raise ConfigError(f"line {node.lineno}: it is nested too deeply to be compared") from error

    @classmethod
    def _of(cls, node: ast.stmt) -> Fingerprint:
        signature = ""
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            awaited = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
            signature = f"{awaited}({', '.join(_parameters(node.args))})"
        elif isinstance(node, ast.ClassDef):
            signature = f"class ({', '.join(map(ast.unparse, node.bases))})"
        digest = hashlib.sha256("".join(_words(node)).encode()).hexdigest()
        return cls(signature, digest[:16])


@dataclass(frozen=True)
class LockedHook:
    """A hook, and what its target was when it was locked.

    :param places: for each place that the target names, its fingerprint.
    """

    target: str
    hook: str
    hook_type: str
    places: dict[str, Fingerprint] = field(default_factory=dict)


class Finding(NamedTuple):
    """The result for one place of one hook."""

    hook: LockedHook
    place: str
    change: Change
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """Return whether the hook needs its author: also for a replaced function that has other code now."""
        harmless = {Change.UNCHANGED}
        if self.hook.hook_type != _REPLACE:
            harmless |= {Change.BODY, Change.EXTENDED}
        return self.change not in harmless


def lock(target: str, hook: str, hook_type: str, source: Source) -> LockedHook:
    """Return the hook with the fingerprints of its target's places in ``source``; none if it is not there.

    :param target: as a hook names it: alternates between ``|``, patterns, SGLang's dotted form.
    """
    for alternate in _alternates(target):
        if found := list(_find(alternate, source)):
            places = {str(one) if _is_pattern(alternate) else alternate: one for one in found}
            return LockedHook(
                target, hook, hook_type, {place: Fingerprint.of(one.node) for place, one in places.items()}
            )
    return LockedHook(target, hook, hook_type)


def lint(hooks: Iterable[LockedHook], source: Source) -> Iterator[Finding]:
    """Compare each place of each hook with another version's source."""
    replaced: dict[str, LockedHook] = {}
    for hook in hooks:
        for place, locked in hook.places.items():
            if hook.hook_type == _REPLACE and (other := replaced.setdefault(place, hook)) is not hook:
                yield Finding(hook, place, Change.CONFLICT, f"{other.hook} replaces it, too")
                continue
            yield _compare(hook, place, locked, source)


def _compare(hook: LockedHook, place: str, locked: Fingerprint, source: Source) -> Finding:
    alternates = [place] if _is_pattern(hook.target) else [place, *_alternates(hook.target)]
    found = next((one for text in alternates for one in _find(text, source)), None)
    if found is None:
        moved = source.moved(*place.split(":")) if ":" in place else None
        change, detail = (Change.MOVED, f"to {moved}") if moved else (Change.GONE, "")
        return Finding(hook, place, change, detail)
    now = Fingerprint.of(found.node)
    if now.signature != locked.signature:
        change = Change.EXTENDED if _only_adds(locked.signature, now.signature) else Change.SIGNATURE
        return Finding(hook, place, change, f"{locked.signature} -> {now.signature}")
    return Finding(hook, place, Change.UNCHANGED if now.digest == locked.digest else Change.BODY)


def _alternates(target: str) -> list[str]:
    return [part.strip() for part in target.split("|")]


def _is_pattern(target: str) -> bool:
    return "*" in target or "+" in target


def _find(target: str, source: Source) -> Iterator[Definition]:
    """Find ``target`` also in the dotted form, whose module is the longest one that exists."""
    if ":" in target:
        yield from source.find(target)
        return
    words = target.split(".")
    for length in range(len(words) - 1, 0, -1):
        if source.tree(".".join(words[:length])) is not None:
            yield from source.find(f"{'.'.join(words[:length])}:{'.'.join(words[length:])}")
            return


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    for number, parameter in enumerate(positional):
        yield parameter.arg + ("=…" if number >= missing else "")
        if number + 1 == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg is not None:
        yield f"*{arguments.vararg.arg}"
    elif arguments.kwonlyargs:
        yield "*"
    for parameter, default in zip_longest(arguments.kwonlyargs, arguments.kw_defaults):
        yield parameter.arg + ("" if default is None else "=…")
    if arguments.kwarg is not None:
        yield f"**{arguments.kwarg.arg}"


def _only_adds(before: str, after: str) -> bool:
    """Return whether every call that fitted fits still, and finds its arguments at the same positions."""
    old, new = (signature.rstrip(")").partition("(")[2].split(", ") for signature in (before, after))
    added = [parameter for parameter in new if parameter not in old]
    positional = [*takewhile(lambda parameter: not parameter.startswith("*"), old)]
    return (
        before.partition("(")[0] == after.partition("(")[0]
        and set(old) <= set(new)
        and all(parameter == "*" or parameter.endswith("=…") for parameter in added)
        and new[: len(positional)] == positional
    )


def _words(node: ast.AST) -> Iterator[str]:
    """Yield the tree as text, alike on every version of Python."""
    yield type(node).__name__
    is_documented = isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
    for name, value in ast.iter_fields(node):
        if name in _IGNORED or value is None or value == []:
            continue
        yield f" {name}="
        values = value if isinstance(value, list) else [value]
        if is_documented and name == "body":
            values = values[1:]
        for one in values:
            if isinstance(one, ast.AST):
                yield from _words(one)
            else:
                yield repr(one)
        yield ";"
