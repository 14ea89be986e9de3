"""The OpenAPI document of the server, made from the models that check its bodies."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import models_json_schema

from sgl_aspects.runtime.server import protocol

_PROBLEMS = {
    400: "The request can never be served as it is.",
    401: "The API key is missing or wrong.",
    403: "Neither a key nor --admin allows to change the server.",
    404: "There is no such model.",
    405: "There is no such method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    421: "The host is not a name of this machine.",
    429: "The server is busy.",
    503: "The engine cannot serve, or the server is stopping.",
}


_BODIES = (
    *(protocol.ChatRequest, protocol.CompletionRequest),
    *(protocol.ProfileRequest, protocol.UpdateWeightsRequest),
)
_ANSWERS = (
    *(protocol.ChatResponse, protocol.ChatChunk, protocol.CompletionResponse, protocol.ModelCard),
    *(
        protocol.ModelList,
        protocol.Health,
        protocol.ProfileStarted,
        protocol.WeightsUpdated,
        protocol.ErrorResponse,
    ),
)


def openapi_document(version: str, model: str, *, with_key: bool) -> dict[str, Any]:
    """Return the document for a server of ``model``; ``with_key``: it requires an API key."""
    _, schemas = models_json_schema(
        [(body, "validation") for body in _BODIES] + [(answer, "serialization") for answer in _ANSWERS],
        ref_template="#/components/schemas/{model}",
    )
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    for request in ("ChatRequest", "CompletionRequest"):
        components["schemas"][request]["properties"]["model"]["enum"] = [model]
    one_model = {
        "name": "model",
        "in": "path",
        "required": True,
        "schema": {"type": "string", "enum": [model]},
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "sgl-aspects",
            "version": version,
            "description": "OpenAI-compatible server of the embedded engine.",
        },
        "paths": {
            "/v1/chat/completions": _generation(
                "Answer a conversation.", "ChatRequest", "ChatResponse", "ChatChunk"
            ),
            "/v1/completions": _generation(
                "Continue texts.", "CompletionRequest", "CompletionResponse", "CompletionResponse"
            ),
            "/update_weights_from_disk": {
                "post": _operation(
                    "Replace the weights by others of the same model; answers when they are in place.",
                    _json("WeightsUpdated"),
                    *(400, 401, 403, 405, 408, 413, 415, 503),
                    body="UpdateWeightsRequest",
                )
            },
            "/start_profile": {
                "post": _operation(
                    "Profile the next steps; answers at once with the files to come.",
                    _json("ProfileStarted"),
                    *(400, 401, 403, 405, 408, 413, 415, 503),
                    body="ProfileRequest",
                )
            },
            "/v1/models": {"get": _operation("The model that is served.", _json("ModelList"), 401, 405)},
            "/v1/models/{model}": {
                "get": _operation("The model of this name.", _json("ModelCard"), 401, 404, 405),
                "parameters": [one_model],
            },
            "/health": {"get": _operation("Whether the server can answer.", _json("Health"), 405, 503)},
            "/metrics": {
                "get": _operation("Counts as Prometheus text.", {"text/plain": _schema("string")}, 401, 405)
            },
        },
        "components": components,
    }
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        document["paths"]["/health"]["get"]["security"] = []
    return document


def _generation(summary: str, body: str, answer: str, chunk: str) -> dict[str, Any]:
    """An endpoint whose answer comes whole or, with stream=true, as server-sent events."""
    data = {"type": "string", "description": f"A {chunk} as JSON; [DONE] in the end; or an ErrorResponse."}
    events = _schema("object", properties={"data": data}, required=["data"])
    content = {**_json(answer), "text/event-stream": events}
    return {"post": _operation(summary, content, *_PROBLEMS, body=body)}


def _operation(
    summary: str, content: dict[str, Any], *problems: int, body: str | None = None
) -> dict[str, Any]:
    """Return the parameters and answers of one method of a path; ``problems`` are statuses."""
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in (*problems, 421):
        responses[str(status)] = {"description": _PROBLEMS[status], "content": _json("ErrorResponse")}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": _json(body)}
    return operation


def _json(model: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model}"}}}


def _schema(kind: str, **more: Any) -> dict[str, Any]:
    return {"schema": {"type": kind, **more}}
