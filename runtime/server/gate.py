"""Checks before a request's content is read: host, key, right to administer, the body's kind, size, time."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sgl_aspects.runtime.server.api_errors import ApiError
from sgl_aspects.runtime.server.settings import ServerSettings, is_loopback

#: Paths that need no key: load balancers have none.
OPEN_PATHS = ("/health",)
#: Paths that change the server.
ADMIN_PATHS = ("/update_weights_from_disk", "/start_profile")


class Gate:
    """ASGI middleware. With a key: without it only open paths are answered. Without a key: only requests to a
    name of this machine are, because a page in a browser may have another name lead here (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                if self._settings.api_key is None:
                    _check_host(headers.get("host", ""))
                    self._check_admin(scope)
                elif scope["path"] not in OPEN_PATHS:
                    _check_key(self._settings.api_key, headers)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check_admin(self, scope: Scope) -> None:
        if scope["path"] in ADMIN_PATHS and scope["method"] == "POST" and not self._settings.admin:
            raise ApiError(
                403,
                f"{scope['path']} changes the server: start it with a key (SGL_ASPECTS_API_KEY), or with "
                "--admin to take this from every user of the machine",
            )


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


def _check_key(key: str, headers: Headers) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        raise ApiError(401, "the API key is missing: send it as Authorization: Bearer KEY")
    # Takes the same time wherever the first difference is. Headers are bytes, read as Latin-1.
    if not hmac.compare_digest(given.strip().encode("latin-1"), key.encode()):
        raise ApiError(401, "the API key is wrong", code="invalid_api_key")


class LimitedRoute(APIRoute):
    """A route whose bodies are limited in kind, size and time, by the settings in ``app.state``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def limited(request: Request) -> Response:
            return await handler(_LimitedRequest(request.scope, request.receive))

        return limited


class _LimitedRequest(Request):
    async def body(self) -> bytes:
        """Read the body and parse it as JSON, which FastAPI validates."""
        if hasattr(self, "_body"):
            return self._body
        settings: ServerSettings = self.app.state.settings
        content_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, f"content-type={content_type[:100]!r}: send application/json")
        limit = settings.max_body_bytes
        announced = self.headers.get("content-length", "0")
        if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
            raise ApiError(413, f"the body has {announced} bytes; at most {limit} are taken")
        try:
            self._body = await asyncio.wait_for(self._collect(limit), settings.body_timeout)
            self._json = from_json(self._body)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not arrive within {settings.body_timeout:g} s") from None
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}") from error
        return self._body

    async def _collect(self, limit: int) -> bytes:
        body = bytearray()
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client has hung up")
            body += message.get("body", b"")
            if len(body) > limit:
                raise ApiError(413, f"the body has more than {limit} bytes, the most that are taken")
            if not message.get("more_body", False):
                return bytes(body)
