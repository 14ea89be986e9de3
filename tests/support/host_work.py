"""What any engine's host does for requests and for the server, as its spans show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.callers import CALLER, Requests, parent, trace_id
from tests.support.engine_server import EngineServer
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


def chat_with_tools(server: EngineServer, pieces: int, stream: int) -> None:
    """Post two chats with a tool, of which the second is streamed."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "look"}]
    chat: dict[str, Any] = {"model": "mini", "max_tokens": 30, "messages": messages, "tools": [tool]}
    server.post("/v1/chat/completions", chat, parent(pieces))
    with server.all_streaming([("/v1/chat/completions", chat, parent(stream))]):
        pass


def check_parsing(run: Requests, parsed: Sequence[int], *, not_parsed: Sequence[int]) -> None:
    """What parsing took is on the request, which lasts until it is done; the model's answer ends before."""
    for number in parsed:
        root, (decode,) = run.root(number), run.spans(number, "decode")
        took = root.attributes["sgl_aspects.parse.busy_time"] * 1e9
        assert 0 < took < root.end - root.start
        assert root.attributes["gen_ai.request.stream"] or root.end - decode.end > took
    for number in not_parsed:
        assert "sgl_aspects.parse.busy_time" not in run.root(number).attributes


def check_server_events(run: Requests, paused: Sequence[int]) -> None:
    """A pause and its end are linked to the requests under way; a flush after the last one to none.

    vLLM flushes its cache as it pauses, too.
    """
    (pause,), (resume,) = (run.receiver.named(name) for name in ("pause", "resume"))
    flush = max(run.receiver.named("flush_cache"), key=lambda span: span.start)
    under_way = {(trace_id(number), run.root(number).span_id) for number in paused}
    assert set(pause.links) == set(resume.links) == under_way
    assert not flush.links
