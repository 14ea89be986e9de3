"""Changes that end in the middle: by Ctrl-C or at the recursion limit."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from sgl_aspects.weaving import weaver
from sgl_aspects.weaving.rebinding import Pair, rebind
from tests.support.woven_modules import advice, around, hooked, module_of, no_hook_is_left

__all__ = ["no_hook_is_left"]

SOURCE = """
import functools
def f(x=1): return ('f', x)
class A:
    def m(self): return 'm'
    @property
    def p(self): return 'p'
class Sub(A): pass
class Old: pass
@functools.cache
def c(): return 'c'
copies = {'f': f, 'c': c}
"""


@pytest.fixture
def engine() -> Iterator[Any]:
    with module_of(SOURCE) as module:
        yield module


def interrupted(change: Callable[[], object], name: str) -> None:
    """Run ``change``; Ctrl-C comes as the function ``name`` of the weaver is called."""

    def trace(frame: types.FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_name == name and frame.f_globals["__name__"].startswith("sgl_aspects.weaving"):
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            change()
    finally:
        sys.settrace(before)


STEPS = (
    "_detach",
    "forget",
    "apply",
    "refresh",
    "take_out",
    "pairs",
    "rebind",
    "_rebind_modules",
    "_follow",
    "_drop",
    "_run_deferred",
)


@pytest.mark.parametrize("kind", ["remove", "disable"])
@pytest.mark.parametrize("step", STEPS)
def test_a_removal_that_ctrl_c_ends_is_completed_by_the_next(engine: Any, kind: str, step: str) -> None:
    if kind == "disable" and step in ("_detach", "forget", "_drop"):
        return

    class New:
        pass

    before = {owner: types.MappingProxyType(dict(vars(owner))) for owner in (engine, engine.A, engine.Sub)}
    paths = ("f", "A.m", "A.p", "Sub.m", "c")
    copies = dict.copy(engine.copies)
    handle = aspects.weave(
        *(around(f"engine:{path}", hooked) for path in paths), advice("engine:Old", HookType.REPLACE, New)
    )
    interrupted(getattr(handle, kind), step)
    handle.remove()
    assert weaver.points == []
    for owner, names in before.items():
        assert dict(vars(owner)) == names
    assert engine.copies == copies == {"f": engine.f, "c": engine.c}
    with aspects.woven(around("engine:f", hooked)):
        assert engine.copies["f"]() == ("hooked", ("f", 1))
    assert engine.copies["f"]() == ("f", 1)


@pytest.mark.parametrize(
    "step", ["_weave", "attach", "_point_for", "_warn_of_second_replace", *STEPS[2:4], "put", *STEPS[5:9]]
)
def test_a_weave_that_ctrl_c_ends_leaves_nothing(engine: Any, step: str) -> None:
    before = {owner: types.MappingProxyType(dict(vars(owner))) for owner in (engine, engine.A, engine.Sub)}
    advices = [around(f"engine:{path}", hooked) for path in ("f", "A.m", "A.p", "Sub.m", "c")]
    interrupted(lambda: aspects.weave(*advices), step)
    assert aspects.report() == aspects.Report()
    assert weaver.points == []
    for owner, names in before.items():
        assert dict(vars(owner)) == names
    assert engine.copies == {"f": engine.f, "c": engine.c}


def test_a_bug_in_rebinding_one_object_harms_no_other_hook(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = engine.f

    def broken(pairs: list[Pair]) -> Any:
        if any(original in (pair.old, pair.new) for pair in pairs):
            raise ValueError
        return rebind(pairs)

    monkeypatch.setattr("sgl_aspects.weaving.table.rebind", broken)
    with pytest.raises(ValueError):
        aspects.weave(around("engine:f", hooked))
    with aspects.woven(around("engine:A.m", hooked)):
        assert engine.A().m() == ("hooked", "m")
    assert engine.A().m() == "m"


def test_a_weave_at_the_recursion_limit_leaves_no_hook_pending_that_is_not_in_the_report(engine: Any) -> None:
    """A few frames before the limit, the weaver can begin, and not undo what it has begun."""

    def deep(frames: int, function: Callable[[], Any]) -> Any:
        return deep(frames - 1, function) if frames else function()

    original, limit = engine.f, sys.getrecursionlimit()
    hooks, handles = [around("engine:f") for _ in range(200)], []
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)
    try:
        for frames, hook in enumerate(hooks):
            with contextlib.suppress(RecursionError):
                handles.append(deep(frames, lambda hook=hook: aspects.weave(hook)))  # type: ignore[misc]
    finally:
        sys.setrecursionlimit(limit)
    assert 0 < len(handles) < 200
    weaver.remove(weaver.advices)
    assert {hook.state for hook in hooks} == {aspects.State.REMOVED}
    assert engine.f is original
