"""A batch, as the engine core and its workers get it: one message, in which prompts and decodes are mixed."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from sgl_aspects.engines.base import Drafts, Repeats, Role
from sgl_aspects.engines.vllm.scheduler import Scheduled

_verified = Role(
    (), ("_", "_", "drafted:num_draft_tokens", "_", "invalid:num_invalid_spec_tokens", "rid:request_id")
)
_count, _invalid, _rid = (_verified.reader(name) for name in ("drafted", "invalid", "rid"))


def drafted(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> int:
    """Return the drafted tokens that a grammar allowed."""
    invalid = _invalid(args, kwargs)
    return int(_count(args, kwargs)) - (invalid.get(_rid(args, kwargs), 0) if invalid else 0)


class _Mode(NamedTuple):
    name: str
    is_speculative: bool = False


_PREFILL, _DECODE, _MIXED = _Mode("prefill"), _Mode("decode"), _Mode("mixed")
_SPECULATIVE = _Mode("decode", True)


def mode(batch: Any) -> _Mode:
    cached, tokens = batch.scheduled_cached_reqs, batch.num_scheduled_tokens
    prompts = len(batch.scheduled_new_reqs) + cached.num_output_tokens.count(0) + len(cached.resumed_req_ids)
    if not prompts:
        if batch.total_num_scheduled_tokens == len(tokens):
            return _DECODE
        # A preempted request is prefilled again with prompt and output, chunk by chunk; or tokens are
        # speculative.
        guessed = batch.scheduled_spec_decode_tokens
        prompts = sum(count > 1 + len(guessed.get(rid, ())) for rid, count in tokens.items())
    return _SPECULATIVE if not prompts else _PREFILL if prompts >= len(tokens) else _MIXED


def shared_id(batch: Any) -> int | None:
    """Return a number for a batch that the engine core and each worker can derive from the message.

    From its first request: the id, and its progress. A request never has the same progress twice: each batch
    advances it, and a preempted one starts again with more output.
    """
    cached = batch.scheduled_cached_reqs
    if cached.req_ids:
        rid, computed, output = cached.req_ids[0], cached.num_computed_tokens[0], cached.num_output_tokens[0]
    elif batch.scheduled_new_reqs:
        first = batch.scheduled_new_reqs[0]
        rid, computed, output = first.req_id, first.num_computed_tokens, 0
    else:
        return None
    place = (computed * 0x9E37_79B1 + output * 0x85EB_CA6B) & 0xFFF_FFFF
    return int(1 << 63 | zlib.crc32(rid.encode()) << 28 | place)


scheduled = Scheduled()


def reqs(batch: Any) -> Any:
    """Return the ids of its requests; the same object while they are the same."""
    global _latest
    if batch.num_scheduled_tokens.keys() != _latest.keys():
        _latest = batch.num_scheduled_tokens
    return _latest


_latest: dict[str, int] = {}


def summary(batch: Any) -> tuple[_Mode, Any] | None:
    """Return mode and requests; None for a batch that only lists ended requests, for the workers."""
    if scheduled.seen:
        scheduled.begin_transfers()
    return (mode(batch), reqs(batch)) if batch.num_scheduled_tokens else None


drafts = Drafts(of="scheduled_spec_decode_tokens")

#: Nearly every step decodes the requests of the one before: as many tokens as requests, none of them new.
repeats = Repeats(
    of="scheduled_cached_reqs",
    ids="req_ids",
    count="total_num_scheduled_tokens",
    unless=scheduled.seen,
)
