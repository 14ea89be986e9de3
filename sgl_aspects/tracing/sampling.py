"""Sampling and propagation: ``OTEL_TRACES_SAMPLER`` and ``OTEL_PROPAGATORS``; tail sampling.

A value that OpenTelemetry does not define is ignored with a warning, as its specification requires.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from sgl_aspects import env
from sgl_aspects.tracing.records import RequestBegin, SpanEnd

logger = logging.getLogger(__name__)


class Sampler(NamedTuple):
    """``ratio`` of the new traces are sampled; ``parent_based``: a caller decides about its own."""

    ratio: float = 1.0
    parent_based: bool = True


PARENT_DECIDES = Sampler()


class TailChoice(NamedTuple):
    """Tail sampling: a request that head sampling left out is exported nonetheless if it failed or was slow.

    Its spans are held until it ends. ``slower_than`` in seconds; None: no limit. A caller's own decision
    stands (``parent_based``).
    """

    failed: bool = True
    slower_than: float | None = None
    parent_based: bool = True

    def concerns(self, begin: RequestBegin) -> bool:
        """Return whether the request may still be kept: sampling left it out, not its caller."""
        if begin.sampled or (self.parent_based and begin.parent_id):
            return False
        return self.failed or self.slower_than is not None

    def keeps(self, end: SpanEnd) -> bool:
        if self.failed and end.error:
            return True
        return self.slower_than is not None and end.end_ns - end.start_ns >= self.slower_than * 1e9


def sampler_from_environment() -> Sampler:
    """Read ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG``; unset: parent-based, always on."""
    name = (env.text("OTEL_TRACES_SAMPLER") or "parentbased_always_on").lower()
    parent_based = name.startswith("parentbased_")
    kind = name.removeprefix("parentbased_")
    if kind == "always_on":
        return Sampler(1.0, parent_based)
    if kind == "always_off":
        return Sampler(0.0, parent_based)
    if kind == "traceidratio":
        return Sampler(_ratio(), parent_based)
    _warn(
        "OTEL_TRACES_SAMPLER=%r is ignored: choose always_on, always_off or traceidratio, "
        "or one of these after parentbased_",
        name,
    )
    return PARENT_DECIDES


def takes_callers_context() -> bool:
    """Read ``OTEL_PROPAGATORS``: whether a request's ``traceparent`` is read; ``none`` turns it off.

    Of the propagators only ``tracecontext`` carries a trace id that is used here.
    """
    named = [name.lower() for name in env.names("OTEL_PROPAGATORS") or ("tracecontext", "baggage")]
    others = [name for name in named if name not in ("tracecontext", "baggage", "none")]
    if others:
        _warn("OTEL_PROPAGATORS=%r is not supported: of callers only tracecontext is read", ",".join(others))
    return "tracecontext" in named


def _warn(text: str, value: str) -> None:
    """Check the variables in the first process of a run; the others have the same environment."""
    if env.text("SGL_ASPECTS_TRACE_RUN") is None:
        logger.warning(text, value)


def _ratio() -> float:
    text = env.text("OTEL_TRACES_SAMPLER_ARG")
    if text is None:
        return 1.0
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if 0.0 <= ratio <= 1.0:
        return ratio
    _warn("OTEL_TRACES_SAMPLER_ARG=%r is ignored: write a number from 0 to 1", text)
    return 1.0
