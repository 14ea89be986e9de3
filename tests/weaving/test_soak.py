"""Weaving while calls run: nothing lost, nothing doubled, nothing half hooked; and random chains of hooks."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sgl_aspects as aspects
from sgl_aspects import HookType
from tests.support.threads import in_threads
from tests.support.woven_modules import advice, around, module_of

SOURCE = """
def f(ticket, scale=1):
    return [ticket * scale]
class C:
    def m(self, ticket, scale=1):
        return [ticket * scale]
def g(ticket, scale=1):
    yield ticket * scale
"""
THREADS = 8


@pytest.fixture(autouse=True)
def often_switching() -> Iterator[None]:
    """Threads change places a hundred times as often as they do by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.00005)
    yield
    sys.setswitchinterval(before)


@contextmanager
def calling(*calls: Callable[[int], list[Any]], pause: float = 0) -> Iterator[list[Caller]]:
    """Threads that call all the time; at the end, that all of their calls went well.

    :param pause: seconds that each of them leaves to the others after some calls.
    """
    stop = threading.Event()
    threads = [Caller(calls[index % len(calls)], index * 10**9, stop, pause) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=60)
    assert [fault for thread in threads for fault in thread.faults] == []
    assert all(thread.count > 100 and not thread.is_alive() for thread in threads)


def callers(module: Any) -> dict[str, Callable[[int], list[Any]]]:
    made = module.C()
    bound, copy = made.m, module.f
    return {
        "f": lambda ticket: module.f(ticket),
        "f by keyword": lambda ticket: module.f(scale=1, ticket=ticket),
        "a copy of f": lambda ticket: copy(ticket),
        "C.m": lambda ticket: made.m(ticket),
        "a bound C.m": lambda ticket: bound(ticket, scale=1),
        "g": lambda ticket: next(iter(module.g(ticket))),
    }


class Pair:
    """Two hooks woven together: a call sees both or neither. The observer leaves as often as it enters."""

    def __init__(self, target: str) -> None:
        self.local = threading.local()
        self.entered, self.left = itertools.count(), itertools.count()
        self.faults: list[str] = []
        self.advices = (
            advice(target, HookType.OBSERVE, self),
            around(target, self.around),
        )

    def enter(self, args: Any, kwargs: Any) -> int:
        next(self.entered)
        self.local.depth = getattr(self.local, "depth", 0) + 1
        return self.local.depth  # type: ignore[no-any-return]

    def exit(self, token: int, result: Any, error: Any) -> None:
        next(self.left)
        if self.local.depth != token:
            self.faults.append(f"left at depth {self.local.depth}, entered at {token}")
        self.local.depth -= 1

    def around(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self.local, "depth", 0) < 1:
            self.faults.append("an around hook ran without the observer that came with it")
        return original(*args, **kwargs)


@dataclass
class Caller(threading.Thread):
    """Calls all the time, and checks each answer."""

    call: Callable[[int], list[Any]]
    start_at: int
    stop: threading.Event
    pause: float
    faults: list[str] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        ticket = self.start_at
        while not self.stop.is_set():
            ticket += 1
            self.count += 1
            if self.pause and not self.count % 20:
                time.sleep(self.pause)
            try:
                answer = self.call(ticket)
            except BaseException as error:  # noqa: BLE001  whatever it is, it is a fault
                self.faults.append(repr(error))
                return
            # "replaced" is the only thing a hook here does to a result.
            if answer not in ([ticket], ["replaced", ticket], ticket):
                self.faults.append(f"{ticket} gave {answer}")


def replacement(*args: Any, **kwargs: Any) -> list[Any]:
    """Another signature than the target's, methods included."""
    return ["replaced", kwargs["ticket"] if "ticket" in kwargs else next(a for a in args if type(a) is int)]


def renamed(number: int, factor: int = 1) -> list[Any]:
    """Takes no `scale`: a call that is half way to it would fail. Only for callers by position."""
    return ["replaced", number]


class Comings:
    """Random hooks that come and go, on functions that threads call meanwhile."""

    def __init__(self, targets: list[str]) -> None:
        self.targets = targets
        self.choose = random.Random(5)
        self.pairs: list[Pair] = []
        self.handles: list[aspects.Handle] = []

    def step(self) -> None:
        target = self.choose.choice(self.targets)
        kind = self.choose.choice(["pair", "pair", "replace", "native", "many", "remove", "switch"])
        if kind == "pair":
            self.weave_pairs(target, 1)
        elif kind == "many":
            self.weave_pairs(target, self.choose.randrange(2, 6))
        elif kind == "replace" and target != "engine:g":
            self.handles.append(aspects.weave(advice(target, HookType.REPLACE, replacement)))
        elif kind == "native":
            native = advice(target, HookType.NATIVE, lambda proceed, args, kwargs: proceed(args, kwargs))
            self.handles.append(aspects.weave(native))
        elif kind == "switch" and self.handles:
            handle = self.choose.choice(self.handles)
            handle.disable()
            handle.enable()
        if kind == "remove" or len(self.handles) > 6:
            while len(self.handles) > 3:
                self.handles.pop(self.choose.randrange(len(self.handles))).remove()

    def weave_pairs(self, target: str, count: int) -> None:
        pairs = [Pair(target) for _ in range(count)]
        self.pairs += pairs
        self.handles.append(aspects.weave(*(one for pair in pairs for one in pair.advices)))

    def end(self) -> None:
        for handle in self.handles:
            handle.remove()

    def check(self) -> None:
        assert [fault for pair in self.pairs for fault in pair.faults] == []
        assert all(next(pair.entered) == next(pair.left) for pair in self.pairs)


TARGETS = ["engine:f", "engine:C.m", "engine:g"]


def test_calls_of_many_threads_while_functions_are_woven_and_restored() -> None:
    with module_of(SOURCE) as module:
        originals = (module.f, module.C.m, module.g)
        comings = Comings(TARGETS)
        with calling(*callers(module).values()):
            for _ in range(60):
                comings.step()
            comings.end()
        comings.check()
        assert (module.f, module.C.m, module.g) == originals


@pytest.mark.parametrize("steps", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_calls_of_many_threads_while_hooks_of_woven_functions_come_and_go(steps: int) -> None:
    with module_of(SOURCE) as module, aspects.woven(*(around(target) for target in TARGETS)):
        comings = Comings(TARGETS)
        with calling(*callers(module).values()):
            for _ in range(steps):
                comings.step()
            comings.end()
        comings.check()
    assert module.f(3) == module.C().m(3) == [3]


@pytest.mark.parametrize("turns", [500, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_replacement_of_another_signature_is_never_half_there(turns: int) -> None:
    """The call's convention and the function change together: a mixture would raise TypeError."""
    with (
        module_of(SOURCE) as module,
        aspects.woven(around("engine:f")),
        calling(lambda ticket: module.f(ticket, 1)),
    ):
        for _ in range(turns):
            aspects.weave(advice("engine:f", HookType.REPLACE, renamed)).remove()


def test_every_call_is_counted_once() -> None:
    with module_of(SOURCE) as module, aspects.woven(around("engine:f")):
        each = 10_000

        def call() -> None:
            for ticket in range(each):
                module.f(ticket)

        with in_threads(*[call] * THREADS) as threads:
            while any(thread.is_alive() for thread in threads):
                aspects.weave(Pair("engine:f").advices[0]).remove()
        assert aspects.report().hooks[0].calls == each * THREADS


# -- random chains against a model -------------------------------------------------------------------------


@dataclass
class Modelled:
    """A hook, and its expected state."""

    name: str
    kind: HookType
    order: int
    enabled: bool
    sequence: int
    handle: aspects.Handle


def make_hook(name: str, kind: HookType, log: list[str]) -> Any:
    """A hook of ``kind`` that writes down that it ran, and wraps the result in its name."""

    def before(x: int) -> Any:
        log.append(name)
        return (x + 1,), {}

    def after(result: str, x: int) -> str:
        log.append(name)
        return f"{name}({result})"

    def native(proceed: Any, args: tuple[int], kwargs: dict[str, Any]) -> str:
        log.append(f"+{name}")
        result = proceed(args, kwargs)
        log.append(f"-{name}")
        return f"{name}({result})"

    def around_(original: Any, x: int) -> str:
        return native(lambda args, kwargs: original(*args), (x,), {})

    def replace(x: int) -> str:
        log.append(name)
        return f"{name}[{x}]"

    class Observer:
        def enter(self, args: Any, kwargs: Any) -> int:
            log.append(f"+{name}")
            assert kwargs == {}
            return len(args)

        def exit(self, token: int, result: Any, error: Any) -> None:
            log.append(f"-{name}")
            assert token == 1

    return {
        HookType.BEFORE: before,
        HookType.AFTER: after,
        HookType.AROUND: around_,
        HookType.NATIVE: native,
        HookType.REPLACE: replace,
        HookType.OBSERVE: Observer(),
    }[kind]


def expected(hooks: list[Modelled], x: int) -> tuple[str, list[str]]:
    """What a call gives and logs: the rules of the order, written down a second time."""
    active = [hook for hook in hooks if hook.enabled]
    in_order = sorted(active, key=lambda hook: (hook.order, hook.sequence))
    log: list[str] = []
    observers = [hook for hook in in_order if hook.kind is HookType.OBSERVE]
    chain = [hook for hook in in_order if hook.kind not in (HookType.OBSERVE, HookType.REPLACE)]
    replaces = [hook for hook in in_order if hook.kind is HookType.REPLACE]

    def run(depth: int, x: int) -> str:
        if depth < 0:
            if not replaces:
                return f"f[{x}]"
            log.append(replaces[-1].name)
            return f"{replaces[-1].name}[{x}]"
        hook = chain[depth]
        if hook.kind is HookType.BEFORE:
            log.append(hook.name)
            return run(depth - 1, x + 1)
        if hook.kind is HookType.AFTER:
            result = run(depth - 1, x)
            log.append(hook.name)
            return f"{hook.name}({result})"
        log.append(f"+{hook.name}")
        result = run(depth - 1, x)
        log.append(f"-{hook.name}")
        return f"{hook.name}({result})"

    log += [f"+{hook.name}" for hook in reversed(observers)]
    result = run(len(chain) - 1, x)
    log += [f"-{hook.name}" for hook in observers]
    return result, log


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("weave"), st.sampled_from(list(HookType)), st.integers(-2, 2)),
        st.tuples(st.sampled_from(["disable", "enable", "remove"]), st.integers(0, 20), st.just(0)),
    ),
    max_size=25,
)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("target", ["f", "C.m"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_random_chains_do_what_the_model_says(target: str, steps: list[tuple[str, Any, int]]) -> None:
    source = "def f(x): return f'f[{x}]'\nclass C:\n    @staticmethod\n    def m(x): return f'f[{x}]'\n"
    with module_of(source) as module:
        original = module.f if target == "f" else vars(module.C)["m"]
        log: list[str] = []
        hooks: list[Modelled] = []
        names = itertools.count()
        try:
            for step, which, order in steps:
                if step == "weave":
                    name = f"{which.value}{next(names)}"
                    made = advice(f"engine:{target}", which, make_hook(name, which, log), order=order)
                    hooks.append(Modelled(name, which, order, True, made.sequence, aspects.weave(made)))
                elif hooks:
                    hook = hooks[which % len(hooks)]
                    getattr(hook.handle, step)()
                    hook.enabled = step == "enable"
                    if step == "remove":
                        hooks.remove(hook)
                log.clear()
                call = module.f if target == "f" else module.C.m
                assert (call(1), log) == expected(hooks, 1)
                standing = module.f if target == "f" else vars(module.C)["m"]
                assert (standing is original) == (not any(hook.enabled for hook in hooks))
        finally:
            for hook in hooks:
                hook.handle.remove()
        assert (module.f if target == "f" else vars(module.C)["m"]) is original
