"""What is done inside the process that is attached to."""

from __future__ import annotations

import gc
import weakref

import pytest

from sgl_aspects.attach import agent


class _Cycle:
    def __init__(self) -> None:
        self.own = self


@pytest.mark.parametrize("is_frozen", [True, False])
def test_garbage_of_the_engine_does_not_stay_where_it_froze_its_objects(is_frozen: bool) -> None:
    if is_frozen:
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        garbage = [weakref.ref(_Cycle())]
        with agent._beside_the_engine():
            garbage.append(weakref.ref(_Cycle()))
            assert gc.get_freeze_count() == 0
        assert bool(gc.get_freeze_count()) is bool(before) is is_frozen
        gc.collect()
        assert [each() for each in garbage] == [None, None]
    finally:
        gc.unfreeze()
