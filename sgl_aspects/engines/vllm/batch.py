"""A batch, as the engine core and its workers get it: one message, in which prompts and decodes are mixed."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from sgl_aspects.engines.base import Drafts, Repeats, parameter
from sgl_aspects.engines.vllm.scheduler import Scheduled

#: Arguments of ``update_from_output``.
_ARGUMENTS = "self", "scheduler_output", "model_runner_output"
_processing = [parameter(at, name) for at, name in enumerate(_ARGUMENTS)]


def verified(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> list[tuple[str, int, int]]:
    """Return id, drafted and accepted tokens of each request whose drafts the scheduler is about to count.

    Not of one that has left since, or whose tokens are dropped; a grammar may have refused some drafts.
    """
    scheduler, batch, output = (read(args, kwargs) for read in _processing)
    guessed: dict[str, list[int]] = getattr(batch, "scheduled_spec_decode_tokens", {})
    rows = output.sampled_token_ids if guessed else ()
    invalid = getattr(batch, "num_invalid_spec_tokens", None) or {}
    least = getattr(scheduler, "num_sampled_tokens_per_step", 1)
    found = []
    for rid, tokens in guessed.items() if rows else ():
        request = scheduler.requests.get(rid)
        if not tokens or request is None or request.is_finished():
            continue
        row = rows[output.req_id_to_index[rid]]
        is_dropped = getattr(request, "num_stale_output_tokens", 0) and request.drop_stale_output
        if not is_dropped and (row or not least):
            drafted = len(tokens) - invalid.get(rid, 0)
            found.append((rid, drafted, max(len(row) - least, 0)))
    return found


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


drafts = Drafts(
    of="scheduled_spec_decode_tokens",
    rows="sampled_token_ids",
    row_of="req_id_to_index",
    unless="num_invalid_spec_tokens",
)

#: Nearly every step decodes the requests of the one before: as many tokens as requests, none of them new.
repeats = Repeats(
    of="scheduled_cached_reqs",
    ids="req_ids",
    count="total_num_scheduled_tokens",
    unless=scheduled.seen,
)
