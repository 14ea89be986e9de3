"""Copies with the peers' known faults, one each: a test must fail on it.

They are small and written from descriptions of the faults; none is another project's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Impl = tuple[str, Callable[..., Any]]


class CallOp:
    """A dispatcher that looks everything up at each call: a lock, a cache by policy, the last call."""

    def __init__(self, impls: list[Impl], *, strict: bool = False) -> None:
        import threading

        self.impls = list(impls)
        self.strict = strict
        self.policy: tuple[Any, ...] = ("default",)
        self.epoch = 0
        self.failed: set[str] = set()
        self.called: dict[str, str] = {}
        self.cache: dict[Any, Impl] = {}
        self.lock = threading.RLock()

    def candidates(self) -> list[Impl]:
        return [impl for impl in self.impls if impl[0] not in self.failed]

    def resolve(self) -> Impl:
        fingerprint = ";".join(map(str, self.policy))
        key = ("op", fingerprint, self.epoch)
        with self.lock:
            if key not in self.cache:
                self.cache[key] = self.candidates()[0]
            return self.cache[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        impl_id, function = self.resolve()
        with self.lock:
            if self.called.get("op") != impl_id:
                self.called["op"] = impl_id
        return function(*args, **kwargs)


class StrictIsLenient(CallOp):
    """`strict` switches the fallback on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for _, function in self.candidates():
            try:
                return function(*args, **kwargs)
            except RuntimeError:
                if not self.strict:
                    raise
        raise RuntimeError("nothing left")


class FirstCallOnly(CallOp):
    """Falls back at the first call; afterwards it calls the cached implementation."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "op" in self.called:
            return dict(self.impls)[self.called["op"]](*args, **kwargs)
        for impl_id, function in self.candidates():
            try:
                result = function(*args, **kwargs)
            except RuntimeError:
                continue
            self.called["op"] = impl_id
            return result
        raise RuntimeError("nothing left")


class FallsBackAlways(CallOp):
    """Falls back even if the failed one has written to its arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for _, function in self.candidates():
            try:
                return function(*args, **kwargs)
            except RuntimeError:
                continue
        raise RuntimeError("nothing left")


class FailsForEverybody(FallsBackAlways):
    """A failed one is never tried again, under any policy."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for impl_id, function in self.candidates():
            try:
                return function(*args, **kwargs)
            except RuntimeError:
                self.failed.add(impl_id)
        raise RuntimeError("nothing left")


class ChecksNothing(CallOp):
    """Types and architectures are declared and never looked at."""

    def __init__(self, impls: list[Impl], supported: dict[str, frozenset[torch.dtype]]) -> None:
        super().__init__(impls)
        self.supported = supported


class IgnoresMistakes:
    """A configuration reader that drops unknown keys."""

    def __init__(self, path: str | None, tokens: list[str]) -> None:
        import os

        self.settings: dict[str, Any] = {}
        if path is not None and os.path.exists(path):
            self.settings["path"] = path
        self.order = [token for token in tokens if token in ("default", "vendor", "reference")]


class RegistersAgainAfterFork(CallOp):
    """In a forked child the built-in implementations are registered once more."""

    def after_fork(self) -> None:
        self.impls += self.impls
