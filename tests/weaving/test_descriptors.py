"""Descriptors of every kind: subclasses, those in descriptors, mocks, parts of properties."""

from __future__ import annotations

import asyncio
import inspect
import textwrap
import unittest.mock
from collections.abc import Callable
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
    fixture_of,
    hooked,
    module_of,
)

engine = fixture_of(METHODS)


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


OF_META = """
class Meta(type):
    def of(cls): return cls.__name__
class Made(metaclass=Meta): pass
class Sub(Made): pass
class Answering(metaclass=Meta):
    def __getattr__(self, name): return f"answer to {name}"
"""


def test_instances_do_not_have_a_hooked_method_of_the_metaclass(engine: Any) -> None:
    exec(OF_META, vars(engine))
    with aspects.woven(around("engine:Made.of", hooked), around("engine:Answering.of", hooked)):
        assert [engine.Made.of(), engine.Sub.of()] == [("hooked", "Made"), ("hooked", "Sub")]
        assert engine.Answering.of() == ("hooked", "Answering")
        assert engine.Answering().of == "answer to of"
        with pytest.raises(AttributeError, match="'Sub' object has no attribute 'of'"):
            engine.Sub().of()
    assert "of" not in vars(engine.Made)


def test_a_hooked_method_of_the_metaclass_outlives_the_hook_on_a_base(engine: Any) -> None:
    exec(OF_META, vars(engine))
    base = aspects.weave(around("engine:Made.of", hooked))
    with aspects.woven(around("engine:Sub.of", hooked)):
        base.remove()
        assert [engine.Made.of(), engine.Sub.of()] == ["Made", ("hooked", "Sub")]


@pytest.mark.parametrize("first", ["A.p.fset", "B.p"])
def test_parts_of_a_property_in_a_base_and_in_a_subclass(engine: Any, first: str) -> None:
    source = """
    class A:
        @property
        def p(self): return self.x
        @p.setter
        def p(self, value): self.x = value
    class B(A): pass
    """
    exec(textwrap.dedent(source), vars(engine))
    raw, setter = vars(engine.A)["p"], Watch()
    last = {"A.p.fset": "B.p", "B.p": "A.p.fset"}[first]
    hooks = {"A.p.fset": setter.on("engine:A.p.fset"), "B.p": around("engine:B.p", hooked)}
    handles = {name: aspects.weave(hooks[name]) for name in (first, last)}
    made = engine.B()
    made.p = 3
    assert (made.p, len(setter.entered)) == (("hooked", 3), 1)
    handles["A.p.fset"].remove()
    handles["B.p"].remove()
    assert vars(engine.A)["p"] is raw
    assert "p" not in vars(engine.B)


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


LAZY = """
class lazy:
    def __init__(self, function):
        self.function = self.__wrapped__ = function
    def __get__(self, instance, owner=None):
        return self if instance is None else self.function(instance)
class written(lazy):
    def __set__(self, instance, value): instance.kept = value
class slotted:
    __slots__ = ("function", "calls")
    def __init__(self, function): self.function, self.calls = function, []
    def __get__(self, instance, owner):
        return lambda *args: self.calls.append(args) or self.function(instance or owner, *args)
class A:
    kept = 1
    @lazy
    def size(self): return self.kept
    @written
    def both(self): return self.kept
    @slotted
    def bound(subject, x): return x
class Sub(A): pass
"""


@pytest.mark.parametrize("owner", ["A", "Sub"])
def test_descriptors_of_other_packages_that_decorate_a_function(owner: str) -> None:
    with module_of(LAZY) as module:
        made, raw = getattr(module, owner)(), dict(vars(module.A))
        watch = Watch()
        names = ("size", "both", "bound")
        hooks = [around(f"engine:{owner}.{name}", hooked) for name in names]
        with aspects.woven(watch.on("engine:A.both")), aspects.woven(*hooks):
            assert made.size == ("hooked", 1)
            made.both = 5
            assert made.both == ("hooked", 5)
            assert made.bound(4) == ("hooked", 4)
            assert raw["bound"].calls == [(4,)]
            assert isinstance(getattr(module, owner).size, module.lazy)
        assert watch.entered == [((made,), {})]
        assert {name: vars(module.A)[name] for name in names} == {name: raw[name] for name in names}
        assert (made.size, made.both, made.bound(6)) == (5, 5, 6)


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
    with aspects.woven(around("engine:A.computed", hooked)):
        assert [made.computed, made.computed] == ["computed", "computed"]
    assert [record.getMessage() for record in caplog.records] == [
        "engine:A.computed gives a str, which is not called, so its hooks do not run; hook what makes it"
    ]
    with pytest.raises(HookError, match=r"mocked is PropertyMock .*, which is read, so not hooked"):
        aspects.weave(around("engine:A.mocked", hooked))


odd = fixture_of(ODD_DESCRIPTORS)


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


def test_a_descriptor_that_cannot_be_called_but_binds(odd: Any) -> None:
    seen: list[Any] = []

    def look(original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    raw, made = vars(odd.A)["bound"], odd.A()
    bare = [made.bound(5), odd.A.bound(x=6)]
    with aspects.woven(around("engine:A.bound", look), around("engine:A.raising", look)):
        assert [made.bound(5), odd.A.bound(x=6)] == bare == [("instance", 5), ("A", 6)]
        with pytest.raises(RuntimeError, match="not now"):
            _ = made.raising
    assert seen == [((made, 5), {}), ((odd.A,), {"x": 6})]
    assert vars(odd.A)["bound"] is raw


def test_the_call_of_one_instance_is_hooked_by_its_own_name(engine: Any) -> None:
    """What stands as ``__call__`` in an instance, Python never calls."""
    exec("class C:\n    def __call__(self, x): return x\nobj = C()\n", vars(engine))
    with pytest.raises(HookError, match=r"uses its class alone; hook the instance itself, .*C\.__call__"):
        aspects.weave(around("engine:obj.__call__", hooked))
    with aspects.woven(around("engine:obj", hooked)):
        assert engine.obj(1) == ("hooked", 1)
    assert engine.obj(1) == 1


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


def test_singledispatchmethod_keeps_registering(engine: Any) -> None:
    with aspects.woven(around("engine:A.dispatched", hooked)):
        engine.A.dispatched.register(str, lambda self, x: ("str", x))
        assert engine.A().dispatched("x") == ("hooked", ("str", "x"))
        assert engine.A().dispatched.register
    assert engine.A().dispatched("x") == ("str", "x")


def test_a_hook_that_removes_a_staticmethod_copy_gives_the_identical_descriptor_back(odd: Any) -> None:
    class Owner:
        method = staticmethod(odd.f)
        through_class: Any = classmethod(odd.f)

    before = (vars(Owner)["method"], vars(Owner)["through_class"])  # a tuple is not rebound
    with aspects.woven(around("engine:f", hooked)):
        assert Owner.method(1) == ("hooked", ("f", 1))
        assert Owner.through_class() == ("hooked", ("f", Owner))
        assert vars(Owner)["method"] is not before[0]
    assert vars(Owner)["method"] is before[0]
    assert vars(Owner)["through_class"] is before[1]
    assert before[0].__func__ is before[1].__func__ is odd.f
