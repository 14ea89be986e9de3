"""The scheduler by itself, with a model that is a function: what callers get, whatever happens to them."""

from __future__ import annotations

import hashlib
import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sgl_aspects.errors import InvalidRequestError, ModelLoadError, QueueFullError
from sgl_aspects.runtime import SamplingParams, ServerArgs
from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.core import Batch, ForwardMode, Req
from sgl_aspects.runtime.kv_cache import KVCache, PagedAllocator, ReqToTokenPool
from sgl_aspects.runtime.messages import (
    AbortRequest,
    Reply,
    TokenizedRequest,
    TokenOutput,
    UpdateWeightsRequest,
)
from sgl_aspects.runtime.scheduling import scheduler as scheduler_module
from sgl_aspects.runtime.scheduling.scheduler import Scheduler
from tests.support.schedulers import Memory

VOCAB = 3
CONTEXT = 60


def next_token(tokens: list[int], weights: str) -> int:
    """The model: few different tokens, so that requests have much in common."""
    return hashlib.blake2b(f"{weights}{tokens}".encode(), digest_size=1).digest()[0] % VOCAB


def known(batch: Batch, i: int) -> tuple[list[int], int]:
    """The tokens of a request and how many are computed, with the step before that is still in flight."""
    req = batch.reqs[i]
    tokens = req.tokens_between(0, req.total_tokens)
    if batch.follows is None:
        return tokens, req.computed_tokens
    return [*tokens, batch.follows.tolist()[i]], req.computed_tokens + 1


class FakeRunner:
    """Computes into slots what was computed with which weights, and minds what it reads."""

    def __init__(self, args: ServerArgs, ranks: object = None) -> None:
        self.weights = "first"
        self.runs_ahead = False
        self.config = SimpleNamespace(eos_token_ids=())
        self.communicator = Communicator()
        size, page_size = args.max_total_tokens or 0, args.page_size
        table = ReqToTokenPool(args.max_running_requests, CONTEXT, page_size, torch.device("cpu"))
        self.memory = Memory(page_size)
        self.kv_cache = KVCache(
            PagedAllocator(size, page_size), table, self.memory, prefix_cache=args.prefix_cache
        )

    def forward(self, batch: Batch) -> None:
        page_size = self.kv_cache.page_size
        written: set[int] = set()
        for i, (req, count) in enumerate(zip(batch.reqs, batch.num_new_tokens)):
            tokens, computed = known(batch, i)
            if i < batch.num_decodes:
                assert count == 1
                assert req.output_ids
                assert computed == len(tokens) - 1, "a captured step feeds the last token"
            row = self.kv_cache.req_to_token_pool.req_to_token[req.row].tolist()
            for at in range(computed + count):
                slot = row[at]
                assert slot >= page_size
                content = (self.weights, *tokens[: at + 1])
                if at < computed:
                    assert self.memory.slots[slot] == content
                    assert slot not in written, "read in a step that another request writes"
                else:
                    assert slot not in written
                    written.add(slot)
                    self.memory.slots[slot] = content  # type: ignore[assignment]

    def sample(self, logits: None, batch: Batch) -> Any:
        sampled = [next_token(known(batch, i)[0], self.weights) for i in range(batch.batch_size)]
        return SimpleNamespace(tolist=lambda: sampled, logprobs=[])

    def can_follow(self, batch: Batch) -> bool:
        return self.runs_ahead and batch.forward_mode is ForwardMode.DECODE

    def update_weights(self, path: str) -> None:
        if path == "bad":
            raise ModelLoadError("bad was not loaded, the old weights stay")
        self.weights = path


class Caller:
    """A scheduler in this process, and the messages to its owner."""

    def __init__(self, **fields: Any) -> None:
        self.ours, theirs = multiprocessing.Pipe()
        self.scheduler = Scheduler(ServerArgs("model", **fields), theirs)
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOutput] = {}
        self.replies: list[Reply] = []

    def send(self, tokens: list[int], new_tokens: int, priority: int = 0) -> str:
        rid = str(len(self.prompts))
        self.prompts[rid] = tokens, new_tokens
        self.tokens[rid] = []
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, priority=priority)
        self.scheduler.handle_message(TokenizedRequest(rid, tokens, params))
        return rid

    def step(self) -> None:
        scheduler = self.scheduler
        if scheduler.has_work:
            scheduler.step()
        if scheduler.weight_updates and not scheduler._is_any_begun():
            scheduler.update_weights(scheduler.weight_updates.popleft())
        self.listen()

    def listen(self) -> None:
        while self.ours.poll(0):
            message = self.ours.recv()
            if isinstance(message, Reply):
                self.replies.append(message)
                continue
            for output in message:
                assert output.rid not in self.ends, "ended twice"
                self.tokens[output.rid] += output.token_ids
                if output.finish_reason is not None:
                    self.ends[output.rid] = output

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work and not self.scheduler.weight_updates:
                return
            self.step()
        raise AssertionError("it does not come to an end")

    def expected(self, rid: str, weights: str = "first") -> list[int]:
        tokens, new_tokens = self.prompts[rid]
        tokens = list(tokens)
        for _ in range(new_tokens):
            tokens.append(next_token(tokens, weights))
        return tokens[-new_tokens:]

    def row(self, rid: str) -> Req | None:
        scheduler = self.scheduler
        return next((req for req in (*scheduler.running, *scheduler.waiting) if req.rid == rid), None)


@pytest.fixture(autouse=True)
def _fake_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "ModelRunner", FakeRunner)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted in any state, and weights change, while memory is short."""

    @initialize(
        page_size=st.sampled_from([1, 4]),
        pages=st.integers(15, 30),
        chunk=st.sampled_from([3, 16]),
        reserve=st.sampled_from([0, 4]),
        rows=st.sampled_from([1, 2, 5]),
        queued=st.sampled_from([None, 2]),
        prefix_cache=st.booleans(),
        runs_ahead=st.booleans(),
    )
    def begin(
        self,
        page_size: int,
        pages: int,
        chunk: int,
        reserve: int,
        rows: int,
        queued: int | None,
        prefix_cache: bool,
        runs_ahead: bool,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(scheduler_module, "ModelRunner", FakeRunner)
        size = max(pages, 60 // page_size) if page_size > 1 else pages * 4
        self.caller = Caller(
            page_size=page_size,
            max_total_tokens=min(size * page_size, 64),
            chunked_prefill_size=chunk,
            decode_reserve=reserve,
            max_running_requests=rows,
            max_queued_requests=queued,
            prefix_cache=prefix_cache,
        )
        self.caller.scheduler.model_runner.runs_ahead = runs_ahead  # type: ignore[attr-defined]
        self.weights = ["first"]
        self.aborted: set[str] = set()

    @rule(
        tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
        new_tokens=st.integers(1, 30),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
    )
    def send(self, tokens: list[int], new_tokens: int, priority: int) -> None:
        self.caller.send(tokens, new_tokens, priority)
        self.caller.listen()

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.caller.step()

    @precondition(lambda self: self.caller.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.caller.prompts)), label="rid")
        if rid not in self.caller.ends:
            self.aborted.add(rid)
        self.caller.scheduler.handle_message(AbortRequest(rid))
        self.caller.listen()
        assert rid in self.caller.ends, "ended at once, in any state"

    @rule(path=st.sampled_from(["bad", "second", "third"]))
    def update(self, path: str) -> None:
        self.caller.scheduler.handle_message(UpdateWeightsRequest(path))
        if path != "bad":
            self.weights.append(path)

    @invariant()
    def slots_are_where_they_should_be(self) -> None:
        if not hasattr(self, "caller"):
            return
        scheduler = self.caller.scheduler
        cache = scheduler.kv_cache
        held = sum(len(req.pages) - req.shared_pages for req in scheduler.running)
        assert len(cache.allocator._free) + cache.prefix_cache.num_pages + held == cache.allocator.num_pages
        assert all(req.row < 0 and not req.pages for req in scheduler.waiting)
        assert len(scheduler.running) <= scheduler.server_args.max_running_requests

    def teardown(self) -> None:
        if not hasattr(self, "caller"):
            return
        caller = self.caller
        caller.finish()
        for rid, (_, new_tokens) in caller.prompts.items():
            end, tokens = caller.ends[rid], caller.tokens[rid]
            answers = [caller.expected(rid, weights) for weights in dict.fromkeys(self.weights)]
            if end.finish_reason == "error":
                assert isinstance(end.error, QueueFullError)
                assert not tokens
            elif end.finish_reason == "abort":
                assert rid in self.aborted
                assert any(answer[: len(tokens)] == tokens for answer in answers)
            else:
                assert len(tokens) == new_tokens
                assert tokens in answers, "of no model, or of two"
        cache = caller.scheduler.kv_cache
        assert cache.available_size() == cache.total_size
        self.patch.undo()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


# -- turns -------------------------------------------------------------------------------------------


def test_requests_begin_in_the_order_they_came_and_the_first_never_gives_way() -> None:
    caller = Caller(page_size=1, max_total_tokens=40, decode_reserve=0, chunked_prefill_size=64)
    rids = [caller.send([i % VOCAB] * 8, 20) for i in range(8)]
    retracted: list[str] = []
    retract = caller.scheduler.retract_request

    def watched(req: Req) -> None:
        retracted.append(req.rid)
        assert req.rid == max(other.rid for other in (*caller.scheduler.running, req))
        retract(req)

    caller.scheduler.retract_request = watched  # type: ignore[method-assign]
    caller.finish()
    assert retracted
    assert rids[0] not in retracted
    assert list(caller.ends) == rids
    assert all(caller.tokens[rid] == caller.expected(rid) for rid in rids)


def test_a_higher_priority_goes_first_and_makes_others_give_way() -> None:
    caller = Caller(page_size=1, max_total_tokens=60, max_running_requests=2, decode_reserve=0)
    low = [caller.send([i] * 4, 20, priority=-1) for i in range(3)]
    for _ in range(3):
        caller.step()
    assert [caller.row(rid).row >= 0 for rid in low] == [True, True, False]  # type: ignore[union-attr]
    high = caller.send([1, 2], 20, priority=5)
    caller.step()
    assert [caller.row(rid).row >= 0 for rid in (*low, high)] == [True, False, False, True]  # type: ignore[union-attr]
    caller.finish()
    assert list(caller.ends)[:3] in ([high, *low[:2]], [low[0], high, low[1]])
    assert all(caller.tokens[rid] == caller.expected(rid) for rid in (*low, high))


def test_equal_priorities_never_make_each_other_give_way_to_begin() -> None:
    caller = Caller(page_size=1, max_total_tokens=64, max_running_requests=1)
    rids = [caller.send([i], 10) for i in range(3)]
    caller.finish()
    assert caller.scheduler.num_retractions == 0
    assert list(caller.ends) == rids


# -- a full queue ------------------------------------------------------------------------------------


def test_one_request_too_many_is_rejected_with_the_reason() -> None:
    caller = Caller(page_size=1, max_total_tokens=64, max_running_requests=2, max_queued_requests=3)
    rids = [caller.send([1], 5) for _ in range(7)]
    caller.listen()
    assert list(caller.ends) == rids[5:]  # two can run at once
    assert isinstance(caller.ends[rids[5]].error, QueueFullError)
    assert "3 requests wait (max_queued_requests)" in str(caller.ends[rids[5]].error)
    caller.finish()
    assert all(caller.tokens[rid] == caller.expected(rid) for rid in rids[:5])


def test_where_the_queue_is_full_the_lowest_priority_is_refused() -> None:
    caller = Caller(page_size=1, max_total_tokens=64, max_running_requests=1, max_queued_requests=1)
    first, second = caller.send([1], 30), caller.send([2], 5)
    caller.step()
    urgent = caller.send([0], 5, priority=1)
    caller.listen()
    assert list(caller.ends) == [second]
    caller.finish()
    assert list(caller.ends) == [second, urgent, first]


def test_a_request_that_had_to_give_way_is_not_refused() -> None:
    caller = Caller(
        page_size=1, max_total_tokens=40, decode_reserve=0, max_queued_requests=1, max_running_requests=2
    )
    rids = [caller.send([i] * 8, 25) for i in range(2)]
    while not caller.scheduler.num_retractions:
        caller.step()
    third = caller.send([2], 5)
    fourth = caller.send([2], 5)
    caller.finish()
    assert caller.ends[rids[1]].finish_reason == "length"
    refused = [rid for rid in (third, fourth) if caller.ends[rid].finish_reason == "error"]
    assert refused
    assert all(caller.tokens[rid] == caller.expected(rid) for rid in rids)


# -- new weights -------------------------------------------------------------------------------------


def test_bad_weights_are_answered_with_an_error_and_the_next_ones_come_after_them() -> None:
    caller = Caller(page_size=1, max_total_tokens=64)
    first = caller.send([1], 10)
    caller.step()
    for number, path in enumerate(["bad", "second"]):
        caller.scheduler.handle_message(UpdateWeightsRequest(path, number))
    later = caller.send([1], 10)
    caller.finish()
    assert [(reply.number, type(reply.error)) for reply in caller.replies] == [
        (0, ModelLoadError),
        (1, type(None)),
    ]
    assert caller.tokens[first] == caller.expected(first)
    assert caller.tokens[later] == caller.expected(later, "second")


def test_a_schema_that_cannot_be_compiled_ends_its_request_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Compiler:
        def compile(self, schema: str) -> None:
            raise InvalidRequestError("json_schema cannot be used")

    ended = []

    class Watched(Scheduler):
        def finish_request(self, req: Req, finish_reason: str) -> None:
            ended.append((req.rid, finish_reason))
            super().finish_request(req, finish_reason)

    caller = Caller(max_total_tokens=64)
    caller.scheduler.__class__ = Watched
    monkeypatch.setitem(vars(caller.scheduler), "grammar_compiler", Compiler())
    caller.tokens["mine"] = []
    params = SamplingParams(json_schema="{}", max_new_tokens=4)
    caller.scheduler.handle_message(TokenizedRequest("mine", [1], params))
    caller.listen()
    assert ended == [("mine", "error")]
    assert isinstance(caller.ends["mine"].error, InvalidRequestError)
    assert not caller.scheduler.has_work
