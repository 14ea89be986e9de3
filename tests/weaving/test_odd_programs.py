"""Targets, hooks and callers that no engine should have; each was first tried in a process of its own."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookRegistry, HookType, State, compat
from sgl_aspects.errors import HookError
from sgl_aspects.weaving.modules import ModuleWatcher, when_ready
from tests.support.woven_modules import advice, around, hooked, module_of, no_hook_is_left

__all__ = ["no_hook_is_left"]


@pytest.fixture
def engine() -> Iterator[Any]:
    with module_of("def f(x=0): return ('f', x)\nclass A:\n    def m(self): return 'm'\n") as module:
        yield module


def test_classes_without_a_hash_or_a_comparison(engine: Any) -> None:
    exec(
        "class Meta(type):\n"
        "    __hash__ = None\n"
        "    def __eq__(cls, other): raise RuntimeError\n"
        "    def __subclasscheck__(cls, other): raise RuntimeError\n"
        "class Base(metaclass=Meta):\n"
        "    def m(self): return 'm'\n"
        "class Sub(Base): pass\n",
        vars(engine),
    )
    with aspects.woven(around("engine:Base+.m", hooked)):
        made = engine.Meta("Later", (engine.Base,), {"m": lambda self: "later"})
        assert (engine.Sub().m(), made().m()) == (("hooked", "m"), ("hooked", "later"))

    class Other:
        def m(self) -> str:
            return "other"

    original = engine.Base
    with aspects.woven(advice("engine:Base", HookType.REPLACE, Other)):
        assert engine.Base().m() == "other"
    assert engine.Base is original


def test_a_metaclass_that_ignores_what_is_set_is_named(engine: Any) -> None:
    exec(
        "class Ignoring(type):\n"
        "    def __setattr__(cls, name, value): pass\n"
        "class Fixed(metaclass=Ignoring):\n"
        "    def m(self): return 'm'\n",
        vars(engine),
    )
    with pytest.raises(HookError, match="its type engine:Ignoring ignores assignments"):
        aspects.weave(around("engine:Fixed.m", hooked))


def test_a_hook_whose_own_methods_raise(engine: Any) -> None:
    class Odd:
        def __call__(self, original: Any, *args: Any) -> Any:
            return ("odd", original(*args))

        def _raise(self, *args: Any) -> Any:
            raise RuntimeError("not now")

        __eq__ = __hash__ = __repr__ = __str__ = __bool__ = __len__ = __getattribute__ = _raise

    odd, other = Odd(), Odd()
    HookRegistry.register("engine.f", odd, HookType.AROUND)
    HookRegistry.register("engine.f", other, HookType.AROUND)
    HookRegistry.apply_hooks()
    assert engine.f(1) == ("odd", ("odd", ("f", 1)))
    assert "Odd" in str(aspects.report())
    assert HookRegistry.is_hook_applied("engine.f", odd, HookType.AROUND)
    assert HookRegistry.unregister("engine.f", odd, HookType.AROUND)
    assert engine.f(1) == ("odd", ("f", 1))
    HookRegistry.reset()
    assert engine.f(1) == ("f", 1)


def test_modules_under_names_that_are_not_strings(engine: Any) -> None:
    class Key:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        __hash__ = object.__hash__

    keys: list[Any] = [None, 3, ("a",), Key()]
    for key in keys:
        sys.modules[key] = types.ModuleType("odd")
    try:
        with aspects.woven(around("**:f", hooked), around("en*:A+.m", hooked)):
            assert engine.f() == ("hooked", ("f", 0))
            assert engine.A().m() == ("hooked", "m")
    finally:
        for key in keys:
            del sys.modules[key]


def test_a_reload_that_fails_halfway_leaves_no_function_without_its_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "reloaded.py"
    path.write_text("def f(): return 1\ndef g(): return 1\n")
    reloaded = importlib.import_module("reloaded")
    try:
        with aspects.woven(around("reloaded:f", hooked), around("reloaded:g", hooked)):
            path.write_text("def f(): return 'second'\nraise RuntimeError\ndef g(): return 'second'\n")
            with pytest.raises(RuntimeError):
                importlib.reload(reloaded)
            assert (reloaded.f(), reloaded.g()) == (("hooked", "second"), ("hooked", 1))
        assert (reloaded.f(), reloaded.g()) == ("second", 1)
    finally:
        del sys.modules["reloaded"]


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
    (tmp_path / "engine.py").write_text("def f(): return 'f'\n")
    command = [sys.executable, "-c", FREEZING, freezes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen, after, more = json.loads(done.stdout)
    assert (seen, after) == (["hooked", "f"], "f")
    assert more >= 0 if freezes else more == 0


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
        handle.remove()  # not begun[-1]: another signal may have been handled in between

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
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


def test_c_code_that_imports_is_observed() -> None:
    """It looks for the import function in the globals of the Python function that calls it."""

    class Look:
        def enter(self, args: Any, kwargs: Any) -> None: ...
        def exit(self, token: Any, result: Any, error: Any) -> None: ...

    with aspects.woven(aspects.observe("time:strptime")(Look)):
        assert time.strptime("2026", "%Y").tm_year == 2026


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


def test_the_call_of_one_instance_is_hooked_by_its_own_name(engine: Any) -> None:
    """What stands as ``__call__`` in an instance, Python never calls."""
    exec("class C:\n    def __call__(self, x): return x\nobj = C()\n", vars(engine))
    with pytest.raises(HookError, match=r"uses its class alone; hook the instance itself, .*C\.__call__"):
        aspects.weave(around("engine:obj.__call__", hooked))
    with aspects.woven(around("engine:obj", hooked)):
        assert engine.obj(1) == ("hooked", 1)
    assert engine.obj(1) == 1


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


def test_parts_of_a_property_that_are_hooked_at_once() -> None:
    """Each hook runs its own part's original, and another name of the property has all of them."""
    source = (
        "class C:\n    size = 1\n    @property\n    def p(self): return self.size\n    @p.setter\n"
        "    def p(self, value): self.size = value\nclass D:\n    size = 1\n    p = vars(C)['p']\n"
    )
    with module_of(source) as module:
        raw = vars(module.C)["p"]
        targets = ("engine:C.p", "engine:C.p.fset")
        seen: list[Any] = []

        def noting(original: Any, *args: Any) -> Any:
            seen.append(args[1:])
            return original(*args)

        with aspects.woven(*(advice(target, HookType.AROUND, noting) for target in targets)):
            for made in (module.C(), module.D()):
                made.p = 5
                assert made.p == 5
            assert seen == [(5,), ()] * 2
        assert vars(module.C)["p"] is vars(module.D)["p"] is raw


def test_parts_of_an_inherited_property_run_the_hooks_of_the_base_class() -> None:
    source = (
        "class B:\n    size = 1\n    @property\n    def p(self): return self.size\n    @p.setter\n"
        "    def p(self, value): self.size = value\nclass C(B): pass\n"
    )
    with module_of(source) as module:
        seen: list[str] = []

        def noting(name: str) -> aspects.Advice:
            def note(original: Any, *args: Any) -> Any:
                seen.append(name)
                return original(*args)

            return around(name, note)

        names = ("engine:C.p", "engine:C.p.fset", "engine:B.p", "engine:B.p.fset")
        with aspects.woven(*map(noting, names)):
            made = module.C()
            made.p = 5
            assert made.p == 5
            assert seen == ["engine:C.p.fset", "engine:B.p.fset", "engine:C.p", "engine:B.p"]


def test_a_method_of_the_modules_own_class() -> None:
    """As in a module that replaces itself by an instance of its own module class."""

    class Kind(types.ModuleType):
        def f(self, x: int) -> list[Any]:
            return [self.__name__, x]

    with module_of("def g(): return 1\n") as module:
        module.__class__ = Kind
        with aspects.woven(around("engine:f", hooked)):
            assert module.f(3) == ("hooked", ["engine", 3])
        assert module.f(3) == ["engine", 3]
        assert "f" not in vars(module)


def test_a_module_that_is_gone_when_its_code_has_run() -> None:
    module, seen = types.ModuleType("gone"), []
    module.__spec__ = ModuleSpec("gone", None)
    when_ready(module, lambda *told: seen.append(told))
    assert seen == [("gone", None)]


def test_imports_end_while_the_last_hook_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    watcher = ModuleWatcher(lambda name: True, lambda name, module: None)
    watcher._registered.update(one=None, two=None)
    monkeypatch.setattr(
        compat, "unregister_post_import_hook", lambda *_: watcher._registered.pop("two", None)
    )
    watcher.uninstall()
    assert not watcher._registered


@pytest.mark.parametrize("how", ["path", "loader", "lazy", "found"])
def test_a_module_that_a_program_runs_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "run_by_hand.py"
    path.write_text("def f(): return 'f'\n")
    make = importlib.util.module_from_spec
    handle = aspects.weave(around("run_by_hand:f", hooked))
    loader: Any = importlib.machinery.SourceFileLoader("run_by_hand", str(path))
    loader = importlib.util.LazyLoader(loader) if how == "lazy" else loader
    if how == "path":
        spec = importlib.util.spec_from_file_location("run_by_hand", path)
    elif how == "found":
        spec = importlib.util.find_spec("run_by_hand")
    else:
        spec = importlib.util.spec_from_loader("run_by_hand", loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_by_hand", module)
    spec.loader.exec_module(module)
    assert module.f() == ("hooked", "f")
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    handle.remove()
    assert module.f() == "f"
    assert importlib.util.module_from_spec is make


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
