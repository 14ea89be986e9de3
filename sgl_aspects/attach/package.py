"""The modules copied for a process: this package and wrapt, compiled for its interpreter, on a path.

Always a copy: the process may belong to another user, run another Python, and have neither installed. Byte
code is compiled here, so that an import there is short. The pure Python form of wrapt is enough: no library
is loaded.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import sgl_aspects
from sgl_aspects.attach.process_tree import Process, read_process
from sgl_aspects.attach.rights import explained
from sgl_aspects.errors import AttachError

#: What a copy takes, generously, with room for a ring.
BYTES = 12 << 20
_LEFT_OUT = ("platforms", "runtime", "cli", "conformance", "view", "__pycache__", "*.so", "*.c", "*.h")
_MODULES = ("sgl_aspects.attach.agent",)
_VERSION = "version.json"
_COMPILE_SECONDS = 60
_FULL = 64 << 10  # bytes that are free on a full disk

# Compiles and imports the modules: an error is reported before the process is touched.
_PREPARE = """
import sys, json
folder, names = sys.argv[1], sys.argv[2:]
import compileall, py_compile
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
compileall.compile_dir(folder, quiet=2, invalidation_mode=mode)
sys.path.insert(0, folder)
for name in names:
    __import__(name)
print(json.dumps(sys.version_info[:3]))
"""


class Interpreter(NamedTuple):
    """An interpreter, and the folder with the modules for its processes."""

    executable: str
    folder: Path
    has_remote_exec: bool


def interpreter_of(process: Process) -> str:
    """Return the interpreter of a process of this user, to run another one like it.

    Raises ``AttachError`` for one that is another user's by now, or another file: it would be run with this
    user's rights.
    """
    try:
        executable = os.readlink(f"/proc/{process.id}/exe")
    except PermissionError as error:
        raise explained(process.id, error) from error
    user, now = os.stat(f"/proc/{process.id}").st_uid, read_process(process.id)
    if now is None or now.started != process.started:
        raise AttachError(f"process {process.id} has ended")
    if user != os.geteuid():
        raise AttachError(
            f"process {process.id} has become user {user}'s since the command began, which now leaves it "
            "alone: attach again once it is that user's"
        )
    if not (os.path.exists(executable) and os.path.samefile(executable, f"/proc/{process.id}/exe")):
        raise AttachError(
            f"process {process.id}: its interpreter {executable} has been replaced since it began, and what "
            "is there now is not run: start the engine again"
        )
    return executable


def _folder_of(executable: str, parent: Path) -> Path:
    return parent / hashlib.sha256(os.fsencode(executable)).hexdigest()[:16]


def bring(executable: str, parent: Path) -> None:
    """Copy and compile the modules for processes of ``executable`` into a folder below ``parent``, once."""
    folder = _folder_of(executable, parent)
    if folder.exists():
        return
    folder.mkdir(parents=True)
    left_out = shutil.ignore_patterns(*_LEFT_OUT)
    try:
        for name, source in (("sgl_aspects", Path(sgl_aspects.__file__).parent), *_others()):
            if not source.is_dir():
                raise AttachError(f"{source} is in an archive: install sgl-aspects with pip to attach")
            shutil.copytree(source, folder / name, ignore=left_out)
    except OSError as error:
        # shutil's own has a text for each file.
        reason = error.strerror or str(error.args[0][0][2]).partition(":")[0]
        raise _no_room(folder, reason) from error
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SGL"))
    }
    try:
        done = subprocess.run(
            [executable, "-I", "-S", "-c", _PREPARE, str(folder), *_MODULES],
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AttachError(
            f"the interpreter {executable} cannot be run to prepare modules for it: {error}"
        ) from error
    if done.returncode:
        system = os.statvfs(folder)
        if system.f_bavail * system.f_frsize < _FULL:  # Python takes a file that was cut off for written
            raise _no_room(folder, os.strerror(errno.ENOSPC))
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise AttachError(
            f"the modules for the process do not work with the interpreter {executable}: {last[0]}; "
            "Python 3.10 or newer is needed"
        )
    try:
        (folder / _VERSION).write_text(done.stdout)
    except OSError as error:
        raise _no_room(folder, str(error)) from error


def _no_room(folder: Path, reason: str) -> AttachError:
    return AttachError(
        f"the modules for the process, {BYTES >> 20} MiB with its records, cannot be written to {folder} "
        f"({reason}): make room there, or set TMPDIR to a folder that has it"
    )


def known(executable: str, parent: Path) -> Interpreter:
    """Return the modules that :func:`bring`, maybe of another command, copied for ``executable``."""
    folder = _folder_of(executable, parent)
    try:
        version = json.loads((folder / _VERSION).read_text())
    except FileNotFoundError as error:
        raise AttachError(f"{parent} holds nothing for the interpreter {executable}") from error
    return Interpreter(executable, folder, version >= [3, 14])


def _others() -> Iterator[tuple[str, Path]]:
    """Third-party packages, by their import names: wrapt, and for Python 3.10 tomli."""
    for wanted, names in (("wrapt", ("wrapt",)), ("tomli", ("tomli", "tomllib"))):
        specs = [spec for spec in map(importlib.util.find_spec, names) if spec is not None]
        for spec in specs[:1]:
            yield wanted, Path((spec.submodule_search_locations or [])[0])
