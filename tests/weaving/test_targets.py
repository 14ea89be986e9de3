"""Targets: how they are parsed, which modules they cover, and the states of missing ones."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType, State, Target
from sgl_aspects.errors import AspectsError, HookError, MissingTargetError, TargetError
from tests.support.stand_ins import Engine
from tests.support.woven_modules import mark, state

FUNCTIONS = """
def f(): return ["f"]
def g(): return ["g"]
class C:
    def m(self): return ["m"]
    def n(self): return ["n"]
    class Inner:
        def m(self): return ["inner"]
class D:
    def m(self): return ["D.m"]
"""


# -- reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "alternates"),
    [
        ("pkg.mod:f", ["pkg.mod:f"]),
        ("pkg.mod.f", ["pkg.mod.f"]),
        ("  pkg.mod:C.m  ", ["pkg.mod:C.m"]),
        ("a:f | b:g", ["a:f", "b:g"]),
        ("a:f|b.g", ["a:f", "b.g"]),
        ("pkg.**:*Model.forward", ["pkg.**:*Model.forward"]),
        ("pkg.*.mod:Base+.m", ["pkg.*.mod:Base+.m"]),
    ],
)
def test_a_target_reads_as_it_was_written(text: str, alternates: list[str]) -> None:
    target = Target.parse(text)
    assert [alternate.text for alternate in target.alternates] == alternates
    assert str(target) == " | ".join(alternates)
    assert Target.parse(target) is target
    assert Target.parse([text]) == target


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", ":", "f", "mod:", ":f", "mod:f:g", "mod..f", "mod.:f", ".mod:f", "mod:f.", "mod:C..m"],
        *["a:f |", "| a:f", "a:f || b:g", "mod:f()", "mod:f[0]", "mod:f g", "1mod:f", "mod:1f", "mod/sub:f"],
        *["mod.*.f", "mod.C+.m", "mod:C+", "mod:**", "mod:C.**.m", "a**.b:f", "mod:+", "mod:C++.m", "m\0:f"],
        *[[], [""], ["a:f", ""], ["a:f", 1], None, 5, b"a:f", object()],
    ],
)
def test_what_cannot_be_read_is_a_target_error_that_names_it(text: Any) -> None:
    with pytest.raises(TargetError) as caught:
        Target.parse(text)
    assert isinstance(caught.value, ValueError)
    if isinstance(text, str):
        assert repr(text) in str(caught.value)


def test_random_targets_give_target_errors_only_and_import_nothing() -> None:
    randomly = random.Random(20)
    pieces = [*"ab.:*+| _1é\0", "zz", "..", "**", "zz.yy:", "Class+", ":f", " | ", "zz.", "lambda", "\n", "𝔘"]
    before = set(sys.modules)
    finders = list(sys.meta_path)
    read = []
    for _ in range(20_000):
        text = "".join(randomly.choices(pieces, k=randomly.randrange(12)))
        with contextlib.suppress(TargetError):
            read.append(Target.parse(text))
    assert len(read) > 200
    # Patterns over all modules would weave this very process.
    for target in [target for target in read if "*" not in str(target)][:500]:
        advice = aspects.Advice(target, HookType.AFTER, print)
        handle = aspects.weave(advice)
        assert state(advice) is State.PENDING
        aspects.explain(str(target))
        handle.remove()
    assert set(sys.modules) == before
    assert sys.meta_path == finders


def test_random_targets_in_loaded_modules_give_aspects_errors_only(engine: Engine) -> None:
    engine.write("zz/a.py", FUNCTIONS)
    engine.write("zz/unloaded.py", "raise SystemError('imported')")
    engine.load("zz.a")
    randomly = random.Random(21)
    heads = ["zz", "zz.a", "zz.unloaded", "zz.**", "zz.*", "z*.a", "zz.nowhere", "zz.a.C"]
    tails = ["f", "C", "C.m", "C+.m", "*", "*.m", "D.*", "a"]
    tails += ["__name__", "__doc__", "__spec__.name", "C.__dict__"]
    before = set(sys.modules)
    for _ in range(500):
        text = randomly.choice(heads) + randomly.choice(".:") + randomly.choice(tails)
        try:
            with aspects.woven(mark(text, required=randomly.random() < 0.2)):
                pass
        except AspectsError:
            pass
    assert set(sys.modules) == before
    assert engine.load("zz.a").f() == ["f"]


# -- finding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize(
    ("target", "call"),
    [
        ("pkg.mod:f", "f()"),
        ("pkg.mod.f", "f()"),
        ("pkg.mod:C.m", "C().m()"),
        ("pkg.mod.C.m", "C().m()"),
        ("pkg.mod.C.Inner.m", "C.Inner().m()"),
        ("pkg.*:C.m", "C().m()"),
        ("pkg.**:C.m", "C().m()"),
        ("**:C.m", "C().m()"),
        ("**.mod:C.m", "C().m()"),
        ("pkg.m*d:C.m", "C().m()"),
        ("*.mod:C.m", "C().m()"),
        ("pkg.mod:*.m", "C().m()"),
        ("pkg.mod:C.*", "C().m()"),
        ("pkg.mod:C+.m", "C().m()"),
        ("pkg.**:C*.m", "C().m()"),
    ],
)
def test_each_spelling_reaches_its_function(engine: Engine, loaded: bool, target: str, call: str) -> None:
    engine.write("pkg/mod.py", FUNCTIONS)
    if loaded:
        engine.load("pkg.mod")
    with aspects.woven(mark(target)) as handle:
        assert loaded or not engine.modules()
        module = engine.load("pkg.mod")
        assert eval(call, vars(module))[-1] == "hook"
        assert handle.states == (State.WOVEN,)
    assert "hook" not in eval(call, vars(module))


@pytest.mark.parametrize(
    "target",
    ["pkg.*:f", "pkg.mod.**:deep", "*:f", "pkg.mod:c*", "pkg.mod:C.m*n", "pkg.**.mod:nothing", "mod:f"],
)
def test_a_pattern_reaches_nothing_else(engine: Engine, target: str) -> None:
    engine.write("pkg/sub/mod.py", FUNCTIONS)
    engine.write("pkg/mod.py", "class C:\n    def m(self): return []\nimport os.path as copied\n")
    with aspects.woven(mark(target)) as handle:
        for name in ("pkg.mod", "pkg.sub.mod"):
            engine.load(name)
        assert handle.states[0] in (State.PENDING, State.MISSING)
        assert aspects.report().hooks[0].places == ()
        assert handle.advices[0].detail


def test_two_stars_cover_any_depth_and_what_loads_later(engine: Engine) -> None:
    for name in ("pkg/__init__.py", "pkg/a.py", "pkg/sub/__init__.py", "pkg/sub/b.py", "pkg/sub/deep/c.py"):
        engine.write(name, "def f(): return []\n")
    engine.write("package.py", "def f(): return []\n")
    engine.load("pkg.a")
    with aspects.woven(mark("pkg.**:f")):
        later = engine.load("pkg.sub.deep.c")
        assert later.f() == ["hook"]
        for name in ("pkg", "pkg.a", "pkg.sub", "pkg.sub.b"):
            assert engine.load(name).f() == ["hook"]
        assert engine.load("package").f() == []
        places = aspects.report().hooks[0].places
        assert sorted(places) == ["pkg.a:f", "pkg.sub.b:f", "pkg.sub.deep.c:f", "pkg.sub:f", "pkg:f"]
    assert later.f() == []


def test_a_pattern_weaves_what_a_module_defines_and_skips_what_it_copied(engine: Engine) -> None:
    engine.write(
        "pkg/a.py", "def work(): return []\ndef workless(): return []\nconstant = 3\nclass worker: pass\n"
    )
    engine.write("pkg/b.py", "from pkg.a import work\nfrom os.path import join as workjoin\n")
    with aspects.woven(mark("pkg.**:work*")) as handle:
        b = engine.load("pkg.b")
        assert b.work() == ["hook"]  # once
        assert sorted(aspects.report().hooks[0].places) == ["pkg.a:work", "pkg.a:workless"]
        assert handle.states == (State.WOVEN,)


def test_subclasses_are_reached_wherever_and_whenever_they_are_defined(engine: Engine) -> None:
    engine.write("engine/base.py", "class Base:\n    def run(self): return []\n")
    engine.write(
        "models/before.py",
        "from engine.base import Base\nclass Before(Base):\n    def run(self): return ['before']\n",
    )
    engine.write(
        "models/later.py",
        """
        from engine.base import Base
        class Holder:
            class Nested(Base):
                def run(self): return ['nested']
        class Later(Base):
            def run(self): return ['later']
        class Silent(Base): pass
        class Grandchild(Later):
            def run(self): return super().run() + ['grandchild']
        """,
    )
    engine.write("models/unrelated.py", "class Base:\n    def run(self): return []\n")
    before = engine.load("models.before")
    with aspects.woven(mark("engine.base:Base+.run")):
        assert before.Before().run() == ["before", "hook"]
        later = engine.load("models.later")
        assert later.Later().run() == ["later", "hook"]
        assert later.Holder.Nested().run() == ["nested", "hook"]
        assert later.Silent().run() == ["hook"]
        assert later.Grandchild().run() == ["later", "hook", "grandchild", "hook"]
        assert engine.load("models.unrelated").Base().run() == []
    assert later.Grandchild().run() == ["later", "grandchild"]
    assert "run" not in vars(later.Silent)


def test_subclasses_of_a_class_that_is_not_loaded_yet(engine: Engine) -> None:
    engine.write("engine/base.py", "class Base:\n    def run(self): return []\n")
    engine.write(
        "engine/sub.py", "from .base import Base\nclass Sub(Base):\n    def run(self): return ['sub']\n"
    )
    with aspects.woven(mark("engine.*:Base+.run")):
        assert engine.load("engine.sub").Sub().run() == ["sub", "hook"]


def test_a_class_may_itself_not_have_what_its_subclasses_have(engine: Engine) -> None:
    engine.write(
        "mod.py", "class Base:\n    run = None\nclass Sub(Base):\n    def run(self): return ['sub']\n"
    )
    with aspects.woven(mark("mod:Base+.run")) as handle:
        assert engine.load("mod").Sub().run() == ["sub", "hook"]
        assert handle.states == (State.WOVEN,)


# -- alternates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [("mod:f | mod:g",), ("mod:f", "mod:g"), ("mod.f | mod:g",)])
def test_the_first_alternate_that_exists_wins(engine: Engine, targets: tuple[str, ...]) -> None:
    engine.write("mod.py", FUNCTIONS)
    with aspects.woven(mark(*targets)):
        mod = engine.load("mod")
        assert (mod.f(), mod.g()) == (["f", "hook"], ["g"])


@pytest.mark.parametrize("loaded", [True, False])
def test_a_missing_alternate_gives_way_to_the_next(engine: Engine, loaded: bool) -> None:
    engine.write("mod.py", FUNCTIONS)
    if loaded:
        engine.load("mod")
    with aspects.woven(mark("gone:f | mod:moved | mod:C.gone | mod:g", required=True)) as handle:
        assert engine.load("mod").g() == ["g", "hook"]
        assert handle.states == (State.WOVEN,)
        assert handle.advices[0].detail == ""


def test_a_better_alternate_that_loads_later_takes_over(engine: Engine) -> None:
    engine.write("new.py", "def f(): return ['new']\n")
    engine.write("old.py", "def f(): return ['old']\n")
    old = engine.load("old")
    original = old.f
    with aspects.woven(mark("new:f | old:f")):
        assert old.f() == ["old", "hook"]
        assert engine.load("new").f() == ["new", "hook"]
        assert old.f is original
    assert engine.load("new").f() == ["new"]


def test_a_worse_alternate_that_loads_later_is_left_alone(engine: Engine) -> None:
    engine.write("new.py", "def f(): return ['new']\n")
    engine.write("old.py", "def f(): return ['old']\n")
    with aspects.woven(mark("new:f | old:f")):
        assert engine.load("new").f() == ["new", "hook"]
        assert engine.load("old").f() == ["old"]


def test_a_class_with_subclasses_follows_the_chosen_alternate(engine: Engine) -> None:
    engine.write("new.py", "class Base:\n    def m(self): return []\n")
    engine.write("old.py", "class Base:\n    def m(self): return []\n")
    engine.write("sub.py", "import old\nclass Sub(old.Base):\n    def m(self): return ['sub']\n")
    with aspects.woven(mark("new:Base+.m | old:Base+.m")):
        engine.load("new")
        assert engine.load("sub").Sub().m() == ["sub"]


# -- where the module of a dotted target ends ---------------------------------------------------------------


def test_a_dotted_target_settles_as_modules_load(engine: Engine) -> None:
    engine.write("pkg/sub/mod.py", FUNCTIONS)
    with aspects.woven(mark("pkg.sub.mod.C.m", required=True)) as handle:
        for name in ("pkg", "pkg.sub"):
            engine.load(name)
            assert handle.states == (State.PENDING,)
        assert engine.load("pkg.sub.mod").C().m() == ["m", "hook"]


def test_a_dotted_target_may_be_re_exported_by_its_package(engine: Engine) -> None:
    engine.write("pkg/impl.py", "def f(): return []\n")
    engine.write("pkg/__init__.py", "from pkg.impl import f\n")
    engine.write("user.py", "from pkg.impl import f\n")
    with aspects.woven(mark("pkg.f")):
        assert engine.load("user").f() == ["hook"]
        assert engine.load("pkg").f() == ["hook"]


@pytest.mark.parametrize(
    "target", ["pkg.unloaded.f", "pkg.unloaded:f", "pkg.unloaded.C.m", "pkg.**:f", "pkg.gone.f"]
)
def test_nothing_is_imported_for_a_target(engine: Engine, target: str) -> None:
    engine.write("pkg/unloaded.py", "raise SystemError('imported')")
    engine.write("pkg/sub/__init__.py", "")
    engine.load("pkg")
    before = set(sys.modules)
    with aspects.woven(mark(target)):
        aspects.HookRegistry.apply_hooks()
        aspects.explain(target)
        assert str(aspects.report())
        assert set(sys.modules) == before


def test_a_dotted_target_is_missing_only_when_no_submodule_can_bring_it(engine: Engine) -> None:
    engine.write("pkg/sub.py", FUNCTIONS)
    engine.load("pkg")
    waits, gone, deeper = mark("pkg.sub.f"), mark("pkg.sbu.f"), mark("pkg.sub.gone")
    with aspects.woven(waits, gone, deeper) as handle:
        assert handle.states == (State.PENDING, State.MISSING, State.PENDING)
        engine.load("pkg.sub")
        assert handle.states == (State.WOVEN, State.MISSING, State.MISSING)


# -- states -------------------------------------------------------------------------------------------------


def test_a_hook_goes_through_its_states(engine: Engine) -> None:
    engine.write("mod.py", FUNCTIONS)
    advice = mark("mod:f")
    assert state(advice) is State.REMOVED
    handle = aspects.weave(advice)
    assert (state(advice), advice.detail) == (State.PENDING, "its module is not loaded yet")
    handle.disable()
    assert state(advice) is State.PENDING
    mod = engine.load("mod")
    assert state(advice) is State.DISABLED
    assert mod.f() == ["f"]
    handle.enable()
    assert state(advice) is State.WOVEN
    assert mod.f() == ["f", "hook"]
    handle.remove()
    assert state(advice) is State.REMOVED
    handle.remove()
    handle.enable()
    assert mod.f() == ["f"]
    with aspects.woven(advice):
        assert state(advice) is State.WOVEN


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize(
    ("target", "close"),
    [("mod:functoin", "function"), ("mod:Class.metod", "Class.method"), ("mod:Clas.method", "Class")],
)
def test_a_missing_attribute_is_a_state_with_close_names(
    engine: Engine, caplog: pytest.LogCaptureFixture, loaded: bool, target: str, close: str
) -> None:
    engine.write("mod.py", "def function(): pass\nclass Class:\n    def method(self): pass\n")
    if loaded:
        engine.load("mod")
    advice = mark(target)
    with aspects.woven(advice):
        engine.load("mod")
        assert state(advice) is State.MISSING
        assert "module mod is loaded and has no " + target.partition(":")[2] in advice.detail
        assert f"close names: {close}" in advice.detail
        assert aspects.report().hooks[0].detail == advice.detail
        aspects.HookRegistry.apply_hooks()
        engine.load("mod")
    told = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == 1
    assert target in told[0].getMessage()
    assert close in told[0].getMessage()


def test_a_path_through_a_module_says_how_to_write_it(engine: Engine) -> None:
    """Also where the package makes attributes of its own: what is there already is not waited for."""
    engine.write("pkg/__init__.py", "def __getattr__(name): raise AttributeError(name)\n")
    engine.write("pkg/mod.py", FUNCTIONS)
    engine.load("pkg.mod")
    advice = mark("pkg:mod.Class.method")
    with aspects.woven(advice):
        assert state(advice) is State.MISSING
        assert advice.detail == "pkg.mod is a module: write 'pkg.mod:Class.method'"


def test_alternates_that_are_gone_are_told_apart_from_those_that_may_come(engine: Engine) -> None:
    engine.write("mod.py", FUNCTIONS)
    engine.load("mod")
    advice = mark("mod:gone | later:f")
    with aspects.woven(advice):
        assert state(advice) is State.PENDING
        assert "module mod is loaded and has no gone" in advice.detail
        assert "not loaded yet" in advice.detail
        engine.write("later.py", FUNCTIONS)
        assert engine.load("later").f() == ["f", "hook"]
        assert (state(advice), advice.detail) == (State.WOVEN, "")


def test_a_missing_attribute_that_comes_later_is_found_by_looking_again(engine: Engine) -> None:
    engine.write("mod.py", FUNCTIONS)
    mod = engine.load("mod")
    advice = mark("mod:late")
    with aspects.woven(advice):
        assert state(advice) is State.MISSING
        mod.late = lambda: list()  # noqa: C408
        aspects.HookRegistry.apply_hooks()
        assert state(advice) is State.WOVEN
        assert mod.late() == ["hook"]


def test_what_cannot_be_hooked_fails_and_says_why(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.write("mod.py", "value = 3\nclass C: pass\n")
    for target in ("mod:value", "mod:C"):
        later = mark(target)
        handle = aspects.weave(later)
        mod = engine.load("mod")
        assert state(later) is State.FAILED
        assert target in later.detail
        assert target in caplog.text
        handle.remove()
        with pytest.raises(HookError) as caught:
            aspects.weave(later)
        assert target in str(caught.value)
        assert state(later) is State.REMOVED
        assert mod.value == 3
        engine.forget()


def test_a_group_is_woven_whole_or_not_at_all(engine: Engine) -> None:
    engine.write("mod.py", FUNCTIONS + "value = 3\n")
    mod = engine.load("mod")
    original = mod.f
    with pytest.raises(HookError):
        aspects.weave(mark("mod:f"), mark("unloaded:f"), mark("mod:value"))
    assert mod.f is original
    assert aspects.report().hooks == ()


def test_one_hook_given_twice_is_woven_once(engine: Engine) -> None:
    engine.write("mod.py", FUNCTIONS)
    advice = mark("mod:f")
    with aspects.woven(advice, advice):
        assert engine.load("mod").f() == ["f", "hook"]
        with pytest.raises(HookError, match="woven already"):
            aspects.weave(advice)
    assert engine.load("mod").f() == ["f"]


# -- required hooks -----------------------------------------------------------------------------------------


def test_a_required_hook_on_a_loaded_module_raises(engine: Engine) -> None:
    engine.write("mod.py", FUNCTIONS)
    mod = engine.load("mod")
    with pytest.raises(
        MissingTargetError, match=r"required after hook .* on mod:gone: module mod .* no gone"
    ):
        aspects.weave(mark("mod:f"), mark("mod:gone", required=True))
    assert mod.f() == ["f"]
    with pytest.raises(HookError, match="is a class"):
        aspects.weave(mark("mod:C", required=True))


IMPORTING = {
    "plainly": "import mod",
    "in except Exception": "try:\n    import mod\nexcept Exception:\n    print('swallowed')",
    "in except ImportError": "try:\n    from mod import gone\nexcept ImportError:\n    print('swallowed')",
    "through a package": "import outer",
    "in a thread": (
        "import threading\nt = threading.Thread(target=__import__, args=('mod',)); t.start(); t.join()"
    ),
    "in a pool": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "print(ThreadPoolExecutor(1).submit(__import__, 'mod').exception())"
    ),
    "again by importlib": "import importlib; importlib.import_module('mod')",
    "registered while it loads": "import self_registering",
}


@pytest.mark.parametrize(
    ("importing", "target"),
    [
        *((importing, "mod:Scheduler.run_bach") for importing in IMPORTING),
        ("plainly", "mod.Scheduler.run_bach"),
        ("in a thread", "gone:f | mod:run_bach"),
        ("plainly", "mod:value"),
        ("registered while it loads", "mod:value"),
    ],
)
def test_a_required_hook_that_turns_out_missing_stops_the_process(
    engine: Engine, importing: str, target: str
) -> None:
    engine.write("gone.py", "")
    engine.write(
        "mod.py", "class Scheduler:\n    def run_batch(self): pass\ndef run_batch(): pass\nvalue = 3\n"
    )
    engine.write("outer.py", "try:\n    import mod\nexcept Exception:\n    pass\n")
    register = f"""
import sgl_aspects as aspects
from sgl_aspects import HookRegistry, HookSource, HookType
def count_batches(result, *args, **kwargs): pass
source = HookSource("counting", "counting-dist")
HookRegistry.register("{target}", count_batches, HookType.AFTER, source=source, required=True)
HookRegistry.apply_hooks()
"""
    engine.write("self_registering.py", "")
    if importing == "registered while it loads":
        engine.write("registering.py", register)
        engine.write("mod.py", "import registering\n" + (engine.folder / "mod.py").read_text())
        engine.write("self_registering.py", "import gone\nimport mod\n")
        register = ""
    ended = engine.run(f"{register}\nimport gone\n{IMPORTING[importing]}\nprint('went on')\n")
    assert ended.returncode == 1, ended.stderr
    assert "went on" not in ended.stdout
    assert "swallowed" not in ended.stdout
    for word in ("count_batches", "counting (counting-dist)", target, "Correct the target", "required=True"):
        assert word in ended.stderr
    assert ("run_batch" if "bach" in target else "cannot be called") in ended.stderr


def test_a_required_hook_that_is_found_stops_nothing(engine: Engine) -> None:
    engine.write("pkg/mod.py", FUNCTIONS)
    required = [
        mark(target, required=True)
        for target in ("pkg.mod:f", "pkg.mod.C.m", "pkg.gone:f | pkg.mod:g", "pkg.**:D.m", "never.loaded:f")
    ]
    with aspects.woven(*required) as handle:
        thread = threading.Thread(target=engine.load, args=("pkg.mod",))
        thread.start()
        thread.join()
        assert handle.states == (*[State.WOVEN] * 4, State.PENDING)
