"""What ``sgl-aspects top`` counts of steps: each once, for the time that it adds, and what it yields."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sgl_aspects.tracing import context
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import ProcessDescribed, RequestBegin, RequestSeen, SpanType
from sgl_aspects.tracing.schema import DECODE, FORWARD, PREFILL, QUEUE, RANK, REQUEST, STEP
from sgl_aspects.view.live import LiveRun
from sgl_aspects.view.top_screen import screen


def shown(folder: Path) -> str:
    live = LiveRun(folder)
    live.poll()
    text = io.StringIO()
    Console(file=text, width=140, highlight=False).print(screen(live, live.controls(), 140, 40))
    live.close()
    return text.getvalue()


def test_overlapped_steps_count_for_what_they_add(tmp_path: Path) -> None:
    """Two steps are open at once: every 10 ms one ends that began 20 ms before."""
    recorder = RingRecorder(str(tmp_path), level=3)
    ms = 1_000_000
    now = (time.monotonic_ns() // (1000 * ms) - 1) * 1000 * ms + 500 * ms  # all in one second, as counted
    for number in range(1, 21):
        end, step = now + 10 * number * ms, recorder.new_id()
        recorder.spans(SpanType("forward"))(recorder.new_id(), step, step, end - 19 * ms, end - 10 * ms)
        recorder.spans(STEP)(step, step, 0, end - 20 * ms, end, [number, "decode", 8, 8, 0, 8, 0.5])
    text = shown(tmp_path)
    assert re.search(r"decode +[\d.]+ +8 +10\.0 ms", text)
    assert "forward 86% " in text  # 9 of 10 ms, and of the first step's 20


@pytest.mark.parametrize(
    ("ranks", "share"), [(("tp0 pp0", "tp1 pp0"), "30%"), (("tp0 pp0", "tp0 pp1"), "50%")]
)
def test_workers_that_run_a_pass_at_once_count_once_and_stages_add_up(
    tmp_path: Path, ranks: tuple[str, str], share: str
) -> None:
    scheduler, *workers = (RingRecorder(str(tmp_path), level=3) for _ in range(3))
    ms, step = 1_000_000, scheduler.new_id()
    now = (time.monotonic_ns() // (1000 * ms) - 1) * 1000 * ms  # all in one second, as counted
    scheduler.spans(STEP)(step, step, 0, now, now + 100 * ms, [1, "decode", 8, 8, 0, 8, 0.5])
    for worker, rank, took in zip(workers, ranks, (30, 20)):
        worker.write(ProcessDescribed({RANK: rank}))
        worker.spans(FORWARD)(worker.new_id(), step, step, now, now + took * ms, ["decode", 8, 8])
    assert f"forward {share} " in shown(tmp_path)
    for recorder in (scheduler, *workers):
        recorder.close()


def test_output_tokens_are_those_of_one_rank_without_rejected_drafts(tmp_path: Path) -> None:
    """Each of two ranks writes the steps of a request; only the one that answers writes its phases."""
    recorders = [RingRecorder(str(tmp_path), level=3) for _ in range(2)]
    ms = 1_000_000
    start = (time.monotonic_ns() // (1000 * ms) - 1) * 1000 * ms  # all in one second, as counted
    for rank, recorder in enumerate(recorders):
        key = recorder.new_id()
        recorder.write(RequestSeen(key, "one", start))
        if rank == 0:
            recorder.spans(QUEUE)(recorder.new_id(), key, key, start, start + 10 * ms, (None,))
            recorder.spans(PREFILL)(recorder.new_id(), key, key, start, start + 100 * ms, (6000, 0))
            recorder.announce(DECODE, recorder.new_id(), key, key, start + 100 * ms)
        first, second = recorder.new_id(), recorder.new_id()
        recorder.spans(STEP)(first, first, 0, start, start + 100 * ms, [1, "extend", 1, 6000, 0, 1, 0.5])
        verified: list[Any] = [2, "decode", 1, 4000, 0, 1, 0.5, 3000, 2000]  # drafted, accepted
        recorder.spans(STEP)(second, second, 0, start + 100 * ms, start + 200 * ms, verified)
    text = shown(tmp_path)
    for recorder in recorders:
        recorder.close()
    numbers = re.search(r"prefill tok/s.*\n *(.*)\n", text)
    assert numbers is not None
    output, prompt = (float(number.replace(",", "")) for number in numbers.group(1).split()[3:5])
    assert output * 2 == pytest.approx(prompt, abs=3)  # one for each accepted, and one for each that verifies
    assert re.search(r"running 1 ", text)


def test_a_request_for_two_answers_is_one_request_and_has_their_first_token(tmp_path: Path) -> None:
    recorder, ms = RingRecorder(str(tmp_path), level=3), 1_000_000
    trace, start = context.new(), time.monotonic_ns() - 1000 * ms
    whole, *answers = (recorder.new_id() for _ in range(3))
    named: Any = {"gen_ai.operation.name": "chat"}
    recorder.write(RequestBegin(whole, "whole", start, *trace, "chat m", named))
    for number, answer in enumerate(answers, 1):
        below = trace.trace_id, whole, True, "", False
        recorder.write(RequestBegin(answer, f"{number}", start, *below, "chat m", {}))
        key = recorder.new_id()
        recorder.write(RequestSeen(key, f"{number}", start))
        first = start + number * 250 * ms
        recorder.spans(DECODE)(recorder.new_id(), key, key, first, start + 900 * ms, [5, "stop"])
        ended: list[Any] = [None, ["stop"], None, None, 5]
        recorder.spans(REQUEST)(answer, answer, 0, start, start + 900 * ms, ended)
    values: list[Any] = ["whole", ["stop"], None, 100, 10]
    recorder.spans(REQUEST)(whole, whole, 0, start, start + 900 * ms, values)
    text = shown(tmp_path)
    recorder.close()
    assert re.search(r"^time to first token +250 ms +250 ms", text, re.MULTILINE)
    assert re.search(r"finished/s.*\n +0 +(1\.0|0\.5) ", text)


def test_a_request_has_no_first_token_of_a_later_one_with_its_id(tmp_path: Path) -> None:
    recorder, ms = RingRecorder(str(tmp_path), level=3), 1_000_000
    begun = time.monotonic_ns() - 1000 * ms
    for start in (begun, begun + 500 * ms):
        request, key = recorder.new_id(), recorder.new_id()
        recorder.write(RequestBegin(request, "same", start, *context.new(), "chat m", {}))
        recorder.write(RequestSeen(key, "same", start))
        recorder.spans(DECODE)(recorder.new_id(), key, key, start + 50 * ms, start + 90 * ms, [5, "stop"])
        values: list[Any] = ["same", ["stop"], None, 100, 5]
        recorder.spans(REQUEST)(request, request, 0, start, start + 100 * ms, values)
    text = shown(tmp_path)
    recorder.close()
    assert re.search(r"^time to first token( +50\.0 ms){4} ", text, re.MULTILINE)


@pytest.mark.parametrize(("detaches", "failed"), [(False, 1), (True, 0)])
def test_a_request_of_a_process_that_has_ended_is_not_in_flight(
    tmp_path: Path, detaches: bool, failed: int
) -> None:
    recorders = [RingRecorder(str(tmp_path), level=1) for _ in range(2)]
    for recorder in recorders:
        start = time.monotonic_ns() - 1_000_000_000
        recorder.write(RequestBegin(recorder.new_id(), "one", start, *context.new(), "chat m", {}))
    recorders[0].close(detaches=detaches)
    numbers = re.search(r"in flight.*\n *(.*)\n", shown(tmp_path))
    recorders[1].close()
    assert numbers is not None
    in_flight, _, found, *_ = numbers.group(1).split()
    assert (in_flight, found) == ("1", str(failed))
