"""A real vLLM server on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.engine_server import EngineServer, start_server
from tests.support.otlp_receiver import Receiver
from tests.support.processes import free_port

VLLM_SERVE = (str(Path(sys.executable).with_name("vllm")), "serve")
ARGUMENTS = {"--served-model-name": "mini", "--host": "127.0.0.1", "--max-model-len": "1024"}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


@contextmanager
def serve(
    model: Path,
    log: Path,
    *,
    prefix: Sequence[str] = (),
    more: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[EngineServer]:
    """vLLM, unmodified, with ``prefix`` before its command; all of its processes are gone afterwards."""
    port = free_port()
    words = [*prefix, *VLLM_SERVE, str(model), "--port", str(port)]
    words += [word for pair in ARGUMENTS.items() for word in pair] + list(more)
    with start_server(EngineServer, words, port, log, {**ENVIRONMENT, **(environment or {})}) as server:
        yield server


def traced(receiver: Receiver) -> dict[str, str]:
    """Return the environment of a server that is traced to ``receiver``."""
    return {
        "SGL_ASPECTS_TRACE": "3",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }
