"""Private names of other packages are where we use them; where one has moved, its test says so."""

from __future__ import annotations

import weakref

import pytest

from sgl_aspects import compat


class Owner:
    def method(self) -> str:
        return "method"


def other(self: Owner) -> str:
    return "other"


def test_a_weak_method_is_found_and_takes_another_function() -> None:
    made = Owner()
    died: list[object] = []
    weak = weakref.WeakMethod(made.method, died.append)
    assert compat.weak_methods(Owner.method) == [weak]  # type: ignore[arg-type]
    compat.retarget_weak_method(weak, other)  # type: ignore[arg-type]
    method = weak()
    assert method is not None
    assert method() == "other"
    assert compat.weak_methods(Owner.method) == []  # type: ignore[arg-type]
    del made, method
    assert died == [weak]
    assert weak() is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_parses_through_the_name_that_is_watched() -> None:
    torch = pytest.importorskip("torch")
    seen: list[object] = []
    undo = compat.watch_torchscript(torch.jit.frontend, seen.append)
    try:
        torch.jit.script(scripted)
    finally:
        undo()
    assert seen == [scripted]


def scripted(x: int) -> int:
    return x + 1
