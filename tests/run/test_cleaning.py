"""What killed processes left is removed by the next command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sgl_aspects.run import prepared
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
