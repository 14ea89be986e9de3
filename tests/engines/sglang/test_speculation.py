"""Real SGLang with speculation: what its steps and requests say of drafts is what SGLang counts.

Its n-gram worker, scheduler and result processor are SGLang's own; what needs CUDA is interpreted
(tests/support/sglang_speculation.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support import sglang_speculation
from tests.support.callers import CALLER, Requests, by_trace, parent, trace_id
from tests.support.distributions import install_plugin
from tests.support.otlp_receiver import Span
from tests.support.phases import engine_receiver, run_prefix
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import Server, serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

REQUESTS = range(4)
#: An answer of no tokens, which SGLang generates like any with speculation, and some that end in a draft.
EMPTY, *STOPPED = range(4, 8)
TOKENS = 60


@dataclass
class Run(Requests):
    #: SGLang's own numbers of each request.
    theirs: dict[int, dict[str, Any]]

    def decode(self, number: int) -> Span:
        (decode,) = self.spans(number, "decode")
        return decode


def generate(server: Server, number: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": TOKENS + number, "ignore_eos": True, "temperature": 0}
    body = {"text": "a fox a fox a fox", "sampling_params": sampling}
    answer: dict[str, Any] = server.post("/generate", body, parent(number))["meta_info"]
    return answer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "plugin").mkdir()
    install_plugin(folder / "plugin", "interpreted", sglang_speculation.PLUGIN)
    with engine_receiver() as receiver:
        environment = {
            **sglang_speculation.ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([str(folder / "plugin"), os.environ.get("PYTHONPATH", "")]),
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
        with serve(
            make_mini(folder / "mini"),
            folder / "log",
            prefix=run_prefix(receiver, level=3),
            more=sglang_speculation.OPTIONS,
            environment=environment,
        ) as server:
            # The first one's answer is what the others' drafts are found in.
            theirs = {REQUESTS[0]: generate(server, REQUESTS[0])}
            with ThreadPoolExecutor(4) as pool:
                others = pool.map(lambda number: generate(server, number), REQUESTS[1:])
                theirs |= dict(zip(REQUESTS[1:], others))
            body: dict[str, Any] = {"text": "a fox a fox a fox", "sampling_params": {"temperature": 0}}
            made = server.post("/generate", body)["output_ids"]
            limits: list[dict[str, Any]] = [
                {"max_new_tokens": 0},
                *({"stop_token_ids": [token]} for token in made[20:23]),
            ]
            for number, limit in enumerate(limits, EMPTY):
                body["sampling_params"] = {"temperature": 0, **limit}
                server.post("/generate", body, parent(number))
        ids = {trace_id(number) for number in (*REQUESTS, EMPTY, *STOPPED)}
        receiver.wait_for(lambda spans: {s.trace_id for s in spans if s.parent_id == CALLER} >= ids)
        yield Run(receiver, by_trace(receiver.spans), theirs)


def test_a_requests_drafts_are_those_that_sglang_counts(run: Run) -> None:
    for number, theirs in run.theirs.items():
        ours = run.decode(number).attributes
        assert ours["sgl_aspects.speculation.drafted_tokens"] == theirs["spec_num_proposed_drafts"] > 0
        assert ours["sgl_aspects.speculation.accepted_tokens"] == theirs["spec_num_correct_drafts"]
        assert theirs["spec_num_correct_drafts"] > 0 or number == REQUESTS[0]
        histogram = theirs["spec_correct_drafts_histogram"]
        at = [sum(histogram[position + 1 :]) for position in range(len(histogram) - 1)]
        assert ours["sgl_aspects.speculation.accepted_at"] == at


def test_a_step_has_the_tokens_that_the_model_was_fed_and_those_that_were_right(run: Run) -> None:
    steps = [
        s
        for s in run.receiver.named("scheduler.step")
        if s.attributes["sgl_aspects.forward.mode"] == "decode"
    ]
    fed = 0
    for step in steps:
        size = step.attributes["sgl_aspects.batch.size"]
        drafted = step.attributes["sgl_aspects.speculation.drafted_tokens"]
        assert drafted == size * (sglang_speculation.DRAFT_TOKENS - 1)
        assert step.attributes["sgl_aspects.batch.tokens"] == size + drafted
        assert 0 <= step.attributes["sgl_aspects.speculation.accepted_tokens"] <= drafted
        fed += drafted
    assert fed >= sum(theirs["spec_num_proposed_drafts"] for theirs in run.theirs.values())
    points = run.receiver.points("sgl_aspects.step.tokens")
    assert sum(p.value for p in points if p.attributes["sgl_aspects.forward.mode"] == "decode") == sum(
        step.attributes["sgl_aspects.batch.tokens"] for step in steps
    )


def test_tokens_of_a_request_are_its_steps_and_its_accepted_drafts(run: Run) -> None:
    for number, theirs in run.theirs.items():
        made = run.root(number).attributes["gen_ai.usage.output_tokens"]
        assert made == theirs["completion_tokens"] == TOKENS + number
        # The first comes with the prompt; the last draft may be longer than what was left to say.
        accepted = run.decode(number).attributes["sgl_aspects.speculation.accepted_tokens"]
        assert made <= 1 + theirs["spec_verify_ct"] + accepted < made + sglang_speculation.DRAFT_TOKENS


def test_an_answer_ends_where_sglang_ends_it(run: Run) -> None:
    for number in (EMPTY, *STOPPED):
        (tokens,) = {span.attributes["gen_ai.usage.output_tokens"] for span in run.spans(number, "decode")}
        assert tokens == run.root(number).attributes["gen_ai.usage.output_tokens"]


def test_drafting_and_verifying_have_their_times(run: Run) -> None:
    for step in run.receiver.named("scheduler.step"):
        spans = {span.name: span for span in run.traces[step.trace_id]}
        if step.attributes["sgl_aspects.forward.mode"] != "decode":
            assert "draft" not in spans
            continue
        draft, forward, run_batch = (spans[name] for name in ("draft", "forward", "run_batch"))
        assert run_batch.start <= draft.start < draft.end <= forward.start < forward.end <= run_batch.end
        assert draft.parent_id == run_batch.span_id


def test_drafts_are_metrics(run: Run) -> None:
    decodes = run.receiver.named("decode")
    for name in ("drafted", "accepted"):
        points = run.receiver.points(f"sgl_aspects.speculation.{name}_tokens")
        spans = (decode.attributes.get(f"sgl_aspects.speculation.{name}_tokens", 0) for decode in decodes)
        assert sum(point.value for point in points) == sum(spans)
    positions = {point.attributes["sgl_aspects.speculation.position"] for point in points}
    assert positions <= {str(position) for position in range(sglang_speculation.DRAFT_TOKENS - 1)}
