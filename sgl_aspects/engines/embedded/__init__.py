"""The embedded runtime's room."""

from sgl_aspects.engines.embedded.roles import EMBEDDED

__all__ = ["EMBEDDED"]
