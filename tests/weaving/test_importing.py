"""Hooks and the import system: however a module loads, hooks reach it, and the program sees no difference."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.resources
import importlib.util
import inspect
import pkgutil
import sys
import threading
import warnings
import zipfile
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import wrapt

import sgl_aspects as aspects
from sgl_aspects import HookType, State, Target
from sgl_aspects.weaving import weaver
from tests.support.stand_ins import Engine
from tests.support.threads import in_threads
from tests.support.woven_modules import mark, state

DEADLINE = 20


# -- modules that are still being initialised -------------------------------------------------------------

REGISTERING = """
import sgl_aspects as aspects
from sgl_aspects import HookType, Target

def hook(result, *args): return [*result, "hook"]

def register(target, hook_type=HookType.AFTER):
    global handle
    handle = aspects.weave(aspects.Advice(Target.parse(target), hook_type, hook))
"""


@pytest.mark.parametrize("target", ["half:f", "half.f", "ha*:f", "half:C.m | half:f"])
def test_a_hook_registered_from_within_the_module_that_it_is_for(engine: Engine, target: str) -> None:
    engine.write("registering.py", REGISTERING)
    engine.write("copying.py", "from half import f\n")
    engine.write(
        "half.py",
        f"""
        import registering
        def f(): return ["early"]
        registering.register({target!r})
        import copying
        early = f
        def f(): return ["f"]
        def decorated(function):
            return lambda: function()
        f = decorated(f)
        """,
    )
    half = engine.load("half")
    registering = engine.load("registering")
    assert registering.handle.states == (State.WOVEN,)
    assert half.f() == ["f", "hook"]
    assert half.early() == ["early"]
    registering.handle.remove()
    assert half.f() == ["f"]


def test_copies_made_before_the_module_was_done_are_reached(engine: Engine) -> None:
    engine.write("half.py", "def f(): return []\nclass C:\n    def m(self): return []\nimport circular\n")
    engine.write("circular.py", "from half import f, C\ndef use(g=f): return g()\ntable = {'f': f}\n")
    with aspects.woven(mark("half:f"), mark("half:C.m")):
        half, circular = engine.load("half"), engine.load("circular")
        for function in (half.f, circular.f, circular.use, circular.table["f"], circular.C().m):
            assert function() == ["hook"]
    for function in (half.f, circular.f, circular.use, circular.table["f"], circular.C().m):
        assert function() == []
    assert circular.f is half.f


@pytest.mark.parametrize("weave_first", [True, False])
def test_two_modules_that_import_each_other(engine: Engine, weave_first: bool) -> None:
    engine.write("one.py", "import two\ndef f(): return ['one.f']\ndef call(): return two.g()\n")
    engine.write("two.py", "import one\ndef g(): return ['two.g']\ndef call(): return one.f()\n")
    advices = mark("one:f"), mark("two:g")
    if not weave_first:
        engine.load("two")
    with aspects.woven(*advices):
        assert engine.load("one").call() == ["two.g", "hook"]
        assert engine.load("two").call() == ["one.f", "hook"]


def test_a_hook_from_another_thread_while_the_module_loads(engine: Engine) -> None:
    engine.write("gate.py", "import threading\nreached, go_on = threading.Event(), threading.Event()\n")
    engine.write("slow.py", "def f(): return []\nimport gate\ngate.reached.set()\ngate.go_on.wait(60)\n")
    gate = engine.load("gate")
    advice = mark("slow:f", required=True)

    def weave() -> None:
        assert gate.reached.wait(DEADLINE)
        aspects.weave(advice)
        assert state(advice) is State.PENDING
        gate.go_on.set()

    with in_threads(weave):
        engine.load("slow")
    assert state(advice) is State.WOVEN
    assert engine.load("slow").f() == ["hook"]
    aspects.Handle((advice,)).remove()
    assert engine.load("slow").f() == []


def test_a_module_whose_code_raises_is_woven_when_it_loads_after_all(engine: Engine) -> None:
    engine.write("switch.py", "on = False\n")
    engine.write("broken.py", "def f(): return []\nimport switch\nif not switch.on: raise OSError('off')\n")
    for register in ("before", "within"):
        engine.forget()
        engine.write("registering.py", REGISTERING)
        registering = engine.load("registering")
        if register == "before":
            registering.register("broken:f")
        else:
            engine.write("switch.py", "on = False\nimport registering\nregistering.register('broken:f')\n")
        with pytest.raises(OSError, match="off"):
            engine.load("broken")
        assert registering.handle.states == (State.PENDING,)
        engine.load("switch").on = True
        assert engine.load("broken").f() == ["hook"]
        registering.handle.remove()


# -- reload and replacement -------------------------------------------------------------------------------


def test_hooks_survive_a_reload_and_go_when_they_are_removed(engine: Engine) -> None:
    source = "def f(): return ['{0}']\nclass C:\n    def m(self): return ['{0}']\n"
    engine.write("mod.py", source.format("1"))
    engine.write("user.py", "from mod import f\n")
    mod, user = engine.load("mod"), engine.load("user")
    old_f, old_class = mod.f, mod.C
    old = old_class()
    with aspects.woven(mark("mod:f"), mark("mod:C.m")) as handle:
        for version in ("2", "3"):
            engine.write("mod.py", source.format(version))
            importlib.reload(mod)
            assert mod.f() == [version, "hook"]
            assert mod.C().m() == [version, "hook"]
            assert user.f() == ["1", "hook"]
            assert old.m() == ["1", "hook"]
        assert handle.states == (State.WOVEN, State.WOVEN)
        assert not aspects.report().displaced
    assert mod.f() == ["3"]
    assert mod.C().m() == ["3"]
    assert user.f is old_f
    assert old.m() == ["1"]


def test_a_hook_that_came_before_a_reload_and_one_that_came_after(engine: Engine) -> None:
    engine.write("mod.py", "def f(): return ['f']\n")
    mod = engine.load("mod")
    first = aspects.weave(mark("mod:f", name="first"))
    importlib.reload(mod)
    original = inspect.unwrap(mod.f)
    second = aspects.weave(mark("mod:f", name="second"))
    assert mod.f() == ["f", "first", "second"]
    first.remove()
    assert mod.f() == ["f", "second"]
    second.remove()
    assert mod.f is original


def test_a_disabled_hook_stays_off_over_a_reload(engine: Engine) -> None:
    engine.write("mod.py", "def f(): return ['1']\n")
    mod = engine.load("mod")
    with aspects.woven(mark("mod:f")) as handle:
        handle.disable()
        engine.write("mod.py", "def f(): return ['2']\n")
        importlib.reload(mod)
        assert mod.f() == ["2"]
        handle.enable()
        assert mod.f() == ["2", "hook"]
    assert mod.f() == ["2"]


def test_a_module_that_is_deleted_and_imported_anew(engine: Engine) -> None:
    engine.write("mod.py", "def f(): return []\n")
    with aspects.woven(mark("mod:f")):
        first = engine.load("mod")
        del sys.modules["mod"]
        second = engine.load("mod")
        assert first is not second
        assert first.f() == second.f() == ["hook"]
    assert first.f() == second.f() == []


def test_a_module_that_puts_another_one_in_its_place(engine: Engine) -> None:
    """As transformers does: names are loaded at first use, from submodules."""
    engine.write(
        "lazy/__init__.py",
        """
        import importlib, sys
        from types import ModuleType
        class LazyModule(ModuleType):
            def __getattr__(self, name):
                if name != "f":
                    raise AttributeError(name)
                value = importlib.import_module("lazy.impl").f
                setattr(self, name, value)
                return value
        replacement = LazyModule(__name__)
        replacement.__path__ = __path__
        replacement.__spec__ = __spec__
        sys.modules[__name__] = replacement
        """,
    )
    engine.write("lazy/impl.py", "def f(): return []\n")
    with aspects.woven(mark("lazy.impl:f")), aspects.woven(mark("lazy:g")):
        lazy = engine.load("lazy")
        assert type(lazy).__name__ == "LazyModule"
        aspects.report()
        assert "lazy.impl" not in sys.modules
        assert lazy.f() == ["hook"]
    assert lazy.f() == []


def test_an_object_in_the_place_of_a_module(engine: Engine) -> None:
    engine.write(
        "thing.py",
        """
        import sys
        class Thing:
            def f(self): return [type(self).__name__]
        thing = Thing()
        thing.g = lambda: ["g"]
        sys.modules[__name__] = thing
        """,
    )
    with aspects.woven(mark("thing:g")) as handle:
        thing: Any = engine.load("thing")
        try:
            assert handle.states == (State.WOVEN,)
            assert thing.g() == ["g", "hook"]
            with aspects.woven(mark("thing:f")):
                assert thing.f() == ["Thing", "hook"]
            assert thing.f() == ["Thing"]
            assert "f" not in vars(thing)
        finally:
            del sys.modules["thing"]
    assert thing.g() == ["g"]


# -- lazy modules -----------------------------------------------------------------------------------------


def lazily(name: str) -> ModuleType:
    """Import ``name`` as the documentation of importlib shows for lazy imports."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.LazyLoader(spec.loader)
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("order", "target"),
    [("weave first", "dozing:f"), ("lazy first", "doz*:f"), ("weave first", "dozing:gone | dozing:f")],
)
def test_a_lazy_module_is_not_woken_and_hooked_when_it_wakes(engine: Engine, order: str, target: str) -> None:
    engine.write("awake.py", "modules = []\n")
    engine.write("dozing.py", "import awake\nawake.modules.append(__name__)\ndef f(): return []\n")
    engine.write("other.py", "def g(): return []\n")
    engine.write("holder.py", "from other import g\ntable = [g]\n")
    awake, other = engine.load("awake"), engine.load("other")
    engine.load("holder")
    advice = mark(target, required=True)
    if order == "lazy first":
        dozing: Any = lazily("dozing")
        aspects.weave(advice)
    else:
        aspects.weave(advice)
        dozing = lazily("dozing")
    with aspects.woven(mark("other:g"), mark("**:nothing_of_the_kind"), mark("**:No+.thing")):
        aspects.HookRegistry.apply_hooks()
        assert "is loaded" not in aspects.explain(target) + aspects.explain("dozing:g")
        str(aspects.report())
        assert other.g() == ["hook"]
        assert state(advice) is State.PENDING
    assert awake.modules == []
    assert dozing.f() == ["hook"]
    assert awake.modules == ["dozing"]
    assert type(dozing) is ModuleType
    assert vars(dozing)["__spec__"].loader is vars(dozing)["__loader__"]
    aspects.Handle((advice,)).remove()
    assert dozing.f() == []


def test_a_module_that_a_finder_makes_lazy_is_hooked_when_it_wakes(engine: Engine) -> None:
    class LazyFinder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and name == "dozing" and spec.loader is not None:
                spec.loader = importlib.util.LazyLoader(spec.loader)
            return spec

    engine.write("awake.py", "modules = []\n")
    engine.write("dozing.py", "import awake\nawake.modules.append(__name__)\ndef f(): return []\n")
    finder = LazyFinder()
    sys.meta_path.insert(0, finder)
    with aspects.woven(mark("dozing:f")) as handle:
        dozing = engine.load("dozing")
        assert engine.load("awake").modules == []
        assert dozing.f() == ["hook"]
        assert handle.states == (State.WOVEN,)
    sys.meta_path.remove(finder)
    assert dozing.f() == []


def test_an_object_that_pretends_to_be_of_another_class_is_not_asked(engine: Engine) -> None:
    engine.write(
        "proxies.py",
        """
        reads = []
        class Proxy:
            @property
            def __class__(self):
                reads.append(self)
                return dict
            def __getattr__(self, name):
                reads.append(name)
                raise AttributeError(name)
        proxy = Proxy()
        def f(): return []
        """,
    )
    with aspects.woven(mark("proxies:*"), mark("proxies:p*.x"), mark("proxies:No+.m")):
        proxies = engine.load("proxies")
        assert proxies.f() == ["hook"]
        aspects.HookRegistry.apply_hooks()
        assert proxies.reads == []


# -- loaders and finders ----------------------------------------------------------------------------------


def test_a_module_sees_its_own_loader(engine: Engine) -> None:
    engine.write(
        "pkg/__init__.py",
        """
        import importlib.resources, inspect, pkgutil, sys
        seen = (type(__loader__).__name__, type(__spec__.loader).__name__)
        text = importlib.resources.files(__name__).joinpath("data.txt").read_text()
        data = pkgutil.get_data(__name__, "data.txt")
        def f(): return []
        source = inspect.getsource(sys.modules[__name__])
        """,
    )
    (engine.folder / "pkg" / "data.txt").write_text("some data")
    with aspects.woven(mark("pkg:f")):
        pkg = engine.load("pkg")
        assert pkg.seen == ("SourceFileLoader", "SourceFileLoader")
        assert (pkg.text, pkg.data) == ("some data", b"some data")
        assert "def f()" in pkg.source
        assert type(pkg.__loader__) is type(pkg.__spec__.loader) is importlib.machinery.SourceFileLoader
        assert inspect.getsource(inspect.unwrap(pkg.f)) == "def f(): return []\n"
        assert importlib.resources.files("pkg").joinpath("data.txt").read_text() == "some data"
        found = importlib.util.find_spec("pkg")
        assert found is pkg.__spec__


def test_run_as_a_program(engine: Engine) -> None:
    engine.write("pkg/mod.py", "def f(): return []\nif __name__ == '__main__': print(f())\n")
    ended = engine.run(
        """
        import runpy, sgl_aspects as aspects
        from sgl_aspects import Advice, HookType, Target
        hook = lambda result, *args: [*result, "hook"]
        aspects.weave(Advice(Target.parse("pkg.mod:f"), HookType.AFTER, hook))
        runpy.run_module("pkg.mod", run_name="__main__", alter_sys=True)
        """
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "[]\n"  # a program's own module is __main__, not pkg.mod


def test_namespace_packages(engine: Engine) -> None:
    engine.write("space/inner/mod.py", "def f(): return []\n")
    (engine.folder / "space" / "__init__.py").unlink()
    (engine.folder / "space" / "inner" / "__init__.py").unlink()
    dotted, colon, pattern, of_space = (
        mark(target, name=target)
        for target in ("space.inner.mod.f", "space.inner.mod:f", "space.**:f", "space:f")
    )
    with aspects.woven(dotted, colon, pattern, of_space):
        mod = engine.load("space.inner.mod")
        assert mod.f() == ["space.inner.mod.f", "space.inner.mod:f", "space.**:f"]
        assert state(of_space) is State.PENDING
        aspects.HookRegistry.apply_hooks()
        assert state(of_space) is State.MISSING
        gone = mark("space.inner.gone.f")
        with aspects.woven(gone):
            assert state(gone) is State.MISSING


def test_modules_in_a_zip_file(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = engine.folder / "modules.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("zipped/__init__.py", "")
        opened.writestr("zipped/mod.py", "import pkgutil\ndef f(): return []\n")
        opened.writestr("zipped/data.txt", "some data")
    monkeypatch.syspath_prepend(str(archive))
    absent = mark("zipped.gone.f")
    with aspects.woven(mark("zipped.mod.f"), absent):
        mod = engine.load("zipped.mod")
        assert mod.f() == ["hook"]
        assert type(mod.__loader__).__name__ == "zipimporter"
        assert pkgutil.get_data("zipped", "data.txt") == b"some data"
        assert state(absent) is State.MISSING


def test_frozen_and_builtin_modules() -> None:
    calls: list[Any] = []
    targets = {"__phello__": None, "xxsubtype": "bench", "_statistics": "_normal_dist_inv_cdf"}
    for name in targets:
        sys.modules.pop(name, None)
    names = [f"{name}:{function or 'initialized'}" for name, function in targets.items()]
    handle = aspects.weave(*(aspects.after(one)(lambda result, *args: calls.append(args)) for one in names))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in targets:
                try:
                    assert importlib.import_module(name).__loader__ is not None
                except ModuleNotFoundError:  # not built on this machine
                    continue
        module = sys.modules.get("_statistics")
        if module is not None:
            module._normal_dist_inv_cdf(0.5, 0.0, 1.0)
            assert calls == [(0.5, 0.0, 1.0)]
    finally:
        handle.remove()
        for name in targets:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("first", ["wrapt", "ours"])
def test_post_import_hooks_of_wrapt_on_the_same_module(engine: Engine, first: str) -> None:
    engine.write("mod.py", "def f(): return []\nloader = type(__spec__.loader).__name__\n")
    script = f"""
    import wrapt, sgl_aspects as aspects
    from sgl_aspects import Advice, HookType, Target
    seen = []
    advice = Advice(Target.parse("mod:f"), HookType.AFTER, lambda result: [*result, "hook"])
    if "{first}" == "ours":
        aspects.weave(advice)
    wrapt.register_post_import_hook(lambda module: seen.append(module.__name__), "mod")
    if "{first}" == "wrapt":
        aspects.weave(advice)
    import mod
    print(mod.f(), seen, mod.loader)
    """
    ended = engine.run(script)
    assert ended.stderr == ""
    assert ended.stdout.startswith("['hook'] ['mod'] ")


def test_wrapt_may_wrap_what_we_have_woven(engine: Engine) -> None:
    engine.write("mod.py", "def f(): return []\n")
    mod = engine.load("mod")

    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return [*wrapped(*args, **kwargs), "wrapt"]

    below = aspects.weave(mark("mod:f", name="below"))
    wrapt.wrap_function_wrapper(mod, "f", wrapper)
    wrapped = mod.f
    assert mod.f() == ["below", "wrapt"]
    aspects.HookRegistry.apply_hooks()
    assert mod.f() == ["below", "wrapt"]
    assert aspects.report().displaced == ("mod:f",)
    assert "another patch covers it" in aspects.explain("mod:f")
    above = aspects.weave(mark("mod:f", name="above"))
    assert mod.f() == ["below", "wrapt", "above"]
    below.disable()
    assert mod.f() == ["wrapt", "above"]
    below.enable()
    assert mod.f() == ["below", "wrapt", "above"]
    below.remove()
    assert mod.f() == ["wrapt", "above"]
    above.remove()
    assert mod.f is wrapped
    assert mod.f() == ["wrapt"]


def test_a_patch_laid_while_a_hook_is_off_is_kept_and_covers_the_hook(engine: Engine) -> None:
    engine.write("mod.py", "def f(): return ['f']\n")
    mod = engine.load("mod")
    original = mod.f
    with aspects.woven(mark("mod:f")) as handle:
        handle.disable()
        assert mod.f is original
        mod.f = patch = lambda: [*original(), "patch"]
        handle.enable()
        assert mod.f() == ["f", "hook", "patch"]  # through the original that the patch calls
        assert aspects.report().displaced == ("mod:f",)
    assert mod.f is patch


class FindingByItself:
    """As typeguard's, jaxtyping's and pytest's finders: calls `PathFinder` only."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        return importlib.machinery.PathFinder.find_spec(name, path, target)


@pytest.mark.parametrize("target", ["pkg.mod:f", "pkg.**:f", "pkg.mod.f"])
@pytest.mark.parametrize("when", ["before", "after", "when loaded before"])
def test_a_finder_that_finds_by_itself_hides_no_module(engine: Engine, target: str, when: str) -> None:
    engine.write("pkg/mod.py", "def f(): return []\n")
    engine.write("other.py", "")
    finder: Any = FindingByItself()
    told: list[str] = []
    if when == "before":
        sys.meta_path.insert(0, finder)
    try:
        with aspects.woven(mark(target)) as handle:
            weaver.when_loaded("pkg.mod", lambda module: told.append(module.__name__))
            if when != "before":
                sys.meta_path.insert(0, finder)
            if when == "when loaded before":
                engine.load("other")
            assert engine.load("pkg.mod").f() == ["hook"]
            assert handle.states == (State.WOVEN,)
            importlib.reload(engine.load("pkg.mod"))
            assert engine.load("pkg.mod").f() == ["hook"]
        assert told == ["pkg.mod"]
    finally:
        sys.meta_path.remove(finder)


def test_a_finder_that_patches_the_loader_which_it_has_found(engine: Engine) -> None:
    """As vLLM 0.22's, in front of a module of torch 2.11."""

    class Patching:
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            if name != "mod":
                return None
            sys.meta_path.remove(self)
            spec: Any = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), module.__dict__.update(patched=1))
            return spec

    engine.write("mod.py", "def f(): return []\n")
    engine.write("earlier.py", "")
    finder: Any = Patching()
    with aspects.woven(mark("*:f")):
        engine.load("earlier")
        sys.meta_path.insert(0, finder)
        mod = engine.load("mod")
        assert (mod.f(), mod.patched) == (["hook"], 1)
        assert importlib.reload(mod).f() == ["hook"]


@pytest.mark.parametrize("moment", ["not loaded", "half loaded", "loaded"])
def test_a_callback_when_a_module_has_loaded(engine: Engine, moment: str) -> None:
    engine.write("told.py", "seen = []\n")
    told = engine.load("told")
    engine.write("mod.py", "import within\ndone = True\n")
    engine.write("within.py", "import told\ntold.act()\n")

    def ask() -> None:
        weaver.when_loaded("mod", lambda module: told.seen.append(module.done))

    told.act = ask if moment == "half loaded" else lambda: None
    if moment == "not loaded":
        ask()
    engine.load("mod")
    if moment == "loaded":
        ask()
    assert told.seen == [True]


def test_the_import_system_is_as_before_when_the_last_hook_has_gone(engine: Engine) -> None:
    def watched() -> tuple[Any, ...]:
        return (*sys.meta_path, importlib._bootstrap._find_spec, importlib.util.module_from_spec)  # type: ignore[attr-defined]

    engine.write("mod.py", "def f(): return []\n")
    before = watched()
    one, two = aspects.weave(mark("mod:f")), aspects.weave(mark("unloaded:g"))
    assert engine.load("mod").f() == ["hook"]
    one.remove()
    assert watched() != before
    two.remove()
    assert watched() == before


def test_a_spec_found_before_the_last_hook_went(engine: Engine) -> None:
    engine.write("mod.py", "def f(): return []\n")
    with aspects.woven(mark("mod:f")):
        spec = importlib.util.find_spec("mod")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mod"] = module
    spec.loader.exec_module(module)
    assert engine.load("mod").f() == []


# -- what goes wrong --------------------------------------------------------------------------------------


def test_what_goes_wrong_in_weaving_never_fails_the_import(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine.write(
        "hostile.py",
        """
        class Meta(type):
            def __setattr__(cls, name, value): raise RuntimeError("hands off")
        class Guarded(metaclass=Meta):
            def m(self): return []
        def f(): return []
        """,
    )
    guarded, plain = mark("hostile:Guarded.m"), mark("hostile:f")
    with aspects.woven(guarded, plain):
        hostile = engine.load("hostile")
        assert state(guarded) is State.FAILED
        assert "hands off" in guarded.detail
        assert hostile.Guarded().m() == []
        assert hostile.f() == ["hook"]

    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug of ours")

    engine.forget()
    with aspects.woven(mark("hostile:f")):
        monkeypatch.setattr("sgl_aspects.weaving.machine.resolve", broken)
        assert engine.load("hostile").f() == []
        assert "a bug of ours" in caplog.text
        assert "on hostile:f failed in module hostile" in caplog.text
        monkeypatch.undo()


def test_importing_in_a_hook(engine: Engine) -> None:
    engine.write("one.py", "def f(): return []\n")
    engine.write("two.py", "import one\nwhile_loading = one.f()\ndef g(): return []\n")

    def importing(result: list[str]) -> list[str]:
        return [*result, *engine.load("two").g()]

    with aspects.woven(
        aspects.Advice(Target.parse("one:f"), HookType.AFTER, importing), mark("two:g", name="g")
    ):
        engine.write("two.py", "def g(): return []\n")
        assert engine.load("one").f() == ["g"]


# -- threads ----------------------------------------------------------------------------------------------


def test_many_threads_import_the_same_modules_at_once(engine: Engine) -> None:
    names = [f"mod{number}" for number in range(20)]
    for number, name in enumerate(names):
        # No ring: CPython itself now and then finds a deadlock in a ring that several threads import.
        following = f"import mod{number + 1}" if number < 19 else ""
        engine.write(f"{name}.py", f"{following}\ndef f(): return []\ndef call(): return f()\n")
    barrier = threading.Barrier(8)

    def load(start: int) -> None:
        barrier.wait(DEADLINE)
        for offset in range(20):
            name = names[(start + offset) % 20]
            try:
                engine.load(name)
            except KeyError:  # CPython's own race, without any hook too: two threads load one module
                engine.load(name)

    advices = [mark(f"{name}:f") for name in names]
    with aspects.woven(*advices):
        with in_threads(*(functools.partial(load, start) for start in range(0, 16, 2))):
            pass
        assert {advice.state for advice in advices} == {State.WOVEN}
        for name in names:
            assert engine.load(name).call() == ["hook"]


@pytest.mark.parametrize("round_", range(3))
def test_imports_in_opposite_order_while_others_weave(engine: Engine, round_: int) -> None:
    del round_
    engine.write("first.py", "import time\ntime.sleep(0.02)\nimport second\ndef f(): return []\n")
    engine.write("second.py", "import time\ntime.sleep(0.02)\nimport first\ndef f(): return []\n")
    stop = threading.Event()

    def load(name: str) -> None:
        try:
            engine.load(name)
        except RuntimeError as error:  # CPython's own answer to such imports, now and then
            if "deadlock detected by _ModuleLock" not in str(error):
                raise
            engine.load(name)

    def weaving() -> None:
        while not stop.is_set():
            with aspects.woven(mark("first:f"), mark("second.f"), mark("fir*:f")):
                pass

    with in_threads(weaving, weaving):
        try:
            with in_threads(lambda: load("first"), lambda: load("second")):
                pass
        finally:
            stop.set()
    assert engine.load("first").f() == engine.load("second").f() == []
    assert not hasattr(engine.load("first").f, "__wrapped__")


def test_a_thread_weaves_what_another_one_is_importing(engine: Engine) -> None:
    """No moment of an import is lost, whenever the hook comes."""
    for number in range(30):
        engine.write(f"racing{number}.py", "def f(): return []\nimport time\ntime.sleep(0.001)\n")
    advices = [mark(f"racing{number}:f", required=True) for number in range(30)]
    with in_threads(lambda: [engine.load(f"racing{number}") for number in range(30)]):
        for advice in advices:
            aspects.weave(advice)
    aspects.HookRegistry.apply_hooks()
    assert {advice.state for advice in advices} == {State.WOVEN}
    for number in range(30):
        assert engine.load(f"racing{number}").f() == ["hook"]
    aspects.Handle(tuple(advices)).remove()
