"""Control of running processes: a folder with one request for all, and a state file of each.

Off unless ``control`` enables it, since it takes a thread in each process.

``sgl-aspects ops`` writes ``request.json``; every process that follows the folder reads it twice a second,
applies it, and writes ``<pid>.json``: what each operator resolved to, and the results of watching. Files of
other users are not read.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import AspectsError, ConfigError
from sgl_aspects.files import write_private
from sgl_aspects.runtime.dispatch.configuration import (
    POLICY_KEYS,
    USUAL,
    WATCH_KEYS,
    Settings,
    from_words,
    merged,
)
from sgl_aspects.runtime.dispatch.manager import OpManager
from sgl_aspects.runtime.dispatch.policy import Value
from sgl_aspects.runtime.dispatch.shadow.watching import watch_of

logger = logging.getLogger("sgl_aspects.dispatch")

CONTROL_VARIABLE = "SGL_ASPECTS_OP_CONTROL"
ON, OFF = "on", "off"
_REQUEST = "request.json"
_SECONDS = 0.5

#: Folder → the manager that its requests change.
_followed: dict[str, OpManager] = {}


def folder_of_environment() -> Path:
    """Return the folder in SGL_ASPECTS_OP_CONTROL; else the user's own, in memory if the host has such a file
    system.
    """
    named = env.text(CONTROL_VARIABLE)
    if named not in (None, ON, OFF):
        return Path(str(named))
    runtime = env.runtime_folder()
    parents = [*([Path(runtime)] if runtime else []), Path("/dev/shm"), Path(tempfile.gettempdir())]
    parent = next((path for path in parents if path.is_dir() and os.access(path, os.W_OK)), parents[-1])
    user = os.getuid() if hasattr(os, "getuid") else 0
    return parent / f"sgl-aspects-operators-{user}"


def follow(folder: str, manager: OpManager) -> None:
    """Apply the requests in ``folder``, in a daemon thread. "off": nothing; "on": the user's own folder.

    :raises ConfigError: the folder cannot be made, or belongs to another user.
    """
    if folder == OFF:
        return
    if folder == ON:
        folder = str(folder_of_environment())
    is_followed = folder in _followed
    if not is_followed:
        prepare_folder(Path(folder))
    _followed[folder] = manager
    if not is_followed:
        _start(folder)


def prepare_folder(folder: Path) -> None:
    """Create it, for this user alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{CONTROL_VARIABLE}: {str(folder)!r} cannot be made: {error}") from error
    _require_own(folder)


def _require_own(folder: Path) -> None:
    """Raise ConfigError for another user's folder, and for a link: anyone can make one of a known name."""
    found = folder.lstat()
    if hasattr(os, "getuid") and (found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode)):
        raise ConfigError(
            f"{CONTROL_VARIABLE}: {str(folder)!r} is not a folder of yours: name one of your own"
        )


def _start(folder: str) -> None:
    threading.Thread(target=_work, args=(folder,), name="operators", daemon=True).start()


def _restart_after_fork() -> None:
    for folder in _followed:
        _start(folder)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restart_after_fork)


def _work(name: str) -> None:
    """Skip requests from before this process began, and remove files of dead processes."""
    folder = Path(name)
    states(folder)
    done = (read_own_json(folder / _REQUEST) or {}).get("serial")
    error: str | None = None
    written = ""
    while True:
        manager = _followed[name]
        request = read_own_json(folder / _REQUEST) or {}
        if request.get("serial") != done:
            done = request.get("serial")
            if request.get("pid") in (None, os.getpid()):
                try:
                    apply(request, manager)
                    error = None
                except AspectsError as wrong:
                    error = str(wrong)
                    logger.warning("a request in %s is not done: %s", folder, wrong)
                except Exception as wrong:  # it is the answer to the request
                    error = f"{type(wrong).__name__}: {wrong}"
                    logger.exception("a request in %s failed", folder)
        text = json.dumps({**state(manager), "done": done, "error": error})
        if text != written and write_own(folder / f"{os.getpid()}.json", text):
            written = text
        time.sleep(_SECONDS)


def apply(request: dict[str, Any], manager: OpManager) -> None:
    """Apply ``set``: keys and values; ``shadow``, ``rate``: the watch; an empty one ends it.

    All of it is applied, or nothing.

    :raises ConfigError: an unknown key, one that is read at start only, or a value that is not allowed.
    """
    changes = from_words(request.get("set") or {})
    for key in changes:
        if key not in (*POLICY_KEYS, *WATCH_KEYS):
            choices = ", ".join((*POLICY_KEYS, *WATCH_KEYS))
            raise ConfigError(f"--set {key}: it is read at start only; choose from {choices}")
    for key, flag in (("shadow", "shadow"), ("shadow_rate", "rate")):
        if request.get(flag) is not None:
            changes[key] = Value(USUAL if request[flag] == "" else request[flag], f"--{flag}")
    current, watch = Settings(manager.process_policy), manager.watch
    if watch is not None:
        current = Settings(manager.process_policy, tuple(watch.shadow.items()), watch.rate)
    wanted = merged([changes], manager.registry, current)
    if set(changes).intersection(WATCH_KEYS) == {"shadow_rate"} and watch is None:
        raise ConfigError("--rate: nothing is watched: name operators with --shadow")
    if wanted.policy != current.policy:
        manager.set_policy(wanted.policy)
    if any(key in changes for key in WATCH_KEYS):
        manager.set_watch(watch_of(wanted))


def state(manager: OpManager) -> dict[str, Any]:
    """Return what this process has resolved and watched, in plain values."""
    return {
        "pid": os.getpid(),
        "policy": manager.process_policy.describe(),
        "resolved": [list(row) for row in manager.resolved()],
        "failures": [[op, impl, count] for (op, impl), count in manager.failures().items()],
        "watch": None if manager.watch is None else manager.watch.report(),
    }


def send_request(folder: Path, **request: Any) -> str:
    """Write a request; returns its serial."""
    prepare_folder(folder)
    serial = f"{time.time_ns()}-{os.getpid()}"
    write_own(folder / _REQUEST, json.dumps({"serial": serial, **request}))
    return serial


def states(folder: Path) -> list[dict[str, Any]]:
    """The state of each living process that follows the folder; files of dead ones are removed.

    :raises ConfigError: the folder belongs to another user.
    """
    found: list[dict[str, Any]] = []
    if not os.path.lexists(folder):
        return found
    _require_own(folder)
    for path in sorted(folder.glob("*.json")):
        if not path.stem.isdecimal():
            continue
        if not _is_alive(int(path.stem)):
            path.unlink(missing_ok=True)
            continue
        content = read_own_json(path)
        if content is not None:
            found.append(content)
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's by now
        pass
    return True


def read_own_json(path: Path) -> dict[str, Any] | None:
    """Read a file; None if it does not exist, is another user's, or is not a JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            content = json.load(file)
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_own(path: Path, text: str) -> bool:
    """Write the whole file or nothing, readable for this user alone. False if it cannot be written."""
    try:
        write_private(path, text.encode())
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)
        return False
    return True


def log_to(path: str) -> None:
    """Append each resolution to a file, a line each.

    :raises ConfigError: the file cannot be opened.
    """
    try:
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"SGL_ASPECTS_OP_LOG: {path!r} cannot be opened: {error}") from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(min(logger.level or logging.INFO, logging.INFO))
