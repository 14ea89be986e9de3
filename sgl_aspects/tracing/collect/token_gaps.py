"""The time between two tokens of a request, each one, from the scheduler's records.

A request's first token comes where its decode phase begins, each further one with the end of a step that it
takes part in. A step that makes several tokens for a request (speculation) is one gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.records import Latest, SpanBegin, SpanEnd

_DECODE = schema.DECODE.name
_REASON = tuple(schema.DECODE.attributes).index(schema.FINISH_REASON)
# Cap on followed requests: those of another host, or whose begin was dropped, are not forgotten with a span.
_MOST_REQUESTS = 50_000


@dataclass(slots=True)
class _Latest:
    """The latest token of a request."""

    at_ns: int
    #: When its decode phase ended; if it was preempted, the steps from then on compute its prompt again.
    ended_ns: int = 0
    is_first: bool = True
    is_last: bool = False


class TokenGaps:
    """Follows the records of a run's schedulers, each in the order in which it was written."""

    def __init__(self) -> None:
        self._latest: Latest[int, _Latest] = Latest(_MOST_REQUESTS)

    def __len__(self) -> int:
        """Return the number of followed requests."""
        return len(self._latest)

    def forget(self, keys: Iterable[int]) -> None:
        """Follow a request with these keys no longer: aborted and refused ones end in no step."""
        for key in keys:
            self._latest.pop(key, None)

    def take(self, record: SpanBegin | SpanEnd) -> Iterator[tuple[int, int]]:
        """Yield (the request's key, nanoseconds) for each token that the record brings but the first."""
        if isinstance(record, SpanEnd):
            if record.type.name == _DECODE:
                self._decode_ended(record)
            else:
                yield from self._step_ended(record)
        elif record.type.name == _DECODE:
            before = self._latest.pop(record.root_id, None)
            self._latest[record.root_id] = _Latest(record.start_ns)
            if before is not None:  # it was preempted
                yield record.root_id, max(0, record.start_ns - before.at_ns)

    def _decode_ended(self, record: SpanEnd) -> None:
        latest = self._latest.get(record.root_id)
        if latest is not None:
            latest.ended_ns = record.end_ns
            latest.is_last = record.values[_REASON : _REASON + 1] not in ((), [], (None,), [None])

    def _step_ended(self, step: SpanEnd) -> Iterator[tuple[int, int]]:
        for key in step.links:
            latest = self._latest.get(key)
            if latest is None or 0 < latest.ended_ns <= step.start_ns:
                continue  # a part of its prompt
            if latest.is_first and latest.at_ns >= step.start_ns:
                latest.is_first = False  # of this very step
            else:
                yield key, max(0, step.end_ns - latest.at_ns)
                latest.at_ns, latest.is_first = step.end_ns, False
            if latest.is_last:
                del self._latest[key]
