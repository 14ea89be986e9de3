"""Ask a driver with a time limit: a driver that hangs must not hang the engine silently."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import PlatformError

logger = logging.getLogger(__name__)

#: Seconds that one platform may take to find its hardware. 0: no bound, and no thread.
SECONDS_VARIABLE = "SGL_ASPECTS_DETECT_SECONDS"
DEFAULT_SECONDS = 120
#: After so long a message says what is waited for.
PATIENCE_SECONDS = 5.0


class DetectionTimeoutError(PlatformError, TimeoutError):
    """Raised when a platform took longer than its bound to say whether its hardware is there."""


def ask_within_bound(who: str, ask: Callable[[], Any]) -> Any:
    """What ``ask`` returns or raises. DetectionTimeoutError where it takes longer than the bound.

    ``ask`` runs in a thread, because a call into a driver cannot be broken off: past the bound the thread
    is left behind. A driver that hangs while it holds the interpreter's lock cannot be bounded.
    """
    bound = env.integer(SECONDS_VARIABLE, DEFAULT_SECONDS, minimum=0, maximum=86_400)
    if bound == 0:
        return ask()
    answers: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001  # raised again below, in the thread that asked
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name=f"detect {who}", daemon=True)
    thread.start()
    thread.join(min(PATIENCE_SECONDS, bound))
    if thread.is_alive() and bound > PATIENCE_SECONDS:
        logger.warning("%s is still looking for its hardware; it has %d s (%s)", who, bound, SECONDS_VARIABLE)
        thread.join(bound - PATIENCE_SECONDS)
    if errors:
        raise errors[0]
    if answers:
        return answers[0]
    raise DetectionTimeoutError(
        f"{who} did not find out within {bound} s whether its hardware is there; its driver may hang. Try "
        f"the vendor's own tool, choose another platform with SGLANG_PLATFORM, or allow more seconds with "
        f"{SECONDS_VARIABLE}."
    )
