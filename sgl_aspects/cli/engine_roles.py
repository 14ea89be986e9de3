"""``sgl-aspects doctor --engine FILE …``: which roles of the built-in aspects an engine's versions have."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sgl_aspects.engines import CATALOGS, Catalog
from sgl_aspects.engines.source import FoundRole, Source


def show(paths: Sequence[str], *, as_json: bool) -> int:
    """A table, roles by version. Exit status 1 where a role has no target in a version."""
    sources = [Source(path) for path in paths]
    catalog = max(CATALOGS, key=lambda one: sum(_found(source, one) for source in sources))
    columns = [list(source.find_roles(catalog)) for source in sources]
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
        _print_table(catalog, [source.version for source in sources], columns)
    return 1 if any(found.target is None for column in columns for found in column) else 0


def _found(source: Source, catalog: Catalog) -> int:
    return sum(role.target is not None for role in source.find_roles(catalog))


def _print_table(catalog: Catalog, versions: list[str], columns: list[list[FoundRole]]) -> None:
    width = max(len(role) for role in catalog.roles)
    print(f"{catalog.engine:<{width}}  " + "  ".join(f"{version:>8}" for version in versions))
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
