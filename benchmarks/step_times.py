"""The steps of a live engine, timestamped in its own process: clients see them unevenly.

Each step has two times: on the wall, and of the processor in the thread that makes the steps. An engine that
waits for its device hides host work in the first; the second shows it.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from tests.support.distributions import install_plugin

_PLUGIN = """
import os, struct, time
import sgl_aspects as aspects

def activate():
    stamps = []
    class Stamp:
        def enter(self, args, kwargs):
            if not stamps:
                stamps.append(os.open(os.environ["STEP_TIMES"], os.O_WRONLY | os.O_NONBLOCK))
            os.write(stamps[0], struct.pack("<2q", time.perf_counter_ns(), time.thread_time_ns()))
        def exit(self, token, result, error):
            pass
    aspects.weave(aspects.observe(os.environ["STEP_FUNCTION"])(Stamp))
"""
_STAMP = struct.Struct("<2q")
_SECONDS = 60  # in which a busy engine makes a step


def add_plugin(folder: Path, name: str, source: str) -> dict[str, str]:
    """Install a plugin in ``folder``; return the environment of the processes that load it."""
    install_plugin(folder, name, source)
    root = str(Path(__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join([str(folder), root, os.environ.get("PYTHONPATH", "")])}


class Step(float):
    """Seconds from one call of the engine's function to the next; ``thread``: its thread's work in them."""

    thread: float

    def __new__(cls, wall: float, thread: float) -> Step:
        step = super().__new__(cls, wall)
        step.thread = thread
        return step


def thread_mean(steps: Sequence[float]) -> float:
    """The mean of the thread's own seconds in steps of :class:`StepTimes`."""
    return fmean(step.thread for step in steps if isinstance(step, Step))


class StepTimes:
    """The times from one call of ``function`` to the next, in an engine with ``environment``."""

    def __init__(self, folder: Path, function: str) -> None:
        path = folder / "steps"
        os.mkfifo(path, 0o600)
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._before: tuple[int, ...] = ()
        plugin = add_plugin(folder, "stamp_steps", _PLUGIN)
        self.environment = {**plugin, "STEP_TIMES": str(path), "STEP_FUNCTION": function}

    def forget(self) -> None:
        """Skip to the steps that begin from now on."""
        while select.select([self._pipe], [], [], 0)[0]:
            os.read(self._pipe, 1 << 16)
        self._before = ()

    def __iter__(self) -> StepTimes:
        return self

    def __next__(self) -> Step:
        if not self._before:
            self._before = self._stamp()
        before, self._before = self._before, self._stamp()
        return Step(*((now - then) / 1e9 for now, then in zip(self._before, before)))

    def _stamp(self) -> tuple[int, ...]:
        if not select.select([self._pipe], [], [], _SECONDS)[0]:
            raise TimeoutError(f"the engine made no step in {_SECONDS} s")
        return _STAMP.unpack(os.read(self._pipe, _STAMP.size))
