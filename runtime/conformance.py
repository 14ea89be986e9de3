"""Earlier place of :mod:`sgl_aspects.conformance`, which vendors' packages name."""

from __future__ import annotations

from sgl_aspects.conformance import CHECKS, GROUPS, Bench, Check, Result, run_checks, selected_checks

__all__ = ["CHECKS", "GROUPS", "Bench", "Check", "Result", "run_checks", "selected_checks"]
