"""An engine's scheduler in this process, for checks that inspect it while it generates."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_aspects.runtime.messages import TokenizedRequest
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.runtime.scheduling.scheduler import Scheduler
from sgl_aspects.runtime.server_args import ServerArgs, with_platform_defaults

_TOKENS = 12


class Generating:
    def __init__(self, scheduler: Scheduler, replies: Any) -> None:
        self.scheduler = scheduler
        self._replies = replies

    def prompts(self) -> list[list[int]]:
        draw = random.Random(9)
        return [[draw.randrange(256) for _ in range(length)] for length in (3, 11, 8)]

    def tokens(self) -> list[list[int]]:
        """Greedy tokens of three requests, the last of which comes while the others decode."""
        params = SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
        arriving = [TokenizedRequest(str(i), prompt, params) for i, prompt in enumerate(self.prompts())]
        reqs = [self.scheduler.add_request(message) for message in arriving[:2]]
        for number in range(3 * _TOKENS):
            if number == 4:
                reqs.append(self.scheduler.add_request(arriving[2]))
            if self.scheduler.has_work:
                self.scheduler.step()
            while self._replies.poll(0):
                self._replies.recv()
        return [req.output_ids for req in reqs]

    def count_replays(self) -> list[int]:
        """Return a list to which the batch size of each replay is added from now on."""
        runner: Any = self.scheduler.model_runner.graph_runner
        found: list[int] = []
        replay = runner.replay

        def counted(batch: Any) -> Any:
            found.append(batch.batch_size)
            return replay(batch)

        runner.replay = counted
        return found


@contextmanager
def generating(folder: Path, **fields: Any) -> Iterator[Generating]:
    """Make a scheduler on the current platform with the model in ``folder``; ``fields`` of ServerArgs."""
    ours, theirs = multiprocessing.Pipe()
    settings = {"dtype": "float32", "page_size": 4, "max_total_tokens": 256, "max_running_requests": 4}
    args = ServerArgs(folder, **{**settings, **fields})
    args.open_fields |= settings.keys() - fields.keys()  # a platform may need others
    args = with_platform_defaults(args)
    try:
        yield Generating(Scheduler(args, theirs), ours)
    finally:
        ours.close()
        theirs.close()
