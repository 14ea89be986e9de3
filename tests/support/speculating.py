"""Schedulers that speculate without a model: what observers read of vLLM's and SGLang's, and their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from sgl_aspects.engines import SGLANG, VLLM, Engine
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.queue import QueueObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.record.recorder import Recorder
from tests.support.stand_ins import ForwardMode
from tests.support.stepping import Loop

DRAFTED = 3


class Speculating:
    """The loop of one engine, of requests ``r0``, ``r1``, ... that decode.

    ``drafted``, ``accepted``: the engine's own counts. ``accepted_at``: of requests, by position.
    """

    engine: Engine

    def __init__(self, recorder: Recorder, size: int) -> None:
        trackers = self.trackers = Trackers.of(self.engine, recorder, DEFAULTS)
        observers: tuple[Any, ...] = (StepObserver(trackers), QueueObserver(trackers))
        self.loop = Loop(each for observer in observers for each in observer.observations())
        self.drafted = self.accepted = 0
        self.accepted_at = Counter[int]()
        for number in range(size):
            trackers.requests.resume(trackers.requests.queued(f"r{number}"), 1)

    def count(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        self.accepted_at.update(range(accepted))

    def finish(self) -> None:
        requests = self.trackers.requests
        for request in [*requests.preempted_requests]:
            requests.resume(request, 1)
        for rid in [*requests.requests]:
            requests.finished(rid, 90, "length")


class VllmSpeculating(Speculating):
    """Launches a batch before the result of the one before is processed."""

    engine = VLLM

    def __init__(self, recorder: Recorder, size: int) -> None:
        super().__init__(recorder, size)
        self.requests = {f"r{n}": self._request(f"r{n}") for n in range(size)}
        self.running = [*self.requests.values()]
        self.waiting: list[Any] = []
        self.kv_cache_manager = SimpleNamespace(usage=0.5)
        self._launched: list[tuple[Any, Any]] = []
        self._dropped: list[Any] = []

    def _request(self, rid: str) -> Any:
        request = SimpleNamespace(request_id=rid, num_output_tokens=2, num_computed_tokens=9, finished=False)
        request.is_finished = lambda: request.finished
        request.get_finished_reason = lambda: "stop"
        return request

    def step(self, number: int, invalid: dict[str, int] | None = None, drafted: int = DRAFTED) -> None:
        """Launch a batch, with drafts for all but each third request, and process the one before."""
        rids = [request.request_id for request in self.running]
        drafts = {rid: [7] * drafted for at, rid in enumerate(rids) if drafted and (at + number) % 3}
        tokens = {rid: 1 + len(drafts.get(rid, ())) for rid in rids}
        cached = SimpleNamespace(
            req_ids=rids, resumed_req_ids=set(), num_computed_tokens=[number] * len(rids)
        )
        cached.num_output_tokens = [number + 1] * len(rids)
        batch = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens=drafts,
            num_invalid_spec_tokens=invalid,
        )
        with self.loop.call("run_batch", self, batch, result=object()):
            pass
        row_of = {rid: at for at, rid in enumerate(reversed(rids))}
        rows = [[5] * (1 + (at + number) % (drafted + 1)) for at in range(len(rids))]
        for rid in rids:
            if rid not in drafts:
                del rows[row_of[rid]][1:]
        if number == 12:  # a prompt that goes on, or an output that was discarded
            rows[0].clear()
        output = SimpleNamespace(req_id_to_index=row_of, sampled_token_ids=rows)
        self._launched.append((batch, output))
        if len(self._launched) > 1:
            self.process()

    def process(self) -> None:
        batch, output = self._launched.pop(0)
        with self.loop.call("process_batch_result", self, batch, output):
            for rid, tokens in batch.scheduled_spec_decode_tokens.items():
                request, row = self.requests.get(rid), output.sampled_token_ids[output.req_id_to_index[rid]]
                if request is None or request.is_finished() or request in self._dropped:
                    continue
                if row:
                    drafted = len(tokens) - (batch.num_invalid_spec_tokens or {}).get(rid, 0)
                    self.count(drafted, len(row) - 1)
                del row[1:]  # as where an answer ends in it

    def end(self, rid: str, *, is_kept: bool = False) -> None:
        """End a request; ``is_kept``: its memory is in use."""
        request = self.requests[rid] if is_kept else self.requests.pop(rid)
        self.running.remove(request)
        request.finished = True
        with self.loop.call("end_scheduled_request", self, request):
            pass

    def preempt(self, rid: str) -> None:
        request = self.requests[rid]
        self.running.remove(request)
        request.num_stale_output_tokens, request.drop_stale_output = 4, rid == "r2"
        if request.drop_stale_output:
            self._dropped.append(request)
        with self.loop.call("retract", self, request):
            pass


class SglangSpeculating(Speculating):
    """Its result has the accepted tokens of each request once it is processed."""

    engine = SGLANG

    def __init__(self, recorder: Recorder, size: int) -> None:
        super().__init__(recorder, size)
        self.reqs = [SimpleNamespace(rid=f"r{n}", finished_reason=None, output_ids=[1]) for n in range(size)]
        self.waiting_queue: list[Any] = []
        self.running_batch = SimpleNamespace(reqs=self.reqs)
        self.token_to_kv_pool_allocator = SimpleNamespace(size=100, available_size=lambda: 50)
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 0)
        with self.loop.call("release_request", SimpleNamespace(rid="")):
            pass

    def step(self, number: int, stride: int | None = None, drafted: int = DRAFTED) -> None:
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, reqs=self.reqs, batch_size=len(self.reqs), forward_iter=number
        )
        result = SimpleNamespace(num_correct_drafts_per_req_cpu=None, speculative_num_draft_tokens=None)
        result.speculative_output_stride = stride
        if stride:
            result.num_non_draft_tokens_per_req = 2
        with self.loop.call("run_batch", self, batch, result=result):
            pass
        with self.loop.call("process_batch_result", self, batch, result):
            if drafted:
                each = [(at + number) % (drafted + 1) for at in range(len(self.reqs))]
                result.speculative_num_draft_tokens = drafted + 1
                result.num_correct_drafts_per_req_cpu = each
                self.drafted += (stride - 2 if stride else drafted) * len(each)
                self.accepted += sum(each)


def speculate(recorder: Recorder) -> Iterator[Speculating]:
    """Run both engines through all that may happen to a draft; yields each."""
    vllm = VllmSpeculating(recorder, 6)
    for number in range(40):
        vllm.step(
            number,
            invalid={"r1": 2} if number in (15, 16) else None,
            drafted={8: 0, 9: 0, 20: 14}.get(number, DRAFTED),
        )
        if number == 24:
            vllm.end("r0")
        if number == 28:
            vllm.end("r3", is_kept=True)
        if number in (32, 34):
            vllm.preempt(f"r{number // 2 - 15}")
    vllm.process()
    vllm.finish()
    yield vllm
    sglang = SglangSpeculating(recorder, 5)
    for number in range(30):
        sglang.step(
            number, stride=6 if number in (11, 12) else None, drafted={8: 0, 9: 0}.get(number, DRAFTED)
        )
    sglang.finish()
    yield sglang
