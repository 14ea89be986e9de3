"""Which requests are wanted, and who is asked: ``OTEL_TRACES_SAMPLER`` and ``OTEL_PROPAGATORS``.

A value that OpenTelemetry does not know is ignored with a warning, as its specification asks.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from sgl_aspects import env

logger = logging.getLogger(__name__)

#: Of 2**32: the share of an unsampled and of a sampled decision.
ALL = 1 << 32


class Sampler(NamedTuple):
    """``ratio`` of the new traces are wanted; ``asks_parent``: the caller of a request decides about its."""

    ratio: float = 1.0
    asks_parent: bool = True

    @property
    def share(self) -> int:
        """The ratio as a number of 2**32."""
        return round(self.ratio * ALL)

    def variables(self) -> dict[str, str]:
        """What makes :func:`sampler_from_environment` give it."""
        name = "parentbased_traceidratio" if self.asks_parent else "traceidratio"
        return {"OTEL_TRACES_SAMPLER": name, "OTEL_TRACES_SAMPLER_ARG": repr(self.ratio)}


PARENT_DECIDES = Sampler()


def sampler_from_environment() -> Sampler:
    """``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG``; unset: callers decide, new traces are kept."""
    name = (env.text("OTEL_TRACES_SAMPLER") or "parentbased_always_on").lower()
    asks_parent = name.startswith("parentbased_")
    kind = name.removeprefix("parentbased_")
    if kind == "always_on":
        return Sampler(1.0, asks_parent)
    if kind == "always_off":
        return Sampler(0.0, asks_parent)
    if kind == "traceidratio":
        return Sampler(_ratio(), asks_parent)
    _warn(
        "OTEL_TRACES_SAMPLER=%r is ignored: choose always_on, always_off or traceidratio, "
        "or one of these after parentbased_",
        name,
    )
    return PARENT_DECIDES


def takes_callers_context() -> bool:
    """``OTEL_PROPAGATORS``: whether a request's ``traceparent`` is read; ``none`` says that it is not.

    Of the propagators only ``tracecontext`` says anything about a request's trace that we read.
    """
    named = [name.lower() for name in env.names("OTEL_PROPAGATORS") or ("tracecontext", "baggage")]
    others = [name for name in named if name not in ("tracecontext", "baggage", "none")]
    if others:
        _warn("OTEL_PROPAGATORS=%r is not read here: of callers, tracecontext is", ",".join(others))
    return "tracecontext" in named


def _warn(text: str, value: str) -> None:
    """In the first process of a run; the others have the same environment."""
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
