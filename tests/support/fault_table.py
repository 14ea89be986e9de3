"""Runs the tests of faults and attacks, and prints a table: tried, survived, lost.

    python -m tests.support.fault_table [WORDS OF PYTEST ...]

The tests are where their subjects are; the table names them by path.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import pytest

_TRACING = "tests/tracing/"
_FAULTS = f"{_TRACING}test_faults.py::test_"
_SURROUNDINGS = f"{_TRACING}test_surroundings.py::test_"


class Fault(NamedTuple):
    """A kind of fault: its tests, by the beginnings of their ids, and what it costs."""

    name: str
    tests: Sequence[str]
    lost: str


FAULTS = (
    Fault(
        "collector, scheduler or server killed at each moment, 16 streams",
        (f"{_FAULTS}a_kill", f"{_TRACING}test_killed_collectors.py", f"{_TRACING}test_endurance.py"),
        "nothing that ended; open spans are marked `unfinished`",
    ),
    Fault(
        "SIGTERM and SIGINT to all processes",
        ("tests/runtime/test_server_processes.py::test_a_signal", "tests/cli/test_interrupted.py"),
        "nothing",
    ),
    Fault(
        "a collector that is stopped",
        (f"{_FAULTS}a_collector_that_is_stopped",),
        "nothing until a ring is full",
    ),
    Fault(
        "a disk that is full, a file that another run writes",
        (f"{_FAULTS}a_disk", f"{_SURROUNDINGS}a_disk", f"{_TRACING}test_files.py"),
        "spans that did not fit, counted",
    ),
    Fault(
        "a full /dev/shm, `ulimit -f`",
        (
            f"{_SURROUNDINGS}where",
            f"{_SURROUNDINGS}without",
            *(f"{_TRACING}test_ring.py::test_{name}" for name in ("a_ring", "many", "no_memory", "a_limit")),
        ),
        "nothing; rings are smaller, and logged",
    ),
    Fault(
        "folders that cannot be written, or vanish",
        tuple(
            f"{_SURROUNDINGS}{name}" for name in ("a_run_folder", "attaching", "an_engine", "a_process_that")
        ),
        "the spans of that process, with a warning",
    ),
    Fault(
        "no file descriptors, a memory limit",
        (f"{_FAULTS}a_collector_without", f"{_SURROUNDINGS}a_run_of_more"),
        "spans of what the collector could not open",
    ),
    Fault(
        "hostile, slow, hanging and failing backends",
        (f"{_TRACING}test_backend.py", f"{_TRACING}test_otlp.py"),
        "spans that were refused, counted",
    ),
    Fault(
        "fuzzed and damaged rings",
        (f"{_TRACING}test_hostile.py", f"{_TRACING}test_dump.py"),
        "damaged records, counted",
    ),
    Fault("address and undefined-behaviour sanitizers over the extension", (f"{_FAULTS}address",), "nothing"),
    Fault(
        "damaged files and hostile texts in the report page",
        ("tests/view/test_report.py", "tests/view/test_report_page.py"),
        "nothing; a bad line is named",
    ),
    Fault(
        "hostile input to the server",
        ("tests/runtime/test_server_fuzz.py", "tests/runtime/test_server.py"),
        "nothing",
    ),
)


class _Outcomes:
    """A plugin of pytest: the outcome of each test by its id."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped:
            self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed


def table(passed: dict[str, bool]) -> str:
    """Return the rows, in Markdown."""
    lines = ["| fault or attack | tried | survived | lost |", "| --- | ---: | ---: | --- |"]
    for fault in FAULTS:
        found = [passed[each] for each in passed if each.startswith(tuple(fault.tests))]
        lines.append(f"| {fault.name} | {len(found)} | {sum(found)} | {fault.lost} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    outcomes = _Outcomes()
    paths = dict.fromkeys(each.partition("::")[0] for fault in FAULTS for each in fault.tests)
    wanted = tuple(each for fault in FAULTS for each in fault.tests)

    class Selection:
        def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
            dropped = [item for item in items if not item.nodeid.startswith(wanted)]
            items[:] = [item for item in items if item.nodeid.startswith(wanted)]
            config.hook.pytest_deselected(items=dropped)

    ended = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-m", "not attach", *words, *paths], [outcomes, Selection()]
    )
    print(table(outcomes.passed))
    return int(ended)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
