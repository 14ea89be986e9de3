"""What any engine's host does for requests and for the server, as its spans show it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.callers import CALLER, Requests, trace_id
from tests.support.otlp_receiver import Span


def has_ended(spans: Sequence[Span], requests: int) -> bool:
    """Return whether so many requests have their roots, and the last thing done to the server its span."""
    roots = {span.trace_id for span in spans if span.parent_id == CALLER}
    numbers = {trace_id(number) for number in range(requests)}
    is_flushed = any(span.name == "flush_cache" and not span.links for span in spans)
    return is_flushed and roots >= numbers


def check_chat_template(run: Requests, number: int) -> None:
    """It precedes the queue, below the request."""
    (template,), (queue,) = run.spans(number, "chat_template"), run.spans(number, "queue")
    assert run.root(number).start <= template.start < template.end <= queue.start
    assert template.parent_id == run.root(number).span_id


def check_server_events(run: Requests, paused: Sequence[int]) -> None:
    """A pause and its end are linked to the requests under way; a flush after the last one to none.

    vLLM flushes its cache as it pauses, too.
    """
    (pause,), (resume,) = (run.receiver.named(name) for name in ("pause", "resume"))
    flush = max(run.receiver.named("flush_cache"), key=lambda span: span.start)
    under_way = {(trace_id(number), run.root(number).span_id) for number in paused}
    assert set(pause.links) == set(resume.links) == under_way
    assert not flush.links
