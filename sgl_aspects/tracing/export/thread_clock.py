"""The running time of a thread, to distinguish an exporter that hangs from one that gets no processor."""

from __future__ import annotations

import os
import threading
import time

# Seconds counted at most between two calls: the calling thread may have had no processor either.
_LONGEST = 0.05


class ThreadClock:
    """Counts the seconds in which a thread ran or slept, not those in which it waited for a processor.

    Without Linux's ``/proc`` all seconds count.
    """

    def __init__(self, thread: threading.Thread) -> None:
        self._path = f"/proc/self/task/{thread.native_id}/stat"
        self._moment = time.monotonic()
        _, self._ran = self._look()

    def take(self) -> float:
        """Return the seconds since the last call; to be called often."""
        now = time.monotonic()
        is_runnable, ran = self._look()
        counted = ran - self._ran if is_runnable else min(now - self._moment, _LONGEST)
        self._moment, self._ran = now, ran
        return counted

    def _look(self) -> tuple[bool, float]:
        """Return whether the thread runs or waits for a processor, and the seconds for which it ran."""
        try:
            with open(self._path, "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:  # not Linux, or the thread has ended
            return False, 0.0
        return fields[0] == b"R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
