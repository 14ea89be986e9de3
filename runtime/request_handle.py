"""What a caller holds of a request: the handle while it is under way, the result when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sgl_aspects.runtime.request_manager import RequestManager, RequestState, StreamChunk


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

    def __iter__(self) -> Iterator[StreamChunk]:
        """Leaving the loop early aborts the request."""
        try:
            while (chunk := self._state.chunks.get()) is not None:
                yield chunk
            self._raise_error()
        finally:
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
        )

    def abort(self) -> bool:
        """Ask for the end of the request, whose finish_reason is "abort" then. False where it has ended."""
        return not self._state.finished.is_set() and self._manager.abort(self.rid)

    def _raise_error(self) -> None:
        if self._state.error is not None:
            raise self._state.error
