"""A scheduler with SGLang's names whose loop overlaps: what belongs to a batch stays with it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines.sglang.roles import SGLANG
from sgl_aspects.tracing.lifecycle import CallTracker, calls
from sgl_aspects.tracing.observers import weave_observers
from sgl_aspects.tracing.options import TraceOptions
from sgl_aspects.tracing.records import RequestBegin, RequestSeen
from tests.support.memory_recorder import Memory
from tests.support.stand_ins import Engine, ForwardMode

SCHEDULER = """
    from types import SimpleNamespace
    class Scheduler:
        def __init__(self):
            self.waiting_queue, self.found, self.matched = [], None, None
            self.grammar_manager = SimpleNamespace(grammar_queue=[])
        def handle_generate_request(self, recv_req):
            self.waiting_queue.append(recv_req)
        def abort_request(self, recv_req):
            self.waiting_queue = [r for r in self.waiting_queue if not r.rid.startswith(recv_req.rid)]
            for req in self.grammar_manager.grammar_queue:
                req.set_finish_with_abort("Aborted by AbortReq.")
        def get_next_batch_to_run(self, running_batch=None, last_batch=None):
            if self.matched:
                self.matched.match_prefix("as the batch was made")
            return self.found
        def run_batch(self, batch, pp_proxy_tensors=None):
            return object()
        def launch_batch_sample_if_needed(self, batch_result, cur_batch):
            if batch_result is not None:
                self.runner.sample("logits", cur_batch)
        def process_batch_result(self, batch, result):
            self.stream_output(batch.reqs, False)
        def stream_output(self, reqs, return_logprob, skip_req=None):
            pass
    """
REQ = """
    class Req:
        inflight_middle_chunks, finished_reason = 0, None
        def __init__(self, rid):
            self.rid, self.output_ids = rid, []
        def set_finish_with_abort(self, message):
            self.to_finish = {"type": "abort"}
    """
RUNNER = """
    class ModelRunner:
        def sample(self, logits_output, forward_batch):
            if forward_batch is None:
                raise RuntimeError("no mask for this device")
    """


@pytest.fixture
def recorder(engine: Engine) -> Iterator[Memory]:
    engine.write("sglang/srt/managers/scheduler.py", SCHEDULER)
    engine.write("sglang/srt/managers/schedule_batch.py", REQ)
    recorder = Memory()
    recorder.level = 4
    undo = weave_observers(recorder)
    yield recorder
    for step in reversed(undo):
        step()


@pytest.fixture
def scheduler(engine: Engine, recorder: Memory) -> Any:
    """A scheduler; the record of its start is gone."""
    scheduler = engine.load("sglang.srt.managers.scheduler").Scheduler()
    recorder.begun.clear()
    recorder.ended.clear()
    return scheduler


def request(scheduler: Any, rid: str) -> Any:
    req = SimpleNamespace(rid=rid, finished_reason=None, output_ids=[], inflight_middle_chunks=0)
    scheduler.handle_generate_request(req)
    return req


def batch(mode: str, *reqs: Any, tokens: int = 4) -> Any:
    lengths = [tokens] * len(reqs) if mode == "EXTEND" else None
    return SimpleNamespace(
        reqs=list(reqs), forward_mode=ForwardMode[mode], extend_lens=lengths, batch_size=len(reqs)
    )


def launch(scheduler: Any, found: Any) -> Any:
    scheduler.found = found
    scheduler.get_next_batch_to_run()
    scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req not in found.reqs]
    return scheduler.run_batch(found)


def test_a_loop_that_finds_nothing_leaves_no_record(scheduler: Any, recorder: Memory) -> None:
    for _ in range(1000):
        scheduler.get_next_batch_to_run()
    assert recorder.ended == []
    assert recorder.begun == []


def test_results_go_to_the_step_of_their_batch(scheduler: Any, recorder: Memory) -> None:
    one, other = request(scheduler, "one"), request(scheduler, "other")
    first, second = batch("EXTEND", one), batch("EXTEND", other)
    first_result = launch(scheduler, first)
    second_result = launch(scheduler, second)  # before the first one's result is processed
    scheduler.process_batch_result(first, first_result)
    scheduler.process_batch_result(second, second_result)
    steps = recorder.named("scheduler.step")
    assert len(steps) == 2
    for step, result in zip(steps, recorder.named("process_result")):
        assert result.root_id == result.parent_id == step.span_id
    assert [step.links for step in steps] == [[record.root_id] for record in recorder.named("prefill")]


def test_sampling_after_the_batch_before_was_processed_is_of_its_own_step(
    scheduler: Any, recorder: Memory, engine: Engine
) -> None:
    """As with a grammar: the loop spins, and the batch fails, too."""
    engine.write("sglang/srt/model_executor/model_runner.py", RUNNER)
    scheduler.runner = engine.load("sglang.srt.model_executor.model_runner").ModelRunner()
    one, other = request(scheduler, "one"), request(scheduler, "other")
    first, second = batch("EXTEND", one), batch("EXTEND", other)
    first_result = launch(scheduler, first)
    scheduler.launch_batch_sample_if_needed(first_result, first)
    second_result = launch(scheduler, second)
    scheduler.process_batch_result(first, first_result)
    with pytest.raises(RuntimeError):
        scheduler.launch_batch_sample_if_needed(second_result, None)
    for _ in range(10):
        scheduler.launch_batch_sample_if_needed(None, None)
    steps, samples = recorder.named("scheduler.step"), recorder.named("sample")
    assert [sample.parent_id for sample in samples] == [step.span_id for step in steps]
    assert [step.error for step in steps] == ["", "RuntimeError"]


def test_a_stage_of_a_pipeline_processes_another_result_of_the_same_batch(
    scheduler: Any, recorder: Memory
) -> None:
    one, other = request(scheduler, "one"), request(scheduler, "other")
    batches = [batch("EXTEND", one), batch("EXTEND", other)]
    for each in batches:
        launch(scheduler, each)
    for each in reversed(batches):
        scheduler.process_batch_result(each, object())
    steps, results = recorder.named("scheduler.step"), recorder.named("process_result")
    assert [step.links for step in steps] == [[record.root_id] for record in recorder.named("prefill")]
    assert [result.parent_id for result in results] == [step.span_id for step in steps]
    assert len({step.span_id for step in steps}) == 2


def test_only_the_last_chunk_of_a_prompt_begins_decoding(scheduler: Any, recorder: Memory) -> None:
    req = request(scheduler, "long")
    chunk, last = batch("EXTEND", req, tokens=8), batch("EXTEND", req, tokens=3)
    req.inflight_middle_chunks = 1
    chunk_result = launch(scheduler, chunk)
    last_result = launch(scheduler, last)
    scheduler.process_batch_result(chunk, chunk_result)
    assert not [begun for begun in recorder.begun if begun.type.name == "decode"]
    req.inflight_middle_chunks = 0
    scheduler.process_batch_result(last, last_result)
    assert [record.values for record in recorder.named("prefill")] == [(8, 0), (3, 1)]
    assert len([begun for begun in recorder.begun if begun.type.name == "decode"]) == 1
    assert len(recorder.named("queue")) == 1

    req.finished_reason, req.output_ids = {"type": "stop"}, [1, 2]
    step = batch("DECODE", req)
    scheduler.process_batch_result(step, launch(scheduler, step))
    assert [record.values[:2] for record in recorder.named("decode")] == [(2, "stop")]


@pytest.mark.parametrize("is_newer", [True, False])
def test_of_several_ranks_the_answering_one_records_requests(
    scheduler: Any, recorder: Memory, is_newer: bool
) -> None:
    holder = scheduler.ipc_channels = SimpleNamespace()
    if not is_newer:  # up to 0.5.12
        del scheduler.ipc_channels
        holder = scheduler
    holder.send_to_detokenizer = SimpleNamespace(socket=None)
    # Each rank has the arguments of a server whose scheduler sees the requests first.
    scheduler.server_args = SimpleNamespace(smg_grpc_mode=True, served_model_name="mini")
    req = request(scheduler, "one")
    assert not [each for each in recorder.events if isinstance(each, RequestBegin)]
    first = batch("EXTEND", req)
    scheduler.process_batch_result(first, launch(scheduler, first))
    req.finished_reason, req.output_ids = {"type": "stop"}, [1, 2]
    second = batch("DECODE", req)
    scheduler.process_batch_result(second, launch(scheduler, second))
    assert [len(recorder.named(name)) for name in ("queue", "prefill", "decode")] == [0, 0, 0]
    assert recorder.begun == []
    steps = recorder.named("scheduler.step")
    assert [len(step.links) for step in steps] == [1, 1]


def test_a_request_that_ends_with_its_first_token_has_been_prefilled(
    scheduler: Any, recorder: Memory
) -> None:
    req = request(scheduler, "short")
    only = batch("EXTEND", req)
    result = launch(scheduler, only)
    req.finished_reason, req.output_ids = {"type": "length"}, [1]
    scheduler.process_batch_result(only, result)
    assert [len(recorder.named(name)) for name in ("queue", "prefill", "decode")] == [1, 1, 1]
    (prefill,), (decode,) = recorder.named("prefill"), recorder.named("decode")
    assert prefill.end_ns == decode.start_ns <= decode.end_ns


def test_an_abort_ends_waiting_requests_only(scheduler: Any, recorder: Memory) -> None:
    runs, waits, stays = (request(scheduler, rid) for rid in ("a-runs", "a-waits", "b-stays"))
    launch(scheduler, batch("EXTEND", runs))
    ended_before = len(recorder.named("queue"))
    scheduler.abort_request(SimpleNamespace(rid="a-", abort_all=False))
    aborted = recorder.named("queue")[ended_before:]
    assert [record.values for record in aborted] == [("abort",)]
    assert [req.rid for req in scheduler.waiting_queue] == [stays.rid]
    assert waits not in scheduler.waiting_queue


class CountedReq(SimpleNamespace):
    """A request that counts how often its id is read."""

    reads = 0

    @property
    def rid(self) -> str:
        CountedReq.reads += 1
        return "one"


def test_decode_steps_that_are_not_traced_read_no_request(scheduler: Any, recorder: Memory) -> None:
    """Level 1 is about requests: what it costs a step must not grow with the batch."""
    recorder.level = 1
    req = CountedReq(finished_reason=None, output_ids=[], inflight_middle_chunks=0)
    scheduler.handle_generate_request(req)
    decoded = batch("DECODE", req)
    for one in (batch("EXTEND", req), decoded):
        scheduler.process_batch_result(one, launch(scheduler, one))
    read = CountedReq.reads
    for _ in range(10):
        scheduler.get_next_batch_to_run()
        scheduler.process_batch_result(decoded, scheduler.run_batch(decoded))
    assert CountedReq.reads == read


def test_health_checks_are_not_seen(scheduler: Any, recorder: Memory) -> None:
    request(scheduler, "HEALTH_CHECK_1")
    assert recorder.begun == []


def test_steps_that_are_not_traced_leave_figures_and_an_idle_scheduler_too(engine: Engine) -> None:
    engine.write("sglang/srt/managers/scheduler.py", SCHEDULER)
    recorder = Memory()
    recorder.level = 1
    undo = weave_observers(recorder, TraceOptions(measures=True))
    scheduler = engine.load("sglang.srt.managers.scheduler").Scheduler()
    req = request(scheduler, "one")
    scheduler.running_batch = SimpleNamespace(reqs=[req])
    first, second = batch("EXTEND", req), batch("DECODE", req)
    for one in (first, second):
        scheduler.process_batch_result(one, launch(scheduler, one))
    scheduler.found = None
    for _ in range(1000):
        scheduler.get_next_batch_to_run()
    steps = recorder.named("scheduler.step")
    assert [step.span_id for step in steps] == [0, 0, 0]
    # mode, batch size, tokens; waiting, running: of the two steps, and then of the idle scheduler.
    figures = [tuple(step.values[1:6]) for step in steps]
    assert [each[0] for each in figures] == ["extend", "decode", None]
    assert [each[1] for each in figures] == [1, 1, 0]
    assert [each[4] for each in figures] == [1, 1, 0]
    assert not [begun for begun in recorder.begun if begun.type.name == "scheduler.step"]
    recorder.level = 0  # off is off
    scheduler.process_batch_result(second, launch(scheduler, second))
    assert len(recorder.named("scheduler.step")) == 3
    for step in reversed(undo):
        step()


def test_an_aborted_request_that_waits_for_its_grammar_runs_once(
    engine: Engine, scheduler: Any, recorder: Memory
) -> None:
    req = engine.load("sglang.srt.managers.schedule_batch").Req("a")
    scheduler.handle_generate_request(req)
    scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue = [], [req]
    scheduler.abort_request(SimpleNamespace(rid="a", abort_all=False))
    assert recorder.named("queue") == []
    only = batch("EXTEND", req, tokens=1)
    result = launch(scheduler, only)
    req.finished_reason, req.output_ids = req.to_finish, [1]
    scheduler.process_batch_result(only, result)
    assert [len(recorder.named(name)) for name in ("queue", "prefill", "decode")] == [1, 1, 1]
    (decode,) = recorder.named("decode")
    assert (decode.values[:2], decode.error) == ((1, "abort"), "abort")


def test_requests_without_a_last_output_are_not_kept_in_the_detokenizer_for_ever(
    recorder: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang preempted it, and its caller aborted it while it waited: no message reaches the detokenizer."""
    monkeypatch.setattr(calls, "_MOST_DETOKENIZING", 2)
    tracker = CallTracker(SGLANG, recorder, TraceOptions())
    for start, rid in enumerate(("aborted", "paused", "next"), 1000):
        tracker.detokenized_here(rid, start, start + 5, 5, is_last=False)
    assert list(tracker.detokenizing) == ["paused", "next"]
    tracker.detokenized_here("paused", 3000, 3005, 5, is_last=True)
    (span,) = recorder.named("detokenize")
    keys = [event.key for event in recorder.events if isinstance(event, RequestSeen)]
    assert (span.root_id, span.start_ns, span.end_ns) == (keys[1], 1001, 3005)


CACHE = """
    class RadixCache:
        def match_prefix(self, params):
            return params
    """


def test_what_a_scheduler_does_for_its_first_batch_after_idleness_is_of_that_step(
    engine: Engine, scheduler: Any, recorder: Memory
) -> None:
    """A newer SGLang's schedule returns a plan even without a batch."""
    engine.write("sglang/srt/mem_cache/radix_cache.py", CACHE)
    cache = engine.load("sglang.srt.mem_cache.radix_cache").RadixCache()
    scheduler.found = SimpleNamespace(batch_to_run=None)
    scheduler.get_next_batch_to_run()
    cache.match_prefix("of a request that waits for its grammar")
    for _ in range(10):
        scheduler.get_next_batch_to_run()
    assert recorder.named("cache.match") == []
    first = batch("EXTEND", request(scheduler, "one"))
    cache.match_prefix("as the request came")
    scheduler.matched = cache
    scheduler.process_batch_result(first, launch(scheduler, first))
    (step,), matches = recorder.named("scheduler.step"), recorder.named("cache.match")
    (schedule,) = recorder.named("schedule")
    assert [match.parent_id for match in matches] == [step.span_id, schedule.span_id]
    assert {match.root_id for match in matches} == {step.span_id}


LOGITS = """
    class LogitsProcessor:
        def forward(self, input_ids, hidden_states):
            return hidden_states
    """


def test_what_a_model_does_before_the_first_step_is_of_none(
    engine: Engine, scheduler: Any, recorder: Memory
) -> None:
    """Engines run a model as they start: to warm it up, for their memory's sake, to capture graphs."""
    engine.write("sglang/srt/layers/logits_processor.py", LOGITS)
    logits = engine.load("sglang.srt.layers.logits_processor").LogitsProcessor()
    logits.forward([], "of a graph that is captured")
    first = batch("EXTEND", request(scheduler, "one"))
    scheduler.process_batch_result(first, launch(scheduler, first))
    assert recorder.named("scheduler.step")
    assert recorder.named("logits") == []


TIERS = """
    class L2TransferEngine:
        def submit_host_to_device(self, transfers):
            return transfers
        submit_device_to_host = submit_host_to_device
    """


def test_what_a_request_waits_for_through_many_passes_is_kept(
    engine: Engine, scheduler: Any, recorder: Memory
) -> None:
    """vLLM's engine core schedules without a batch while blocks are loaded from the host's memory."""
    engine.write("sglang/srt/mem_cache/l2_transfer.py", TIERS)
    tiers = engine.load("sglang.srt.mem_cache.l2_transfer").L2TransferEngine()
    scheduler.found = SimpleNamespace(batch_to_run=None)
    scheduler.get_next_batch_to_run()
    tiers.submit_host_to_device([])
    blocks = SimpleNamespace(host_indices=[1, 2], host_pool=SimpleNamespace(size_per_token=4))
    tiers.submit_host_to_device([blocks])
    for _ in range(10):
        scheduler.get_next_batch_to_run()
    scheduler.found = None
    scheduler.get_next_batch_to_run()
    first = batch("EXTEND", request(scheduler, "one"))
    scheduler.process_batch_result(first, launch(scheduler, first))
    (step,), (load,) = recorder.named("scheduler.step"), recorder.named("cache.load")
    assert load.parent_id == load.root_id == step.span_id
