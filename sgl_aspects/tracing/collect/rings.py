"""Finds the rings of a run for a command that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sgl_aspects.errors import ConfigError
from sgl_aspects.run.collector import collector_state
from sgl_aspects.run.folder import describe_run, runs
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.codec import DamagedError


def rings(folder: str | None = None, process_id: int | None = None) -> Iterator[RingReader]:
    """Open the rings of one run for reading: of the only run, where ``folder`` is None.

    ``folder`` may also be the id of a process that records in the run. ``process_id`` selects that process's
    ring alone. Raises ``ConfigError`` if the run is ambiguous or there is none. The caller closes each ring.
    """
    if is_process := folder is not None and folder.isdecimal() and not Path(folder).is_dir():
        folders = [run for run in runs() if any(run.glob(f"{folder}-*{layout.SUFFIX}"))]
    else:
        folders = runs() if folder is None else [Path(folder)]
    pattern = f"{'*' if process_id is None else process_id}-*{layout.SUFFIX}"
    found = sorted(ring for run in folders for ring in run.glob(pattern))
    if not found:
        if process_id is not None or is_process:
            found = [ring for run in runs() for ring in run.glob(f"*{layout.SUFFIX}")]
            of = f"process {folder if is_process else process_id}"
        else:
            of = "this user" if folder is None else repr(folder)
        raise ConfigError(
            f"no traced run of {of} found: start the engine under sgl-aspects run, "
            f"or name the folder of a run{_listed(found)}"
        )
    readable = [ring for path in found if (ring := _opened(path)) is not None]
    # a crashed run's leftovers do not count while another run is alive, nor those of other containers that
    # share the folder (docker run --ipc=host) while there is one here
    if len({ring.path.parent for ring in readable}) > 1:
        living = {ring.path.parent for ring in readable if ring.is_alive()}
        living = {run for run in living if not _is_elsewhere(run)} or living
        for ring in [ring for ring in readable if living and ring.path.parent not in living]:
            readable.remove(ring)
            ring.close()
    if len({ring.path.parent for ring in readable}) > 1:
        raise ConfigError(
            "several runs are traced: name one, or a process of it, as in report RUN or top --run RUN"
            + _listed([ring.path for ring in readable])
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


def _listed(found: Sequence[Path]) -> str:
    """Return a line for each run: its folder, age and processes, and what the first of them executes."""
    processes: dict[Path, list[int]] = {}
    for ring in found:
        processes.setdefault(ring.parent, []).append(int(ring.name.partition("-")[0]))
    return "".join(
        f"\n  - {describe_run(run, sorted(ids), is_elsewhere=_is_elsewhere(run))}"
        for run, ids in processes.items()
    )


def _is_elsewhere(run: Path) -> bool:
    state = collector_state(run)
    return state is not None and state.is_elsewhere
