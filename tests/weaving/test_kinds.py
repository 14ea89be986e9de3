"""Every kind of callable: what a hook sees, what stays as it was, and that the original comes back."""

from __future__ import annotations

import abc
import asyncio
import copy
import dataclasses
import functools
import inspect
import pickle
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import sgl_aspects as aspects
from tests.support.woven_modules import Watch, around, fixture_of, module_of, stored

SOURCE = """
from __future__ import annotations
import abc, asyncio, collections, contextlib, dataclasses, enum, functools, math, operator, typing

default = object()

def function(a, b=2, *, c=3): "Adds."; return ("function", a, b, c)
def nothing(): return "nothing"
def positional_only(a, b=2, /, c=3): return (a, b, c)
def keyword_only(*, a, b=2): return (a, b)
def variadic(a, b=2, *rest, c=3, **more): return (a, b, rest, c, more)
def sentinel(a=default): return a is default
def colliding(_head, _calls, __hooks0, args, kwargs, _args=1, _kwargs=2, Exception=3, _result=4):
    return (_head, _calls, __hooks0, args, kwargs, _args, _kwargs, Exception, _result)
def annotated(a: int, b: "str" = "x") -> typing.Tuple[int, str]: return (a, b)
def recursive(n): return n if n == 0 else recursive(n - 1)
lambda_ = lambda x, y=1: (x, y)

def closure_over(value):
    def closure(x, default=value): return (value, x, default)
    return closure
closure = closure_over("closed")

def decorate(function):
    @functools.wraps(function)
    def decorated(*args, **kwargs): return ("decorated", function(*args, **kwargs))
    return decorated
@decorate
def wrapped(a, b=1): return (a, b)

@functools.lru_cache(maxsize=4)
def cached(x): return ["cached", x]
@functools.cache
def cached_plain(x): return x
partial = functools.partial(function, 1, c=9)
@functools.singledispatch
def dispatched(x): return ("object", x)
@dispatched.register(int)
def _(x): return ("int", x)
@contextlib.contextmanager
def managed(x):
    yield ("managed", x)

class Callable:
    def __init__(self, state): self.state = state
    def __call__(self, x=1): return (self.state, x)
    def __eq__(self, other): return isinstance(other, Callable) and self.state == other.state
    def __hash__(self): return hash(self.state)
instance = Callable("state")
bound = instance.__call__
builtin = math.gcd
bound_builtin = "a,b".split
getter = operator.itemgetter(0)

class Meta(type):
    def of_meta(cls, x): return (cls.__name__, x)
    def __len__(cls): return 7

class Base(metaclass=Meta):
    class_value = "base"
    def __init__(self, x=0): self.x = x
    def method(self, y, z=1): return ("method", self.x, y, z)
    def __private(self, __x=1): return ("private", self.x, __x)
    def call_private(self): return self.__private()
    @classmethod
    def from_class(cls, y=1): return (cls.__name__, y)
    @staticmethod
    def static(y, z=2): return ("static", y, z)
    @property
    def prop(self): "Documented."; return ("prop", self.x)
    @prop.setter
    def prop(self, value): self.x = value
    @prop.deleter
    def prop(self): self.x = "deleted"
    @functools.cached_property
    def lazy(self): return ["lazy", self.x]
    def _two(self, a, b): return ("two", self.x, a, b)
    fixed = functools.partialmethod(_two, 1)
    @functools.singledispatchmethod
    def by_type(self, v): return ("object", self.x, v)
    @by_type.register(int)
    def _(self, v): return ("int", self.x, v)
    @functools.singledispatchmethod
    @classmethod
    def class_by_type(cls, v): return (cls.__name__, "object", v)
    @class_by_type.register(int)
    @classmethod
    def _(cls, v): return (cls.__name__, "int", v)
    @functools.lru_cache(maxsize=None)
    def cached_method(self, y): return ("cached", self.x, y)
    getitem = operator.itemgetter(0)
    static_cached = staticmethod(functools.lru_cache(maxsize=None)(lambda y: ("static cached", y)))
    def __call__(self, y): return ("called", self.x, y)
    def __len__(self): return 3
    def __getitem__(self, key): return ("item", key)
    def __eq__(self, other): return isinstance(other, Base) and self.x == other.x
    def __hash__(self): return hash(self.x)
    def __enter__(self): return ("entered", self.x)
    def __exit__(self, *error): return False
    def __init_subclass__(cls, **options): cls.options = options
    def __class_getitem__(cls, item): return (cls.__name__, item)
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return ("missing", name)
    class Nested:
        def method(self, y): return ("nested", y)
        class Deeper:
            def method(self): return "deeper"

class Sub(Base):
    def method(self, y, z=1): return ("sub", super().method(y, z))
class Plain(Base): pass

class New:
    def __new__(cls, x, y=2):
        self = super().__new__(cls)
        self.made = (cls.__name__, x, y)
        return self
class OnlyInit:
    def __init__(self, x): self.x = x

class Slotted:
    __slots__ = ("x",)
    def __init__(self, x): self.x = x
    def method(self, y): return (self.x, y)

@dataclasses.dataclass(order=True)
class Data:
    x: int
    tags: list = dataclasses.field(default_factory=list)
    def total(self): return self.x + len(self.tags)
@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
    def twice(self): return self.x * 2

class Color(enum.Enum):
    RED = 1
    def shout(self): return self.name + "!"
class Point(typing.NamedTuple):
    x: int
    def norm(self): return abs(self.x)
class Listing(list): pass
class Mapping(dict): pass

class Abstract(abc.ABC):
    @abc.abstractmethod
    def must(self): return "must"
    @property
    @abc.abstractmethod
    def must_prop(self): return "must_prop"
    def concrete(self): return self.must()
class Concrete(Abstract):
    def must(self): return super().must()
    @property
    def must_prop(self): return 1
@typing.runtime_checkable
class Speaks(typing.Protocol):
    def speak(self) -> str: ...
    def twice(self): return self.speak() * 2
class Dog(Speaks):
    def speak(self): return "wuff"

T = typing.TypeVar("T")
class Box(typing.Generic[T]):
    def get(self, x: T) -> T: return x

def run(awaitable): return asyncio.run(_wait(awaitable))
async def _wait(awaitable): return await awaitable
def drain(agen):
    async def collect(): return [item async for item in agen]
    return asyncio.run(collect())

async def coroutine(a, b=2):
    await asyncio.sleep(0)
    return ("coroutine", a, b)
def generator(n):
    for i in range(n):
        got = yield i
        if got: yield ("got", got)
    return "end"
async def agen(n):
    for i in range(n): yield i
class Async:
    async def method(self, x): return ("async", x)
    def generate(self, x): yield x; yield x + 1
    async def agenerate(self, x): yield x; yield x + 1
    async def __call__(self, x): return ("async call", x)
    @classmethod
    async def from_class(cls, x): return (cls.__name__, x)
    @staticmethod
    async def static(x): return x
    @property
    async def prop(self): return "async prop"
async_instance = Async()
async_partial = functools.partial(coroutine, 5)
generator_partial = functools.partial(generator, 2)
import types
@types.coroutine
def old_coroutine(x):
    yield
    return ("old", x)
"""


engine = fixture_of(SOURCE)


@dataclass
class Case:
    """A target, calls of it, and the arguments a hook sees in each of them (as source text)."""

    path: str
    calls: list[str]
    seen: list[str] = field(default_factory=list)


# `self` stands for any instance: only the rest of the arguments is compared.
CASES = [
    Case("function", ["function(1)", "function(1, 5)", "function(a=1, c=7, b=3)"],
         ["(1,), {}", "(1, 5), {}", "(), dict(a=1, b=3, c=7)"]),
    Case("nothing", ["nothing()"], ["(), {}"]),
    Case("positional_only", ["positional_only(1)", "positional_only(1, 5, c=7)"],
         ["(1,), {}", "(1, 5), dict(c=7)"]),
    Case("keyword_only", ["keyword_only(a=1)", "keyword_only(b=3, a=1)"],
         ["(), dict(a=1)", "(), dict(a=1, b=3)"]),
    Case("variadic", ["variadic(1)", "variadic(1, 2, 3, 4, c=5, d=6)"],
         ["(1,), {}", "(1, 2, 3, 4), dict(c=5, d=6)"]),
    Case("sentinel", ["sentinel()", "sentinel(1)"], ["(), {}", "(1,), {}"]),
    Case("colliding", ["colliding(1, 2, 3, 4, 5, _result=9)"],
         ["(1, 2, 3, 4, 5), dict(_result=9)"]),
    Case("annotated", ["annotated(1)"]),
    Case("recursive", ["recursive(3)"], ["(3,), {}", "(2,), {}", "(1,), {}", "(0,), {}"]),
    Case("lambda_", ["lambda_(1)"], ["(1,), {}"]),
    Case("closure", ["closure(1)"], ["(1,), {}"]),
    Case("wrapped", ["wrapped(1, b=3)"], ["(1,), dict(b=3)"]),
    Case("cached", ["cached(1)", "cached(1) is cached(1)", "cached(x=2)"]),
    Case("cached_plain", ["cached_plain(1)"]),
    Case("partial", ["partial()", "partial(5)"], ["(), {}", "(5,), {}"]),
    Case("dispatched", ["dispatched(1)", "dispatched('x')"], ["(1,), {}", "('x',), {}"]),
    Case("managed", ["managed(1).__enter__()"]),
    Case("instance", ["instance()", "instance(x=5)", "instance.state", "instance == Callable('state')"]),
    Case("Callable.__call__", ["instance()", "instance(5)", "bound(6)"]),
    Case("bound", ["bound(5)"], ["(5,), {}"]),
    Case("builtin", ["builtin(12, 18)"], ["(12, 18), {}"]),
    Case("bound_builtin", ["bound_builtin(',')"]),
    Case("getter", ["getter([7])"]),
    Case("Base.__init__", ["Base(5).x", "Sub(x=6).x", "Base().x"],
         ["(self, 5), {}", "(self,), dict(x=6)", "(self,), {}"]),
    Case("Base.method", ["Base(1).method(2)", "Base.method(Base(1), 2, z=3)", "Sub(1).method(2)"],
         ["(self, 2), {}", "(self, 2), dict(z=3)", "(self, 2, 1), {}"]),
    Case("Base._Base__private", ["Base(1).call_private()"], ["(self,), {}"]),
    Case("Base.from_class", ["Base.from_class()", "Sub.from_class(y=3)", "Base(0).from_class(4)"],
         ["(Base,), {}", "(Sub,), dict(y=3)", "(Base, 4), {}"]),
    Case("Base.static", ["Base.static(1)", "Base(0).static(1, 5)"], ["(1,), {}", "(1, 5), {}"]),
    Case("Base.prop", ["Base(4).prop", "Base.prop.__doc__"], ["(self,), {}"]),
    Case("Base.prop.fget", ["Base(4).prop"], ["(self,), {}"]),
    Case("Base.prop.fset", ["setattr(b := Base(0), 'prop', 9) or b.prop"], ["(self, 9), {}"]),
    Case("Base.prop.fdel", ["delattr(b := Base(0), 'prop') or b.prop"], ["(self,), {}"]),
    Case("Base.lazy", ["Base(1).lazy", "(b := Base(1)).lazy is b.lazy", "Base.lazy.attrname"]),
    Case("Base.fixed", ["Base(1).fixed(2)", "Base.fixed(Base(1), b=3)"], ["(self, 2), {}"]),
    Case("Base.by_type", ["Base(1).by_type(1)", "Base(1).by_type('x')", "Base.by_type.__doc__"],
         ["(self, 1), {}", "(self, 'x'), {}"]),
    Case("Base.class_by_type", ["Base.class_by_type(1)", "Sub.class_by_type('x')", "Sub(1).class_by_type(2)"],
         ["(Base, 1), {}", "(Sub, 'x'), {}", "(Sub, 2), {}"]),
    Case("Base.cached_method", ["Base(1).cached_method(2)"], ["(self, 2), {}"]),
    Case("Base.getitem", ["Base(1).getitem([5])"], ["([5],), {}"]),
    Case("Base.static_cached", ["Base(1).static_cached(5)", "Base.static_cached(6)"],
         ["(5,), {}", "(6,), {}"]),
    Case("Base.__call__", ["Base(1)(2)"], ["(self, 2), {}"]),
    Case("Base.__len__", ["len(Base())"]),
    Case("Base.__getitem__", ["Base()[5]"], ["(self, 5), {}"]),
    Case("Base.__eq__", ["Base(1) == Base(1)", "Base(1) != Base(2)"]),
    Case("Base.__hash__", ["hash(Base(1))"]),
    Case("Base.__enter__", ["Base(1).__enter__()"]),
    Case("Base.__exit__", ["Base(1).__exit__(None, None, None)"]),
    Case("Base.__init_subclass__", ["type('Anew', (Base,), {}, k=1).options"]),
    Case("Base.__class_getitem__", ["Base[5]", "Sub[5]"], ["(Base, 5), {}", "(Sub, 5), {}"]),
    Case("Base.__getattr__", ["Base(1).unknown"], ["(self, 'unknown'), {}"]),
    Case("Base.Nested.method", ["Base.Nested().method(1)"]),
    Case("Base.Nested.Deeper.method", ["Base.Nested.Deeper().method()"]),
    Case("Sub.method", ["Sub(1).method(2)"], ["(self, 2), {}"]),
    Case("Plain.method", ["Plain(1).method(2)"], ["(self, 2), {}"]),
    Case("Plain.from_class", ["Plain.from_class()"], ["(Plain,), {}"]),
    Case("Plain.__init__", ["Plain(1).x"], ["(self, 1), {}"]),
    Case("Plain.__len__", ["len(Plain())"]),
    Case("Meta.of_meta", ["Base.of_meta(1)", "Sub.of_meta(2)"], ["(Base, 1), {}", "(Sub, 2), {}"]),
    Case("Meta.__call__", ["Base(3).x"], ["(Base, 3), {}"]),
    Case("Meta.__len__", ["len(Base)"], ["(Base,), {}"]),
    Case("Base.of_meta", ["Base.of_meta(1)"], ["(Base, 1), {}"]),
    Case("New.__new__", ["New(1).made", "New(1, y=5).made"], ["(New, 1), {}", "(New, 1), dict(y=5)"]),
    Case("New.__init__", ["New(1).made"], ["(self, 1), {}"]),
    Case("OnlyInit.__init__", ["OnlyInit(1).x"], ["(self, 1), {}"]),
    Case("Slotted.method", ["Slotted(1).method(2)"], ["(self, 2), {}"]),
    Case("Data.__init__", ["Data(1)", "Data(1, tags=[2])"]),
    Case("Data.__eq__", ["Data(1) == Data(1)"]),
    Case("Data.__lt__", ["Data(1) < Data(2)"]),
    Case("Data.__repr__", ["repr(Data(1))"]),
    Case("Data.total", ["Data(1, [2]).total()"]),
    Case("Frozen.twice", ["Frozen(2).twice()", "hash(Frozen(2))"]),
    Case("Color.shout", ["Color.RED.shout()", "list(Color)"]),
    Case("Point.norm", ["Point(-2).norm()"]),
    Case("Listing.append", ["(l := Listing(), l.append(1))"], ["(self, 1), {}"]),
    Case("Listing.__len__", ["len(Listing([1]))"]),
    Case("Abstract.must", ["Concrete().must()"], ["(self,), {}"]),
    Case("Abstract.concrete", ["Concrete().concrete()"]),
    Case("Speaks.twice", ["Dog().twice()", "isinstance(Dog(), Speaks)", "isinstance(1, Speaks)"]),
    Case("Box.get", ["Box[int]().get(1)"], ["(self, 1), {}"]),
    Case("coroutine", ["run(coroutine(1))", "run(coroutine(a=1, b=3))"],
         ["(1,), {}", "(), dict(a=1, b=3)"]),
    Case("generator", ["list(generator(3))"], ["(3,), {}"]),
    Case("agen", ["drain(agen(3))"], ["(3,), {}"]),
    Case("old_coroutine", ["run(old_coroutine(1))"], ["(1,), {}"]),
    Case("Async.method", ["run(Async().method(1))"], ["(self, 1), {}"]),
    Case("Async.generate", ["list(Async().generate(1))"], ["(self, 1), {}"]),
    Case("Async.agenerate", ["drain(Async().agenerate(1))"], ["(self, 1), {}"]),
    Case("Async.__call__", ["run(Async()(1))"], ["(self, 1), {}"]),
    Case("Async.from_class", ["run(Async.from_class(1))"], ["(Async, 1), {}"]),
    Case("Async.static", ["run(Async.static(1))"], ["(1,), {}"]),
    Case("Async.prop", ["run(Async().prop)"], ["(self,), {}"]),
    Case("async_instance", ["run(async_instance(1))"], ["(1,), {}"]),
    Case("async_partial", ["run(async_partial(b=1))"], ["(), dict(b=1)"]),
    Case("generator_partial", ["list(generator_partial())"], ["(), {}"]),
]  # fmt: skip
BY_PATH = {case.path: case for case in CASES}
assert len(BY_PATH) == len(CASES)


def outcome(module: Any, expression: str) -> Any:
    namespace = {"__name__": "engine", **vars(module)}
    return repr(eval(expression, namespace)).replace(hex(id(module)), "")


def described(module: Any, path: str) -> dict[str, Any]:
    """What tools read off a callable, as the module's users see it."""
    try:
        found = eval(path.replace(".fget", "").replace(".fset", "").replace(".fdel", ""), vars(module))
    except AttributeError:
        return {}
    facts: dict[str, Any] = {
        name: getattr(found, name, "absent")
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "__isabstractmethod__")
    }
    annotations = getattr(found, "__annotations__", None)
    facts["annotations"] = dict(annotations) if isinstance(annotations, dict) else annotations
    facts["defaults"] = getattr(found, "__defaults__", None), getattr(found, "__kwdefaults__", None)
    try:
        facts["signature"] = inspect.signature(found)
    except (ValueError, TypeError):
        facts["signature"] = None
    for question in (
        inspect.isfunction, inspect.ismethod, inspect.iscoroutinefunction, inspect.isgeneratorfunction,
        inspect.isasyncgenfunction, inspect.isbuiltin, inspect.isdatadescriptor, inspect.isclass, callable,
        inspect.isabstract,
    ):  # fmt: skip
        facts[question.__name__] = question(found)
    *owners, name = path.replace(".fget", "").replace(".fset", "").replace(".fdel", "").split(".")
    raw = inspect.getattr_static(eval(".".join(owners), vars(module)) if owners else module, name)
    if path != "Base.of_meta":  # comes from the metaclass, and stands in the class as a classmethod
        facts["isinstance"] = [kind for kind in KINDS if isinstance(raw, kind)]
    return facts


KINDS: tuple[type, ...] = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, classmethod, staticmethod, property,
    functools.cached_property, functools.partial, functools.partialmethod, functools.singledispatchmethod,
    type(functools.lru_cache(lambda: 0)),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
def test_hooked_and_bare_are_the_same_but_for_the_hook(engine: Any, case: Case) -> None:
    raw_path = case.path.removesuffix(".fget").removesuffix(".fset").removesuffix(".fdel")
    before = stored(engine, raw_path)
    bare_facts = described(engine, case.path)
    watch = Watch()
    around_seen: list[Any] = []

    def look(original: Any, *args: Any, **kwargs: Any) -> Any:
        around_seen.append((args, kwargs))
        return original(*args, **kwargs)

    handle = aspects.weave(around(f"engine:{case.path}", look), watch.on(f"engine:{case.path}"))
    hooked = [outcome(engine, call) for call in case.calls]
    assert len(watch.entered) == len(watch.left) == len(around_seen) > 0
    assert all(error is None for _, error in watch.left)
    compare_arguments(engine, case, watch.entered)
    compare_arguments(engine, case, around_seen)
    assert described(engine, case.path) == bare_facts
    assert aspects.report().hooks[0].calls == len(watch.entered)

    handle.remove()
    assert stored(engine, raw_path) is before
    assert described(engine, case.path) == bare_facts
    count = len(watch.entered)
    for cache in ("cached", "cached_plain"):
        getattr(engine, cache).cache_clear()
    assert [outcome(engine, call) for call in case.calls] == hooked
    assert len(watch.entered) == count


def compare_arguments(engine: Any, case: Case, seen: list[Any]) -> None:
    for expected_text, (args, kwargs) in zip(case.seen, seen):
        namespace = {**vars(engine), "self": args[0] if args else None}
        assert (args, kwargs) == eval(expected_text, namespace)


@pytest.mark.parametrize(
    "path",
    [
        case.path
        for case in CASES
        if "." not in case.path and case.path not in ("lambda_", "closure", "partial")
    ],
)
def test_what_is_found_by_name_is_pickled_by_name(engine: Any, path: str) -> None:
    bare = getattr(engine, path)
    try:
        pickle.dumps(bare)
    except (pickle.PicklingError, AttributeError):
        pytest.skip("cannot be pickled when bare either")
    with aspects.woven(around(f"engine:{path}")):
        woven = getattr(engine, path)
        assert woven is not bare
        again = pickle.loads(pickle.dumps(woven))
        assert again is woven or type(again) is type(bare)
        for copied in (copy.copy, copy.deepcopy):
            assert copied(woven) is woven if copied(bare) is bare else type(copied(woven)) is type(bare)


def test_bound_methods_and_instances_of_hooked_classes_are_pickled_and_copied(engine: Any) -> None:
    with aspects.woven(around("engine:Base.method"), around("engine:Base.from_class")):
        made = engine.Base(4)
        assert pickle.loads(pickle.dumps(made)).method(1) == ("method", 4, 1, 1)
        assert pickle.loads(pickle.dumps(made.method))(1) == ("method", 4, 1, 1)
        assert pickle.loads(pickle.dumps(engine.Base.from_class))(2) == ("Base", 2)
        assert pickle.loads(pickle.dumps(engine.Base.method)) is engine.Base.method
        assert copy.deepcopy(made).method(1) == copy.copy(made).method(1) == ("method", 4, 1, 1)


def test_an_instance_keeps_its_state_through_pickle_and_copy(engine: Any) -> None:
    engine.instance.state = "changed"
    with aspects.woven(around("engine:instance")):
        assert pickle.loads(pickle.dumps(engine.instance)).state == "changed"
        assert copy.copy(engine.instance).state == copy.deepcopy(engine.instance).state == "changed"
        engine.instance.state = "again"
    assert engine.instance.state == "again"


# -- kinds with an interface of their own -----------------------------------------------------------------


def test_lru_cache_keeps_its_interface(engine: Any) -> None:
    watch = Watch()
    with aspects.woven(watch.on("engine:cached")):
        engine.cached(1)
        engine.cached(1)
        assert engine.cached.cache_info().hits == 1
        assert engine.cached.cache_parameters() == {"maxsize": 4, "typed": False}
        assert engine.cached.__wrapped__(3) == ["cached", 3]
        engine.cached.cache_clear()
        assert engine.cached.cache_info().currsize == 0
    assert len(watch.entered) == 2


def test_singledispatch_keeps_registering_and_dispatching(engine: Any) -> None:
    with aspects.woven(around("engine:dispatched", lambda o, *a: ("hooked", o(*a)))):
        engine.dispatched.register(str, lambda x: ("str", x))
        assert engine.dispatched("x") == ("hooked", ("str", "x"))
        assert engine.dispatched.dispatch(str)("y") == ("str", "y")
        assert int in engine.dispatched.registry
    assert engine.dispatched("x") == ("str", "x")


def test_an_implementation_of_a_singledispatch_is_reached_through_its_registry(engine: Any) -> None:
    engine.of_int = engine.dispatched.registry[int]
    with aspects.woven(around("engine:of_int", lambda o, *a: ("hooked", o(*a)))):
        assert engine.dispatched(1) == ("hooked", ("int", 1))
    assert engine.dispatched(1) == ("int", 1)


def test_generators_take_send_throw_and_close(engine: Any) -> None:
    exec(
        "def talk():\n"
        "    log.append('start')\n"
        "    try:\n"
        "        got = yield 1\n"
        "        log.append(got)\n"
        "        try: yield 2\n"
        "        except KeyError as error: log.append(repr(error))\n"
        "        yield 3\n"
        "        return 'end'\n"
        "    finally: log.append('finally')\n"
        "log = []\n",
        vars(engine),
    )

    def drive() -> list[Any]:
        engine.log.clear()
        talk = engine.talk()
        steps = [inspect.isgenerator(talk), next(talk), talk.send("sent"), talk.throw(KeyError("thrown"))]
        with pytest.raises(StopIteration) as stop:
            next(talk)
        closed = engine.talk()
        next(closed)
        closed.close()
        raised = engine.talk()
        next(raised)
        with pytest.raises(ZeroDivisionError):
            raised.throw(ZeroDivisionError())
        never = engine.talk()
        never.close()
        return [*steps, stop.value.value, *engine.log]

    bare = drive()
    watch = Watch()
    with aspects.woven(watch.on("engine:talk"), around("engine:talk")):
        assert drive() == bare
    assert len(watch.entered) == 3  # the one that was never started never ran
    assert watch.left[0] == ("end", None)
    assert [type(error) for _, error in watch.left[1:]] == [GeneratorExit, ZeroDivisionError]
    assert drive() == bare


def test_async_generators_take_asend_athrow_and_aclose(engine: Any) -> None:
    exec(
        "async def talk():\n"
        "    try:\n"
        "        got = yield 1\n"
        "        log.append(got)\n"
        "        try: yield 2\n"
        "        except KeyError as error: log.append(repr(error))\n"
        "        yield 3\n"
        "    finally:\n"
        "        await asyncio.sleep(0)\n"
        "        log.append('finally')\n"
        "log = []\n",
        vars(engine),
    )

    async def drive() -> list[Any]:
        engine.log.clear()
        talk = engine.talk()
        steps = [inspect.isasyncgen(talk), await talk.__anext__(), await talk.asend("sent")]
        steps.append(await talk.athrow(KeyError("thrown")))
        with pytest.raises(StopAsyncIteration):
            await talk.__anext__()
        closed = engine.talk()
        await closed.__anext__()
        await closed.aclose()
        raised = engine.talk()
        await raised.__anext__()
        with pytest.raises(ZeroDivisionError):
            await raised.athrow(ZeroDivisionError())
        return [*steps, *engine.log]

    bare = asyncio.run(drive())
    watch = Watch()
    with aspects.woven(watch.on("engine:talk"), around("engine:talk")):
        assert asyncio.run(drive()) == bare
    assert [type(error) for _, error in watch.left] == [type(None), GeneratorExit, ZeroDivisionError]
    assert asyncio.run(drive()) == bare


def test_an_abandoned_async_generator_is_closed_by_the_loop(engine: Any) -> None:
    watch = Watch()

    async def abandon() -> None:
        async for _ in engine.agen(3):
            break
        for _ in range(5):
            await asyncio.sleep(0)

    with aspects.woven(watch.on("engine:agen"), around("engine:agen")):
        asyncio.run(abandon())
    assert [type(error) for _, error in watch.left] == [GeneratorExit]


def test_a_module_may_have_names_of_builtins_of_its_own(engine: Any) -> None:
    """Generated functions run in the namespace of their target."""
    engine.Exception = engine.BaseException = engine.StopAsyncIteration = engine.GeneratorExit = int
    watch = Watch()

    def fail(*_: Any) -> None:
        raise ValueError

    watch.enter = fail  # type: ignore[assignment]
    with aspects.woven(watch.on("engine:function"), watch.on("engine:agen"), around("engine:agen")):
        assert engine.function(1) == ("function", 1, 2, 3)
        with pytest.raises(TypeError):
            engine.function()
        assert engine.drain(engine.agen(2)) == [0, 1]


# -- classes -----------------------------------------------------------------------------------------------


def hooked_method(text: str) -> Any:
    return lambda original, *args, **kwargs: (text, original(*args, **kwargs))


@pytest.mark.parametrize("base_first", [True, False], ids=["Base removed first", "Plain removed first"])
@pytest.mark.parametrize("plain_first", [True, False], ids=["Plain hooked first", "Base hooked first"])
@pytest.mark.parametrize("name", ["method", "from_class", "prop", "static"])
def test_hooks_on_a_base_are_seen_through_the_shadow(
    engine: Any, name: str, plain_first: bool, base_first: bool
) -> None:
    raw = vars(engine.Base)[name]

    def call(cls: Any) -> Any:
        found = getattr(cls(0), name)
        return found(1) if callable(found) else found

    bare, bare_plain = call(engine.Base), call(engine.Plain)
    advices = [
        around(f"engine:Plain.{name}", hooked_method("plain")),
        around(f"engine:Base.{name}", hooked_method("base")),
    ]
    handles: dict[str, aspects.Handle] = {}
    for which in advices if plain_first else reversed(advices):
        handles[str(which.target)] = aspects.weave(which)
    assert call(engine.Plain) == ("plain", ("base", bare_plain))
    assert call(engine.Base) == ("base", bare)
    order = [f"engine:Base.{name}", f"engine:Plain.{name}"]
    first, second = order if base_first else reversed(order)
    handles[first].remove()
    left = "plain" if base_first else "base"
    assert call(engine.Plain) == (left, bare_plain)
    assert call(engine.Base) == (bare if base_first else ("base", bare))
    handles[second].remove()
    assert vars(engine.Base)[name] is raw
    assert name not in vars(engine.Plain)


def test_shadows_of_one_base_do_not_disturb_each_other() -> None:
    source = """
    class Base:
        def m(self): return "m"
    class Middle(Base): pass
    class Lower(Middle): pass
    class Other(Base): pass
    """
    with module_of(source) as engine:
        lower = aspects.weave(around("engine:Lower.m", hooked_method("lower")))
        other = aspects.weave(around("engine:Other.m", hooked_method("other")))
        middle = aspects.weave(around("engine:Middle.m", hooked_method("middle")))
        assert engine.Lower().m() == ("lower", ("middle", "m"))
        assert engine.Other().m() == ("other", "m")
        middle.remove()
        assert engine.Lower().m() == ("lower", "m")
        lower.remove()
        other.remove()
        assert [vars(cls).get("m") for cls in (engine.Middle, engine.Lower, engine.Other)] == [None] * 3


DIAMOND = """
import functools
class Base:
    def __new__(cls, *args): return object.__new__(cls)
    def __init__(self, *args): self.made = ["Base", *args]
    def m(self, x=1): return ["Base", x]
    async def co(self): return ["Base"]
    @classmethod
    def c(cls): return ["Base", cls.__name__]
    @property
    def p(self): return ["Base"]
    @p.setter
    def p(self, value): self.value = ["Base", value]
    @functools.lru_cache(maxsize=None)
    def cached(self): return ["Base"]
class Sub(Base): pass
class Other(Base):
    def __new__(cls, *args):
        self = super().__new__(cls, *args)
        self.new = "Other"
        return self
    def __init__(self, *args): super().__init__("Other", *args)
    def m(self, x=1): return ["Other", *super().m(x)]
    async def co(self): return ["Other", *await super().co()]
    @classmethod
    def c(cls): return ["Other", *super().c()]
    @property
    def p(self): return ["Other", *super().p]
    @p.setter
    def p(self, value): self.value = ["Other", value]
    @functools.lru_cache(maxsize=None)
    def cached(self): return ["Other"]
class Diamond(Sub, Other): pass
class Below(Sub): pass
"""


@pytest.mark.parametrize("name", ["m", "co", "c", "p", "p.fset", "cached", "__init__", "__new__"])
def test_a_shadow_stands_where_its_class_does_in_the_order_of_bases(name: str) -> None:
    with module_of(DIAMOND) as engine:
        calls: dict[str, Callable[[Any], Any]] = {
            "m": lambda cls: cls().m(2),
            "co": lambda cls: asyncio.run(cls().co()),
            "c": lambda cls: cls.c(),
            "p": lambda cls: cls().p,
            "p.fset": lambda cls: [cls.p.__set__(made := cls(), 3), made.value],
            "cached": lambda cls: cls().cached(),
            "__init__": lambda cls: cls("x").made,
            "__new__": lambda cls: vars(cls("x")),
        }
        classes = [engine.Sub, engine.Below, engine.Other, engine.Base, engine.Diamond]
        bare = [calls[name](cls) for cls in classes]
        watch = Watch()
        with aspects.woven(around(f"engine:Sub.{name}"), watch.on(f"engine:Sub.{name}")):
            assert [calls[name](cls) for cls in classes] == bare
            assert len(watch.entered) == 3  # through Sub, Below and Diamond
            with aspects.woven(around(f"engine:Base.{name}"), around(f"engine:Other.{name}")):
                assert [calls[name](cls) for cls in classes] == bare
        assert [calls[name](cls) for cls in classes] == bare


def test_bound_methods_of_an_inherited_method_follow_for_that_class_only(engine: Any) -> None:
    plain, base = engine.Plain(0), engine.Base(0)
    plain.cached, base.cached = plain.method, base.method
    with aspects.woven(around("engine:Plain.method", hooked_method("plain"))):
        assert plain.cached(1) == ("plain", ("method", 0, 1, 1))
        assert base.cached(1) == ("method", 0, 1, 1)
    assert plain.cached(1) == ("method", 0, 1, 1)


def test_the_three_parts_of_a_property_come_and_go_in_any_order(engine: Any) -> None:
    import itertools

    raw = vars(engine.Base)["prop"]
    for order in itertools.permutations(["", ".fset", ".fdel"]):
        watches = {part: Watch() for part in order}
        handles = {part: aspects.weave(watches[part].on(f"engine:Base.prop{part}")) for part in order}
        made = engine.Base(1)
        for part in order:
            made.prop = 5
            assert made.prop == ("prop", 5)
            del made.prop
            assert made.x == "deleted"
            handles[part].disable()
        counts = {part: len(watch.entered) for part, watch in watches.items()}
        assert counts == {part: index + 1 for index, part in enumerate(order)}
        for part in order:
            handles[part].enable()
        assert isinstance(vars(engine.Base)["prop"], property)
        for part in order:
            handles[part].remove()
        assert vars(engine.Base)["prop"] is raw


def test_fget_is_another_name_of_the_property(engine: Any) -> None:
    with aspects.woven(
        around("engine:Base.prop", hooked_method("one")),
        around("engine:Base.prop.fget", hooked_method("two")),
    ):
        assert engine.Base(1).prop == ("two", ("one", ("prop", 1)))
        assert [hook.places for hook in aspects.report().hooks] == [("engine:Base.prop",)] * 2


def test_a_read_only_property_has_no_setter_to_hook(engine: Any) -> None:
    exec("class R:\n    @property\n    def p(self): return 1", vars(engine))
    with pytest.raises(
        aspects.AspectsError, match=r"engine:R\.p\.fset: the property has no fset; it has fget"
    ):
        aspects.weave(around("engine:R.p.fset"))


def test_a_method_of_one_instance(engine: Any) -> None:
    engine.one, other = engine.Base(1), engine.Base(2)
    watch = Watch()
    with aspects.woven(watch.on("engine:one.method"), watch.on("engine:one.from_class")):
        assert engine.one.method(5) == ("method", 1, 5, 1)
        assert other.method(5) == ("method", 2, 5, 1)
        assert engine.one.from_class() == ("Base", 1)
        assert watch.entered == [((engine.one, 5), {}), ((engine.Base,), {})]
        assert copy.deepcopy(engine.one).x == 1
        assert pickle.loads(pickle.dumps(engine.one)).method(5) == ("method", 1, 5, 1)
    assert vars(engine.one) == {"x": 1}
    engine.one.function = lambda x: x  # of the instance itself: no self
    with aspects.woven(watch.on("engine:one.function")):
        engine.one.function(3)
    assert watch.entered[-1] == ((3,), {})


@pytest.mark.parametrize("name", ["prop", "lazy"])
def test_a_property_cannot_be_hooked_on_one_instance(engine: Any, name: str) -> None:
    engine.one = engine.Base(1)
    with pytest.raises(aspects.AspectsError, match=f"hook 'engine:Base.{name}'"):
        aspects.weave(around(f"engine:one.{name}"))
    assert vars(engine.one) == {"x": 1}


def test_what_cannot_be_written_is_named(engine: Any) -> None:
    engine.slotted = engine.Slotted(1)
    engine.integer = 5
    for target, fault in {
        "engine:slotted.method": "cannot be hooked: .*read-only",
        "engine:integer.bit_length": "cannot be hooked",
        "engine:Base.class_value": "is str 'base', which cannot be called",
        "engine:integer": "is int 5, which cannot be called",
        "engine:Slotted.x": "member_descriptor",
        "engine:OnlyInit.__new__": r"hook 'engine:OnlyInit.__init__'",
        "builtins:list.append": "cannot be hooked",
    }.items():
        with pytest.raises(aspects.AspectsError, match=fault):
            aspects.weave(around(target))
    assert engine.slotted.method(2) == (1, 2)
    assert engine.slotted.x == 1
    assert aspects.report().hooks == ()


def test_a_class_still_ignores_arguments_that_are_for_new(engine: Any) -> None:
    exec("class Empty: pass", vars(engine))
    with aspects.woven(around("engine:New.__init__"), around("engine:Empty.__init__")):
        assert engine.New(1).made == ("New", 1, 2)
        with pytest.raises(TypeError):
            engine.Empty(1)
        engine.Empty()
    assert engine.New(3).made == ("New", 3, 2)


def test_abstract_stays_abstract(engine: Any) -> None:
    with aspects.woven(around("engine:Abstract.must"), around("engine:Abstract.must_prop")):
        with pytest.raises(TypeError, match="abstract"):
            engine.Abstract()
        assert inspect.isabstract(engine.Abstract)
        with pytest.raises(TypeError, match="abstract"):
            type("Half", (engine.Abstract,), {"must": lambda self: 1})()
        abc.update_abstractmethods(engine.Abstract)
        assert engine.Abstract.__abstractmethods__ == {"must", "must_prop"}


def test_dataclasses_stay_what_they_are(engine: Any) -> None:
    with aspects.woven(around("engine:Data.__init__"), around("engine:Data.total")):
        assert dataclasses.asdict(engine.Data(1, [2])) == {"x": 1, "tags": [2]}
        assert dataclasses.replace(engine.Data(1), x=5).x == 5
        assert [entry.name for entry in dataclasses.fields(engine.Data)] == ["x", "tags"]
        assert typing.get_type_hints(engine.Data.__init__, vars(engine))["x"] is int


@pytest.mark.parametrize("name", ["Mute.__call__", "Mute.__len__"])
def test_special_methods_of_a_metaclass_are_not_those_that_a_class_names(engine: Any, name: str) -> None:
    exec("class Mute(metaclass=Meta): pass", vars(engine))
    with aspects.woven(around(f"engine:{name}")) as handle:
        assert handle.states == (aspects.State.MISSING,)


def test_attributes_set_on_a_hooked_function_stay(engine: Any) -> None:
    engine.function.counter = 1
    engine.function.gone = 1
    original = engine.function
    handle = aspects.weave(around("engine:function"))
    assert engine.function.counter == 1
    engine.function.counter += 1
    del engine.function.gone
    handle.disable()
    assert engine.function is original
    assert engine.function.counter == 2
    engine.function.counter += 1
    handle.enable()
    assert engine.function.counter == 3
    handle.remove()
    assert vars(original) == {"counter": 3}


LAZY = """
asked = []
def __getattr__(name):
    asked.append(name)
    if name in ("f", "C"):
        import implementation
        return getattr(implementation, name)
    raise AttributeError(name)
"""
IMPLEMENTATION = "def f(x): return ('f', x)\nclass C:\n    def m(self): return 'm'\n"


def test_attributes_that_a_module_makes_when_it_is_asked() -> None:
    with module_of(LAZY, "front") as front, module_of(IMPLEMENTATION, "implementation") as behind:
        function = vars(front)["__getattr__"]
        other = behind.f
        handle = aspects.weave(
            around("front:f", hooked_method("f")), around("front:C.m", hooked_method("m")), around("front:no")
        )
        assert front.asked == []
        assert handle.states == (aspects.State.PENDING,) * 3
        assert "creates f on first access" in aspects.report().hooks[0].detail
        assert inspect.signature(front.__getattr__) == inspect.signature(function)
        assert front.f(1) == front.f(1) == ("f", ("f", 1))
        assert front.C().m() == ("m", "m")
        assert behind.f is front.f
        with pytest.raises(AttributeError, match="no"):
            _ = front.no
        assert front.asked == ["f", "C", "no"]
        assert [state.value for state in handle.states] == ["woven", "woven", "pending"]
        handle.remove()
        assert "f" not in vars(front)
        assert vars(front)["__getattr__"] is function
        assert front.f is behind.f is other


def test_other_peoples_proxies_go_on_binding() -> None:
    source = """
    import wrapt
    @wrapt.decorator
    def note(wrapped, instance, args, kwargs):
        return (getattr(instance, "name", instance), wrapped(*args, **kwargs))
    class C:
        name = "C"
        @note
        def method(self, x): return x
        @note
        @classmethod
        def from_class(cls, x): return (cls.__name__, x)
        @classmethod
        @note
        def inner(cls, x): return x
        @note
        @staticmethod
        def static(x): return x
        @staticmethod
        @note
        def static_inner(x): return x
        @property
        @note
        def prop(self): return 1
    @note
    def function(x): return x
    @wrapt.decorator
    async def doubled(wrapped, instance, args, kwargs): return 2 * await wrapped(*args, **kwargs)
    @doubled
    async def coroutine(x): return x
    """
    with module_of(source) as engine:
        calls: list[Any] = [
            lambda: engine.C().method(1),
            lambda: engine.C.method(engine.C(), 1),
            lambda: engine.C.from_class(1),
            lambda: engine.C().from_class(1),
            lambda: engine.C.inner(1),
            lambda: engine.C.static(1),
            lambda: engine.C().static(1),
            lambda: engine.C().static_inner(1),
            lambda: engine.C().prop,
            lambda: engine.function(1),
        ]
        bare = [call() for call in calls]
        raws = dict(vars(engine.C))
        watch = Watch()
        names = ["method", "from_class", "inner", "static", "static_inner", "prop"]
        targets = [*(f"engine:C.{name}" for name in names), "engine:function"]
        handle = aspects.weave(*(watch.on(target) for target in targets), *map(around, targets))
        assert [call() for call in calls] == bare
        assert [error for _, error in watch.left] == [None] * len(calls)
        handle.remove()
        assert {name: vars(engine.C)[name] for name in names} == {name: raws[name] for name in names}
        assert all(vars(engine.C)[name] is raws[name] for name in names)
        with aspects.woven(watch.on("engine:coroutine")):
            assert inspect.iscoroutinefunction(engine.coroutine)
            assert asyncio.run(engine.coroutine(4)) == 8
        assert watch.left[-1] == (8, None)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is from 3.12")
def test_type_parameters_stay() -> None:
    with module_of("def first[T](items: list[T]) -> T: return items[0]") as engine:
        bare = engine.first.__type_params__
        with aspects.woven(around("engine:first")):
            assert engine.first.__type_params__ is bare
            assert engine.first([5]) == 5


def test_source_and_stack_read_as_before(engine: Any) -> None:
    with aspects.woven(around("engine:function")):
        assert inspect.unwrap(engine.function)(1) == ("function", 1, 2, 3)
        assert engine.function.__code__.co_name == "function"
        with pytest.raises(TypeError, match=r"function\(\) missing 1 required positional argument: 'a'"):
            engine.function()
