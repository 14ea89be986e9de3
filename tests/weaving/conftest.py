"""What every test of weaving leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import sgl_aspects as aspects
from sgl_aspects.weaving import weaver


@pytest.fixture(autouse=True)
def _no_hook_is_left() -> Iterator[None]:
    """A test that fails halfway leaves its hooks; the next one starts without them."""
    yield
    weaver.remove(weaver.advices)
    assert aspects.report() == aspects.Report()
