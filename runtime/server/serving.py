"""The server's process: it listens once the model is loaded, watches the engine, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Iterator
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from sgl_aspects.errors import ConfigError, SchedulerDiedError
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.server.app import ServerApp
from sgl_aspects.runtime.server.settings import ServerSettings
from sgl_aspects.runtime.server_args import ServerArgs

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 0.2
#: Seconds after the engine's death in which health checks report it, before the process ends.
_UNHEALTHY_SECONDS = 1.0
#: Seconds for failed answers to reach their clients.
_LAST_SECONDS = 5.0
_STOPPING = "the server is stopping: send the request to another, or again once it is back"


def run_server(server_args: ServerArgs, settings: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises SchedulerDiedError if the engine fails, ConfigError if the
    address is not available.
    """
    listener = _bind(settings)  # first: a port in use is reported before the model is loaded
    before = signal.signal(signal.SIGTERM, _end_while_loading)
    try:
        with listener, Engine(server_args) as engine:
            asyncio.run(_Serving(engine, settings, listener).serve())
            if engine.failure is not None:
                raise SchedulerDiedError(engine.failure)
    finally:
        signal.signal(signal.SIGTERM, before)


class _UvicornServer(uvicorn.Server):
    """Does not capture signals: uvicorn would raise them again, and so end by SIGTERM after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Serving:
    def __init__(self, engine: Engine, settings: ServerSettings, listener: socket.socket) -> None:
        self._engine = engine
        self._settings = settings
        self._listener = listener
        self._app = ServerApp(engine, settings)
        config = uvicorn.Config(
            self._app.asgi,
            http="h11",
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(settings.shutdown_timeout + _LAST_SECONDS) + 1,
        )
        self._server = _UvicornServer(config)
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        host, port = self._listener.getsockname()[:2]
        name = f"[{host}]" if ":" in host else host
        logger.info("serving %s at http://%s:%d/v1", self._engine.server_args.served_model_name, name, port)
        tasks = [
            asyncio.ensure_future(work())
            for work in (self._watch_engine, self._end_in_order, self._close_silent_connections)
        ]
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        """Handle the first signal: finish open calls. The second: do not wait for them."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    async def _end_in_order(self) -> None:
        await self._stopping.wait()
        calls, patience = self._app.calls, self._settings.shutdown_timeout
        logger.info("stopping: %d answers under way get up to %g s", calls.count, patience)
        calls.closed = _STOPPING
        self._server.should_exit = True  # closes the listener, then waits for open connections
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), patience)
        if calls.count:
            logger.warning("stopping: %d answers are given up", calls.count)
            calls.fail(_STOPPING)

    async def _close_silent_connections(self) -> None:
        """Close connections on which nothing happens for as long as a body may take: no whole request comes,
        or an answer is not read, which would hold its place for ever.
        """
        patience = self._settings.body_timeout
        silent: dict[H11Protocol, tuple[tuple[RequestResponseCycle | None, int], float]] = {}
        while True:
            await asyncio.sleep(patience / 4)
            now, before, silent = time.monotonic(), silent, {}
            for connection in list(self._server.server_state.connections):
                assert isinstance(connection, H11Protocol)  # configured that way
                last = connection.cycle, connection.transport.get_write_buffer_size()
                if last[0] is not None and not last[0].response_complete and not last[1]:
                    continue
                known, since = before.get(connection, (last, now))
                silent[connection] = last, since if known == last else now
                if now - silent[connection][1] > patience:
                    connection.transport.abort()

    async def _watch_engine(self) -> None:
        while self._engine.failure is None:
            await asyncio.sleep(_WATCH_SECONDS)
        logger.error("the engine has failed: %s", self._engine.failure)
        await asyncio.sleep(_UNHEALTHY_SECONDS)
        self._server.should_exit = True


def _bind(settings: ServerSettings) -> socket.socket:
    """A socket that does not listen yet: clients are refused until the model is loaded."""
    host = settings.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With its protocol: asyncio sends small packets at once (TCP_NODELAY) only where a socket names it.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"host={host!r}, port={settings.port} is not available: "
            f"{error.strerror or error}; choose another "
            "(--port 0 takes a free one)"
        ) from error
    return listener


def _end_while_loading(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # so that the scheduler process is ended, too
