"""A woven function with one observer is called in C on CPython 3.12 and newer: it acts as in Python."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exchange import watched_methods
from sgl_aspects.compat import HIDES_FRAMES
from sgl_aspects.tracing.record import native
from sgl_aspects.weaving import Advice, Handle, HookType, Target, report, weave
from tests.support.attachable import python_of
from tests.support.builds import build, is_compiled
from tests.support.threads import in_threads
from tests.support.tree import ROOT

in_c = pytest.mark.skipif(native.WatchedCall is None, reason="needs CPython 3.12 and a C compiler")
_CODE = """
import sys, traceback

def plain(a, b=2, *more, key=None, **others):
    return a, b, more, key, others

def failing(a):
    raise ValueError(a)

def depth(n):
    return n and 1 + depth(n - 1)

def callers():
    return [frame.name for frame in traceback.extract_stack()]

def generator(n):
    yield from range(n)

class Base:
    def method(self, a):
        return ["base", a]

class Derived(Base):
    def method(self, a, *, key=0):
        return ["derived", *super().method(a), key]

    @classmethod
    def of_class(cls, a):
        return cls.__name__, a

    @staticmethod
    def alone(a):
        return a
"""


_handles: list[Handle] = []


class Observer:
    """Keeps what it sees. ``broken``: what its parts raise."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.broken: dict[str, BaseException] = {}

    def enter(self, args: Any, kwargs: Any) -> Any:
        self.seen.append(("enter", args, kwargs))
        if "enter" in self.broken:
            raise self.broken["enter"]
        return len(self.seen)

    def exit(self, token: Any, result: Any, error: Any) -> None:
        self.seen.append(("exit", token, result, error, sys.exc_info()[1]))
        if "exit" in self.broken:
            raise self.broken["exit"]


@pytest.fixture
def target() -> Iterator[Any]:
    module: Any = types.ModuleType("watched_target")
    exec(compile(_CODE, "watched_target.py", "exec"), module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    while _handles:
        _handles.pop().remove()
    del sys.modules[module.__name__]


def observe(name: str, observer: Any = None, *, caller: Any = None) -> tuple[Any, Handle]:
    observer = observer or Observer()
    advice = Advice(Target.parse(f"watched_target:{name}"), HookType.OBSERVE, observer)
    advice.caller = caller or native.WatchedCall
    _handles.append(weave(advice))
    return observer, _handles[-1]


def told(handle: Handle) -> Any:
    """What the report has of the hook."""
    (advice,) = handle.advices
    return next(hook for hook in report().hooks if hook.target == str(advice.target) and hook.calls)


def test_a_newer_python_runs_these_tests(tmp_path: Path) -> None:
    """Where the tests run on an older one: on the package as it is built for the newer."""
    if native.WatchedCall is not None:
        return  # they run here
    python = python_of("3.13") or python_of("3.12")
    if python is None:
        pytest.skip("there is no CPython 3.12 or newer here")
    built = build(python, tmp_path / "build")
    if not is_compiled(built):
        pytest.skip(f"{python} has no headers, or there is no C compiler here")
    packages = {str(Path(sys.modules[name].__file__ or "").parents[1]) for name in ("pytest", "wrapt")}
    path = os.pathsep.join([str(built), str(ROOT), *packages])
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    flags = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--import-mode", "importlib"]
    command = [python, "-m", "pytest", *flags, "-k", "not torch", __file__]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout


def test_the_benchmark_finds_and_exchanges_what_is_woven(target: Any, monkeypatch: Any) -> None:
    """It knows weaving's classes by their names, and exchanges the function that an observer is woven on."""
    seen: list[str] = []

    def step_enter(args: Any, kwargs: Any) -> None:
        seen.append("enter")

    def step_exit(token: Any, result: Any, error: Any) -> None:
        seen.append("exit")

    monkeypatch.setitem(sys.modules, "watched_target.part", target)
    observe("Base.method", types.SimpleNamespace(enter=step_enter, exit=step_exit))
    (method,) = watched_methods("watched_target")
    for run, times in ((method.on, 1), (method.off, 0)):
        method.run = run
        seen.clear()
        assert target.Base().method(1) == ["base", 1]
        assert seen == ["enter", "exit"] * times


@in_c
def test_it_is_called_without_a_frame(target: Any) -> None:
    before = target.callers()
    _, handle = observe("callers")
    assert target.callers() == before
    assert "callers" in before
    handle.remove()
    assert target.callers() == before


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1,), {}), ((1, 2, 3, 4), {}), ((), {"a": 1}), ((1,), {"key": 5, "other": 6}), ((1, 2, 3), {"z": 1})],
)
def test_arguments_are_seen_as_written(target: Any, args: Any, kwargs: Any) -> None:
    expected = target.plain(*args, **kwargs)
    observer, handle = observe("plain")
    assert target.plain(*args, **kwargs) == expected
    assert observer.seen == [("enter", args, kwargs), ("exit", 1, expected, None, None)]
    assert told(handle).calls == 1
    observer.seen[0][2]["a"] = 7  # a dictionary of its own
    assert target.plain(*args, **kwargs) == expected
    assert told(handle).calls == 2


def test_too_few_arguments(target: Any) -> None:
    observer, _ = observe("plain")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        target.plain()
    assert isinstance(observer.seen[1][3], TypeError)


def test_an_exception_passes_through(target: Any) -> None:
    observer, _ = observe("failing")
    with pytest.raises(ValueError, match="seven") as caught:
        target.failing("seven")
    _, token, result, error, handled = observer.seen[1]
    assert (token, result) == (1, None)
    assert error is caught.value is handled
    assert caught.value.__context__ is None
    names = [frame.name for frame in caught.traceback]
    assert names.count("failing") == (1 if HIDES_FRAMES else 2)
    after: list[Any] = []
    try:
        raise KeyError("outer")
    except KeyError:
        with pytest.raises(ValueError, match="eight") as caught:
            target.failing("eight")
        after += [caught.value.__context__, sys.exc_info()[1]]
    assert isinstance(after[0], KeyError)
    assert after[0] is after[1]


@pytest.mark.parametrize("part", ["enter", "exit"])
def test_an_observer_that_raises_harms_no_call(target: Any, part: str, caplog: Any) -> None:
    observer, handle = observe("plain")
    observer.broken[part] = RuntimeError("of the observer")
    assert target.plain(1) == (1, 2, (), None, {})
    assert sys.exc_info()[1] is None
    # What an enter() that raised would have made its exit() needs.
    assert [name for name, *_ in observer.seen] == (["enter"] if part == "enter" else ["enter", "exit"])
    assert told(handle).errors == 1
    _, other = observe("failing", observer)
    with pytest.raises(ValueError, match="nine"):
        target.failing("nine")
    assert told(other).errors == 1


def test_a_base_exception_ends_the_call(target: Any) -> None:
    observer, _ = observe("plain")
    observer.broken["enter"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        target.plain(1)
    assert len(observer.seen) == 1
    observer.broken = {"exit": SystemExit(3)}
    with pytest.raises(SystemExit):
        target.plain(1)
    observe("failing", observer)
    with pytest.raises(SystemExit) as caught:
        target.failing(1)
    assert isinstance(caught.value.__context__, ValueError)


def test_a_call_ends_with_the_hooks_it_began_with(target: Any) -> None:
    class Removing(Observer):
        def enter(self, args: Any, kwargs: Any) -> Any:
            handle.remove()
            return super().enter(args, kwargs)

    observer, handle = observe("plain", Removing())
    woven = target.plain
    assert woven(1) == woven(1) == (1, 2, (), None, {})
    assert [name for name, *_ in observer.seen] == ["enter", "exit"]


@in_c
def test_a_second_hook_and_back(target: Any) -> None:
    before = target.callers()
    first, handle = observe("callers")
    second, other = observe("callers", caller=lambda *_: pytest.fail("there are two"))
    assert target.callers() == before  # in Python, with a frame that is hidden
    other.remove()
    assert target.callers() == before
    around = Advice(Target.parse("watched_target:callers"), HookType.AROUND, lambda f: [*f(), "around"])
    above = weave(around)
    assert target.callers()[-1] == "around"
    above.remove()
    assert target.callers() == before
    assert told(handle).calls == 4
    assert (len(first.seen), len(second.seen)) == (8, 2)


def test_methods(target: Any) -> None:
    observer, _ = observe("Derived.method")
    for name in ("of_class", "alone"):
        observe(f"Derived.{name}", observer)
    instance = target.Derived()
    assert instance.method(1, key=2) == ["derived", "base", 1, 2]
    assert target.Derived.method(instance, 3) == ["derived", "base", 3, 0]
    assert target.Derived.of_class(4) == ("Derived", 4)
    assert instance.alone(5) == 5
    seen = [(args, kwargs) for name, args, kwargs, *_ in observer.seen if name == "enter"]
    assert seen == [((instance, 1), {"key": 2}), ((instance, 3), {}), ((target.Derived, 4), {}), ((5,), {})]


def test_what_suspends_is_called_in_python(target: Any) -> None:
    observer, _ = observe("generator", caller=lambda *_: pytest.fail("it is a generator"))
    assert list(target.generator(3)) == [0, 1, 2]
    assert len(observer.seen) == 2


def test_deep_recursion_and_many_threads(target: Any) -> None:
    observer, handle = observe("depth")
    assert target.depth(200) == 200
    assert len(observer.seen) == 402
    observer.enter = observer.exit = lambda *_: None
    _, plain = observe("plain")
    results: list[Any] = []
    with in_threads(*[lambda: results.append({target.depth(50) for _ in range(200)})] * 8):
        for _ in range(50):  # hooks come and go meanwhile
            weave(Advice(Target.parse("watched_target:depth"), HookType.BEFORE, lambda n: None)).remove()
    assert results == [{50}] * 8
    assert told(handle).calls == 201 + 8 * 200 * 51
    plain.remove()


def test_nothing_is_held(target: Any) -> None:
    class Argument: ...

    class Quiet:
        def enter(self, args: Any, kwargs: Any) -> None: ...

        def exit(self, token: Any, result: Any, error: Any) -> None: ...

    argument = Argument()
    observer, handle = observe("plain", Quiet())
    references = sys.getrefcount(argument), sys.getrefcount(observer)
    for _ in range(1000):
        target.plain(argument, key=argument)
    assert (sys.getrefcount(argument), sys.getrefcount(observer)) == references
    observe("failing", observer)[1].remove()
    woven, gone = target.plain, weakref.ref(observer)
    handle.remove()
    _handles.clear()
    del observer, handle
    gc.collect()
    assert gone() is None
    assert woven(1) == (1, 2, (), None, {})


def test_torch_compile_traces_the_python(target: Any) -> None:
    torch = pytest.importorskip("torch")
    exec("def double(x):\n    return x * 2\ndef outer(x):\n    return double(x) + 1", target.__dict__)
    observer, _ = observe("double")
    compiled = torch.compile(target.outer, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    calls = len(observer.seen)
    assert target.outer(torch.ones(1)).tolist() == [3.0]
    assert len(observer.seen) == calls + 2
