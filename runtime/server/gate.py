"""Checks before a request's content is read: host, key, right to administer, the body's kind, size, time."""

from __future__ import annotations

import asyncio
import hmac
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_aspects.runtime.server.problems import ApiError, problem_of_body
from sgl_aspects.runtime.server.settings import ServerSettings, is_loopback

#: Paths that need no key: load balancers have none.
OPEN_PATHS = ("/health",)
Body = TypeVar("Body", bound=BaseModel)


class Gate:
    """ASGI middleware. With a key: without it only open paths are answered. Without a key: only requests to a
    name of this machine are, because a page in a browser may have another name lead here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                if self._key is None:
                    _check_host(headers.get("host", ""))
                elif scope["path"] not in OPEN_PATHS:
                    _check_key(self._key, headers)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _check_host(given: str) -> None:
    try:
        name = urlsplit(f"//{given}").hostname
    except ValueError:
        name = None
    if name is None or not is_loopback(name):
        raise ApiError(
            421,
            f"host={given[:100]!r}: a server without an API key answers to 127.0.0.1, [::1] and localhost; "
            "behind a proxy, set a key or have the proxy send one of these",
        )


def require_admin(request: Request, settings: ServerSettings) -> str:
    """Return the client's address, for the log; ApiError if requests to change the server are not taken."""
    if settings.api_key is None and not settings.admin:
        raise ApiError(
            403,
            f"{request.scope['path']} changes the server: start it with a key (SGL_ASPECTS_API_KEY), or with "
            "--admin to take this from every user of the machine",
        )
    return "unknown" if request.client is None else f"{request.client.host}:{request.client.port}"


def _check_key(key: str, headers: Headers) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise ApiError(401, "the API key is missing: send it as Authorization: Bearer KEY")
    # Takes the same time wherever the first difference is. Headers are bytes, read as Latin-1.
    if not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
        raise ApiError(401, "the API key is wrong", code="invalid_api_key")


async def read_body(request: Request, settings: ServerSettings, kind: type[Body]) -> Body:
    """The whole body, checked; ClientDisconnect where the client has hung up before that."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"content-type={content_type[:100]!r}: send application/json")
    limit = settings.max_body_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > limit:
        raise ApiError(413, f"the body has {announced} bytes; at most {limit} are taken")
    try:
        body = await asyncio.wait_for(_collect(request, limit), settings.body_timeout)
        return kind.model_validate_json(body)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the body did not arrive within {settings.body_timeout:g} s") from None
    except ValidationError as error:
        raise problem_of_body(error) from error


async def _collect(request: Request, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise ApiError(413, f"the body has more than {limit} bytes, the most that are taken")
        if not message.get("more_body", False):
            return bytes(body)
