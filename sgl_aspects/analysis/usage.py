"""Who used a run: requests, tokens and device time by tenant or another attribute; what was in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sgl_aspects.analysis.causes import Causes
from sgl_aspects.analysis.numbers import numbers_of
from sgl_aspects.analysis.spans import Span
from sgl_aspects.tracing import schema


@dataclass
class Usage:
    """What the requests of one value of the attribute used, failed and aborted ones included."""

    name: str
    requests: int = 0
    #: Without those that their callers gave up.
    failed: int = 0
    #: Callers' mistakes (4xx), and what was under way at attach or detach: neither keeps or misses a target.
    not_judged: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    device_seconds: float = 0.0
    #: Requests that kept the targets of time to first token and between tokens.
    in_time: int = 0

    @property
    def goodput(self) -> float | None:
        """The share of requests that kept the targets, of those that are judged; None if none is."""
        judged = self.requests - self.not_judged
        return self.in_time / judged if judged else None


def usage_of(
    spans: Sequence[Span],
    attribute: str = schema.TENANT,
    first_token: float = float("inf"),
    between_tokens: float = float("inf"),
) -> list[Usage]:
    """Sum up requests by an attribute, the largest device time first; "" for those without it.

    ``first_token``, ``between_tokens``: the targets, in seconds; the latter is for the mean of a request.
    """
    causes = Causes(spans)
    device = causes.device_seconds()
    decoded = {request.trace_id for request in causes.requests if request.role == "decode"}
    found: dict[str, Usage] = {}
    for request in causes.requests:
        name, numbers = str(request.attributes.get(attribute) or ""), numbers_of(request)
        usage = found.setdefault(name, Usage(name))
        usage.device_seconds += device.get(request.span_id, 0.0)
        if request.role == "prefill" and request.trace_id in decoded:
            continue  # its decode server has the whole
        usage.requests += 1
        is_left = request.attributes.get(schema.ERROR_TYPE) in schema.LEFT_ERRORS
        usage.failed += request.is_error and not is_left
        usage.input_tokens += numbers.prompt_tokens
        usage.output_tokens += numbers.output_tokens
        first, gap = numbers.time_to_first_token, numbers.time_per_output_token or 0.0
        is_part = not request.attributes.keys().isdisjoint((schema.ATTACHED_FLAG, schema.DETACHED_FLAG))
        if is_part or 400 <= request.number(schema.STATUS_CODE) < 500:
            usage.not_judged += 1
        else:
            usage.in_time += not request.is_error and first <= first_token and gap <= between_tokens
    return sorted(found.values(), key=lambda usage: -usage.device_seconds)
