"""What a caller holds of a request: the handle while it is under way, the result when it is done."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sgl_aspects.runtime.request_manager import RequestManager, RequestState, StreamChunk

if TYPE_CHECKING:
    from sgl_aspects.runtime.logprobs import TokenLogprobs


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
    #: One for each output token, where ``SamplingParams.logprobs`` asked for them.
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def completion_tokens(self) -> int:
        return len(self.output_ids)


class RequestHandle:
    """One request under way. Iterate for its chunks, once; or take the whole with :meth:`result`."""

    def __init__(self, manager: RequestManager, state: RequestState) -> None:
        self._manager = manager
        self._state = state

    @property
    def rid(self) -> str:
        return self._state.rid

    @property
    def prompt_tokens(self) -> int:
        return self._state.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache; known with the first chunk."""
        return self._state.cached_tokens

    def __iter__(self) -> Iterator[StreamChunk]:
        """Leaving the loop early aborts the request."""
        try:
            while (chunk := self._state.chunks.get()) is not None:
                yield chunk
            self._raise_error()
        finally:
            self.abort()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """The same for ``async for``: the event loop goes on while the next chunk is awaited."""
        loop, state, ready = asyncio.get_running_loop(), self._state, asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ready.set)

        state.wake = wake
        try:
            while True:
                ready.clear()
                try:
                    while (chunk := state.chunks.get_nowait()) is not None:
                        yield chunk
                except queue.Empty:
                    await ready.wait()
                else:
                    break
            self._raise_error()
        finally:
            state.wake = None
            self.abort()

    def result(self, timeout: float | None = None) -> GenerationResult:
        """Wait for the end. TimeoutError after ``timeout`` seconds, and the request goes on then."""
        if not self._state.finished.wait(timeout):
            raise TimeoutError(f"request {self.rid} did not end within {timeout:g} s")
        self._raise_error()
        state = self._state
        return GenerationResult(
            rid=state.rid,
            text=state.text,
            output_ids=list(state.output_ids),
            finish_reason=state.finish_reason or "",
            prompt_tokens=state.prompt_tokens,
            cached_tokens=state.cached_tokens,
            logprobs=list(state.logprobs),
        )

    def abort(self) -> bool:
        """Ask for the end of the request, whose finish_reason is "abort" then. False where it has ended."""
        return not self._state.finished.is_set() and self._manager.abort(self.rid)

    def _raise_error(self) -> None:
        if self._state.error is not None:
            raise self._state.error
