"""Private names of other packages are where we use them; where one has moved, its test says so."""

from __future__ import annotations

import weakref

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
