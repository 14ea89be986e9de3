"""A request in the caller's process: its parameters, its chunks, and the whole answer."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sgl_aspects.runtime.frontend.text_stream import IncrementalDecoder, StopTexts
from sgl_aspects.runtime.loader.tokenizer import ChatMessage
from sgl_aspects.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sgl_aspects.runtime.frontend.manager import RequestManager
    from sgl_aspects.runtime.messages import TokenLogprobs

#: A text, token ids, or a conversation.
Prompt = str | Sequence[int] | Sequence[ChatMessage]


@dataclass
class GenerateRequest:
    """A generation request: the continuation of a text or of token ids, or the answer to a conversation."""

    prompt: Prompt
    sampling_params: SamplingParams
    rid: str
    #: Whether the caller reads the text as it arrives.
    stream: bool
    #: HTTP headers of the call that led to this, by lower-case name, such as "traceparent".
    headers: Mapping[str, str]
    #: The id of the first of several requests of one call; empty for a single one.
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
    #: One for each token, if requested.
    logprobs: list[TokenLogprobs] | None = None
    #: The same, but held back as long as the tokens' text is, and without tokens that only end the request:
    #: for readers who must not see a part of a stop text.
    shown_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class GenerationResult:
    """The whole answer to one request."""

    rid: str
    text: str
    output_ids: list[int]
    #: "stop" (an end token or a stop text), "length" (max_new_tokens) or "abort".
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    #: One for each output token, if ``SamplingParams.logprobs`` requests them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)


class RequestHandle:
    """One open request. Iterate over its chunks, once; or wait for the whole with :meth:`result`.

    Only the RequestManager writes its fields.
    """

    def __init__(self, request: GenerateRequest, manager: RequestManager) -> None:
        self.rid = request.rid
        self.request = request
        self._manager = manager
        #: The served model's name.
        self.model = manager.model
        self.input_ids: list[int] = []
        self.output_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        #: Prompt tokens that were found in the prefix cache; known with the first chunk.
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.error: BaseException | None = None
        #: ``time.monotonic_ns`` of the first token, None before it.
        self.first_token_time_ns: int | None = None
        #: Ends with None; ``finished`` is set before that.
        self.chunks: queue.SimpleQueue[StreamChunk | None] = queue.SimpleQueue()
        self.finished = threading.Event()
        #: Called, in the thread that receives, after a chunk was put into ``chunks``.
        self.wake: Callable[[], None] | None = None
        self.decoder = IncrementalDecoder(manager.tokenizer)
        self.stop_texts = StopTexts(request.sampling_params.stop)
        #: Characters of all tokens so far, including those held back.
        self.decoded_chars = 0
        #: Those whose text is among ``text``.
        self.shown_logprobs: list[TokenLogprobs] = []
        #: With the number of characters up to the end of the token.
        self.held_logprobs: list[tuple[int, TokenLogprobs]] = []

    @property
    def prompt_tokens(self) -> int:
        return len(self.input_ids)

    def put_chunk(self, chunk: StreamChunk | None) -> None:
        self.chunks.put(chunk)
        wake = self.wake
        if wake is not None:
            wake()

    def __iter__(self) -> Iterator[StreamChunk]:
        """Leaving the loop early aborts the request."""
        try:
            while (chunk := self.chunks.get()) is not None:
                yield chunk
            self.raise_error()
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Iterate with ``async for``: the event loop goes on while the next chunk is awaited."""
        try:
            async for _, chunk in chunks_of([self]):
                yield chunk
        finally:
            self.abort()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end. TimeoutError after ``timeout`` seconds, and the request goes on then."""
        if not self.finished.wait(timeout):
            raise TimeoutError(f"request {self.rid} did not end within {timeout:g} s")
        self.raise_error()
        return GenerationResult(
            rid=self.rid,
            text=self.text,
            output_ids=list(self.output_ids),
            finish_reason=self.finish_reason or "",
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            logprobs=list(self.logprobs),
        )

    def abort(self) -> bool:
        """Abort the request, whose finish_reason is "abort" then. False if it has ended."""
        return not self.finished.is_set() and self._manager.abort(self.rid)

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


async def chunks_of(handles: Sequence[RequestHandle]) -> AsyncIterator[tuple[int, StreamChunk]]:
    """Yield (index of the request, its next chunk) as they arrive, until all have ended; an error of one ends
    all.
    """
    loop, ready = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is no reader
            loop.call_soon_threadsafe(ready.set)

    for handle in handles:
        handle.wake = wake
    left = dict(enumerate(handles))
    while left:
        ready.clear()
        for index, handle in list(left.items()):
            with contextlib.suppress(queue.Empty):
                while (chunk := handle.chunks.get_nowait()) is not None:
                    yield index, chunk
                del left[index]
                handle.raise_error()
        if left:
            await ready.wait()
