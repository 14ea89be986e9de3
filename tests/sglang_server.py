"""A real SGLang server on the CPU, and a client for it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 240
ARGUMENTS = {
    "--dtype": "float32",
    "--host": "127.0.0.1",
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    "--max-total-tokens": "16384",
    "--max-running-requests": "32",
    "--context-length": "1024",
    "--log-level": "warning",
}
SWITCHES: tuple[str, ...] = ("--disable-cuda-graph", "--enable-cache-report")
LAUNCH = (sys.executable, "-m", "sglang.launch_server", "--model-path")
SGLANG_SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


@dataclass
class Answer:
    """What a client saw: text, SGLang's own numbers, and when the first chunk came (``time_ns``)."""

    rid: str = ""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    sent_ns: int = 0
    first_ns: int = 0


@dataclass
class Server:
    """``log`` holds what all its processes printed."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    start_seconds: float = 0.0

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, *, status: int = 200
    ) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(
            "POST", path, json.dumps(body), {"content-type": "application/json", **(headers or {})}
        )
        response = connection.getresponse()
        content = response.read()
        connection.close()
        assert response.status == status, content
        return json.loads(content)

    def leave(self, text: str, headers: dict[str, str]) -> None:
        """Ask for a long answer, and hang up after its first part."""
        body = {"text": text, "stream": True, "sampling_params": {"max_new_tokens": 800, "ignore_eos": True}}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(
            "POST", "/generate", json.dumps(body), {"content-type": "application/json", **headers}
        )
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        # The response keeps the socket open until it is closed itself.
        response.close()
        connection.close()

    def abort(self, path: str, headers: dict[str, str], rid: str) -> None:
        """Ask for a long streamed answer, and have it aborted by its id after its first part."""
        body = {
            "text": "abort",
            "rid": rid,
            "stream": True,
            "sampling_params": {"max_new_tokens": 800, "ignore_eos": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        response = connection.getresponse()
        assert response.readline().startswith(b"data: ")
        other = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        other.request(
            "POST", "/abort_request", json.dumps({"rid": rid}), {"content-type": "application/json"}
        )
        other.getresponse().read()
        other.close()
        assert b"abort" in response.read()
        connection.close()

    def get(self, path: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    def chat(self, text: str, *, max_tokens: int = 8, headers: dict[str, str] | None = None) -> Answer:
        """One streamed greedy answer."""
        body = {
            "model": "mini",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.connect()
        answer = Answer(sent_ns=time.time_ns())
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"content-type": "application/json", **(headers or {})},
        )
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            answer.first_ns = answer.first_ns or time.time_ns()
            chunk = json.loads(line[len(b"data: ") :])
            answer.rid = chunk["id"]
            answer.usage = chunk.get("usage") or answer.usage
            for choice in chunk["choices"]:
                answer.text += choice["delta"].get("content") or ""
                answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        connection.close()
        return answer

    def chats(self, texts: Sequence[str], headers: Sequence[dict[str, str]], **options: Any) -> list[Answer]:
        """All at once."""
        with ThreadPoolExecutor(len(texts)) as pool:
            futures = [
                pool.submit(self.chat, text, headers=head, **options) for text, head in zip(texts, headers)
            ]
            return [future.result() for future in futures]


@contextmanager
def serve(
    model: Path,
    log: Path,
    *,
    prefix: Sequence[str] = (),
    command: Sequence[str] = LAUNCH,
    more: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Iterator[Server]:
    """SGLang, unmodified, with ``prefix`` before its command; all of its processes are gone afterwards.

    :param command: up to the model's path; the options of every server come after it, then ``more``.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [*prefix, *command, str(model), "--served-model-name", "mini", "--port", str(port), *SWITCHES]
    words += [word for pair in ARGUMENTS.items() for word in pair] + list(more)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SGL_ASPECTS", "OTEL_"))}
    settings = {"SGLANG_PLATFORM": "sgl_aspects_cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, **settings, **(environment or {})},
            cwd=log.parent,
            start_new_session=True,
        )
    server = Server(port, process, log)
    try:
        _wait_until_ready(server)
        server.start_seconds = time.monotonic() - start
        yield server
    finally:
        _end(process)


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]
        try:
            if server.get("/health") == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
