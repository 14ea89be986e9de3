"""Targets that were not made to be hooked: each harms no other hook, and nothing fails silently."""

from __future__ import annotations

import collections
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookRegistry, HookType, State
from tests.support.woven_modules import Watch, advice, around, hooked, module_of, no_hook_is_left, stored

__all__ = ["no_hook_is_left"]

SOURCE = """
import functools
class cached_property(property):  # with a constructor of its own, as werkzeug's
    def __init__(self, fget, name=None, doc=None):
        super().__init__(fget, doc=doc)
        self.__name__ = name or fget.__name__
        self.slot = "_cache_" + self.__name__
    def __get__(self, instance, owner=None):
        if instance is None: return self
        if self.slot not in vars(instance): vars(instance)[self.slot] = self.fget(instance)
        return vars(instance)[self.slot]
class tagged(classmethod):
    def __init__(self, tag, function):
        super().__init__(function)
        self.tag = tag
class slotted(staticmethod):
    __slots__ = ("tag",)
    def __init__(self, tag, function):
        super().__init__(function)
        self.tag = tag
class lazily(functools.cached_property):
    def __init__(self, function, unit):
        super().__init__(function)
        self.unit = unit
class Refusing(property):
    def __new__(cls, fget): return super().__new__(cls)
    def __init__(self, fget): super().__init__(fget)
    def __setattr__(self, name, value):
        if armed: raise RuntimeError("hands off")
        super().__setattr__(name, value)
armed = False
class Binder:  # no __call__, binds a callable
    def __init__(self, function): self.function = function
    def __get__(self, instance, owner=None):
        return functools.partial(self.function, owner if instance is None else instance)
class Raising:
    def __get__(self, instance, owner=None): raise RuntimeError("not now")
class Meta(type):
    def __getattribute__(cls, name): raise RuntimeError("not readable")
class Guarded(metaclass=Meta):
    def m(self): return "guarded"
class Forbidding(type):
    def __setattr__(cls, name, value): raise RuntimeError("no")
class Closed(metaclass=Forbidding):
    def m(self): return "closed"
class A:
    @cached_property
    def cached(self): "Documented."; return ["cached"]
    def _class(cls, x=1): return (cls.__name__, x)
    made = tagged("tag", _class)
    static = slotted("slot", lambda x=1: ("static", x))
    lazy = lazily(lambda self: ["lazy"], "ms")
    refusing = Refusing(lambda self: "refusing")
    bound = Binder(lambda subject, x=1: (getattr(subject, "__name__", "instance"), x))
    raising = Raising()
    def m(self): return "m"
lazily.__set_name__(vars(A)["lazy"], A, "lazy")
def f(x=0): return ("f", x)
armed = True
"""


@pytest.fixture
def engine() -> Iterator[Any]:
    with module_of(SOURCE) as module:
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
    engine: Any, name: str, read: Callable[[Any], Any], attribute: tuple[str, str]
) -> None:
    raw, bare = vars(engine.A)[name], read(engine.A)
    with aspects.woven(around(f"engine:A.{name}", hooked)):
        assert read(engine.A) == ("hooked", bare)
        made = vars(engine.A)[name]
        assert type(made) is type(raw)
        assert getattr(made, attribute[0]) == attribute[1]
        assert made.__doc__ == raw.__doc__
    assert vars(engine.A)[name] is raw
    assert read(engine.A) == bare


@pytest.mark.parametrize("name", ["cached", "made", "static"])
def test_a_copy_in_such_a_descriptor_is_rebound(engine: Any, name: str) -> None:
    raw = vars(engine.A)[name]
    engine.function = getattr(raw, "fget", None) or raw.__func__
    with aspects.woven(Watch().on("engine:function")):
        inner = getattr(vars(engine.A)[name], "fget", None) or vars(engine.A)[name].__func__
        assert inner is engine.function
        assert type(vars(engine.A)[name]) is type(raw)


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


def test_a_descriptor_that_cannot_be_called_but_binds(engine: Any) -> None:
    seen: list[Any] = []

    def look(original: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return original(*args, **kwargs)

    raw, made = vars(engine.A)["bound"], engine.A()
    bare = [made.bound(5), engine.A.bound(x=6)]
    with aspects.woven(around("engine:A.bound", look), around("engine:A.raising", look)):
        assert [made.bound(5), engine.A.bound(x=6)] == bare == [("instance", 5), ("A", 6)]
        with pytest.raises(RuntimeError, match="not now"):
            _ = made.raising
    assert seen == [((made, 5), {}), ((engine.A,), {"x": 6})]
    assert vars(engine.A)["bound"] is raw


# -- patterns ---------------------------------------------------------------------------------------------

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


# -- lazy modules -----------------------------------------------------------------------------------------

LAZY = """
import sys
from types import ModuleType
class _LazyModule(ModuleType):
    def __getattr__(self, name):
        asked.append(name)
        if name in ("AutoConfig", "f", "kept"):
            import behind
            value = getattr(behind, name)
            if name != "kept": setattr(self, name, value)
            return value
        raise AttributeError(name)
asked = []
"""
BEHIND = """
class AutoConfig:
    @classmethod
    def for_model(cls, x): return ("for_model", x)
def f(): return "f"
def kept(): return "kept"
"""


@pytest.mark.parametrize("written", ["lazy_front:AutoConfig.for_model", "lazy_front.AutoConfig.for_model"])
def test_a_lazy_module_is_woven_when_it_is_asked(written: str) -> None:
    with module_of(LAZY, "lazy_classes") as classes, module_of(BEHIND, "behind") as behind:
        front = classes._LazyModule("lazy_front")
        other = classes._LazyModule("lazy_other")
        sys.modules["lazy_front"] = front
        before = dict(vars(classes._LazyModule))
        try:
            handle = aspects.weave(
                around(written, hooked), around("lazy_front:f", hooked), around("lazy_front:kept", hooked)
            )
            assert classes.asked == []
            assert handle.states == (State.PENDING,) * 3
            assert front.AutoConfig.for_model(1) == ("hooked", ("for_model", 1))
            assert front.f() == front.f() == behind.f() == ("hooked", "f")
            assert front.kept() == ("hooked", "kept")
            assert other.AutoConfig is behind.AutoConfig
            assert handle.states == (State.WOVEN,) * 3
            with pytest.raises(AttributeError, match="nothing"):
                _ = front.nothing
            handle.remove()
            assert behind.AutoConfig.for_model(1) == ("for_model", 1)
            assert front.f() == front.kept() == "f" or front.kept() == "kept"
            assert dict(vars(classes._LazyModule)) == before
        finally:
            del sys.modules["lazy_front"]


# -- holders that were silent -----------------------------------------------------------------------------


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
        assert made["new"] == ("hooked", ("f", 0))
        assert made.default_factory is made["also"] is engine.f
    assert made.default_factory is original


class OddHash:
    """Raises when a set hashes it."""

    ready = False

    def __call__(self) -> str:
        return "odd"

    def __hash__(self) -> int:
        if self.ready:
            raise RuntimeError("no hash today")
        return 1


def test_a_holder_that_raises_is_named(engine: Any) -> None:
    engine.odd = OddHash()
    held = {engine.odd}
    engine.odd.ready = True
    try:
        with aspects.woven(around("engine:odd", hooked), around("engine:f", hooked)):
            assert engine.odd() == ("hooked", "odd")
            assert engine.f() == ("hooked", ("f", 0))
            assert "no hash today" in str(aspects.report())
    finally:
        engine.odd.ready = False
    assert len(held) == 1


# -- threads ----------------------------------------------------------------------------------------------


def test_what_the_last_call_says_holds_after_many_threads(engine: Any) -> None:
    original = engine.f
    barrier = threading.Barrier(6)

    def work(number: int) -> None:
        def hook(result: Any, *args: Any) -> Any:
            return result

        barrier.wait(60)
        for _ in range(40):
            HookRegistry.register("engine.f", hook)
            HookRegistry.apply_hooks()
            if number % 3 == 0:
                HookRegistry.unregister("engine.f", hook)
            if number % 3 == 1:
                HookRegistry.reset()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    HookRegistry.reset()
    assert aspects.report().hooks == ()
    assert engine.f is original
    HookRegistry.apply_hooks()
    assert engine.f is original


# -- torch.jit --------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torch_jit_script_says_that_it_leaves_hooks_out(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "scripted.py"
    path.write_text(
        "import torch\n"
        "def f(x: torch.Tensor) -> torch.Tensor:\n    return x + 1\n"
        "def g(x: torch.Tensor) -> torch.Tensor:\n    return f(x) * 2\n"
    )
    module: Any = types.ModuleType("scripted")
    sys.modules["scripted"] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    parse_def = torch.jit.frontend.parse_def
    try:
        with aspects.woven(advice("scripted:f", HookType.AROUND, hooked)), caplog.at_level(logging.WARNING):
            torch.jit.script(module.g)
        (record,) = [record for record in caplog.records if "torch.jit" in record.getMessage()]
        assert "scripted:f" in record.getMessage()
        assert "hooked" in record.getMessage()
    finally:
        del sys.modules["scripted"]
    assert torch.jit.frontend.parse_def is parse_def
    assert stored(torch.jit.frontend, "parse_def") is parse_def
