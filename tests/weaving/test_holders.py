"""Holders of a hooked object that are hard to change: each is rebound, or named as stale."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from tests.support.woven_modules import METHODS, advice, around, fixture_of, hooked, module_of

engine = fixture_of(METHODS)


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


def test_bound_methods_of_other_instances_stay_as_they_are(engine: Any) -> None:
    engine.one, engine.other = engine.A(), engine.A()
    held = {"one": engine.one.m, "other": engine.other.m}
    with aspects.woven(around("engine:one.m", hooked)):
        assert held["one"]() == ("hooked", "m")
        assert held["other"]() == "m"
    assert held["one"]() == "m"


class ListWithSlots(list):  # type: ignore[type-arg]
    __slots__ = ("callback",)


class DictWithAttributes(dict):  # type: ignore[type-arg]
    callback: Any


class TupleWithAttributes(tuple):  # type: ignore[type-arg]
    callback: Any


@pytest.mark.parametrize("kind", [ListWithSlots, DictWithAttributes, TupleWithAttributes])
def test_attributes_of_subclasses_of_containers_are_rebound(engine: Any, kind: Any) -> None:
    original, made = engine.f, kind()
    made.callback = engine.f
    with aspects.woven(around("engine:f", hooked)):
        assert made.callback is engine.f
        assert aspects.report().stale == ()
    assert made.callback is original


def test_the_factory_of_a_defaultdict_is_rebound(engine: Any) -> None:
    original = engine.f
    made: Any = collections.defaultdict(engine.f)
    made["also"] = engine.f
    with aspects.woven(around("engine:f", hooked)):
        assert made["new"] == ("hooked", ("f", 0, 1))
        assert made.default_factory is made["also"] is engine.f
    assert made.default_factory is original


@dataclasses.dataclass(frozen=True)
class Key:
    function: Callable[..., Any]


class Own:
    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __hash__(self) -> int:
        return hash(self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.function is other.function


@pytest.mark.parametrize("kind", [Key, Own])
def test_what_hashes_by_a_function_is_changed(engine: Any, kind: Any) -> None:
    own = kind(engine.f)
    holders = [own, {"by another key": own}]
    with aspects.woven(around("engine:f", hooked)):
        assert own.function(2) == ("hooked", ("f", 2, 1))
        assert aspects.report().stale == ()
    assert own.function(2) == ("f", 2, 1)
    del holders


@pytest.mark.parametrize("kind", [Key, Own])
@pytest.mark.parametrize("container", [dict, collections.OrderedDict, set, frozenset])
def test_a_key_that_hashes_by_a_function_is_left_as_it_is_and_named(
    engine: Any, kind: Any, container: Any
) -> None:
    own = kind(engine.f)
    table = container([(own, 1), (own, 2)]) if issubclass(container, dict) else container([own])
    with aspects.woven(around("engine:f", hooked)):
        assert own in table
        assert [entry.target for entry in aspects.report().stale] == ["engine:f"]
        assert "whose hash depends on it, in a" in aspects.report().stale[0].holder
    assert own in table
    assert own.function(2) == ("f", 2, 1)


@pytest.mark.parametrize("path", ["f", "cached", "A.m", "one.m"])
@pytest.mark.parametrize("kind", [dict, lambda items: collections.defaultdict(int, items)])
def test_a_dictionary_keyed_by_a_hooked_function_is_looked_up_by_it(
    engine: Any, path: str, kind: Callable[..., Any]
) -> None:
    engine.one = engine.A()

    def key() -> Any:
        return functools.reduce(getattr, path.split("."), engine)

    table = kind({"first": 0, key(): "handler", len: key(), 3: 4})
    for _ in range(2):
        handle = aspects.weave(around(f"engine:{path}", hooked))
        assert table[key()] == "handler"
        assert list(table.items()) == [("first", 0), (key(), "handler"), (len, key()), (3, 4)]
        assert next(itertools.islice(table, 1, None))(*((1,) if path == "A.m" else ()))[0] == "hooked"
        assert aspects.report().stale == ()
        handle.remove()
        assert list(table.items()) == [("first", 0), (key(), "handler"), (len, key()), (3, 4)]


def test_keys_that_are_left_as_they_are_are_named(engine: Any) -> None:
    class Replacement:
        pass

    original, cls, ordered = engine.f, engine.Diamond, collections.OrderedDict({engine.f: 1})
    by_class = {cls: 1}
    with aspects.woven(around("engine:f", hooked), advice("engine:Diamond", HookType.REPLACE, Replacement)):
        stale = {entry.target: entry.holder for entry in aspects.report().stale}
        assert stale == dict.fromkeys(["engine:f", "engine:Diamond"], "a key of a dictionary of 1 entries")
        both = {engine.f: "hooked", inspect.unwrap(engine.f): "original"}
    assert (list(both.values()), ordered, by_class) == (["hooked", "original"], {original: 1}, {cls: 1})


def test_a_key_within_a_tuple_is_left_as_it_is_and_named(engine: Any) -> None:
    own = Key(engine.f)
    table = {(own, 1): "found"}
    with aspects.woven(around("engine:f", hooked)):
        assert table[own, 1] == "found"
        (stale,) = aspects.report().stale
        assert "Key, whose hash depends on it, in a tuple of 2" in stale.holder


def test_a_function_that_gives_itself_new_code_when_called_is_hooked(engine: Any) -> None:
    def compiled() -> str:
        return "compiled"

    def compile_and_call(*, own: Any = None) -> str:
        own.__code__ = own.__wrapped__.__code__
        return str(own())

    compile_and_call.__kwdefaults__ = {"own": compile_and_call}
    vars(compile_and_call)["__wrapped__"] = compiled
    vars(engine)["lazy"] = compile_and_call
    calls: list[str] = []
    with aspects.woven(aspects.before("engine:lazy")(lambda: calls.append("hooked"))):
        assert [engine.lazy(), engine.lazy()] == ["compiled", "compiled"]
        assert aspects.report().stale == ()
    assert engine.lazy is compile_and_call
    assert calls == ["hooked", "hooked"]


DECORATED = """
import functools
def f(subject=0): return 'f'
def g(self, value): pass
class A:
    c = classmethod(f)
    s = staticmethod(f)
    p = property(f, g)
    lazy = functools.cached_property(f)
    lazy.__set_name__(None, 'lazy')
"""


@pytest.mark.parametrize("removal", [(0, 1), (1, 0)])
@pytest.mark.parametrize(
    "names",
    [
        *itertools.permutations(["f", "A.c"]),
        *itertools.permutations(["f", "A.s"]),
        *itertools.permutations(["f", "A.p"]),
        *itertools.permutations(["f", "A.lazy"]),
        *itertools.permutations(["g", "A.p"]),
        *itertools.permutations(["g", "A.p.fset"]),
        *itertools.permutations(["A.c", "A.p.fset"]),
        *itertools.permutations(["A.c", "A.s"]),
    ],
)
def test_a_function_and_descriptors_around_it_are_hooked_and_given_back_in_any_order(
    names: tuple[str, str], removal: tuple[int, int]
) -> None:
    def hook_of(name: str) -> Callable[..., Any]:
        def hook(original: Any, *args: Any) -> Any:
            seen.append(name)
            return original(*args)

        return hook

    with module_of(DECORATED) as engine:
        f, g = engine.f, engine.g
        uses: tuple[tuple[Callable[[], Any], set[str]], ...] = (
            (
                lambda: (engine.f(), engine.A.c(), engine.A.s(), engine.A().p, engine.A().lazy),
                {"f", "A.c", "A.s", "A.p", "A.lazy"},
            ),
            (lambda: (engine.g(engine.A(), 1), engine.A.p.__set__(engine.A(), 1)), {"g", "A.p.fset"}),
        )

        def look() -> None:
            for use, hooking in uses:
                seen.clear()
                times = len(use())
                assert seen == [name for name in reversed(woven) if name in hooking] * times

        seen: list[str] = []
        woven: list[str] = []
        handles = []
        for name in names:
            handles.append(aspects.weave(around(f"engine:{name}", hook_of(name))))
            woven.append(name)
            look()
        for index in removal:
            handles[index].remove()
            woven.remove(names[index])
            look()
        held = [engine.A.__dict__[name] for name in ("c", "s", "p", "lazy")]
        assert [held[0].__func__, held[1].__func__, held[2].fget, held[3].func] == [f] * 4
        assert (engine.f, engine.g, held[2].fset) == (f, g, g)


def test_a_decorated_functions_wrapped_function_is_the_one_that_it_had(engine: Any) -> None:
    @functools.wraps(engine.f)
    def decorated() -> Any:
        return ["decorated", engine.f()]

    plain, vars(engine)["decorated"] = engine.f, decorated
    with aspects.woven(around("engine:decorated", hooked)):
        assert engine.decorated() != decorated()
        assert engine.decorated.__wrapped__ is plain
        with aspects.woven(around("engine:f", hooked)):
            assert engine.decorated.__wrapped__ is engine.f is not plain
            assert aspects.report().stale == ()
        assert engine.decorated.__wrapped__ is plain
    assert engine.decorated is decorated
    assert decorated.__wrapped__ is plain


def test_hooks_woven_at_once_are_not_holders_of_what_they_call(engine: Any) -> None:
    copies = [engine.f]
    with aspects.woven(around("engine:f", hooked), around("engine:f", hooked)):
        assert copies[0]() == ("hooked", ("hooked", ("f", 0, 1)))
        assert aspects.report().stale == ()


def test_a_method_of_a_class_that_orders_its_bases_itself_is_rebound(engine: Any) -> None:
    """What comes first there need not be one of its bases."""

    class First: ...

    class Ordering(type):
        def mro(cls) -> list[type]:
            own, *others = super().mro()
            return [own, First, *others]

    class Ordered(metaclass=Ordering):
        def m(self) -> Any:
            return "m"

    engine.Ordered, Ordered.__module__ = Ordered, "engine"
    held = [Ordered.m]
    with aspects.woven(around("engine:Ordered.m", hooked)):
        assert held[0](Ordered()) == Ordered().m() == ("hooked", "m")
    assert held[0](Ordered()) == "m"
