"""Earlier place of :mod:`sgl_aspects.runtime.execution.graph_runner`, which vendors' packages name."""

from __future__ import annotations

from sgl_aspects.runtime.execution.graph_runner import GraphRunner

__all__ = ["GraphRunner"]
