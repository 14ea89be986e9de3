"""The application: its routes, and what they share."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from sgl_aspects import __version__
from sgl_aspects.errors import EngineError, ModelLoadError
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.server import protocol
from sgl_aspects.runtime.server.calls import Calls
from sgl_aspects.runtime.server.chat import ChatEndpoint
from sgl_aspects.runtime.server.completions import CompletionEndpoint
from sgl_aspects.runtime.server.gate import Gate, read_body, require_admin
from sgl_aspects.runtime.server.metrics import MeasureResponses, ServerMetrics
from sgl_aspects.runtime.server.openapi import openapi_document
from sgl_aspects.runtime.server.problems import (
    ApiError,
    answer_http_exception,
    answer_nobody,
    answer_problem,
    no_such_model,
)
from sgl_aspects.runtime.server.settings import ServerSettings

logger = logging.getLogger(__name__)


class ServerApp:
    """``asgi`` is the ASGI application; ``calls`` its open calls."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self._settings = settings
        self.calls = Calls(engine, settings.max_concurrent_requests)
        self.metrics = ServerMetrics(engine)
        model = str(engine.server_args.served_model_name)
        self._card = protocol.ModelCard(
            id=model, created=int(time.time()), max_model_len=engine.context_length
        )
        self._document = json.dumps(
            openapi_document(__version__, model, with_key=settings.api_key is not None)
        )
        chat = ChatEndpoint(self.calls, model, settings)
        completions = CompletionEndpoint(self.calls, model, settings)
        routes: dict[str, tuple[Any, str]] = {
            "/v1/chat/completions": (chat.__call__, "POST"),
            "/v1/completions": (completions.__call__, "POST"),
            "/update_weights_from_disk": (self.update_weights, "POST"),
            "/start_profile": (self.take_profile, "POST"),
            "/v1/models": (self.list_models, "GET"),
            "/v1/models/{model:path}": (self.retrieve_model, "GET"),
            "/health": (self.health, "GET"),
            "/metrics": (self.show_metrics, "GET"),
            "/openapi.json": (self.show_openapi, "GET"),
        }
        app: ASGIApp = Starlette(
            routes=[Route(path, endpoint, methods=[method]) for path, (endpoint, method) in routes.items()],
            exception_handlers={
                ApiError: answer_problem,
                EngineError: answer_problem,
                ClientDisconnect: answer_nobody,
                HTTPException: answer_http_exception,
                Exception: answer_problem,
            },
        )
        self.asgi: ASGIApp = MeasureResponses(Gate(app, settings.api_key), self.metrics, frozenset(routes))

    async def list_models(self, request: Request) -> Response:
        return _json(protocol.ModelList(data=[self._card]))

    async def retrieve_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._card.id:
            raise no_such_model(name, self._card.id)
        return _json(self._card)

    async def update_weights(self, request: Request) -> Response:
        """Returns when the new weights are in place: after the answers that have begun."""
        client = require_admin(request, self._settings)
        body = await read_body(request, self._settings, protocol.UpdateWeightsRequest)
        logger.warning("weights of %r requested by %s", body.model_path, client)
        try:
            await asyncio.to_thread(self.engine.update_weights, body.model_path)
        except ModelLoadError as error:
            raise ApiError(400, str(error), param="model_path") from error
        return _json(protocol.WeightsUpdated(model_path=body.model_path))

    async def take_profile(self, request: Request) -> Response:
        """Returns at once: a server without requests takes no steps."""
        client = require_admin(request, self._settings)
        body = await read_body(request, self._settings, protocol.ProfileRequest)
        logger.warning("profile of %d steps requested by %s", body.num_steps, client)
        files = await asyncio.to_thread(self.engine.start_profile, body.num_steps)
        return _json(protocol.ProfileStarted(files=[str(file) for file in files]))

    async def health(self, request: Request) -> Response:
        """200 while the server takes requests."""
        problem = self.engine.failure or self.calls.closed
        if problem is not None:
            raise ApiError(503, problem, code="unavailable")
        return _json(protocol.Health())

    async def show_metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def show_openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
