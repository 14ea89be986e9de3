"""Removes what killed processes left in memory: folders of runs, and control blocks.

A run is dead where its processes and its collector were all killed. The latest stay for ``sgl-aspects dump``
and ``report``, and so does a run whose folder was to be kept.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_aspects.errors import AttachError
from sgl_aspects.run import prepared
from sgl_aspects.run.collector import collector_settings, collector_state
from sgl_aspects.run.folder import remove_run_folder, runs, seal_run, woven_ns
from sgl_aspects.run.requests import prepared_processes

STAYING = 4
# A collector that was killed may be about to be restarted.
_LEAST_SECONDS = 60.0
# An attach that has no collector yet may be weaving for some minutes; its processes hold the run once woven.
_LONGEST_ATTACH_SECONDS = 900.0


def clean_up(own: str | None = None) -> None:
    """Remove what is dead of this user's; ``own``: the folder of the run that does it, which stays."""
    own = None if own is None else os.path.realpath(own)
    remove_dead_runs([run for run in runs() if os.path.realpath(run) != own])  # one may be gone by now
    with contextlib.suppress(AttachError):  # another user has taken the folder's name
        prepared_processes(Path(prepared.folder_of(os.geteuid())))


def remove_dead_runs(folders: Sequence[Path]) -> None:
    """Remove the dead ones but for the latest; ``folders``: of runs, oldest first."""
    dead = [(folder, held) for folder in folders if (held := _held_if_dead(folder)) is not None]
    for folder, _ in dead[:-STAYING]:
        remove_run_folder(str(folder))
    for _, held in dead:
        os.close(held)


def _held_if_dead(folder: Path) -> int | None:
    """Return a descriptor that keeps processes out, if nothing records there and it has no collector that
    lives or ended in order; else None.
    """
    state = collector_state(folder)
    if state is not None and state.is_alive:
        return None
    try:
        settings = collector_settings(str(folder))
        age = time.time() - folder.stat().st_mtime
    except OSError:
        return None
    is_kept = settings.get("SGL_ASPECTS_TRACE_KEEP", "0") == "1"
    is_dead = bool(settings) and age > _LEAST_SECONDS and not is_kept
    if state is None and woven_ns(folder) == math.inf:  # an attach whose command and guard were both killed
        is_dead = age > _LONGEST_ATTACH_SECONDS
    return seal_run(str(folder)) if is_dead else None
