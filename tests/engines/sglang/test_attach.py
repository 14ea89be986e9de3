"""Real SGLang under load, started without us: attached to and detached from, with unchanged answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.support.attachable import run_folder
from tests.support.attached_load import Streams
from tests.support.processes import wait_until
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]

ROUNDS = 3


def _kill_at_work(process_id: int, file: Path) -> None:
    """`kill -9` of the command while it attaches: its guard detaches from the engine, and removes the run."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sgl_aspects", "attach", str(process_id), "--file", str(file)],
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: run_folder(process) is not None)
    run = run_folder(process)
    assert run is not None
    wait_until(lambda: any(run.glob("attach/*.taken")), 300)
    process.kill()
    process.wait()
    wait_until(lambda: not run.exists(), 300)


def test_three_rounds_under_sixteen_streams(tmp_path: Path) -> None:
    make_mini(tmp_path / "mini")
    with serve(tmp_path / "mini", tmp_path / "log") as server:
        streams = Streams.begin(server, "/generate")
        for number in range(ROUNDS):
            streams.attach(tmp_path / f"spans-{number}.jsonl")
        _kill_at_work(server.process.pid, tmp_path / "killed.jsonl")
        streams.attach(tmp_path / f"spans-{ROUNDS}.jsonl")
        streams.end(processes=3)
