"""Changes of hooks, serialized by one lock; changes that cannot wait for it are deferred."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from sgl_aspects.weaving.referrers import is_in_pieces

logger = logging.getLogger("sgl_aspects")

#: ``(subjects, strict)``; strict: all or nothing.
Change: TypeAlias = Callable[[list[Any], bool], None]


class Changes:
    """Runs changes of hooks.

    :param after_fork: called in a forked child, after its lock was renewed.
    :ivar lock: held during every change, and by callers to make several changes atomic.
    """

    def __init__(self, after_fork: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self._is_running = False
        self._in_pieces = False  # the change in progress lets other threads run
        self._deferred: deque[tuple[Change, list[Any]]] = deque()
        self._after_fork = after_fork
        if hasattr(os, "register_at_fork"):
            # A fork waits for the change in progress: the child gets complete state and an unlocked lock.
            os.register_at_fork(
                before=lambda: self.lock.acquire(),
                after_in_parent=lambda: self.lock.release(),
                after_in_child=self._renew,
            )

    def _renew(self) -> None:
        self.lock = threading.RLock()
        self._after_fork()

    def run(self, change: Change, subjects: list[Any], strict: bool = False) -> None:
        """Run ``change`` under the lock; during another change, defer it until after that one, not strict.

        A signal handler, a ``__del__`` or the ``__setattr__`` of a target's class may call at any time.
        """
        with self.lock:
            if self._is_running:
                self._deferred.append((change, subjects))
                return
            try:
                self._is_running, self._in_pieces = True, is_in_pieces()
                change(subjects, strict)
            finally:
                self._in_pieces = False  # cleared first, so that `run_or_defer` loses no change
                try:
                    self._run_deferred()
                finally:
                    self._is_running = False
                self._finish()

    def run_or_defer(self, change: Change, subjects: list[Any]) -> None:
        """Run ``change``; if another thread is changing hooks in pieces, defer it instead of waiting.

        That thread runs deferred changes after it has cleared ``_in_pieces``, so none is lost.
        """
        lock = self.lock
        if lock.acquire(blocking=not self._in_pieces):
            try:
                self.run(change, subjects)
            finally:
                lock.release()
            return
        self._deferred.append((change, subjects))
        if not self._in_pieces:
            self._finish()

    def _run_deferred(self) -> None:
        while self._deferred:
            change, subjects = self._deferred.popleft()
            try:
                change(subjects, False)
            except Exception:
                logger.exception("a change of hooks that was deferred during another one failed")

    def _finish(self) -> None:
        """Run changes that were deferred while the previous one was ending."""
        if self._deferred:
            self.run(lambda subjects, strict: None, [])
