"""Modules that come in unusual ways: lazy, run by hand, under odd names, reloaded halfway, gone."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import time
import traceback
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import State
from sgl_aspects.weaving import weaver
from sgl_aspects.weaving.modules import when_ready
from tests.support.stand_ins import Engine
from tests.support.threads import in_threads
from tests.support.woven_modules import METHODS, around, hooked, mark, module_of


def test_modules_under_names_that_are_not_strings() -> None:
    class Key:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        __hash__ = object.__hash__

    keys: list[Any] = [None, 3, ("a",), Key()]
    for key in keys:
        sys.modules[key] = types.ModuleType("odd")
    try:
        with module_of(METHODS) as engine, aspects.woven(around("**:f", hooked), around("en*:A+.m", hooked)):
            assert engine.f() == ("hooked", ("f", 0, 1))
            assert engine.A().m() == ("hooked", "m")
    finally:
        for key in keys:
            del sys.modules[key]


def test_c_code_that_imports_is_observed() -> None:
    """It looks for the import function in the globals of the Python function that calls it."""

    class Look:
        def enter(self, args: Any, kwargs: Any) -> None: ...
        def exit(self, token: Any, result: Any, error: Any) -> None: ...

    with aspects.woven(aspects.observe("time:strptime")(Look)):
        assert time.strptime("2026", "%Y").tm_year == 2026


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


def test_a_callback_patches_a_module_that_wove_a_hook_itself(engine: Engine) -> None:
    """Its import ends twice: for the hook that came before, and for the one that waits until it is ready."""
    engine.write("weaving_mod.py", "handles = []\ndef act(): pass\n")
    weaving_mod = engine.load("weaving_mod")
    weaving_mod.act = lambda: weaving_mod.handles.append(aspects.weave(mark("mod:f", name="second")))
    engine.write("mod.py", "import weaving_mod\nweaving_mod.act()\ndef f(): return []\n")

    def patch(module: Any) -> None:
        ours = module.f
        module.f = lambda: [*ours(), "patched"]

    weaver.when_loaded("mod", patch)
    with aspects.woven(mark("mod:f", name="first")):
        assert engine.load("mod").f() == ["first", "second", "patched"]
    weaving_mod.handles[0].remove()


def test_an_attribute_made_by_an_object_without_a_dictionary_is_not_given_to_others() -> None:
    class Bare:
        __slots__ = ()

    class Making(Bare):
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            if name != "f":
                raise AttributeError(name)
            return lambda: "f"

    entries: dict[str, Any] = {"making": Making(), "bare": Bare()}
    sys.modules.update(entries)
    try:
        with aspects.woven(around("making:f", hooked)) as handle:
            assert entries["making"].f() == "f"
            assert handle.states == (State.MISSING,)
            with aspects.woven(around("bare:f", hooked)) as other:
                assert other.states == (State.MISSING,)
    finally:
        for name in entries:
            del sys.modules[name]


@pytest.mark.parametrize("first", ["wrong", "required"])
def test_a_required_hook_is_not_lost_where_another_fails_unexpectedly(engine: Engine, first: str) -> None:
    """`on_lost` is another package's code, and may raise anything."""

    def raising(reason: str) -> None:
        raise RuntimeError("its own")

    engine.write("mod.py", "def f(): return 'f'\n")
    wrong = around("mod:gone", on_lost=raising)
    required = around("mod:missing", required=True)
    found = around("mod:f", hooked)
    hooks = [wrong, found, required] if first == "wrong" else [required, found, wrong]
    with aspects.woven(*hooks) as handle:
        with pytest.raises(SystemExit, match=r"required around hook .* on mod:missing"):
            engine.load("mod")
        assert sys.modules.get("mod") is None
        assert sorted(handle.states) == [State.MISSING, State.MISSING, State.WOVEN]


@pytest.mark.parametrize("moment", range(1, 5))
def test_callbacks_of_two_threads_are_called_once_each(engine: Engine, moment: int) -> None:
    engine.write("mod.py", "")
    engine.load("mod")
    called: list[str] = []
    lines: list[int] = []

    def trace(frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name != "_notify_listeners":
            return None
        lines.extend([frame.f_lineno] if event == "line" else [])
        if event == "line" and len(lines) == moment:  # another thread comes between
            with in_threads(lambda: weaver.when_loaded("mod", lambda module: called.append("other"))):
                pass
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        weaver.when_loaded("mod", lambda module: called.append("mine"))
    finally:
        sys.settrace(before)
    assert sorted(called) == ["mine", "other"]


def test_a_module_that_is_gone_when_its_code_has_run() -> None:
    module, seen = types.ModuleType("gone"), []
    module.__spec__ = ModuleSpec("gone", None)
    when_ready(module, lambda *told: seen.append(told))
    assert seen == [("gone", None)]


@pytest.mark.parametrize("how", ["path", "loader", "lazy", "found", "patched"])
def test_a_module_that_a_program_runs_by_hand(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = engine.write("run_by_hand.py", "def f(): return 'f'\n")
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
    assert isinstance(spec.loader, importlib.abc.Loader)  # as torch.hub asks
    if how == "patched":
        monkeypatch.setattr(spec.loader, "exec_module", spec.loader.exec_module)
    spec.loader.exec_module(module)
    assert module.f() == ("hooked", "f")
    assert type(module.__loader__) is importlib.machinery.SourceFileLoader
    handle.remove()
    assert module.f() == "f"
    assert importlib.util.module_from_spec is make


LAZY = """
import sys
from types import ModuleType
class _LazyModule(ModuleType):
    def __getattr__(self, name):
        asked.append(name)
        if name in ("AutoConfig", "f", "kept"):
            import behind
            value = getattr(behind, name)
            if name != "kept": setattr(self, name, value)
            return value
        raise AttributeError(name)
asked = []
"""


BEHIND = """
class AutoConfig:
    @classmethod
    def for_model(cls, x): return ("for_model", x)
def f(): return "f"
def kept(): return "kept"
"""


@pytest.mark.parametrize("written", ["lazy_front:AutoConfig.for_model", "lazy_front.AutoConfig.for_model"])
def test_a_lazy_module_is_woven_when_it_is_asked(written: str) -> None:
    with module_of(LAZY, "lazy_classes") as classes, module_of(BEHIND, "behind") as behind:
        front = classes._LazyModule("lazy_front")
        other = classes._LazyModule("lazy_other")
        sys.modules["lazy_front"] = front
        before = dict(vars(classes._LazyModule))
        try:
            handle = aspects.weave(
                around(written, hooked), around("lazy_front:f", hooked), around("lazy_front:kept", hooked)
            )
            assert classes.asked == []
            assert handle.states == (State.PENDING,) * 3
            assert front.AutoConfig.for_model(1) == ("hooked", ("for_model", 1))
            assert front.f() == front.f() == behind.f() == ("hooked", "f")
            assert front.kept() == ("hooked", "kept")
            assert other.AutoConfig is behind.AutoConfig
            assert handle.states == (State.WOVEN,) * 3
            with pytest.raises(AttributeError, match="nothing"):
                _ = front.nothing
            handle.remove()
            assert behind.AutoConfig.for_model(1) == ("for_model", 1)
            assert front.f() == front.kept() == "f" or front.kept() == "kept"
            assert dict(vars(classes._LazyModule)) == before
        finally:
            del sys.modules["lazy_front"]


def test_a_hook_that_comes_while_another_thread_has_found_but_not_made_the_module(engine: Engine) -> None:
    """That thread called our finder before there was a hook."""
    engine.write("late.py", "def f(): return []\ndef call(): return f()\n")
    found, go_on = threading.Event(), threading.Event()

    class Slow:
        """Stands between the search and the module: finders after ours hand on what they find."""

        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            if name != "late":
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            found.set()
            assert go_on.wait(60)
            return spec

    finder = Slow()
    with aspects.woven(around("something_else:f")):
        sys.meta_path.insert(1, finder)
        try:
            thread = threading.Thread(target=lambda: importlib.import_module("late"))
            thread.start()
            assert found.wait(60)
            threading.Timer(0.01, go_on.set).start()
            with aspects.woven(around("late:f", hooked)) as handle:
                thread.join(60)
                assert [advice.state for advice in handle.advices] == [State.WOVEN]
                assert importlib.import_module("late").call() == ("hooked", [])
        finally:
            go_on.set()
            sys.meta_path.remove(finder)


def test_what_a_module_warns_of_and_raises_while_it_is_imported_is_its_importers(engine: Engine) -> None:
    warning = "import warnings\nwarnings.warn('old', DeprecationWarning, stacklevel=2)\n"
    engine.write("outdated.py", f"{warning}raise ValueError('5')\n")
    raises, warns = pytest.raises(ValueError, match="5"), pytest.warns(DeprecationWarning, match="old")
    with aspects.woven(around("outdated:*")), warns as caught, raises as failed:
        __import__("outdated")
    assert caught[0].filename == __file__
    names = [frame.name for frame in traceback.extract_tb(failed.value.__traceback__)]
    assert names == [sys._getframe().f_code.co_name, "<module>"]
