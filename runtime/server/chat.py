"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sgl_aspects.runtime.frontend.request import Prompt
from sgl_aspects.runtime.messages import TokenLogprobs
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.runtime.server import protocol
from sgl_aspects.runtime.server.answers import Endpoint, common_params
from sgl_aspects.runtime.server.api_errors import ApiError


class ChatEndpoint(Endpoint):
    id_prefix = "chatcmpl-"
    answer_class = protocol.ChatResponse
    chunk_class = protocol.ChatChunk

    def prompts(self, body: protocol.ChatRequest) -> list[Prompt]:
        return [[message.for_template() for message in body.messages]]

    def sampling_params(self, body: protocol.ChatRequest) -> SamplingParams:
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: only allowed with logprobs=true", param="top_logprobs")
        params = common_params(body)
        params["max_new_tokens"] = body.max_completion_tokens or body.max_tokens
        if body.logprobs:
            params["logprobs"] = body.top_logprobs or 0
        if isinstance(body.response_format, protocol.JsonObjectFormat):
            params["json_schema"] = '{"type": "object"}'
        elif isinstance(body.response_format, protocol.JsonSchemaResponseFormat):
            params["json_schema"] = json.dumps(body.response_format.json_schema.json_schema)
        return SamplingParams(**params)

    def choice(self, text: str, **fields: Any) -> protocol.ChatChoice:
        return protocol.ChatChoice(message=protocol.AnswerMessage(content=text), **fields)

    def piece(self, text: str, **fields: Any) -> protocol.ChatChunkChoice:
        delta = protocol.Delta(content=text) if text else protocol.Delta()
        return protocol.ChatChunkChoice(delta=delta, **fields)

    def opening(self, index: int) -> protocol.ChatChunkChoice:
        delta = protocol.Delta(role="assistant", content="")
        return protocol.ChatChunkChoice(index=index, delta=delta, finish_reason=None)

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> protocol.ChatLogprobs:
        return protocol.ChatLogprobs(
            content=[
                protocol.TokenLogprob(
                    **self._token(entry.token_id, entry.logprob).model_dump(),
                    top_logprobs=[self._token(token, logprob) for token, logprob in entry.top],
                )
                for entry in entries
            ]
        )

    def _token(self, token: int, logprob: float) -> protocol.TopLogprob:
        raw = self.tokenizer.token_bytes(token)
        return protocol.TopLogprob(token=raw.decode("utf-8", "replace"), logprob=logprob, bytes=list(raw))
