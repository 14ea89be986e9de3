"""Targets that cannot be hooked: each is named, and harms no other hook."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import math
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookRegistry, HookType, State
from sgl_aspects.errors import HookError
from tests.support.woven_modules import ODD_DESCRIPTORS, advice, around, fixture_of, hooked

engine = fixture_of(ODD_DESCRIPTORS)


@pytest.mark.parametrize("first", ["before", "after"])
def test_a_bad_target_harms_nobody_else(engine: Any, first: str, caplog: pytest.LogCaptureFixture) -> None:
    names = ["A.refusing", "Closed.m", "nothing", "A", "A.m"]
    for name in names if first == "before" else reversed(names):
        HookRegistry.register(f"engine.{name}", hooked, HookType.AROUND)
    for _ in range(2):
        HookRegistry.apply_hooks()
        assert engine.A().m() == ("hooked", "m")
    with aspects.woven(around("engine:f", hooked), around("engine:A.*", hooked)):
        assert engine.f() == ("hooked", ("f", 0))
    states = {hook.target: hook.state for hook in aspects.report().hooks}
    assert states["engine.A.refusing"] is states["engine.Closed.m"] is states["engine.A"] is State.FAILED
    assert "hands off" in str(aspects.report())
    HookRegistry.reset()
    assert engine.A().m() == "m"
    assert engine.A().refusing == "refusing"
    assert aspects.report().hooks == ()


def test_a_metaclass_that_answers_nothing_is_not_asked(engine: Any) -> None:
    with aspects.woven(
        around("engine:Guarded.m", hooked), around("engine:*.m", hooked), around("engine:No+.m")
    ):
        result = object.__new__(engine.Guarded).m()  # pytest would ask the class, too
        assert result == ("hooked", "guarded")
        assert "engine:Guarded.m" in str(aspects.report().hooks[0].places)
    result = object.__new__(engine.Guarded).m()
    assert result == "guarded"


def test_an_observer_that_refuses_to_be_bound_harms_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unbound:
        def bound_to(self, function: Any) -> Any:
            raise KeyError("its own")

        def enter(self, args: Any, kwargs: Any) -> None: ...

    (tmp_path / "bound_late.py").write_text("def f(): return 'f'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "bound_late:f"
    with aspects.woven(advice(target, HookType.OBSERVE, Unbound()), around(target, hooked)) as handle:
        assert importlib.import_module("bound_late").f() == ("hooked", "f")
        assert handle.states == (State.FAILED, State.WOVEN)
        assert "KeyError('its own')" in str(aspects.report())
    del sys.modules["bound_late"]


def test_a_required_hook_that_raises_when_it_is_registered_is_not_kept(engine: Any) -> None:
    HookRegistry.register("engine.f", hooked, HookType.AROUND)
    HookRegistry.apply_hooks()

    async def never(result: Any, *args: Any) -> None: ...

    with pytest.raises(HookError, match="the hook is async"):
        HookRegistry.register("engine.f", never, required=True)
    HookRegistry.apply_hooks()
    assert not HookRegistry.unregister("engine.f", never)
    HookRegistry.reset()


class Ignoring:
    def __setattr__(self, name: str, value: Any) -> None: ...

    def m(self) -> None: ...


class IgnoringModule(types.ModuleType):
    __setattr__ = Ignoring.__setattr__


class IgnoringMeta(type):
    __setattr__ = Ignoring.__setattr__


class Fixed(metaclass=IgnoringMeta):
    def m(self) -> None: ...


@pytest.mark.parametrize("target", ["engine:f", "engine:odd.m", "engine:Fixed.m"])
def test_what_ignores_assignments_is_named(engine: Any, target: str) -> None:
    engine.odd, engine.Fixed = Ignoring(), Fixed
    engine.__class__ = IgnoringModule
    with pytest.raises(HookError, match=r"its type .*:Ignoring\w* ignores assignments"):
        aspects.weave(around(target, hooked))
    assert aspects.report().hooks == ()


def test_an_attribute_that_is_a_module_names_that_one(engine: Any) -> None:
    engine.other = math
    with aspects.woven(around("engine:other.sqrt"), around("engine:other")) as handle:
        assert [one.detail for one in handle.advices] == [
            "math is a module: write 'math:sqrt'",
            "math is a module: write 'math:name'",
        ]


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


@pytest.mark.parametrize("target", ["os:terminal_size.__new__", "engine:make"])
def test_the_constructor_of_a_class_of_c_is_refused(engine: Any, target: str) -> None:
    engine.make = os.terminal_size.__new__
    with pytest.raises(HookError, match="cannot undo"):
        aspects.weave(around(target))
    assert os.terminal_size((80, 24)) == (80, 24)
