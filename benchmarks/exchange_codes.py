"""In a live SGLang's scheduler: exchanges the code of woven functions (for :mod:`.interleaved`).

A plugin. SIGRTMIN+3 begins a measurement, as the file $EXCHANGE asks; its groups of steps are written
beside it.
"""

from __future__ import annotations

import gc
import json
import operator
import os
import random
import signal
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SIGNAL = signal.SIGRTMIN + 3
#: Steps right after an exchange, which do not count: the result of the last batch is still to be processed.
_SKIP = 3
#: The functions that only level 3 weaves, and the one that comes a step later than the others.
_LEVEL_3 = ("ModelRunner.forward", "Backend.replay")
_LATE = "Scheduler.process_batch_result"
_STAMPED = "is_disable_overlap_for_batch"

Codes = list[tuple[types.FunctionType, types.CodeType]]


def woven_functions() -> list[types.FunctionType]:
    """The woven functions of this process that stand for functions."""
    found = [one for one in gc.get_objects() if type(one) is types.FunctionType]
    return [
        one
        for one in found
        if type(one.__code__.co_consts) is not tuple  # hooks are in a kind of tuple of the weaver's
        and type(getattr(one, "__wrapped__", None)) is types.FunctionType
    ]


def own_code(function: types.FunctionType) -> types.CodeType:
    """That of the function that a woven one stands for."""
    code: types.CodeType = function.__wrapped__.__code__  # type: ignore[attr-defined]
    return code


def empty_code(function: types.FunctionType) -> types.CodeType:
    """A woven function's, whose observers do nothing: functions in C."""
    constants = function.__code__.co_consts
    nothing = {"enter": operator.is_, "exit": slice}
    changed = [nothing.get(getattr(one, "__name__", "").rpartition("_")[2], one) for one in constants]
    return function.__code__.replace(co_consts=type(constants)(changed))


class Variant:
    """What the functions run, and what else is set while they do."""

    def __init__(
        self, code_of: Callable[[types.FunctionType], types.CodeType], functions: list[types.FunctionType]
    ) -> None:
        self.codes, self.late_codes = Codes(), Codes()
        self.begin: Callable[[], None] = lambda: None
        self.end: Callable[[], None] = lambda: None
        self.burn_ns = 0
        for function in functions:
            kind = self.late_codes if function.__qualname__ == _LATE else self.codes
            kind.append((function, code_of(function)))


def make_variants() -> dict[str, Variant]:
    """By name: "off" is SGLang's own code."""
    from sgl_aspects.tracing.observers.forward import ForwardObserver

    functions = woven_functions()
    passes = [one for one in gc.get_objects() if isinstance(one, ForwardObserver) and one.met_runner]

    def level_2(function: types.FunctionType) -> types.CodeType:
        return own_code(function) if function.__qualname__.endswith(_LEVEL_3) else function.__code__

    def level_3(function: types.FunctionType) -> types.CodeType:
        return function.__code__

    codes = {
        **dict.fromkeys(("off", "nothing", "burn 10"), own_code),
        "level 2": level_2,
        "level 3": level_3,
        "level 3, no event": level_3,
        "level 3, empty": empty_code,
    }
    found = {name: Variant(code_of, functions) for name, code_of in codes.items()}

    def set_events(are_on: bool) -> None:
        for observer in passes:
            observer.has_events = are_on

    found["burn 10"].burn_ns = 10_000
    found["level 3, no event"].begin = lambda: set_events(False)
    found["level 3, no event"].end = lambda: set_events(True)
    return found


class Exchange:
    """Stamps each step, and exchanges codes between groups of them."""

    def __init__(self, path: Path, step: Callable[..., Any]) -> None:
        self._path, self._step = path, step
        self._until = 0
        self._variants: dict[str, Variant] = {}

    def stamped(self, *args: Any, **kwargs: Any) -> Any:
        """In the place of the scheduler's method, between scheduling a batch and running it."""
        if self._until:
            now = time.perf_counter_ns()
            batch = args[1] if len(args) > 1 else kwargs["batch"]
            self._next(now, 0 if batch is None or batch.forward_mode.is_extend() else len(batch.reqs))
        return self._step(*args, **kwargs)

    def begin(self, *_: object) -> None:
        """The file says which variants, of which batch, for how many seconds."""
        wanted = json.loads(self._path.read_text())
        self._variants = make_variants()
        self._names = wanted["variants"]
        self._size = wanted["size"]
        self._groups: list[tuple[str, list[int]]] = []
        self._name, self._left, self._before = "off", 0, 0
        self._steps: list[int] = []
        self._is_clean = False
        self._burn_ns = 0
        self._pending = Codes()
        self._woven = [(one, one.__code__) for one in woven_functions()]
        self._until = time.perf_counter_ns() + int(wanted["seconds"] * 1e9)

    def _next(self, now: int, size: int) -> None:
        for function, code in self._pending:
            function.__code__ = code
        self._pending = Codes()
        if self._before:
            self._steps.append(now - self._before)
        self._is_clean = self._is_clean and size == self._size
        self._left -= 1
        if self._left < 0:
            if self._is_clean:
                self._groups.append((self._name, self._steps[_SKIP:]))
            if now > self._until and self._name == "off":
                self._finish()
                return
            self._variants[self._name].end()
            self._name = random.choice(self._names) if self._name == "off" else "off"
            variant = self._variants[self._name]
            for function, code in variant.codes:
                function.__code__ = code
            variant.begin()
            self._pending, self._burn_ns = variant.late_codes, variant.burn_ns
            self._left, self._steps, self._is_clean = random.randrange(12, 21), [], size == self._size
            self._before = time.perf_counter_ns()
            return
        self._before = now
        if self._burn_ns:
            end = now + self._burn_ns
            while time.perf_counter_ns() < end:
                pass

    def _finish(self) -> None:
        self._until = 0
        for function, code in self._woven:
            function.__code__ = code
        made = self._path.with_suffix(".made")
        made.with_suffix(".new").write_text(json.dumps(self._groups))
        made.with_suffix(".new").rename(made)


def activate() -> None:
    """Runs in each process: only a scheduler comes to the module that is waited for."""
    import wrapt

    def meet(module: Any) -> None:
        path, scheduler = Path(os.environ["EXCHANGE"]), module.Scheduler
        exchange = Exchange(path, getattr(scheduler, _STAMPED))

        def stamped(*args: Any, **kwargs: Any) -> Any:
            return exchange.stamped(*args, **kwargs)

        setattr(scheduler, _STAMPED, stamped)
        run = scheduler.run_event_loop if hasattr(scheduler, "run_event_loop") else None
        if run is None:
            raise RuntimeError("this SGLang's Scheduler has no run_event_loop")

        def run_event_loop(*args: Any, **kwargs: Any) -> Any:
            signal.signal(_SIGNAL, exchange.begin)
            path.with_suffix(".pid").write_text(str(os.getpid()))
            return run(*args, **kwargs)

        scheduler.run_event_loop = run_event_loop

    wrapt.register_post_import_hook(meet, "sglang.srt.managers.scheduler")
