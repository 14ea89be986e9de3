"""Schedulers driven step by step, without an engine around them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from sgl_aspects.runtime import SamplingParams, ServerArgs
from sgl_aspects.runtime.core import Req
from sgl_aspects.runtime.messages import ReadyMessage, TokenizedRequest
from sgl_aspects.runtime.scheduling.scheduler import Scheduler

NEW_TOKENS = 12


def run_in_process(
    args: ServerArgs, prompts: list[list[int]], new_tokens: int, **sampling: Any
) -> tuple[list[list[int]], set[str]]:
    """Drive a Scheduler step by step, a new request every second step. Returns outputs and forward modes."""
    reqs, modes, _ = drive(args, prompts, new_tokens, **sampling)
    return [req.output_ids for req in reqs], modes


def drive(
    args: ServerArgs, prompts: list[list[int]], new_tokens: int, **sampling: Any
) -> tuple[list[Req], set[str], Scheduler]:
    ours, theirs = multiprocessing.Pipe()
    scheduler = Scheduler(args, theirs)
    arriving = [
        TokenizedRequest(
            str(i), prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **sampling)
        )
        for i, prompt in enumerate(prompts)
    ]
    reqs, modes = [], set()
    schedule = scheduler.schedule

    def watched_schedule() -> Any:
        batch = schedule()
        if batch is not None:
            modes.add(batch.forward_mode.value)
            assert sum(batch.num_new_tokens[batch.num_decodes :]) <= args.chunked_prefill_size
        return batch

    scheduler.schedule = watched_schedule  # type: ignore[method-assign]
    while arriving or scheduler.has_work:
        if arriving and scheduler.step_id % 2 == 0:
            reqs.append(scheduler.add_request(arriving.pop(0)))
        scheduler.step()
        drain(ours)
    assert scheduler.kv_cache.available_size() == scheduler.kv_cache.total_size
    return reqs, modes, scheduler


def drain(connection: Connection) -> None:
    while connection.poll(0):
        assert not isinstance(connection.recv(), ReadyMessage)


class Memory:
    """A fake pool: each slot holds the tokens up to its own, in place of keys and values."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[int, tuple[int, ...]] = {}

    def clear(self, pages: list[int]) -> None:
        for page in pages:
            for slot in range(page * self.page_size, (page + 1) * self.page_size):
                self.slots.pop(slot, None)
