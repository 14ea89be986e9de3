"""ProfileWindow: PyTorch's profiler for a few steps."""

from __future__ import annotations

from pathlib import Path

import torch

from sgl_aspects.platforms import SRTPlatform


class ProfileWindow:
    """Begins when it is made, with the activities that the platform names; :meth:`write` ends it."""

    def __init__(self, platform: SRTPlatform, last_step: int, file: Path) -> None:
        self.last_step = last_step
        self._file = file
        self._platform = platform
        self._profile = torch.profiler.profile(activities=platform.get_profiler_activities())
        self._profile.start()

    def write(self) -> None:
        """Write a Chrome trace; the file appears when it is complete."""
        self._platform.synchronize()  # the device's part of the last step belongs to it
        self._profile.stop()
        begun = self._file.with_name("unfinished." + self._file.name)
        self._profile.export_chrome_trace(str(begun))
        begun.rename(self._file)
