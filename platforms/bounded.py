"""Driver queries with a time limit: a driver that hangs must not hang the engine silently."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import PlatformError

logger = logging.getLogger(__name__)

#: Seconds that one platform may take to find its hardware. 0: no limit, and no thread.
SECONDS_VARIABLE = "SGL_ASPECTS_DETECT_SECONDS"
DEFAULT_SECONDS = 120
#: Seconds after which a message names the platform that is waited for.
PATIENCE_SECONDS = 5.0


class DetectionTimeoutError(PlatformError, TimeoutError):
    """Raised when a platform's hardware detection exceeds its time limit."""


def ask_within_bound(who: str, ask: Callable[[], Any]) -> Any:
    """Return the result of ``ask``, or raise its error; DetectionTimeoutError after the limit.

    ``ask`` runs in a thread, because a call into a driver cannot be interrupted: after the limit the thread
    is abandoned. A driver that hangs while it holds the GIL cannot be limited.
    """
    bound = env.integer(SECONDS_VARIABLE, DEFAULT_SECONDS, minimum=0, maximum=86_400)
    if bound == 0:
        return ask()
    answers: list[Any] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:  # noqa: BLE001  # raised again below, in the calling thread
            errors.append(error)
        except BaseException as error:  # noqa: BLE001  # its own: Ctrl-C reaches the main thread alone
            errors.append(PlatformError(f"it raised {type(error).__name__}: {error}"))

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
        f"{who} did not detect its hardware within {bound} s; its driver may hang. Try "
        f"the vendor's own tool, choose another platform with SGLANG_PLATFORM, or allow more seconds with "
        f"{SECONDS_VARIABLE}."
    )
