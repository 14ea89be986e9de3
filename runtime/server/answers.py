"""Code that both endpoints share: parameters for the engine, and answers whole or in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel

from sgl_aspects.errors import InvalidRequestError
from sgl_aspects.runtime.frontend.request import Prompt, StreamChunk
from sgl_aspects.runtime.messages import TokenLogprobs
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.runtime.server.api_errors import ApiError, api_error, no_such_model
from sgl_aspects.runtime.server.calls import Call, Calls, EventStream, unless_disconnected
from sgl_aspects.runtime.server.protocol import SamplingFields, StreamOptions, Usage

T = TypeVar("T")


class Endpoint(ABC):
    """One POST endpoint; a subclass for each defines its bodies and the choices of its answers."""

    id_prefix: str
    answer_class: type[BaseModel]
    chunk_class: type[BaseModel]

    def __init__(self, calls: Calls, model: str) -> None:
        self.calls = calls
        self.model = model
        self.tokenizer = calls.engine.request_manager.tokenizer

    @abstractmethod
    def prompts(self, body: Any) -> list[Prompt]: ...

    @abstractmethod
    def sampling_params(self, body: Any) -> SamplingParams: ...

    @abstractmethod
    def logprobs(self, entries: Sequence[TokenLogprobs]) -> BaseModel: ...

    @abstractmethod
    def choice(self, text: str, **fields: Any) -> BaseModel:
        """A choice of a whole answer. The ``fields`` are those that all choices have."""

    @abstractmethod
    def piece(self, text: str, **fields: Any) -> BaseModel:
        """A choice as a part of a stream."""

    def opening(self, index: int) -> BaseModel | None:
        """Return the chunk before the text of a choice's stream; None: there is none."""
        return None

    async def answer(self, request: Request, body: SamplingFields) -> Response:
        if body.model != self.model:
            raise no_such_model(body.model, self.model)
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: only allowed with stream=true", param="stream_options")
        stream = bool(body.stream)
        try:
            prompts, params = self.prompts(body), self.sampling_params(body)
            call = await self.calls.start(request, self.id_prefix, prompts, params, stream=stream)
        except InvalidRequestError as error:
            raise ApiError(400, _in_words_of(body, str(error))) from error
        try:
            response = await (self._stream(request, call, body) if stream else self._whole(request, call))
        except BaseException:
            self.calls.end(call)
            raise
        if not stream:
            self.calls.end(call)
        return response

    async def _whole(self, request: Request, call: Call) -> Response:
        await unless_disconnected(request.receive, call.finish())
        choices = [
            self.choice(handle.text, **self._fields(index, handle.shown_logprobs, handle.finish_reason))
            for index, handle in enumerate(call.handles)
        ]
        content = self._envelope(self.answer_class, call, *choices, usage=call.usage()).model_dump_json()
        return Response(content, media_type="application/json", headers={"x-request-id": call.rid})

    async def _stream(self, request: Request, call: Call, body: SamplingFields) -> Response:
        """Stream; begun once the first token is there: an error before that has a status of its own."""
        chunks = call.chunks()
        first = await unless_disconnected(request.receive, anext(chunks))
        events = self._events(call, _beginning_with(first, chunks), body.stream_options)
        return EventStream(events, lambda: self.calls.end(call), {"x-request-id": call.rid})

    async def _events(
        self, call: Call, chunks: AsyncIterator[tuple[int, StreamChunk]], options: StreamOptions | None
    ) -> AsyncIterator[str]:
        try:
            for index in range(call.size):
                if (opening := self.opening(index)) is not None:
                    yield _event(self._envelope(self.chunk_class, call, opening))
            async for index, chunk in chunks:
                if chunk.text or chunk.finish_reason is not None or chunk.shown_logprobs:
                    fields = self._fields(index, chunk.shown_logprobs, chunk.finish_reason)
                    piece = self.piece(chunk.text, **fields)
                    yield _event(self._envelope(self.chunk_class, call, piece))
            if options is not None and options.include_usage:
                yield _event(self._envelope(self.chunk_class, call, usage=call.usage()))
            yield "data: [DONE]\n\n"
        except Exception as error:  # noqa: BLE001 - it is too late for a status
            yield _event(api_error(error).body())

    def _fields(self, index: int, entries: Sequence[TokenLogprobs] | None, reason: str | None) -> Any:
        """Return the fields of a choice beside its text. For OpenAI an end token and a stop text are one
        reason.
        """
        return {
            "index": index,
            "logprobs": self.logprobs(entries) if entries else None,
            "finish_reason": "stop" if reason not in ("length", None) else reason,
        }

    def _envelope(self, kind: type[BaseModel], call: Call, *choices: BaseModel, **more: Usage) -> BaseModel:
        """An answer, or a chunk of one, around its choices."""
        return kind(
            id=call.id,
            object=kind.model_fields["object"].default,  # or it would not be written
            created=call.created,
            model=self.model,
            choices=list(choices),
            **more,
        )


#: Fields that SamplingParams has under the same name.
_SAME_NAMES = {
    *("top_p", "top_k", "min_p", "n", "stop", "seed", "stop_token_ids", "ignore_eos", "priority"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
}


def _in_words_of(body: SamplingFields, message: str) -> str:
    """Replace names of SamplingParams by those of the fields that a client has sent."""
    most = "max_completion_tokens" if getattr(body, "max_completion_tokens", None) else "max_tokens"
    return message.replace("max_new_tokens", most).replace("min_new_tokens", "min_tokens")


def common_params(body: SamplingFields) -> dict[str, Any]:
    """The fields of both endpoints as those of SamplingParams; omitted ones keep OpenAI's default."""
    params = body.model_dump(include=_SAME_NAMES, exclude_none=True)
    params["temperature"] = 1.0 if body.temperature is None else body.temperature
    params["min_new_tokens"] = body.min_tokens or 0
    if body.logit_bias:
        params["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    return params


def _token_id(text: str) -> int:
    if not text.isdecimal() or len(text) > 10:
        raise ApiError(400, f"logit_bias: {text[:20]!r} is not a token id", param="logit_bias")
    return int(text)


async def _beginning_with(first: T, others: AsyncIterator[T]) -> AsyncIterator[T]:
    yield first
    async for other in others:
        yield other


def _event(model: BaseModel) -> str:
    """A server-sent event."""
    return f"data: {model.model_dump_json(exclude_unset=True)}\n\n"
