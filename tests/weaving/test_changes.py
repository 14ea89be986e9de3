"""Changes of hooks: from within others, from signal handlers and threads, in pieces, on a frozen heap."""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookRegistry, HookType, State
from sgl_aspects.weaving import Pieces, in_pieces
from tests.support.processes import output_of, python
from tests.support.threads import in_threads
from tests.support.woven_modules import advice, around, fixture_of, hooked, module_of

engine = fixture_of("def f(x=0): return ('f', x)\nclass A:\n    def m(self): return 'm'\n")


def output_beside_an_engine(folder: Path, *program: str) -> str:
    (folder / "engine.py").write_text("def f(): return 'f'\n")
    return output_of(python("-c", *program, cwd=folder))


def test_a_removed_hook_that_was_disabled_is_active_when_it_is_woven_again(engine: Any) -> None:
    hook = around("engine:f", hooked)
    handle = aspects.weave(hook)
    handle.remove()
    handle.disable()
    assert handle.states == (State.REMOVED,)
    with aspects.woven(hook) as again:
        assert again.states == (State.WOVEN,)
        assert engine.f() == ("hooked", ("f", 0))


FREEZING = """
import gc, json, sys
import sgl_aspects as aspects
from sgl_aspects import HookType
import engine
held = {"f": engine.f}
"freezes" in sys.argv and gc.freeze()
before = gc.get_freeze_count()
hook = lambda original: ("hooked", original())
with aspects.woven(aspects.Advice(aspects.Target.parse("engine:f"), HookType.AROUND, hook)):
    seen = held["f"]()
print(json.dumps([seen, held["f"](), gc.get_freeze_count() - before]))
"""


@pytest.mark.parametrize("freezes", ["freezes", ""])
def test_a_heap_is_frozen_afterwards_if_the_engine_has_frozen_it(freezes: str, tmp_path: Path) -> None:
    """CPython 3.12 has frozen some objects of its own before any program runs."""
    seen, after, more = json.loads(output_beside_an_engine(tmp_path, FREEZING, freezes))
    assert (seen, after) == (["hooked", "f"], "f")
    assert more >= 0 if freezes else more == 0


SERVING = """
import gc, sys, weakref
import sgl_aspects as aspects
import engine
class Node:
    def __init__(self): self.own = self
gc.freeze()
gc.disable()  # it collects garbage when it is idle
ended, held = [], {"f": engine.f}
for _ in range(40):
    served = [Node() for _ in range(2000)]
    aspects.weave(aspects.around("engine:f")(lambda original_fn: original_fn())).remove()
    ended.append(weakref.ref(served[0]))
print(sum(node() is not None for node in ended), aspects.report().hooks)
"""


def test_what_lived_while_a_hook_was_woven_is_freed_in_a_process_that_froze_its_heap(tmp_path: Path) -> None:
    stayed, hooks = output_beside_an_engine(tmp_path, SERVING).split()
    assert int(stayed) <= 20
    assert hooks == "()"


def test_changes_from_within_a_change_come_after_it(engine: Any) -> None:
    handles = []

    class Eager:
        def bound_to(self, function: Any) -> Eager:
            handles.append(aspects.weave(around("engine:A.m", hooked)))
            handles.append(aspects.weave(around("engine:f", hooked)))
            handles.pop().remove()
            return self

        def enter(self, args: Any, kwargs: Any) -> None:
            pass

    with aspects.woven(advice("engine:f", HookType.OBSERVE, Eager())):
        assert engine.f() == ("f", 0)
        assert engine.A().m() == ("hooked", "m")
        assert handles[0].states == (State.WOVEN,)
    handles[0].remove()
    assert engine.A().m() == "m"


def test_a_signal_handler_weaves_while_the_program_does(engine: Any) -> None:
    begun = []

    def handler(*_: Any) -> None:
        handle = aspects.weave(around("engine:A.m", hooked))
        begun.append(handle)
        handle.remove()
        if len(begun) < 300:  # on a slow machine more would come than can be done
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005)
    try:
        while len(begun) < 300:
            with aspects.woven(around("engine:f", hooked)):
                assert engine.f() == ("hooked", ("f", 0))
            assert engine.f() == ("f", 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert engine.A().m() == "m"
    assert aspects.report().hooks == ()


def test_the_functions_that_weaving_itself_uses(engine: Any) -> None:
    names = ["builtins:issubclass", "builtins:setattr", "builtins:isinstance", "gc:get_referrers"]
    names += ["inspect:signature", "sys:getrefcount", "sgl_aspects.weaving.machine:Weaver.add"]
    with aspects.woven(*(around(name) for name in names)):
        with aspects.woven(around("engine:f", hooked), around("engine:A.m", hooked)):
            assert (engine.f(), engine.A().m()) == (("hooked", ("f", 0)), ("hooked", "m"))
        assert (engine.f(), engine.A().m()) == (("f", 0), "m")


@pytest.mark.parametrize("kind", [HookType.BEFORE, HookType.AROUND, HookType.NATIVE])
def test_a_call_goes_on_with_the_hooks_that_it_began_with(engine: Any, kind: HookType) -> None:
    """Its hook is removed meanwhile and another one woven: that one is for the next call."""
    handles: list[aspects.Handle] = []

    def change() -> bool:
        handles.pop().remove()
        handles.append(aspects.weave(around("engine:f", hooked)))
        return False

    hooks: dict[HookType, Any] = {
        HookType.BEFORE: lambda x: change() or None,
        HookType.AROUND: lambda original, x: change() or original(x),
        HookType.NATIVE: lambda proceed, args, kwargs: change() or proceed(args, kwargs),
    }
    handles.append(aspects.weave(advice("engine:f", kind, hooks[kind])))
    assert engine.f(1) == ("f", 1)
    assert engine.f(2) == ("hooked", ("f", 2))
    handles.pop().remove()


def test_a_subclass_of_the_registry_is_the_same_registry(engine: Any) -> None:
    class Ours(HookRegistry):
        pass

    original = engine.f
    Ours.register("engine.f", hooked, HookType.AROUND)
    Ours.apply_hooks()
    assert HookRegistry.is_hook_applied("engine.f", hooked, HookType.AROUND)
    Ours.reset()
    HookRegistry.apply_hooks()
    assert engine.f is original


def test_nothing_is_imported_while_hooks_change(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may hold the lock of the module, and wait for the weaver's."""
    seen = []

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            seen.append(name)

    monkeypatch.delitem(sys.modules, "difflib", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    handle = aspects.weave(around("engine:A.mm", hooked), around("engine:ff"), around("engine:A.m", hooked))
    assert [one.detail.rpartition("; ")[2] for one in handle.advices] == [
        "close names: A.m",
        "close names: f",
        "",
    ]
    handle.remove()
    assert seen == []


def test_what_the_last_call_says_holds_after_many_threads(engine: Any) -> None:
    original = engine.f
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        def hook(result: Any, *args: Any) -> Any:
            return result

        barrier.wait(60)
        for _ in range(40):
            HookRegistry.register("engine.f", hook)
            HookRegistry.apply_hooks()
            if number % 3 == 0:
                HookRegistry.unregister("engine.f", hook)
            if number % 3 == 1:
                HookRegistry.reset()

    with in_threads(*(functools.partial(work, number) for number in range(6))):
        pass
    HookRegistry.reset()
    assert aspects.report().hooks == ()
    assert engine.f is original
    HookRegistry.apply_hooks()
    assert engine.f is original


def test_a_hook_that_was_switched_off_and_removed_is_on_when_it_is_woven_again(engine: Any) -> None:
    hook = around("engine:f", hooked)
    handle = aspects.weave(hook)
    handle.disable()
    handle.remove()
    with aspects.woven(hook):
        assert engine.f() == ("hooked", ("f", 0))


def _tuple_made_meanwhile(wait: Callable[[], object]) -> object:
    """`tuple(generator)` raises SystemError where its tuple has a second reference when it grows."""
    return tuple(wait() if number == 1 else number for number in range(100))


def _buffer_grown_meanwhile(wait: Callable[[], object]) -> object:
    """A bytearray raises BufferError while it is looked into."""
    buffer = bytearray(1)
    view = memoryview(buffer)
    wait()
    del view
    buffer.extend(b"more")
    return buffer


@pytest.mark.parametrize("work", [_tuple_made_meanwhile, _buffer_grown_meanwhile])
def test_what_another_thread_works_with_is_not_held(
    monkeypatch: Any, work: Callable[[Callable[[], object]], object]
) -> None:
    begun, searched = threading.Event(), threading.Event()
    made = []

    def wait() -> None:
        begun.set()
        assert searched.wait(60)

    working = threading.Thread(target=lambda: made.append(work(wait)))
    one = Pieces.one

    @contextlib.contextmanager
    def between_pieces(self: Pieces) -> Iterator[None]:
        with one(self):
            yield
        searched.set()
        working.join(60)

    monkeypatch.setattr(Pieces, "one", between_pieces)
    with module_of("def f(): return 'f'") as module:
        held = [module.f]
        working.start()
        assert begun.wait(60)
        with in_pieces(rest=0), aspects.woven(around(f"{module.__name__}:f", hooked)):
            assert held == [module.f]
    assert len(made) == 1


def test_copies_of_more_functions_than_one_piece_looks_for() -> None:
    names = [f"f{number}" for number in range(10)]
    with module_of("\n".join(f"def {name}(): return '{name}'" for name in names)) as module:
        held = [getattr(module, name) for name in names]
        fixed = (module.f0, module.f9)
        hooks = [around(f"{module.__name__}:{name}", hooked) for name in names]
        with in_pieces(rest=0), aspects.woven(*hooks):
            assert [one() for one in held] == [("hooked", name) for name in names]
            assert sorted(stale.target[-2:] for stale in aspects.report().stale) == ["f0", "f9"]
        assert [one() for one in held] == names
        assert [one() for one in fixed] == ["f0", "f9"]


def test_containers_that_a_hook_has_left_behind_keep_no_others_from_being_changed(engine: Any) -> None:
    """New objects get the addresses of those that are gone."""

    class Replacement:
        def m(self, x: int = 0) -> str:
            return "replaced"

    original = engine.A
    for _ in range(20):
        handle = aspects.weave(advice("engine:A", HookType.REPLACE, Replacement))
        with aspects.woven(around("engine:A.m", hooked)):
            handle.disable()
            handle.enable()
        made = [types.FunctionType((lambda a, b: a).__code__, {}, "f", (engine.A, 1)) for _ in range(200)]
        held = [[engine.A] for _ in range(200)], [{"A": engine.A} for _ in range(200)]
        handle.remove()
        assert all(one() is original for one in made)
        assert all(one[0] is original for one in held[0])
        assert all(one["A"] is original for one in held[1])
