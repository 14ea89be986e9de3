"""Gate: what is looked at before a request reaches its endpoint: the key, the body's size and its time."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sgl_aspects.runtime.server.problems import ApiError
from sgl_aspects.runtime.server.settings import ServerSettings

#: Open to anyone who reaches the port: load balancers have no key.
OPEN_PATHS = ("/health",)


class Gate:
    """ASGI middleware. The application behind it gets each body whole, as one message."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_key(scope["path"], headers)
            body = await self._read_body(headers, receive) if scope["method"] == "POST" else b""
        except ApiError as problem:
            await problem.response()(scope, receive, send)
            return
        if body is None:
            return  # gone before the request was whole
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_whole() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_whole, send)

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise ApiError(401, "the API key is missing: send it as Authorization: Bearer KEY")
        # Takes the same time wherever the first difference is.
        if not hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode()):
            raise ApiError(401, "the API key is wrong", code="invalid_api_key")

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes | None:
        """None where the client hung up."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"content-type={kind[:100]!r}: send application/json")
        limit = self._settings.max_body_bytes
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and len(announced) < 20 and int(announced) > limit:
            raise ApiError(413, f"the body has {announced} bytes; at most {limit} are taken")
        try:
            return await asyncio.wait_for(self._collect(receive), self._settings.body_timeout)
        except asyncio.TimeoutError:
            seconds = self._settings.body_timeout
            raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None

    async def _collect(self, receive: Receive) -> bytes | None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._settings.max_body_bytes:
                limit = self._settings.max_body_bytes
                raise ApiError(413, f"the body has more than {limit} bytes, the most that are taken")
            if not message.get("more_body", False):
                return bytes(body)
