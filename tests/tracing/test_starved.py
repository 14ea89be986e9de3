"""A collector that gets little of the processors loses no spans."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from sgl_aspects.run import keeper
from sgl_aspects.tracing.collect.process import Collector
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.export import pipelines
from sgl_aspects.tracing.export.pipelines import Idleness, Pipeline, close_all
from sgl_aspects.tracing.settings import TraceSettings
from tests.support import workers
from tests.support.processes import wait_until
from tests.support.sessions import collected

spawn = multiprocessing.get_context("spawn")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: reads threads' states in /proc")


@pytest.fixture
def busy_processor() -> Iterator[int]:
    """A processor on which another process runs all the time."""
    processor = min(os.sched_getaffinity(0))
    spin = f"import os\nos.sched_setaffinity(0, {{{processor}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield processor
        process.kill()


def compute_starved(processor: int, seconds: float) -> None:
    """Use ``seconds`` of this processor, of which the calling thread gets a tenth or less."""
    os.sched_setaffinity(0, {processor})
    os.setpriority(os.PRIO_PROCESS, 0, 10)  # of this thread alone
    data = bytes(1 << 20)
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        hashlib.sha256(data)  # without the interpreter's lock


def pipeline_of(thread: threading.Thread) -> Any:
    """One whose exporter works in this thread, and has taken nothing yet."""
    return SimpleNamespace(worker=thread, done=0)


def test_waiting_for_a_processor_does_not_count(busy_processor: int) -> None:
    thread = threading.Thread(target=compute_starved, args=(busy_processor, 0.1))
    begun = time.monotonic()
    thread.start()
    idle, counted = Idleness(pipeline_of(thread)), 0.0
    while thread.is_alive():
        seconds = idle.seconds()
        counted = seconds if thread.is_alive() else counted
        time.sleep(0.005)
    assert counted < (time.monotonic() - begun) / 2


def test_sleeping_counts() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    idle = Idleness(pipeline_of(thread))
    wait_until(lambda: idle.seconds() >= 0.2)
    end.set()
    thread.join()


class Starved(SpanExporter):
    """An exporter that needs a processor for longer than the patience with one that hangs."""

    def __init__(self, processor: int) -> None:
        self._processor = processor

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        compute_starved(self._processor, 0.08)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to end."""


def test_an_exporter_without_a_processor_is_not_taken_for_one_that_hangs(
    monkeypatch: pytest.MonkeyPatch, busy_processor: int
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    monkeypatch.setattr(pipelines, "_PATIENCE_SECONDS", 0.4)
    pipeline = Pipeline("starved", Starved(busy_processor))
    for number in range(2):
        pipeline.offer([collected(number + 2)])
    close_all([pipeline], 0.4)
    assert (pipeline.exported, pipeline.not_delivered) == (2, 0)


def test_one_that_hangs_loses_its_spans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    class Hanging(Starved):
        def export(self, spans: Sequence[Any]) -> SpanExportResult:
            end.wait()
            return SpanExportResult.SUCCESS

    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1")
    monkeypatch.setattr(pipelines, "_PATIENCE_SECONDS", 0.2)
    pipeline = Pipeline("hanging", Hanging(0))
    pipeline.offer([collected(number + 2) for number in range(5)])  # returns
    close_all([pipeline], 0.2)
    assert (pipeline.exported, pipeline.not_delivered) == (0, 5)
    end.set()


def test_a_collector_that_is_behind_goes_beside_the_engine_until_all_is_read(tmp_path: Path) -> None:
    rids = [f"r{number}" for number in range(3000)]  # three records each, more than an eighth of a ring
    owner = spawn.Process(target=workers.record_like_a_scheduler, args=(str(tmp_path), rids, "hang"))
    owner.start()
    wait_until(lambda: [ring for ring in RunReader(str(tmp_path)).find() if ring.is_behind()] != [])
    ranks: list[int] = []

    def rank(value: int) -> None:
        ranks.append(value)
        if value and 0 in ranks:
            owner.kill()

    Collector(str(tmp_path), TraceSettings(exporters=())).follow(rank)
    owner.join()
    kept = [value for value, before in zip(ranks, [None, *ranks]) if value != before]
    assert kept == [10, 0, 10, 0]


@pytest.mark.skipif(not os.path.exists("/proc/self/autogroup"), reason="a kernel without autogroups")
def test_a_collector_that_is_started_again_starts_beside_the_engine(tmp_path: Path) -> None:
    """The one that was killed had given the session a low rank, at which the next one would hardly start."""
    ranks = tmp_path / "ranks"
    is_killed = (
        "import os, pathlib, time\n"
        "session = pathlib.Path('/proc/self/autogroup')\n"
        f"open({str(ranks)!r}, 'a').write(session.read_text().split()[-1])\n"
        "session.write_text('10')\n"
        "time.sleep(0.2)\n"  # ordinary users may set it ten times a second
        "os.kill(os.getpid(), 9)"
    )
    read, report = os.pipe()
    words = [
        sys.executable,
        keeper.__file__,
        str(report),
        str(tmp_path / "mark"),
        sys.executable,
        "-c",
        is_killed,
    ]
    subprocess.run(words, pass_fds=(report,), start_new_session=True, stderr=subprocess.DEVNULL, check=True)
    os.close(report)
    with open(read, "rb") as until_it_ends:
        until_it_ends.read()
    assert ranks.read_text() == "00"
