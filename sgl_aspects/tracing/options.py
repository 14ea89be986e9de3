"""Options of a process's observers, beyond the recorder's live settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from sgl_aspects.tracing.content import ContentCapture


class TraceOptions(NamedTuple):
    """``parent_based``: the caller of a request decides whether its trace is sampled, not the sampling alone.

    ``measures``: steps that are not traced leave figures for the metrics. ``content``: None unless prompts
    and answers are recorded. ``takes_context``: a request's headers may name its caller's trace.
    ``attached``: the engine was running before, and may have open requests. ``tenant``: see ``tenant_of``.
    ``older_names``: attributes that the conventions have renamed keep their former name, too.
    """

    parent_based: bool = True
    measures: bool = False
    content: ContentCapture | None = None
    takes_context: bool = True
    attached: bool = False
    tenant: str = ""
    older_names: bool = False


DEFAULTS = TraceOptions()
_BAGGAGE = "baggage:"
_LONGEST_TENANT = 200


def tenant_of(headers: Mapping[str, str] | None, source: str | None) -> str:
    """Return whom a request is for, by its headers; "" if they do not say.

    ``source``: a header's name, or ``baggage:KEY`` for an entry of W3C baggage.
    """
    if not headers or not source:
        return ""
    if not source.startswith(_BAGGAGE):
        return (headers.get(source) or "")[:_LONGEST_TENANT]
    for member in (headers.get("baggage") or "").split(","):
        name, _, value = member.partition(";")[0].partition("=")
        if name.strip() == source.removeprefix(_BAGGAGE):
            return unquote(value.strip())[:_LONGEST_TENANT]
    return ""


def no_headers(_: object) -> None:
    """Return None: the reader of a request's headers when its caller's context is ignored."""
