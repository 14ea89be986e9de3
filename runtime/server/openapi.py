"""The OpenAPI document of the server, made from the models that check its bodies."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sgl_aspects.runtime.server import protocol

_PROBLEMS = {
    400: "The request can never be served as it is.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    405: "There is no such method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The server is busy.",
    503: "The engine cannot serve, or the server is stopping.",
}


def openapi_document(version: str, model: str, *, with_key: bool) -> dict[str, Any]:
    requests: list[type[BaseModel]] = [protocol.ChatRequest, protocol.CompletionRequest]
    others: list[type[BaseModel]] = [protocol.UpdateWeightsRequest]
    responses: list[type[BaseModel]] = [
        protocol.ChatResponse,
        protocol.ChatChunk,
        protocol.CompletionResponse,
        protocol.ModelCard,
        protocol.ModelList,
        protocol.Health,
        protocol.WeightsUpdated,
        protocol.ErrorResponse,
    ]
    _, schemas = models_json_schema(
        [(model, "validation") for model in (*requests, *others)]
        + [(model, "serialization") for model in responses],
        ref_template="#/components/schemas/{model}",
    )
    for request in requests:
        schemas["$defs"][request.__name__]["properties"]["model"]["enum"] = [model]
    components: dict[str, Any] = {"schemas": schemas["$defs"]}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "sgl-aspects",
            "version": version,
            "description": "OpenAI-compatible server of the embedded engine.",
        },
        "paths": {
            "/v1/chat/completions": _post(
                "Answer a conversation.", "ChatRequest", "ChatResponse", "ChatChunk"
            ),
            "/v1/completions": _post(
                "Continue texts.", "CompletionRequest", "CompletionResponse", "CompletionResponse"
            ),
            "/update_weights_from_disk": {
                "post": {
                    "summary": "Go on with other weights of the same model; answers when they are in place.",
                    "requestBody": {
                        "required": True,
                        "content": {"application/json": {"schema": _ref("UpdateWeightsRequest")}},
                    },
                    "responses": {
                        "200": {
                            "description": "They are in place.",
                            "content": {"application/json": {"schema": _ref("WeightsUpdated")}},
                        },
                        **_problems(400, 401, 405, 408, 413, 415, 503),
                    },
                }
            },
            "/v1/models": _get("The model that is served.", "ModelList", 401, 405),
            "/v1/models/{model}": {
                **_get("The model of this name.", "ModelCard", 401, 404, 405),
                "parameters": [
                    {
                        "name": "model",
                        "in": "path",
                        "required": True,
                        "schema": {"type": "string", "enum": [model]},
                    }
                ],
            },
            "/health": _get("Whether the server can answer.", "Health", 405, 503),
            "/metrics": {
                "get": {
                    "summary": "Counts as Prometheus text.",
                    "responses": {
                        "200": {
                            "description": "Counts.",
                            "content": {"text/plain": {"schema": {"type": "string"}}},
                        },
                        **_problems(401, 405),
                    },
                }
            },
        },
        "components": components,
    }
    if with_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        document["paths"]["/health"]["get"]["security"] = []
    return document


def _post(summary: str, request: str, response: str, chunk: str) -> dict[str, Any]:
    answers = {
        "description": "The answer; with stream=true, its chunks as server-sent events.",
        "content": {
            "application/json": {"schema": _ref(response)},
            "text/event-stream": {"schema": _event(chunk)},
        },
    }
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
            "responses": {"200": answers, **_problems(*_PROBLEMS)},
        }
    }


def _event(chunk: str) -> dict[str, Any]:
    """One event of a stream."""
    data = {"type": "string", "description": f"A {chunk} as JSON; [DONE] in the end; or an ErrorResponse."}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _get(summary: str, response: str, *problems: int) -> dict[str, Any]:
    found = {"description": "Found.", "content": {"application/json": {"schema": _ref(response)}}}
    return {"get": {"summary": summary, "responses": {"200": found, **_problems(*problems)}}}


def _problems(*statuses: int) -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("ErrorResponse")}}
    return {str(status): {"description": _PROBLEMS[status], "content": content} for status in statuses}


def _ref(model: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model}"}
