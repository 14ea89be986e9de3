"""A real SGLang or vLLM server with tracing attached, and requests that keep it busy."""

from __future__ import annotations

import http.client
import json
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.receiver import receiver
from benchmarks.turns import step_aside
from sgl_aspects.cli.models import ensure_model
from tests.support import sglang_server, vllm_server
from tests.support.engine_server import EngineServer
from tests.support.sglang_models import hugging_face_folder

ENGINES = ("sglang", "vllm")


@dataclass(frozen=True)
class Device:
    """A server's arguments on a device, and how its steps are measured.

    A turn has ``turn`` steps, the first ``skip`` after a switch left out: hooks of the level are woven in
    them, and the interpreter specialises the code around them anew, for which CPython takes 53 runs of it.
    ``warm_up`` steps come before. A request that keeps the server busy has ``tokens``, one that is a turn
    itself ``few_tokens``.
    """

    arguments: dict[str, str]
    switches: tuple[str, ...]
    environment: dict[str, str]
    turn: int
    skip: int
    warm_up: int
    tokens: int
    few_tokens: int


def make_device(name: str, *, eager: bool, largest_batch: int) -> Device:
    """The CPU of any machine, or a GPU that SGLang's own platform drives, by captured graphs or eagerly."""
    report = "--enable-cache-report"
    if name == "cpu":
        return Device({"--dtype": "bfloat16"}, ("--disable-cuda-graph", report), {}, 5, 1, 20, 400, 8)
    arguments = {
        "--device": name,
        "--dtype": "bfloat16",
        "--attention-backend": "triton",
        "--context-length": "8192",
        "--max-total-tokens": "131072",
        "--max-running-requests": str(max(32, largest_batch)),
        "--mem-fraction-static": "0.5",
    }
    graphs = ("--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", str(largest_batch))
    switches = (report, *(("--disable-cuda-graph",) if eager else graphs))
    # SGLang's own platform, with what is installed of its kernels.
    environment = {
        "SGLANG_PLATFORM": "",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return Device(arguments, switches, environment, 60, 60, 300, 1000, 64)


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
                for _ in self._answer(size, self._device.tokens):
                    if is_over.is_set():
                        break

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        try:
            yield
        finally:
            is_over.set()
            asking.join()

    def requests(self, size: int) -> Generator[float, None, None]:
        """The seconds of a step in a whole batch, as its client sees it."""
        while True:
            start = time.perf_counter()
            list(self._answer(size, self._device.few_tokens))
            yield (time.perf_counter() - start) / self._device.few_tokens

    def _answer(self, size: int, tokens: int) -> Iterator[bytes]:
        body = {
            "model": "mini",
            "prompt": [f"the quick brown fox {number}" for number in range(size)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        yield from connection.getresponse()
        connection.close()


@contextmanager
def serving(
    engine: str,
    model: Path | None,
    device: Device,
    plugin: dict[str, str],
    more: Sequence[str] = (),
    level: int = 4,
) -> Iterator[EngineServer]:
    """A server traced at ``level``, whose spans go to a receiver on loopback.

    :param model: its folder; None: SmolLM2's, made here.
    :param plugin: the environment of the plugin that measures.
    :param more: options of the engine's own; {url} in them is the receiver's.
    """
    with tempfile.TemporaryDirectory() as name, receiver() as url:
        folder = Path(name)
        environment = {
            **plugin,
            **device.environment,
            "SGL_ASPECTS_TRACE": str(level),
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"{url}/ours",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
            "SGLANG_TRACE_LEVEL": "0",
        }
        options = [word.format(url=url) for word in more]
        start = vllm_server.serve
        if engine == "sglang":
            sglang_server.ARGUMENTS.update(device.arguments)
            sglang_server.SWITCHES, start = device.switches, sglang_server.serve
        model = model or hugging_face_folder(ensure_model(), folder / "model")
        with start(model, folder / "log", more=options, environment=environment) as server:
            print(f"ready after {server.start_seconds:.0f} s", flush=True)
            yield server
