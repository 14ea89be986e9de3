"""`aspects.toml`: hooks and traced functions declared without code.

    [[hook]]
    target = "pkg.mod:Class.method"          # or a list of alternates: the first that exists wins
    hook = "my_hooks:timed"                  # module:name
    type = "around"                          # before, after, around, replace, native, observe
    order = 0
    required = false

    [[trace]]                                # a span for each call, while tracing is on
    target = "pkg.mod:Class.method"
    name = "my step"                         # of the span; the function's own where it is left out
    level = 1                                # of detail at which it is recorded: 1 (always) to 4
    request = "task.req.rid"                 # the id of its request, where no span is open around it
    required = false
    [trace.attributes]                       # parameter names, or `result`, and what they lead to
    "batch.size" = "batch.reqs_info.size"
    "first.token" = "result.tokens.0"

Paths go over attributes, keys of mappings and indices of sequences; no code is ever evaluated.
The file is named by ``SGL_ASPECTS_CONFIG``; `sgl-aspects run --config FILE` sets it.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.weaving import HookType, Target, why_not_importable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VARIABLE = "SGL_ASPECTS_CONFIG"

RESULT = "result"
"""The start of an attribute path that reads the call's result."""

_HOOK_KEYS = ("target", "hook", "type", "order", "required")
_TRACE_KEYS = ("target", "name", "level", "request", "attributes", "required")
_TYPES = tuple(kind.value for kind in HookType)


@dataclass(frozen=True)
class DeclaredHook:
    """One ``[[hook]]``; ``hook`` is imported by :meth:`load`."""

    target: Target
    hook: str
    hook_type: HookType
    order: int
    required: bool
    where: str

    def load(self) -> Any:
        """Import the hook; an observer's class is instantiated.

        :raises ConfigError: its module or name does not exist.
        """
        module_name, _, path = self.hook.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
        except ImportError as error:
            reason = why_not_importable(Target.parse(self.hook)) or error
            raise ConfigError(f"{self.where}: hook {self.hook!r}: {reason}") from error
        for name in path.split("."):
            if not hasattr(found, name):
                close = ", ".join(difflib.get_close_matches(name, dir(found)))
                hint = f"; close names: {close}" if close else ""
                raise ConfigError(f"{self.where}: hook {self.hook!r}: {found!r} has no {name!r}{hint}")
            found = getattr(found, name)
        return found() if self.hook_type is HookType.OBSERVE and isinstance(found, type) else found


@dataclass(frozen=True)
class DeclaredTrace:
    """One ``[[trace]]``; ``attributes`` maps names of span attributes to the parts of their paths.

    ``request``: the path to the id of the call's request; empty if none is named.
    """

    target: Target
    name: str | None
    level: int
    request: tuple[str, ...]
    attributes: Mapping[str, tuple[str, ...]]
    required: bool
    where: str


@dataclass(frozen=True)
class Config:
    """The contents of a configuration file."""

    hooks: tuple[DeclaredHook, ...] = ()
    traces: tuple[DeclaredTrace, ...] = ()


def from_environment() -> Config:
    """Read the file named by ``SGL_ASPECTS_CONFIG``; an empty configuration if it is unset."""
    path = env.text(VARIABLE)
    return Config() if path is None else read(path)


def read(path: str | Path) -> Config:
    """Read and check a file.

    :raises ConfigError: names the file, the key, and the choices.
    """
    if Path(path).is_fifo():
        raise ConfigError(f"configuration {path} is a pipe, and each process reads it: name a file")
    try:
        with open(path, encoding="utf-8-sig") as file:
            document = tomllib.loads(file.read())
    except OSError as error:
        raise ConfigError(
            f"configuration {path}: {error.strerror or error}; name a file that exists"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"configuration {path} is not TOML: {error}") from error
    return parse(document, str(path))


def parse(document: Mapping[str, Any], path: str) -> Config:
    """Return the checked contents of ``path``; raises like :func:`read`."""
    _only(document, ("hook", "trace"), path)
    return Config(
        tuple(_hook(_Table(entry, where)) for entry, where in _entries(document, "hook", path)),
        tuple(_trace(_Table(entry, where)) for entry, where in _entries(document, "trace", path)),
    )


def _entries(document: Mapping[str, Any], key: str, path: str) -> list[tuple[Mapping[str, Any], str]]:
    entries = document.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{path}: {key}: write tables, each under [[{key}]]")
    return [(entry, f"{path}: {key} {number}") for number, entry in enumerate(entries, 1)]


def _only(table: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key!r}; choose from {', '.join(keys)}")


@dataclass(frozen=True)
class _Table:
    """One table of the file, read key by key; errors name the place."""

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, kind: type, default: Any, expected: str) -> Any:
        value = self.values.get(key, default)
        # In Python a bool is an int, but not in TOML.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key} = {value!r}: write {expected}")
        return value

    def target(self) -> Target:
        value = self.values.get("target")
        if not isinstance(value, (str, list)):
            raise ConfigError(
                f"{self.where}: target = {value!r}: write 'pkg.mod:Class.method' or a list of such"
            )
        try:
            return Target.parse(value)
        except ValueError as error:
            raise ConfigError(f"{self.where}: target: {error}") from error


def _hook(table: _Table) -> DeclaredHook:
    _only(table.values, _HOOK_KEYS, table.where)
    hook = table.get("hook", str, None, "the hook as 'module:name'")
    module, colon, name = hook.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise ConfigError(f"{table.where}: hook = {hook!r}: write the hook as 'module:name'")
    kind = table.values.get("type")
    if kind not in _TYPES:
        raise ConfigError(f"{table.where}: type = {kind!r}: choose one of {', '.join(_TYPES)}")
    return DeclaredHook(
        target=table.target(),
        hook=hook,
        hook_type=HookType(kind),
        order=table.get("order", int, 0, "a whole number"),
        required=table.get("required", bool, False, "true or false"),
        where=table.where,
    )


def _trace(table: _Table) -> DeclaredTrace:
    values, where = table.values, table.where
    _only(values, _TRACE_KEYS, where)
    name = table.get("name", str, "", "a text")
    if not name and "name" in values:
        raise ConfigError(f"{where}: name = '': write a text, or leave it out")
    level = table.get("level", int, 1, "1, 2, 3 or 4")
    if not 1 <= level <= 4:
        raise ConfigError(f"{where}: level = {level}: write 1, 2, 3 or 4")
    attributes = table.get("attributes", Mapping, {}, "a table [trace.attributes]")
    return DeclaredTrace(
        target=table.target(),
        name=name or None,
        level=level,
        request=_path("request", values["request"], where) if "request" in values else (),
        attributes={key: _path(key, value, f"{where}: attributes") for key, value in attributes.items()},
        required=table.get("required", bool, False, "true or false"),
        where=where,
    )


def _path(key: str, value: Any, where: str) -> tuple[str, ...]:
    parts = tuple(value.split(".")) if isinstance(value, str) else ()
    if not key or not parts or not parts[0].isidentifier():
        raise ConfigError(
            f"{where}: {key!r} = {value!r}: write a path such as 'batch.size', which begins with "
            f"the name of a parameter, or with {RESULT!r}"
        )
    for part in parts[1:]:
        if not part.isidentifier() and not part.isdecimal():
            raise ConfigError(
                f"{where}: {key!r} = {value!r}: {part!r} is neither a name nor an index; paths hold no code"
            )
    return parts
