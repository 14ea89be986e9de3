"""``sgl-aspects doctor --engine FILE …``: which roles of the built-in aspects an engine's versions have."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sgl_aspects.engines import Engine, find_engines
from sgl_aspects.engines.source import FoundRole, Source
from sgl_aspects.errors import ConfigError
from sgl_aspects.terminal import aligned


def show(paths: Sequence[str], *, as_json: bool) -> int:
    """Print a table for each engine of the package, roles by version.

    Exit status 1 if a required role of the engine that has most roles is missing in a version: others come
    with it, as SGLang's for images do with SGLang, and not everybody uses them.
    """
    sources = [Source(path) for path in paths]
    found = [(one, [list(source.find_roles(one)) for source in sources]) for one in find_engines()]
    (engine, columns), *others = sorted(found, key=lambda each: -_count(each[1]))
    if not _count(columns):
        known = ", ".join(one.name for one, _ in found)
        raise ConfigError(
            f"{', '.join(paths)}: no role of any engine is there: name a wheel, or the folder that holds the "
            f"engine's package (known engines: {known})"
        )
    related = [each for each in others if each[0].provider_name == engine.provider_name and _count(each[1])]
    versions = [source.version for source in sources]
    if as_json:
        roles = {
            f"{one.name} {version}" if one is not engine else version: {
                each.role: each.target for each in column
            }
            for one, own in [(engine, columns), *related]
            for version, column in zip(versions, own)
        }
        print(json.dumps(roles, indent=2))
    else:
        for one, own in [(engine, columns), *related]:
            if one is not engine:
                print()
            _print_table(one, versions, own)
    return 1 if any(_is_error(engine, role) for column in columns for role in column) else 0


def _is_error(engine: Engine, found: FoundRole) -> bool:
    return found.target is None and engine.every_role[found.role].required


def _count(columns: Sequence[Sequence[FoundRole]]) -> int:
    return sum(role.target is not None for column in columns for role in column)


def _print_table(engine: Engine, versions: list[str], columns: list[list[FoundRole]]) -> None:
    rows = [[row[0].role, *map(_cell, row)] for row in zip(*columns)]
    print(aligned([[engine.name, *versions], *rows]))
    for version, column in zip(versions, columns):
        for found in column:
            if found.target is None:
                print(f"\nmissing in {version}: {found.role}\n  looked for {' | '.join(found.alternates)}")


def _cell(found: FoundRole) -> str:
    if found.target is None:
        return "missing"
    rank = found.alternates.index(found.target)
    return "found" if rank == 0 else f"found ({rank + 1})"
