"""Finds the rings of a run for a command that reads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sgl_aspects.errors import ConfigError
from sgl_aspects.run.folder import runs
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.codec import DamagedError


def rings(folder: str | None = None, process_id: int | None = None) -> Iterator[RingReader]:
    """Open the rings of one run for reading; with ``folder`` None those of the only run.

    ``process_id`` selects that process's ring alone. Raises ``ConfigError`` if the run is ambiguous or there
    is none. The caller closes each ring.
    """
    folders = runs() if folder is None else [Path(folder)]
    pattern = f"{'*' if process_id is None else process_id}-*{layout.SUFFIX}"
    found = sorted(ring for run in folders for ring in run.glob(pattern))
    if not found:
        of = "this user" if folder is None else repr(folder)
        if process_id is not None:
            of = f"process {process_id}"
        raise ConfigError(
            f"no traced run of {of} found: start the engine under sgl-aspects run, "
            "or name the folder of a run"
        )
    readable = [ring for path in found if (ring := _opened(path)) is not None]
    # a crashed run's leftovers do not count while another run is alive
    if len({ring.path.parent for ring in readable}) > 1:
        living = {ring.path.parent for ring in readable if ring.is_alive()}
        for ring in [ring for ring in readable if living and ring.path.parent not in living]:
            readable.remove(ring)
            ring.close()
    processes: dict[Path, list[str]] = {}
    for ring in readable:
        processes.setdefault(ring.path.parent, []).append(str(ring.process_id))
    if len(processes) > 1:
        names = "; ".join(f"{run} (process {', '.join(of_run)})" for run, of_run in processes.items())
        raise ConfigError(
            f"several runs are traced: choose one, as in report FOLDER or top --run FOLDER: {names}"
        )
    if not readable:
        raise ConfigError(
            f"{found[0].parent}: none of its rings can be read: they are damaged, of another version of "
            "sgl-aspects, or another user's (run the command as that user)"
        )
    yield from readable


def _opened(path: Path) -> RingReader | None:
    try:
        return RingReader(path, read_only=True)
    except (DamagedError, OSError):
        return None
