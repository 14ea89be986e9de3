"""What the observers of a process are to do, beyond what the recorder says with each request and step."""

from __future__ import annotations

from typing import NamedTuple

from sgl_aspects.tracing.content import ContentCapture


class TraceOptions(NamedTuple):
    """``asks_parent``: the caller of a request decides whether its trace is wanted, not the sampling alone.

    ``measures``: steps that are not traced leave figures for the metrics. ``content``: None where prompts and
    answers are not to be recorded. ``takes_context``: a request's headers may name the trace of its caller.
    ``attached``: the engine was running before, and may have requests under way.
    """

    asks_parent: bool = True
    measures: bool = False
    content: ContentCapture | None = None
    takes_context: bool = True
    attached: bool = False


DEFAULTS = TraceOptions()


def no_headers(_: object) -> None:
    """What reads the headers of a request where its caller's context is not taken."""
