"""The steps of a live engine, stamped in its own process: what a client sees of them comes unevenly."""

from __future__ import annotations

import os
import select
import struct
from pathlib import Path

from benchmarks.switch import add_plugin

_PLUGIN = """
import os, struct, time
import sgl_aspects as aspects

def activate():
    stamps = []
    class Stamp:
        def enter(self, args, kwargs):
            if not stamps:
                stamps.append(os.open(os.environ["STEP_TIMES"], os.O_WRONLY | os.O_NONBLOCK))
            os.write(stamps[0], struct.pack("<q", time.perf_counter_ns()))
        def exit(self, token, result, error):
            pass
    aspects.weave(aspects.observe(os.environ["STEP_FUNCTION"])(Stamp))
"""
_BYTES = 8
_SECONDS = 60  # in which an engine at work makes a step


class StepTimes:
    """The seconds from one call of ``function`` to the next, in an engine with ``environment``."""

    def __init__(self, folder: Path, function: str) -> None:
        add_plugin(folder, "stamp_steps", _PLUGIN)
        path = folder / "steps"
        os.mkfifo(path, 0o600)
        self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._before = 0
        self.environment = {"STEP_TIMES": str(path), "STEP_FUNCTION": function}

    def forget(self) -> None:
        """What is read next is a step that begins from now on."""
        while select.select([self._pipe], [], [], 0)[0]:
            os.read(self._pipe, 1 << 16)
        self._before = 0

    def __iter__(self) -> StepTimes:
        return self

    def __next__(self) -> float:
        if not self._before:
            self._before = self._stamp()
        before, self._before = self._before, self._stamp()
        return (self._before - before) / 1e9

    def _stamp(self) -> int:
        if not select.select([self._pipe], [], [], _SECONDS)[0]:
            raise TimeoutError(f"the engine made no step in {_SECONDS} s")
        (nanoseconds,) = struct.unpack("<q", os.read(self._pipe, _BYTES))
        return int(nanoseconds)
