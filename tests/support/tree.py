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


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def statements(path: Path) -> Iterator[ast.AST]:
    """Every statement of a module, at any depth, without expressions, which are most of a tree."""
    pending: list[ast.AST] = [tree_of(path)]
    while pending:
        node = pending.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            below = getattr(node, name, None)
            if isinstance(below, list):
                pending += below


@cache
def imported(path: Path) -> tuple[tuple[int, str], ...]:
    """Every module name that ``path`` imports anywhere, with its line."""
    found = []
    for node in statements(path):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return tuple(found)


@cache
def written(path: Path) -> tuple[tuple[int, str], ...]:
    """Every name, attribute, import and text of a module, but for comments and docstrings."""
    found = []
    docstrings = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in docstrings:
                found.append((node.lineno, node.value))
        elif isinstance(node, ast.Name):
            found.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr))
        elif (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        ):
            docstrings.add(id(node.body[0].value))
    return (*found, *imported(path))


def classes(path: Path) -> Iterator[str]:
    """The name of every class of a module."""
    return (node.name for node in statements(path) if isinstance(node, ast.ClassDef))
