"""Rebinding in pieces, in a process whose other threads go on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects.weaving import Pieces, in_pieces
from tests.support.woven_modules import around, hooked, module_of, no_hook_is_left

__all__ = ["no_hook_is_left"]


def _tuple_made_meanwhile(wait: Callable[[], object]) -> object:
    """`tuple(generator)` raises SystemError where its tuple has a second reference when it grows."""
    return tuple(wait() if number == 1 else number for number in range(100))


def _buffer_grown_meanwhile(wait: Callable[[], object]) -> object:
    """A bytearray raises BufferError while it is looked into."""
    buffer = bytearray(1)
    view = memoryview(buffer)
    wait()
    del view
    buffer.extend(b"more")
    return buffer


@pytest.mark.parametrize("work", [_tuple_made_meanwhile, _buffer_grown_meanwhile])
def test_what_another_thread_works_with_is_not_held(
    monkeypatch: Any, work: Callable[[Callable[[], object]], object]
) -> None:
    begun, searched = threading.Event(), threading.Event()
    made = []

    def wait() -> None:
        begun.set()
        assert searched.wait(60)

    working = threading.Thread(target=lambda: made.append(work(wait)))
    one = Pieces.one

    @contextlib.contextmanager
    def between_pieces(self: Pieces) -> Iterator[None]:
        with one(self):
            yield
        searched.set()
        working.join(60)

    monkeypatch.setattr(Pieces, "one", between_pieces)
    with module_of("def f(): return 'f'") as module:
        held = [module.f]
        working.start()
        assert begun.wait(60)
        with in_pieces(rest=0), aspects.woven(around(f"{module.__name__}:f", hooked)):
            assert held == [module.f]
    assert len(made) == 1


def test_copies_of_more_functions_than_one_piece_looks_for() -> None:
    names = [f"f{number}" for number in range(10)]
    with module_of("\n".join(f"def {name}(): return '{name}'" for name in names)) as module:
        held = [getattr(module, name) for name in names]
        fixed = (module.f0, module.f9)
        hooks = [around(f"{module.__name__}:{name}", hooked) for name in names]
        with in_pieces(rest=0), aspects.woven(*hooks):
            assert [one() for one in held] == [("hooked", name) for name in names]
            assert sorted(stale.target[-2:] for stale in aspects.report().stale) == ["f0", "f9"]
        assert [one() for one in held] == names
        assert [one() for one in fixed] == ["f0", "f9"]
