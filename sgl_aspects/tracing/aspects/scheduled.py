"""Level 1, the scheduler's side of each request: time in the queue, each prefill chunk, decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import time_ns
from typing import Any

from sgl_aspects.engines.base import Engine
from sgl_aspects.tracing.aspects.observer import Observation, error_type, nothing
from sgl_aspects.tracing.recorder import Recorder, SpanWriter, in_sample
from sgl_aspects.tracing.records import RequestSeen, SpanType

# A finish reason in the queue: the request ended there. The request's own span says whether that is an error.
QUEUE = SpanType("queue", {"sgl_aspects.finish_reason": str})
PREFILL = SpanType("prefill", {"sgl_aspects.prefill.tokens": int, "sgl_aspects.prefill.chunk": int})
DECODE = SpanType("decode", {"gen_ai.usage.output_tokens": int, "sgl_aspects.finish_reason": str})


@dataclass(eq=False)
class ScheduledRequest:
    """A request in the scheduler. ``key`` is its name in this process's records (see ``RequestSeen``).

    Its span ``decode`` is open where ``decode_id`` is not 0; else ``queue``, unless it ``is_running``.
    """

    key: int
    queue_id: int
    queued_ns: int
    chunks: int = 0
    is_running: bool = False
    decode_id: int = 0
    decode_ns: int = 0
    #: What the engine found wrong with it, where it refused it.
    problem: str = ""


class SchedulerState:
    """What the aspects of a scheduler share, and how its requests are recorded.

    One thread runs a scheduler, so there is one current step. ``level`` is what that step is recorded with:
    the recorder's level, or 0 where the step is not sampled. ``step_id`` and ``run_id`` are span ids, 0 where
    no such span is open. ``details``: spans of what was done before it was known whether there is a step to
    do it for.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.requests: dict[str, ScheduledRequest] = {}
        self.level = self.step_id = self.run_id = 0
        self.details: list[tuple[SpanWriter, int, int, str]] = []
        #: Those that gave way, and are in the queue again.
        self.retracted: set[ScheduledRequest] = set()
        self._recorder = recorder
        self._announce: Callable[[SpanType, int, int, int, int], None] = recorder.announce
        self._write_queue = recorder.spans(QUEUE)
        self._write_prefill = recorder.spans(PREFILL)
        self._write_decode = recorder.spans(DECODE)

    def follow(self) -> None:
        """Another rank, which runs the same requests, tells of them; the steps here are linked to them."""
        self._announce = self._write_queue = self._write_prefill = self._write_decode = _untold

    def begin_step(self) -> int:
        """The id of a new step; 0 where it is not to be recorded."""
        recorder = self._recorder
        level = self.level = recorder.level
        if level >= 2:
            step_id = recorder.new_id()
            if in_sample(step_id, recorder.sample):
                return step_id
        self.level = 0
        return 0

    def add(self, rid: str) -> None:
        """The scheduler got a request."""
        recorder, now = self._recorder, time_ns()
        key, queue_id = recorder.new_id(), recorder.new_id()
        recorder.write(RequestSeen(key, rid, now))
        self._announce(QUEUE, queue_id, key, key, now)
        self.requests[rid] = ScheduledRequest(key, queue_id, now)

    def leave_queue(self, request: ScheduledRequest, now: int) -> None:
        """It is in a batch for the first time."""
        if not request.is_running:
            request.is_running = True
            self.retracted.discard(request)
            self._write_queue(request.queue_id, request.key, request.key, request.queued_ns, now)

    def prefilled(
        self, request: ScheduledRequest, tokens: int, is_last: bool, start_ns: int, end_ns: int, problem: str
    ) -> None:
        """A chunk of its prompt was worked on; from the last one on it decodes."""
        recorder, key, values = self._recorder, request.key, (tokens, request.chunks)
        request.chunks += 1
        self._write_prefill(recorder.new_id(), key, key, start_ns, end_ns, values, problem)
        if is_last and not problem:
            self._begin_decode(request, end_ns)

    def resume(self, request: ScheduledRequest, now: int) -> None:
        """It gave way, and all that it had is still in the prefix cache: it decodes at once."""
        self.leave_queue(request, now)
        self._begin_decode(request, now)

    def _begin_decode(self, request: ScheduledRequest, now: int) -> None:
        request.decode_id, request.decode_ns = self._recorder.new_id(), now
        self._announce(DECODE, request.decode_id, request.key, request.key, now)

    def retract(self, rid: str, output_tokens: int | None) -> None:
        """Memory ran short: it goes back to the queue, and its prompt and output are worked on again."""
        request, recorder, now = self.requests.get(rid), self._recorder, time_ns()
        if request is None or not request.is_running:
            return
        key = request.key
        if request.decode_id:
            values = (output_tokens, "retracted")
            self._write_decode(request.decode_id, key, key, request.decode_ns, now, values)
        request.is_running, request.decode_id = False, 0
        request.queue_id, request.queued_ns = recorder.new_id(), now
        self.retracted.add(request)
        self._announce(QUEUE, request.queue_id, key, key, now)

    def end(self, rid: str, output_tokens: int | None, reason: str | None, problem: str, now: int) -> None:
        """It leaves the scheduler, wherever it was; nothing where it is not known."""
        request = self.requests.pop(rid, None)
        if request is None:
            return
        self.retracted.discard(request)
        key = request.key
        if request.decode_id:
            start_ns = request.decode_ns
            values = (output_tokens, reason)
            self._write_decode(request.decode_id, key, key, start_ns, max(start_ns, now), values, problem)
        elif not request.is_running:
            self._write_queue(request.queue_id, key, key, request.queued_ns, time_ns(), (reason,), problem)


def _untold(*fields: Any, **named: Any) -> None:
    """In the place of what records."""


class ScheduledRequestAspect:
    """Spans ``queue``, ``prefill`` (one for each chunk) and ``decode``, children of the request's span."""

    def __init__(self, recorder: Recorder, engine: Engine, state: SchedulerState) -> None:
        self._recorder = recorder
        self._state = state
        self._last_run_end_ns = 0
        call, reader = engine.call_reader, engine.reader
        self._added = call("add_request", "message")
        self._adding = call("add_request", "scheduler")
        self._is_follower = reader("scheduler.is_follower")
        self._ran = call("run_batch", "batch")
        self._ended = call("end_scheduled_request", "req")
        self._retracted = call("retract", "req")
        self._end_reason = call("end_scheduled_request", "finish_reason")
        self._message_rid = reader("message.rid")
        self._rid = reader("req.rid")
        self._output_tokens = reader("req.output_tokens")
        self._prefill_left = reader("req.prefill_tokens_left")
        self._mode = reader("batch.mode")
        self._reqs = reader("batch.reqs")
        self._new_tokens = reader("batch.num_new_tokens")

    def observations(self) -> list[Observation]:
        return [
            Observation("add_request", self._add_enter, self._add_exit),
            Observation("run_batch", self._run_enter, self._run_exit),
            Observation("end_scheduled_request", self._end_enter, nothing),
            Observation("retract", self._retract_enter, nothing),
        ]

    def _add_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._recorder.level:
            return None
        rid = self._message_rid(self._added(args, kwargs))
        if self._is_follower(self._adding(args, kwargs)):
            self._state.follow()
        # Before the call, so that an end inside it (a request that is refused) finds the request.
        self._state.add(rid)
        return rid

    def _add_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if error is not None and token is not None:
            self._state.end(token, None, None, error_type(error), time_ns())

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        requests = state.requests
        batch = self._ran(args, kwargs)
        if not requests or (self._mode(batch) == "decode" and not state.retracted):
            return None  # nearly every step: nothing begins in it
        now = time_ns()
        chunks = []
        for req, tokens in zip(self._reqs(batch), self._new_tokens(batch)):
            left = self._prefill_left(req)
            request = requests.get(self._rid(req))
            if request is None:
                continue
            if not left:
                if request in state.retracted:
                    state.resume(request, now)
                continue
            state.leave_queue(request, now)
            chunks.append((request, tokens, left <= tokens))
        return now, chunks

    def _run_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        end_ns = self._last_run_end_ns = time_ns()
        if token is None:
            return
        start_ns, chunks = token
        problem = error_type(error)
        for request, tokens, is_last in chunks:
            self._state.prefilled(request, tokens, is_last, start_ns, end_ns, problem)

    def _retract_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        req = self._retracted(args, kwargs)
        self._state.retract(self._rid(req), self._output_tokens(req))

    def _end_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # On entry: before the engine tells the caller, whose span is to end after this one.
        req, reason = self._ended(args, kwargs), self._end_reason(args, kwargs)
        problem = reason if reason == "error" else ""
        # The last token came with the last run; what the scheduler did since is not decoding.
        self._state.end(self._rid(req), self._output_tokens(req), reason, problem, self._last_run_end_ns)
