"""Compiles the files in C, once for each version of them and of Python, and loads the module.

Like Triton's launchers, it needs a C compiler and Python's headers. The result lies in the user's cache and
is loaded only from a folder that no other user can write to.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from sgl_aspects import env
from sgl_aspects.tracing.ring import format as layout

logger = logging.getLogger(__name__)

VARIABLE = "SGL_ASPECTS_NATIVE"
AUTO, CACHED, OFF = "auto", "cached", "off"
_NAME = "_decode_path"
_FOLDER = Path(__file__).parent
_SOURCES = sorted(_FOLDER.glob("*.c"))
# Python's macros look at the types of what they read unless NDEBUG is defined: more cold memory.
_FLAGS = ("-O2", "-DNDEBUG", "-fno-plt", "-shared", "-fPIC", "-fvisibility=hidden", "-w")
_DIGEST_BYTES = 32
_SECONDS = 120  # time limit of the compiler, on a machine that starts an engine


def load() -> Any:
    """Load the compiled module; None if it is off or cannot be made (``why_not`` gives the reason)."""
    wanted = (env.text(VARIABLE) or AUTO).lower()
    if wanted not in (AUTO, CACHED, OFF):
        logger.warning("%s=%s is ignored: choose %s, %s or %s", VARIABLE, wanted, AUTO, CACHED, OFF)
        wanted = AUTO
    if wanted == OFF:
        return None
    try:
        path = _path()
        if not _is_whole(path):
            if wanted == CACHED:
                return None
            _compile(path)
        return _load(path)
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        logger.info("tracing records steps in Python, not in C: %s", error)
        return None


def header() -> str:
    """Return ``layout.h``: the numbers of the ring's layout that the C code uses."""
    names = [
        name
        for name, value in vars(layout).items()
        if type(value) is int and name.isupper() and name[0] != "_"
    ]
    return "".join(f"#define {name} {getattr(layout, name)}ull\n" for name in names)


def _path() -> Path:
    """Return the path of the module for this Python."""
    texts = [path.read_text() for path in (*_SOURCES, _FOLDER / "native.h")]
    sources = [*texts, header(), sys.version, sysconfig.get_platform(), *_FLAGS]
    digest = hashlib.sha256("\0".join(sources).encode()).hexdigest()[:16]
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache, "sgl-aspects", f"{_NAME}-{digest}{suffix}")


def _is_whole(path: Path) -> bool:
    """Return whether the file is complete: loading a truncated one may kill the process."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _compile(path: Path) -> None:
    """Compile the module.

    :raises OSError: there is no compiler, or no folder for the result.
    :raises SubprocessError: it failed.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise OSError("it needs the GIL, and this Python has none")
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    headers = sysconfig.get_path("include")
    if compiler is None or not os.path.exists(os.path.join(headers, "Python.h")):
        raise OSError("it needs a C compiler and Python's headers (Debian: gcc, python3-dev)")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        Path(folder, "layout.h").write_text(header())
        made = Path(folder, path.name)
        included = [f"-I{path}" for path in (folder, headers)]
        command = [*compiler.split(), *_FLAGS, *included, *map(str, _SOURCES), "-o", str(made)]
        # Do not pass the engine's preloaded libraries on to the compiler.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
        if done.returncode:
            raise OSError(f"{' '.join(command[:1])} ended with {done.returncode}: {done.stderr[-500:]}")
        with made.open("ab") as file:  # a loader ignores bytes after the sections
            file.write(hashlib.sha256(made.read_bytes()).digest())
        os.replace(made, path)


def _load(path: Path) -> Any:
    for place in (path.parent, path):
        found = place.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise OSError(f"{place} is writable by other users: remove it, or set {VARIABLE}={OFF}")
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_loader(_NAME, loader)
    assert spec is not None  # the spec has a loader
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
