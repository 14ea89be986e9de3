"""Level 1: requests in the scheduler outside of batches: queued, rejected, preempted, aborted."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from sgl_aspects.engines import Outcome
from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.records import error_type
from sgl_aspects.tracing.schema import GRAMMAR, QUEUE


class QueueObserver:
    """Reports requests to their tracker when they arrive, are preempted, or end without a batch's result."""

    def __init__(self, trackers: Trackers) -> None:
        engine = self._engine = trackers.engine
        self._recorder, self._requests, self._calls = trackers.recorder, trackers.requests, trackers.calls
        call, reader = engine.call_reader, engine.reader
        self._is_follower = reader("scheduler.is_follower")
        self._aborting = call("abort_scheduled_request", "scheduler")
        self._aborted = call("abort_scheduled_request", "message")
        self._refused = call("reject_request", "req")
        self._retracted = call("retract", "req")
        # If no function reports a preemption, a request that is queued again was preempted.
        self._adds_again = "retract" not in engine.roles
        self._ended = call("end_scheduled_request", "req")
        self._end_reason = call("end_scheduled_request", "finish_reason")
        self._finish_reason = reader("req.finish_reason")
        self._drafts = reader("req.drafts")
        self._compiled = call("compile_grammar", "req")
        self._kind, self._waits = call("compile_grammar", "kind"), call("compile_grammar", "waits")
        self._ready = call("grammar_ready", "reqs")
        self._steps, self._process = trackers.steps, trackers.process
        self._front_end = reader("scheduler.front_end")
        self._prompt_tokens = reader("message.prompt_tokens")
        self._message_rid = reader("message.rid")
        self._is_probe = reader("message.is_probe")
        self._elsewhere, self._remote = reader("message.elsewhere"), reader("message.remote")
        self._abort_all = reader("message.abort_all")
        self._waiting_rids = reader("scheduler.waiting_rids")
        self._rid = reader("req.rid")
        self._output_tokens = reader("req.output_tokens")
        self._is_aborting = False

    def observations(self) -> list[Observation]:
        return [
            *(
                Observation(role, self._add_enter(role), self._add_exit)
                for role in ("add_request", "add_embedding_request")
            ),
            Observation("abort_scheduled_request", self._abort_enter, self._abort_exit),
            Observation("reject_request", self._reject_enter),
            Observation("retract", self._retract_enter),
            Observation("end_scheduled_request", self._end_enter),
            Observation("cancel_requests", None, self._cancel_exit),
            Observation("compile_grammar", _note_call, self._compile_exit),
            Observation("grammar_ready", _note_call, self._ready_exit),
        ]

    def _add_enter(self, role: str) -> Callable[[tuple[Any, ...], dict[str, Any]], str | None]:
        scheduler, message = (self._engine.call_reader(role, name) for name in ("scheduler", "message"))

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
            if not self._recorder.level:
                return None
            return self._add(scheduler(args, kwargs), message(args, kwargs))

        return enter

    def _add(self, scheduler: Any, message: Any) -> str | None:
        if self._is_probe(message):
            return None
        rid: str = self._message_rid(message)
        elsewhere, front_end = self._remote(message), self._front_end(scheduler)
        if self._is_follower(scheduler):
            self._requests.follow()
            self._process.describe({"follower": True})
            elsewhere, front_end = self._elsewhere(message), None
        if self._adds_again and rid in self._requests.requests:
            self._requests.preempted(rid, self._output_tokens(message))
            return rid
        if front_end is not None and elsewhere is None:
            self._calls.begin_here(message, front_end, rid, self._prompt_tokens(message))
        # Before the call, so that an end inside it (a rejected request) finds the request.
        self._requests.queued(rid, elsewhere=elsewhere)
        return rid

    def _add_exit(self, rid: Any, result: Any, error: BaseException | None) -> None:
        if error is not None and rid is not None:
            self._requests.finished(rid, None, None, error_type(error))

    def _abort_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._is_aborting = True
        return self._aborting(args, kwargs), self._aborted(args, kwargs)

    def _abort_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        """Abort a waiting request here; a running one ends with its next step."""
        self._is_aborting = False
        scheduler, message = token
        prefix, everything = self._message_rid(message), self._abort_all(message)
        waiting = self._waiting_rids(scheduler) or set()
        for rid, request in list(self._requests.requests.items()):
            # An engine's ids may be numbers.
            concerned = everything or rid == prefix or (prefix and str(rid).startswith(str(prefix)))
            if concerned and not request.is_running and rid not in waiting:
                self._requests.finished(rid, None, "abort")

    def _reject_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        request = self._requests.requests.get(self._rid(self._refused(args, kwargs)))
        # SGLang also rejects an aborted request that waits for its grammar.
        if request is not None and not self._is_aborting:
            request.problem = "rejected"

    def _retract_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._steps.recheck_drafts()
        req = self._retracted(args, kwargs)
        self._requests.drafts(self._rid(req), self._drafts(req))
        self._requests.preempted(self._rid(req), self._output_tokens(req))

    def _end_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # On entry: before the engine notifies the caller, whose span is to end after this one.
        self._steps.recheck_drafts()
        req = self._ended(args, kwargs)
        reason = self._end_reason(args, kwargs) or self._finish_reason(req)
        has_failed = reason is not None and self._engine.outcome(reason) is Outcome.FAILED
        problem = Outcome.FAILED.problem if has_failed else ""
        self._requests.finished(self._rid(req), self._output_tokens(req), reason, problem, monotonic_ns())

    def _compile_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if error is None and self._waits(*token, result):
            rid = self._rid(self._compiled(*token, result))
            self._requests.begins_in(rid, GRAMMAR.name, values=(self._kind(*token, result),))

    def _ready_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        for req in self._ready(*token, result) or ():
            rid = self._rid(req)
            request = self._requests.requests.get(rid)
            if request is not None and request.phase == GRAMMAR.name:
                self._requests.enter(rid, QUEUE.name)

    def _cancel_exit(self, token: None, reqs: Any, error: BaseException | None) -> None:
        """End requests whose callers are gone; most often there are none."""
        for req in reqs or ():
            problem = Outcome.ABORTED.problem
            self._requests.finished(self._rid(req), self._output_tokens(req), "abort", problem)


def _note_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, kwargs
