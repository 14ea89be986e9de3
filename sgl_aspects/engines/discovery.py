"""The engines that have a room: the built-in ones, and those of installed packages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sgl_aspects.engines.base import Engine
from sgl_aspects.errors import ConfigError

logger = logging.getLogger("sgl_aspects")

#: The entry-point group by which packages add engines.
GROUP = "sgl_aspects.engines"


def find_engines() -> tuple[Engine, ...]:
    """Return every engine that has a room: the built-in ones, then those of installed packages, by name.

    An entry point that fails, is not an :class:`Engine`, or takes an existing name is logged and left out.
    """
    from sgl_aspects.engines import BUILT_IN

    found = {engine.name: engine for engine in BUILT_IN}
    for point in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        where = f"entry point {point.name!r} of {GROUP} ({point.value}, {_distribution(point)})"
        try:
            engine = point.load()
            _check(engine, found)
        except KeyboardInterrupt:
            raise
        except ConfigError as error:
            logger.error("%s is left out; the other engines are traced: %s", where, error)
        except BaseException:  # any error of a package, which must not affect the other engines
            logger.exception("%s failed; the other engines are traced", where)
        else:
            found[engine.name] = engine
    return tuple(found.values())


def _check(engine: Any, found: Mapping[str, Engine]) -> None:
    if not isinstance(engine, Engine):
        raise ConfigError(f"it is {engine!r} ({type(engine).__name__}): name an Engine object")
    if engine.name in found:
        raise ConfigError(f"there is an engine named {engine.name!r} already: choose another name")


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unknown distribution"
