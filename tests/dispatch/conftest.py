"""What holds for all tests of dispatch."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from sgl_aspects.platforms import set_current_platform
from sgl_aspects.runtime import dispatch


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let each test begin with a new manager on the CPU, whatever the machine has."""
    monkeypatch.setenv("SGL_ASPECTS_OP_CONTROL", "off")
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu")
    monkeypatch.setitem(sys.modules, "sgl_kernel", None)  # its kernels would make choices depend on tensors
    set_current_platform(None)
    dispatch.reset_manager()
    yield
    set_current_platform(None)
    dispatch.reset_manager()
