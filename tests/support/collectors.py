"""Killing a run's collector, as the system does where memory is short."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_aspects.run.collector import collector_state
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.session import TraceSession
from tests.support.processes import wait_until


def has_delivered(session: TraceSession) -> bool:
    """Return whether the spans of all records were delivered: a later collector repeats none of them."""
    found = []
    for path in Path(session.run_folder).glob("*.ring"):
        reader = RingReader(path, read_only=True)
        found += reader.poll()[0]
        reader.close()
    return not found


def kill_collector(session: TraceSession) -> int:
    """Kill the running collector and return its process id, once the next one runs."""
    process_id = _kill(session)
    wait_until(lambda: _works(session) and session.collector_process_id != process_id)
    return process_id


def kill_collector_for_good(session: TraceSession) -> None:
    """Kill it: it is restarted once; afterwards the run has none."""
    kill_collector(session)
    _kill(session)


@contextmanager
def started_again(session: TraceSession, **variables: str) -> Iterator[dict[str, Any]]:
    """A collector that is started for the run by hand. After the block the run has ended: its summary."""
    command = [sys.executable, "-m", "sgl_aspects.collector", session.run_folder]
    environment = {**session.settings.collector_environment(), **variables}
    summary: dict[str, Any] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as collector:
        yield summary
        Path(session.run_folder, "closing").touch()
        assert collector.stdout is not None
        summary |= json.loads(collector.stdout.read())
    assert collector.returncode == 0


def _kill(session: TraceSession) -> int:
    wait_until(lambda: _works(session))
    process_id = session.collector_process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGKILL)
    wait_until(lambda: not _works(session) or session.collector_process_id != process_id)
    return process_id


def _works(session: TraceSession) -> bool:
    state = collector_state(session.run_folder)
    return state is not None and state.is_alive
