"""RequestManager: the caller's side of every request, from prompt to text."""

from __future__ import annotations

import queue
import reprlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sgl_aspects import errors
from sgl_aspects.errors import InvalidRequestError, SchedulerDiedError
from sgl_aspects.runtime.checks import is_integer
from sgl_aspects.runtime.grammar import check_json_schema
from sgl_aspects.runtime.messages import AbortRequest, TokenizedRequest, TokenOutput
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.runtime.text_stream import IncrementalDecoder, StopTexts
from sgl_aspects.runtime.tokenizer import ChatMessage, Tokenizer

if TYPE_CHECKING:
    from sgl_aspects.runtime.logprobs import TokenLogprobs

Prompt = str | Sequence[int] | Sequence[ChatMessage]


@dataclass
class GenerateRequest:
    """What a caller asks for: the continuation of a text or of token ids, or the answer to a conversation."""

    prompt: Prompt
    sampling_params: SamplingParams
    rid: str
    #: Whether the caller wants text as it comes.
    stream: bool
    #: HTTP headers of the call that led to this, by lower-case name, such as "traceparent".
    headers: Mapping[str, str]
    #: Of several requests that one call led to, the id of the first; empty where there is but one.
    group: str

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, Sequence) and isinstance(next(iter(self.prompt), None), Mapping)


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a request's output; the pieces make up the whole text. The last has a finish reason."""

    rid: str
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    #: One for each token, where the request asked for them.
    logprobs: list[TokenLogprobs] | None = None
    #: The same, but held back as long as the tokens' text is, and without tokens that only end the request:
    #: for readers who must not see a part of a stop text.
    shown_logprobs: list[TokenLogprobs] | None = None


@dataclass
class Counters:
    """What a RequestManager has seen since it was made."""

    received_requests: int = 0
    #: By finish reason.
    finished_requests: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    #: Prompt tokens that were found in the prefix cache.
    cached_tokens: int = 0
    output_tokens: int = 0


class RequestState:
    """One request's life on this side. Times are of ``time.time_ns``; None: not yet."""

    def __init__(self, request: GenerateRequest, model: str) -> None:
        self.rid = request.rid
        self.request = request
        #: The served model's name.
        self.model = model
        self.input_ids: list[int] = []
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        #: Characters that all tokens so far gave, those that are held back among them.
        self.decoded_chars = 0
        #: With the number of characters up to the end of the token.
        self.held_logprobs: list[tuple[int, TokenLogprobs]] = []
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        self.created_time_ns = time.time_ns()
        self.first_token_time_ns: int | None = None
        self.finished_time_ns: int | None = None
        #: Chunks for the one who reads this request; ``finished`` is set after the last was put.
        self.chunks: queue.SimpleQueue[StreamChunk | None] = queue.SimpleQueue()
        self.finished = threading.Event()
        #: Called, in the thread that receives, after something was put into ``chunks``.
        self.wake: Callable[[], None] | None = None
        self.decoder: IncrementalDecoder | None = None
        self.stop_texts = StopTexts(request.sampling_params.stop)

    @property
    def prompt_tokens(self) -> int:
        return len(self.input_ids)

    def put_chunk(self, chunk: StreamChunk | None) -> None:
        self.chunks.put(chunk)
        wake = self.wake
        if wake is not None:
            wake()


class RequestManager:
    """Tokenizes, sends, and turns what comes back into text.

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
        #: The requests under way. Whoever takes one out ends it, so that each ends once.
        self._states: dict[str, RequestState] = {}
        self.counters = Counters()
        self._lock = threading.Lock()
        #: Why no request is taken any more; None while they are.
        self.death: str | None = None

    def receive_request(self, request: GenerateRequest) -> RequestState:
        """InvalidRequestError where a request with this id is under way; nothing is received then."""
        state = RequestState(request, self.model)
        with self._lock:
            if self.death is not None:
                raise SchedulerDiedError(self.death)
            if request.rid in self._states:
                raise InvalidRequestError(
                    f"request id {request.rid!r} is in use: choose another, or leave it out"
                )
            self._states[request.rid] = state
            self.counters.received_requests += 1
        return state

    def tokenize_request(self, state: RequestState) -> list[int]:
        """The prompt's tokens; InvalidRequestError where it is empty or can never fit."""
        prompt = state.request.prompt
        if state.request.is_chat:
            tokens = self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]  # is_chat says so
        elif isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt)
        else:
            tokens = self._checked_ids(prompt)
        if not tokens:
            raise InvalidRequestError("the prompt is empty: give at least one token")
        self._check_length(len(tokens), state.request.sampling_params.max_new_tokens)
        state.input_ids = tokens
        return tokens

    def check_sampling_params(self, params: SamplingParams) -> None:
        """InvalidRequestError for what can be told only with the model: token ids, the schema."""
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(params, name):
                self._check_id(token, f"{name}: ")
        if isinstance(params.json_schema, str):
            check_json_schema(params.json_schema)

    def send_request(self, state: RequestState) -> None:
        params = state.request.sampling_params
        if params.max_new_tokens is None:
            room = min(self._context_length, self._max_total_tokens) - state.prompt_tokens
            params = replace(params, max_new_tokens=room, min_new_tokens=min(params.min_new_tokens, room))
        self._send(TokenizedRequest(state.rid, state.input_ids, params))

    def handle_output(self, output: TokenOutput) -> None:
        """Take in what a request got in one step. Outputs of a request that has ended are dropped."""
        with self._lock:
            state = self._states.get(output.rid)
        if state is None:
            return
        if state.first_token_time_ns is None and output.token_ids:
            state.first_token_time_ns = time.time_ns()
            state.cached_tokens = output.cached_tokens
        state.output_ids.extend(output.token_ids)
        state.logprobs.extend(output.logprobs or ())
        text = self._new_text(state, output)
        finish_reason = output.finish_reason
        shown = self._shown_logprobs(state, output, len(state.text) + len(text))
        if state.stop_texts.found and finish_reason in (None, "length", "stop"):
            if finish_reason is None:  # the scheduler does not know text: it would go on
                self._send(AbortRequest(state.rid))
            finish_reason = "stop"
        state.text += text
        if text or finish_reason is not None or output.token_ids:
            state.put_chunk(
                StreamChunk(state.rid, text, output.token_ids, finish_reason, output.logprobs, shown)
            )
        if finish_reason is not None:
            error = getattr(errors, output.error_type)(output.error) if finish_reason == "error" else None
            self.end_request(state, finish_reason, error)

    def detokenize(self, state: RequestState, token_ids: Sequence[int]) -> str:
        """The text that these further tokens add, as far as it is certain."""
        if state.decoder is None:
            state.decoder = IncrementalDecoder(self.tokenizer)
        return state.decoder.add(token_ids)

    def finish_request(
        self, state: RequestState, finish_reason: str, error: BaseException | None = None
    ) -> None:
        """Called once for every request that was received: record its end, wake whoever waits for it."""
        state.finish_reason = finish_reason
        state.error = error
        state.finished_time_ns = time.time_ns()
        state.finished.set()
        state.put_chunk(None)

    def abort(self, rid: str) -> bool:
        """Ask the scheduler to end the request; False where none with this id is under way."""
        with self._lock:
            known = rid in self._states
        if known:
            self._send(AbortRequest(rid))
        return known

    def fail_request(self, rid: str, error: BaseException) -> None:
        """End a request on this side because of ``error``, and tell the scheduler."""
        with self._lock:
            state = self._states.get(rid)
        if state is not None:
            self._send(AbortRequest(rid))
            self.end_request(state, "error", error)

    def end_request(
        self, state: RequestState, finish_reason: str, error: BaseException | None = None
    ) -> None:
        """Finish a request unless another thread has: its last output and the scheduler's death may meet."""
        with self._lock:
            first = self._states.pop(state.rid, None) is state
            if first:
                self._count(state, finish_reason)
        if first:
            self.finish_request(state, finish_reason, error)

    def scheduler_died(self, error: SchedulerDiedError) -> None:
        """End every request with this error, each with an instance of its own, and refuse all later ones."""
        with self._lock:
            self.death = str(error)
            states = list(self._states.values())
        for state in states:
            self.end_request(state, "error", SchedulerDiedError(self.death))

    # -- helpers -------------------------------------------------------------------------------------

    def _count(self, state: RequestState, finish_reason: str) -> None:
        counters = self.counters
        finished = counters.finished_requests
        finished[finish_reason] = finished.get(finish_reason, 0) + 1
        counters.prompt_tokens += state.prompt_tokens
        counters.cached_tokens += state.cached_tokens
        counters.output_tokens += len(state.output_ids)

    def _new_text(self, state: RequestState, output: TokenOutput) -> str:
        shown = output.token_ids[:-1] if output.has_end_token else output.token_ids
        text = self.detokenize(state, shown)
        state.decoded_chars += len(text)
        if len(state.output_ids) > state.request.sampling_params.min_new_tokens:
            text = state.stop_texts.add(text)
        if output.finish_reason is not None and not state.stop_texts.found:
            text += state.stop_texts.add(state.decoder.flush() if state.decoder else "")
            if not state.stop_texts.found:
                text += state.stop_texts.flush()
        return text

    def _shown_logprobs(
        self, state: RequestState, output: TokenOutput, given: int
    ) -> list[TokenLogprobs] | None:
        """Those whose text is among the first ``given`` characters, and has not been shown."""
        if output.logprobs is None:
            return None
        entries = output.logprobs[:-1] if output.has_end_token else output.logprobs
        # A token that ends in a part of a character belongs to the next one.
        end = state.decoded_chars + (state.decoder is not None and state.decoder.is_incomplete)
        state.held_logprobs += [(end, entry) for entry in entries]
        if output.finish_reason is not None and not state.stop_texts.found:
            given = end
        shown = [entry for end, entry in state.held_logprobs if end <= given]
        state.held_logprobs = state.held_logprobs[len(shown) :]
        return shown

    def _checked_ids(self, prompt: Sequence[Any]) -> list[int]:
        if not isinstance(prompt, Sequence):
            raise InvalidRequestError(
                "a prompt is a text, a list of token ids or a conversation (a list of messages), not "
                f"{type(prompt).__name__}"
            )
        for token in prompt:
            self._check_id(token)
        return list(prompt)

    def _check_id(self, token: Any, where: str = "") -> None:
        if not is_integer(token) or not 0 <= token < self._vocab_size:
            raise InvalidRequestError(
                f"{where}{reprlib.repr(token)} is no token id: this model's are the numbers from 0 to "
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
