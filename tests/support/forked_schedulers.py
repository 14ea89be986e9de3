"""Scheduler processes forked from one that has imported torch, which is most of an engine's start.

For tests of what engines answer. Tests of how processes start, end and die use the engine's own start method.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any


class ForkedContext:
    """A context of multiprocessing. Its processes get the variables of their owner, as spawned ones do."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.torch_preloaded"])
        self.Pipe = self._context.Pipe

    def Process(  # noqa: N802
        self, *, target: Callable[..., object], args: tuple[Any, ...], **options: Any
    ) -> BaseProcess:
        return self._context.Process(target=_run, args=(dict(os.environ), target, args), **options)


def _run(environment: dict[str, str], target: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
