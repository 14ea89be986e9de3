"""One catalog per engine: which function plays which role, and how to read its attributes."""

from sgl_aspects.engines.catalog import Catalog, Role
from sgl_aspects.engines.embedded import EMBEDDED
from sgl_aspects.engines.sglang.roles import SGLANG

#: Every engine that the built-in aspects know.
CATALOGS: tuple[Catalog, ...] = (EMBEDDED, SGLANG)

__all__ = ["CATALOGS", "EMBEDDED", "SGLANG", "Catalog", "Role"]
