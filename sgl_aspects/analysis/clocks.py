"""The clocks of hosts, compared through requests that crossed them.

A span that another one caused began after it, and a prefill server has the keys and values before the decode
server does, which answers before it decodes on. Each pair of times bounds the difference between two clocks;
a clock is corrected only as far as these bounds require.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sgl_aspects.analysis.spans import Span

# Of one request on two servers: events on the first that precede events on the second, each as (phase,
# whether its end is meant).
_BEFORE_DECODE = ((("prefill", True), ("decode", False)), (("kv_transfer", False), ("kv_transfer", True)))
_BEFORE_PREFILL = ((("kv_transfer", False), ("kv_transfer", True)),)


@dataclass(frozen=True)
class ClockBounds:
    """The lead of ``host``'s clock over that of ``reference``, in seconds: from ``low`` to ``high``.

    ``shift``: added to the host's times, 0 if its clock may be right.
    """

    host: str
    reference: str
    low: float
    high: float
    shift: float = 0.0

    def __str__(self) -> str:
        if math.isinf(self.low) and math.isinf(self.high):
            return f"{self.host}: no request compares its clock with that of {self.reference}"
        bounds = " and ".join(
            f"{'at least' if name == 'low' else 'at most'} {value * 1e3:+.3f} ms"
            for name, value in (("low", self.low), ("high", self.high))
            if not math.isinf(value)
        )
        moved = f"; its times are shown {self.shift * 1e3:+.3f} ms" if self.shift else ""
        return f"{self.host}: {bounds} against {self.reference}{moved}"


def align(spans: Sequence[Span]) -> tuple[list[Span], list[ClockBounds]]:
    """Return the spans by start, each host's times moved no further than necessary, and the clocks' bounds.

    The host with the most spans is the reference; others are compared with it, directly or over other hosts.
    """
    counts: dict[str, int] = defaultdict(int)
    for span in spans:
        counts[span.host] += 1
    if len(counts) < 2:
        return sorted(spans, key=_order), []
    most = _most_ahead(spans)
    first = max(counts, key=lambda host: counts[host])
    shifts, bounds, waiting = {first: 0.0}, [], deque([first])
    while waiting:
        reference = waiting.popleft()
        for host in sorted(counts.keys() - shifts.keys()):
            high, low = most.get((reference, host), math.inf), -most.get((host, reference), math.inf)
            if math.isinf(high) and math.isinf(low):
                continue
            ahead = _nearest(low - shifts[reference], high - shifts[reference])
            shifts[host] = -ahead
            bounds.append(ClockBounds(host, reference, low, high, shifts[host]))
            waiting.append(host)
    bounds += [
        ClockBounds(host, first, -math.inf, math.inf) for host in sorted(counts.keys() - shifts.keys())
    ]
    moved = [_moved(span, round(shifts.get(span.host, 0.0) * 1e9)) for span in spans]
    return sorted(moved, key=_order), bounds


def _order(span: Span) -> tuple[int, int]:
    return span.start_ns, -span.end_ns


def _nearest(low: float, high: float) -> float:
    """Return the number from ``low`` to ``high`` nearest to 0; their middle if they contradict."""
    if low > high:
        return (low + high) / 2
    return min(max(0.0, low), high)


def _moved(span: Span, by_ns: int) -> Span:
    return replace(span, start_ns=span.start_ns + by_ns, end_ns=span.end_ns + by_ns) if by_ns else span


def _most_ahead(spans: Sequence[Span]) -> dict[tuple[str, str], float]:
    """Return, by pair of hosts, the most seconds that the second clock can be ahead of the first."""
    most: dict[tuple[str, str], float] = {}

    def happened(before: Span, at_ns: int, after: Span, after_ns: int) -> None:
        if before.host != after.host:
            pair, seconds = (before.host, after.host), (after_ns - at_ns) / 1e9
            most[pair] = min(most.get(pair, math.inf), seconds)

    by_id = {(span.trace_id, span.span_id): span for span in spans}
    for span in spans:
        parent = by_id.get((span.trace_id, span.parent_id))
        if parent is not None:
            happened(parent, parent.start_ns, span, span.start_ns)
    for prefill, decode in _requests_on_two_servers(spans):
        for (first, second), order in (
            ((prefill, decode), _BEFORE_DECODE),
            ((decode, prefill), _BEFORE_PREFILL),
        ):
            for (name, is_end), (other_name, other_is_end) in order:
                before, after = first.get(name), second.get(other_name)
                if before is not None and after is not None:
                    at_ns = before.end_ns if is_end else before.start_ns
                    happened(before, at_ns, after, after.end_ns if other_is_end else after.start_ns)
    return most


def _requests_on_two_servers(spans: Iterable[Span]) -> Iterable[tuple[dict[str, Span], dict[str, Span]]]:
    """Yield the phases of each request on its prefill and on its decode server, by name."""
    traces: dict[str, dict[str, dict[str, Span]]] = defaultdict(lambda: {"prefill": {}, "decode": {}})
    for span in spans:
        if span.role in ("prefill", "decode") and span.name in ("prefill", "decode", "kv_transfer"):
            traces[span.trace_id][span.role][span.name] = span
    return [
        (each["prefill"], each["decode"]) for each in traces.values() if each["prefill"] and each["decode"]
    ]
