"""Every way in which a request of the embedded engine can go and end, and what its trace then looks like."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

import pytest

import sgl_aspects as aspects
from sgl_aspects.errors import InvalidRequestError, SchedulerDiedError
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import attach
from tests.support.otlp_receiver import Span
from tests.support.processes import has_little_shared_memory
from tests.support.sessions import read_file
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("forked_schedulers", "forked_collectors")

ODD = {
    "ü-日本": "ü-日本",
    "a\nb\tc\x00d": "a\nb\tc\x00d",
    "x" * 10_000: "x" * 10_000,
    "\ud800": "?",
    " ": " ",
}


def tokens(count: int, **more: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True, **more)  # type: ignore[arg-type]


@dataclass
class Run:
    """The spans of a run that has ended."""

    spans: list[Span]

    def of(self, rid: str) -> tuple[Span, list[Span]]:
        """A request's span, and its children by start."""
        (root,) = [
            span for span in self.spans if span.kind == 2 and span.attributes.get("gen_ai.request.id") == rid
        ]
        below = [span for span in self.spans if span.parent_id == root.span_id]
        return root, sorted(below, key=lambda span: span.start)

    def names(self, rid: str) -> list[str]:
        """Its children in order, each with its finish reason if it has one."""
        _, children = self.of(rid)
        reasons = [str(span.attributes.get("sgl_aspects.finish_reason", "")) for span in children]
        return [f"{span.name} {reason}".strip() for span, reason in zip(children, reasons)]


DETAILS = ("attention", "operator", "logits", "sampler", "cache.match", "kv.alloc")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    if has_little_shared_memory():
        pytest.skip("level 4 writes more than a small /dev/shm has room for")
    folder = tmp_path_factory.mktemp("ends")
    make_llama(folder / "tiny", max_position_embeddings=1024)
    file = folder / "traces.jsonl"
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in list(os.environ):
            if name.startswith(("OTEL_", "SGL_ASPECTS_TRACE")):
                monkeypatch.delenv(name)
        with attach(level=4, file=str(file)) as session:
            with Engine(model_path=folder / "tiny", chunked_prefill_size=20, max_total_tokens=600) as engine:
                _serve(engine)
                open_one = engine.submit("open", tokens(500), rid="open")
                chunks = iter(open_one)  # kept: a loop that is left aborts its request
                next(chunks)
            with pytest.raises(SchedulerDiedError):
                open_one.result(60)
    summary = session.close()
    assert summary.unjoined == summary.dropped == summary.damaged == summary.not_sampled == 0
    return Run([*read_file(file)])


def _serve(engine: Engine) -> None:
    for rid in ODD:
        engine.generate("odd", tokens(2), rid=rid)
    # Six that need 300 tokens each share 600: some are preempted. Then some that wait again are aborted.
    handles = [engine.submit("w", tokens(300), rid=f"together-{number}") for number in range(6)]
    deadline = time.monotonic() + 60
    while engine.stats()["retractions"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for handle in handles[3:]:
        handle.abort()
    assert [handle.result(60).finish_reason for handle in handles] == ["length"] * 3 + ["abort"] * 3

    (group,) = engine.submit_group(["n"], tokens(50, n=3), rid="group")
    group[2].abort()
    assert [handle.result(60).finish_reason for handle in group] == ["length", "length", "abort"]

    @aspects.before("sgl_aspects.runtime.frontend.manager:RequestManager.tokenize_request")
    def fails(*_: object, **__: object) -> None:
        raise KeyError("a hook")

    with aspects.woven(fails), pytest.raises(KeyError):
        engine.generate("x", tokens(2), rid="hooked")
    with pytest.raises(InvalidRequestError):
        engine.generate([-1], tokens(2), rid="no-token")


def test_no_span_is_out_of_place(run: Run) -> None:
    spans = {span.span_id: span for span in run.spans}
    assert len(spans) == len(run.spans)
    for span in run.spans:
        assert span.start <= span.end
        assert all(link[1] in spans for link in span.links)
        assert not any(value < 0 for value in span.attributes.values() if isinstance(value, float))
        if span.parent_id:
            above = spans[span.parent_id]
            assert above.trace_id == span.trace_id
            assert above.start <= span.start <= span.end <= above.end, (above.name, span.name)


def test_ids_of_any_kind(run: Run) -> None:
    for shown in ODD.values():
        assert run.names(shown)[-1] in ("decode length", "detokenize")


def test_one_that_gave_way_queues_and_decodes_again(run: Run) -> None:
    """Whether it had to compute its tokens once more, or found all of them in the prefix cache."""
    retracted = 0
    for number in range(3):
        names = run.names(f"together-{number}")
        assert names[-2:] != ["queue length", "detokenize"]
        phases = [name for name in names if name.startswith(("queue", "decode"))]
        times = phases.count("decode retracted")
        retracted += times
        assert phases == [*["queue", "decode retracted"] * times, "queue", "decode length"]
        root, children = run.of(f"together-{number}")
        waited = sum(span.end - span.start for span in children if span.name == "queue") / 1e9
        assert root.attributes["gen_ai.latency.time_in_queue"] == pytest.approx(waited)
        assert root.attributes["gen_ai.usage.output_tokens"] == 300
    assert retracted


def test_aborts_wherever_they_meet_a_request(run: Run) -> None:
    for number in range(3, 6):
        root, _ = run.of(f"together-{number}")
        assert root.attributes["error.type"] == "abort"
        names = run.names(f"together-{number}")
        assert names.count("queue abort") + names.count("decode abort") == 1
    first, second, third = (run.of(rid)[0] for rid in ("group", "group-1", "group-2"))
    assert first.trace_id == second.trace_id == third.trace_id
    assert [span.is_error for span in (first, second, third)] == [False, False, True]


def test_errors_before_a_request_reaches_the_scheduler(run: Run) -> None:
    for rid, error in (("hooked", "KeyError"), ("no-token", "InvalidRequestError")):
        root, (tokenize,) = run.of(rid)
        assert root.attributes["error.type"] == tokenize.attributes["error.type"] == error


def test_an_engine_that_is_closed_on_it(run: Run) -> None:
    root, children = run.of("open")
    assert root.attributes["error.type"] == "SchedulerDiedError"
    (decode,) = [span for span in children if span.name == "decode"]
    assert decode.attributes["error.type"] == "unfinished"


def test_level_four_shows_what_the_model_and_the_cache_do(run: Run) -> None:
    by_id = {span.span_id: span for span in run.spans}
    inside = {
        name: {by_id[span.parent_id].name for span in run.spans if span.name == name} for name in DETAILS
    }
    assert inside["attention"] == inside["logits"] == {"forward"}
    assert inside["operator"] >= {"forward", "logits"}
    assert inside["sampler"] == {"sample"}
    assert inside["cache.match"] == {"schedule"}
    assert inside["kv.alloc"] >= {"schedule"}


def test_what_level_four_shows_below_a_span_takes_no_longer_than_it(run: Run) -> None:
    """An operator that the logits call counts there, not beside them."""
    for parent in run.spans:
        below = [span for span in run.spans if span.parent_id == parent.span_id and span.name in DETAILS]
        assert sum(span.end - span.start for span in below) <= parent.end - parent.start


def test_level_four_shows_which_layer_and_operator_and_how_much(run: Run) -> None:
    found = {
        name: [
            span.attributes
            for span in run.spans
            if span.name == name and span.attributes.get("error.type") is None
        ]
        for name in DETAILS
    }
    layers = {each["sgl_aspects.layer"] for each in found["attention"]}
    assert layers == {0, 1, 2}
    backends = {each["sgl_aspects.operator.implementation"] for each in found["attention"]}
    assert backends <= {"TorchNativeBackend", "TritonBackend"}
    named = {
        (each["sgl_aspects.operator.name"], each.get("sgl_aspects.operator.implementation"))
        for each in found["operator"]
    }
    assert {name for name, _ in named} >= {"rms_norm", "linear", "embedding"}
    assert all(str(chosen).endswith(f".{name}") for name, chosen in named), named
    sizes = {name: {each.get("sgl_aspects.operator.shape") for each in found[name]} for name in DETAILS[:4]}
    for name, shapes in sizes.items():
        assert all(shape and re.fullmatch(r"\d+(x\d+)*", str(shape)) for shape in shapes), (name, shapes)
    assert all(each["sgl_aspects.kv.tokens"] > 0 for each in found["kv.alloc"])
    assert all(
        each["sgl_aspects.kv.hit_tokens"] < each["sgl_aspects.kv.tokens"] for each in found["cache.match"]
    )
    assert any(each["sgl_aspects.kv.hit_tokens"] for each in found["cache.match"])
