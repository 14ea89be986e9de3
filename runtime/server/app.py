"""The application: its routes, and what they share."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.types import ASGIApp

from sgl_aspects import __version__
from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.server import protocol
from sgl_aspects.runtime.server.api_errors import HANDLERS, ApiError, no_such_model
from sgl_aspects.runtime.server.calls import Calls
from sgl_aspects.runtime.server.endpoints import ChatEndpoint, CompletionEndpoint
from sgl_aspects.runtime.server.gate import OPEN_PATHS, Gate, LimitedRoute
from sgl_aspects.runtime.server.metrics import MeasureResponses, ServerMetrics
from sgl_aspects.runtime.server.settings import ServerSettings

logger = logging.getLogger(__name__)

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": protocol.ErrorResponse, "description": description}
    for status, description in (
        ("4XX", "The request can never be served as it is, or not now (429)."),
        ("5XX", "The engine cannot serve, or the server is stopping."),
    )
}


class ServerApp:
    """``asgi`` is the ASGI application; ``calls`` its open calls."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self._settings = settings
        self.calls = Calls(engine, settings.max_concurrent_requests)
        self.metrics = ServerMetrics(engine)
        self._model = model = str(engine.server_args.served_model_name)
        self._card = protocol.ModelCard(
            id=model, created=int(time.time()), max_model_len=engine.context_length
        )
        self._chat = ChatEndpoint(self.calls, model)
        self._completions = CompletionEndpoint(self.calls, model)
        routes = APIRouter(route_class=LimitedRoute, responses=_ERRORS)
        routes.post("/v1/chat/completions", **_generation(protocol.ChatResponse, protocol.ChatChunk))(
            self.chat
        )
        routes.post("/v1/completions", **_generation(protocol.CompletionResponse))(self.complete)
        routes.post("/update_weights_from_disk")(self.update_weights)
        routes.post("/start_profile")(self.take_profile)
        routes.get("/v1/models")(self.list_models)
        routes.get("/v1/models/{model:path}")(self.retrieve_model)
        routes.get("/health")(self.health)
        routes.get("/metrics", response_class=PlainTextResponse)(self.show_metrics)
        self._app = FastAPI(
            title="sgl-aspects", version=__version__, redoc_url=None, exception_handlers=HANDLERS
        )
        self._app.state.settings = settings
        self._app.include_router(routes)
        self._describe()
        known = frozenset(
            {"/openapi.json", *(route.path for route in routes.routes if isinstance(route, LimitedRoute))}
        )
        self.asgi: ASGIApp = MeasureResponses(Gate(self._app, settings), self.metrics, known)

    def _describe(self) -> None:
        """Add the model's name and the key to the OpenAPI document."""
        document = self._app.openapi()
        schemas, paths = document["components"]["schemas"], document["paths"]
        names = [schemas[body]["properties"]["model"] for body in ("ChatRequest", "CompletionRequest")]
        names.append(paths["/v1/models/{model}"]["get"]["parameters"][0]["schema"])
        for name in names:
            name["enum"] = [self._model]
        if self._settings.api_key is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            for path in OPEN_PATHS:
                paths[path]["get"]["security"] = []

    async def chat(self, request: Request, body: protocol.ChatRequest) -> Response:
        """Answer a conversation."""
        return await self._chat.answer(request, body)

    async def complete(self, request: Request, body: protocol.CompletionRequest) -> Response:
        """Continue texts."""
        return await self._completions.answer(request, body)

    async def list_models(self) -> protocol.ModelList:
        """The model that is served."""
        return protocol.ModelList(data=[self._card])

    async def retrieve_model(self, model: str) -> protocol.ModelCard:
        """The model of this name."""
        if model != self._card.id:
            raise no_such_model(model, self._card.id)
        return self._card

    async def update_weights(
        self, request: Request, body: protocol.UpdateWeightsRequest
    ) -> protocol.WeightsUpdated:
        """Replace the weights by others of the same model.

        Returns when they are in place: after the answers that have begun.
        """
        logger.info("weights of %r requested by %s", body.model_path, _address(request))
        try:
            await asyncio.to_thread(self.engine.update_weights, body.model_path)
        except ModelLoadError as error:
            raise ApiError(400, str(error), param="model_path") from error
        return protocol.WeightsUpdated(model_path=body.model_path)

    async def take_profile(self, request: Request, body: protocol.ProfileRequest) -> protocol.ProfileStarted:
        """Profile the next steps. Returns at once: a server without requests takes no steps."""
        logger.info("profile of %d steps requested by %s", body.num_steps, _address(request))
        files = await asyncio.to_thread(self.engine.start_profile, body.num_steps)
        return protocol.ProfileStarted(files=[str(file) for file in files])

    async def health(self) -> protocol.Health:
        """200 while the server takes requests."""
        problem = self.engine.failure or self.calls.closed
        if problem is not None:
            raise ApiError(503, problem, code="unavailable")
        return protocol.Health()

    async def show_metrics(self) -> Response:
        """Counts as Prometheus text."""
        text = await asyncio.to_thread(self.metrics.text)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def _generation(answer: type[BaseModel], chunk: type[BaseModel] | None = None) -> dict[str, Any]:
    """Describe an endpoint whose answer comes whole or, with stream=true, as server-sent events."""
    name = (chunk or answer).__name__
    data = {"type": "string", "description": f"A {name} as JSON; [DONE] in the end; or an ErrorResponse."}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {
        "response_model": answer,
        "responses": {200: {"content": {"text/event-stream": {"schema": event}}}},
    }


def _address(request: Request) -> str:
    return "unknown" if request.client is None else f"{request.client.host}:{request.client.port}"
