"""Options of a process's observers, beyond the recorder's live settings."""

from __future__ import annotations

from typing import NamedTuple

from sgl_aspects.tracing.content import ContentCapture


class TraceOptions(NamedTuple):
    """``parent_based``: the caller of a request decides whether its trace is sampled, not the sampling alone.

    ``measures``: steps that are not traced leave figures for the metrics. ``content``: None unless prompts
    and answers are recorded. ``takes_context``: a request's headers may name its caller's trace.
    ``attached``: the engine was running before, and may have open requests.
    """

    parent_based: bool = True
    measures: bool = False
    content: ContentCapture | None = None
    takes_context: bool = True
    attached: bool = False


DEFAULTS = TraceOptions()


def no_headers(_: object) -> None:
    """Return None: the reader of a request's headers when its caller's context is ignored."""
