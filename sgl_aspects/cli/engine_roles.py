"""``sgl-aspects doctor --engine FILE …``: which roles of the built-in aspects an engine's versions have."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sgl_aspects.engines import Engine, find_engines
from sgl_aspects.engines.source import FoundRole, Source
from sgl_aspects.errors import ConfigError


def show(paths: Sequence[str], *, as_json: bool) -> int:
    """Print a table, roles by version. Exit status 1 if a required role is missing in a version."""
    sources = [Source(path) for path in paths]
    engine = max(find_engines(), key=lambda one: sum(_found(source, one) for source in sources))
    if not any(_found(source, engine) for source in sources):
        known = ", ".join(one.name for one in find_engines())
        raise ConfigError(
            f"{', '.join(paths)}: no role of any engine is there: name a wheel, or the folder that holds the "
            f"engine's package (known engines: {known})"
        )
    columns = [list(source.find_roles(engine)) for source in sources]
    if as_json:
        print(
            json.dumps(
                {
                    source.version: {found.role: found.target for found in column}
                    for source, column in zip(sources, columns)
                },
                indent=2,
            )
        )
    else:
        _print_table(engine, [source.version for source in sources], columns)
    return 1 if any(_is_error(engine, found) for column in columns for found in column) else 0


def _is_error(engine: Engine, found: FoundRole) -> bool:
    return found.target is None and engine.every_role[found.role].required


def _found(source: Source, engine: Engine) -> int:
    return sum(role.target is not None for role in source.find_roles(engine))


def _print_table(engine: Engine, versions: list[str], columns: list[list[FoundRole]]) -> None:
    width = max(len(role) for role in engine.every_role)
    print(f"{engine.name:<{width}}  " + "  ".join(f"{version:>8}" for version in versions))
    for row in zip(*columns):
        cells = [_cell(found) for found in row]
        print(f"{row[0].role:<{width}}  " + "  ".join(f"{cell:>8}" for cell in cells))
    for version, column in zip(versions, columns):
        for found in column:
            if found.target is None:
                print(f"\nmissing in {version}: {found.role}\n  looked for {' | '.join(found.alternates)}")


def _cell(found: FoundRole) -> str:
    if found.target is None:
        return "missing"
    rank = found.alternates.index(found.target)
    return "found" if rank == 0 else f"found ({rank + 1})"
