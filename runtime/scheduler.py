"""Scheduler: decides, step by step, which tokens of which requests the model sees.

Each step takes the next token of every request that is decoding, and fills up with prompts, cut into chunks
(chunked prefill). A request gets all the pages it can ever need when it is admitted, and waits until then:
the cache never runs out in mid-flight. Requests are admitted in the order they came.
"""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Iterator
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

from sgl_aspects.errors import InvalidRequestError
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.batch import Batch, BatchResult, ForwardMode, Req
from sgl_aspects.runtime.grammar import GrammarCompiler
from sgl_aspects.runtime.messages import (
    AbortRequest,
    ReadyMessage,
    ShutdownRequest,
    StatsReply,
    StatsRequest,
    TokenizedRequest,
    TokenOutput,
)
from sgl_aspects.runtime.model_runner import ModelRunner
from sgl_aspects.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: While idle, look this often whether the owner still lives.
_OWNER_CHECK_SECONDS = 2.0


class Scheduler:
    """Lives in its own process and talks to its owner over ``connection``."""

    def __init__(self, server_args: ServerArgs, connection: Connection) -> None:
        self.server_args = server_args
        self.connection = connection
        self.platform = current_platform
        self.platform.apply_server_args_defaults(server_args)
        self.model_runner = ModelRunner(server_args)
        self.kv_allocator = self.model_runner.kv_allocator
        self.waiting: deque[Req] = deque()
        self.running: list[Req] = []
        self.step_id = 0
        self.shutting_down = False
        self._seeds = random.Random(server_args.random_seed)
        self._owner = os.getppid()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        """Made for the first request with a schema; InvalidRequestError where the library is missing."""
        runner = self.model_runner
        return GrammarCompiler(
            runner.checkpoint.load_tokenizer(), runner.config.vocab_size, runner.config.eos_token_ids
        )

    def event_loop(self) -> None:
        """Serve until told to stop, or until the owner is gone."""
        self.connection.send(ReadyMessage(max_total_tokens=self.kv_allocator.total_size))
        try:
            while not self.shutting_down:
                for message in self.recv_requests():
                    self.handle_message(message)
                if self.has_work and not self.shutting_down:
                    self.step()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            logger.info("the owner of the engine is gone; the scheduler ends")

    # -- messages ------------------------------------------------------------------------------------

    def recv_requests(self) -> list[Any]:
        """All messages that are there; waits for one while there is no work. EOFError: the owner is gone."""
        while not self.connection.poll(0 if self.has_work else _OWNER_CHECK_SECONDS):
            if os.getppid() != self._owner:  # a process that the owner forked may keep the pipe open
                raise EOFError
            if self.has_work:
                break
        messages = []
        while self.connection.poll(0):
            messages.append(self.connection.recv())
        return messages

    def handle_message(self, message: Any) -> None:
        if isinstance(message, TokenizedRequest):
            self.add_request(message)
        elif isinstance(message, AbortRequest):
            self.abort_request(message.rid)
        elif isinstance(message, StatsRequest):
            self.connection.send(StatsReply(message.number, self.stats()))
        elif isinstance(message, ShutdownRequest):
            self.shutting_down = True
        else:
            raise TypeError(f"the scheduler got a message of unknown type {type(message).__qualname__}")

    def add_request(self, message: TokenizedRequest) -> Req:
        seed = message.sampling_params.seed
        if seed is None:
            seed = self._seeds.getrandbits(64)
        req = Req(message.rid, message.input_ids, message.sampling_params, random.Random(seed))
        if message.sampling_params.json_schema is not None:
            try:
                req.grammar = self.grammar_compiler.compile(str(message.sampling_params.json_schema))
            except InvalidRequestError as error:
                req.finish_reason, req.error = "error", str(error)
                self.stream_output([req])
                return req
        if (
            req.max_total_tokens > self.kv_allocator.total_size
        ):  # the owner checks too: it would wait for ever
            raise ValueError(f"request {req.rid} needs more tokens than the key-value cache holds")
        self.waiting.append(req)
        return req

    def abort_request(self, rid: str) -> None:
        """End a waiting or running request; one that has ended already is none of both."""
        for req in (*self.waiting, *self.running):
            if req.rid == rid:
                self.finish_request(req, "abort")
                self.stream_output([req])
                return

    # -- one step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """One iteration; called only when there is work."""
        batch = self.schedule()
        if batch is None:
            return
        result = self.run_batch(batch)
        self.process_batch_result(batch, result)
        self.stream_output(batch.reqs)

    def schedule(self) -> Batch | None:
        """The next batch; None where there is nothing to compute."""
        decodes = [req for req in self.running if req.is_prefill_done]
        reqs, counts = list(decodes), [1] * len(decodes)
        budget = self.server_args.chunked_prefill_size
        for req in self._prefills():
            count = min(len(req.input_ids) - req.computed_tokens, budget)
            reqs.append(req)
            counts.append(count)
            budget -= count
            if budget == 0:
                break
        if not reqs:
            return None
        if len(decodes) == len(reqs):
            mode = ForwardMode.DECODE
        else:
            mode = ForwardMode.MIXED if decodes else ForwardMode.EXTEND
        self.step_id += 1
        return Batch(mode, reqs, counts, self.step_id, num_decodes=len(decodes))

    def _prefills(self) -> Iterator[Req]:
        """Running requests whose prompt is not done, then waiting ones, admitted as they are asked for."""
        yield from [req for req in self.running if not req.is_prefill_done]
        while self.waiting and len(self.running) < self.server_args.max_running_requests:
            if not self._admit(self.waiting[0]):
                return  # nobody overtakes: a long request would wait for ever behind short ones
            yield self.running[-1]

    def _admit(self, req: Req) -> bool:
        """Give the request at the head of the queue its pages; False where they are not free yet."""
        pages = self.kv_allocator.alloc(req.max_total_tokens)
        if pages is None:
            return False
        self.waiting.popleft()
        req.pages = pages
        req.row = self.model_runner.page_table.add_row(pages)
        self.model_runner.kv_pool.clear(pages)
        self.running.append(req)
        return True

    def run_batch(self, batch: Batch) -> BatchResult:
        logits = self.model_runner.forward(batch)
        tokens = self.model_runner.sample(logits, batch)
        logprobs = []
        if any(req.sampling_params.logprobs is not None for req in batch.reqs):
            logprobs = self.model_runner.logprobs(logits, tokens, batch)
        return BatchResult(
            [token if samples else None for token, samples in zip(tokens, batch.samples())], logprobs
        )

    def process_batch_result(self, batch: Batch, result: BatchResult) -> None:
        """Add the new tokens to their requests, and end those that are done."""
        for i, (req, count, token) in enumerate(zip(batch.reqs, batch.num_new_tokens, result.next_token_ids)):
            req.computed_tokens += count
            if token is None:
                continue
            req.output_ids.append(token)
            if result.logprobs and (logprobs := result.logprobs[i]) is not None:
                req.logprobs.append(logprobs)
            reason = self._finish_reason(req, token)
            if reason is not None:
                self.finish_request(req, reason)

    def _finish_reason(self, req: Req, token: int) -> str | None:
        params = req.sampling_params
        is_eos = token in self.model_runner.config.eos_token_ids
        if token in params.stop_token_ids or (is_eos and not params.ignore_eos):
            req.has_end_token = True
            return "stop"
        if req.grammar is not None:
            req.grammar.accept(token)
            if req.grammar.error:
                req.error = f"the output cannot be held to json_schema: {req.grammar.error}"
                return "error"
            if req.grammar.is_complete:
                req.has_end_token = is_eos
                return "stop"
        return "length" if len(req.output_ids) >= req.max_new_tokens else None

    def finish_request(self, req: Req, finish_reason: str) -> None:
        """Give back all that the request holds. Its last output carries the reason."""
        req.finish_reason = finish_reason
        if req.row < 0:
            self.waiting.remove(req)
            return
        self.running.remove(req)
        self.model_runner.page_table.remove_row(req.row)
        self.kv_allocator.free(req.pages)
        req.row, req.pages = -1, []

    def stream_output(self, reqs: list[Req]) -> None:
        """Send what these requests got since the last time, in one message."""
        outputs = []
        for req in reqs:
            new = req.output_ids[req.sent_tokens :]
            if new or req.finish_reason is not None:
                logprobs = req.logprobs[req.sent_tokens :] if req.logprobs else None
                outputs.append(
                    TokenOutput(
                        req.rid,
                        new,
                        req.finish_reason,
                        req.cached_tokens,
                        req.error,
                        req.has_end_token,
                        logprobs,
                    )
                )
                req.sent_tokens += len(new)
        if outputs:
            self.connection.send(outputs)

    def stats(self) -> dict[str, int]:
        return {
            "waiting_requests": len(self.waiting),
            "running_requests": len(self.running),
            "kv_total_tokens": self.kv_allocator.total_size,
            "kv_available_tokens": self.kv_allocator.available_size(),
            "steps": self.step_id,
        }
