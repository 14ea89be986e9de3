"""What holds for all tests of platforms."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sgl_aspects.platforms import set_current_platform


@pytest.fixture(autouse=True)
def _no_platform_is_chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    set_current_platform(None)
    yield
    set_current_platform(None)
