"""The requests of a scheduler's records, if ids are reused or the collector is restarted."""

from __future__ import annotations

import collections
import time
from pathlib import Path
from typing import Any, cast

import pytest

from sgl_aspects.tracing import attach, context, schema
from sgl_aspects.tracing.collect import join
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import (
    ProcessDescribed,
    RequestBegin,
    RequestElsewhere,
    RequestSeen,
    SpanBegin,
    SpanEnd,
    SpanType,
)
from sgl_aspects.tracing.sampling import TailChoice
from sgl_aspects.tracing.schema import STEP
from tests.support.joined import Joined, Writer
from tests.support.otlp_receiver import Receiver, below
from tests.support.processes import wait_until
from tests.support.sessions import REQUEST, begin, run_scheduler

pytestmark = pytest.mark.usefixtures("forked_collectors")


def test_a_second_engine_serves_the_same_ids(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        requests = []
        for _ in range(2):
            end = begin(session, "same")
            run_scheduler(session, ["same"])  # a scheduler of its own each time
            requests.append(end())
    for request in requests:
        assert below(receiver.spans, request) == ["decode", "queue"]
    for span in receiver.named("queue"):
        (above,) = [other for other in receiver.spans if other.span_id == span.parent_id]
        assert above.start <= span.start <= span.end <= above.end


def test_two_engines_at_once_serve_the_same_id(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        ends = []
        for _ in range(2):
            ends.append(begin(session, "same"))
            run_scheduler(session, ["same"])
        requests = [end() for end in ends]
    for request in requests:
        assert below(receiver.spans, request) == ["decode", "queue"]


def test_a_request_that_its_scheduler_did_not_trace_takes_nothing_of_the_next(receiver: Receiver) -> None:
    """The scheduler's process was turned off meanwhile (`control --off --pid`)."""
    with attach(endpoint=receiver.endpoint) as session:
        first = begin(session, "same")()
        end = begin(session, "same")
        run_scheduler(session, ["same"])
        second = end()
    assert below(receiver.spans, first) == []
    assert below(receiver.spans, second) == ["decode", "queue"]


def test_what_its_caller_did_not_trace_takes_nothing_from_the_next(receiver: Receiver) -> None:
    """The caller's process was turned on after the scheduler's."""
    with attach(endpoint=receiver.endpoint) as session:
        recorder = session.recorder
        untold = recorder.new_id()
        recorder.write(RequestSeen(untold, "same", time.monotonic_ns()))
        recorder.spans(SpanType("queue"))(recorder.new_id(), untold, untold, 1, 2)
        end = begin(session, "same")
        run_scheduler(session, ["same"])
        request = end()
    assert below(receiver.spans, request) == ["decode", "queue"]
    assert session.close().unjoined == 1
    assert "1 spans left out" in str(session.close())
    assert "lost" not in str(session.close())


def test_a_caller_that_went_away_before_the_scheduler_got_its_request(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        gone = begin(session, "gone")()
        run_scheduler(session, ["gone"])
    assert below(receiver.spans, gone) == ["decode", "queue"]


def test_a_request_inside_a_span_of_ours_is_a_request(receiver: Receiver) -> None:
    """A traced function, or a hook of another request, calls an engine: its request is measured like any."""
    with attach(endpoint=receiver.endpoint) as session:
        recorder, now = session.recorder, time.monotonic_ns()
        outer, kind = recorder.new_id(), SpanType("handle")
        recorder.announce(kind, outer, outer, 0, now)
        attributes = {"gen_ai.operation.name": "chat"}
        trace_id, requests, parent = context.trace_id_of_root(outer), [], outer
        for rid in ("in a function", "in a request"):
            request = recorder.new_id()
            origin = TraceContext(trace_id, parent)
            recorder.write(RequestBegin(request, rid, now, *origin, "chat m", dict(attributes)))
            requests.append(request)
            parent = request
        for span_id in requests:
            recorder.spans(REQUEST)(span_id, span_id, 0, now, now + 5)
        recorder.spans(kind)(outer, outer, 0, now, now + 9)
    assert [span.kind for span in receiver.named("chat m")] == [2, 2]
    assert len({span.trace_id for span in receiver.spans}) == 1
    (figures,) = receiver.points("gen_ai.server.request.duration")
    assert figures.count == 2


@pytest.mark.parametrize("ended", [(17, 7), ()])
def test_an_aborted_request_ends_no_earlier_than_its_phases(ended: tuple[int, ...]) -> None:
    """Its scheduler hears of the abort from the caller's process, after the end there, or this was killed."""
    durations: list[int] = []
    joiner = Joined(on_request=lambda begin, end, _: durations.append(end.end_ns - begin.start_ns))
    joiner.received()
    joiner.received(17, "answer", parent_id=7)
    for span_id in ended:
        joiner.of_caller(SpanEnd(REQUEST, span_id, span_id, 0, 5, 20, error="abort"))
    joiner.of_scheduler(RequestSeen(8, "answer", 10), SpanEnd(SpanType("decode"), 18, 8, 8, 10, 30))
    joiner.finish()
    found = [(span.name, span.end_time) for span in joiner.spans]
    assert found == [("decode", 30), ("chat m", 30), ("chat m", 30)]
    assert durations == [25]


def test_a_request_that_an_earlier_collector_counted_counts_for_no_later_one() -> None:
    counted: list[str] = []
    joiner = Joined(on_request=lambda begin, *_: counted.append(begin.request_id))
    joiner.replay((), {11})  # whose end is not read again yet
    joiner.received(7, "earlier")
    joiner.received(9, "now")
    for span_id, joiner.caller.is_counted in ((7, True), (9, False)):
        joiner.of_caller(SpanEnd(REQUEST, span_id, span_id, 0, 5, 20))
    assert joiner.held() == [11, 9]  # what the next collector counts, if this one is killed now
    joiner.finish()
    assert counted == ["now"]


def test_a_second_process_gets_the_request_of_a_caller_that_went_away() -> None:
    """The scheduler sees it while it is open; the detokenizer, with the first output, when it has ended."""
    joiner = Joined()
    joiner.received()
    joiner.of_caller(SpanEnd(REQUEST, 7, 7, 0, 5, 20))
    for writer, key, seen_ns in (("2", 8, 10), ("3", 9, 30)):
        span = SpanEnd(SpanType(f"of {writer}"), key + 10, key, key, seen_ns, seen_ns + 1)
        joiner.add(Writer(writer), RequestSeen(key, "r", seen_ns), span)  # type: ignore[arg-type]
    joiner.finish()
    assert sorted(joiner.names) == ["chat m", "of 2", "of 3"]
    assert joiner.unjoined == 0


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_reader_far_behind_or_slow_gives_nothing_up(
    monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    """However long the caller's records wait to be read, or the pass takes: the scheduler's wait for them."""
    joiner = Joined()
    joiner.of_scheduler(RequestSeen(8, "r", 6))
    monkeypatch.setattr(join, "_WAITING_SECONDS", 0.0)
    monkeypatch.setattr(join, "_SEEN_LATE_SECONDS", 0.0)
    joiner.of_scheduler(SpanEnd(SpanType("queue"), 9, 8, 8, 6, 7))
    time.sleep(0.001)
    joiner.match_waiting(is_behind=is_behind)
    joiner.received()
    joiner.match_waiting()
    assert joiner.names == ["queue"]
    assert joiner.unjoined == 0


def test_an_id_used_again_that_was_read_first_from_the_scheduler() -> None:
    """A collector that gets little of the processors finds two requests, both ended, and who served them."""
    joiner = Joined()
    for writer, key, seen_ns in (("2", 20, 8), ("3", 30, 18)):
        span = SpanEnd(SpanType("queue"), key + 1, key, key, seen_ns, seen_ns + 1)
        joiner.add(Writer(writer), RequestSeen(key, "same", seen_ns), span)  # type: ignore[arg-type]
    for span_id, begin_ns in ((6, 1), (7, 7), (8, 17)):  # the first one's scheduler was not traced
        joiner.received(span_id, "same", begin_ns, trace_id=span_id)
        joiner.of_caller(SpanEnd(REQUEST, span_id, span_id, 0, begin_ns, begin_ns + 4))
    joiner.finish()
    queues = [(span.parent.span_id, span.start_time) for span in joiner.spans if span.name == "queue"]
    assert queues == [(7, 8), (8, 18)]


def test_an_id_used_again_at_once_on_another_replica() -> None:
    """The second request's scheduler is read before the caller, whose first request looks open then."""
    joiner = Joined()
    joiner.received(6, "same", 1, trace_id=6)
    for writer, key, seen_ns in (("2", 20, 2), ("3", 30, 8)):
        joiner.add(Writer(writer), RequestSeen(key, "same", seen_ns))  # type: ignore[arg-type]
    joiner.of_caller(SpanEnd(REQUEST, 6, 6, 0, 1, 5))
    joiner.received(7, "same", 7, trace_id=7)
    for writer, key, start_ns in (("2", 20, 3), ("3", 30, 9)):
        span = SpanEnd(SpanType("queue"), key + 1, key, key, start_ns, start_ns + 1)
        joiner.add(Writer(writer), span)  # type: ignore[arg-type]
    joiner.finish()
    queues = [(span.parent.span_id, span.start_time) for span in joiner.spans if span.name == "queue"]
    assert queues == [(6, 3), (7, 9)]


def test_what_ends_while_hooks_are_removed_is_marked_as_possibly_incomplete() -> None:
    ended: list[int] = []
    joiner = Joined(on_request=lambda *request: ended.append(request[1].span_id))
    for span_id, end_ns in (7, 20), (8, 30):
        joiner.received(span_id, f"r{span_id}")
        joiner.of_caller(SpanEnd(REQUEST, span_id, span_id, 0, 5, end_ns))
    joiner.detaching(25)
    joiner.detaching(28)
    joiner.finish()
    assert {span.context.span_id: "sgl_aspects.detached" in span.attributes for span in joiner.spans} == {
        7: False,
        8: True,
    }
    assert ended == [7]
    assert [span.status.is_ok for span in joiner.spans] == [True, True]


def test_what_waits_in_vain_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a collector that is always behind, nothing has waited for too long."""
    monkeypatch.setattr(join, "_WAITING_RECORDS", 10)
    joiner = Joined()
    for number in range(100, 1100, 10):
        joiner.of_scheduler(
            RequestSeen(number, f"r{number}", 6), SpanEnd(SpanType("queue"), number + 1, number, number, 6, 7)
        )
        joiner.match_waiting(is_behind=True)
    assert joiner._unmatched.count <= 10
    assert joiner._rootless.count <= 10
    assert joiner.unjoined >= 90


def test_a_clock_that_is_set_back_meanwhile() -> None:
    """What was measured over the change is nothing, and everything has its place."""
    joiner = Joined()
    joiner.received(start_ns=5000)
    joiner.of_caller(SpanEnd(REQUEST, 7, 7, 0, 5000, 900))
    joiner.of_scheduler(RequestSeen(8, "r", 5001), SpanEnd(SpanType("queue"), 9, 8, 8, 5001, 600))
    joiner.of_scheduler(SpanEnd(SpanType("decode"), 10, 8, 8, 600, 800))
    joiner.finish()
    assert joiner.names == ["queue", "decode", "chat m"]
    for span in joiner.spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
        times = [value for value in (span.attributes or {}).values() if isinstance(value, float)]
        assert not any(value < 0 for value in times)
    assert joiner.unjoined == 0


def test_ends_that_were_lost_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that is full drops ends, too: of a process that lives on, what lost its end is given up."""
    monkeypatch.setattr(join, "_OPEN", 10)
    joiner = Joined()
    for number in range(100, 3100, 100):
        joiner.received(number, f"r{number}", trace_id=number)
        joiner.of_scheduler(
            RequestSeen(number + 1, f"r{number}", 6),
            SpanBegin(SpanType("decode"), number + 2, number + 1, number + 1, 7),
        )
        joiner.match_waiting()
        assert len(joiner._open) <= 10
    joiner.writer_gone(joiner.scheduler)
    joiner.finish()
    assert collections.Counter(span.name for span in joiner.spans) == {"chat m": 30, "decode": 30}
    assert all((span.attributes or {})["sgl_aspects.unfinished"] for span in joiner.spans)


def test_a_lost_end_is_not_after_the_request_s() -> None:
    joiner = Joined()
    joiner.scheduler.last_ns = 1000
    joiner.received()
    joiner.of_scheduler(RequestSeen(8, "r", 6), SpanBegin(SpanType("decode"), 9, 8, 8, 6))
    joiner.of_caller(SpanEnd(REQUEST, 7, 7, 0, 5, 50))
    joiner.writer_gone(joiner.scheduler)
    joiner.finish()
    assert {span.name: span.end_time for span in joiner.spans} == {"chat m": 50, "decode": 50}


def test_a_request_s_end_waits_for_what_is_still_to_be_read() -> None:
    joiner = Joined()
    joiner.received()
    joiner.of_caller(SpanEnd(REQUEST, 7, 7, 0, 5, 50))
    for _ in range(5):
        joiner.match_waiting(is_behind=True)
    joiner.of_scheduler(RequestSeen(8, "r", 6), SpanEnd(SpanType("queue"), 9, 8, 8, 10, 20))
    for _ in range(2):
        joiner.match_waiting()
    (request,) = [span for span in joiner.spans if span.name == "chat m"]
    assert (request.attributes or {})["gen_ai.latency.time_in_queue"] == 10e-9


def test_another_rank_gets_a_request_before_the_one_that_begins_it() -> None:
    """Where the front end is not Python, the rank that answers begins it: both get it at once."""
    joiner, follower = Joined(), cast("Any", Writer("3"))
    step = SpanEnd(SpanType("first"), 20, 20, 0, 10, 20, links=[9])
    described = ProcessDescribed({"sgl_aspects.rank.follower": True})
    joiner.add(follower, described, RequestSeen(9, "r", 4), step)
    joiner.received(start_ns=5)
    joiner.of_scheduler(RequestSeen(8, "r", 6))
    joiner.finish()
    (link,) = joiner.spans[0].links
    assert (joiner.names[0], link.context.trace_id) == ("first", 0xABC)


def test_a_request_that_is_kept_in_the_end_is_linked_to_from_then_on() -> None:
    """Until it fails it is left out, and the spans that served it do not link to it."""
    joiner = Joined(tail=TailChoice())
    joiner.received(sampled=False)
    joiner.of_scheduler(RequestSeen(8, "r", 6), SpanEnd(SpanType("first"), 20, 20, 0, 10, 20, links=[8]))
    joiner.of_caller(SpanEnd(REQUEST, 7, 7, 0, 5, 50, error="abort"))
    for _ in range(2):
        joiner.match_waiting()
    joiner.of_scheduler(SpanEnd(SpanType("second"), 21, 21, 0, 20, 30, links=[8]))
    links = {span.name: [link.context for link in span.links] for span in joiner.spans}
    assert links["first"] == []
    assert [(link.trace_id, link.span_id, link.trace_flags.sampled) for link in links["second"]] == [
        (0xABC, 7, True)
    ]


def test_a_step_names_the_adapters_of_its_requests() -> None:
    joiner = Joined()
    for number, model in enumerate(("mini", "sql", "chat", "sql"), 1):
        asked: dict[str, Any] = {schema.REQUEST_MODEL: model, schema.RESPONSE_MODEL: "mini"}
        joiner.of_caller(RequestBegin(number, str(number), 5, *TraceContext(0xABC), "chat", asked))
        joiner.of_scheduler(SpanEnd(STEP, 9 + number, 9 + number, 0, 10, 20, links=[*range(1, number + 1)]))
    # One of several answers has its request's.
    joiner.of_caller(RequestBegin(6, "6", 5, *TraceContext(0xABC, 3), "chat", {}))
    joiner.of_scheduler(SpanEnd(STEP, 20, 20, 0, 10, 20, links=[1, 6]))
    found = [span.attributes.get(schema.ADAPTERS) for span in joiner.spans]
    assert found == [None, ["sql"], ["chat", "sql"], ["chat", "sql"], ["chat"]]


def test_steps_are_linked_to_requests_of_another_host(receiver: Receiver) -> None:
    """A process's description is on its spans from then on, and names the service."""
    with attach(endpoint=receiver.endpoint) as session:
        recorder = session.recorder
        key, left_out, step = recorder.new_id(), recorder.new_id(), recorder.new_id()
        recorder.write(ProcessDescribed({"service.name": "mini", "sgl_aspects.rank": "tp1"}))
        recorder.write(RequestElsewhere(key, 7, 9, True))
        recorder.write(RequestElsewhere(left_out, 8, 10, False))
        recorder.spans(STEP)(step, step, 0, 1, 2, [1, "decode", 1, 1, 0, 1, 0.5], "", [key, left_out])
    (span,) = receiver.named("scheduler.step")
    assert span.links == [(f"{7:032x}", f"{9:016x}")]
    assert (span.resource["service.name"], span.resource["sgl_aspects.rank"]) == ("mini", "tp1")
    assert span.resource["host.name"]


@pytest.mark.parametrize("ranks", [["tp0 pp0"], ["tp0 pp0", "tp1 pp0"]])
def test_spans_of_an_engine_with_several_ranks_say_which(receiver: Receiver, ranks: list[str]) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        recorders = [RingRecorder(session.run_folder) for _ in ranks]
        for recorder, rank in zip(recorders, ranks):
            recorder.write(
                ProcessDescribed({"sgl_aspects.rank": rank, "sgl_aspects.disaggregation.mode": "decode"})
            )
        wait_until(lambda: num_read(session.run_folder) == len(ranks))
        for recorder in recorders:
            step = recorder.new_id()
            recorder.spans(STEP)(step, step, 0, 1, 2, [1, "decode", 1, 1, 0, 1, 0.5])
            recorder.close()
    steps = receiver.named("scheduler.step")
    said = sorted(span.attributes.get("sgl_aspects.rank", "") for span in steps)
    assert said == (ranks if len(ranks) > 1 else [""])
    assert sorted(span.resource["sgl_aspects.rank"] for span in steps) == ranks


def num_read(folder: str) -> int:
    """How many rings the collector has taken something from."""
    readers = [RingReader(path, read_only=True) for path in Path(folder).glob("*.ring")]
    for reader in readers:
        reader.close()
    return sum(reader.taken > 0 for reader in readers)


@pytest.mark.parametrize(("status", "is_error"), [(400, False), (404, False), (503, True), (None, True)])
def test_a_callers_mistake_is_not_an_error_of_the_server(
    receiver: Receiver, status: int | None, is_error: bool
) -> None:
    """As in the HTTP conventions; the error is recorded nonetheless."""
    with attach(endpoint=receiver.endpoint) as session:
        recorder, start = session.recorder, time.monotonic_ns()
        span_id = recorder.new_id()
        begun = RequestBegin(span_id, "r", start, *context.new(), "chat m", {"gen_ai.operation.name": "chat"})
        recorder.write(begun)
        values = [None] * (len(schema.REQUEST.attributes) - 1)
        recorder.spans(schema.REQUEST)(span_id, span_id, 0, start, start + 5, [*values, status], "ValueError")
    (span,) = receiver.named("chat m")
    assert span.is_error is is_error
    assert span.attributes["error.type"] == "ValueError"
    assert span.attributes.get("http.response.status_code") == status
