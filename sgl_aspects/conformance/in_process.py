"""An engine's scheduler in this process, for checks that inspect it while it generates."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sgl_aspects.conformance.tiny_model import write_tiny_model
from sgl_aspects.platforms import DeviceGraph, current_platform
from sgl_aspects.runtime.messages import TokenizedRequest
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.runtime.scheduling.scheduler import Scheduler
from sgl_aspects.runtime.server_args import ServerArgs, with_platform_defaults

_TOKENS = 12


@dataclass
class Generating:
    scheduler: Scheduler
    replies: Any

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
            while self.replies.poll(0):
                self.replies.recv()
        return [req.output_ids for req in reqs]

    @contextmanager
    def watched_replays(self) -> Iterator[Replays]:
        """Yield what the graph runner does from now on."""
        found, model_runner = Replays(), self.scheduler.model_runner
        runner: Any = model_runner.graph_runner
        graph_class: Any = DeviceGraph
        with suppress(NotImplementedError):  # the runner may have graphs of its own
            graph_class = type(current_platform.create_graph())
        replay_step, replay_graph = runner.replay, graph_class.replay

        def step(batch: Any) -> Any:
            found.sizes.append(batch.batch_size)
            with patch.object(found, "is_counting", True):
                return replay_step(batch)

        def graph(self: Any) -> None:
            with patch.object(found, "is_counting", False):  # an emulated device computes here
                replay_graph(self)

        def model_called(*_: Any) -> None:
            found.model_calls += found.is_counting

        hook = model_runner.model.register_forward_pre_hook(model_called)
        with patch.object(graph_class, "replay", graph), patch.object(runner, "replay", step):
            yield found
        hook.remove()


@dataclass
class Replays:
    #: The number of requests of each replayed step.
    sizes: list[int] = field(default_factory=list)
    #: How often the model was called for that, outside of a graph.
    model_calls: int = 0
    is_counting: bool = False


@contextmanager
def generating(folder: Path, **fields: Any) -> Iterator[Generating]:
    """Make a scheduler with the tiny Llama, which is written to ``folder``; ``fields`` of ServerArgs."""
    write_tiny_model(folder)
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
