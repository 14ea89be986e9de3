"""Many weaves and removals, by one thread and by eight: each hook runs while woven, and nothing grows."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from tests.support.processes import output_of, python
from tests.support.threads import in_threads
from tests.support.woven_modules import advice, module_of

SOURCE = "def f(ticket): return [ticket]\nclass C:\n    def m(self, ticket): return [ticket]\n"
TARGETS = ["engine:f", "engine:C.m"]
THREADS = 8


class Balance:
    """An observer that leaves as often as it enters."""

    def __init__(self) -> None:
        self.entered, self.left = itertools.count(), itertools.count()

    def enter(self, args: Any, kwargs: Any) -> int:
        return next(self.entered)

    def exit(self, token: int, result: Any, error: Any) -> None:
        next(self.left)


@pytest.mark.slow
def test_eight_threads_weave_a_thousand_times_each_and_leave_nothing_behind() -> None:
    """In a process of its own: a weave may look through all modules, and here may be thousands.

    `make soak` weaves ten thousand times each.
    """
    program = "import tests.weaving.test_growth as test; test.soak(1_000)"
    output_of(python("-c", program, cwd=Path(__file__).resolve().parents[2]))


def soak(each: int = 10_000) -> None:
    """Each thread's call has its own hook until the removal returns, and not after it; nothing has grown."""
    sys.setswitchinterval(0.00005)
    finders, sizes = list(sys.meta_path), []
    with module_of(SOURCE) as module:
        originals = (module.f, module.C.__dict__["m"])
        made = module.C()
        calls = [lambda ticket: module.f(ticket), lambda ticket: made.m(ticket)]
        for count in (each // 10, each - each // 10):
            with in_threads(
                *(partial(_weave, calls, number, count) for number in range(THREADS)), seconds=900
            ):
                pass
            gc.collect()
            sizes.append(len(gc.get_objects()))
        assert (module.f, module.C.__dict__["m"]) == originals
        assert _faults == []
        assert aspects.report().hooks == ()
        assert sys.meta_path == finders
        assert sizes[1] - sizes[0] < 500, sizes


_faults: list[str] = []


def _weave(calls: list[Callable[[int], list[Any]]], number: int, count: int) -> None:
    choose, seen = random.Random(number), threading.local()

    def note(following: Any, args: Any, kwargs: Any) -> Any:
        seen.count = getattr(seen, "count", 0) + 1
        return following(args, kwargs)

    for ticket in range(count):
        which = choose.randrange(2)
        hooks = [
            advice(TARGETS[which], HookType.NATIVE, note),
            advice(TARGETS[which], HookType.OBSERVE, Balance()),
        ]
        with aspects.woven(*hooks[: choose.randrange(1, 3)]):
            seen.count = 0
            answers = [calls[which](ticket)]
            ours = seen.count
        answers.append(calls[which](ticket))
        if (answers, ours, seen.count) != ([[ticket]] * 2, 1, 1):
            _faults.append(f"{TARGETS[which]}: {answers} by {ours} and {seen.count} hooks")


def test_two_thousand_weaves_and_removals_leave_nothing_behind() -> None:
    sizes = []
    with module_of(SOURCE):
        for count in (100, 2000):
            for number in range(count):
                aspects.weave(advice(TARGETS[number % 2], HookType.OBSERVE, Balance())).remove()
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert sizes[1] - sizes[0] < 100
