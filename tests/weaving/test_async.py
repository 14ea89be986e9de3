"""What may stand in for an async generator, and async functions within descriptors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import sgl_aspects as aspects
from tests.support.woven_modules import advice, module_of

SOURCE = """
import asyncio
async def agen(n):
    for i in range(n): yield i
def drain(agen):
    async def collect(): return [item async for item in agen]
    return asyncio.run(collect())
"""


def test_an_async_generator_may_be_replaced_by_any_async_iterable() -> None:
    class Items:
        def __init__(self, *args: Any) -> None:
            self.left = [1, 2]

        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> int:
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop()

    async def throw_and_close() -> None:
        items = engine.agen(1)
        await items.__anext__()
        with pytest.raises(KeyError):
            await items.athrow(KeyError())
        items = engine.agen(1)
        await items.__anext__()
        await items.aclose()

    replacing = advice("engine:agen", aspects.HookType.REPLACE, lambda n: Items())
    with module_of(SOURCE) as engine, aspects.woven(replacing):
        assert engine.drain(engine.agen(5)) == [2, 1]
        asyncio.run(throw_and_close())


def test_hooks_of_an_async_partialmethod_get_the_awaited_result() -> None:
    source = """
    import functools
    class C:
        async def method(self, a, b): return a, b
        fixed = functools.partialmethod(method, 1)
        @classmethod
        async def of_class(cls, a): return cls.__name__, a
        made = functools.partialmethod(of_class, 2)
    """

    async def calls() -> list[Any]:
        return [await module.C().fixed(3), await module.C.made()]

    with module_of(source) as module:
        after = [
            advice(f"engine:C.{name}", aspects.HookType.AFTER, lambda result, *args: ("after", result))
            for name in ("fixed", "made")
        ]
        with aspects.woven(*after):
            assert asyncio.run(calls()) == [("after", (1, 3)), ("after", ("C", 2))]
        assert asyncio.run(calls()) == [(1, 3), ("C", 2)]
