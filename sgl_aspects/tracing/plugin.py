"""The plugin that attaches tracing in every process of an engine: ``activate`` runs at its start."""

from __future__ import annotations

from sgl_aspects import env


def activate() -> None:
    """Attach tracing if the environment enables it; otherwise the cost is one environment lookup."""
    if env.text("SGL_ASPECTS_TRACE") is None:
        return
    from sgl_aspects.tracing.session import attach_from_environment

    attach_from_environment()
