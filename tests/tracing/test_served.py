"""A traced server: every request ends its spans with a status and a reason, whatever its outcome."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support.http_server import LOCAL, Server, serving
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.processes import wait_until
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.slow
SECRET = "xylophone-quartz"


@dataclass
class Run:
    """The results of a server, and of its backend."""

    spans: list[Span]
    receiver: Receiver

    def of(self, number: int) -> dict[str, Span]:
        """The spans of a request by name, the request itself as ``""``."""
        trace = [span for span in self.spans if span.trace_id == f"{number:032x}"]
        return {"" if span.kind == 2 else span.name: span for span in trace}


def answer_to(server: Server, number: int, **body: object) -> tuple[int, bytes]:
    connection = ask(server, number, **body)
    try:
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def ask(server: Server, number: int, **body: object) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=60)
    headers = {"content-type": "application/json", "traceparent": f"00-{number:032x}-00f067aa0ba902b7-01"}
    asked = {"model": server.model, "prompt": SECRET, "ignore_eos": True, "temperature": 0, **body}
    connection.request("POST", "/v1/completions", json.dumps(asked), headers)
    return connection


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("served")
    make_llama(folder / "tiny", max_position_embeddings=16384)
    with engine_receiver() as receiver:
        environment = {"SGL_ASPECTS_TRACE": "3", "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
        flags = ("--max-total-tokens", "20000", "--max-running-requests", "1")
        with serving(folder / "tiny", folder / "log", *flags, environment=environment) as server:
            assert answer_to(server, 1, max_tokens=8)[0] == 200
            assert b"[DONE]" in answer_to(server, 2, max_tokens=8, stream=True)[1]
            assert answer_to(server, 10, max_tokens=4, n=3)[0] == 200
            assert answer_to(server, 11, max_tokens=4, n=2, prompt=["a", "b"])[0] == 200
            leaves = ask(server, 3, max_tokens=12000, stream=True)
            response = leaves.getresponse()
            response.readline()
            waits = ask(server, 4, max_tokens=12000)
            wait_until(lambda: server.metrics()["sgl_aspects_scheduler_waiting_requests"] == 1)
            waits.close()
            wait_until(lambda: server.metrics()["sgl_aspects_scheduler_waiting_requests"] == 0)
            response.close()
            leaves.close()
            wait_until(server.is_quiet)
            assert answer_to(server, 5, prompt=SECRET * 5000)[0] == 400
            assert answer_to(server, 7, max_tokens=0)[0] == 400
            killed = ask(server, 6, max_tokens=12000, stream=True)
            answer = killed.getresponse()
            answer.readline()
            waited = ask(server, 8, max_tokens=12000)
            wait_until(lambda: server.metrics()["sgl_aspects_scheduler_waiting_requests"] == 1)
            os.kill(server.scheduler_pid, signal.SIGKILL)
            answer.read()
            answer.close()
            killed.close()
            assert waited.getresponse().status == 503
            waited.close()
            assert answer_to(server, 9)[0] == 503  # the server ends a second later
            server.stop()
        yield Run(receiver.spans, receiver)


@pytest.mark.parametrize("number", [1, 2])
def test_a_whole_answer(run: Run, number: int) -> None:
    spans = run.of(number)
    assert {"", "tokenize", "queue", "prefill", "decode", "detokenize"} <= set(spans)
    assert not any(span.is_error for span in spans.values())
    assert spans[""].attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert spans[""].parent_id == "00f067aa0ba902b7"
    assert spans[""].attributes["gen_ai.request.stream"] is (number == 2)


@pytest.mark.parametrize(("number", "answers", "choices"), [(1, 1, None), (10, 3, 3), (11, 4, 2)])
def test_all_answers_of_a_call_are_in_its_callers_trace(
    run: Run, number: int, answers: int, choices: int | None
) -> None:
    found = [span for span in run.spans if (span.trace_id, span.kind) == (f"{number:032x}", 2)]
    assert len(found) == answers
    assert {span.parent_id for span in found} == {"00f067aa0ba902b7"}
    assert {span.attributes.get("gen_ai.request.choice.count") for span in found} == {choices}


def test_a_client_that_hangs_up(run: Run) -> None:
    spans = run.of(3)
    assert spans[""].is_error
    assert spans[""].attributes["error.type"] == "abort"
    assert spans["decode"].attributes["sgl_aspects.finish_reason"] == "abort"


def test_a_client_that_hangs_up_while_it_waits(run: Run) -> None:
    spans = run.of(4)
    assert spans[""].attributes["error.type"] == "abort"
    assert spans["queue"].attributes["sgl_aspects.finish_reason"] == "abort"
    assert "decode" not in spans


def test_a_prompt_that_does_not_fit(run: Run) -> None:
    spans = run.of(5)
    assert spans[""].attributes["error.type"] == "InvalidRequestError"
    assert spans[""].attributes["http.response.status_code"] == 400
    assert spans["tokenize"].is_error


def test_requests_rejected_by_the_server_before_they_reach_the_engine(run: Run) -> None:
    (span,) = run.of(7).values()
    assert span.attributes["http.response.status_code"] == 400
    assert not span.is_error  # the caller's mistake


def test_a_scheduler_that_is_killed(run: Run) -> None:
    spans = run.of(6)
    assert spans[""].attributes["error.type"] == "SchedulerDiedError"
    assert spans["decode"].attributes["error.type"] == "unfinished"
    assert "http.response.status_code" not in spans[""].attributes  # 200, as its stream began


@pytest.mark.parametrize("number", [8, 9])
def test_requests_answered_after_the_schedulers_death_have_their_status(run: Run, number: int) -> None:
    root = run.of(number)[""]
    assert root.is_error
    assert root.attributes["error.type"] == ("SchedulerDiedError" if number == 8 else "503")
    assert root.attributes["http.response.status_code"] == 503


def test_metrics_distinguish_them_and_no_prompt_is_anywhere(run: Run) -> None:
    durations = run.receiver.points("gen_ai.server.request.duration")
    counts = {point.attributes.get("error.type"): point.count for point in durations}
    assert counts.pop(None) == 2 + 3 + 4
    assert counts == {"abort": 2, "InvalidRequestError": 1, "400": 1, "503": 1, "SchedulerDiedError": 2}
    assert SECRET not in repr(run.receiver.requests) + repr(run.receiver.metric_requests)
