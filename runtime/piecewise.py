"""Earlier place of :mod:`sgl_aspects.runtime.execution.piecewise`, which vendors' packages name."""

from __future__ import annotations

from sgl_aspects.runtime.execution.piecewise import PiecewiseBackend

__all__ = ["PiecewiseBackend"]
