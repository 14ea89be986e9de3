"""A real SGLang or vLLM server with tracing attached, and requests that keep it busy."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.turns import step_aside
from sgl_aspects.cli.models import ensure_model
from tests.support import sglang_server, vllm_server
from tests.support.engine_server import EngineServer
from tests.support.sglang_models import hugging_face_folder

ENGINES = ("sglang", "vllm")


@dataclass(frozen=True)
class Device:
    """A server's arguments on a device. A request that keeps the server busy has ``tokens``."""

    arguments: dict[str, str]
    switches: tuple[str, ...]
    environment: dict[str, str]
    tokens: int


def make_device(name: str, *, largest_batch: int) -> Device:
    """The CPU of any machine, or a GPU that SGLang's own platform drives, by captured graphs."""
    report = "--enable-cache-report"
    if name == "cpu":
        return Device({"--dtype": "bfloat16"}, ("--disable-cuda-graph", report), {}, 400)
    arguments = {
        "--device": name,
        "--dtype": "bfloat16",
        "--attention-backend": "triton",
        "--context-length": "8192",
        "--max-total-tokens": "131072",
        "--max-running-requests": str(max(32, largest_batch)),
        "--mem-fraction-static": "0.5",
    }
    switches = (report, "--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", str(largest_batch))
    # SGLang's own platform, with what is installed of its kernels.
    environment = {
        "SGLANG_PLATFORM": "",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Device(arguments, switches, environment, 1000)


class Load:
    """Requests that keep a server busy: only its steps are measured."""

    def __init__(self, server: EngineServer, device: Device) -> None:
        self.server, self._device = server, device

    @contextmanager
    def at_work(self, size: int) -> Iterator[None]:
        """The server makes step after step, for this number of requests at a time."""
        is_over = threading.Event()

        def ask() -> None:
            step_aside()  # of Linux' threads each has its own priority
            while not is_over.is_set():
                for _ in self.answer(size, self._device.tokens):
                    if is_over.is_set():
                        break

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        try:
            yield
        finally:
            is_over.set()
            asking.join()

    def answer(self, size: int, tokens: int) -> Iterator[bytes]:
        body = {
            "model": "mini",
            "prompt": [f"the quick brown fox {number}" for number in range(size)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        try:
            yield from lines_of(self.server.port, body)
        except RuntimeError as error:
            log = self.server.log.read_text()[-20000:]  # its folder goes with the benchmark
            raise RuntimeError(f"{error}; the server's log:\n{log}") from None


def lines_of(port: int, body: dict[str, Any]) -> Iterator[bytes]:
    """The lines of the answer to a completion request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read()!r}")
    yield from response
    connection.close()


@contextmanager
def serving(
    engine: str,
    model: Path | None,
    device: Device,
    more: Sequence[str] = (),
    *,
    url: str,
    level: int,
    environment: dict[str, str],
) -> Iterator[EngineServer]:
    """A server traced at ``level``, whose spans go to the :mod:`.receiver` at ``url``, under "ours".

    :param model: its folder; None: SmolLM2's, made here.
    :param more: options of the engine's own.
    :param level: 0: nothing is woven.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {
            **device.environment,
            **({"SGL_ASPECTS_TRACE": str(level)} if level else {}),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{url}/ours",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
            **environment,
        }
        start = vllm_server.serve
        if engine == "sglang":
            sglang_server.ARGUMENTS.update(device.arguments)
            sglang_server.SWITCHES, start = device.switches, sglang_server.serve
        model = model or hugging_face_folder(ensure_model(), folder / "model")
        with start(model, folder / "log", more=more, environment=environment) as server:
            print(f"ready after {server.start_seconds:.0f} s", flush=True)
            yield server
