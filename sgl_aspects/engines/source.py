"""Targets that an engine's source defines: read from a wheel or a folder, without running anything.

A method counts if its class or one of the bases that can be followed through imports defines it.
"""

from __future__ import annotations

import ast
import re
import stat
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from sgl_aspects.engines.base import Engine
from sgl_aspects.errors import ConfigError

_LONGEST = 16 << 20  # bytes of one module
# What zipfile raises for a damaged or unusual archive.
_ZIP_ERRORS = (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class FoundRole:
    """A role in one version: the first of its targets that exists, or None."""

    role: str
    target: str | None
    alternates: tuple[str, ...]


class Definition(NamedTuple):
    """A function, class or other name that a module defines.

    :param path: the names that lead to it within its module, ``Class.method``.
    """

    module: str
    path: str
    node: ast.stmt

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"


class Source:
    """An engine's source: a wheel, or the folder that holds its package or module."""

    def __init__(self, path: str | Path) -> None:
        """:raises ConfigError: there is no such wheel or folder, or it is damaged."""
        self.path = Path(path)
        if self.path.is_dir():
            self._archive = None
        elif self.path.is_file() and zipfile.is_zipfile(self.path):
            try:
                self._archive = zipfile.ZipFile(self.path)
            except _ZIP_ERRORS as error:
                raise ConfigError(f"{path} cannot be read as a wheel ({error})") from error
        else:
            raise ConfigError(f"{path} is neither a wheel nor a folder; name one that holds the engine")
        self.tree = lru_cache(maxsize=None)(self._parse)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The names of all modules."""
        names = self._archive.namelist() if self._archive is not None else self._files()
        stems = (name.removesuffix(".py").removesuffix("/__init__") for name in names if name.endswith(".py"))
        return tuple(stem.replace("/", ".") for stem in stems)

    @property
    def version(self) -> str:
        """The version in a wheel's name; for a folder, the folder's name."""
        name = self.path.resolve().name
        parts = name.split("-")
        return parts[1] if self._archive is not None and len(parts) > 1 else name

    def find_roles(self, engine: Engine) -> Iterator[FoundRole]:
        """Yield every role of ``engine`` whose targets are in this package, in order."""
        packages = {name.partition(".")[0] for name in self.modules}
        for name, role in engine.every_role.items():
            if not any(re.split(r"[.:]", target)[0] in packages for target in role.targets):
                continue  # the HTTP server's, say
            found = next((target for target in role.targets if self.defines(target)), None)
            yield FoundRole(name, found, role.targets)

    def defines(self, target: str) -> bool:
        """Return whether the target, or a match of a pattern, exists."""
        return any(True for _ in self.find(target))

    def find(self, target: str) -> Iterator[Definition]:
        """Yield the definitions of ``"pkg.mod:Class.method"``, ``"pkg.mod:function"`` or a pattern's matches.

        ``"pkg.mod:Class+.method"``: of the class, and of those that derive from it. A method that a class
        inherits is the definition in its base.
        """
        module, _, path = target.partition(":")
        names = path.split(".")
        if names[0].endswith("+"):
            names[0] = names[0].removesuffix("+")
            yield from filter(None, [self._find(module, names, frozenset())])
            yield from self._in_subclasses(module, names)
        elif "*" not in target:
            yield from filter(None, [self._find(module, names, frozenset())])
        else:
            fits = _expression(module).fullmatch
            for name in filter(fits, self.modules):
                yield from self._matches(name, names)

    def moved(self, module: str, path: str) -> Definition | None:
        """Return the only definition of ``path`` in another module of the same package."""
        package = module.partition(".")[0]
        others = [name for name in self.modules if name.partition(".")[0] == package]
        found = [one for name in others for one in self._matches(name, path.split("."))]
        return found[0] if len(found) == 1 else None

    def _matches(self, module: str, names: list[str]) -> Iterator[Definition]:
        """Yield what the module itself defines under the names, which may have wildcards."""
        text = self._text(module) or b""
        plain = [name.encode() for name in names if "*" not in name]
        if all(name in text for name in plain) and (tree := self.tree(module)) is not None:
            yield from _defined(tree.body, module, names, "")

    def _in_subclasses(self, module: str, names: list[str]) -> Iterator[Definition]:
        """Yield the last name's definitions in classes of any module that derive from the first name."""
        root = self._origin(module, names[0])
        for other in self.modules:
            for found in self._matches(other, ["*", *names[1:]]):
                node = self._class(other, found.path.partition(".")[0])
                if node is not None and self._derives(other, node, root, frozenset()):
                    yield found

    def _derives(
        self, module: str, node: ast.ClassDef, root: tuple[str, str], seen: frozenset[tuple[str, str]]
    ) -> bool:
        for base in node.bases:
            origin = self._origin(module, base.id) if isinstance(base, ast.Name) else ("", "")
            if origin == root:
                return True
            other = self._class(*origin) if origin not in seen else None
            if other is not None and self._derives(origin[0], other, root, seen | {origin}):
                return True
        return False

    def _class(self, module: str, name: str) -> ast.ClassDef | None:
        tree = self.tree(module)
        nodes = _statements(tree.body) if tree is not None else ()
        classes = (node for node in nodes if isinstance(node, ast.ClassDef))
        return next((node for node in classes if node.name == name), None)

    def _origin(self, module: str, name: str) -> tuple[str, str]:
        """Find the definition of the class ``name`` in ``module``, as far as imports can be followed."""
        found = self._find(module, [name], frozenset())
        return (found.module, found.path) if found is not None else (module, name)

    def _find(self, module: str, names: list[str], seen: frozenset[tuple[str, str]]) -> Definition | None:
        tree = self.tree(module)
        if tree is None or (module, names[0]) in seen:
            return None
        seen |= {(module, names[0])}
        for node in _statements(tree.body):
            if _name_of(node) == names[0]:
                if len(names) == 1:
                    return Definition(module, names[0], node)
                if isinstance(node, ast.ClassDef):
                    return self._find_in_class(module, node, names[1], seen)
        # Not defined there, but imported from elsewhere under this name?
        origin = _imports(tree).get(names[0])
        return None if origin is None else self._find(origin[0], [origin[1], *names[1:]], seen)

    def _find_in_class(
        self, module: str, node: ast.ClassDef, name: str, seen: frozenset[tuple[str, str]]
    ) -> Definition | None:
        for member in _statements(node.body):
            if _name_of(member) == name:
                return Definition(module, f"{node.name}.{name}", member)
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        inherited = (self._find(module, [base, name], seen) for base in bases)
        return next(filter(None, inherited), None)

    def _parse(self, module: str) -> ast.Module | None:
        text = self._text(module)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in the engine's own spelling
            try:
                return None if text is None else ast.parse(text)
            except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
                what = str(error) or type(error).__name__
                raise ConfigError(
                    f"{self.path}: {module} cannot be parsed ({what}); where it is written for a newer "
                    "Python, run this with that one"
                ) from error

    def _text(self, module: str) -> bytes | None:
        stem = module.replace(".", "/")
        package = self._read(f"{stem}/__init__.py")
        return self._read(f"{stem}.py") if package is None else package

    def _files(self) -> Iterator[str]:
        for file in sorted(self.path.glob("*.py")):
            yield file.name
        for package in sorted(self.path.glob("*/__init__.py")):
            for file in sorted(package.parent.rglob("*.py")):
                yield file.relative_to(self.path).as_posix()

    def _read(self, name: str) -> bytes | None:
        try:
            if self._archive is None:
                status = (self.path / name).stat()
                size = status.st_size if stat.S_ISREG(status.st_mode) else None
            else:
                size = self._archive.getinfo(name).file_size
            if size is not None and size <= _LONGEST:
                file = self.path / name
                return file.read_bytes() if self._archive is None else self._archive.read(name)
        except (FileNotFoundError, NotADirectoryError, KeyError):
            return None
        except _ZIP_ERRORS as error:
            raise ConfigError(f"{self.path}: {name} cannot be read ({error})") from error
        raise ConfigError(f"{self.path}: {name} is not a file of at most {_LONGEST >> 20} MiB")


def _expression(pattern: str) -> re.Pattern[str]:
    """Match a pattern: ``*`` stays within a segment, ``**`` spans any number of them."""
    return re.compile(re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))


def _defined(body: list[ast.stmt], module: str, names: list[str], prefix: str) -> Iterator[Definition]:
    fits = _expression(names[0]).fullmatch
    for node in _statements(body):
        name = _name_of(node)
        if name is None or not fits(name):
            continue
        if len(names) == 1:
            yield Definition(module, prefix + name, node)
        elif isinstance(node, ast.ClassDef):
            yield from _defined(node.body, module, names[1:], f"{prefix}{name}.")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements that run when the body does, also inside ``if`` and ``try``."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(node, part, []))
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _statements(handler.body)


def _name_of(node: ast.stmt) -> str | None:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def _imports(tree: ast.Module) -> Mapping[str, tuple[str, str]]:
    """Names that the module imports from others: name -> (module, name there)."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in _statements(tree.body)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
