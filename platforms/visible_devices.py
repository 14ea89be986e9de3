"""Variables that limit the devices a process sees, such as ``CUDA_VISIBLE_DEVICES=2,5``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def visible_devices(variable: str) -> list[str] | None:
    """Return the devices in ``variable``, in order; None if it is unset, and every device is visible."""
    value = os.environ.get(variable)
    if value is None:
        return None
    return [part.strip() for part in value.split(",") if part.strip()]


@contextmanager
def only_one_visible(variable: str, device_id: int) -> Iterator[int]:
    """Start processes in the block with device ``device_id`` of this process alone, as their device 0.

    Yields 0. The variable is restored afterwards, also after an error. This process itself is not changed
    once its driver has started: drivers read the variable once. ValueError for an id out of range.
    """
    seen = visible_devices(variable)
    if device_id < 0 or (seen is not None and device_id >= len(seen)):
        shown = "all devices" if seen is None else f"{len(seen)} device(s), {variable}={','.join(seen)}"
        raise ValueError(f"reindex_device_id({device_id}): this process sees {shown}")
    before = os.environ.get(variable)
    os.environ[variable] = str(device_id) if seen is None else seen[device_id]
    try:
        yield 0
    finally:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
