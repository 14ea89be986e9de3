"""Command lines for Python processes of ours: they import nothing from the current folder.

``-P`` and ``PYTHONSAFEPATH`` do not exist before Python 3.11; ``-I`` also ignores every ``PYTHON…`` variable.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
