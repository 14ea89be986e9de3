"""A platform that fails while an engine serves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from sgl_aspects.platforms.cpu import CpuPlatform


class FailingPlatform(CpuPlatform):
    """A CPU whose fortieth step fails."""

    calls = 0

    def inference_mode(self) -> AbstractContextManager[Any]:
        FailingPlatform.calls += 1
        if FailingPlatform.calls == 40:
            raise RuntimeError("the device is on fire")
        return super().inference_mode()
