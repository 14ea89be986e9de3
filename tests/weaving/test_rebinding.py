"""Stale bindings: copies taken before the hook was woven are rebound, or named in the report."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import importlib.util
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import sgl_aspects as aspects
from sgl_aspects.weaving import in_pieces
from tests.support.woven_modules import around, fixture_of, hooked, module_of

SOURCE = """
def f(x=0): return ("f", x)
def untouched(x=0): return ("untouched", x)
class C:
    def m(self, x=0): return ("m", x)
    @classmethod
    def c(cls, x=0): return ("c", x)
    @staticmethod
    def s(x=0): return ("s", x)
    @property
    def p(self): return ("p", 0)
"""


engine = fixture_of(SOURCE)


# -- the matrix of referrers: each takes a copy of `f`, and has a way to call it and to read it ---------


class Held(NamedTuple):
    """A copy of a function in some holder: ``get`` gives what the holder holds, by identity."""

    call: Callable[[], Any]
    get: Callable[[], Any]


class Alike:
    """Every instance equals every other one: what a call got as `self` does not matter."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)

    def __hash__(self) -> int:
        return 1


class Plain:
    pass


class Slotted:
    __slots__ = ("__private", "empty", "function")

    def __init__(self, function: Any) -> None:
        self.function = self.__private = function

    @property
    def private(self) -> Any:
        return self.__private


class SlottedSub(Slotted):
    __slots__ = ("more",)


@dataclasses.dataclass(frozen=True)
class Frozen:
    function: Any


class Refusing:
    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError("no")

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")


class Loading(dict[str, Any]):
    """As transformers' registries: looking at everything loads everything."""

    def _load(self, *_: Any) -> Any:
        raise AssertionError("a lazy dictionary was woken")

    items = values = keys = __iter__ = __setitem__ = update = _load  # type: ignore[assignment]


def owner(**names: Any) -> Any:
    return type("Owner", (Alike,), names)


def put(into: Any, name: str, value: Any) -> Any:
    object.__setattr__(into, name, value)
    return into


def called(made: Any) -> Any:
    made.method()  # CPython's method cache has the old function now
    return made


def bound_to_itself(f: Any) -> Any:
    made = Plain()
    return put(made, "bound", types.MethodType(f, made))


def dispatched(f: Any) -> Any:
    function = functools.singledispatch(lambda x: "object")
    function.register(int, f)
    function(1)  # its cache of dispatches has it too
    return function


def first_callable(of: set[Any]) -> Any:
    return next(entry for entry in of if callable(entry))


#: How a holder is made of a function; how what it holds is called; what it holds.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a global of another module": (
        lambda f: put(sys.modules.setdefault("importer", types.ModuleType("importer")), "g", f),
        lambda it: it.g(1),
        lambda it: it.g,
    ),
    "another name in its own module": (
        lambda f: put(sys.modules["engine"], "alias", f),
        lambda it: it.alias(1),
        lambda it: it.alias,
    ),
    "a class attribute": (lambda f: owner(method=f), lambda it: it.method(1), lambda it: vars(it)["method"]),
    "a class attribute called through an instance": (
        lambda f: called(owner(method=f)()),
        lambda it: it.method(),
        lambda it: vars(type(it))["method"],
    ),
    "a staticmethod": (
        lambda f: owner(method=staticmethod(f)),
        lambda it: it().method(1),
        lambda it: vars(it)["method"].__func__,
    ),
    "a staticmethod object in a dict": (
        lambda f: {"f": staticmethod(f)},
        lambda it: it["f"].__func__(1),
        lambda it: it["f"].__func__,
    ),
    "a property of a class": (
        lambda f: owner(prop=property(f, doc="Documented.")),
        lambda it: it().prop,
        lambda it: vars(it)["prop"].fget,
    ),
    "a cached property": (
        lambda f: owner(prop=functools.cached_property(f)),
        lambda it: it().prop,
        lambda it: vars(it)["prop"].func,
    ),
    "a list": (lambda f: [0, f, f, 1], lambda it: it[2](1), lambda it: it[1]),
    "a dict": (lambda f: {"before": 1, "f": f, "after": 2}, lambda it: it["f"](1), lambda it: it["f"]),
    "a set": (lambda f: {f, 5, "x"}, lambda it: first_callable(it)(1), first_callable),
    "a deque": (lambda f: collections.deque([1, f, 2], maxlen=3), lambda it: it[1](1), lambda it: it[1]),
    "an ordered and a default dict": (
        lambda f: [collections.OrderedDict(a=1, f=f, z=2), collections.defaultdict(list, f=f)],
        lambda it: it[1]["f"](1),
        lambda it: it[0]["f"],
    ),
    "containers in containers": (
        lambda f: {"all": [({"deep": [f]},)]},
        lambda it: it["all"][0][0]["deep"][0](1),
        lambda it: it["all"][0][0]["deep"][0],
    ),
    "a default argument": (
        lambda f: lambda a, b=2, function=f: function(a),
        lambda it: it(1),
        lambda it: it.__defaults__[1],
    ),
    "a keyword default": (
        lambda f: lambda a, *, function=f: function(a),
        lambda it: it(1),
        lambda it: it.__kwdefaults__["function"],
    ),
    "a closure": (lambda f: lambda a: f(a), lambda it: it(1), lambda it: it.__closure__[0].cell_contents),
    "an attribute of a function": (
        lambda f: put(lambda: None, "target", f),
        lambda it: it.target(1),
        lambda it: vars(it)["target"],
    ),
    "a decorated function": (
        lambda f: functools.wraps(f)(lambda *args: f(*args)),
        lambda it: it(1),
        lambda it: vars(it)["__wrapped__"],
    ),
    "a partial": (lambda f: functools.partial(f, 1), lambda it: it(), lambda it: it.func),
    "an argument of a partial": (
        lambda f: functools.partial(lambda function, x: function(x), f),
        lambda it: it(1),
        lambda it: it.args[0],
    ),
    "a keyword of a partial": (
        lambda f: functools.partial(lambda x, function: function(x), function=f),
        lambda it: it(1),
        lambda it: it.keywords["function"],
    ),
    "a partialmethod": (
        lambda f: owner(method=functools.partialmethod(f)),
        lambda it: it().method(),
        lambda it: vars(it)["method"].func,
    ),
    "a bound method on an instance": (bound_to_itself, lambda it: it.bound(), lambda it: it.bound.__func__),
    "a bound method in a dict": (
        lambda f: {"f": types.MethodType(f, 1)},
        lambda it: it["f"](),
        lambda it: it["f"].__func__,
    ),
    "a bound method in a closure in a partial in a list": (
        lambda f: (lambda bound: [functools.partial(lambda: bound())])(types.MethodType(f, 1)),
        lambda it: it[0](),
        lambda it: it[0].func.__closure__[0].cell_contents.__func__,
    ),
    "an attribute of an instance": (
        lambda f: types.SimpleNamespace(function=f),
        lambda it: it.function(1),
        lambda it: it.function,
    ),
    "an attribute of an ordinary instance": (
        lambda f: put(put(Plain(), "function", f), "callbacks", {"f": f}),
        lambda it: it.callbacks["f"](1),
        lambda it: it.function,
    ),
    "a slot": (SlottedSub, lambda it: it.function(1), lambda it: it.private),
    "a frozen dataclass": (Frozen, lambda it: it.function(1), lambda it: it.function),
    "a default of a dataclass field": (
        lambda f: dataclasses.make_dataclass(
            "Made", [("function", Any, dataclasses.field(default=staticmethod(f)))]
        ),
        lambda it: it().function.__func__(1),
        lambda it: vars(it)["function"].__func__,
    ),
    "a default factory of a dataclass field": (
        lambda f: dataclasses.make_dataclass("Made", [("value", Any, dataclasses.field(default_factory=f))]),
        lambda it: it().value,
        lambda it: dataclasses.fields(it)[0].default_factory,
    ),
    "a metaclass attribute": (
        lambda f: type("Meta", (type,), {"function": staticmethod(f)})("Owner", (), {}),
        lambda it: it.function(1),
        lambda it: vars(type(it))["function"].__func__,
    ),
    "a singledispatch registry": (dispatched, lambda it: it(1), lambda it: it.registry[int]),
    "an instance whose class refuses attributes": (
        lambda f: put(Refusing(), "function", f),
        lambda it: object.__getattribute__(it, "function")(1),
        lambda it: object.__getattribute__(it, "function"),
    ),
    "a dict that loads when it is looked at": (
        lambda f: Loading(f=f),
        lambda it: dict.get(it, "f")(1),  # type: ignore[misc]
        lambda it: dict.get(it, "f"),
    ),
}


def hold(name: str, function: Any) -> Held:
    make, call, get = HOLDERS[name]
    made = make(function)
    return Held(lambda: call(made), lambda: get(made))


@pytest.fixture(autouse=True)
def no_importer_is_left() -> Iterator[None]:
    yield
    sys.modules.pop("importer", None)


@pytest.mark.parametrize("name", HOLDERS)
def test_a_copy_made_before_the_hook_is_hooked_and_restored(engine: Any, name: str) -> None:
    original = engine.f
    held = hold(name, original)
    bare = held.call()
    assert bare[0] == "f"
    assert held.get() is original
    handle = aspects.weave(around("engine:f", hooked))
    assert held.call() == ("hooked", bare)
    assert held.get() is engine.f
    assert aspects.report().stale == ()
    handle.disable()
    assert held.get() is original
    handle.enable()
    assert held.call() == ("hooked", bare)
    handle.remove()
    assert held.call() == bare
    assert held.get() is original
    assert engine.f is original


@pytest.mark.parametrize("name", HOLDERS)
def test_a_copy_is_found_piece_by_piece_as_well(engine: Any, name: str) -> None:
    original = engine.f
    held = hold(name, original)
    with in_pieces(rest=0) as pieces:
        handle = aspects.weave(aspects.observe("engine:f")(type("Observer", (aspects.Observer,), {})))
        assert held.get() is engine.f
        assert aspects.report().stale == ()
        handle.remove()
    assert held.get() is original
    assert pieces.longest >= 0


@pytest.mark.parametrize("name", HOLDERS)
def test_a_copy_made_while_hooked_is_restored(engine: Any, name: str) -> None:
    original = engine.f
    handle = aspects.weave(around("engine:f", hooked))
    held = hold(name, engine.f)
    assert held.call()[0] == "hooked"
    handle.remove()
    assert held.call()[0] == "f"
    assert held.get() is original


@pytest.mark.parametrize("name", HOLDERS)
def test_copies_of_other_functions_are_left_alone(engine: Any, name: str) -> None:
    held = hold(name, engine.untouched)
    with aspects.woven(around("engine:f", hooked)):
        assert held.get() is engine.untouched
        assert held.call()[0] == "untouched"


def test_all_holders_at_once_and_several_targets_in_one_pass(engine: Any) -> None:
    held = [hold(name, function) for name in HOLDERS for function in (engine.f, engine.untouched)]
    originals = [entry.get() for entry in held]
    with aspects.woven(around("engine:f", hooked), around("engine:untouched", hooked)):
        called = [entry.call() for entry in held]
    # The module globals of one name are shared by both: the second copy replaced the first.
    assert sum(result[0] == "hooked" for result in called) == len(held)
    for entry, original in zip(held, originals):
        assert entry.get() is original


@pytest.mark.parametrize("path", ["C.m", "C.c", "C.s"])
def test_bound_and_plain_copies_of_methods(engine: Any, path: str) -> None:
    made = engine.C()
    name = path[2:]
    made.cached = getattr(made, name)
    made.callbacks = {"by name": getattr(made, name), "by class": getattr(engine.C, name)}
    partial = functools.partial(getattr(made, name), 5)
    copies: list[Any] = [made.cached, partial]

    def calls() -> list[Any]:
        by_class = made.callbacks["by class"]
        return [
            made.cached(1),
            made.callbacks["by name"](2),
            by_class(made, 3) if name == "m" else by_class(3),
            copies[0](4),
            partial(),
        ]

    bare = calls()
    raw = vars(engine.C)[name]
    function = raw if name == "m" else raw.__func__
    with aspects.woven(around(f"engine:{path}", hooked)):
        assert calls() == [("hooked", result) for result in bare]
        assert aspects.report().stale == ()
    assert calls() == bare
    assert vars(engine.C)[name] is raw
    assert getattr(made.cached, "__func__", made.cached) is function
    assert made.cached == getattr(made, name)


def test_a_class_attribute_alias_of_a_method_and_of_a_property(engine: Any) -> None:
    engine.C.alias, engine.C.alias_c, engine.C.alias_p = (vars(engine.C)[name] for name in "mcp")

    class Other:
        m, p = engine.C.m, engine.C.p

    with aspects.woven(*(around(f"engine:C.{name}", hooked) for name in "mcp")):
        made = engine.C()
        assert made.alias(1) == ("hooked", ("m", 1))
        assert made.alias_c(1) == ("hooked", ("c", 1))
        assert made.alias_p == Other().p == ("hooked", ("p", 0))
        assert Other().m(1) == ("hooked", ("m", 1))
    assert vars(engine.C)["alias"] is vars(engine.C)["m"] is vars(Other)["m"]
    assert vars(engine.C)["alias_c"] is vars(engine.C)["c"]
    assert vars(engine.C)["alias_p"] is vars(engine.C)["p"] is vars(Other)["p"]


def test_the_rest_of_a_holder_stays_as_it_was(engine: Any) -> None:
    marker = object()
    as_list = [marker, engine.f, [marker], engine.f]
    as_dict = {"z": marker, "f": engine.f, "a": 1}
    as_set = {marker, engine.f, 3}
    partial = functools.partial(engine.f, marker, key=marker)
    partial.note = marker  # type: ignore[attr-defined]

    def defaults(a: Any = marker, f: Any = engine.f, *, g: Any = engine.f, h: Any = marker) -> None: ...

    for _ in range(2):
        with aspects.woven(around("engine:f", hooked)):
            assert as_list == [marker, engine.f, [marker], engine.f]
            assert list(as_dict.items()) == [("z", marker), ("f", engine.f), ("a", 1)]
            assert as_set == {marker, engine.f, 3}
            assert (partial.args, partial.keywords) == ((marker,), {"key": marker})
            assert partial.note is marker  # type: ignore[attr-defined]
            assert defaults.__defaults__ == (marker, engine.f)
            assert defaults.__kwdefaults__ == {"g": engine.f, "h": marker}
    assert as_list == [marker, engine.f, [marker], engine.f]
    assert list(as_dict) == ["z", "f", "a"]


# -- callables other than plain functions ---------------------------------------------------------------

PROXIED = """
import functools, math, operator
def f(x): return ("f", x)
cached = functools.lru_cache(maxsize=None)(lambda x: ("cached", x))
partial = functools.partial(f, 1)
builtin = operator.neg
class Callable:
    def __call__(self, x): return ("instance", x)
instance = Callable()
"""


@pytest.mark.parametrize("name", ["cached", "partial", "builtin", "instance"])
def test_copies_of_callables_other_than_functions(name: str) -> None:
    with module_of(PROXIED) as engine, module_of("", "importer") as importer:
        original = getattr(engine, name)
        importer.copy = original
        registry, namespace = [original], types.SimpleNamespace(copy=original)
        argument = () if name == "partial" else (5,)
        bare = original(*argument)
        with aspects.woven(around(f"engine:{name}", hooked)):
            for copy in (importer.copy, registry[0], namespace.copy, getattr(engine, name)):
                assert copy(*argument) == ("hooked", bare)
        assert importer.copy is registry[0] is namespace.copy is getattr(engine, name) is original


# -- what cannot be reached -----------------------------------------------------------------------------


def unreachable() -> dict[str, tuple[Callable[[Any], Any], str]]:
    def suspended(f: Any) -> Any:
        def generator() -> Iterator[Any]:
            local = f
            yield local

        made = generator()
        next(made)
        return made

    return {
        "a tuple": (lambda f: (1, f), "a tuple of 2"),
        "a named tuple": (lambda f: collections.namedtuple("Named", "f")(f), "a Named of 1"),
        "a tuple in a list": (lambda f: [(f, 1, 2)], "a tuple of 3"),
        "a frozenset": (lambda f: frozenset([f]), "a frozenset of 1"),
        "an OrderedDict": (lambda f: collections.OrderedDict({f: 1}), "a key of a dictionary of 1 entries"),
        "lru_cache": (functools.lru_cache, "a functools._lru_cache_wrapper (f)"),
        "a generic alias": (lambda f: list[f], "a tuple of 1 in a types.GenericAlias"),  # type: ignore[valid-type]
        "a C iterator": (lambda f: map(f, [1]), "a builtins.map"),
        "a suspended generator": (suspended, "generator"),
        "a weak reference": (weakref.ref, "a weak reference"),
        "a WeakSet": (lambda f: weakref.WeakSet([f]), "a weak reference"),
    }


@pytest.mark.parametrize("name", unreachable())
def test_what_cannot_be_reached_is_named(engine: Any, name: str) -> None:
    make, expected = unreachable()[name]
    held = make(engine.f)
    handle = aspects.weave(around("engine:f", hooked))
    stale = [entry for entry in aspects.report().stale if expected in entry.holder]
    assert [entry.target for entry in stale] == ["engine:f"]
    assert f"engine:f is still held by {stale[0].holder}" in str(aspects.report())
    assert "still held by" in aspects.explain("engine:f")
    handle.remove()
    assert aspects.report().stale == ()
    del held


# -- patches of other code ------------------------------------------------------------------------------


def test_a_patch_on_top_stays_when_ours_goes(engine: Any) -> None:
    original = engine.f
    handle = aspects.weave(around("engine:f", hooked))
    below = engine.f

    def patch(x: int = 0) -> Any:
        return ("patch", below(x))

    engine.f = patch
    assert aspects.report().displaced == ("engine:f",)
    handle.remove()
    assert engine.f is patch
    assert engine.f(1) == ("patch", ("f", 1))
    assert below is original  # a closure of theirs is a holder like any other


def test_a_patch_that_comes_and_goes_leaves_ours(engine: Any) -> None:
    original = engine.f
    handle = aspects.weave(around("engine:f", hooked))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "f", lambda x: ("patch", x))
        assert engine.f(1) == ("patch", 1)
        assert aspects.report().displaced == ("engine:f",)
    assert engine.f(1) == ("hooked", ("f", 1))
    assert aspects.report().displaced == ()
    handle.remove()
    assert engine.f is original


# -- never in the way -----------------------------------------------------------------------------------


def test_no_lazy_module_is_woken(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text("raise AssertionError('a lazy module was woken')\n")
    spec = importlib.util.spec_from_file_location("sleeper", tmp_path / "sleeper.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sleeper = importlib.util.module_from_spec(spec)

    class Waking:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of a stand-in for a module was asked for")

    class LazyModule(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} of a lazy module was asked for")

    class Proxying:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise AssertionError("the dictionary of what a proxy stands for was asked for")

    class ProxyingModule(Proxying, types.ModuleType):
        pass

    strange: dict[str, Any] = {
        "sleeper": sleeper,
        "waking": Waking(),
        "lazy_module": LazyModule("lazy_module"),
        "proxying": Proxying(),
        "proxying_module": ProxyingModule("proxying_module"),
        "nothing": None,
        "number": 5,
    }
    odd: Any = types.ModuleType("odd")
    odd.__name__ = None
    registry = [engine.f]
    sys.modules.update(strange, odd=odd)
    try:
        spec.loader.exec_module(sleeper)
        with aspects.woven(around("engine:f", hooked), around("engine:C.m", hooked)):
            assert registry[0](1) == ("hooked", ("f", 1))
    finally:
        for name in (*strange, "odd"):
            del sys.modules[name]


def test_frames_that_run_keep_what_they_began_with(engine: Any) -> None:
    local = engine.f
    with aspects.woven(around("engine:f", hooked)):
        assert local(1) == ("f", 1)
        assert engine.f(1) == ("hooked", ("f", 1))


def test_what_is_garbage_stays_garbage(engine: Any) -> None:
    """Rebinding neither keeps holders alive nor leaves anything of its own behind."""

    class Owner:
        pass

    made: Any = Owner()
    made.bound, made.function = types.MethodType(engine.f, made), engine.f
    gone = weakref.ref(made)
    with aspects.woven(around("engine:f", hooked)):
        pass
    del made
    gc.collect()
    assert gone() is None

    woven: Any = None
    for _ in range(2):
        with aspects.woven(around("engine:f", hooked)):
            woven = weakref.ref(engine.f)
    gc.collect()
    assert woven()() == ("f", 0)
    engine.f.__dict__.clear()
    gc.collect()
    assert woven() is None


def test_many_bound_methods_are_rebound_in_few_passes(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `self._forward_method = self.forward_cuda` on every layer of a model."""
    layers = [types.SimpleNamespace() for _ in range(300)]
    made = engine.C()
    for layer in layers:
        layer.forward = types.MethodType(engine.C.m, made)
    passes: list[int] = []
    referrers = gc.get_referrers

    def counted(*objects: Any) -> list[Any]:
        passes.append(len(objects))
        return referrers(*objects)

    monkeypatch.setattr(gc, "get_referrers", counted)
    with aspects.woven(around("engine:C.m", hooked)):
        assert all(layer.forward(1) == ("hooked", ("m", 1)) for layer in layers)
    assert len(passes) <= 8


def test_rebinding_reaches_hooks_of_other_targets(engine: Any) -> None:
    """A default argument of a hooked function is a holder, of the original and of ours."""
    exec("def g(x, function=f): return function(x)", vars(engine))
    g = engine.g
    with aspects.woven(around("engine:g", hooked)):
        with aspects.woven(around("engine:f", hooked)):
            assert engine.g(1) == ("hooked", ("hooked", ("f", 1)))
        assert engine.g(1) == ("hooked", ("f", 1))
        assert inspect.signature(engine.g).parameters["function"].default is engine.f
    assert g.__defaults__ == (engine.f,)
    assert engine.g(1) == ("f", 1)
