"""Recording of CUDA events: by the driver, if torch is built for it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from sgl_aspects.platforms.cuda import _driver


@pytest.mark.parametrize("version", ["12.8", None])
def test_the_driver_records_no_events_of_another_vendors_torch(
    version: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may have libcuda beside a torch that was built for AMD."""
    function = ctypes.pythonapi.PyErr_Clear
    driver = SimpleNamespace(cuEventRecord=function, cuEventElapsedTime=function)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(torch.version, "cuda", version)
    _driver.cache_clear()
    assert (_driver() is not None) is (version is not None)
    _driver.cache_clear()
