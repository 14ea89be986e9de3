"""SampledTokens: a step's sampled tokens, on their way from the device to the host."""

from __future__ import annotations

import torch

from sgl_aspects.platforms import DeviceEvent, SRTPlatform
from sgl_aspects.runtime.sampling.logprobs import TokenLogprobs


class SampledTokens:
    """One token a request. Made without waiting, so that more work can be given to the device meanwhile."""

    def __init__(self, on_device: torch.Tensor, platform: SRTPlatform) -> None:
        #: For each request, if any requests them.
        self.logprobs: list[TokenLogprobs | None] = []
        #: [requests]
        self.on_device = on_device
        self._host = on_device
        self._arrived: DeviceEvent | None = None
        if platform.is_asynchronous():
            # Querying the device itself would wait for all work queued since.
            self._host = torch.empty(
                on_device.shape,
                dtype=on_device.dtype,
                device="cpu",
                pin_memory=platform.is_pin_memory_available(),
            )
            self._host.copy_(on_device, non_blocking=True)
            self._arrived = platform.create_event()
            self._arrived.record()

    def tolist(self) -> list[int]:
        """Return the tokens; waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens
