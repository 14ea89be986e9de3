"""Processes forked from one that has imported torch, which is most of an engine's start.

For tests of what engines answer, and of what their owners see. Tests of how processes start, and of what they
leave behind, use the engine's own start method.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest


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


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Engines that are made in the block start their schedulers by forking."""
    fake = types.SimpleNamespace(
        get_context=lambda _: ForkedContext(), resource_tracker=multiprocessing.resource_tracker
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sgl_aspects.runtime.processes.ranks.multiprocessing", fake)
        yield


class ForkedProgram:
    """``sgl-aspects`` with these words in a process with torch, as a `subprocess.Popen` of it is used."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        process = ForkedContext().Process(target=_main, args=(list(words), str(log), dict(environment)))
        process.start()
        self._process, self.pid = process, process.pid or 0
        self.terminate, self.kill = process.terminate, process.kill

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("sgl-aspects", timeout or 0)
        return self._process.exitcode


def _main(words: list[str], log: str, environment: dict[str, str]) -> None:
    # An engine may have started the server of forks, with its owner's signals blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    import torch

    from sgl_aspects.cli.main import main
    from sgl_aspects.runtime.processes import ranks

    # The server's own schedulers: it has torch, and no thread yet. CUDA cannot be used after a fork.
    if not torch.cuda.is_available():
        vars(ranks)["multiprocessing"] = types.SimpleNamespace(
            get_context=lambda _: multiprocessing.get_context("fork"),
            resource_tracker=multiprocessing.resource_tracker,
        )
    sys.exit(main(words))
