"""W3C trace context: the trace that a request belongs to, from its caller's headers or a new one.

Parsed without OpenTelemetry, which the engine's processes need not load: it is one header with fixed fields.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

# version "-" trace-id "-" parent-id "-" flags; a version above 00 may carry more fields.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LONGEST_STATE = 8192


class TraceContext(NamedTuple):
    """The trace that a request belongs to, and the span that called it (``parent_id`` 0: none)."""

    trace_id: int
    parent_id: int = 0
    sampled: bool = True
    state: str = ""
    remote: bool = False


def from_headers(headers: Mapping[str, str] | None) -> TraceContext | None:
    """Return the W3C context in ``headers``, whatever the case of their names; None if absent or invalid.

    An invalid ``traceparent`` is ignored together with its ``tracestate``, as the standard requires.
    """
    if not headers:
        return None
    fields = {str(name).lower(): value for name, value in headers.items()}
    value = fields.get("traceparent")
    match = _TRACEPARENT.fullmatch(value.strip(" \t")) if isinstance(value, str) else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    state = fields.get("tracestate")
    if not isinstance(state, str) or len(state) > _LONGEST_STATE:
        state = ""
    return TraceContext(int(trace_id, 16), int(parent_id, 16), bool(int(flags, 16) & 1), state, True)


def new(sample: int = 1 << 32) -> TraceContext:
    """Return a new trace with 128 random bits for its id. ``sample``: the sampled share × 2**32.

    Sampling depends on the id, as in OpenTelemetry's ratio sampler, so that every service decides the same.
    """
    trace_id = int.from_bytes(os.urandom(16), "big") or 1
    return TraceContext(trace_id, sampled=is_wanted(trace_id, sample))


def is_wanted(trace_id: int, sample: int) -> bool:
    """Return whether the trace is among the ``sample`` in 2**32."""
    return (trace_id >> 32 & 0xFFFF_FFFF) < sample


def of_shared(key: int, is_first: bool, sample: int = 1 << 32) -> TraceContext:
    """Derive the trace of a request that several servers get without a context from a number they share.

    Its parent is the request's span on the first of them, whose id (``span_id_of_shared``) all can derive.
    """
    digest = hashlib.blake2b(b"trace %d" % key, digest_size=16).digest()
    trace_id = int.from_bytes(digest, "big") or 1
    parent_id = 0 if is_first else span_id_of_shared(key)
    return TraceContext(trace_id, parent_id, is_wanted(trace_id, sample), remote=not is_first)


def span_id_of_shared(key: int) -> int:
    """Derive the span id of the request on its first server; the highest bit, unused in a process's own ids,
    is set.
    """
    digest = hashlib.blake2b(b"span %d" % key, digest_size=8).digest()
    return int.from_bytes(digest, "big") | 1 << 63


_SPREAD = 0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835
_GATHER = pow(_SPREAD, -1, 1 << 128)


def trace_id_of_root(span_id: int) -> int:
    """Derive the trace id of a root without a caller's context from its span id."""
    return (span_id * _SPREAD) % (1 << 128) or 1


def root_of_trace_id(trace_id: int) -> int:
    """Return the root whose trace :func:`trace_id_of_root` derived; 0 if the id came from elsewhere."""
    root = (trace_id * _GATHER) % (1 << 128)
    return root if root < 1 << 64 else 0
