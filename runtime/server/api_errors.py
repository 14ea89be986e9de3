"""Errors as OpenAI's clients know them: a status, and {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as RoutingError
from starlette.requests import ClientDisconnect

from sgl_aspects.errors import EngineError, InvalidRequestError, QueueFullError
from sgl_aspects.runtime.server.protocol import ErrorBody, ErrorResponse

logger = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_HEADERS = {429: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}


class ApiError(HTTPException):
    """Raised to answer with an error. ``param`` names the field of the request that is at fault."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(status, message, _HEADERS.get(status))
        self.param = param
        self.code = code

    def __str__(self) -> str:
        return self.detail

    def body(self) -> ErrorResponse:
        status = self.status_code
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return ErrorResponse(
            error=ErrorBody(message=self.detail, type=kind, param=self.param, code=self.code)
        )

    def response(self) -> Response:
        content = self.body().model_dump_json()
        return Response(content, self.status_code, self.headers, "application/json")


def api_error(error: BaseException) -> ApiError:
    """Return the answer to a call that ended with ``error``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _error_of_body(error)
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error))
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_failed")
    logger.error("a call failed", exc_info=error)
    return ApiError(500, "the server failed at this request; see its log")


def no_such_model(requested: str, served: str) -> ApiError:
    message = f"model={requested[:100]!r} is not served here: this server's is {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _error_of_body(error: RequestValidationError) -> ApiError:
    """Name the first fault of a body, and how many more there are."""
    faults = [{**fault, "loc": fault["loc"][1:]} for fault in error.errors()]
    first = faults[0]
    # A field of several types has an error for each type: a wrong type is the least informative.
    same_field = [fault for fault in faults if fault["loc"][:1] == first["loc"][:1]]
    first = next((fault for fault in same_field if not fault["type"].endswith("_type")), first)
    place = _place(first, error.body)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{place}: this field is not known{more}", param=place)
    if first["type"] == "missing":
        return ApiError(400, f"{place}: this field is missing{more}", param=place)
    what = "Input should be an object" if first["type"] == "model_attributes_type" else first["msg"]
    value = _shortened(json.dumps(first["input"], ensure_ascii=False))
    what = what.removeprefix("Value error, ")
    return ApiError(400, f"{place or 'the body'}={value}: {what}{more}", param=place or None)


def _place(fault: Mapping[str, Any], body: Any) -> str:
    """Return where in the body it is, without the names of types that pydantic adds for a union."""
    parts = list(fault["loc"])
    missing = [parts.pop()] if fault["type"] == "missing" else []
    found = []
    for part in parts:
        if isinstance(body, list) if isinstance(part, int) else isinstance(body, dict) and part in body:
            body = body[part]
            found.append(_shortened(str(part)))
    return ".".join(found + missing)


def _shortened(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= 100 else f"{text[:100]}..."


# -- handlers of the application -------------------------------------------------------------------------


async def _answer_nobody(request: Request, error: Any) -> Response:
    """Return a status for the metrics only: the client has hung up."""
    return Response(status_code=499)


async def _answer(request: Request, error: Any) -> Response:
    return api_error(error).response()


async def _answer_unrouted(request: Request, error: Any) -> Response:
    """Answer an unknown path or method."""
    message = f"{error.detail}: {request.method} {_shortened(request.url.path)}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Any]] = {
    ApiError: _answer,
    EngineError: _answer,
    RequestValidationError: _answer,
    ClientDisconnect: _answer_nobody,
    RoutingError: _answer_unrouted,
    Exception: _answer,
}
