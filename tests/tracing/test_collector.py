"""Recorder and collector without an engine: what processes record reaches real backends."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.tracing import attach, context
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.record import format as ring_format
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import RequestBegin, SpanEnd, SpanType
from tests.support import workers
from tests.support.collectors import has_delivered, kill_collector, kill_collector_for_good
from tests.support.otlp_receiver import Receiver, Span, grpc_receiver, http_receiver
from tests.support.processes import is_running, wait_until, without_room
from tests.support.rings import poll, read_all
from tests.support.sessions import REQUEST, begin, read_file, run_scheduler

spawn = multiprocessing.get_context("spawn")


def by_name(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def ignores(process_id: int | None, number: signal.Signals) -> bool:
    status = Path(f"/proc/{process_id}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_records_of_two_processes_become_one_trace(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=secret")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    origin = TraceContext(0xABC, 0xDEF, True, "vendor=1", True)
    with (grpc_receiver if protocol == "grpc" else http_receiver)() as receiver:
        with attach(endpoint=receiver.endpoint, service_name="my-server") as session:
            end = begin(session, "r1", origin)
            run_scheduler(session, ["r1"])
            span_id = f"{end():016x}"
        spans = receiver.spans
    assert {header.get("x-api-key") for header in receiver.headers} == {"secret"}
    assert sorted(span.name for span in spans) == [
        "chat m",
        "decode",
        "queue",
        "scheduler.step",
        "scheduler.step",
    ]
    (root,) = by_name(spans, "chat m")
    assert (root.trace_id, root.span_id, root.parent_id) == (f"{0xABC:032x}", span_id, f"{0xDEF:016x}")
    assert root.kind == 2  # server
    assert root.trace_state == "vendor=1"
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(1e-6)
    for child in by_name(spans, "queue") + by_name(spans, "decode"):
        assert (child.trace_id, child.parent_id) == (root.trace_id, root.span_id)
        assert root.start <= child.start <= child.end <= root.end
    # A step whose requests are still to be found may come after one that has none.
    step, empty = sorted(by_name(spans, "scheduler.step"), key=lambda span: not span.links)
    assert empty.links == []
    assert step.trace_id != root.trace_id
    assert step.links == [(root.trace_id, root.span_id)]
    assert root.resource["service.name"] == "my-server"
    assert root.resource["deployment.environment"] == "test"
    assert root.resource["process.pid"] == os.getpid() != step.resource["process.pid"]
    summary = session.close()
    assert summary.spans_recorded == summary.exported["otlp"] == 5
    assert summary.not_delivered == {"otlp": 0}
    assert not os.path.exists(session.run_folder)


def test_a_request_id_used_again_does_not_mix(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        traces = []
        for _ in range(3):
            origin = context.new()
            traces.append(f"{origin.trace_id:032x}")
            begin(session, "same", origin)()
        # Three times in one go, after all three ended for the caller: only the order distinguishes them.
        run_scheduler(session, ["same", "same", "same"])
    for name in ("chat m", "queue", "decode"):
        assert sorted(span.trace_id for span in receiver.named(name)) == sorted(traces)
    decodes = {span.trace_id: span.start for span in receiver.named("decode")}
    assert [decodes[trace] for trace in traces] == sorted(decodes.values())


def test_a_request_that_was_never_sent_is_passed_over(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        recorder, now = session.recorder, time.monotonic_ns()
        failed = recorder.new_id()
        recorder.write(RequestBegin(failed, "same", now, *context.new(), "chat m", {}))
        recorder.spans(REQUEST)(failed, failed, 0, now, now, [0], "ValueError")
        end = begin(session, "same", TraceContext(0x77))
        run_scheduler(session, ["same"])
        end()
    assert [span.trace_id for span in receiver.named("decode")] == [f"{0x77:032x}"]


def test_a_killed_scheduler_loses_no_finished_span(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        end = begin(session, "r1")
        run_scheduler(session, ["r1"], "kill")
        end("SchedulerDiedError")
    assert len(receiver.named("decode")) == len(receiver.named("queue")) == 1
    (root,) = receiver.named("chat m")
    assert root.is_error
    assert root.attributes["error.type"] == "SchedulerDiedError"
    whole, unfinished = sorted(receiver.named("scheduler.step"), key=lambda span: span.is_error)
    assert not whole.is_error
    assert unfinished.is_error
    assert unfinished.attributes["sgl_aspects.unfinished"] is True
    assert session.close().unfinished == 1


def test_a_killed_owner_leaves_no_collector_and_no_files(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    ready, theirs = spawn.Pipe()
    owner = spawn.Process(target=workers.own_a_run, args=(theirs, str(file)))
    owner.start()
    folder, collector = ready.recv()
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    wait_until(lambda: not is_running(collector) and not os.path.exists(folder))
    (root,) = [*read_file(file)]
    assert root.is_error
    assert root.attributes["error.type"] == "unfinished"
    owner.close()


def test_a_collector_outlives_the_first_process_for_the_others(tmp_path: Path) -> None:
    ready, theirs = spawn.Pipe()
    owner = spawn.Process(target=workers.own_a_run, args=(theirs, str(tmp_path / "traces.jsonl")))
    owner.start()
    folder, collector = ready.recv()
    other = spawn.Process(target=workers.record_like_a_scheduler, args=(folder, [], "hang"))
    other.start()
    wait_until(lambda: len(list(Path(folder).glob("*.ring"))) == 2)
    owner.kill()
    owner.join()
    time.sleep(0.5)
    assert is_running(collector)
    other.kill()
    other.join()
    wait_until(lambda: not is_running(collector) and not os.path.exists(folder))
    owner.close()
    other.close()


def test_an_endpoint_that_is_down_is_counted_and_costs_the_others_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE_FLUSH_SECONDS", "1")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    file = tmp_path / "traces.jsonl"
    with attach(endpoint="http://127.0.0.1:9", file=str(file)) as session:
        for number in range(50):
            begin(session, f"r{number}")()
        started = time.monotonic()
    assert time.monotonic() - started < 30
    summary = session.close()
    assert summary.exported == {"otlp": 0, "otlp-json-file": 50}
    assert summary.not_delivered == {"otlp": 50, "otlp-json-file": 0}
    assert "50 NOT delivered" in str(summary)
    said = capfd.readouterr().err
    assert said.count("nothing listens at http://127.0.0.1:9: ") == 1
    assert "50 NOT delivered" in said


def test_the_file_holds_what_the_receiver_got(receiver: Receiver, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    with attach(endpoint=receiver.endpoint, file=str(file)) as session:
        end = begin(session, "r1", TraceContext(0xABC, 0xDEF, True, "vendor=1", True))
        run_scheduler(session, ["r1"])
        end("Problem")
    parsed = [*read_file(file)]
    assert sorted(parsed, key=repr) == sorted(receiver.spans, key=repr)
    first = json.loads(file.read_text().splitlines()[0])
    span = first["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert len(span["traceId"]) == 32
    assert isinstance(span["kind"], int)
    assert isinstance(span["startTimeUnixNano"], str)


def test_the_console_exporter_writes_to_the_engine_s_output(capfd: pytest.CaptureFixture[str]) -> None:
    with attach(exporters=["console"]) as session:
        begin(session, "r1")()
    assert '"name": "chat m"' in capfd.readouterr().out
    assert session.close().exported == {"console": 1}


def test_values_that_no_encoder_takes_do_not_cost_the_batch(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        recorder, now = session.recorder, time.monotonic_ns()
        odd = SpanType("odd", {"huge": int, "text": str, "thing": str, "absent": str, "list": list})
        span_id = recorder.new_id()
        values = [1 << 70, "a\ud800b", 1j, None, [1, 2]]
        recorder.spans(odd)(span_id, span_id, 0, now, now, values)  # type: ignore[arg-type]
        begin(session, "r\ud800")()
    assert len(receiver.spans) == 2
    (span,) = receiver.named("odd")
    assert span.attributes == {"huge": str(1 << 70), "text": "a?b", "thing": "1j", "list": [1, 2]}


def test_a_writer_far_ahead_drops_and_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ring_format, "SLOTS", 256)
    recorder = RingRecorder(str(tmp_path))
    for number in range(1000):
        recorder.spans(REQUEST)(recorder.new_id(), 1, 1, 1, 2, [number])
    reader = RunReader(str(tmp_path))
    first = [record for _, record in poll(reader)]
    assert [record.values for record in first if isinstance(record, SpanEnd)] == [[n] for n in range(255)]
    assert len(first) + len(read_all(reader)) == 256
    assert reader.dropped == 744
    recorder.spans(REQUEST)(recorder.new_id(), 1, 1, 1, 2, [2000])
    (record,) = [record for _, record in poll(reader)]
    assert isinstance(record, SpanEnd)
    assert record.values == [2000]
    recorder.close()
    reader.close()


@pytest.mark.usefixtures("exports_at_once")
def test_a_long_run_uses_bounded_space_and_loses_nothing(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_format, "SLOTS", 1024)
    ring: BinaryIO | None = None
    with attach(endpoint=receiver.endpoint) as session:
        for batch in range(10):
            for number in range(300):  # 3 slots each
                begin(session, f"r{number}")()
            # Opened once: closing it would give up the lock that this process holds as its writer.
            ring = ring or next(Path(session.run_folder).glob("*.ring")).open("rb")
            wait_until(functools.partial(has_taken, ring, 900 * batch + 900))
    assert session.close().dropped == 0
    assert session.close().spans_recorded == 3000 == len(receiver.spans)
    assert ring is not None
    ring.close()


def has_taken(ring: BinaryIO, records: int) -> bool:
    """Whether the collector has read this number of records."""
    return int.from_bytes(os.pread(ring.fileno(), 8, ring_format.WORD_TAKEN * 8), "little") == records


def test_a_forked_child_records_on_its_own(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        begin(session, "parent")()
        code = 0
        child = os.fork()
        if child == 0:
            try:
                begin(session, "child")()
                session.close()
            except BaseException:
                code = 1
                raise
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        begin(session, "parent again")()
    spans = receiver.spans
    assert len({span.span_id for span in spans}) == 3
    pids = {span.attributes["gen_ai.request.id"]: span.resource["process.pid"] for span in spans}
    assert pids == {"parent": os.getpid(), "child": child, "parent again": os.getpid()}


def test_ctrl_c_is_for_the_engine(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        collector = session.collector_process_id
        assert collector is not None
        assert os.getsid(collector) != os.getsid(0)
        begin(session, "r1")()
        wait_until(lambda: ignores(collector, signal.SIGINT))
        os.kill(collector, signal.SIGINT)
        begin(session, "r2")()
    assert len(receiver.spans) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="threads with priorities of their own are Linux's")
def test_every_thread_of_a_collector_lets_the_engine_go_first(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        begin(session, "r1")()
        wait_until(lambda: len(os.listdir(f"/proc/{session.collector_process_id}/task")) > 1)
        threads = [int(name) for name in os.listdir(f"/proc/{session.collector_process_id}/task")]
        lower = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        assert lower == {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)}


def test_a_killed_collector_is_reported(receiver: Receiver) -> None:
    session = attach(endpoint=receiver.endpoint)
    kill_collector_for_good(session)
    begin(session, "r1")()
    assert "killed" in session.close().problem
    assert not os.path.exists(session.run_folder)


@pytest.mark.usefixtures("exports_at_once")
@pytest.mark.parametrize(
    "by", [signal.SIG_DFL, signal.SIG_IGN], ids=["an engine", "one that ignores SIGCHLD"]
)
def test_a_killed_collector_is_started_again_once(
    by: signal.Handlers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its settings, from where it was; it reports that, and so do views of the run."""
    file = tmp_path / "traces.jsonl"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kept")
    before = signal.signal(signal.SIGCHLD, by)
    try:
        session = attach(file=str(file))
    finally:
        signal.signal(signal.SIGCHLD, before)
    begin(session, "before")()
    wait_until(lambda: file.exists() and '"before"' in file.read_text() and has_delivered(session))
    first = kill_collector(session)
    second = session.collector_process_id
    assert second != first
    assert main(["control", "--run", session.run_folder]) == 0
    begin(session, "after")()
    summary = session.close()
    assert (summary.restarted, summary.problem, summary.exported) == (True, "", {"otlp-json-file": 1})
    spans = [*read_file(file)]
    assert [span.attributes["gen_ai.request.id"] for span in spans] == ["before", "after"]
    assert {span.resource["service.name"] for span in spans} == {"kept"}
    said = capfd.readouterr()
    assert f"collector: pid {second}, restarted\n" in said.out
    assert f"process {first} was killed (signal 9): process {second} goes on" in said.err


@pytest.mark.usefixtures("exports_at_once")
def test_a_collector_that_is_started_again_by_hand_repeats_nothing_that_was_delivered(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    session = attach(file=str(file))
    ended, still_open = begin(session, "ended"), begin(session, "open")
    ended()
    wait_until(lambda: file.exists() and '"ended"' in file.read_text() and has_delivered(session))
    kill_collector_for_good(session)
    begin(session, "without a collector")()
    command = [sys.executable, "-m", "sgl_aspects.collector", session.run_folder]
    settings = Path(session.run_folder, "collector.json")
    assert settings.stat().st_mode & 0o777 == 0o600
    # The run folder has the traces' destination.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as again:
        wait_until(lambda: "without a collector" in file.read_text())
        second = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert second.returncode == 1
        assert "has a collector" in second.stderr
        still_open()
        Path(session.run_folder, "closing").touch()
        assert again.wait(60) == 0
        assert again.stdout is not None
        assert json.loads(again.stdout.read())["spans_recorded"] == 2
    assert "killed" in session.close().problem
    spans = [*read_file(file)]
    assert sorted(span.attributes["gen_ai.request.id"] for span in spans) == [
        "ended",
        "open",
        "without a collector",
    ]
    assert not any(span.is_error for span in spans)


def test_the_run_folder_is_kept_on_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE_KEEP", "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with attach(file=str(tmp_path / "traces.jsonl")) as session:
        begin(session, "r1")()
    (kept,) = Path(session.run_folder).glob("*.ring")
    assert b"r1" in kept.read_bytes()
    subprocess.run(["rm", "-r", session.run_folder], check=True)


def test_a_program_that_just_ends_has_delivered(receiver: Receiver, tmp_path: Path) -> None:
    """Attached by the environment, as ``load_plugins()`` does it, and never closed."""
    code = """if True:
        import time
        from sgl_aspects.tracing import context, session
        from sgl_aspects.tracing.plugin import activate
        from sgl_aspects.tracing.records import RequestBegin, SpanType
        activate()
        recorder, now = session.current().recorder, time.monotonic_ns()
        span_id = recorder.new_id()
        recorder.write(RequestBegin(span_id, "r", now, *context.new(), "chat m", {}))
        recorder.spans(SpanType("x"))(span_id, span_id, 0, now, now + 5)
        print(session.current().run_folder)
    """
    environment = {**os.environ, "SGL_ASPECTS_TRACE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("w") as out, errors.open("w") as err:  # files: a pipe would wait for the collector too
        command = [sys.executable, "-W", "error", "-c", code]
        subprocess.run(command, env=environment, stdout=out, stderr=err, check=True)
    assert [span.name for span in receiver.spans] == ["chat m"]
    assert not os.path.exists(output.read_text().strip())
    assert without_room(errors.read_text()) == ""
