"""What other code changes after hooks were woven: hooks apply to it, and it stays when they are removed."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import sys
import types
import unittest.mock
import weakref
from pathlib import Path
from typing import Any

import pytest
import wrapt

import sgl_aspects as aspects
from sgl_aspects import HookType, State
from tests.support.woven_modules import Watch, advice, around, fixture_of, hand_on, hooked, module_of

SOURCE = """
import functools
def f(x=1): return ('f', x)
def closing(y):
    def inner(x): return (x, y)
    return inner
closed = closing(2)
def counted():
    yield 1
class Base:
    made = []
    def __init_subclass__(cls, **options): Base.made.append((cls.__name__, options))
    def m(self, x=1): return ('m', x)
    @classmethod
    def c(cls): return ('c', cls.__name__)
    @staticmethod
    def s(x): return ('s', x)
    @property
    def p(self): return 'p'
    @p.setter
    def p(self, value): self.value = value
    @functools.cached_property
    def lazy(self): return 'lazy'
class Sub(Base): pass
class Below(Sub): pass
class Bare:
    def m(self): return 'm'
"""


engine = fixture_of(SOURCE)


# -- a family of classes, and hooks on the methods that make it known ------------------------------------


@pytest.mark.parametrize("owner", ["Base", "Bare"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_family_and_hooks_on_its_init_subclass_are_removed_in_any_order(
    engine: Any, owner: str, order: tuple[int, ...]
) -> None:
    cls = getattr(engine, owner)
    before, seen = dict(vars(cls)), []

    def note(original: Any, *args: Any, **options: Any) -> Any:
        seen.append(args)
        return original(*args, **options)

    handles = [
        aspects.weave(around(f"engine:{owner}.__init_subclass__", note)),
        aspects.weave(around(f"engine:{owner}+.m", hooked)),
        aspects.weave(around(f"engine:{owner}.__init_subclass__")),
    ]
    new = type("New", (cls,), {"m": lambda self: "new"})
    assert new().m() == ("hooked", "new")
    assert seen == [(new,)]
    for index in order:
        handles[index].remove()
        made = type("Later", (cls,), {"m": lambda self: "later"})
        assert made().m() == ("later" if handles[1].states == (State.REMOVED,) else ("hooked", "later"))
    assert dict(vars(cls)) == before
    assert new().m() == "new"


@pytest.mark.parametrize("family_first", [True, False])
def test_a_patch_over_init_subclass_stays_and_ours_goes(engine: Any, family_first: bool) -> None:
    handle = aspects.weave(around("engine:Base+.m", hooked))
    ours = vars(engine.Base)["__init_subclass__"]

    def patch(cls: type, /, **options: Any) -> None:
        ours.__get__(None, cls)(**options)

    engine.Base.__init_subclass__ = classmethod(patch)
    assert type("New", (engine.Base,), {"m": lambda self: "new"})().m() == ("hooked", "new")
    handle.remove()
    assert type("Later", (engine.Base,), {"m": lambda self: "later"})().m() == "later"
    assert vars(engine.Base)["__init_subclass__"].__func__ is patch


def test_a_lazy_attribute_and_a_hook_on_the_function_that_makes_it() -> None:
    source = (
        "def __getattr__(name):\n    if name == 'f': return lambda: 'f'\n    raise AttributeError(name)\n"
    )
    for order in itertools.permutations(range(2)):
        with module_of(source, "lazily") as module:
            before = dict(vars(module))
            handles = [aspects.weave(around("lazily:f", hooked)), aspects.weave(around("lazily:__getattr__"))]
            assert module.f() == ("hooked", "f")
            for index in order:
                handles[index].remove()
            assert module.f() == "f"
            assert before.items() <= vars(module).items()


def test_a_patch_is_not_hooked_again_when_a_lazy_attribute_is_made() -> None:
    source = """
    def f(): return 'f'
    def __getattr__(name):
        if name != 'late': raise AttributeError(name)
        return lambda: 'late'
    """
    with (
        module_of(source, "lazily") as module,
        aspects.woven(around("lazily:f", hooked), around("lazily:late", hooked)),
    ):
        ours = module.f
        module.f = lambda: ("patched", ours())
        assert module.late() == ("hooked", "late")
        assert module.f() == ("patched", ("hooked", "f"))


def test_a_family_whose_base_is_made_on_first_access() -> None:
    source = """
    def __getattr__(name):
        if name != 'Base': raise AttributeError(name)
        globals()['Base'] = type('Base', (), {'m': lambda self: 'm', '__module__': __name__})
        return Base
    """
    with module_of(source, "lazily") as module:
        with aspects.woven(around("lazily:Base+.m", hooked)):
            assert module.Base().m() == ("hooked", "m")
            sub = type("Sub", (module.Base,), {"m": lambda self: "sub"})
            assert sub().m() == ("hooked", "sub")
        assert (module.Base().m(), sub().m()) == ("m", "sub")


def test_methods_that_a_decorator_gives_to_a_new_subclass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs after the class was made; the hook comes when the module has loaded."""
    (tmp_path / "decorated.py").write_text(
        "import dataclasses, engine\n@dataclasses.dataclass\nclass Sub(engine.Base):\n    x: int\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    with module_of("class Base:\n    def __init__(self): pass\n"):
        hook = advice("engine:Base+.__init__", HookType.BEFORE, lambda self, *args: seen.append(args))
        with aspects.woven(hook):
            assert importlib.import_module("decorated").Sub(3).x == 3
            del sys.modules["decorated"]
    assert seen == [(3,)]


# -- inherited methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", ["Sub", "Below"])
def test_a_hook_on_an_inherited_method_calls_what_the_base_has_now(engine: Any, cls: str) -> None:
    made = getattr(engine, cls)()
    with aspects.woven(*(around(f"engine:Sub.{name}", hooked) for name in ("m", "c"))):
        assert made.m(2) == ("hooked", ("m", 2))
        with unittest.mock.patch.object(engine.Base, "m", lambda self, x=1: ("patched", x)):
            assert made.m(2) == ("hooked", ("patched", 2))
        with unittest.mock.patch.object(engine.Base, "m", return_value="a mock"):
            assert made.m(2) == ("hooked", "a mock")
        with unittest.mock.patch.object(engine.Base, "c", classmethod(lambda cls: cls)):
            assert getattr(engine, cls).c() == ("hooked", getattr(engine, cls))
        assert made.m() == ("hooked", ("m", 1))
        # Called with an object that is not of the class, as Python allows.
        assert engine.Sub.m(engine.Bare(), 3) == ("hooked", ("m", 3))
    assert "m" not in vars(engine.Sub)


@pytest.mark.parametrize("first", ["Upper", "Lower"])
@pytest.mark.parametrize(
    ("base", "name", "use"),
    [
        ("Exception", "__new__", lambda cls: cls(1).args),
        ("Exception", "__init__", lambda cls: cls(1).args),
        ("list", "__len__", lambda cls: len(cls())),
        ("list", "append", lambda cls: cls().append(1)),
        ("object", "__init__", lambda cls: type(cls()).__name__),
    ],
)
def test_shadows_of_a_method_in_c_are_run_by_those_below(base: str, name: str, use: Any, first: str) -> None:
    with module_of(f"class Upper({base}): pass\nclass Lower(Upper): pass") as engine:
        bare, seen = use(engine.Lower), Watch()
        last = {"Upper": "Lower", "Lower": "Upper"}[first]
        with (
            aspects.woven(seen.on(f"engine:{first}.{name}")),
            aspects.woven(seen.on(f"engine:{last}.{name}")),
        ):
            assert use(engine.Lower) == bare
        assert len(seen.entered) == 2


def test_a_hook_on_a_method_of_one_instance_calls_what_its_class_has_now(engine: Any) -> None:
    made = engine.made = engine.Base()
    with aspects.woven(around("engine:made.m", hooked)):
        assert made.m(2) == ("hooked", ("m", 2))
        with unittest.mock.patch.object(engine.Base, "m", lambda self, x=1: (self, x)):
            assert made.m(2) == ("hooked", (made, 2))
        with aspects.woven(around("engine:Base.m", hooked)):
            assert made.m(2) == ("hooked", ("hooked", ("m", 2)))
        assert made.m(2) == ("hooked", ("m", 2))
    assert vars(made) == {}


# -- the code of a hooked function -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["f", "closed", "counted"])
def test_new_code_of_a_hooked_function_is_left_alone_until_its_hooks_go(engine: Any, name: str) -> None:
    original = getattr(engine, name)

    def give_new_code(function: Any) -> None:
        names = function.__code__.co_freevars
        source = {
            "f": "def f(x=1): return ('new', x)",
            "closed": "def outer(y):\n    def f(x): return ('new', x, y)\n    return f",
            "counted": "def f():\n    yield 'new'",
        }[name]
        made: dict[str, Any] = {}
        exec(source, made)
        new = made["f"] if "f" in made else made["outer"](0)
        assert new.__code__.co_freevars == names
        function.__code__ = new.__code__

    def result() -> Any:
        found = getattr(engine, name)
        return list(found()) if name == "counted" else found(7)

    bare = result()
    first = aspects.weave(around(f"engine:{name}", hand_on))
    give_new_code(getattr(engine, name))
    expected = {"f": ("new", 7), "closed": ("new", 7, 2), "counted": ["new"]}[name]
    assert result() == expected
    assert aspects.report().displaced == (f"engine:{name}",)
    seen: list[Any] = []
    second = aspects.weave(advice(f"engine:{name}", HookType.BEFORE, lambda *args: seen.append(args)))
    assert aspects.report().displaced == (f"engine:{name}",)
    assert result() == expected
    assert seen == []
    second.remove()
    first.remove()
    assert getattr(engine, name) is original
    assert result() == bare


def test_code_that_was_made_from_that_of_a_hooked_function(engine: Any) -> None:
    """As line_profiler does: the same code with other bytes."""
    original, code = engine.f, engine.f.__code__
    handle = aspects.weave(around("engine:f", hooked))
    engine.f.__code__ = engine.f.__code__.replace(co_name="marked")
    assert engine.f() == ("hooked", ("f", 1))
    handle.remove()
    assert engine.f is original
    assert original.__code__ is code
    assert engine.f() == ("f", 1)


# -- classmethods around callables that do not bind ------------------------------------------------------


@pytest.mark.parametrize("callable_", [type, functools.partial(lambda x, cls: (x, cls), 5), len, str])
def test_a_classmethod_around_any_callable(engine: Any, callable_: Any) -> None:
    class Meta(type):
        def __len__(cls) -> int:
            return 3

    class Owner(metaclass=Meta):
        k: Any = classmethod(callable_)

    engine.Owner, raw = Owner, vars(Owner)["k"]
    expected = (Owner.k(), Owner().k())
    seen: list[Any] = []

    def look(original: Any, *args: Any) -> Any:
        seen.append(args)
        return original(*args)

    with aspects.woven(around("engine:Owner.k", look)):
        assert (Owner.k(), Owner().k()) == expected
    assert seen == [(Owner,), (Owner,)]
    assert vars(Owner)["k"] is raw


# -- wrappers that their owners remove, and weak references ----------------------------------------------


def marked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return ("patched", wrapped(*args, **kwargs))


def test_a_wrapper_below_a_hook_may_be_removed_by_its_owner(engine: Any) -> None:
    original = engine.f
    wrapper = wrapt.wrap_object(engine, "f", wrapt.FunctionWrapper, (marked,))
    handle = aspects.weave(around("engine:f", hooked))
    assert engine.f() == ("hooked", ("patched", ("f", 1)))
    wrapt.unwrap_object(engine, "f", wrapper)
    assert engine.f() == ("hooked", ("f", 1))
    handle.remove()
    assert engine.f is original


def test_a_patch_between_two_hooks_on_an_inherited_method_is_undone_before_them(engine: Any) -> None:
    def patch(self: Any) -> str:
        return "patched"

    first = aspects.weave(around("engine:Sub.m", hooked))
    with unittest.mock.patch.object(engine.Sub, "m", patch):
        second = aspects.weave(around("engine:Sub.m", hooked))
        assert engine.Sub().m() == ("hooked", "patched")
    assert engine.Sub().m() == ("hooked", ("m", 1))
    second.remove()
    first.remove()
    assert "m" not in vars(engine.Sub)


def test_a_hook_made_within_a_transient_wrapper_does_not_keep_it(engine: Any) -> None:
    original, handles = engine.f, []

    @wrapt.transient_function_wrapper("engine", "f")
    def transient(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return marked(wrapped, instance, args, kwargs)

    @transient
    def body() -> Any:
        handles.append(aspects.weave(around("engine:f", hooked)))
        return engine.f()

    assert body() == ("hooked", ("patched", ("f", 1)))
    assert engine.f() == ("hooked", ("f", 1))
    handles[0].remove()
    assert engine.f is original


def wrap_by_code(function: Any) -> Any:
    """Wrap as ddtrace does: a copy of the function has its code, and its own code calls the copy."""
    copy = types.FunctionType(
        function.__code__, function.__globals__, "copy", function.__defaults__, function.__closure__
    )
    names = {"copy": copy}
    function.__globals__["copy_of_function"] = copy
    exec("def calling(*args, **kwargs): return ('patched', copy_of_function(*args, **kwargs))", names)
    function.__code__ = names["calling"].__code__
    return copy


def test_code_that_calls_a_copy_of_the_hooked_function_never_calls_itself(engine: Any) -> None:
    original, body = engine.f, engine.f.__code__
    first = aspects.weave(around("engine:f", hooked))
    copy = wrap_by_code(engine.f)
    assert engine.f() == ("patched", ("hooked", ("f", 1)))
    second = aspects.weave(around("engine:f", hooked))
    assert engine.f() == ("patched", ("hooked", ("f", 1)))  # as it was when the copy was made
    assert aspects.report().displaced == ("engine:f",)
    second.remove()
    assert engine.f() == ("patched", ("hooked", ("f", 1)))
    engine.f.__code__ = copy.__code__  # its owner unwraps it
    assert engine.f() == ("hooked", ("f", 1))
    first.remove()
    assert engine.f is original
    assert (engine.f(2), engine.f.__code__) == (("f", 2), body)


def test_a_weak_reference_taken_while_hooked_lives_as_long_as_the_original(engine: Any) -> None:
    handle = aspects.weave(around("engine:f", hooked))
    reference = weakref.ref(engine.f)
    handle.remove()
    gc.collect()
    function = reference()
    assert function is not None
    assert function(3) == ("f", 3)
