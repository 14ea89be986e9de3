"""The tree as text: its modules, and what each of them imports and writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "sgl_aspects"


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package with its room; the links lead into platforms/ and runtime/."""
    for room in ("platforms", "runtime"):
        for path in (ROOT / room).rglob("*.py"):
            yield room, path
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE)
        if relative.parts[0] not in ("platforms", "runtime"):
            yield relative.parts[0].removesuffix(".py"), path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Every module name that ``path`` imports anywhere, with its line."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def written(path: Path) -> Iterator[tuple[int, str]]:
    """Every name, attribute, import and text of a module, but for comments and docstrings."""
    tree = tree_of(path)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
    yield from imported(path)


def classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            yield node
