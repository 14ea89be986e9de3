"""``current_platform``: the platform of this process, chosen at its first use and then fixed."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from typing import Any, cast

from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms.discovery import PlatformChoice, choose_platform
from sgl_aspects.platforms.srt_platform import SRTPlatform

_choice: PlatformChoice | None = None
#: True in the thread that chooses, and in those where it calls the plugins: they get its context.
_choosing: contextvars.ContextVar[bool] = contextvars.ContextVar("choosing the platform", default=False)
_lock = threading.RLock()
_after_changes: list[Callable[[], object]] = []


def current_platform_choice() -> PlatformChoice:
    """Return the choice and its reasons, choosing on the first call. Raises PlatformError, at each call."""
    global _choice
    if _choice is not None:
        return _choice
    if _choosing.get():  # before the lock: the thread that holds it waits for this one
        raise PlatformError(
            "current_platform was used while the platform was being chosen: a platform plugin's "
            "activation, or the constructor of its class, must not use it."
        )
    with _lock:
        if _choice is None:
            token = _choosing.set(True)
            try:
                _choice = choose_platform()  # published last: a failed choice leaves no state
            finally:
                _choosing.reset(token)
        return _choice


def set_current_platform(platform: SRTPlatform | None) -> None:
    """Put ``platform`` in place of the chosen one, for embedding and tests. None: choose again."""
    global _choice
    with _lock:
        _choice = None if platform is None else PlatformChoice(platform.device_name, platform, ())
    for function in _after_changes:
        function()


def call_after_changes(function: Callable[[], object]) -> None:
    """Call ``function`` whenever :func:`set_current_platform` has put another platform in place."""
    _after_changes.append(function)


class _CurrentPlatform:
    """A proxy of the platform. The first access to an ordinary attribute makes the choice.

    Special attributes (``__class__``, ``__wrapped__``) are its own, so that debuggers and tools that walk
    over modules never start a detection. Pickled, it becomes the platform of the receiving process.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr(current_platform_choice().platform, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(current_platform_choice().platform, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(current_platform_choice().platform, name)

    def __dir__(self) -> list[str]:
        return sorted(set(dir(SRTPlatform)) if _choice is None else dir(_choice.platform))

    def __repr__(self) -> str:
        if _choice is None:
            return "<current_platform, not chosen yet>"
        return f"<current_platform: {_choice.platform!r}>"

    def __reduce__(self) -> str:
        return "current_platform"


current_platform = cast(SRTPlatform, _CurrentPlatform())


def is_cuda() -> bool:
    return current_platform.is_cuda()


def is_rocm() -> bool:
    return current_platform.is_rocm()


def is_cpu() -> bool:
    return current_platform.is_cpu()


def is_xpu() -> bool:
    return current_platform.is_xpu()


def is_musa() -> bool:
    return current_platform.is_musa()


def is_npu() -> bool:
    return current_platform.is_npu()


def is_tpu() -> bool:
    return current_platform.is_tpu()


def is_mps() -> bool:
    return current_platform.is_mps()


def is_hpu() -> bool:
    return current_platform.is_hpu()


def is_sail() -> bool:
    return current_platform.is_sail()


def is_cuda_alike() -> bool:
    return current_platform.is_cuda_alike()


def is_out_of_tree() -> bool:
    return current_platform.is_out_of_tree()


def _renew_lock_after_fork() -> None:
    """Another thread may have held the lock when this process was forked; it does not exist here."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock_after_fork)
