"""The table of `make test-faults` says what was tried."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.processes import python

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = """
import pytest

def test_a_passes(): pass

@pytest.mark.skipif(True, reason="no such device")
def test_b_is_skipped_before_it_begins(): pass

def test_b_is_skipped_in_it(): pytest.skip("no such device")

def test_c_fails(): raise ValueError

@pytest.fixture
def failing_at_its_end():
    yield
    raise ValueError

def test_c_fails_at_its_end(failing_at_its_end): pass
"""


def table(folder: Path, *beginnings: str) -> subprocess.CompletedProcess[str]:
    """The table of these tests, a row for each beginning of names."""
    (folder / "test_these.py").write_text(TESTS)
    program = (
        "import sys; from tests.support.fault_table import Fault, run;"
        "sys.exit(run([Fault(name, [f'test_these.py::test_{name}'], 'little') for name in sys.argv[1:]], []))"
    )
    return python("-c", program, *beginnings, cwd=folder, PYTHONPATH=str(ROOT))


def test_a_skipped_test_was_not_tried_and_one_that_fails_at_its_end_not_survived(tmp_path: Path) -> None:
    done = table(tmp_path, "a", "b", "c")
    rows = done.stdout[done.stdout.index("| --- |") :].splitlines()[1:]
    assert rows == [
        "| a | 1 | 1 | little |",
        "| b | 0 | 0 | – |",
        "| c | 2 | 0 | little |",
        "",
        "b: 2 not tried here: no such device",
    ]
    assert done.returncode == 1


def test_a_name_that_no_test_has_is_an_error(tmp_path: Path) -> None:
    done = table(tmp_path, "a", "d")
    assert "no test's id begins with test_these.py::test_d: was it moved?" in done.stdout + done.stderr
    assert done.returncode not in (0, 1)
