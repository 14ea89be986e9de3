"""What vLLM's engine core sends to its workers, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def batch(
    new: dict[str, int] | None = None,
    cached: dict[str, tuple[int, int]] | None = None,
    resumed: tuple[str, ...] = (),
    tokens: dict[str, int] | None = None,
    guessed: dict[str, list[int]] | None = None,
) -> Any:
    """A message: new requests with their tokens; of cached ones how far they are, and their output so far."""
    new, cached = new or {}, cached or {}
    scheduled = {**new, **dict.fromkeys(cached, 1), **(tokens or {})}
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=rid, num_computed_tokens=0) for rid in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[*cached],
            num_computed_tokens=[computed for computed, _ in cached.values()],
            num_output_tokens=[output for _, output in cached.values()],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens=guessed or {},
    )
