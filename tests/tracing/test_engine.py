"""The embedded engine, traced from outside in all its processes, seen by real OTLP backends."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from sgl_aspects.engines import EMBEDDED
from sgl_aspects.errors import InvalidRequestError
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import TraceSummary, attach
from sgl_aspects.tracing.schema import DETAILS
from tests.support import workers
from tests.support.forked_schedulers import ForkedContext
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.processes import python, without_room
from tests.support.sessions import read_file
from tests.support.tiny_models import llama_fixture, make_tokenizer

with_torch = ForkedContext()

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
REQUEST, COMPLETION = "chat tiny", "text_completion tiny"
CHILDREN = {"tokenize", "queue", "prefill", "decode", "detokenize"}
STEPS = {"scheduler.step", "schedule", "run_batch", "process_result"}
SECRET = "xylophone-quartz"
CHAT = f"{SECRET} and twenty more"


def parent(trace_id: str = TRACE, span_id: str = CALLER, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{span_id}-{flags}"}


def token_count(text: str) -> int:
    return len(make_tokenizer().encode(text).ids)


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


model = llama_fixture(max_position_embeddings=1024)


@dataclass
class Run:
    """A run that has ended: what the receiver got, what the file holds, what the collector counted."""

    receiver: Receiver
    file: Path
    summary: TraceSummary

    def of(self, rid: str) -> dict[str, list[Span]]:
        """A request's trace, by span name."""
        (root,) = [span for span in self.receiver.spans if span.attributes.get("gen_ai.request.id") == rid]
        found: dict[str, list[Span]] = {}
        for span in sorted(self.receiver.spans, key=lambda span: span.start):
            if span.trace_id == root.trace_id:
                found.setdefault(span.name, []).append(span)
        return found


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One engine at level 3 that lives through everything that its requests can meet."""
    file = tmp_path_factory.mktemp("traces") / "traces.jsonl"
    with engine_receiver() as receiver:
        with (
            attach(level=3, endpoint=receiver.endpoint, file=str(file)) as session,
            Engine(model_path=model, chunked_prefill_size=20, max_total_tokens=1024) as engine,
        ):
            conversation = [{"role": "user", "content": CHAT}]
            sampling = SamplingParams(
                max_new_tokens=6, temperature=0.5, top_p=0.9, top_k=7, seed=3, ignore_eos=True
            )
            headers = {**parent(), "tracestate": "vendor=1"}
            engine.generate(conversation, sampling, rid="whole", external_trace_header=headers)

            with pytest.raises(InvalidRequestError):
                engine.generate("x" * 2000, tokens(3), rid="too-long")
            engine.generate(
                "quiet", tokens(3), rid="unsampled", external_trace_header=parent("e" * 32, flags="00")
            )
            engine.generate(
                "bad", tokens(3), rid="bad-header", external_trace_header={"traceparent": "00-no"}
            )
            current = SpanContext(0xFEED, 0xBEEF, False, TraceFlags(1))
            with trace.use_span(NonRecordingSpan(current)):
                engine.generate("current", tokens(3), rid="current")
            stopped = engine.generate("stop", SamplingParams(max_new_tokens=1, ignore_eos=True), rid="one")
            assert stopped.finish_reason == "length"

            # Nearly the whole cache for one request: the other waits for its pages until it is aborted.
            long = engine.submit("long", tokens(900), rid="long")
            chunks = iter(long)
            next(chunks)
            with pytest.raises(InvalidRequestError):
                engine.submit("twin", tokens(3), rid="long")
            queued = engine.submit("waits", tokens(900), rid="queued")
            queued.abort()
            assert queued.result(60).finish_reason == "abort"
            long.abort()
            assert long.result(60).finish_reason == "abort"

            with ThreadPoolExecutor(8) as pool:
                list(
                    pool.map(
                        lambda number: engine.generate(
                            "together " * (number + 1),
                            tokens(4 + number),
                            rid=f"together-{number}",
                            external_trace_header=parent(f"{0xA0 + number:032x}", f"{0xB0 + number:016x}"),
                        ),
                        range(8),
                    )
                )
        yield Run(receiver, file, session.close())


def test_one_whole_trace(run: Run) -> None:
    spans = run.of("whole")
    assert {name: len(found) for name, found in spans.items()} == {
        REQUEST: 1,
        "tokenize": 1,
        "queue": 1,
        "prefill": 3,
        "decode": 1,
        "detokenize": 1,
    }
    (root,) = spans[REQUEST]
    assert (root.trace_id, root.parent_id, root.trace_state) == (TRACE, CALLER, "vendor=1")
    assert root.kind == 2  # server
    assert root.flags & 0x300 == 0x300  # the parent is known to be remote
    assert root.status == 0
    children = [span for name in CHILDREN for span in spans[name]]
    for child in children:
        assert (child.trace_id, child.parent_id, child.kind) == (root.trace_id, root.span_id, 1)
        assert root.start <= child.start <= child.end <= root.end
    (tokenize,), (queue,), (decode,) = spans["tokenize"], spans["queue"], spans["decode"]
    first, second, third = spans["prefill"]
    order = [tokenize, queue, first, second, third, decode]
    assert all(before.end <= after.start for before, after in itertools.pairwise(order))
    assert [span.attributes["sgl_aspects.prefill.tokens"] for span in spans["prefill"]] == [20, 20, 9]
    scheduler, caller = queue.resource["process.pid"], root.resource["process.pid"]
    assert caller == os.getpid() != scheduler
    assert {span.resource["process.pid"] for span in (queue, first, decode)} == {scheduler}
    assert {span.resource["process.pid"] for span in (tokenize, spans["detokenize"][0])} == {caller}
    assert len({span.span_id for span in run.receiver.spans}) == len(run.receiver.spans)


def test_request_attributes_follow_the_conventions(run: Run) -> None:
    (root,) = run.of("whole")[REQUEST]
    attributes = dict(root.attributes)
    times = {
        name: attributes.pop(name) for name in list(attributes) if "latency" in name or "time_to" in name
    }
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sgl_aspects",
        "gen_ai.system": "sgl_aspects",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.id": "whole",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": "whole",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 49,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    latency = {name.rpartition(".")[2]: seconds for name, seconds in times.items()}
    assert latency["e2e"] == pytest.approx((root.end - root.start) / 1e9)
    assert latency["time_to_first_chunk"] == latency["time_to_first_token"]
    assert 0 < latency["time_in_queue"] < latency["time_to_first_token"] < latency["e2e"]
    prefill, decode = latency["time_in_model_prefill"], latency["time_in_model_decode"]
    assert 0 < prefill < latency["time_to_first_token"]
    assert latency["e2e"] > latency["time_in_model_inference"] == pytest.approx(prefill + decode)


def test_eight_requests_at_once_are_eight_whole_traces(run: Run) -> None:
    for number in range(8):
        spans = run.of(f"together-{number}")
        (root,) = spans[COMPLETION]
        assert (root.trace_id, root.parent_id) == (f"{0xA0 + number:032x}", f"{0xB0 + number:016x}")
        assert set(spans) == {COMPLETION, *CHILDREN}
        prefilled = sum(span.attributes["sgl_aspects.prefill.tokens"] for span in spans["prefill"])
        cached = root.attributes["gen_ai.usage.cache_read.input_tokens"]
        assert prefilled + cached == token_count("together " * (number + 1))
        assert root.attributes["gen_ai.usage.output_tokens"] == 4 + number
        assert spans["decode"][0].attributes["gen_ai.usage.output_tokens"] == 4 + number


def test_no_span_is_an_orphan(run: Run) -> None:
    spans = run.receiver.spans
    known = {(span.trace_id, span.span_id) for span in spans}
    for span in spans:
        if span.parent_id and span.kind != 2:  # a request's parent is the caller's
            assert (span.trace_id, span.parent_id) in known, span
    assert run.summary.spans_recorded == len(spans) == run.summary.exported["otlp"]
    assert run.summary.unjoined == run.summary.dropped == run.summary.damaged == run.summary.unfinished == 0


def test_steps_say_what_they_did_and_link_to_their_requests(run: Run) -> None:
    roots = {(span.trace_id, span.span_id): span for span in run.receiver.spans if span.kind == 2}
    spans = {span.span_id: span for span in run.receiver.spans}
    steps = run.receiver.named("scheduler.step")
    for step in steps:
        assert step.parent_id == ""
        assert set(step.links) <= set(roots)
        size = step.attributes["sgl_aspects.batch.size"]
        unsampled = size - len(step.links)
        assert unsampled in (0, 1)
        assert step.attributes["sgl_aspects.forward.mode"] in ("extend", "decode", "mixed")
        assert step.attributes["sgl_aspects.batch.tokens"] >= size
        assert 0 <= step.attributes["sgl_aspects.kv.usage"] <= 1
        assert step.attributes["sgl_aspects.queue.waiting"] >= 0
    assert any(len(step.links) > 1 for step in steps)
    ids = [step.attributes["sgl_aspects.step.id"] for step in sorted(steps, key=lambda step: step.start)]
    assert ids == list(range(1, len(steps) + 1))
    for name, above in {
        "schedule": "scheduler.step",
        "run_batch": "scheduler.step",
        "process_result": "scheduler.step",
        "forward": "run_batch",
    }.items():
        found = run.receiver.named(name)
        assert len(found) == len(steps)
        for span in found:
            outer = spans[span.parent_id]
            assert outer.name == above
            assert outer.start <= span.start <= span.end <= outer.end


def test_forward_spans_carry_the_device_s_time(run: Run) -> None:
    on_gpu = torch.cuda.is_available()  # where calls only start the work, and some graphs are timed
    for span in run.receiver.named("forward"):
        device = span.attributes.get("sgl_aspects.forward.device_time")
        assert (
            on_gpu if device is None else device > 0 and (on_gpu or device <= (span.end - span.start) / 1e9)
        )
        assert span.attributes["sgl_aspects.batch.tokens"] > 0


def test_where_a_trace_comes_from(run: Run) -> None:
    (current,) = run.of("current")[COMPLETION]
    assert (current.trace_id, current.parent_id) == (f"{0xFEED:032x}", f"{0xBEEF:016x}")
    assert current.flags & 0x300 == 0x100  # known to be local
    (bad,) = run.of("bad-header")[COMPLETION]
    assert bad.parent_id == ""
    assert not [span for span in run.receiver.spans if span.trace_id == "e" * 32]
    assert run.summary.not_sampled == len({COMPLETION, *CHILDREN})


def test_a_prompt_that_cannot_be_served(run: Run) -> None:
    spans = run.of("too-long")
    assert set(spans) == {COMPLETION, "tokenize"}
    for span in (spans[COMPLETION][0], spans["tokenize"][0]):
        assert span.is_error
        assert span.attributes["error.type"] == "InvalidRequestError"
    assert spans[COMPLETION][0].attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_a_request_id_in_use_is_an_error_of_the_second_request(run: Run) -> None:
    first, second = sorted(
        (span for span in run.receiver.spans if span.attributes.get("gen_ai.request.id") == "long"),
        key=lambda span: span.start,
    )
    assert first.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert second.attributes["error.type"] == "InvalidRequestError"
    assert first.trace_id != second.trace_id


def test_an_abort_in_the_queue(run: Run) -> None:
    spans = run.of("queued")
    assert set(spans) == {COMPLETION, "tokenize", "queue", "detokenize"} or set(spans) == {
        COMPLETION,
        "tokenize",
        "queue",
    }
    (root,), (queue,) = spans[COMPLETION], spans["queue"]
    assert root.is_error
    assert root.attributes["error.type"] == "abort"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert "gen_ai.response.time_to_first_chunk" not in root.attributes
    assert queue.attributes["sgl_aspects.finish_reason"] == "abort"
    assert root.start <= queue.start <= queue.end <= root.end


def test_a_single_token_has_an_empty_decode(run: Run) -> None:
    (decode,) = run.of("one")["decode"]
    assert decode.start == decode.end
    assert decode.attributes["gen_ai.usage.output_tokens"] == 1


def test_no_prompt_and_no_answer_is_recorded(run: Run) -> None:
    text = run.file.read_text() + repr(run.receiver.requests)
    assert SECRET not in text
    assert "together together" not in text
    assert "xxxx" not in text


SERVE = """
import sys
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams

if __name__ == "__main__":
    engine = Engine(model_path=sys.argv[1], max_total_tokens=256)
    engine.generate("hello", SamplingParams(max_new_tokens=3, ignore_eos=True))
"""


def test_tracing_by_environment_alone(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    file = tmp_path / "traces.jsonl"
    ran = python(script, model, SGL_ASPECTS_TRACE="2", SGL_ASPECTS_TRACE_FILE=str(file))
    assert (ran.returncode, without_room(ran.stderr)) == (0, "")
    names = [span.name for span in read_file(file)]
    assert set(names) - {"capture_graphs"} == {COMPLETION, "load_model"} | CHILDREN | STEPS


# Of levels that are off nothing is woven.
AT_LEVEL_3 = sorted(EMBEDDED.roles.keys() - DETAILS.keys() - {"sample"})


@pytest.mark.parametrize(("asked", "expected"), [("", []), ("off", []), ("3", AT_LEVEL_3)])
def test_functions_in_the_scheduler_process_are_the_originals_unless_traced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, expected: list[str]
) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE", asked)
    monkeypatch.setenv("SGL_ASPECTS_TRACE_RUN", str(tmp_path))
    results, theirs = with_torch.Pipe()
    process = with_torch.Process(target=workers.woven_in_a_scheduler_process, args=(theirs,))
    process.start()
    theirs.close()
    woven, others = results.recv()
    assert sorted(woven) == expected
    assert bool(others) is bool(asked)
    process.join()
    assert process.exitcode == 0
    process.close()
