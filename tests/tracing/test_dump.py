"""The last seconds of a process, and timelines: from rings as their writers left them."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from sgl_aspects.tracing import attach
from sgl_aspects.tracing.collect import dump
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.record import format as ring_format
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import ProcessDescribed, RequestBegin, RequestSeen, RequestSent, SpanType
from tests.support import workers
from tests.support.processes import command, error_of, output_of, wait_until
from tests.support.rings import poll
from tests.support.sessions import begin, collected, read_file, run_scheduler

pytestmark = pytest.mark.usefixtures("forked_collectors")

spawn = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose scheduler was killed, after the collector had taken all that it wrote."""
    folder = tmp_path_factory.mktemp("run")
    process = spawn.Process(target=workers.record_like_a_scheduler, args=(str(folder), ["r1", "r2"], "kill"))
    process.start()
    process.join(60)
    process.close()
    reader = RunReader(str(folder))
    assert len(list(poll(reader))) == 9
    reader.close()
    return folder


def test_a_dead_process_as_text(killed: Path) -> None:
    printed = output_of(command("dump", "--run", str(killed)))
    names = [line.split(" ms  ")[1].split()[0] for line in printed.splitlines()]
    assert sorted(names) == ["decode", "decode", "queue", "queue", "scheduler.step", "scheduler.step"]
    (unfinished,) = [line for line in printed.splitlines() if "ERROR" in line]
    assert "unfinished=True" in unfinished
    assert "size=2" in printed
    # Which request a phase is of, and which ones a step served, also without the process that received them.
    said = [line.split(" ms  ")[1].split()[:2] for line in printed.splitlines()]
    assert [request for name, request in said if name == "queue"] == ["request=r1", "request=r2"]
    assert ["scheduler.step", "request=r1,r2"] in said


def test_a_dead_process_as_otlp_json(killed: Path, tmp_path: Path) -> None:
    file = tmp_path / "last.jsonl"
    assert (
        command("dump", "--run", str(killed), "--format", "otlp-json", "--output", str(file)).returncode == 0
    )
    spans = [*read_file(file)]
    assert len(spans) == 6
    assert len({span.trace_id for span in spans}) == 4  # two requests, two steps


def test_only_the_last_seconds(killed: Path) -> None:
    done = command("dump", "--run", str(killed), "--last", "0")
    assert [line.split(" ms  ")[1].split()[0] for line in done.stdout.splitlines()] == ["scheduler.step"]


def test_a_timeline_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "trace.json"
    monkeypatch.setenv("SGL_ASPECTS_TRACE_PERFETTO_FILE", str(file))
    with attach(exporters=["perfetto"]) as session:
        end = begin(session, "r1")
        run_scheduler(session, ["r1"])
        end()
        live = command("dump", "--run", session.run_folder, "--format", "perfetto")
    for events in (json.loads(file.read_text()), json.loads(live.stdout)["traceEvents"]):
        spans = {event["name"]: event for event in events if event["ph"] == "X"}
        assert set(spans) == {"chat m", "queue", "decode", "scheduler.step"}
        request, step = spans["chat m"], spans["scheduler.step"]
        assert request["pid"] == os.getpid() != step["pid"]
        assert spans["queue"]["pid"] == step["pid"]
        assert spans["queue"]["tid"] == request["tid"] != step["tid"]
        assert request["ts"] <= spans["queue"]["ts"]
        assert request["args"]["gen_ai.request.id"] == "r1"
        named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
        assert {(event["pid"], event["tid"]) for event in spans.values()} <= named


def test_a_process_that_writes_while_it_is_looked_at(tmp_path: Path) -> None:
    """The ring goes round several times: what is shown is whole, in order, and of the last records."""
    writer = spawn.Process(target=workers.record_for_ever, args=(str(tmp_path),))
    writer.start()
    wait_until(lambda: bool(list(tmp_path.glob("*.ring"))))
    (path,) = tmp_path.glob("*.ring")
    try:
        for _ in range(3):
            wait_until(lambda: _newest(path) > 40_000, 60)
            ring = RingReader(path, read_only=True)
            spans = dump.spans_of([ring], 1e12)
            ring.close()
            assert ring.damaged == 0
            assert len(spans) > 1000
            for span in spans:
                assert span.context is not None
                number = span.context.span_id
                assert span.attributes == {"number": number, "text": f"text-{number % 7}"}
            for form in dump.FORMATS:
                assert dump.write(spans[:50], form)
        wait_until(lambda: _newest(path) > 100_000, 60)
    finally:
        writer.kill()
        writer.join()
    ring = RingReader(path, read_only=True)
    shown = [span.context.span_id for span in dump.spans_of([ring], 1e12) if span.context]
    ring.close()
    assert sorted(shown) == list(range(max(shown) - len(shown) + 1, max(shown) + 1))
    assert len(shown) > 20_000
    assert max(shown) > 100_000


def _newest(path: Path) -> int:
    """The count in the header: searching the ring would leave its writer little of a busy processor."""
    with path.open("rb") as ring:
        return int.from_bytes(os.pread(ring.fileno(), 8, ring_format.WORD_TAKEN * 8), "little")


@pytest.mark.parametrize("seconds", ["nan", "-1", "soon"])
def test_no_number_of_seconds(killed: Path, seconds: str) -> None:
    done = command("dump", "--run", str(killed), "--last", seconds)
    assert done.returncode == 2
    assert f"{seconds}: write a number of seconds" in done.stderr


@pytest.mark.parametrize("seconds", ["inf", "1e300"])
def test_everything(killed: Path, seconds: str) -> None:
    assert len(command("dump", "--run", str(killed), "--last", seconds).stdout.splitlines()) == 6


def test_a_terminal_with_ascii_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    with attach(exporters=["console"]) as session:
        begin(session, "Käse")()
        assert "id=K\\xe4se" in command("dump", "--run", session.run_folder).stdout


def test_a_value_is_shown_once_though_two_attributes_have_it() -> None:
    attributes = {"gen_ai.request.model": "m", "gen_ai.response.model": "m", "mine.model": "other"}
    span = collected(1).with_attributes(attributes).readable()
    assert dump.write([span], "text").rstrip().endswith("s  model=m model=other")


def test_where_nothing_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "1-00000000.ring").touch()
    os.mkfifo(tmp_path / "2-00000000.ring")
    for words in (["dump"], ["control", "--off"]):
        assert "none of its rings can be read" in error_of(command(*words, "--run", str(tmp_path)))


def test_a_damaged_ring_beside_a_good_one(killed: Path, tmp_path: Path) -> None:
    for path in killed.glob("*.ring"):
        shutil.copy(path, tmp_path)
    (tmp_path / "1-00000000.ring").write_bytes(b"SGLARING" + os.urandom(5000))
    (tmp_path / "2-00000000.ring").touch()
    printed = output_of(command("dump", "--run", str(tmp_path)))
    assert len(printed.splitlines()) == 6


def test_a_file_that_cannot_be_written(killed: Path, tmp_path: Path) -> None:
    done = command("dump", "--run", str(killed), "--output", str(tmp_path / "no" / "such"))
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_spans_of_each_rank_name_it(tmp_path: Path) -> None:
    """Also those in a ring that is read before the other rank's."""
    recorders = [RingRecorder(str(tmp_path)) for _ in range(2)]
    for rank, recorder in enumerate(recorders):
        recorder.write(ProcessDescribed({"sgl_aspects.rank": f"tp{rank}"}))
        recorder.spans(SpanType("decode"))(7 + rank, 7 + rank, 0, 5, 9)
    rings = [RingReader(path, read_only=True) for path in tmp_path.glob("*.ring")]
    found = [dict(span.attributes or {}) for span in dump.spans_of(rings, 1e12)]
    assert {each["sgl_aspects.rank"] for each in found} == {"tp0", "tp1"}
    for ring in rings:
        ring.close()
    for recorder in recorders:
        recorder.close()


def test_the_caller_s_ring_is_read_first(tmp_path: Path) -> None:
    """In any order of file names: otherwise thousands of records would wait for their requests."""
    (tmp_path / "clock").write_text("0")  # one for both, as in the folder of a run
    caller = RingRecorder(str(tmp_path))
    caller.write(RequestBegin(7, "r", 5, *TraceContext(0xABC), "chat m", {}))
    caller.write(RequestSent(7))
    caller.spans(SpanType("request"))(7, 7, 0, 5, 9_000_000)
    (first,) = tmp_path.glob("*.ring")
    scheduler = RingRecorder(str(tmp_path))
    scheduler.write(RequestSeen(8, "r", 6))
    write = scheduler.spans(SpanType("decode"))
    for number in range(25_000):
        write(100 + number, 8, 8, 6, 7)
    (second,) = set(tmp_path.glob("*.ring")) - {first}
    second.rename(tmp_path / "0-00000000.ring")
    rings = [RingReader(path, read_only=True) for path in sorted(tmp_path.glob("*.ring"))]
    spans = dump.spans_of(rings, 1e12)
    assert {span.context.trace_id for span in spans if span.context} == {0xABC}
    assert len(spans) == 25_001
    for ring in rings:
        ring.close()
    caller.close()
    scheduler.close()
