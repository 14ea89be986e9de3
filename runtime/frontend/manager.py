"""RequestManager: the caller's side of every request, from prompt to text."""

from __future__ import annotations

import reprlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sgl_aspects.errors import InvalidRequestError, SchedulerDiedError
from sgl_aspects.runtime.checks import is_integer
from sgl_aspects.runtime.frontend.request import GenerateRequest, RequestHandle, StreamChunk
from sgl_aspects.runtime.grammar import check_json_schema
from sgl_aspects.runtime.loader.tokenizer import Tokenizer
from sgl_aspects.runtime.messages import AbortRequest, TokenizedRequest, TokenOutput
from sgl_aspects.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sgl_aspects.runtime.messages import TokenLogprobs


@dataclass
class Counters:
    """Counts of a RequestManager since it was made."""

    received_requests: int = 0
    #: By finish reason.
    finished_requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    #: Prompt tokens that were found in the prefix cache.
    cached_tokens: int = 0
    output_tokens: int = 0


class RequestManager:
    """Tokenizes and sends requests, and detokenizes their outputs.

    Every request goes through :meth:`receive_request` once and :meth:`finish_request` once, whatever happens.
    ``send`` takes messages for the scheduler. Limits are in tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        send: Callable[[Any], None],
        *,
        model: str,
        vocab_size: int,
        context_length: int,
        max_total_tokens: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self._send = send
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._max_total_tokens = max_total_tokens
        #: The open requests. The caller that removes one ends it, so that each ends once.
        self._under_way: dict[str, RequestHandle] = {}
        self.counters = Counters()
        self._lock = threading.Lock()
        #: Why requests are rejected; None while they are accepted.
        self.death: str | None = None

    def receive_request(self, request: GenerateRequest) -> RequestHandle:
        """Open the request; InvalidRequestError, with nothing opened, if one with this id is open."""
        handle = RequestHandle(request, self)
        with self._lock:
            if self.death is not None:
                raise SchedulerDiedError(self.death)
            if request.rid in self._under_way:
                raise InvalidRequestError(
                    f"request id {request.rid!r} is in use: choose another, or leave it out"
                )
            self._under_way[request.rid] = handle
            self.counters.received_requests += 1
        return handle

    def tokenize_request(self, handle: RequestHandle) -> list[int]:
        """Return the prompt's tokens; InvalidRequestError if it is empty or can never fit."""
        prompt = handle.request.prompt
        if handle.request.is_chat:
            tokens = self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]  # checked by is_chat
        elif isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = self._checked_ids(prompt)
        if not tokens:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        self._check_length(len(tokens), handle.request.sampling_params.max_new_tokens)
        handle.input_ids = tokens
        return tokens

    def check_sampling_params(self, params: SamplingParams) -> None:
        """Raise InvalidRequestError for errors that only the model can detect: token ids, the schema."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(params, name):
                self._check_id(token, f"{name}: ")
        if isinstance(params.json_schema, str):
            check_json_schema(params.json_schema)

    def send_request(self, handle: RequestHandle) -> None:
        params = handle.request.sampling_params
        if params.max_new_tokens is None:
            room = min(self._context_length, self._max_total_tokens) - handle.prompt_tokens
            params = replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
        self._send(TokenizedRequest(handle.rid, handle.input_ids, params))

    def handle_outputs(self, outputs: list[TokenOutput]) -> None:
        """Process the outputs of one step. An error with one ends its request alone."""
        for output in outputs:
            try:
                self.handle_output(output)
            except Exception as error:  # noqa: BLE001 - reported to its caller
                self.fail_request(output.rid, error)

    def handle_output(self, output: TokenOutput) -> None:
        """Process a request's output of one step. Outputs of a request that has ended are dropped."""
        with self._lock:
            handle = self._under_way.get(output.rid)
        if handle is None:
            return
        if handle.first_token_time_ns is None and output.token_ids:
            handle.first_token_time_ns = time.monotonic_ns()
            handle.cached_tokens = output.cached_tokens
        handle.output_ids.extend(output.token_ids)
        handle.logprobs.extend(output.logprobs or ())
        text = self._new_text(handle, output)
        finish_reason = output.finish_reason
        shown = self._shown_logprobs(handle, output, len(handle.text) + len(text))
        if handle.stop_texts.found and finish_reason in (None, "length", "stop"):
            if finish_reason is None:  # the scheduler does not see text: it would continue
                self._send(AbortRequest(handle.rid))
            finish_reason = "stop"
        handle.text += text
        handle.shown_logprobs.extend(shown or ())
        if text or finish_reason is not None or output.token_ids:
            handle.put_chunk(
                StreamChunk(handle.rid, text, output.token_ids, finish_reason, output.logprobs, shown)
            )
        if finish_reason is not None:
            self.end_request(handle, finish_reason, output.error)

    def detokenize(self, handle: RequestHandle, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add, as far as it is final."""
        return handle.decoder.add(token_ids)

    def finish_request(
        self, handle: RequestHandle, finish_reason: str, error: BaseException | None = None
    ) -> None:
        """Called once for every request that was received: record its end and wake its waiters."""
        handle.finish_reason = finish_reason
        handle.error = error
        handle.finished.set()
        handle.put_chunk(None)

    def abort(self, rid: str) -> bool:
        """Send an abort to the scheduler; False if no request with this id is open."""
        with self._lock:
            known = rid in self._under_way
        if known:
            self._send(AbortRequest(rid))
        return known

    def fail_request(self, rid: str, error: BaseException) -> None:
        """End a request on this side because of ``error``, and abort it in the scheduler."""
        with self._lock:
            handle = self._under_way.get(rid)
        if handle is not None:
            self._send(AbortRequest(rid))
            self.end_request(handle, "error", error)

    def end_request(
        self, handle: RequestHandle, finish_reason: str, error: BaseException | None = None
    ) -> None:
        """Finish a request unless another thread has, as with its last output and the scheduler's death."""
        with self._lock:
            first = self._under_way.get(handle.rid) is handle
            if first:
                del self._under_way[handle.rid]
                self._count(handle, finish_reason)
        if first:
            self.finish_request(handle, finish_reason, error)

    def scheduler_died(self, error: SchedulerDiedError) -> None:
        """End every request with this error, each with its own instance, and reject all later ones."""
        with self._lock:
            self.death = str(error)
            handles = list(self._under_way.values())
        for handle in handles:
            self.end_request(handle, "error", SchedulerDiedError(self.death))

    # -- helpers -------------------------------------------------------------------------------------

    def _count(self, handle: RequestHandle, finish_reason: str) -> None:
        counters = self.counters
        finished = counters.finished_requests
        finished[finish_reason] = finished.get(finish_reason, 0) + 1
        counters.prompt_tokens += handle.prompt_tokens
        counters.cached_tokens += handle.cached_tokens
        counters.output_tokens += len(handle.output_ids)

    def _new_text(self, handle: RequestHandle, output: TokenOutput) -> str:
        shown = output.token_ids[:-1] if output.has_end_token else output.token_ids
        text = self.detokenize(handle, shown)
        handle.decoded_chars += len(text)
        if len(handle.output_ids) > handle.request.sampling_params.min_new_tokens:
            text = handle.stop_texts.add(text)
        if output.finish_reason is not None and not handle.stop_texts.found:
            text += handle.stop_texts.add(handle.decoder.flush())
            if not handle.stop_texts.found:
                text += handle.stop_texts.flush()
        return text

    def _shown_logprobs(
        self, handle: RequestHandle, output: TokenOutput, given: int
    ) -> list[TokenLogprobs] | None:
        """Return the tokens whose text is among the first ``given`` characters, and has not been yielded."""
        if output.logprobs is None:
            return None
        entries = output.logprobs[:-1] if output.has_end_token else output.logprobs
        # A token that ends in a part of a character belongs to the next one.
        end = handle.decoded_chars + handle.decoder.is_incomplete
        handle.held_logprobs += [(end, entry) for entry in entries]
        if output.finish_reason is not None and not handle.stop_texts.found:
            given = end
        shown = [entry for end, entry in handle.held_logprobs if end <= given]
        handle.held_logprobs = handle.held_logprobs[len(shown) :]
        return shown

    def _checked_ids(self, prompt: Sequence[Any]) -> list[int]:
        if not isinstance(prompt, Sequence):
            raise InvalidRequestError(
                "a prompt is a text, a list of token ids or a conversation (a list of messages), not "
                f"{type(prompt).__name__}"
            )
        for token in prompt:
            self._check_id(token)
        return [int(token) for token in prompt]  # also of a type that exists in this process only

    def _check_id(self, token: Any, where: str = "") -> None:
        if not is_integer(token) or not 0 <= token < self._vocab_size:
            raise InvalidRequestError(
                f"{where}{reprlib.repr(token)} is not a token id: this model's are the numbers from 0 to "
                f"{self._vocab_size - 1}"
            )

    def _check_length(self, prompt_tokens: int, wanted_tokens: int | None) -> None:
        max_new_tokens = wanted_tokens or 1  # None: at least one
        wanted = f"the prompt's {prompt_tokens} tokens and max_new_tokens={max_new_tokens}"
        if prompt_tokens + max_new_tokens > self._context_length:
            raise InvalidRequestError(
                f"{wanted} do not fit the context length of {self._context_length}: shorten one of them"
            )
        if prompt_tokens + max_new_tokens > self._max_total_tokens:
            raise InvalidRequestError(
                f"{wanted} do not fit the key-value cache of {self._max_total_tokens} tokens: shorten one of "
                "them, or start the engine with a larger max_total_tokens"
            )
