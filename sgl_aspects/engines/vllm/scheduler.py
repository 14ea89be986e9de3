"""The requests of a vLLM batch that are still in prefill, which its message does not contain.

Prompts and decodes are mixed in a batch, and its message names tokens only. The scheduler has the rest right
after scheduling: it is kept until the batch is launched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sgl_aspects.engines.base import Lifecycle
from sgl_aspects.engines.contract import Observation
from sgl_aspects.engines.vllm.disaggregation import Transfers


class Scheduled:
    """The prompts in the latest batch of this process's scheduler."""

    def __init__(self) -> None:
        self._batch: Any = None
        self._prompts: list[tuple[str, int, bool]] = []
        #: Requests that have begun, with more chunks of their prompt to come.
        self._begun: dict[str, None] = {}
        self._transfers: Transfers | None = None

    def prompts(self, batch: Any) -> list[tuple[str, int, bool]]:
        """Return of each request: its id, the tokens of its prompt in the batch, and whether these complete
        it.
        """
        return self._prompts if batch is self._batch else []

    def observations(self, trackers: Lifecycle) -> Iterable[Observation]:
        self._begun.clear()
        self._transfers = Transfers(trackers)
        return [Observation("schedule", _scheduler_of, self._schedule_exit), *self._transfers.observations()]

    def _schedule_exit(self, scheduler: Any, batch: Any, error: BaseException | None) -> None:
        if error is not None:
            return
        if self._transfers is not None and self._transfers.seen:
            self._transfers.begin()
        new, resumed = batch.scheduled_new_reqs, batch.scheduled_cached_reqs.resumed_req_ids
        if not (new or resumed or self._begun):
            return  # nearly every step: it decodes
        self._batch, self._prompts = batch, []
        for rid in dict.fromkeys([*(one.req_id for one in new), *resumed, *self._begun]):
            request, tokens = scheduler.requests.get(rid), batch.num_scheduled_tokens.get(rid)
            if request is not None and tokens:
                if self._transfers is not None:
                    self._transfers.prefills(request)
                goes_on = request.is_prefill_chunk
                # A request for an embedding has no answer to decode.
                self._prompts.append((rid, tokens, not goes_on and request.pooling_params is None))
                if goes_on:
                    self._begun[rid] = None
            if request is None or (tokens and not request.is_prefill_chunk):
                self._begun.pop(rid, None)


def _scheduler_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]
