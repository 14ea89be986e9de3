"""Scheduler: decides, step by step, which tokens of which requests the model sees.

Each step takes the next token of every request that is decoding, and fills up with prompts, cut into chunks
(chunked prefill). A request is added when there is room for its prompt, and gets pages for its output as it
grows. If memory runs out, the last request by priority and arrival is preempted: it goes back to its place in
the queue, keeps its tokens, and recomputes them later. The first one is never preempted, since one request
alone always fits; so requests are served first come, first served.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import os
import random
from collections import deque
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sgl_aspects.errors import EngineError, InvalidRequestError, ModelLoadError, QueueFullError
from sgl_aspects.runtime.core import Batch, ForwardMode, Req, SampledTokens
from sgl_aspects.runtime.execution.model_runner import ModelRunner
from sgl_aspects.runtime.execution.profiling import ProfileWindow
from sgl_aspects.runtime.grammar import GrammarCompiler
from sgl_aspects.runtime.messages import (
    AbortRequest,
    ProfileRequest,
    RankLinks,
    ReadyMessage,
    Reply,
    ShutdownRequest,
    StatsRequest,
    TokenizedRequest,
    TokenOutput,
    UpdateWeightsRequest,
)
from sgl_aspects.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: While idle, check this often that the owner still lives.
_OWNER_CHECK_SECONDS = 2.0


class Scheduler:
    """Lives in its own process; that of rank 0 talks to the owner over ``connection``."""

    def __init__(
        self, server_args: ServerArgs, connection: Connection, ranks: RankLinks | None = None
    ) -> None:
        self.server_args = server_args
        self.connection = connection
        self.ranks = ranks or RankLinks()
        self.model_runner = ModelRunner(server_args, self.ranks)
        self.kv_cache = self.model_runner.kv_cache
        #: In the order in which they are served. A preempted one is in its former place.
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.step_id = 0
        self.num_retractions = 0
        self.shutting_down = False
        #: The batch whose tokens have not been processed yet.
        self.in_flight: tuple[Batch, SampledTokens] | None = None
        #: A pending weight update, which waits for the requests that have begun with the old weights.
        self.weight_updates: deque[UpdateWeightsRequest] = deque()
        #: The requests of the current step: named in an error that ends the process.
        self.at_work_on: list[str] = []
        #: The profile that is being taken.
        self.profile: ProfileWindow | None = None
        self._arrivals = itertools.count()
        self._seeds = random.Random(server_args.random_seed)
        self._owner = os.getppid()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.in_flight)

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        """Made for the first request with a schema; InvalidRequestError where the library is missing."""
        runner = self.model_runner
        return GrammarCompiler(
            runner.checkpoint.load_tokenizer(), runner.config.vocab_size, runner.config.eos_token_ids
        )

    def event_loop(self) -> None:
        """Serve until a stop message, or until the owner is gone."""
        self._send(ReadyMessage(max_total_tokens=self.kv_cache.total_size))
        try:
            while not self.shutting_down:
                for message in self.recv_requests():
                    self.handle_message(message)
                if self.has_work and not self.shutting_down:
                    self.step()
                if self.profile is not None and self.step_id >= self.profile.last_step:
                    self.finish_profile()
                if self.weight_updates and not self._is_any_begun():
                    self.update_weights(self.weight_updates.popleft())
            self.model_runner.communicator.close()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            logger.info("the owner of the engine, or another rank, is gone; the scheduler ends")

    # -- messages ------------------------------------------------------------------------------------

    def recv_requests(self) -> list[Any]:
        """Return all messages available; waits for one if there is no work. EOFError: the owner is gone.

        The other ranks get theirs from rank 0: so all handle the same ones before the same step.
        """
        if self.ranks.rank > 0:
            messages: list[Any] = self.ranks.peers[0].recv()
            return messages
        while not self.connection.poll(0 if self.has_work else _OWNER_CHECK_SECONDS):
            if os.getppid() != self._owner:  # a process that the owner forked may keep the pipe open
                raise EOFError
            if self.has_work:
                break
        messages = []
        while self.connection.poll(0):
            messages.append(self.connection.recv())
        for peer in self.ranks.peers:
            peer.send(messages)
        return messages

    def _send(self, message: Any) -> None:
        """Send to the owner, once: from rank 0."""
        if self.ranks.rank == 0:
            self.connection.send(message)

    def handle_message(self, message: Any) -> None:
        self.at_work_on = [message.rid] if isinstance(message, TokenizedRequest) else []
        if isinstance(message, TokenizedRequest):
            self.add_request(message)
        elif isinstance(message, AbortRequest):
            self.abort_request(message.rid)
        elif isinstance(message, StatsRequest):
            self._send(Reply(message.number, self.stats()))
        elif isinstance(message, UpdateWeightsRequest):
            self.request_weight_update(message)
        elif isinstance(message, ProfileRequest):
            self.start_profile(message)
        elif isinstance(message, ShutdownRequest):
            self.shutting_down = True
        else:
            raise TypeError(f"the scheduler got a message of unknown type {type(message).__qualname__}")

    def add_request(self, message: TokenizedRequest) -> Req:
        params = message.sampling_params
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        req = Req(message.rid, message.input_ids, params, random.Random(seed), arrival=next(self._arrivals))
        self._wait(req)
        try:
            self.compile_grammar(req)
        except InvalidRequestError as error:
            self.fail_request(req, error)
        else:
            self.accept_request(req)
        return req

    def compile_grammar(self, req: Req) -> bool:
        """Return whether the request needs a grammar, which it then has."""
        schema = req.sampling_params.json_schema
        if schema is not None:
            req.grammar = self.grammar_compiler.compile(str(schema))
        return schema is not None

    def _wait(self, req: Req) -> None:
        bisect.insort(self.waiting, req, key=lambda other: other.precedence)

    def accept_request(self, req: Req) -> None:
        """Let the request, which has its grammar, wait for a batch.

        Reject the last one if too many wait; those that can run at once do not count.
        """
        args = self.server_args
        if args.max_queued_requests is None:
            return
        free_places = args.max_running_requests - len(self.running)
        if len(self.waiting) > args.max_queued_requests + max(free_places, 0):
            refused = next(req for req in reversed(self.waiting) if not req.was_added)
            error = (
                f"the queue is full: {args.max_queued_requests} requests wait (max_queued_requests). "
                "Try again later"
            )
            self.fail_request(refused, QueueFullError(error))

    def fail_request(self, req: Req, error: EngineError) -> None:
        """End a request with an error, and notify its caller."""
        self.finish_request(req, "error")
        self._send([TokenOutput(req.rid, [], "error", req.cached_tokens, error)])

    def abort_request(self, rid: str) -> None:
        """End a waiting or running request. No-op if it has ended already."""
        for req in (*self.waiting, *self.running):
            if req.rid == rid:
                self.finish_request(req, "abort")
                self._send([TokenOutput(req.rid, [], "abort", req.cached_tokens)])
                return

    # -- new weights ---------------------------------------------------------------------------------

    def request_weight_update(self, message: UpdateWeightsRequest) -> None:
        """Keep it pending. Requests without output begin anew after it; those with output finish first."""
        self.weight_updates.append(message)
        for req in [req for req in self.running if not req.output_ids]:
            self.retract_request(req)

    def _is_any_begun(self) -> bool:
        """Return whether a request has output of the present weights, and has not ended."""
        return any(req.output_ids for req in (*self.running, *self.waiting))

    def update_weights(self, message: UpdateWeightsRequest) -> None:
        """Load the weights now, drop what was computed with the old ones, and answer the caller."""
        self.collect()
        reply = Reply(message.number)
        try:
            self.model_runner.update_weights(message.model_path)
            self.kv_cache.forget_prefixes()
        except ModelLoadError as error:
            reply.error = error
        self._send(reply)

    # -- a profile -----------------------------------------------------------------------------------

    def start_profile(self, message: ProfileRequest) -> None:
        if self.profile is not None:
            busy = InvalidRequestError("a profile is being taken: wait for its end")
            self._send(Reply(message.number, error=busy))
            return
        files = [Path(message.folder, f"rank{rank}.trace.json") for rank in range(self.server_args.tp_size)]
        last_step = self.step_id + message.num_steps
        self.profile = ProfileWindow(self.model_runner.platform, last_step, files[self.ranks.rank])
        self._send(Reply(message.number, files))

    def finish_profile(self) -> None:
        """Write it, on each rank."""
        assert self.profile is not None
        self.collect()
        self.profile.write()
        self.profile = None

    # -- one step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """One iteration; called only when there is work.

        Where the device works while the host goes on, a decode step is left in flight, and the next one is
        scheduled and handed over before its tokens are looked at:

            host    schedule 1 │ schedule 2 │ results of 1 │ schedule 3 │ results of 2 │ ...
            device             │ forward 1            │ forward 2               │ forward 3
        """
        batch = self.schedule()
        if batch is None:
            return
        self.at_work_on = [req.rid for req in batch.reqs]
        result = self.run_batch(batch)
        self.collect()
        self.in_flight = batch, result
        if not self._may_be_followed(batch):
            self.collect()

    def collect(self) -> None:
        """Wait for the batch in flight, and process its results."""
        if self.in_flight is None:
            return
        batch, result = self.in_flight
        self.in_flight = None
        self.at_work_on = [req.rid for req in batch.reqs]
        outputs = self.process_batch_result(batch, result)
        if outputs:
            self._send(outputs)

    def _may_be_followed(self, batch: Batch) -> bool:
        """Return whether the next step needs only this one's tokens, which are on the device."""
        return self.model_runner.can_follow(batch) and not any(
            req.sampling_params.adjusts_logits
            or req.sampling_params.logprobs is not None
            or req.grammar is not None
            for req in batch.reqs
        )

    def _following(self) -> Batch | None:
        """Return the step after the one in flight, for the same requests; None if other work comes first."""
        if self.in_flight is None or self.weight_updates:
            return None
        batch, result = self.in_flight
        if len(self.running) != batch.batch_size:
            return None
        req = self._next_waiting()
        if req is not None and (
            batch.batch_size < self.server_args.max_running_requests
            or req.priority > self._last_running().priority
        ):
            return None
        for req in batch.reqs:
            # One that ends with the token in flight makes room for others.
            if req.finish_reason is not None or len(req.output_ids) + 1 >= req.max_new_tokens:
                return None
            if not self.kv_cache.extend(req, req.total_tokens + 1):
                return None
        self.step_id += 1
        return dataclasses.replace(batch, step_id=self.step_id, follows=result)

    def schedule(self) -> Batch | None:
        """The next batch; None where there is nothing to compute."""
        following = self._following()
        if following is not None:
            return following
        self.collect()
        self.make_room()
        self.add_requests()
        decodes = [req for req in self.running if req.is_prefill_done]
        reqs, counts, samples = list(decodes), [1] * len(decodes), [True] * len(decodes)
        budget = self.server_args.chunked_prefill_size
        for req in self.running:
            if budget and not req.is_prefill_done:
                reqs.append(req)
                counts.append(min(req.prefill_tokens_left, budget))
                samples.append(counts[-1] == req.prefill_tokens_left)
                budget -= counts[-1]
        if not reqs:
            return None
        if len(decodes) == len(reqs):
            mode = ForwardMode.DECODE
        else:
            mode = ForwardMode.MIXED if decodes else ForwardMode.EXTEND
        self.step_id += 1
        return Batch(mode, reqs, counts, samples, self.step_id, num_decodes=len(decodes))

    def make_room(self) -> None:
        """Allocate pages for the running requests' next tokens; the last is preempted if they run out."""
        for req in sorted(self.running, key=lambda req: req.precedence):
            while req.row >= 0 and not self.kv_cache.extend(req, req.total_tokens):
                self.retract_request(self._last_running())

    def add_requests(self) -> None:
        """Take requests from the queue while this step has tokens left for their prompts, and there is room.

        First come, first served: short requests could starve a long one. One of higher priority preempts
        running ones of lower priority.
        """
        args = self.server_args
        left = sum(req.prefill_tokens_left for req in self.running)
        while left < args.chunked_prefill_size and (req := self._next_waiting()) is not None:
            if len(self.running) < args.max_running_requests and self._try_to_add(req):
                left += req.prefill_tokens_left
                continue
            last = self._last_running()
            if last.priority >= req.priority:
                return
            left -= last.prefill_tokens_left
            self.retract_request(last)

    def _next_waiting(self) -> Req | None:
        """Return the head of the queue; before a weight update only requests that have begun are taken."""
        return next((req for req in self.waiting if req.output_ids or not self.weight_updates), None)

    def _try_to_add(self, req: Req) -> bool:
        """Move a waiting request to the running ones; False if memory is short."""
        reserve = 0
        if self.running:  # the likely need of the running ones and this one; one alone always fits
            most = self.server_args.decode_reserve
            reserve = sum(min(r.max_total_tokens - r.total_tokens, most) for r in (*self.running, req))
        if not self.kv_cache.add(req, reserve):
            return False
        self.waiting.remove(req)
        self.running.append(req)
        if not req.was_added:
            req.was_added, req.cached_tokens = True, req.computed_tokens
        return True

    def retract_request(self, req: Req) -> None:
        """Preempt a running request: free its memory and put it back into the queue with its tokens."""
        logger.debug("request %s is preempted with %d tokens computed", req.rid, req.computed_tokens)
        self.running.remove(req)
        self.kv_cache.release(req)
        req.computed_tokens = 0
        self.num_retractions += 1
        self._wait(req)

    def _last_running(self) -> Req:
        return max(self.running, key=lambda req: req.precedence)

    def run_batch(self, batch: Batch) -> SampledTokens:
        """Hand the batch over to the device."""
        logits = self.model_runner.forward(batch)
        tokens = self.model_runner.sample(logits, batch)
        if any(req.sampling_params.logprobs is not None for req in batch.reqs):
            tokens.logprobs = self.model_runner.logprobs(logits, tokens.tolist(), batch)
        return tokens

    def process_batch_result(self, batch: Batch, result: SampledTokens) -> list[TokenOutput]:
        """Add the new tokens to their requests, and end finished ones. Returns the outputs for callers."""
        outputs = []
        tokens = result.tolist()  # waits for the device
        for i, (req, count, token) in enumerate(zip(batch.reqs, batch.num_new_tokens, tokens)):
            # ended meanwhile by an abort or an end token: this token is dropped
            if req.finish_reason is not None:
                continue
            req.computed_tokens += count
            if not batch.samples[i]:
                continue
            if not req.output_ids:
                self.kv_cache.store_prefix(req)  # others may begin with this prompt, now that it is computed
            req.output_ids.append(token)
            reason = self._finish_reason(req, token)
            if reason is not None:
                self.finish_request(req, reason)
            logprobs = result.logprobs[i] if result.logprobs else None
            outputs.append(
                TokenOutput(
                    req.rid,
                    [token],
                    reason,
                    req.cached_tokens,
                    req.error,
                    req.has_end_token,
                    None if logprobs is None else [logprobs],
                )
            )
        return outputs

    def _finish_reason(self, req: Req, token: int) -> str | None:
        params = req.sampling_params
        is_eos = token in self.model_runner.config.eos_token_ids
        if token in params.stop_token_ids or (is_eos and not params.ignore_eos):
            req.has_end_token = True
            return "stop"
        if req.grammar is not None:
            req.grammar.accept(token)
            if req.grammar.error:
                problem = f"the output cannot follow json_schema: {req.grammar.error}"
                req.error = InvalidRequestError(problem)
                return "error"
            if req.grammar.is_complete:
                req.has_end_token = is_eos
                return "stop"
        return "length" if len(req.output_ids) >= req.max_new_tokens else None

    def finish_request(self, req: Req, finish_reason: str) -> None:
        """Release the request's memory. Its last output carries the reason."""
        req.finish_reason = finish_reason
        if req.row < 0:
            self.waiting.remove(req)
            return
        self.running.remove(req)
        self.kv_cache.release(req)

    def stats(self) -> dict[str, int]:
        return {
            "waiting_requests": len(self.waiting),
            "running_requests": len(self.running),
            "kv_total_tokens": self.kv_cache.total_size,
            "kv_available_tokens": self.kv_cache.available_size(),
            "kv_cached_tokens": self.kv_cache.cached_size(),
            "retractions": self.num_retractions,
            "steps": self.step_id,
        }
