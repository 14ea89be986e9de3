"""Level 1, the scheduler's side of each request: time in the queue, each prefill chunk, decode."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import time_ns
from typing import Any

from sgl_aspects.engines.catalog import Catalog
from sgl_aspects.tracing.aspects.observer import Observation, error_type, nothing
from sgl_aspects.tracing.recorder import Recorder
from sgl_aspects.tracing.records import SpanType

# A finish reason in the queue: the request ended there. The request's own span says whether that is an error.
QUEUE = SpanType("queue", ("sgl_aspects.finish_reason",))
PREFILL = SpanType("prefill", ("sgl_aspects.prefill.tokens", "sgl_aspects.prefill.chunk"))
DECODE = SpanType("decode", ("gen_ai.usage.output_tokens", "sgl_aspects.finish_reason"))


@dataclass
class ScheduledRequest:
    """A request in the scheduler. ``key`` is its name in this process's records (see ``RequestSeen``)."""

    key: int
    queue_id: int
    queued_ns: int
    chunks: int = 0
    is_running: bool = False
    decode_id: int = 0
    decode_ns: int = 0


@dataclass
class SchedulerState:
    """What the aspects of a scheduler share. One thread runs a scheduler, so there is one current step."""

    requests: dict[str, ScheduledRequest] = field(default_factory=dict)
    last_run_end_ns: int = 0
    #: What the current step is recorded with: the recorder's level, or 0 where the step is not sampled.
    level: int = 0
    #: Span ids; 0 where no such span is open.
    step_id: int = 0
    run_id: int = 0

    def begin_step(self, recorder: Recorder) -> int:
        """The id of a new step; 0 where it is not to be recorded."""
        level = recorder.level
        if level < 2:
            self.level = 0
            return 0
        step_id = recorder.new_id()
        if (step_id & 0xFFFF_FFFF) >= recorder.sample:
            self.level = 0
            return 0
        self.level = level
        return step_id


class ScheduledRequestAspect:
    """Spans ``queue``, ``prefill`` (one for each chunk) and ``decode``, children of the request's span."""

    def __init__(self, recorder: Recorder, catalog: Catalog, state: SchedulerState) -> None:
        self._recorder = recorder
        self._state = state
        roles, reader = catalog.roles, catalog.reader
        self._added = roles["add_request"].argument("message")
        self._ran = roles["run_batch"].argument("batch")
        self._ended = roles["end_scheduled_request"].argument("req")
        self._end_reason = roles["end_scheduled_request"].argument("finish_reason")
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
        ]

    def _add_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        if not recorder.level:
            return None
        rid = self._message_rid(self._added(args, kwargs))
        now = time_ns()
        request = ScheduledRequest(recorder.new_id(), recorder.new_id(), now)
        recorder.request_seen(request.key, rid, now)
        recorder.span_begin(request.queue_id, request.key, request.key, QUEUE, now)
        # Before the call, so that an end inside it (a request that is refused) finds the request.
        self._state.requests[rid] = request
        return rid

    def _add_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if error is not None and token is not None:
            request = self._state.requests.pop(token, None)
            if request is not None:
                self._end(request, None, None, error_type(error))

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        requests = self._state.requests
        batch = self._ran(args, kwargs)
        if not requests or self._mode(batch) == "decode":
            return None  # nearly every step: nothing begins in it
        now = time_ns()
        chunks = []
        for req, tokens in zip(self._reqs(batch), self._new_tokens(batch)):
            left = self._prefill_left(req)
            request = requests.get(self._rid(req))
            if not left or request is None:
                continue
            if not request.chunks:
                self._recorder.span(request.queue_id, request.key, request.key, QUEUE, request.queued_ns, now)
            chunks.append((request, tokens, left <= tokens))
        return now, chunks

    def _run_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        end_ns = self._state.last_run_end_ns = time_ns()
        if token is None:
            return
        start_ns, chunks = token
        recorder = self._recorder
        problem = error_type(error)
        for request, tokens, is_last in chunks:
            values = (tokens, request.chunks)
            request.chunks += 1
            recorder.span(
                recorder.new_id(), request.key, request.key, PREFILL, start_ns, end_ns, values, problem
            )
            if is_last and error is None:
                request.decode_id, request.decode_ns = recorder.new_id(), end_ns
                recorder.span_begin(request.decode_id, request.key, request.key, DECODE, end_ns)

    def _end_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # On entry: before the engine tells the caller, whose span is to end after this one.
        req = self._ended(args, kwargs)
        request = self._state.requests.pop(self._rid(req), None)
        if request is not None:
            reason = self._end_reason(args, kwargs)
            self._end(request, self._output_tokens(req), reason, reason if reason == "error" else "")

    def _end(
        self, request: ScheduledRequest, output_tokens: int | None, reason: str | None, problem: str
    ) -> None:
        recorder, key = self._recorder, request.key
        if request.decode_id:
            # The last token came with the last run; what the scheduler did since is not decoding.
            start_ns, values = request.decode_ns, (output_tokens, reason)
            end_ns = max(start_ns, self._state.last_run_end_ns)
            recorder.span(request.decode_id, key, key, DECODE, start_ns, end_ns, values, problem)
        elif not request.chunks:
            start_ns = request.queued_ns
            recorder.span(request.queue_id, key, key, QUEUE, start_ns, time_ns(), (reason,), problem)
