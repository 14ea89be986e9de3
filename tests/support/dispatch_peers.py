"""A dispatcher of the peers' kind, which benchmarks/dispatch.py times beside this package's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Impl = tuple[str, Callable[..., Any]]


class CallOp:
    """A dispatcher that looks everything up at each call: a lock, a cache by policy, the last call."""

    def __init__(self, impls: list[Impl]) -> None:
        self.impls = list(impls)
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
