"""The faces: SGLang's registry with its contract, and decorators, handles, groups, reports."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookRegistry, HookSource, HookType, State, Target, plugin_hook
from sgl_aspects.errors import HookError, MissingTargetError, TargetError
from tests.support.stand_ins import Engine

ENGINE = """
import functools
def f(value=1): return ["f", value]
def g(): return ["g"]
def other(): return ["other"]
async def fetch(): return ["fetched"]
@functools.lru_cache(maxsize=None)
def cached(n): return n * 2
class C:
    def m(self): return ["m"]
    @property
    def size(self): return 4
class Scheduler:
    def run(self): return ["run"]
"""


@pytest.fixture
def module(engine: Engine) -> Any:
    """A loaded module."""
    engine.write("mod.py", ENGINE)
    return engine.load("mod")


def adding(name: str) -> Any:
    """An AFTER hook that appends ``name``."""

    def hook(result: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [*result, name]

    hook.__qualname__ = name
    return hook


# -- SGLang's contract ----------------------------------------------------------------------------------


def test_each_hook_type_has_sglangs_signature(module: Any) -> None:
    def before(*args: Any, **kwargs: Any) -> Any:
        return (args[0] if args else kwargs["value"]) + 1 and ((), {"value": 10})

    def around(original_fn: Any, *args: Any, **kwargs: Any) -> Any:
        return ["around", *original_fn(*args, **kwargs)]

    HookRegistry.register("mod.f", before, HookType.BEFORE)
    HookRegistry.register("mod.f", adding("after"))
    HookRegistry.register("mod.f", around, HookType.AROUND)
    HookRegistry.register("mod.g", lambda: ["replaced"], HookType.REPLACE)
    assert module.f() == ["f", 1]
    HookRegistry.apply_hooks()
    assert module.f(3) == ["around", "f", 10, "after"]
    assert module.g() == ["replaced"]
    HookRegistry.reset()
    assert module.f() == ["f", 1]
    assert module.g() == ["g"]


def test_the_decorator_registers_and_returns_what_it_decorates(module: Any) -> None:
    @plugin_hook("mod.f", type=HookType.AROUND)
    def timed(original_fn: Any, *args: Any, **kwargs: Any) -> Any:
        return [*original_fn(*args, **kwargs), "timed"]

    @plugin_hook("mod.Scheduler", type=HookType.REPLACE)
    class MyScheduler(module.Scheduler):  # type: ignore[misc]
        def run(self) -> list[str]:
            return [*super().run(), "mine"]

    @plugin_hook("mod.g")
    def after(result: list[str]) -> list[str]:
        return [*result, "after"]

    HookRegistry.apply_hooks()
    assert timed(list) == ["timed"]
    assert module.f() == ["f", 1, "timed"]
    assert module.Scheduler is MyScheduler
    assert module.Scheduler().run() == ["run", "mine"]
    assert module.g() == ["g", "after"]


def test_nothing_is_woven_or_imported_before_hooks_are_applied(engine: Engine) -> None:
    engine.write("mod.py", ENGINE)
    HookRegistry.register("mod.f", adding("hook"))
    assert not engine.modules()
    module = engine.load("mod")
    assert module.f() == ["f", 1]
    HookRegistry.apply_hooks()
    assert module.f() == ["f", 1, "hook"]


def test_applied_hooks_wait_for_their_module(engine: Engine) -> None:
    engine.write("mod.py", ENGINE)
    HookRegistry.register("mod.C.m", adding("hook"))
    HookRegistry.apply_hooks()
    assert not engine.modules()
    assert engine.load("mod").C().m() == ["m", "hook"]


# -- what is a fault in SGLang ----------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["mod.f", "mod:f"])
def test_a_hook_on_a_target_that_is_woven_takes_effect_at_once(module: Any, target: str) -> None:
    HookRegistry.register("mod.f", adding("first"))
    HookRegistry.apply_hooks()
    HookRegistry.register(target, adding("second"))
    assert module.f() == ["f", 1, "first", "second"]
    HookRegistry.register("mod.g", adding("not yet"))
    assert module.g() == ["g"]


def test_a_second_hook_on_a_patched_target_is_not_dropped(module: Any) -> None:
    for name in ("one", "two", "three"):
        HookRegistry.register("mod.f", adding(name))
        HookRegistry.apply_hooks()
        HookRegistry.apply_hooks()
    assert module.f() == ["f", 1, "one", "two", "three"]


def test_a_late_hook_on_what_the_other_face_has_woven(module: Any) -> None:
    advice = aspects.Advice(Target.parse("mod:f"), HookType.AFTER, adding("woven"))
    with aspects.woven(advice):
        HookRegistry.register("mod.f", adding("registered"))
        assert module.f() == ["f", 1, "woven", "registered"]
    assert module.f() == ["f", 1, "registered"]


def test_reset_restores_the_originals_and_forgets(module: Any, engine: Engine) -> None:
    engine.write("copier.py", "from mod import f\ntable = {'f': f}\n")
    originals = tuple(vars(module).items())  # a tuple, because a dictionary would be rebound
    original = module.f
    copier = engine.load("copier")
    for target in ("mod.f", "mod.C.m", "mod.fetch", "mod.cached", "mod.C.size"):
        HookRegistry.register(target, lambda result, *args: result)
    HookRegistry.apply_hooks()
    assert copier.table["f"] is copier.f is module.f is not original
    HookRegistry.reset()
    assert all(vars(module)[name] is value for name, value in originals)
    assert copier.table["f"] is copier.f is original
    assert aspects.report().hooks == ()
    HookRegistry.apply_hooks()
    assert module.f is original


def test_hooks_are_taken_away_one_by_one(module: Any) -> None:
    first, second = adding("first"), adding("second")
    for hook in (first, second):
        HookRegistry.register("mod.f", hook)
    HookRegistry.apply_hooks()
    assert HookRegistry.unregister("mod:f", first)
    assert module.f() == ["f", 1, "second"]
    assert not HookRegistry.unregister("mod:f", first)
    assert not HookRegistry.unregister("mod:f", second, HookType.BEFORE)
    assert not HookRegistry.unregister("mod:g", second)
    assert HookRegistry.unregister("mod.f", second)
    assert not hasattr(module.f, "__wrapped__")


def test_whether_a_hook_is_applied(module: Any) -> None:
    class Plugin:
        def hook(self, result: Any, *args: Any) -> None: ...

    plugin, function = Plugin(), adding("hook")
    for hook in (plugin.hook, function):
        assert not HookRegistry.is_hook_applied("mod.f", hook)
        HookRegistry.register("mod.f", hook)
        assert not HookRegistry.is_hook_applied("mod.f", hook)
    HookRegistry.register("gone.f", function)
    HookRegistry.apply_hooks()
    for hook in (plugin.hook, function):
        assert HookRegistry.is_hook_applied("mod.f", hook)
        assert HookRegistry.is_hook_applied("mod:f", hook, HookType.AFTER)
        assert not HookRegistry.is_hook_applied("mod.f", hook, HookType.AROUND)
        assert not HookRegistry.is_hook_applied("mod.g", hook)
    assert not HookRegistry.is_hook_applied("gone.f", function)
    assert HookRegistry.unregister("mod.f", plugin.hook)
    assert not HookRegistry.is_hook_applied("mod.f", plugin.hook)
    assert module.f() == ["f", 1, "hook"]


def test_a_hook_that_fails_does_not_keep_the_others_away_and_stays_in_the_report(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source = HookSource("broken", "broken-dist")
    HookRegistry.register("mod.f", adding("first"))
    HookRegistry.register("mod.C", adding("on a class"), source=source)
    HookRegistry.register("mod.gone", adding("missing"), source=source)
    HookRegistry.register("mod.g", adding("last"))
    for _ in range(3):
        HookRegistry.apply_hooks()
    assert module.f() == ["f", 1, "first"]
    assert module.g() == ["g", "last"]
    states = {hook.target: hook.state for hook in aspects.report().hooks}
    expected = {"mod.f": "woven", "mod.C": "failed", "mod.gone": "missing", "mod.g": "woven"}
    assert {target: state.value for target, state in states.items()} == expected
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert all("from broken (broken-dist)" in warning for warning in warnings)


def test_a_bug_in_weaving_one_hook_is_contained(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sgl_aspects.weaving import descriptors

    plain = descriptors.opened

    def buggy(place: Any) -> Any:
        if place.name == "g":
            raise RuntimeError("a bug of ours")
        return plain(place)

    for name in ("f", "g", "other"):
        HookRegistry.register(f"mod.{name}", adding("hook"))
    with monkeypatch.context() as patched:
        patched.setattr(descriptors, "opened", buggy)
        HookRegistry.apply_hooks()
    assert (module.f(), module.g(), module.other()) == (["f", 1, "hook"], ["g"], ["other", "hook"])
    assert "a bug of ours" in caplog.text


def test_a_required_hook_raises_after_the_others_have_been_applied(module: Any) -> None:
    HookRegistry.register("mod.gone", adding("required"), required=True)
    HookRegistry.register("mod.C", adding("also required"), required=True)
    HookRegistry.register("mod.g", adding("required too"), required=True)
    HookRegistry.register("mod.f", adding("plain"))
    with pytest.raises(MissingTargetError, match=r"required after hook .* on mod\.gone"):
        HookRegistry.apply_hooks()
    assert module.f() == ["f", 1, "plain"]
    assert module.g() == ["g", "required too"]


def test_two_names_of_one_re_export_fire_once(engine: Engine) -> None:
    engine.write("pkg/impl.py", "def f(): return ['f']\n")
    engine.write("pkg/__init__.py", "from pkg.impl import f\n")
    hook, other = adding("hook"), adding("other")
    for loaded in (False, True):
        HookRegistry.register("pkg.f", hook)
        HookRegistry.register("pkg.impl.f", hook)
        HookRegistry.register("pkg.impl.f", other)
        if loaded:
            engine.load("pkg")
        HookRegistry.apply_hooks()
        pkg = engine.load("pkg")
        assert pkg.f() == pkg.impl.f() == ["f", "hook", "other"]
        assert HookRegistry.unregister("pkg.f", hook)
        assert sorted(pkg.f()) == ["f", "hook", "other"]
        assert HookRegistry.unregister("pkg.impl.f", hook)
        assert pkg.f() == ["f", "other"]
        HookRegistry.reset()
        assert pkg.f() == pkg.impl.f() == ["f"]
        engine.forget()


def test_one_hook_registered_twice_on_one_target_runs_twice(module: Any) -> None:
    hook = adding("hook")
    for _ in range(2):
        HookRegistry.register("mod.f", hook)
    HookRegistry.apply_hooks()
    assert module.f() == ["f", 1, "hook", "hook"]
    HookRegistry.unregister("mod.f", hook)
    assert module.f() == ["f", 1]


def test_sources_are_kept_and_shown(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert HookSource("name", "dist") == ("name", "dist")
    assert HookSource("name").dist_name is None
    HookRegistry.register("mod.f", lambda: ["one"], HookType.REPLACE, source=HookSource("one", "one-dist"))
    HookRegistry.register("mod.f", lambda: ["two"], HookType.REPLACE, source=HookSource("two"))
    HookRegistry.apply_hooks()
    assert module.f() == ["two"]
    assert "one (one-dist)" in caplog.text
    assert "from two" in caplog.text
    assert [hook.source for hook in aspects.report().hooks] == [("one", "one-dist"), ("two", None)]
    assert "[one (one-dist)]" in str(aspects.report())
    assert "[one (one-dist)]" in aspects.explain("mod.f")


def test_a_replacement_calls_the_original_whenever_it_got_hold_of_it(engine: Engine) -> None:
    engine.write("mod.py", ENGINE)
    plugin = "from mod import f\ndef mine(value=1): return [*f(value), {name!r}]\n"
    engine.write("early.py", plugin.format(name="early"))
    engine.write("late.py", plugin.format(name="late"))
    module, early = engine.load("mod"), engine.load("early")
    original = module.f
    HookRegistry.register("mod.f", early.mine, HookType.REPLACE)
    HookRegistry.apply_hooks()
    assert module.f() == ["f", 1, "early"]
    late = engine.load("late")
    HookRegistry.register("mod.f", late.mine, HookType.REPLACE)
    assert module.f() == ["f", 1, "late"]
    assert early.f is late.f is original
    HookRegistry.unregister("mod.f", late.mine, HookType.REPLACE)
    assert module.f() == ["f", 1, "early"]


@pytest.mark.parametrize(
    ("target", "hook", "hook_type", "error"),
    [
        ("", print, HookType.AFTER, TargetError),
        ("mod", print, HookType.AFTER, TargetError),
        ("mod.f", None, HookType.AFTER, HookError),
        ("mod.f", "print", HookType.AROUND, HookError),
        ("mod.f", int, HookType.BEFORE, HookError),
        ("mod.f", print, "after", HookError),
        ("mod.f", print, None, HookError),
        ("mod.f", print, HookType.OBSERVE, HookError),
    ],
)
def test_what_cannot_be_registered_is_told_at_once(
    target: str, hook: Any, hook_type: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        HookRegistry.register(target, hook, hook_type)
    HookRegistry.apply_hooks()
    assert aspects.report().hooks == ()


# -- decorators, handles, groups ------------------------------------------------------------------------


def test_decorated_functions_are_woven_by_handle(module: Any) -> None:
    @aspects.around("mod:f", "mod:moved", order=3)
    @aspects.after("mod:g")
    def marked(original_fn: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(original_fn, list):
            return [*original_fn, "after"]
        return [*original_fn(*args, **kwargs), "around"]

    assert module.f() == ["f", 1]
    handle = aspects.weave(marked)
    assert module.f() == ["f", 1, "around"]
    assert module.g() == ["g", "after"]
    assert handle.states == (State.WOVEN, State.WOVEN)
    with pytest.raises(HookError, match="woven already"):
        aspects.weave(marked)
    handle.disable()
    assert (module.f(), module.g()) == (["f", 1], ["g"])
    handle.enable()
    assert module.f() == ["f", 1, "around"]
    handle.remove()
    assert not hasattr(module.f, "__wrapped__")
    with aspects.woven(marked) as again:
        assert module.f() == ["f", 1, "around"]
        again.remove()
        assert module.f() == ["f", 1]


def test_a_with_block_removes_its_hooks_when_it_fails(module: Any) -> None:
    original = module.f
    hook = aspects.after("mod:f")(adding("hook"))

    def failing() -> None:
        with aspects.woven(hook):
            assert module.f() == ["f", 1, "hook"]
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert module.f is original


def test_aspects_group_hooks_that_share_state(module: Any) -> None:
    class Counting(aspects.Aspect):
        def __init__(self) -> None:
            self.seen: list[str] = []

        @aspects.before("mod:f")
        def on_f(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append("f")

        @aspects.native("mod:g")
        def on_g(self, proceed: Any, args: Any, kwargs: Any) -> Any:
            self.seen.append("g")
            return proceed(args, kwargs)

        @aspects.replace("mod:other")
        @staticmethod
        def on_other() -> list[str]:
            return ["replaced"]

        @property
        def untouched(self) -> Any:
            raise AssertionError("properties of an aspect are not read")

    one, two = Counting(), Counting()
    with aspects.woven(one, two):
        module.f()
        module.g()
        assert module.other() == ["replaced"]
    module.f()
    assert one.seen == two.seen == ["f", "g"]
    with aspects.woven(one):
        module.f()
    assert (one.seen, two.seen) == (["f", "g", "f"], ["f", "g"])
    with aspects.woven(Counting):
        assert module.other() == ["replaced"]


def test_observers_in_every_form(module: Any) -> None:
    events: list[Any] = []

    @aspects.observe("mod:f")
    class Watch:
        def enter(self, args: Any, kwargs: Any) -> str:
            events.append(("enter", args, kwargs))
            return "token"

        def exit(self, token: str, result: Any, error: Any) -> None:
            events.append(("exit", token, result, error))

    handle = aspects.weave(
        Watch, aspects.observe("mod:g", exit=lambda token, result, error: events.append((token, result)))
    )
    module.f(2)
    module.g()
    assert events == [
        ("enter", (2,), {}),
        ("exit", "token", ["f", 2], None),
        (None, ["g"]),
    ]
    assert [hook.calls for hook in aspects.report().hooks] == [1, 1]
    handle.remove()


@pytest.mark.parametrize("hook", [print, functools.partial(print), "text".upper])
def test_what_cannot_carry_a_mark_says_what_to_do(hook: Any) -> None:
    mark: Any = aspects.after("mod:f")
    if isinstance(hook, functools.partial):
        assert mark(hook) is hook
    else:
        with pytest.raises(HookError, match="Advice"):
            mark(hook)


# -- reports --------------------------------------------------------------------------------------------


def test_the_report_tells_of_every_hook(module: Any) -> None:
    module.f()
    HookRegistry.register("mod.f", adding("first"), source=HookSource("p", "d"), order=2)
    HookRegistry.apply_hooks()
    module.f()
    module.f()
    HookRegistry.register("mod:f", adding("second"))
    HookRegistry.register("later:f", adding("third"), required=True)
    HookRegistry.apply_hooks()
    module.f()
    first, second, third = aspects.report().hooks
    assert (first.target, first.order, first.source) == ("mod.f", 2, ("p", "d"))
    assert (first.calls, second.calls, third.calls) == (3, 1, 0)
    assert (first.places, third.places) == (("mod:f",), ())
    assert (first.hook_type, third.required) == (HookType.AFTER, True)
    assert "not loaded yet" in third.detail
    text = str(aspects.report())
    assert [line.split()[0] for line in text.splitlines()] == ["woven", "woven", "pending"]
    HookRegistry.reset()
    assert str(aspects.report()) == "no hooks"


def test_an_explanation_lists_hooks_from_the_outside_in(module: Any, engine: Engine) -> None:
    engine.write("copier.py", "from mod import f as renamed\n")
    engine.load("copier")
    assert aspects.explain("mod:f") == "mod:f: no hooks"
    HookRegistry.register("mod.f", adding("inner"), order=-1)
    HookRegistry.register("mod.f", adding("outer"), order=1)
    HookRegistry.register("mod.f", lambda value=1: ["replaced"], HookType.REPLACE)
    HookRegistry.register("later.f", adding("waiting"))
    HookRegistry.apply_hooks()
    for name in ("mod:f", "mod.f", "copier:renamed", "mod:*"):
        lines = aspects.explain(name).splitlines()
        assert lines[0].startswith("mod:f: 0 calls, a generated function is installed")
        words = [line.split()[:2] for line in lines[1:]]
        assert [word[0] for word in words] == ["after", "after", "replace", "original"]
        assert words[0][1].endswith("outer")
        assert words[1][1].endswith("inner")
    assert "pending" in aspects.explain("later:f")
    assert "waiting" in aspects.explain("later:f")
    with pytest.raises(TargetError):
        aspects.explain("mod")
