"""A plugin that exchanges the code of woven methods in a live scheduler, for :mod:`.interleaved`.

SIGRTMIN+3 begins a measurement, as the file $EXCHANGE specifies; its steps are written beside it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sgl_aspects.tracing.record import native

_SIGNAL = signal.SIGRTMIN + 3
clock = time.perf_counter_ns


@dataclass(frozen=True)
class Scheduler:
    """An engine's scheduler.

    ``stamped``: its method that is called once for each step, before the woven ones. ``late``: the woven
    method that may be called for a step only during the next one. ``level_3``: those woven at level 3 only,
    the forward pass first. ``decoding``: the requests that this step decodes, from the arguments of
    ``stamped``; 0 if it does more.
    """

    package: str
    module: str
    name: str
    loop: str
    stamped: str
    late: str
    level_3: tuple[str, ...]
    decoding: Callable[..., int]


def _of_sglang(scheduler: Any, batch: Any = None, **_: Any) -> int:
    return 0 if batch is None or batch.forward_mode.is_extend() else len(batch.reqs)


def _of_vllm(core: Any) -> int:
    return 0 if core.scheduler.waiting else len(core.scheduler.running)


_SGLANG = "sglang.srt.managers.scheduler", "Scheduler", "run_event_loop", "is_disable_overlap_for_batch"
_VLLM = "vllm.v1.engine.core", "EngineCoreProc", "run_busy_loop", "_process_engine_step"
_SGLANG_FORWARD = ("ModelRunner.forward", "Backend.replay")
_VLLM_FORWARD = ("GPUModelRunner.execute_model", "GPUModelRunner.sample_tokens", "CUDAGraph.replay")
SCHEDULERS = (
    Scheduler("sglang", *_SGLANG, "Scheduler.process_batch_result", _SGLANG_FORWARD, _of_sglang),
    Scheduler("vllm", *_VLLM, "Scheduler.update_from_output", _VLLM_FORWARD, _of_vllm),
)


class Watched:
    """A woven method, called through two functions that measure the time between them.

    When off, the inner one is called directly. ``own_ns``: the sum since it was set to 0.
    """

    def __init__(self, owner: type, name: str, woven: types.FunctionType, original: Any) -> None:
        self.name, self._woven = woven.__qualname__, woven
        self.own_ns = 0

        @functools.wraps(original)
        def inner(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = original(*args, **kwargs)
            self.own_ns -= clock() - start
            return result

        def outer(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            result = self.run(*args, **kwargs)
            self.own_ns += clock() - start
            return result

        self.off = self.run = inner
        constants = woven.__code__.co_consts
        self.on = self._calling(inner, original)
        if native.WatchedCall is not None and type(constants[-1]) is native.WatchedCall:
            enter, leave = (
                next((one for one in constants if getattr(one, "__name__", "").endswith(part)), None)
                for part in ("_enter", "_exit")
            )
            failed = next(one for one in constants if type(one).__name__ == "Advice")
            self.on = self._called_in_c(inner, enter, leave, failed)
        setattr(owner, name, functools.wraps(original)(outer))

    def _calling(self, inner: Any, original: Any) -> Any:
        """The woven function around ``inner``."""
        constants = self._woven.__code__.co_consts
        return self._copied(type(constants)(inner if one is original else one for one in constants))

    def _called_in_c(self, inner: Any, *parts: Any) -> Any:
        constants = self._woven.__code__.co_consts
        run = self._copied(constants)
        changed = (*constants[:-1], native.WatchedCall(run, inner, *parts))
        run.__code__ = run.__code__.replace(co_consts=type(constants)(changed))
        return run

    def _copied(self, constants: tuple[Any, ...]) -> types.FunctionType:
        woven, code = self._woven, self._woven.__code__.replace(co_consts=constants)
        return types.FunctionType(code, woven.__globals__, woven.__name__, None, woven.__closure__)


def watched_methods(package: str) -> list[Watched]:
    """Return the methods of a package's classes that have observers only.

    A woven function has the counter of its calls among its constants, and the original, which may be a
    decorated one, where nothing changes its call.
    """
    places = (f"{package}.", "torch.cuda.graphs")
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(places)]
    values = [one for module in modules if type(module) is types.ModuleType for one in vars(module).values()]
    classes = {id(one): one for one in values if issubclass(type(one), type)}
    return [
        Watched(owner, name, one, constant)
        for owner in classes.values()
        for name, one in list(vars(owner).items())
        if type(one) is types.FunctionType
        and any(type(constant).__name__ == "_Calls" for constant in one.__code__.co_consts)
        for constant in one.__code__.co_consts
        if type(constant) is types.FunctionType and constant.__qualname__ == one.__qualname__
    ]


class Exchange:
    """Timestamps each step, and changes the code of the watched methods between blocks of steps."""

    def __init__(self, path: Path, scheduler: Scheduler, step: Callable[..., Any]) -> None:
        self._path, self._scheduler, self._step = path, scheduler, step
        self._until = 0
        self._methods: list[Watched] = []
        self._pending: list[tuple[Watched, Any]] = []

    def stamped(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the scheduler's method ``stamped``."""
        if self._until:
            self._next(clock(), self._scheduler.decoding(*args, **kwargs))
        return self._step(*args, **kwargs)

    def begin(self, *_: object) -> None:
        """Read the file: which variants, of which batch, for how many seconds."""
        wanted = json.loads(self._path.read_text())
        self._methods = self._methods or watched_methods(self._scheduler.package)
        self._names, self._size = ["off", *wanted["variants"]], wanted["size"]
        if "level 3" in self._names and not any(
            method.name.endswith(self._scheduler.level_3[0]) for method in self._methods
        ):
            raise RuntimeError(f"no forward pass is traced; woven: {[one.name for one in self._methods]}")
        # The variant, nanoseconds of a step, and those added to each woven method.
        self._steps: list[tuple[str, int, list[int]]] = []
        self._name, self._left, self._before = "off", 0, 0
        self._until = clock() + int(wanted["seconds"] * 1e9)

    def _next(self, now: int, size: int) -> None:
        for method, run in self._pending:
            method.run = run
        self._pending.clear()
        if self._before:
            self._steps.append((self._name, now - self._before, [one.own_ns for one in self._methods]))
        self._left -= 1
        if self._left < 0:
            if now > self._until:
                self._finish()
                return
            self._change(random.choice(self._names))
        if size != self._size and self._steps:
            self._steps[-1] = ("", 0, [])
        for method in self._methods:
            method.own_ns = 0
        self._before = clock()

    def _change(self, name: str) -> None:
        self._name, self._left = name, random.randrange(4, 9)
        for method in self._methods:
            is_on = name == self._names[-1] or (
                name == "level 2" and not method.name.endswith(self._scheduler.level_3)
            )
            run = method.on if is_on else method.off
            if method.name == self._scheduler.late:
                self._pending.append((method, run))
            else:
                method.run = run

    def _finish(self) -> None:
        self._until = 0
        self._change(self._names[-1])
        made = self._path.with_suffix(".made")
        report = {"methods": [method.name for method in self._methods], "steps": self._steps}
        made.with_suffix(".new").write_text(json.dumps(report))
        made.with_suffix(".new").rename(made)


def activate() -> None:
    """Runs in each process: only a scheduler comes to the module that is waited for."""
    import wrapt

    def meet(known: Scheduler, module: Any) -> None:
        path, scheduler = Path(os.environ["EXCHANGE"]), getattr(module, known.name)
        exchange = Exchange(path, known, getattr(scheduler, known.stamped))
        run = getattr(scheduler, known.loop)

        def stamped(*args: Any, **kwargs: Any) -> Any:
            return exchange.stamped(*args, **kwargs)

        def loop(*args: Any, **kwargs: Any) -> Any:
            signal.signal(_SIGNAL, exchange.begin)
            path.with_suffix(".pid").write_text(str(os.getpid()))
            return run(*args, **kwargs)

        setattr(scheduler, known.stamped, stamped)
        setattr(scheduler, known.loop, loop)

    for each in SCHEDULERS:
        wrapt.register_post_import_hook(partial(meet, each), each.module)
