"""Engine rooms, one per engine: which function plays which role, and how to read its attributes.

All code specific to an engine is in its room. ``engines/NAME/plugin.py``, where there is one, has an
``activate()`` that each process calls before the plugins; what it returns is called once their hooks are in
place. A room in a package of its own registers these as an entry point of group ``sgl_aspects.plugins``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sgl_aspects.engines.base import Engine, Outcome, Role
from sgl_aspects.engines.contract import Observation
from sgl_aspects.engines.embedded import EMBEDDED
from sgl_aspects.engines.sglang.diffusion import SGLANG_DIFFUSION
from sgl_aspects.engines.sglang.roles import SGLANG
from sgl_aspects.engines.transformers import TRANSFORMERS
from sgl_aspects.engines.vllm import VLLM
from sgl_aspects.errors import ConfigError

logger = logging.getLogger("sgl_aspects")

#: The engines whose rooms are in this package.
BUILT_IN: tuple[Engine, ...] = (EMBEDDED, SGLANG, SGLANG_DIFFUSION, TRANSFORMERS, VLLM)
#: The entry-point group by which packages add engines.
GROUP = "sgl_aspects.engines"

__all__ = [
    "BUILT_IN",
    "EMBEDDED",
    "SGLANG",
    "SGLANG_DIFFUSION",
    "TRANSFORMERS",
    "VLLM",
    "Engine",
    "Observation",
    "Outcome",
    "Role",
    "find_engines",
]


def find_engines() -> tuple[Engine, ...]:
    """Return every engine that has a room: the built-in ones, then those of installed packages, by name.

    An entry point that fails, is not an :class:`Engine`, or takes an existing name is logged and left out.
    """
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
