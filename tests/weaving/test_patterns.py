"""Patterns: what they cover, and that each function is woven once."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from tests.support.woven_modules import (
    METHODS,
    Watch,
    advice,
    around,
    fixture_of,
    hooked,
    module_of,
    stored,
)

SOURCE = """
import functools
class A:
    def m(self): return []
    alias = m
    p = property(lambda self: [])
    q = p
    @classmethod
    def c(cls): return []
    d = c
    @staticmethod
    def s(): return []
    t = s
class Mixin:
    def m(self): return []
class B:
    m = Mixin.m
@functools.lru_cache
def cached(): return ()
def annotated(): return []
annotated.helper = lambda: []
"""


def count(result: list[int], *args: Any) -> list[int]:
    return [*result, 1]


engine = fixture_of(SOURCE)


def results(engine: Any) -> list[Any]:
    a = engine.A()
    return [a.m(), a.alias(), a.p, a.q, a.c(), a.d(), a.s(), a.t()]


def test_aliases_in_a_class_fire_once(engine: Any) -> None:
    names = ("m", "alias", "p", "q", "c", "d", "s", "t")
    originals = [stored(engine, f"A.{name}") for name in names]
    with aspects.woven(advice("engine:A.*", HookType.AFTER, count)):
        assert results(engine) == [[1]] * 8
    assert [stored(engine, f"A.{name}") for name in names] == originals
    assert results(engine) == [[]] * 8


def test_a_method_that_another_class_shares_fires_once(engine: Any) -> None:
    with aspects.woven(advice("engine:*.m", HookType.AFTER, count)):
        assert (engine.A().m(), engine.B().m(), engine.Mixin().m()) == ([1], [1], [1])
    assert engine.B.m is engine.Mixin.m


def test_a_wildcard_for_a_class_does_not_cover_what_functions_carry(engine: Any) -> None:
    with aspects.woven(advice("engine:*.*", HookType.AFTER, count)):
        assert not [place for place in aspects.report().hooks[0].places if "cached" in place]
        assert engine.annotated.helper() == []


MODELS = {
    "zoo.base": "class Module:\n    def forward(self): return ['Module']\n    def other(self): return []\n",
    "zoo.models.one": """
from zoo.base import Module
class BaseModel(Module): pass
class OneModel(BaseModel): pass
class TwoModel(OneModel):
    def forward(self): return ['Two', *super().forward()]
class ThreeModel(TwoModel): pass
class Mixed: pass
class OddModel(Mixed, ThreeModel): pass
""",
    "zoo.models.two": "from zoo.models.one import OneModel, ThreeModel\nclass FourModel(OneModel): pass\n",
}


@pytest.fixture
def zoo() -> Iterator[Any]:
    made = {}
    for name, source in MODELS.items():
        module = types.ModuleType(name)
        sys.modules[name] = made[name] = module
        exec(source, module.__dict__)
    yield types.SimpleNamespace(**vars(made["zoo.models.one"]), FourModel=made["zoo.models.two"].FourModel)
    for name in MODELS:
        del sys.modules[name]


@pytest.mark.parametrize(
    "target", ["zoo.models.**:*Model.forward", "zoo.**:*.forward", "zoo.models.one:*Model.forward"]
)
def test_a_pattern_weaves_a_method_once(zoo: Any, target: str) -> None:
    watch = Watch()
    with aspects.woven(watch.on(target)):
        for name, calls in (
            ("BaseModel", 1),
            ("OneModel", 1),
            ("FourModel", 1),
            ("TwoModel", 2),
            ("OddModel", 2),
        ):
            watch.entered.clear()
            getattr(zoo, name)().forward()
            assert len(watch.entered) == calls, name
        places = aspects.report().hooks[0].places
        whole = target == "zoo.**:*.forward"
        assert sorted(places) == [
            "zoo.base:Module.forward" if whole else "zoo.models.one:BaseModel.forward",
            "zoo.models.one:TwoModel.forward",
        ]
    assert "forward" not in vars(zoo.BaseModel)


def test_a_class_with_two_ways_to_a_method(zoo: Any) -> None:
    exec(
        "class Other:\n    def forward(self): return ['Other']\nclass LastModel(Other, OneModel): pass",
        vars(zoo),
    )
    module = sys.modules["zoo.models.one"]
    for cls in (zoo.Other, zoo.LastModel):
        cls.__module__ = "zoo.models.one"
        setattr(module, cls.__name__, cls)
    watch = Watch()
    with aspects.woven(watch.on("zoo.models.**:*Model.forward")):
        assert zoo.LastModel().forward() == ["Other"]
        assert len(watch.entered) == 1


@pytest.mark.parametrize("how", ["class", "type", "function", "own __init_subclass__"])
def test_later_subclasses_are_taken_at_once(engine: Any, how: str) -> None:
    options: list[Any] = []
    made: dict[str, Any] = {}
    if how.startswith("own"):
        exec(
            "class Base:\n    def __init_subclass__(cls, **k): options.append((cls.__name__, k))\n"
            "    def run(self): return 'base'",
            {**vars(engine), "options": options},
            made,
        )
        engine.Base = made["Base"]
    else:
        exec("class Base:\n    def run(self): return 'base'", vars(engine))
    engine.Base.__module__ = "engine"
    before = dict(vars(engine.Base))

    def make() -> Any:
        if how == "type":
            return type("Sub", (engine.Base,), {"run": lambda self: "sub"})

        class Sub(engine.Base, **({"k": 1} if how.startswith("own") else {})):  # type: ignore[misc]
            def run(self) -> Any:
                return "sub"

        return Sub

    handle = aspects.weave(around("engine:Base+.run", hooked))
    subs = [make(), type("Deep", (make(),), {"run": lambda self: "sub"})]
    for sub in subs:
        assert sub().run() == ("hooked", "sub")
    if how.startswith("own"):
        assert ("Sub", {"k": 1}) in options
    else:
        with pytest.raises(TypeError):
            type("Wrong", (engine.Base,), {}, unknown=1)
    handle.remove()
    assert [sub().run() for sub in subs] == ["sub", "sub"]
    assert dict(vars(engine.Base)) == before
    assert type("After", (engine.Base,), {"run": lambda self: "after"})().run() == "after"


methods = fixture_of(METHODS)


def test_a_pattern_reaches_what_functools_makes(methods: Any) -> None:
    with aspects.woven(around("engine:*", hooked), around("engine:A.*", hooked)):
        assert methods.cached() == ("hooked", "cached")
        assert methods.A().lazy == ("hooked", "lazy")
        assert methods.A().dispatched(1) == ("hooked", "dispatched")


def test_a_wildcard_does_not_wait_for_what_a_module_makes_on_access() -> None:
    source = "def __getattr__(name): return 'made'"
    with module_of(source) as lazy, aspects.woven(around(f"{lazy.__name__}.**:*.*", count)):
        assert not hasattr(lazy.__getattr__, "__wrapped__")
