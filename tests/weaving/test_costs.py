"""What a change of hooks costs: it is proportional to the change, not to everything that is woven."""

from __future__ import annotations

import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from tests.support.woven_modules import advice, around, module_of

SOURCE = """
import dataclasses, functools
def f(x): return x
@functools.lru_cache
def cached(x): return x
class C:
    def m(self): return 1
    @classmethod
    def made(cls): return cls()
    @staticmethod
    def static(): return 1
    @property
    def part(self): return 1
    @functools.cached_property
    def once(self): return 1
@dataclasses.dataclass(slots=True, frozen=True)
class MadeTwice:
    x: int
    def m(self): return 1
def __getattr__(name):
    if name != "later": raise AttributeError(name)
    return f
"""


def calls_of(change: Callable[[], object]) -> tuple[int, int]:
    """Run ``change``; return the number of function calls, and of searches of the heap."""
    counts = [0, 0]

    def count(frame: FrameType, event: str, called: Any) -> None:
        counts[0] += event in ("call", "c_call")
        counts[1] += event == "c_call" and called is gc.get_referrers

    sys.setprofile(count)
    try:
        change()
    finally:
        sys.setprofile(None)
    return counts[0], counts[1]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], object]]:
    """Write a package of many small modules; returns the function that imports one by its number."""
    home = tmp_path / "costly"
    home.mkdir()
    (home / "__init__.py").touch()
    for number in range(120):
        (home / f"m{number}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    importlib.import_module("costly")
    importlib.import_module("costly.m0")
    yield lambda number: importlib.import_module(f"costly.m{number}")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_import_costs_the_same_with_many_woven_places_as_with_few(
    package: Callable[[int], object],
) -> None:
    aspects.weave(around("costly.**:*"), around("costly.**:*.*"))
    for number in range(1, 5):
        package(number)
    few, _ = calls_of(lambda: package(5))
    for number in range(6, 110):
        package(number)
    many, _ = calls_of(lambda: package(110))
    assert len(aspects.report().hooks[0].places) + len(aspects.report().hooks[1].places) > 700
    assert many < few * 1.1


@pytest.mark.parametrize(
    "targets",
    [
        ["costly.**:*", "costly.**:*.*"],
        ["costly.m2:f"],
        ["costly.m2:C.m"],
        ["costly.m2:MadeTwice.m"],
        ["costly.m2:later.x", "costly.m2:later.y"],
    ],
)
def test_importing_what_only_its_own_module_refers_to_does_not_search_the_heap(
    package: Callable[[int], object], targets: list[str]
) -> None:
    aspects.weave(*map(around, targets))
    package(1)
    assert calls_of(lambda: package(2))[1] == 0


def test_modules_that_no_hook_names_are_imported_as_without_hooks(package: Callable[[int], object]) -> None:
    package(1)
    bare, _ = calls_of(lambda: package(2))
    with module_of("class Base:\n    def m(self): return 1\n"):
        aspects.weave(around("engine:Base+.m"), *(around(f"costly.**.*{name}:*") for name in ("x", "y", "z")))
        package(3)
        woven, _ = calls_of(lambda: package(4))
        aspects.HookRegistry.reset()
    assert woven < bare + 40, (bare, woven)


def test_weaving_and_removing_cost_the_same_with_many_hooks_as_with_few() -> None:
    source = "\n".join(f"def f{number}(): return {number}" for number in range(304))
    with module_of(source):
        handles = [aspects.weave(around(f"engine:f{number}")) for number in range(4)]
        seldom = [
            calls_of(lambda: handles.append(aspects.weave(around("engine:f4"))))[0],
            calls_of(handles[4].remove)[0],
        ]
        handles += [aspects.weave(around(f"engine:f{number}")) for number in range(5, 303)]
        often = [
            calls_of(lambda: handles.append(aspects.weave(around("engine:f303"))))[0],
            calls_of(handles[-1].remove)[0],
        ]
        for handle in handles:
            handle.remove()
    assert all(many < few + 40 for few, many in zip(seldom, often)), (seldom, often)


def test_weaving_a_function_costs_the_same_with_many_modules_as_with_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with module_of("def f(): pass"):
        aspects.weave(around("engine:f")).remove()
        few = calls_of(lambda: aspects.weave(around("engine:f")).remove())
        for number in range(200):
            monkeypatch.setitem(sys.modules, f"costly_{number}", ModuleType(f"costly_{number}"))
        many = calls_of(lambda: aspects.weave(around("engine:f")).remove())
    assert many == few


def test_a_new_subclass_costs_the_same_with_many_subclasses_as_with_few() -> None:
    with module_of("class Base:\n    def m(self): return 1\n") as engine:
        aspects.weave(advice("engine:Base+.m", HookType.AFTER, lambda result, self: result + 1))

        def derive() -> Any:
            return type("Derived", (engine.Base,), {"m": lambda self: 5, "__module__": "elsewhere"})

        kept = [derive() for _ in range(3)]
        few, _ = calls_of(derive)
        kept += [derive() for _ in range(200)]
        many, _ = calls_of(lambda: kept.append(derive()))
        assert [made().m() for made in kept] == [6] * len(kept)
        assert many < few * 1.1


DECORATED = """
import functools
def decorated(function):
    @functools.wraps(function)
    def wrapper(*args): return function(*args)
    return wrapper
@decorated
def f(): return 1
class A:
    @decorated
    def m(self): return 1
    @classmethod
    @decorated
    def c(cls): return 1
    @staticmethod
    @decorated
    def s(): return 1
    @property
    @decorated
    def p(self): return 1
    @functools.cached_property
    @decorated
    def lazy(self): return 1
"""


@pytest.mark.parametrize("path", ["f", "A.m", "A.c", "A.s", "A.p", "A.lazy"])
def test_one_other_reference_to_a_decorated_function_is_enough_for_a_pass(path: str) -> None:
    """Its `__wrapped__` while it is hooked is not itself, so that it has a reference less than others."""
    with module_of(DECORATED) as engine:
        owner: Any = engine.A if "." in path else engine
        name = path.rpartition(".")[2]
        holders: list[list[Any]] = [[vars(owner)[name]]]
        function = getattr(holders[0][0], "func", None) or getattr(holders[0][0], "__func__", None)
        if function is not None or name == "p":
            holders.append([function or holders[0][0].fget])
        before = [id(holder[0]) for holder in holders]  # and no further reference
        del function
        for _ in range(2):
            with aspects.woven(around(f"engine:{path}")):
                assert holders[0][0] is vars(owner)[name]
                assert not {id(holder[0]) for holder in holders} & set(before)
            assert [id(holder[0]) for holder in holders] == before


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("name", ["__signature__", "__wrapped__"])
def test_one_other_reference_to_a_function_with_such_attributes_of_its_own_is_enough(
    name: str, is_hooked: bool
) -> None:
    with module_of("def f(x): return x") as engine:
        holder = [engine.f]
        before = id(engine.f)
        if not is_hooked:
            setattr(engine.f, name, inspect.Signature())
        handle = aspects.weave(around("engine:f"))
        if is_hooked:
            setattr(engine.f, name, inspect.Signature())
        for change in (handle.disable, handle.enable, handle.remove):
            change()
            assert holder[0] is engine.f
        assert id(engine.f) == before
