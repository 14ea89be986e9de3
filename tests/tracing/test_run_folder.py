"""The folder of a run: who its collector is."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from sgl_aspects.tracing.run_folder import collector_state, take_run
from tests.support.processes import is_running


def fork_to_take(run_folder: Path) -> int:
    """Fork a process that makes itself the run's collector; gives its id."""
    if process_id := os.fork():
        return process_id
    try:
        take_run(str(run_folder))
        time.sleep(60)
    finally:
        os._exit(1)


def test_a_run_whose_collector_is_alive_names_its_process(tmp_path: Path) -> None:
    """Also in the moment in which one takes the run over: never 0, or the id of the one before."""
    for _ in range(40):
        taker = fork_to_take(tmp_path)
        while (state := collector_state(tmp_path)) is None or not state.is_alive:
            assert is_running(taker)
        os.kill(taker, signal.SIGKILL)
        os.waitpid(taker, 0)
        assert state.process_id == taker
