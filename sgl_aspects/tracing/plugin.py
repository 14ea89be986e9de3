"""The plugin through which every process of an engine comes to tracing: ``activate`` runs at its start."""

from __future__ import annotations

from sgl_aspects import env


def activate() -> None:
    """Attaches tracing where the environment asks for it, and costs one look at the environment elsewhere."""
    if env.text("SGL_ASPECTS_TRACE") is None:
        return
    from sgl_aspects.tracing.session import attach_from_environment

    attach_from_environment()
