"""Removes what is left of runs whose processes and collector were all killed: it is in memory.

The latest stay for ``sgl-aspects dump`` and ``report``, and so does a run whose folder was to be kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_aspects.tracing.run_folder import collector_settings, collector_state, remove_run_folder, seal_run

STAYING = 4
# A collector that was killed may be about to be restarted.
_LEAST_SECONDS = 60.0


def remove_dead_runs(folders: Sequence[Path]) -> None:
    """Remove the dead ones but for the latest; ``folders``: of runs, oldest first."""
    for folder in [folder for folder in folders if _is_dead(folder)][:-STAYING]:
        held = seal_run(str(folder))
        if held is not None:
            remove_run_folder(str(folder))
            os.close(held)


def _is_dead(folder: Path) -> bool:
    """Return whether it had a collector, which did not end in order, and nothing records there."""
    state = collector_state(folder)
    if state is None or state.is_alive:
        return False
    try:
        settings = collector_settings(str(folder))
        is_old = time.time() - folder.stat().st_mtime > _LEAST_SECONDS
    except (OSError, ValueError):
        return False
    held = seal_run(str(folder)) if settings and is_old else None
    if held is None:
        return False
    os.close(held)
    return settings.get("SGL_ASPECTS_TRACE_KEEP", "0") != "1"
