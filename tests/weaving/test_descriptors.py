"""Descriptors of every kind: subclasses, those in descriptors, mocks, parts of properties."""

from __future__ import annotations

import asyncio
import inspect
import textwrap
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from sgl_aspects.errors import HookError
from tests.support.woven_modules import (
    METHODS,
    ODD_DESCRIPTORS,
    Watch,
    advice,
    around,
    hooked,
    module_of,
    no_hook_is_left,
)

__all__ = ["no_hook_is_left"]


@pytest.fixture
def engine() -> Iterator[Any]:
    with module_of(METHODS) as module:
        yield module


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


@pytest.fixture
def odd() -> Iterator[Any]:
    with module_of(ODD_DESCRIPTORS) as module:
        yield module


@pytest.mark.parametrize(
    ("name", "read", "attribute"),
    [
        ("cached", lambda cls: cls().cached, ("slot", "_cache_cached")),
        ("made", lambda cls: cls.made(2), ("tag", "tag")),
        ("static", lambda cls: cls().static(3), ("tag", "slot")),
        ("lazy", lambda cls: cls().lazy, ("unit", "ms")),
    ],
)
def test_subclasses_of_descriptors_with_constructors_of_their_own(
    odd: Any, name: str, read: Callable[[Any], Any], attribute: tuple[str, str]
) -> None:
    raw, bare = vars(odd.A)[name], read(odd.A)
    with aspects.woven(around(f"engine:A.{name}", hooked)):
        assert read(odd.A) == ("hooked", bare)
        made = vars(odd.A)[name]
        assert type(made) is type(raw)
        assert getattr(made, attribute[0]) == attribute[1]
        assert made.__doc__ == raw.__doc__
    assert vars(odd.A)[name] is raw
    assert read(odd.A) == bare


@pytest.mark.parametrize("name", ["cached", "made", "static"])
def test_a_copy_in_such_a_descriptor_is_rebound(odd: Any, name: str) -> None:
    raw = vars(odd.A)[name]
    odd.function = getattr(raw, "fget", None) or raw.__func__
    with aspects.woven(Watch().on("engine:function")):
        inner = getattr(vars(odd.A)[name], "fget", None) or vars(odd.A)[name].__func__
        assert inner is odd.function
        assert type(vars(odd.A)[name]) is type(raw)


@pytest.fixture
def small() -> Iterator[Any]:
    with module_of("def f(x=0): return ('f', x)\nclass A:\n    def m(self): return 'm'\n") as module:
        yield module


def test_the_call_of_one_instance_is_hooked_by_its_own_name(small: Any) -> None:
    """What stands as ``__call__`` in an instance, Python never calls."""
    exec("class C:\n    def __call__(self, x): return x\nobj = C()\n", vars(small))
    with pytest.raises(HookError, match=r"uses its class alone; hook the instance itself, .*C\.__call__"):
        aspects.weave(around("engine:obj.__call__", hooked))
    with aspects.woven(around("engine:obj", hooked)):
        assert small.obj(1) == ("hooked", 1)
    assert small.obj(1) == 1


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
