"""Targets that an engine's source defines: read from a wheel or a folder, without running anything.

A method counts if its class or one of the bases that can be followed through imports defines it.
"""

from __future__ import annotations

import ast
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sgl_aspects.engines.base import Engine
from sgl_aspects.errors import ConfigError


@dataclass(frozen=True)
class FoundRole:
    """A role in one version: the first of its targets that exists, or None."""

    role: str
    target: str | None
    alternates: tuple[str, ...]


class Source:
    """An engine's source: a wheel, or the folder that holds its package."""

    def __init__(self, path: str | Path) -> None:
        """:raises ConfigError: there is no such wheel or folder."""
        self.path = Path(path)
        if self.path.is_dir():
            self._archive = None
        elif zipfile.is_zipfile(self.path):
            self._archive = zipfile.ZipFile(self.path)
        else:
            raise ConfigError(f"{path} is neither a wheel nor a folder; name one that holds the engine")
        self.tree = lru_cache(maxsize=None)(self._parse)
        self.modules = tuple(self._modules())

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
        """Return whether ``"pkg.mod:Class.method"``, ``"pkg.mod:function"`` or a match of a pattern exists.

        ``"pkg.mod:Class+.method"``: the class or one that derives from it has the method.
        """
        module, _, path = target.partition(":")
        names = path.split(".")
        if names[0].endswith("+"):
            names[0] = names[0].removesuffix("+")
            return self._has(module, names, frozenset()) or self._subclass_has(module, names)
        if "*" not in target:
            return self._has(module, names, frozenset())
        fits = _expression(module).fullmatch
        return any(self._matches(name, names) for name in self.modules if fits(name))

    def _matches(self, module: str, names: list[str]) -> bool:
        """Return whether the module itself defines a class that matches the first name, with the last one in
        it.
        """
        text = self._read(module.replace(".", "/") + ".py")
        if text is None or names[-1].encode() not in text:
            return False
        tree, fits = self.tree(module), _expression(names[0]).fullmatch
        return tree is not None and any(
            fits(node.name) and any(_name_of(member) == names[-1] for member in _statements(node.body))
            for node in _statements(tree.body)
            if isinstance(node, ast.ClassDef)
        )

    def _subclass_has(self, module: str, names: list[str]) -> bool:
        """Return whether a class that derives from the first name, in any module, defines the last one
        itself.
        """
        root = self._origin(module, names[0])
        for other in self.modules:
            text = self._read(other.replace(".", "/") + ".py") or b""
            tree = self.tree(other) if names[-1].encode() in text else None
            for node in _statements(tree.body) if tree is not None else ():
                if (
                    isinstance(node, ast.ClassDef)
                    and any(_name_of(member) == names[-1] for member in _statements(node.body))
                    and self._derives(other, node, root, frozenset())
                ):
                    return True
        return False

    def _derives(
        self, module: str, node: ast.ClassDef, root: tuple[str, str], seen: frozenset[tuple[str, str]]
    ) -> bool:
        for base in node.bases:
            origin = self._origin(module, base.id) if isinstance(base, ast.Name) else ("", "")
            if origin == root:
                return True
            tree = self.tree(origin[0]) if origin not in seen else None
            for other in _statements(tree.body) if tree is not None else ():
                if (
                    isinstance(other, ast.ClassDef)
                    and other.name == origin[1]
                    and self._derives(origin[0], other, root, seen | {origin})
                ):
                    return True
        return False

    def _origin(self, module: str, name: str) -> tuple[str, str]:
        """Find the definition of the class ``name`` in ``module``, as far as imports can be followed."""
        seen: set[tuple[str, str]] = set()
        while (module, name) not in seen:
            seen.add((module, name))
            tree = self.tree(module)
            if tree is None or any(_name_of(node) == name for node in _statements(tree.body)):
                break
            module, name = _imports(tree).get(name, (module, name))
        return module, name

    def _has(self, module: str, names: list[str], seen: frozenset[tuple[str, str]]) -> bool:
        tree = self.tree(module)
        if tree is None or (module, names[0]) in seen:
            return False
        seen |= {(module, names[0])}
        for node in _statements(tree.body):
            if _name_of(node) != names[0]:
                continue
            if len(names) == 1:
                return True
            if isinstance(node, ast.ClassDef):
                return self._class_has(module, node, names[1], seen)
        # Not defined there, but imported from elsewhere under this name?
        origin = _imports(tree).get(names[0])
        return origin is not None and self._has(origin[0], [origin[1], *names[1:]], seen)

    def _class_has(
        self, module: str, node: ast.ClassDef, name: str, seen: frozenset[tuple[str, str]]
    ) -> bool:
        if any(_name_of(member) == name for member in _statements(node.body)):
            return True
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return any(self._has(module, [base, name], seen) for base in bases)

    def _parse(self, module: str) -> ast.Module | None:
        stem = module.replace(".", "/")
        for name in (f"{stem}.py", f"{stem}/__init__.py"):
            text = self._read(name)
            if text is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # in the engine's own spelling
                    return ast.parse(text)
        return None

    def _modules(self) -> Iterator[str]:
        names = self._archive.namelist() if self._archive is not None else self._files()
        for name in names:
            if name.endswith(".py"):
                yield name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def _files(self) -> Iterator[str]:
        for package in sorted(self.path.glob("*/__init__.py")):
            for file in sorted(package.parent.rglob("*.py")):
                yield file.relative_to(self.path).as_posix()

    def _read(self, name: str) -> bytes | None:
        if self._archive is None:
            file = self.path / name
            return file.read_bytes() if file.is_file() else None
        try:
            return self._archive.read(name)
        except KeyError:
            return None


def _expression(pattern: str) -> re.Pattern[str]:
    """Match a pattern: ``*`` stays within a segment, ``**`` spans any number of them."""
    return re.compile(re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))


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
