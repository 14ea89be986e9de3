"""Programs that become daemons, or leave some behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import wait_until, without_room

RECORD = """
import os, sys, time
from sgl_aspects.tracing.records import SpanType
from sgl_aspects.tracing.session import current
write = current().recorder.spans(SpanType("work"))

def record(number):
    write(number, number, 0, time.monotonic_ns(), time.monotonic_ns())

record(1)
with open("run", "w") as file:
    file.write(current().run_folder)
"""

DAEMON = """
launcher = os.getpid()
if os.fork():
    os.wait()
    sys.exit()
os.setsid()
if os.fork():
    os._exit(0)
os.closerange(0, 256)
while os.path.exists(f"/proc/{launcher}"):
    time.sleep(0.05)
record(2)
"""

PRINTS = """
if os.fork():
    os.wait()
    sys.exit()
os.closerange(0, 256)
record(2)
for stream in range(3):
    try:
        os.write(stream, b"text")
    except OSError:
        pass
"""

OPENS_OTHERS = """
os.closerange(3, 256)
files = [open(f"other-{number}", "w") for number in range(12)]
child = os.fork()
if not child:
    record(2)
    sys.exit(sum(os.fstat(file.fileno()).st_size for file in files))  # an error if one is closed
for file in files:
    file.write("text")
record(3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


IN_BACKGROUND = """
if not os.fork():
    record(2)
    time.sleep(60)
"""


def run(folder: Path, program: str, *before: str) -> str:
    """Run the program, wait for its collector's end, too, and return its spans."""
    (folder / "program.py").write_text(RECORD + program)
    command = [sys.executable, "-m", "sgl_aspects", "run", "--file", str(folder / "spans")]
    with open(folder / "errors", "w+") as errors:  # a pipe would be open until the daemon ends
        done = subprocess.run(
            [*before, *command, "--", sys.executable, "program.py"], cwd=folder, stderr=errors, timeout=60
        )
        run_folder = (folder / "run").read_text()
        wait_until(lambda: not os.path.exists(run_folder))
        errors.seek(0)
        said = f"sgl-aspects: tracing requests (--level 1) to {folder / 'spans'}\n"
        assert (done.returncode, without_room(errors.read())) == (0, said)
    return (folder / "spans").read_text()


def test_a_daemon_that_closes_all_descriptors_is_traced_to_its_end(tmp_path: Path) -> None:
    assert run(tmp_path, DAEMON).count('"name":"work"') == 2


def test_what_a_daemon_without_standard_streams_prints_is_not_written_to_its_ring(tmp_path: Path) -> None:
    assert run(tmp_path, PRINTS).count('"name":"work"') == 2


def test_files_that_a_program_opens_after_closing_all_descriptors_are_left_alone(tmp_path: Path) -> None:
    """They have the numbers of the tracer's own: neither read, unlocked nor closed, here and in a child."""
    assert run(tmp_path, OPENS_OTHERS).count('"name":"work"') == 3
    assert [(tmp_path / f"other-{number}").read_text() for number in range(12)] == ["text"] * 12


@pytest.mark.skipif(
    subprocess.run(["unshare", "-pf", "true"], capture_output=True).returncode != 0, reason="needs unshare"
)
def test_a_container_ends_with_its_first_process_once_its_spans_are_delivered(tmp_path: Path) -> None:
    """The kernel ends what the program leaves in the background, and the collector, too."""
    assert run(tmp_path, IN_BACKGROUND, "unshare", "-pf").count('"name":"work"') >= 1
