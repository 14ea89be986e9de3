"""Command lines for Python processes of ours: they import nothing from the current folder.

``-P`` and ``PYTHONSAFEPATH`` do not exist before Python 3.11; ``-I`` also ignores every ``PYTHON…`` variable.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_SAFE_PATH = "PYTHONSAFEPATH"

# The folders go behind the standard library, which they cannot replace, and before other packages: this one
# may be installed in another version.
_RUN = (
    "import runpy, sys; _, paths, module, *rest = sys.argv; sys.argv = [module, *rest]; "
    "at = [number for number, path in enumerate(sys.path) if path.endswith('-packages')] + [len(sys.path)]; "
    "sys.path[at[0]:at[0]] = paths.split(':'); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def python(module: str, *words: str) -> list[str]:
    """Return the command that runs ``module`` with this interpreter, isolated.

    It imports from where this process found this package, and from the absolute folders of ``PYTHONPATH``.
    """
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [str(Path(__file__).parents[1]), *(path for path in named if os.path.isabs(path))]
    return [sys.executable, "-I", "-c", _RUN, ":".join(folders), module, *words]


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Have processes that multiprocessing starts in the block begin without the current folder on their path.

    They get this process's path then. Python 3.10 does not know the variable.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
