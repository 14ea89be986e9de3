"""Causes read from made-up spans: what is known at which level, of which answer, and who held the room."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.analysis.causes import Cause, Causes
from sgl_aspects.analysis.numbers import report_phases
from sgl_aspects.analysis.spans import Span, read_spans
from sgl_aspects.tracing import schema
from tests.support.simulated_run import SimulatedRun

MS = 1_000_000
SCHEDULER, WORKER = 2, 3
_ids = itertools.count(1)


def span(name: str, start: float, end: float, parent: str = "", trace: str = "t", **more: Any) -> Span:
    """Times in milliseconds; ``more``: fields, and the attributes of its dict."""
    attributes, links = more.pop("attributes", {}), tuple(more.pop("links", ()))
    more = {"process_id": SCHEDULER, "is_server": False, **more}
    span_id = more.pop("span_id", "") or f"{next(_ids):016x}"
    more |= {"start_ns": int(start * MS), "end_ns": int(end * MS)}
    return Span(name, trace, span_id, parent, attributes=attributes, links=links, **more)


def request(
    rid: str, start: float, end: float, prompt: int = 8, output: int = 4, parent: str = "", **more: Any
) -> Span:
    attributes = {schema.REQUEST_ID: rid, **more.pop("attributes", {})}
    if not parent:
        attributes |= {schema.INPUT_TOKENS: prompt, schema.OUTPUT_TOKENS: output}
    fields = {"span_id": rid, "trace": f"trace of {rid}", "is_server": not parent, "process_id": 1, **more}
    return span("chat m", start, end, parent, attributes=attributes, **fields)


def step(start: float, end: float, of: Sequence[str], mode: str = "decode", usage: float = 0.0) -> Span:
    attributes = {schema.MODE: mode, schema.BATCH_SIZE: len(of), schema.KV_USAGE: usage}
    return span("scheduler.step", start, end, trace=f"step {start}", links=of, attributes=attributes)


def phases(rid: str, *times: float) -> list[Span]:
    """Queue, prefill and decode between these four times."""
    names = ("queue", "prefill", "decode")
    tokens = {schema.PREFILL_TOKENS: 8}
    return [
        span(name, start, end, rid, trace=f"trace of {rid}", attributes=tokens if name == "prefill" else {})
        for name, (start, end) in zip(names, itertools.pairwise(times))
    ]


def several() -> list[Span]:
    """One request for two answers; the second is computed long after the first."""
    below: dict[str, Any] = {"parent": "whole", "trace": "trace of whole"}
    return [
        request("whole", 0, 1000),
        request("a", 10, 200, **below),
        request("b", 10, 990, **below),
        *phases("a", 10, 20, 100, 200),
        *phases("b", 10, 600, 700, 980),
        step(20, 100, ["a"], "extend"),
        *(step(start, start + 100, ["a"]) for start in (100, 200, 300, 400, 500)),
        step(600, 700, ["b"], "extend"),
        *(step(start, start + 140, ["b"]) for start in (700, 840)),
    ]  # fmt: skip


def test_an_image_takes_the_time_of_its_phases_and_of_those_before_it() -> None:
    times = {"queue": (400, 410), "encode": (410, 430), "denoise": (430, 900), "decode_latents": (900, 980)}
    own = [span(name, *bounds, "image", trace="trace of image") for name, bounds in times.items()]
    steps = [step(start, start + 100, ["image"], "denoise") for start in (450, 600, 800)]
    whole = request("image", 0, 1000)
    found = Causes([whole, *own, *steps]).explain(whole).seconds
    expected = {
        Cause.HAND_OVER: 0.4,
        Cause.QUEUED_IDLE: 0.01,
        Cause.ENCODE: 0.02,
        Cause.DENOISE: 0.47,
        Cause.DECODE_LATENTS: 0.08,
        Cause.DELIVERY: 0.02,
    }
    assert {cause: seconds for cause, seconds in found.items() if seconds} == pytest.approx(expected)


@pytest.mark.parametrize(
    "text",
    ["493b5", "'493b5'", '"493b5"', "493b…", "493", "cmpl-493b5", "'chatcmpl-493b…'", "trace of 493b5"],
)
def test_a_request_is_found_by_its_id_as_clients_and_top_show_it(text: str) -> None:
    requests = [request("493b5", 0, 1), request("4a", 0, 1)]
    assert [found.span_id for found in Causes(requests).find(text)] == ["493b5"]


def test_an_engine_s_own_id_begins_with_the_client_s() -> None:
    named = {schema.RESPONSE_ID: "cmpl-7f"}
    requests = [request("cmpl-7f-0-9d21a3c4", 0, 1, attributes=named), request("cmpl-80-0-1", 0, 1)]
    for text in ("cmpl-7f", "cmpl-7f-0-9d21a3c4", "cmpl-7f-0"):
        assert [found.span_id for found in Causes(requests).find(text)] == ["cmpl-7f-0-9d21a3c4"]
    assert len(Causes(requests).find("cmpl-")) == 2


def test_without_steps_nothing_is_known() -> None:
    known, level_1 = request("known", 0, 200), request("level 1", 0, 90)
    spans = [known, *phases("known", 100, 110, 150, 200), step(110, 150, ["known"], "extend")]
    causes = Causes([*spans, level_1, *phases("level 1", 0, 20, 60, 90)])
    assert causes.has_steps(known)
    assert not causes.has_steps(level_1)
    assert not Causes([level_1]).has_steps(level_1)


def test_each_answer_of_a_request_has_causes_of_its_own() -> None:
    causes = Causes(several())
    assert [found.span_id for found in causes.find("b")] == ["b"]
    for rid, decode, queued in (("a", 100, 0), ("b", 280, 580), ("whole", 280, 500)):
        found = causes.explain(causes.by_id[rid])
        assert sum(found.seconds.values()) == pytest.approx(found.request.seconds)
        assert found.seconds[Cause.DECODE] == pytest.approx(decode / 1000)
        in_queue = sum(time for cause, time in found.seconds.items() if cause.name.startswith("QUEUED"))
        assert in_queue == pytest.approx(queued / 1000, abs=0.02)
    assert [gap.seconds for gap in causes.gaps(causes.by_id["b"])] == [0.14, 0.14]


def test_the_prompts_of_its_answers_are_a_request_s_own() -> None:
    """For each answer they are another's."""
    below: dict[str, Any] = {"parent": "whole", "trace": "trace of whole"}
    whole, answers = request("whole", 0, 400), [request(rid, 0, 400, **below) for rid in "ab"]
    spans = [
        *(whole, *answers, request("other", 0, 900)),
        *(*phases("a", 0, 0, 100, 400), *phases("b", 0, 100, 300, 400), *phases("other", 0, 0, 300, 900)),
        step(0, 100, ["a"], "extend"),
        step(100, 300, ["a", "b", "other"], "mixed"),
        step(300, 400, ["a", "b"]),
    ]
    causes = Causes(spans)
    found = causes.explain(whole)
    expected = {Cause.PREFILL: 0.15, Cause.OTHERS_PREFILL: 0.05, Cause.DECODE: 0.2}
    assert found.seconds == pytest.approx(expected)
    assert [dict(each) for each in found.culprits.values()] == [{"other": pytest.approx(0.05)}]
    assert set(causes.explain(answers[1]).culprits[Cause.QUEUED_PREFILL]) == {"a"}


def test_a_request_has_the_device_time_of_its_answers() -> None:
    spans = several()
    steps = sum(each.seconds for each in spans if each.name == "scheduler.step")
    assert Causes(spans).device_seconds() == {"whole": pytest.approx(steps)}


def test_who_holds_the_kv_room_is_named() -> None:
    """Each by the tokens that it holds; and who runs, where it is the batch that is full."""
    running = [step(start, start + 100, ["small", "large"], usage=0.9) for start in range(0, 1000, 100)]
    others = [request("small", 0, 1000, 100, 5), request("large", 0, 1000, 600, 5)]
    for prompt, cause in ((400, Cause.QUEUED_KV_ROOM), (8, Cause.QUEUED_BATCH_FULL)):
        waiting = [request("w", 0, 1200, prompt), *phases("w", 0, 1000, 1100, 1150)]
        after = step(1000, 1100, ["w"], "extend")
        causes = Causes([*others, *running, *waiting, after])
        found = causes.explain(causes.by_id["w"])
        assert found.ranked()[0][0] is cause
        shares = found.culprits[cause]
        assert set(shares) == {"small", "large"}
        if cause is Cause.QUEUED_KV_ROOM:
            assert shares["large"] == pytest.approx(shares["small"] * 605 / 105)


def test_forward_passes_count_by_the_process_in_which_they_ran() -> None:
    """Two of one process add up, two processes work at once; another one's graphs tell nothing of them."""
    timed = {schema.MODE: "decode", schema.DEVICE_TIME: 0.01, schema.GRAPH: "replayed"}
    untimed = {schema.MODE: "decode", schema.GRAPH: "replayed"}
    spans = [request("r", 0, 400), *phases("r", 0, 10, 100, 400), step(100, 400, ["r"])]
    trace = "step 100"
    passes = [span("forward", 100, 180, trace=trace, attributes=untimed, process_id=WORKER) for _ in range(2)]
    elsewhere = span("forward", 100, 110, trace=trace, attributes=timed, process_id=WORKER + 1)
    assert Causes([*spans, *passes, elsewhere]).device_seconds()["r"] == pytest.approx(0.16)


def test_a_pipeline_s_stages_add_up_and_two_ranks_of_one_count_once() -> None:
    """Each rank has steps of its own; the first one answers. Two batches are under way at once."""

    def ranks(start: float, end: float, rid: str, mode: str = "decode") -> Iterator[Span]:
        """A batch in both stages: 30 ms in the first, 40 in the second, whose other rank takes 20."""
        found = (("tp0 pp0", 0, 30), ("tp0 pp1", 35, 40), ("tp1 pp1", 35, 20))
        for process_id, (rank, begun, ms) in enumerate(found, SCHEDULER):
            more: dict[str, Any] = {"trace": f"{rank} {start}", "process_id": process_id}
            more["attributes"] = {schema.MODE: mode, schema.RANK: rank}
            yield span("scheduler.step", start + begun, end + begun / 5, links=[rid], **more)
            yield span("forward", start + begun + 2, start + begun + 2 + ms, **more)

    requests = [request("r", 0, 400), request("other", 0, 400)]
    steps = [*ranks(100, 200, "r", "extend"), *ranks(200, 300, "r"), *ranks(300, 400, "r")]
    steps += [*ranks(150, 250, "other"), *ranks(250, 350, "other")]
    causes = Causes([*requests, *phases("r", 0, 100, 200, 400), *phases("other", 0, 50, 150, 350), *steps])
    assert causes.device_seconds() == pytest.approx({"r": 3 * 0.07, "other": 2 * 0.07})
    found = causes.explain(causes.by_id["r"]).seconds
    assert found[Cause.DECODE] == pytest.approx(2 * 0.07)
    assert found[Cause.PREFILL] == pytest.approx(0.07)


def test_the_share_of_forward_passes_is_that_of_the_slowest_worker() -> None:
    passes = [
        span("forward", 100, end, trace="step 100", process_id=process_id)
        for end, process_id in ((180, WORKER), (190, WORKER + 1))
    ]
    steps = [step(100, 200, ["r"])]
    (phase,) = report_phases([*steps, *passes], steps)
    assert phase.forward_share == pytest.approx(0.9)


def test_an_answer_that_begins_after_another_was_not_preempted() -> None:
    """A beam search: a request to the engine for each token."""
    below: dict[str, Any] = {"parent": "whole", "trace": "trace of whole"}
    spans = [request("whole", 0, 1000), request("a", 10, 400, **below), request("b", 410, 990, **below)]
    spans += [*phases("a", 10, 20, 300, 400), *phases("b", 410, 420, 900, 990)]
    spans += [step(20, 300, ["a"], "extend"), step(420, 900, ["b"], "extend")]
    found = Causes(spans).explain(spans[0])
    assert Cause.PREEMPTED not in found.seconds
    assert found.seconds[Cause.PREFILL] >= 0.7


def test_an_answer_that_ended_at_once_takes_no_time() -> None:
    """As one that is refused, or of a damaged file: it ends when it begins, and is looked at once."""
    below: dict[str, Any] = {"parent": "whole", "trace": "trace of whole"}
    spans = [request("whole", 0, 300), request("a", 10, 300, **below), *phases("a", 10, 20, 100, 300)]
    spans += [request(rid, 10, 10, **below) for rid in ("b", "c")]
    spans += [step(20, 100, ["a"], "extend"), step(100, 300, ["a"])]
    found = Causes(spans).explain(spans[0])
    assert found.seconds[Cause.PREFILL] == pytest.approx(0.08)
    assert found.seconds[Cause.DECODE] == pytest.approx(0.2)


def test_who_runs_while_a_request_is_preempted_is_named() -> None:
    again = [span("queue", 200, 900, "r"), span("prefill", 900, 950, "r"), span("decode", 950, 1000, "r")]
    alone = [step(start, start + 100, ["other"]) for start in range(200, 900, 100)]
    both = [step(100, 200, ["r", "other"]), step(900, 950, ["r", "other"], "extend")]
    requests = [request("r", 0, 1000, 600, 100), request("other", 0, 1000, 600, 300)]
    causes = Causes([*requests, *phases("r", 0, 10, 100, 200), *again, *alone, *both])
    found = causes.explain(causes.by_id["r"])
    assert found.ranked()[0][0] is Cause.PREEMPTED
    assert found.seconds[Cause.PREEMPTED] == pytest.approx(0.75)
    assert found.culprits[Cause.PREEMPTED] == {"other": pytest.approx(0.75)}


def test_a_request_that_is_preempted_after_its_first_token_has_a_gap_until_the_second() -> None:
    again = [span("queue", 101, 200, "r"), span("prefill", 200, 395, "r"), span("decode", 395, 500, "r")]
    steps = [step(10, 100, ["r"], "extend"), step(200, 300, ["r"], "extend"), step(300, 400, ["r"], "mixed")]
    spans = [request("r", 0, 500), *phases("r", 0, 10, 95, 101), *again, *steps, step(400, 500, ["r"])]
    causes = Causes(spans)
    found = [(gap.start_ns / MS, gap.step.end_ns / MS) for gap in causes.gaps(causes.by_id["r"])]
    assert found == [(95, 400), (400, 500)]


def test_a_request_whose_end_is_not_recorded_yet_is_not_named() -> None:
    """The steps of one that still runs are linked to it, and its own span comes when it ends."""
    again = [span("queue", 200, 900, "r"), span("prefill", 900, 950, "r"), span("decode", 950, 1000, "r")]
    others = [step(start, start + 100, ["runs", "ended"]) for start in range(200, 900, 100)]
    requests = [request("r", 0, 1000, 600, 100), request("ended", 0, 1000, 1, 0)]
    found = Causes([*requests, *phases("r", 0, 10, 100, 200), *again, *others]).explain(requests[0])
    assert found.seconds[Cause.PREEMPTED] == pytest.approx(0.75)
    assert dict(found.worst(Cause.PREEMPTED)) == {"ended": pytest.approx(0.35)}


def test_what_its_caller_did_not_read_delays_an_answer_only_after_it_was_made() -> None:
    """Also where the caller read a part of the time: the rest of it is delivery."""
    unread = span("wait_for_caller", 50, 450, "r", process_id=1, attributes={schema.UNREAD_TIME: 0.3})
    causes = Causes([request("r", 0, 500), *phases("r", 0, 10, 100, 250), step(100, 250, ["r"]), unread])
    found = causes.explain(causes.by_id["r"])
    assert found.seconds[Cause.DECODE] == pytest.approx(0.15)
    assert found.seconds[Cause.CALLER] == pytest.approx(0.15)
    assert found.seconds[Cause.DELIVERY] == pytest.approx(0.1)


def test_a_request_that_a_second_scheduler_took_over_hides_no_steps_of_the_first() -> None:
    """Ranks that only follow write no phases; the first scheduler has."""
    moved = span("queue", 20, 30, "a", trace="trace of a", process_id=WORKER)
    spans = [request("a", 0, 90), request("b", 0, 90), *phases("a", 0, 5, 10, 15), *phases("b", 0, 5, 10, 90)]
    spans += [moved, step(5, 10, ["a"]), step(10, 40, ["b"])]
    assert 10 * MS in [each.start_ns for each in Causes(spans).steps()]


def test_a_pause_that_lets_running_requests_end_stops_those_that_wait() -> None:
    """The host's time between two of the steps that go on is no stop; what follows the last of them is."""
    spans = [
        request("running", 0, 420, output=4),
        *phases("running", 0, 5, 100, 415),
        step(5, 100, ["running"], "extend"),
        *(step(start, start + 80, ["running"]) for start in (120, 220)),
        step(400, 415, ["running"]),
        *(span(name, at, at + 1, trace=name) for name, at in (("pause", 110), ("resume", 390))),
        request("late", 150, 500, output=1),
        *phases("late", 150, 420, 490, 490),
        step(420, 490, ["late"], "extend"),
    ]
    causes = Causes(spans)
    running, late = (causes.explain(causes.find(rid)[0]).seconds for rid in ("running", "late"))
    assert running[Cause.STOPPED] == pytest.approx((391 - 300) / 1000)
    assert late[Cause.STOPPED] == pytest.approx((391 - 150) / 1000)


def test_a_phase_from_before_the_level_was_raised_or_after_is_not_the_host() -> None:
    whole, later = request("whole", 0, 400), step(900, 950, ["other"])
    own, decoding = (
        phases("whole", 0, 20, 100, 400),
        [step(at, at + 100, ["whole"]) for at in (100, 200, 300)],
    )
    raised = Causes([whole, *own, *decoding, later]).explain(whole).seconds
    assert raised[Cause.PREFILL] == pytest.approx(0.08)
    assert raised[Cause.HOST] == 0
    lowered = Causes([whole, *own, step(20, 100, ["whole"], "extend"), later]).explain(whole).seconds
    assert lowered[Cause.DECODE] == pytest.approx(0.3)
    assert lowered[Cause.HOST] == 0


def test_processes_of_two_containers_with_one_id_are_two_schedulers(tmp_path: Path) -> None:
    """Containers that share the network have the host's name, and often the same process ids."""
    both = []
    for number in "12":
        file = SimulatedRun(40, seed=int(number)).write(tmp_path / number)
        begin = '"resource": {"attributes": ['
        named = f'{{"key": "service.instance.id", "value": {{"stringValue": "{number}"}}}}, '
        text = file.read_text().replace('"00', f'"{number}0')  # span ids
        file.write_text(text.replace(begin, begin + named))
        both.append(read_spans(file))
    apart = Causes(both[0])
    together = Causes(sorted([*both[0], *both[1]], key=lambda span: span.start_ns))
    for request in apart.requests:
        assert together.explain(request).ranked() == apart.explain(request).ranked()
