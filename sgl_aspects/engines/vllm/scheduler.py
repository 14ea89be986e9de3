"""The requests of a vLLM batch that are still in prefill, which its message does not contain.

Prompts and decodes are mixed in a batch, and its message names tokens only. The scheduler has the rest: it
launches a batch right after scheduling it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from sgl_aspects.engines.base import Lifecycle
from sgl_aspects.engines.contract import Observation
from sgl_aspects.engines.vllm.disaggregation import Transfers


class Scheduled:
    """The prompts in the latest batch of this process's schedulers."""

    def __init__(self) -> None:
        #: Requests that have begun, with more chunks of their prompt to come.
        self._begun: dict[str, None] = {}
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._transfers: Transfers | None = None
        #: Requests that a connector has seen since the latest batch, when, and the bytes that it will bring.
        self.seen: dict[str, tuple[Any, int, int | None]] = {}

    def observations(self, trackers: Lifecycle) -> Iterable[Observation]:
        self._begun.clear()
        self.seen.clear()
        self._transfers = Transfers(trackers, self.seen)
        scheduler = trackers.engine.call_reader("add_request", "scheduler")

        def add_request(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.meet(scheduler(args, kwargs))

        return [Observation("add_request", add_request), *self._transfers.observations()]

    def meet(self, scheduler: Any) -> None:
        """Note a scheduler that gets a request."""
        self._schedulers.add(scheduler)

    def begin_transfers(self) -> None:
        """Called with each batch that is launched, also an empty one."""
        if self._transfers is not None:
            self._transfers.begin()

    def prompts(self, batch: Any) -> list[tuple[str, int, bool]]:
        """Return of each request of a batch that is just launched: its id, the tokens of its prompt in the
        batch (places for drafts beside a last one are none), and whether these complete it.
        """
        new, resumed = batch.scheduled_new_reqs, batch.scheduled_cached_reqs.resumed_req_ids
        found = []
        for rid in dict.fromkeys([*(one.req_id for one in new), *resumed, *self._begun]):
            request, tokens = self._request(rid), batch.num_scheduled_tokens.get(rid, 0)
            tokens -= len(batch.scheduled_spec_decode_tokens.get(rid, ()))
            if request is not None and tokens:
                if self._transfers is not None:
                    self._transfers.prefills(request)
                goes_on = request.is_prefill_chunk
                # A request for an embedding has no answer to decode.
                found.append((rid, tokens, not goes_on and request.pooling_params is None))
                if goes_on:
                    self._begun[rid] = None
            if request is None or (tokens and not request.is_prefill_chunk):
                self._begun.pop(rid, None)
        return found

    def _request(self, rid: str) -> Any:
        found = (scheduler.requests.get(rid) for scheduler in self._schedulers)
        return next((request for request in found if request is not None), None)
