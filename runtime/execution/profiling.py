"""ProfileWindow: what PyTorch's profiler sees of a few steps."""

from __future__ import annotations

from pathlib import Path

import torch

from sgl_aspects.platforms import SRTPlatform


class ProfileWindow:
    """Begins when it is made, with the activities that the platform names; :meth:`write` ends it."""

    def __init__(self, platform: SRTPlatform, last_step: int) -> None:
        self.last_step = last_step
        self._platform = platform
        self._profile = torch.profiler.profile(activities=platform.get_profiler_activities())
        self._profile.start()

    def write(self, folder: Path, rank: int) -> Path:
        """A Chrome trace in ``folder``."""
        self._platform.synchronize()  # the device's part of the last step belongs to it
        self._profile.stop()
        path = folder / f"rank{rank}.trace.json"
        self._profile.export_chrome_trace(str(path))
        return path
