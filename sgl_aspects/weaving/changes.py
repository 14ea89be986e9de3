"""Changes of hooks, one at a time: under one lock, later ones deferred where they cannot wait."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from sgl_aspects.weaving.rebinding import is_in_pieces

logger = logging.getLogger("sgl_aspects")

#: A change of some subjects; strict: all or nothing.
Change: TypeAlias = Callable[[list[Any], bool], None]


class Changes:
    """Runs changes of hooks.

    :param after_fork: called in a forked child, once the lock is its own.
    :ivar lock: held for every change, and by callers that make several of them one.
    """

    def __init__(self, after_fork: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self._is_running = False
        self._in_pieces = threading.Event()  # the change in progress lets other threads run
        self._deferred: deque[tuple[Change, list[Any]]] = deque()
        self._after_fork = after_fork
        if hasattr(os, "register_at_fork"):
            _keep_lock_over_forks(weakref.ref(self))

    def run(self, change: Change, subjects: list[Any], strict: bool = False) -> None:
        """Run ``change`` under the lock; within another change, after that one and not strict.

        A signal handler, a ``__del__`` or the ``__setattr__`` of a target's class may call at any moment.
        """
        with self.lock:
            if self._is_running:
                self._deferred.append((change, subjects))
                return
            self._is_running = True
            if is_in_pieces():
                self._in_pieces.set()
            try:
                change(subjects, strict)
            finally:
                self._in_pieces.clear()  # before the deferred changes are looked for: see `run_or_defer`
                self._run_deferred()
                self._finish()

    def run_or_defer(self, change: Change, subjects: list[Any]) -> None:
        """Run ``change``, or leave it to the thread that changes hooks in pieces rather than wait for that.

        That thread looks for deferred changes after it has cleared ``_in_pieces``, so none is lost.
        """
        lock = self.lock
        if lock.acquire(blocking=not self._in_pieces.is_set()):
            try:
                self.run(change, subjects)
            finally:
                lock.release()
            return
        self._deferred.append((change, subjects))
        if not self._in_pieces.is_set():
            self._finish()

    def withdraw(self, change: Change, subjects: list[Any]) -> list[Any]:
        """Take ``subjects`` out of the deferred calls of ``change``; returns those that were in one."""
        withdrawn = []
        for entry in [entry for entry in list(self._deferred) if entry[0] == change]:
            for subject in [subject for subject in subjects if subject in entry[1]]:
                entry[1].remove(subject)
                withdrawn.append(subject)
            if not entry[1]:
                with contextlib.suppress(ValueError):  # a signal handler has removed it in between
                    self._deferred.remove(entry)
        return withdrawn

    def _run_deferred(self) -> None:
        try:
            while self._deferred:
                change, subjects = self._deferred.popleft()
                try:
                    change(subjects, False)
                except Exception:
                    logger.exception("a change of hooks that was deferred during another one failed")
        finally:
            self._is_running = False

    def _finish(self) -> None:
        """Run changes that were deferred just as the one before them ended."""
        if self._deferred:
            self.run(lambda subjects, strict: None, [])


def _keep_lock_over_forks(changes: weakref.ref[Changes]) -> None:
    """Let a fork wait for the change in progress: the child has no half of it, and no locked lock."""

    def acquire() -> None:
        if (this := changes()) is not None:
            this.lock.acquire()

    def release() -> None:
        if (this := changes()) is not None:
            this.lock.release()

    def renew() -> None:
        if (this := changes()) is not None:
            this.lock = threading.RLock()
            this._after_fork()

    os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=renew)
