"""What may stand in for an async generator."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import sgl_aspects as aspects
from tests.support.woven_modules import advice, module_of, no_hook_is_left

__all__ = ["no_hook_is_left"]

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
