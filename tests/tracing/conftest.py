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
