"""Fixtures of the tracing tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.otlp_receiver import Receiver, http_receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An OTLP/HTTP backend."""
    with http_receiver() as running:
        yield running


@pytest.fixture
def exports_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export what ends within a tenth of a second: the default delay is 5 s."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
