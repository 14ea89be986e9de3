"""A hook on the engine: the device's memory, in the log, once the model is loaded."""

from __future__ import annotations

import logging
from typing import Any

import sgl_aspects as aspects

logger = logging.getLogger("loopback_platform")


@aspects.after("sgl_aspects.runtime.execution.model_runner:ModelRunner.load_model")
def log_memory(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    free, total = runner.platform.get_available_memory()
    name = runner.platform.get_device_name()
    logger.info("%s: %d of %d MiB free with the model", name, free >> 20, total >> 20)
    return result


def register() -> None:
    """Called once in every process of an engine."""
    aspects.weave(log_memory)
