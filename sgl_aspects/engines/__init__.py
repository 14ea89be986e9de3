"""One room for each engine: which function plays which role, and how to read its attributes."""

from sgl_aspects.engines.base import Engine, Outcome, Role, find_engines
from sgl_aspects.engines.embedded import EMBEDDED
from sgl_aspects.engines.sglang.roles import SGLANG

#: The engines whose rooms are in this package.
BUILT_IN: tuple[Engine, ...] = (EMBEDDED, SGLANG)

__all__ = ["BUILT_IN", "EMBEDDED", "SGLANG", "Engine", "Outcome", "Role", "find_engines"]
