"""What a request makes its process run, in a thread that ends; needs only the standard library.

The command appends a call of :func:`enter` to a copy of this file.
"""

import importlib
import json
import os
import sys
import threading
import time
from typing import Any

_NATIVE = "SGL_ASPECTS_NATIVE"
# One for the process: each request runs a copy of this module.
_lock = threading.__dict__.setdefault("_sgl_aspects_lock", threading.Lock())


def enter(folder: str, key: str) -> None:
    """Carry out the request ``key`` in ``folder``, once, and write the answer to a file."""
    try:
        request = take(folder, key)
        if request is None:
            return
        module, _, function = request["function"].partition(":")
        pace = _Pace(request["pause"])
        with _lock:
            found = _module(module, request["package"], pace)
        answer = {} if found is None else getattr(found, function)(request)
        if request["package"] is not None:
            answer["import_seconds"], answer["longest_import_seconds"] = pace.spent, pace.longest
    except BaseException as error:  # noqa: BLE001 - whatever it is, the process must not see it
        answer = {"error": f"{type(error).__name__}: {error}"}
    give(folder, key, answer)


def take(folder: str, key: str) -> "dict[str, Any] | None":
    """Take the request ``key``; None if another thread has taken it, or it was withdrawn."""
    taken = os.path.join(folder, key + ".taken")
    try:
        os.rename(os.path.join(folder, key + ".request"), taken)
    except OSError:
        return None
    with open(os.open(taken, os.O_RDWR | os.O_NOFOLLOW), "r+", encoding="utf-8") as file:
        request: dict[str, Any] = json.load(file)
        file.seek(0)
        file.truncate()
        file.write(str(threading.get_native_id()))
    return request


def give(folder: str, key: str, answer: "dict[str, Any]") -> None:
    """Write the answer, in place of an earlier one."""
    temporary, new = os.path.join(folder, key + ".new"), os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with open(os.open(temporary, new, 0o600), "w", encoding="utf-8") as file:
            json.dump(answer, file)
        os.rename(temporary, os.path.join(folder, key + ".answer"))
    except OSError:
        pass  # no longer read


class _Pace:
    """A finder that finds nothing, but yields to other threads before each module that this thread imports.

    ``longest`` and ``spent``: seconds of one module, and of all.
    """

    def __init__(self, pause: float) -> None:
        self._pause = pause
        self._thread = threading.get_ident()
        self._last = time.perf_counter()
        self.longest = self.spent = 0.0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if threading.get_ident() == self._thread:
            self.take_turn()

    def take_turn(self) -> None:
        seconds = time.perf_counter() - self._last
        self.longest, self.spent = max(self.longest, seconds), self.spent + seconds
        time.sleep(self._pause)
        self._last = time.perf_counter()


def _module(name: str, package: str | None, pace: _Pace) -> Any:
    """Import it from ``package``, a folder with a copy of sgl_aspects; None: only if the process has it."""
    if package is None:
        return sys.modules.get(name)
    loaded = sys.modules.get("sgl_aspects")
    if loaded is not None and not os.path.isdir(loaded.__path__[0]):
        _move(os.path.join(package, "sgl_aspects"))
    sys.path.insert(0, package)
    sys.meta_path.insert(0, pace)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # let other threads get the interpreter soon
    native = os.environ.get(_NATIVE)
    os.environ[_NATIVE] = "off"  # compiled code could not be removed from the process again
    try:
        found = importlib.import_module(name)
        pace.take_turn()
    finally:
        os.environ.pop(_NATIVE)
        if native is not None:
            os.environ[_NATIVE] = native
        sys.setswitchinterval(interval)
        sys.meta_path.remove(pace)
        sys.path.remove(package)
    return found


def _move(root: str) -> None:
    """Redirect modules of an earlier attach, whose folder is gone: later imports use the new one."""
    old = sys.modules["sgl_aspects"].__path__[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "sgl_aspects" and hasattr(module, "__path__"):
            module.__path__ = [root + path[len(old) :] for path in module.__path__]
