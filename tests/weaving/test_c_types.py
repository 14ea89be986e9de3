"""Methods of C types under names of other owners: the types themselves stay as they are."""

from __future__ import annotations

import collections
import gc
import re
import subprocess
import sys
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects.errors import HookError
from sgl_aspects.weaving import State
from tests.support.woven_modules import around, hooked, module_of

SOURCE = """
import collections, re
class Names(list):
    put = list.append
found = re.Pattern.match
table = str.maketrans
push = collections.deque.append
holders = [found, table, push]
"""


@pytest.mark.parametrize(
    ("target", "kind", "name"),
    [
        ("Names.put", list, "append"),
        ("found", re.Pattern, "match"),
        ("table", str, "maketrans"),
        ("push", collections.deque, "append"),
    ],
)
def test_a_hook_on_a_method_of_a_c_type_leaves_the_type_alone(target: str, kind: type, name: str) -> None:
    gc.unfreeze()  # the tests of this folder hide from hooks what is older than they are, as these types
    before: Any = vars(kind)[name]
    with module_of(SOURCE) as module:
        with aspects.woven(around(f"{module.__name__}:{target}")):
            assert vars(kind)[name] is before
            stale = [one for one in aspects.report().stale if one.target.endswith(f"{kind.__name__}.{name}")]
            assert len(stale) == 1
            assert "immutable type" in stale[0].holder
            names = module.Names()
            names.put(1)
            assert names == [1]
            assert module.holders[0](re.compile("a"), "a")
            assert module.holders[1]("a", "b") == {97: 98}
            assert module.holders[0] is module.found
            assert module.holders[1] is module.table
        assert vars(kind)[name] is before
        assert aspects.report().hooks == ()


def test_a_pattern_waits_for_further_modules_where_those_loaded_have_only_c_types() -> None:
    handle = aspects.weave(around("itertools.**:chain*.*", hooked))
    assert handle.states == (State.FAILED,)
    with module_of("class chained:\n    def m(self): return 'm'", "itertools.further") as module:
        aspects.HookRegistry.apply_hooks()
        assert handle.states == (State.WOVEN,)
        assert module.chained().m() == ("hooked", "m")
        handle.remove()
        with pytest.raises(HookError, match="immutable type"):  # no other module can help
            aspects.weave(around("itertools:chain.*", hooked))


ASYNCIO = """
import asyncio, gc, traceback
import sgl_aspects as aspects

async def main():
    await asyncio.gather(asyncio.to_thread(len, "a"), asyncio.sleep(0))

@aspects.around("traceback:extract_stack")
def hand_on(original, *args, **kwargs):
    return original(*args, **kwargs)

for _ in range(3):
    asyncio.run(main())
    aspects.weave(hand_on).remove()
    gc.collect()
print("done")
"""


def test_what_asyncio_holds_in_c_is_hooked_while_it_is_used() -> None:
    command = [sys.executable, "-c", ASYNCIO]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "done\n"
