"""Patterns: a function with several names fires once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects import HookType
from tests.support.woven_modules import advice, module_of, no_hook_is_left, stored

__all__ = ["no_hook_is_left"]

SOURCE = """
import functools
class A:
    def m(self): return []
    alias = m
    p = property(lambda self: [])
    q = p
    @classmethod
    def c(cls): return []
    d = c
    @staticmethod
    def s(): return []
    t = s
class Mixin:
    def m(self): return []
class B:
    m = Mixin.m
@functools.lru_cache
def cached(): return ()
def annotated(): return []
annotated.helper = lambda: []
"""


def count(result: list[int], *args: Any) -> list[int]:
    return [*result, 1]


@pytest.fixture
def engine() -> Iterator[Any]:
    with module_of(SOURCE) as module:
        yield module


def results(engine: Any) -> list[Any]:
    a = engine.A()
    return [a.m(), a.alias(), a.p, a.q, a.c(), a.d(), a.s(), a.t()]


def test_aliases_in_a_class_fire_once(engine: Any) -> None:
    names = ("m", "alias", "p", "q", "c", "d", "s", "t")
    originals = [stored(engine, f"A.{name}") for name in names]
    with aspects.woven(advice("engine:A.*", HookType.AFTER, count)):
        assert results(engine) == [[1]] * 8
    assert [stored(engine, f"A.{name}") for name in names] == originals
    assert results(engine) == [[]] * 8


def test_a_method_that_another_class_shares_fires_once(engine: Any) -> None:
    with aspects.woven(advice("engine:*.m", HookType.AFTER, count)):
        assert (engine.A().m(), engine.B().m(), engine.Mixin().m()) == ([1], [1], [1])
    assert engine.B.m is engine.Mixin.m


def test_a_wildcard_for_a_class_does_not_cover_what_functions_carry(engine: Any) -> None:
    with aspects.woven(advice("engine:*.*", HookType.AFTER, count)):
        assert not [place for place in aspects.report().hooks[0].places if "cached" in place]
        assert engine.annotated.helper() == []
