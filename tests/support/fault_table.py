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
        (f"{_FAULTS}a_kill", f"{_TRACING}test_killed_collectors.py"),
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
        (f"{_SURROUNDINGS}a_disk", f"{_TRACING}test_files.py"),
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
        "a wall clock that is set a year back, an hour forth",
        (f"{_TRACING}test_wall_clock.py",),
        "nothing; a run's times go on from its beginning",
    ),
    Fault(
        "rules for a fleet at a hostile address, or of another user",
        ("tests/run/test_fleet.py",),
        "nothing; the last right rules stay in force",
    ),
    Fault(
        "files, links, pipes and folders of another user",
        ("tests/test_anothers_folder.py", "tests/test_private_files.py", "tests/run/test_requests.py"),
        "nothing; they are refused",
    ),
    Fault(
        "hostile wheels and source folders", ("tests/engines/test_source.py",), "nothing; they are refused"
    ),
    Fault(
        "hostile input to the server",
        ("tests/runtime/test_server_fuzz.py", "tests/runtime/test_server.py"),
        "nothing",
    ),
)


class _Outcomes:
    """A plugin of pytest: the outcome of each test by its id, and the reasons of those that were skipped."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}
        self.skipped: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if isinstance(report.longrepr, tuple):
            self.skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.when == "call" or report.failed:
            self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed


class _Selection:
    """A plugin of pytest: the tests of these faults alone."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._wanted = tuple(test for fault in faults for test in fault.tests)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        selected = [item for item in items if item.nodeid.startswith(self._wanted)]
        config.hook.pytest_deselected(items=[item for item in items if item not in selected])
        unknown = [test for test in self._wanted if not any(i.nodeid.startswith(test) for i in selected)]
        if unknown:
            raise pytest.UsageError(f"no test's id begins with {', '.join(unknown)}: was it moved?")
        items[:] = selected


def table(faults: Sequence[Fault], outcomes: _Outcomes) -> str:
    """Return the rows, in Markdown, and below them what was not tried here."""
    lines = ["| fault or attack | tried | survived | lost |", "| --- | ---: | ---: | --- |"]
    notes = []
    for fault in faults:
        found = [passed for test, passed in outcomes.passed.items() if test.startswith(tuple(fault.tests))]
        left_out = [why for test, why in outcomes.skipped.items() if test.startswith(tuple(fault.tests))]
        lines.append(f"| {fault.name} | {len(found)} | {sum(found)} | {fault.lost if found else '–'} |")
        if left_out:
            reasons = "; ".join(dict.fromkeys(left_out))
            notes.append(f"{fault.name}: {len(left_out)} not tried here: {reasons}")
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def run(faults: Sequence[Fault], words: Sequence[str]) -> int:
    """Run the tests, print the table, and return pytest's exit status."""
    outcomes = _Outcomes()
    paths = dict.fromkeys(test.partition("::")[0] for fault in faults for test in fault.tests)
    command = ["-q", "-p", "no:cacheprovider", "-m", "not attach", *words, *paths]
    status = int(pytest.main(command, [outcomes, _Selection(faults)]))
    print(table(faults, outcomes))
    return status


if __name__ == "__main__":
    sys.exit(run(FAULTS, sys.argv[1:]))
