"""Holders whose hash depends on a hooked function, and the hashes of a hooked function's own parts."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from tests.support.woven_modules import advice, around, hooked, module_of, no_hook_is_left

__all__ = ["no_hook_is_left"]


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


@pytest.fixture
def engine() -> Iterator[Any]:
    with module_of("def f(x=1): return ('f', x)") as module:
        yield module


@pytest.mark.parametrize("kind", [Key, Own])
@pytest.mark.parametrize("container", [dict, collections.OrderedDict, collections.defaultdict])
def test_a_key_is_found_before_and_after_removal(engine: Any, kind: Any, container: Any) -> None:
    own = kind(engine.f)
    table = container()
    table[own] = 1
    table["other"] = 2
    with aspects.woven(around("engine:f", hooked)):
        assert own.function(2) == ("hooked", ("f", 2))
        assert (table[kind(engine.f)], table[own]) == (1, 1)
        assert aspects.report().stale == ()
    assert (table[kind(engine.f)], table[own]) == (1, 1)
    assert table.pop(own) == 1
    assert list(table) == ["other"]


def test_a_member_of_a_set_is_found(engine: Any) -> None:
    own = Key(engine.f)
    members = {own, Key(print)}
    with aspects.woven(around("engine:f", hooked)):
        assert own in members
        assert Key(engine.f) in members
    assert own in members
    assert len(members) == 2


def test_a_key_within_a_tuple_is_left_as_it_is_and_named(engine: Any) -> None:
    own = Key(engine.f)
    table = {(own, 1): "found"}
    with aspects.woven(around("engine:f", hooked)):
        assert table[own, 1] == "found"
        (stale,) = aspects.report().stale
        assert "Key, in a tuple or frozenset whose hash depends on it" in stale.holder


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def enter(self, args: Any, kwargs: Any) -> None: ...

    def __call__(self, original: Any, *args: Any) -> Any:
        return original(*args) if callable(original) else None


@pytest.mark.parametrize("kind", [HookType.AROUND, HookType.AFTER, HookType.OBSERVE, HookType.REPLACE])
def test_the_constants_of_a_hooked_functions_code_have_a_hash(engine: Any, kind: HookType) -> None:
    with aspects.woven(advice("engine:f", kind, Unhashable())):
        engine.f(2)
        assert [hash(constant) for constant in engine.f.__code__.co_consts]


def test_what_copyreg_says_about_pickling_holds_for_a_hooked_object(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Odd:
        def __call__(self) -> int:
            return 5

        def __reduce__(self) -> Any:
            raise TypeError("by copyreg only")

    monkeypatch.setitem(copyreg.dispatch_table, Odd, lambda odd: "odd")
    engine.odd = Odd()
    Odd.__module__ = "engine"
    with aspects.woven(around("engine:odd", hooked)):
        assert pickle.loads(pickle.dumps(engine.odd))() == ("hooked", 5)
