"""What killed processes left is removed by the next command."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from sgl_aspects.run import prepared
from sgl_aspects.run.cleaning import STAYING, clean_up, remove_dead_runs
from sgl_aspects.run.folder import begin_weaving, hold_run, make_run_folder, remove_run_folder
from sgl_aspects.run.requests import prepared_process

PREPARED = """
import os, signal
from sgl_aspects.run import prepared
prepared.prepare()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_control_blocks_of_killed_processes_go_with_the_next_run() -> None:
    killed = subprocess.run([sys.executable, "-c", PREPARED], stdout=subprocess.PIPE, text=True, check=False)
    block = Path(prepared.folder_of(os.geteuid()), prepared.block_prefix() + killed.stdout.strip())
    assert block.exists()
    assert prepared_process(int(killed.stdout), os.geteuid()) is None
    command = [sys.executable, "-m", "sgl_aspects", "run", "--level", "0", "--", sys.executable, "-c", "pass"]
    subprocess.run(command, check=True)
    assert not block.exists()


def test_folders_of_attaches_whose_command_and_guard_were_killed_go_but_for_the_latest() -> None:
    """One that has no collector and is woven, or that has only begun, stays."""
    folders = [Path(make_run_folder()) for _ in range(STAYING + 3)]
    try:
        for folder in folders:
            begin_weaving(folder)
        held = hold_run(str(folders[1]))
        assert held is not None
        for folder in folders[:-1]:
            os.utime(folder, (0, 0))
        remove_dead_runs(folders)
        assert [folder.exists() for folder in folders] == [False] + [True] * (STAYING + 2)
        held.close()
    finally:
        for folder in folders:
            remove_run_folder(str(folder))


def test_runs_that_end_meanwhile_stop_no_collector() -> None:
    own, is_done = make_run_folder(), threading.Event()

    def begin_and_end() -> None:
        while not is_done.is_set():
            remove_run_folder(make_run_folder())

    others = threading.Thread(target=begin_and_end)
    others.start()
    try:
        for _ in range(500):
            clean_up(own)
        assert Path(own).exists()
    finally:
        is_done.set()
        others.join()
        remove_run_folder(own)
