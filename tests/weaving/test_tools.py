"""What debuggers, tracebacks, coverage and `inspect` see of a hooked function: the user's own code."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copyreg
import functools
import gc
import inspect
import linecache
import pickle
import re
import subprocess
import sys
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from tests.support.processes import python
from tests.support.stand_ins import Engine
from tests.support.woven_modules import Watch, advice, around, fixture_of, hooked, state

HIDES_FRAMES = sys.version_info >= (3, 11)


SOURCE = '''
import math

scale = 3


def helper(x):
    return x * scale


def f(a, b=2):
    """Documented."""
    total = helper(a) + b
    return math.floor(total)


def outer(value, args=1):
    def inner(x):
        return x + value + args + unknown(x)
    return inner


inner = outer(5)


def fail(a):
    raise ValueError(a)


async def fail_later(a):
    raise ValueError(a)


def fail_item(a):
    yield a
    raise ValueError(a)


class Base:
    def m(self):
        return "base"


class C(Base):
    def m(self, x=1):
        return super().m(), helper(x)
'''


@pytest.fixture
def mod(engine: Engine) -> Iterator[Any]:
    engine.write("debugged.py", SOURCE)
    yield engine.load("debugged")
    linecache.clearcache()


@pytest.mark.parametrize("path", ["f", "inner", "fail", "fail_later", "fail_item", "C.m"])
def test_inspect_gives_the_users_code(mod: Any, path: str) -> None:
    def found() -> Any:
        return eval(path, vars(mod))

    def facts() -> list[Any]:
        function = found()
        code = function.__code__
        variables = inspect.getclosurevars(function)
        if sys.version_info >= (3, 14):  # it reads the instructions there, which are ours
            variables = variables._replace(globals={}, builtins={}, unbound=set())
        # Where torch._dynamo is loaded, there are three names that it reads instead of constants.
        known = {name: value for name, value in variables.globals.items() if name != "__sgl_aspects__"}
        unbound = {name for name in variables.unbound if not re.fullmatch(r"compiling|chain_\d+", name)}
        return [
            inspect.getfile(function),
            inspect.getsourcefile(function),
            inspect.getsourcelines(function),
            variables._replace(globals=known, unbound=unbound),
            inspect.getdoc(function),
            code.co_filename,
            code.co_firstlineno,
            code.co_name,
        ]

    original = found()
    bare = facts()
    assert bare[0].endswith("debugged.py")
    for hooks in ([around(f"debugged:{path}")], [Watch().on(f"debugged:{path}") for _ in range(6)]):
        with aspects.woven(*hooks):
            assert found() is not original
            assert facts() == bare


def test_a_closure_whose_variables_are_called_as_ours(mod: Any) -> None:
    mod.unknown = lambda x: 0
    with aspects.woven(around("debugged:inner"), Watch().on("debugged:inner")):
        assert mod.inner(1) == 7
        assert "args" in inspect.getclosurevars(mod.inner).nonlocals


def finish(function: Any, *args: Any) -> Any:
    value = function(*args)
    return asyncio.run(value) if inspect.iscoroutine(value) else list(value)


@pytest.mark.parametrize("path", ["fail", "fail_later", "fail_item"])
def test_each_line_of_a_traceback_has_its_source(mod: Any, path: str) -> None:
    def hook(original_fn: Any, *args: Any, **kwargs: Any) -> Any:
        return original_fn(*args, **kwargs)

    with aspects.woven(around(f"debugged:{path}", hook), Watch().on(f"debugged:{path}")):
        with pytest.raises(ValueError, match="5") as caught:
            finish(getattr(mod, path), 5)
        frames = traceback.extract_tb(caught.value.__traceback__)
    assert all(frame.line for frame in frames)
    mine = [frame.line for frame in frames if frame.filename == mod.__file__]
    definition = inspect.getsourcelines(getattr(mod, path))[0][0].strip()
    is_hidden = HIDES_FRAMES and path == "fail"
    assert mine == [*([] if is_hidden else [definition]), "raise ValueError(a)"]
    assert all(Path(frame.filename).exists() for frame in frames)


PDB = """
import sys
sys.path.insert(0, {folder!r})
import debugged, sgl_aspects as aspects

@aspects.around("debugged:f")
def hook(original_fn, *args, **kwargs):
    return original_fn(*args, **kwargs)

aspects.weave(hook)
{before}
print("result", debugged.f(1))
"""


@pytest.mark.parametrize(
    "place", ["debugged.f", f"debugged:{SOURCE.splitlines().index('    total = helper(a) + b') + 1}"]
)
def test_the_first_stop_at_a_breakpoint_is_in_the_users_body(tmp_path: Path, place: str) -> None:
    (tmp_path / "debugged.py").write_text(SOURCE)
    program = tmp_path / "program.py"
    program.write_text(PDB.format(folder=str(tmp_path), before="print('ready')"))
    last = len(program.read_text().splitlines())
    before = "" if HIDES_FRAMES else "c\n"  # the first stop is in the woven function
    commands = f"b {last}\nc\nb {place}\nc\n{before}p 'seen', a, b\nw\nc\nq\n"
    pdb = [sys.executable, "-m", "pdb", str(program)]
    done = subprocess.run(pdb, input=commands, capture_output=True, text=True, timeout=60)
    assert "-> total = helper(a) + b" in done.stdout
    assert "('seen', 1, 2)" in done.stdout
    assert "result 5" in done.stdout


def test_coverage_sees_the_users_lines(tmp_path: Path) -> None:
    coverage = pytest.importorskip("coverage")
    (tmp_path / "debugged.py").write_text(SOURCE)
    program = tmp_path / "program.py"
    program.write_text(PDB.format(folder=str(tmp_path), before=""))
    words = ["-W", "error", "-m", "coverage", "run", "--branch", "--include=*/debugged.py", str(program)]
    done = python(*words, cwd=tmp_path, without=("COVERAGE_",))
    assert (done.stdout, done.stderr) == ("result 5\n", "")
    data = coverage.CoverageData(str(tmp_path / ".coverage"))
    data.read()
    (measured,) = data.measured_files()
    lines = set(data.lines(measured) or ())
    first = SOURCE.splitlines().index("def f(a, b=2):") + 1
    assert {first, first + 2, first + 3} <= lines
    assert SOURCE.splitlines().index("    raise ValueError(a)") + 1 not in lines


def test_weak_references_are_named_and_those_made_meanwhile_survive(mod: Any) -> None:
    made = mod.C()
    before = weakref.WeakMethod(made.m)
    with aspects.woven(around("debugged:C.m")):
        within = weakref.WeakMethod(made.m)
        (stale,) = aspects.report().stale
        assert "a weak reference" in stale.holder
    for weak in (before, within):
        method = weak()
        assert method is not None
        assert method() == ("base", 3)


CALLERS = """
import collections, functools, logging, sys, traceback, warnings

def frame(): return sys._getframe(1)
cached = functools.lru_cache(frame)
def line(): return [one.name for one in traceback.extract_stack()][-2]
def warn(): warnings.warn("old", DeprecationWarning, stacklevel=2)
def make(): return collections.namedtuple("Point", "x y")
def fail(): raise ValueError("5")
"""


@pytest.mark.skipif(not HIDES_FRAMES, reason="Python 3.10 shows every frame")
@pytest.mark.parametrize("kind", [HookType.OBSERVE, HookType.BEFORE, HookType.AFTER])
def test_no_frame_is_between_a_function_and_its_caller_with_hooks_that_do_not_call_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: HookType
) -> None:
    engine.write("looking_up.py", CALLERS)
    module = engine.load("looking_up")
    monkeypatch.setattr(collections, "namedtuple", collections.namedtuple)
    hook = Watch() if kind is HookType.OBSERVE else lambda *args, **kwargs: None
    targets = ("looking_up:*", "looking_up:*", "collections:namedtuple")
    with aspects.woven(*[advice(target, kind, hook) for target in targets]):
        assert module.frame() is module.cached() is sys._getframe()
        assert module.line() == sys._getframe().f_code.co_name
        with pytest.warns(DeprecationWarning, match="old") as caught:
            module.warn()
        assert caught[0].filename == __file__
        assert module.make().__module__ == "looking_up"
        with pytest.raises(ValueError, match="5") as failed:
            module.fail()
        names = [frame.name for frame in traceback.extract_tb(failed.value.__traceback__)]
        assert names == [sys._getframe().f_code.co_name, "fail"]


def test_a_profiler_sees_as_many_calls_end_as_begin(mod: Any) -> None:
    events: list[tuple[str, str]] = []
    nothing = advice("debugged:fail", HookType.BEFORE, lambda *args: None)
    with aspects.woven(Watch().on("debugged:fail"), around("debugged:f"), nothing):
        sys.setprofile(lambda frame, event, _: events.append((event, frame.f_code.co_name)))
        try:
            for function in (mod.f, mod.fail):
                with contextlib.suppress(ValueError):
                    function(1)
        finally:
            sys.setprofile(None)
    for name in ("f", "fail"):
        assert events.count(("call", name)) == events.count(("return", name)) == 2


@pytest.mark.parametrize("kind", [HookType.OBSERVE, HookType.BEFORE, HookType.AFTER, HookType.AROUND])
def test_a_trace_function_is_given_a_line_with_each_event(mod: Any, kind: HookType) -> None:
    events: list[tuple[str, str, int | None]] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        events.append((event, frame.f_code.co_name, frame.f_lineno))
        return trace

    hook = {HookType.OBSERVE: Watch(), HookType.AROUND: lambda original, *args: original(*args)}
    with aspects.woven(advice("debugged:*", kind, hook.get(kind, lambda *args: None))):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            for function in (mod.f, mod.fail):
                with contextlib.suppress(ValueError):
                    function(1)
        finally:
            sys.settrace(before)
    assert {("call", "f"), ("return", "fail")} <= {event[:2] for event in events}
    assert not [event for event in events if event[2] is None]


def test_an_observer_looks_at_the_stack_where_a_call_begins_and_ends(mod: Any) -> None:
    stacks: list[list[str]] = []

    def look(*_: Any) -> None:
        stacks.append([frame.function for frame in inspect.stack()][1:])

    targets = ("debugged:f", "debugged:fail")
    with aspects.woven(*[aspects.observe(target, enter=look, exit=look) for target in targets]):
        mod.f(1)
        with contextlib.suppress(ValueError):
            mod.fail(1)
    began, ended, began_again, raised = stacks
    assert began == ended
    # Its own frame shows there on Python 3.10, and where it raised from 3.12 on.
    assert [name for name in raised if name != "fail"] == [name for name in began_again if name != "fail"]


one = fixture_of("def f(x=1): return ('f', x)")


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def enter(self, args: Any, kwargs: Any) -> None: ...

    def __call__(self, original: Any, *args: Any) -> Any:
        return original(*args) if callable(original) else None


@pytest.mark.parametrize("kind", [HookType.AROUND, HookType.AFTER, HookType.OBSERVE, HookType.REPLACE])
def test_the_constants_of_a_hooked_functions_code_have_a_hash(one: Any, kind: HookType) -> None:
    with aspects.woven(advice("engine:f", kind, Unhashable())):
        one.f(2)
        assert [hash(constant) for constant in one.f.__code__.co_consts]


def test_what_copyreg_says_about_pickling_holds_for_a_hooked_object(
    one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd:
        def __call__(self) -> int:
            return 5

        def __reduce__(self) -> Any:
            raise TypeError("by copyreg only")

    monkeypatch.setitem(copyreg.dispatch_table, Odd, lambda odd: "odd")
    one.odd = Odd()
    Odd.__module__ = "engine"
    with aspects.woven(around("engine:odd", hooked)):
        assert pickle.loads(pickle.dumps(one.odd))() == ("hooked", 5)


def test_a_weak_reference_to_a_hooked_decoration_of_no_function_survives_the_removal(one: Any) -> None:
    @functools.wraps(print)
    def shown() -> str:
        return "shown"

    one.shown = shown
    with aspects.woven(around("engine:shown", hooked)):
        weak = weakref.ref(one.shown)
    gc.collect()
    found = weak()
    assert found is not None
    assert found() == "shown"


def test_a_woven_hook_is_pickled_without_the_modules_that_it_is_woven_in(one: Any) -> None:
    """As cloudpickle does with the code of a function that no module names, such as a lambda."""
    hook = around("engine:f", hooked, order=3)
    with aspects.woven(hook):
        one.f(1)
        copied = pickle.loads(pickle.dumps(hook))
        assert state(hook) is aspects.State.WOVEN
    assert str(copied) == str(hook)
    assert (copied.order, copied.state) == (3, aspects.State.REMOVED)
