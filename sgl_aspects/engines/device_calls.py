"""Calls of an engine that are written for CUDA: reported with their callers, or answered by the platform.

    SGL_ASPECTS_DEVICE_REPORT=FOLDER     each process writes there which of them were reached, and from where
    SGL_ASPECTS_DEVICE_CALLS=platform    those that the platform implements are passed to it

The second concerns ``torch.cuda`` (memory, synchronize, empty_cache, streams, names) and an engine's guards,
``is_cuda()``, ``is_npu()`` and so on, which are woven when their module has loaded, before their results are
copied. Only for callers outside torch: torch's own calls are not changed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.weaving import HookRegistry, HookType

CALLS_VARIABLE = "SGL_ASPECTS_DEVICE_CALLS"
REPORT_VARIABLE = "SGL_ASPECTS_DEVICE_REPORT"

#: A platform's implementation of a call; None: it has none.
Answer = Callable[..., Any]

#: Functions of torch.cuda, by the module that defines them.
_WATCHED = {
    "torch.cuda": (
        *("is_available", "can_device_access_peer", "get_device_properties", "current_device", "set_stream"),
        *("default_stream", "ipc_collect"),
    ),
    "torch.cuda.memory": (
        *("memory_stats", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"),
        *("memory_snapshot", "use_mem_pool"),
    ),
    "torch.cuda.random": ("manual_seed", "manual_seed_all"),
    "torch.cuda.graphs": ("graph_pool_handle",),
    "torch.cuda.streams": ("Event.__new__",),
}


def _index(device: Any = None) -> int:
    """Return the index of a torch device, its name or its number."""
    if device is None:
        return 0
    if isinstance(device, int):
        return device
    import torch

    return torch.device(device).index or 0


def _capability(platform: Any, device: Any = None) -> Any:
    found = platform.get_device_capability(_index(device))
    return None if found is None else tuple(found)


#: Target → the platform's implementation.
ANSWERS: dict[str, Answer] = {
    "torch.cuda:synchronize": lambda platform, device=None: _done(platform.synchronize()),
    "torch.cuda:set_device": lambda platform, device: _done(
        platform.set_device(platform.get_device(_index(device)))
    ),
    "torch.cuda:device_count": lambda platform: platform.device_count(),
    "torch.cuda:get_device_name": lambda platform, device=None: platform.get_device_name(_index(device)),
    "torch.cuda:get_device_capability": _capability,
    "torch.cuda:current_stream": lambda platform, device=None: platform.current_stream(),
    "torch.cuda:stream": lambda platform, stream: platform.use_stream(stream),
    "torch.cuda.streams:Stream.__new__": lambda platform, *args, **kwargs: platform.create_stream(),
    "torch.cuda.memory:empty_cache": lambda platform: _done(platform.empty_cache()),
    "torch.cuda.memory:mem_get_info": lambda platform, device=None: platform.get_available_memory(
        _index(device)
    ),
    **dict.fromkeys(
        ("torch.cuda.memory:memory_allocated", "torch.cuda.memory:max_memory_allocated"),
        lambda platform, device=None: int(platform.get_current_memory_usage()),
    ),
    "torch.cuda.graphs:is_current_stream_capturing": lambda platform: platform.is_capturing(),
}
#: The result of a call that returns nothing.
_NOTHING = object()


def _done(_: Any) -> Any:
    return _NOTHING


@dataclass(frozen=True)
class DeviceCall:
    """A call that was reached: its name, the place it was called from, and its implementation."""

    call: str
    caller: str
    #: "platform", or "engine": torch itself, or the engine's own guard.
    answered_by: str
    #: Whether platforms implement it with SGL_ASPECTS_DEVICE_CALLS=platform.
    answerable: bool
    process_id: int


class DeviceCalls:
    """The hooks of one process."""

    def __init__(self, platform: Callable[[], Any], *, routed: bool, folder: Path | None) -> None:
        self._platform = platform
        self._routed = routed
        self._folder = folder
        self._seen: set[tuple[str, str]] = set()
        #: Set while the platform runs, whose own calls are not redirected.
        self._answering = threading.local()

    def register(self, guards: Mapping[str, str]) -> None:
        """Weave all targets, each once its module is loaded. ``guards``: target → platform's query."""
        for module, names in _WATCHED.items():
            for name in names:
                self._hook(f"{module}:{name}", None)
        for target, answer in ANSWERS.items():
            self._hook(target, answer)
        for target, query in guards.items():
            self._hook(target, lambda platform, query=query: getattr(platform, query)())

    def _hook(self, target: str, answer: Answer | None) -> None:
        call = target.replace(":", ".").removesuffix(".__new__")
        module, _, name = target.partition(":")
        name = name.rpartition(".")[2]

        def device_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            caller = _caller(module, name)
            if caller is None or getattr(self._answering, "now", False):
                return original(*args, **kwargs)
            found = None
            if self._routed and answer is not None:
                self._answering.now = True
                try:
                    # A constructor's class is not passed to the platform.
                    words = args[1:] if target.endswith("__new__") else args
                    found = answer(self._platform(), *words, **kwargs)
                except NotImplementedError:
                    found = None
                finally:
                    self._answering.now = False
            self._write(call, caller, found is not None, answer is not None)
            if found is None:
                return original(*args, **kwargs)
            return None if found is _NOTHING else found

        HookRegistry.register(target, device_call, HookType.AROUND)

    def _write(self, call: str, caller: str, by_platform: bool, answerable: bool) -> None:
        """Record each call and place once, at once: engines kill their processes."""
        if self._folder is None or (call, caller) in self._seen:
            return
        self._seen.add((call, caller))
        line = json.dumps([call, caller, "platform" if by_platform else "engine", answerable])
        with open(self._folder / f"{os.getpid()}.device-calls", "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


def attach(guards: Mapping[str, str], platform: Callable[[], Any]) -> None:
    """Weave as the environment configures, if at all. ConfigError for a wrong value."""
    routed = env.choice(CALLS_VARIABLE, ("platform", "engine"), "engine") == "platform"
    folder = env.text(REPORT_VARIABLE)
    if not routed and folder is None:
        return
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"{REPORT_VARIABLE}={folder}: there is no such folder")
    calls = DeviceCalls(platform, routed=routed, folder=None if folder is None else Path(folder))
    calls.register(guards)


def read_reports(folder: Path) -> Iterator[DeviceCall]:
    """Read the reports of a run's processes."""
    for path in sorted(folder.glob("*.device-calls")):
        for line in path.read_text(encoding="utf-8").splitlines():
            call, caller, answered_by, answerable = json.loads(line)
            yield DeviceCall(call, caller, answered_by, answerable, int(path.name.partition(".")[0]))


#: Frames of these are between the caller and this function.
_OWN = ("sgl_aspects.weaving", "wrapt", __name__)


def _caller(module: str, name: str) -> str | None:
    """Return the target's caller as ``file:line in function``; None if that is torch or a platform class."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        place = str(frame.f_globals.get("__name__", ""))
        # A woven function has the name and the globals of the target.
        woven = place == module and frame.f_code.co_name == name
        if not woven and not place.startswith(_OWN):
            break
        frame = frame.f_back
    if frame is None or place == "torch" or place.startswith(("torch.", "sgl_aspects.")):
        return None
    path = frame.f_code.co_filename.replace(os.sep, "/").rpartition("/site-packages/")[2]
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"
