"""The folder that `sgl-aspects run` puts first on PYTHONPATH, so that every child interpreter is hooked.

Python imports a module named `sitecustomize` at its start, before the program; this folder has one. Nothing
happens on `import sgl_aspects.bootstrap`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SWITCH = "ASPECTS_RUN"
"""Set for every process below `sgl-aspects run`; without it this folder's sitecustomize does nothing."""


def prepared(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``environment`` with this folder first on PYTHONPATH and the switch set; idempotent."""
    folder = str(Path(__file__).parent)
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != folder]
    return {**environment, "PYTHONPATH": os.pathsep.join([folder, *paths]), SWITCH: "1"}
