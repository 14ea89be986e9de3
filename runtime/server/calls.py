"""One HTTP call as requests to the engine: sent together, collected or streamed, and aborted where the client
has hung up."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from sgl_aspects.errors import EngineError
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.frontend.request import Prompt, RequestHandle, StreamChunk, chunks_of
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.runtime.server.api_errors import ApiError
from sgl_aspects.runtime.server.protocol import PromptTokensDetails, Usage

logger = logging.getLogger(__name__)

_TRACE_HEADERS = ("traceparent", "tracestate")
T = TypeVar("T")


class Calls:
    """All open calls: limits their number, and ends them when the server stops."""

    def __init__(self, engine: Engine, max_requests: int) -> None:
        self.engine = engine
        self.max_requests = max_requests
        self.under_way: set[Call] = set()
        #: Why further calls are rejected.
        self.closed: str | None = None
        #: Whether open calls were ended, too.
        self.given_up = False

    @property
    def count(self) -> int:
        """Answers under way."""
        return sum(call.size for call in self.under_way)

    async def start(
        self,
        request: Request,
        prefix: str,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        stream: bool,
    ) -> Call:
        """Send ``params.n`` requests for each prompt. Raises the engine's error for a rejected one."""
        size = len(prompts) * params.n
        if self.closed is not None or self.engine.failure is not None:
            raise ApiError(503, self.closed or self.engine.failure or "", code="unavailable")
        if size > self.max_requests:
            raise ApiError(400, f"{size} answers in one call: at most {self.max_requests} are taken at once")
        if self.count + size > self.max_requests:
            raise ApiError(
                429,
                f"the server is busy with {self.count} answers, of at most {self.max_requests}: try later",
            )
        call = Call(prefix, size)
        self.under_way.add(call)
        headers = {name: request.headers[name] for name in _TRACE_HEADERS if name in request.headers}
        send = partial(self.engine.submit_group, prompts, params, rid=call.rid, stream=stream)
        try:
            # In a thread: tokenizing long prompts takes time, in which other calls continue.
            call.groups = await asyncio.to_thread(send, external_trace_header=headers)
            if self.given_up:  # meanwhile
                raise ApiError(503, self.closed or "", code="unavailable")
        except BaseException:
            self.end(call)
            raise
        return call

    def end(self, call: Call) -> None:
        """Abort the open requests of the call. Safe to call again."""
        for handle in call.handles:
            handle.abort()
        self.under_way.discard(call)

    def fail(self, message: str) -> None:
        """End every call with this error, and reject further ones."""
        self.closed, self.given_up = message, True
        for call in self.under_way:
            for handle in call.handles:
                self.engine.request_manager.fail_request(handle.rid, EngineError(message))


@dataclass(eq=False)
class Call:
    """``prefix``: how OpenAI's ids begin ("chatcmpl-")."""

    prefix: str
    size: int
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    #: The requests of each prompt, once they are sent.
    groups: list[list[RequestHandle]] = field(default_factory=list)
    output_tokens: int = 0

    @property
    def id(self) -> str:
        return self.prefix + self.rid

    @property
    def handles(self) -> list[RequestHandle]:
        return [handle for group in self.groups for handle in group]

    def usage(self) -> Usage:
        """A prompt counts once, however many answers it gets."""
        prompt = sum(group[0].prompt_tokens for group in self.groups)
        cached = sum(group[0].cached_tokens for group in self.groups)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self.output_tokens,
            total_tokens=prompt + self.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    async def chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Yield (index of the answer, its next chunk) in the order of arrival; an error of one ends all."""
        async for index, chunk in chunks_of(self.handles):
            if chunk.finish_reason == "abort":
                raise ApiError(503, "the request was aborted", code="aborted")
            self.output_tokens += len(chunk.token_ids)
            yield index, chunk

    async def finish(self) -> None:
        """Wait for all answers."""
        async for _ in self.chunks():
            pass


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``; ClientDisconnect, and ``work`` cancelled, if the client hangs up."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(StreamingResponse):
    """Send server-sent events. ``finish`` is called at the end, also if the client has hung up."""

    def __init__(
        self, events: AsyncIterator[str], finish: Callable[[], None], headers: Mapping[str, str]
    ) -> None:
        headers = {"cache-control": "no-cache", **headers}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # Not starlette's own way: it detects a client that hangs up only if the web server reports it.
            await unless_disconnected(receive, self.stream_response(send))
        except ClientDisconnect:
            logger.debug("the client of a stream has hung up")
        finally:
            self._finish()
