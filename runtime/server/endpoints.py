"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from sgl_aspects.runtime.frontend.request import Prompt
from sgl_aspects.runtime.messages import TokenLogprobs
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.runtime.server import protocol
from sgl_aspects.runtime.server.answers import Endpoint, common_params
from sgl_aspects.runtime.server.api_errors import ApiError

#: OpenAI's default for completions.
_MAX_TOKENS = 16


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


class CompletionEndpoint(Endpoint):
    id_prefix = "cmpl-"
    answer_class = chunk_class = protocol.CompletionResponse

    def prompts(self, body: protocol.CompletionRequest) -> list[Prompt]:
        prompt = body.prompt
        several = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
        prompts = list(prompt) if several else [prompt]
        if not 1 <= len(prompts) <= protocol.MAX_PROMPTS:
            raise ApiError(
                400, f"prompt: {len(prompts)} prompts; give 1 to {protocol.MAX_PROMPTS}", param="prompt"
            )
        return prompts  # type: ignore[return-value]  # a text, or token ids

    def sampling_params(self, body: protocol.CompletionRequest) -> SamplingParams:
        params = common_params(body)
        params["max_new_tokens"] = body.max_tokens or _MAX_TOKENS
        if body.logprobs is not None:
            params["logprobs"] = body.logprobs
        return SamplingParams(**params)

    def choice(self, text: str, **fields: Any) -> protocol.CompletionChoice:
        return protocol.CompletionChoice(text=text, **fields)

    piece = choice  # a stream's pieces have the same form

    def logprobs(self, entries: Sequence[TokenLogprobs]) -> protocol.CompletionLogprobs:
        """``text_offset`` counts from the beginning of these tokens."""
        text = self._token_text
        tokens = [text(entry.token_id) for entry in entries]
        tops = [{text(token): logprob for token, logprob in entry.top} for entry in entries]
        return protocol.CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=tops if any(tops) else None,
            text_offset=list(accumulate((len(token) for token in tokens[:-1]), initial=0)),
        )

    def _token_text(self, token: int) -> str:
        """Format a token like OpenAI: a part of a character by its bytes, so that two parts differ."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
