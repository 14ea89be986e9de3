"""The bodies of requests and responses. A field that is not known is refused, not ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from sgl_aspects.runtime.sampling_params import (
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_STOP_TEXTS,
    MAX_TOKEN_ENTRIES,
    MAX_TOP_LOGPROBS,
    RANGES,
)

FinishReason = Literal["stop", "length"]
MAX_PROMPTS = 128
_LARGEST = 2**31 - 1


def _refuse_true(value: bool) -> bool:
    if value:
        raise ValueError("this is not supported")
    return value


#: Accepted with a client's default value, and rejected if it has an effect.
AlwaysFalse = Annotated[
    bool, AfterValidator(_refuse_true), WithJsonSchema({"type": "boolean", "enum": [False]})
]


def _require_few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_TOKEN_ENTRIES:
        raise ValueError(f"it has {len(value)} members; at most {MAX_TOKEN_ENTRIES} are taken")
    return value


# Every fault that pydantic collects takes the event loop 30 µs and 1 kB: a list ends at its first one, and an
# object with many members is refused before.
_FAST = Field(fail_fast=True)
_FEW = BeforeValidator(_require_few)


class _Request(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_members(cls, value: Any) -> Any:
        return _require_few(value)


class TextPart(_Request):
    type: Literal["text"]
    text: str


class Message(_Request):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], _FAST]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        """ "developer" is OpenAI's newer name for the templates' role "system"."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class StreamOptions(_Request):
    include_usage: bool = False


class JsonSchemaFormat(_Request):
    name: str = "answer"
    description: str | None = None
    json_schema: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class TextFormat(_Request):
    type: Literal["text"]


class JsonObjectFormat(_Request):
    type: Literal["json_object"]


class JsonSchemaResponseFormat(_Request):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


def _within_range(name: str) -> Any:
    """A field as SamplingParams limits it."""
    least, most = RANGES[name]
    return Field(default=None, ge=least, le=most)


class SamplingFields(_Request):
    """The fields of both endpoints. Those from ``top_k`` on are not OpenAI's: clients send them as
    extra_body.
    """

    model: str
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_TEXTS, fail_fast=True)] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    frequency_penalty: float | None = _within_range("frequency_penalty")
    presence_penalty: float | None = _within_range("presence_penalty")
    logit_bias: Annotated[dict[str, float], _FEW] | None = Field(default=None, max_length=MAX_TOKEN_ENTRIES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    top_k: int | None = Field(default=None, ge=1, le=_LARGEST)
    min_p: float | None = _within_range("min_p")
    repetition_penalty: float | None = _within_range("repetition_penalty")
    min_tokens: int | None = Field(default=None, ge=0, le=_LARGEST)
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_TOKEN_ENTRIES, fail_fast=True)
    ignore_eos: bool | None = None
    priority: int | None = Field(default=None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class ChatRequest(SamplingFields):
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: TextFormat | JsonObjectFormat | JsonSchemaResponseFormat | None = Field(
        default=None, discriminator="type"
    )
    #: Only as clients send them by default: there are no tools here.
    tools: list[Any] | None = Field(default=None, max_length=0)
    tool_choice: Literal["none", "auto"] | None = None
    metadata: Annotated[dict[str, str], _FEW] | None = None
    store: AlwaysFalse | None = None


class CompletionRequest(SamplingFields):
    prompt: (
        str
        | Annotated[list[str], _FAST]
        | Annotated[list[int], _FAST]
        | Annotated[list[Annotated[list[int], _FAST]], _FAST]
    )
    max_tokens: int | None = Field(default=None, ge=1, le=_LARGEST)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: AlwaysFalse | None = None
    best_of: int | None = Field(default=None, ge=1, le=1)
    suffix: None = None


class _Response(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class PromptTokensDetails(_Response):
    cached_tokens: int


class Usage(_Response):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(_Response):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Response):
    content: list[TokenLogprob]


class AnswerMessage(_Response):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Response):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class _Answer(_Response):
    id: str
    created: int
    model: str


class ChatResponse(_Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(_Response):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Response):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(_Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(_Response):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(_Response):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class CompletionResponse(_Answer):
    """A whole answer, or a chunk of a stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(_Response):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "sgl-aspects"
    max_model_len: int


class ModelList(_Response):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(_Response):
    status: Literal["ok"] = "ok"


class UpdateWeightsRequest(_Request):
    """A path on the server's machine."""

    model_path: str = Field(min_length=1, max_length=4096)


class ProfileRequest(_Request):
    """The number of next steps to profile."""

    num_steps: int = Field(default=20, ge=1, le=1000)


class ProfileStarted(_Response):
    """Chrome traces on the server's machine, one for each rank: there when the steps are done."""

    files: list[str]


class WeightsUpdated(_Response):
    model_path: str


class ErrorBody(_Response):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(_Response):
    error: ErrorBody
