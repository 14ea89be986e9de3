"""A scheduler's loop without an engine: its observers, called as its functions would call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from sgl_aspects.engines.contract import Observation


class Loop:
    """``found``: the observations by role. ``scheduler``: the object whose functions they are."""

    def __init__(self, observations: Iterable[Observation], scheduler: Any = None) -> None:
        self.found = {each.role: each for each in observations}
        self._scheduler = SimpleNamespace() if scheduler is None else scheduler

    @contextmanager
    def call(self, role: str, *args: Any, result: Any = None) -> Iterator[Any]:
        """The block is the function of this role; yields the observer's token."""
        observation = self.found[role]
        token = observation.enter(args, {}) if observation.enter is not None else None
        yield token
        if observation.exit is not None:
            observation.exit(token, result, None)

    @contextmanager
    def run(self, batch: Any) -> Iterator[object]:
        """Launch the batch; yields its result."""
        result = object()
        with self.call("run_batch", self._scheduler, batch, result=result):
            yield result

    def process(self, batch: Any, result: Any, inside: Callable[[Any], object] = lambda step: None) -> None:
        """Process the result; ``inside`` happens meanwhile, with the step."""
        with self.call("process_batch_result", self._scheduler, batch, result) as step:
            inside(step)

    def step(self, batch: Any, inside: Callable[[Any], object] = lambda step: None) -> None:
        """Launch the batch and process its result."""
        with self.run(batch) as result:
            pass
        self.process(batch, result, inside)
