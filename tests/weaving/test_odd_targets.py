"""Targets and holders that look ordinary, and were lost or spoilt once."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import sys
import textwrap
import types
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType, State
from sgl_aspects.errors import HookError
from tests.support.woven_modules import advice, around, hooked, module_of, no_hook_is_left

__all__ = ["no_hook_is_left"]

SOURCE = """
import functools
def f(x=0, *, y=1): return ('f', x, y)
def g(): return 'g'
@functools.cache
def cached(): return 'cached'
class A:
    def m(self): return 'm'
    @functools.cached_property
    def lazy(self): return 'lazy'
    @functools.singledispatchmethod
    def dispatched(self, x): return 'dispatched'
class Sub(A): pass
class Other(A):
    @functools.cached_property
    def lazy(self): return 'other'
class Diamond(Sub, Other): pass
"""


@pytest.fixture
def engine() -> Iterator[Any]:
    with module_of(SOURCE) as module:
        yield module


def test_a_set_keeps_what_is_equal_to_its_proxy(engine: Any) -> None:
    original, root = engine.cached, math.sqrt
    held = {original, root, 3}
    with aspects.woven(around("engine:cached", hooked), around("math:sqrt", hooked)):
        assert len(held) == 3
        assert {type(one).__name__ for one in held} == {"CallableProxy", "int"}
    assert {id(one) for one in held} == {id(original), id(root), id(3)}


def test_attributes_of_a_hooked_function_are_holders_too(engine: Any) -> None:
    f, g = engine.f, engine.g
    f.fallback, f.handlers, f.itself = g, [g], f
    on_f = aspects.weave(around("engine:f", hooked))
    on_g = aspects.weave(around("engine:g", hooked))
    assert engine.f.fallback is engine.f.handlers[0] is engine.g is not g
    assert engine.f.itself is engine.f
    assert engine.f.__wrapped__ is f
    on_g.remove()
    assert engine.f.fallback is g
    on_g = aspects.weave(around("engine:f.fallback", hooked))
    assert engine.f.fallback() == ("hooked", "g")
    on_f.remove()
    assert f.fallback() == ("hooked", "g")
    on_g.remove()
    assert (engine.f, f.fallback, f.handlers, f.itself) == (f, g, [g], f)


def test_what_is_set_on_a_hooked_function_stays(engine: Any) -> None:
    original = engine.f
    handle = aspects.weave(around("engine:f", hooked))
    engine.f.__kwdefaults__["y"] = 2
    assert engine.f() == ("hooked", ("f", 0, 2))
    engine.f.__doc__, engine.f.__name__, engine.f.__defaults__ = "new", "renamed", (3,)
    handle.disable()
    assert engine.f is original
    assert (original.__doc__, original.__name__, original()) == ("new", "renamed", ("f", 3, 2))
    handle.enable()
    original.__defaults__ = (4,)
    assert engine.f() == ("hooked", ("f", 4, 2))
    handle.remove()
    assert original() == ("f", 4, 2)


def test_holders_of_every_kind_of_class_are_rebound(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError(name)

    class Odd(metaclass=Raising):
        __slots__ = ("copy",)

    class Holding:
        copy: Any = engine.f

    original, odd = engine.f, object.__new__(Odd)
    odd.copy = original  # type: ignore[attr-defined]
    for where, holder in enumerate((odd, Holding)):
        monkeypatch.setitem(sys.modules, f"holder_{where}", holder)
    with aspects.woven(around("engine:f", hooked)):
        copies = [odd.copy, vars(Holding)["copy"]]  # type: ignore[attr-defined]
        assert copies == [engine.f] * 2 != [original] * 2
    copies = [odd.copy, vars(Holding)["copy"]]  # type: ignore[attr-defined]
    assert copies == [engine.f] * 2 == [original] * 2


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


def test_a_pattern_reaches_what_functools_makes(engine: Any) -> None:
    with aspects.woven(around("engine:*", hooked), around("engine:A.*", hooked)):
        assert engine.cached() == ("hooked", "cached")
        assert engine.A().lazy == ("hooked", "lazy")
        assert engine.A().dispatched(1) == ("hooked", "dispatched")


def test_a_cached_property_that_a_later_base_overrides(engine: Any) -> None:
    with aspects.woven(around("engine:Sub.lazy", hooked)):
        assert engine.Sub().lazy == ("hooked", "lazy")
        assert engine.Diamond().lazy == ("hooked", "other")


@pytest.mark.parametrize("make", ["Mock(spec=f)", "create_autospec(f)", "MagicMock()"])
def test_mock_objects(engine: Any, make: str) -> None:
    mocked = engine.f = eval(make, vars(unittest.mock), {"f": engine.f})
    mocked.return_value = 4
    with aspects.woven(around("engine:f", hooked)):
        assert engine.f(1) == ("hooked", 4)
        engine.f.assert_called_once_with(1)
    assert engine.f is mocked


def test_what_an_asynchronous_mock_gives_is_awaited(engine: Any) -> None:
    engine.f = unittest.mock.AsyncMock(return_value=4)
    with aspects.woven(advice("engine:f", HookType.AFTER, lambda result: ("after", result))):
        assert inspect.iscoroutinefunction(engine.f)
        assert asyncio.run(engine.f()) == ("after", 4)


class Ignoring:
    def __setattr__(self, name: str, value: Any) -> None: ...

    def m(self) -> None: ...


class IgnoringModule(types.ModuleType):
    __setattr__ = Ignoring.__setattr__


@pytest.mark.parametrize("target", ["engine:f", "engine:odd.m"])
def test_what_ignores_assignments_is_named(engine: Any, target: str) -> None:
    engine.odd = Ignoring()
    engine.__class__ = IgnoringModule
    with pytest.raises(HookError, match=r"its type .*:Ignoring\w* ignores assignments"):
        aspects.weave(around(target, hooked))
    assert aspects.report().hooks == ()


def test_annotations_follow_a_class_that_is_replaced(engine: Any) -> None:
    """CPython keeps them as a tuple until they are read."""
    source = "def typed(x: A) -> A: return x"
    exec(compile(source, "<typed>", "exec", dont_inherit=True), vars(engine))
    original = engine.A

    class Replacement:
        pass

    with aspects.woven(advice("engine:A", HookType.REPLACE, Replacement)):
        assert engine.typed.__annotations__ == {"x": Replacement, "return": Replacement}
    assert engine.typed.__annotations__ == {"x": original, "return": original}


def test_a_class_that_one_instance_inherits_is_replaced_there(engine: Any) -> None:
    class Replacement:
        pass

    engine.A.Config, engine.one = engine.Sub, engine.A()
    with aspects.woven(advice("engine:one.Config", HookType.REPLACE, Replacement)):
        assert engine.one.Config is Replacement
        assert engine.A().Config is engine.Sub
    assert vars(engine.one) == {}


ODD_PARTS = """
import functools, operator
class A:
    z = 'z'
    made = staticmethod(dict)
    size = property(len)
    listed = functools.cached_property(list)
    part = property(functools.partial(lambda *args: 'part'))
    got = property(operator.attrgetter('z'))
    def __len__(self): return 2
    def __iter__(self): return iter('ab')
"""


@pytest.mark.parametrize("name", ["made", "size", "listed", "part", "got"])
def test_a_descriptor_around_what_others_use_too(name: str) -> None:
    """Neither `len` nor `dict` is hooked in the whole process with it."""

    def read() -> Any:
        found = getattr(module.A(), name)
        return found() if callable(found) else found

    with module_of(ODD_PARTS) as module:
        raw, bare = vars(module.A)[name], read()
        with aspects.woven(around(f"engine:A.{name}", hooked)):
            assert read() == ("hooked", bare)
            assert len([1]) == 1
            assert type({}) is dict
        assert vars(module.A)[name] is raw


def test_a_descriptor_that_computes_what_cannot_be_called(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As lazy properties do: which function computes it cannot be seen from outside."""

    class Lazy:
        def __get__(self, instance: Any, owner: Any = None) -> str:
            return "computed"

    engine.A.computed = Lazy()
    engine.A.mocked = unittest.mock.PropertyMock(return_value=5)
    made = engine.A()
    with aspects.woven(around("engine:A.computed", hooked), around("engine:A.mocked", hooked)):
        assert [(made.computed, made.mocked) for _ in range(2)] == [("computed", 5)] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"engine:A.{name} gives a {value}, which is not called, so its hooks do not run; hook what makes it"
        for name, value in (("computed", "str"), ("mocked", "int"))
    ]


def test_an_attribute_that_is_a_module_names_that_one(engine: Any) -> None:
    engine.other = math
    with aspects.woven(around("engine:other.sqrt"), around("engine:other")) as handle:
        assert [one.detail for one in handle.advices] == [
            "math is a module: write 'math:sqrt'",
            "math is a module: write 'math:name'",
        ]


def test_a_hook_that_was_switched_off_and_removed_is_on_when_it_is_woven_again(engine: Any) -> None:
    hook = around("engine:f", hooked)
    handle = aspects.weave(hook)
    handle.disable()
    handle.remove()
    with aspects.woven(hook):
        assert engine.f() == ("hooked", ("f", 0, 1))


def test_bound_methods_of_other_instances_stay_as_they_are(engine: Any) -> None:
    engine.one, engine.other = engine.A(), engine.A()
    held = {"one": engine.one.m, "other": engine.other.m}
    with aspects.woven(around("engine:one.m", hooked)):
        assert held["one"]() == ("hooked", "m")
        assert held["other"]() == "m"
    assert held["one"]() == "m"


def test_instances_do_not_have_a_hooked_method_of_the_metaclass(engine: Any) -> None:
    source = """
    class Meta(type):
        def of(cls): return cls.__name__
    class Made(metaclass=Meta): pass
    class Sub(Made): pass
    class Answering(metaclass=Meta):
        def __getattr__(self, name): return f"answer to {name}"
    """
    exec(textwrap.dedent(source), vars(engine))
    with aspects.woven(around("engine:Made.of", hooked), around("engine:Answering.of", hooked)):
        assert [engine.Made.of(), engine.Sub.of()] == [("hooked", "Made"), ("hooked", "Sub")]
        assert engine.Answering.of() == ("hooked", "Answering")
        assert engine.Answering().of == "answer to of"
        with pytest.raises(AttributeError, match="'Sub' object has no attribute 'of'"):
            engine.Sub().of()
    assert "of" not in vars(engine.Made)


def test_properties_of_enumerations(engine: Any) -> None:
    source = """
    import enum, types
    class Color(enum.Enum):
        RED = 1
        @types.DynamicClassAttribute
        def shade(self): return f"shade of {self.name}"
    """
    exec(textwrap.dedent(source), vars(engine))
    raw, names = vars(engine.Color)["shade"], list(vars(engine.Color))
    with aspects.woven(around("engine:Color.shade", hooked), around("engine:Color.value", hooked)):
        assert engine.Color.RED.shade == ("hooked", "shade of RED")
        assert (engine.Color.RED.value, engine.Color.RED.name) == (("hooked", 1), "RED")
        assert engine.Color(1) is engine.Color.RED
    assert engine.Color.RED.value == 1
    assert vars(engine.Color)["shade"] is raw
    assert list(vars(engine.Color)) == names


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="classmethods no longer bind what is in them")
@pytest.mark.parametrize("name", ["prop", "twice", "static"])
@pytest.mark.parametrize("owner", ["Base", "Derived"])
def test_descriptors_in_a_classmethod(engine: Any, owner: str, name: str) -> None:
    source = """
    class Base:
        prop = classmethod(property(lambda cls: cls.__name__))
        twice = classmethod(classmethod(lambda cls: cls.__name__))
        static = classmethod(staticmethod(lambda: "static"))
    class Derived(Base): pass
    """
    exec(textwrap.dedent(source), vars(engine))

    def read() -> Any:
        found = getattr(engine.Derived, name)
        return found if name == "prop" else found()

    raw, bare = vars(engine.Base)[name], read()
    with aspects.woven(around(f"engine:{owner}.{name}", hooked)):
        assert read() == ("hooked", bare)
        assert type(vars(getattr(engine, owner))[name].__func__) is type(raw.__func__)
    assert read() == bare
    assert vars(engine.Base)[name] is raw
    assert name not in vars(engine.Derived)
