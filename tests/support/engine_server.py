"""A real engine's HTTP server in processes of its own, and a client for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sgl_aspects.run.folder import runs
from tests.support import processes

START_SECONDS = 600  # vLLM compiles first, on two busy cores


@dataclass
class Answer:
    """A client's view: the text, the engine's own numbers, and the bounds of the times when the request was
    sent and its first chunk came.
    """

    rid: str = ""
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    sent_ns: int = 0
    sent_until_ns: int = 0
    first_from_ns: int = 0
    first_ns: int = 0

    def late_ms(self, seconds: float) -> float:
        """Return how many milliseconds after these seconds its first chunk came; negative: before."""
        shortest, longest = self.first_from_ns - self.sent_until_ns, self.first_ns - self.sent_ns
        return (min(max(seconds * 1e9, shortest), longest) - seconds * 1e9) / 1e6


@dataclass
class EngineServer:
    """``log`` holds what all its processes printed."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path
    start_seconds: float = 0.0

    def _request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        sent = {"content-type": "application/json", **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), sent)
            response = connection.getresponse()
            return response.status, response.read()

    def tell(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, *, status: int = 200
    ) -> bytes:
        found, content = self._request("POST", path, body, headers)
        assert found == status, content
        return content

    def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, *, status: int = 200
    ) -> Any:
        return json.loads(self.tell(path, body, headers, status=status))

    def get(self, path: str) -> int:
        return self._request("GET", path)[0]

    def run_folder(self) -> Path:
        """The run folder of this server: others may be traced on the machine, too, or have had its ids."""
        for run in reversed(runs()):
            for ring in run.glob("*.ring"):
                with contextlib.suppress(ProcessLookupError):
                    if os.getsid(int(ring.name.split("-")[0])) == self.process.pid:
                        return run
        raise AssertionError("no process of the server has a ring")

    def command(self, command: str, *words: str) -> str:
        """Run a command of sgl-aspects on its run; return what it prints."""
        return processes.output_of(processes.command(command, "--run", self.run_folder(), *words))

    def profile(self, steps: int) -> str:
        """Profile forward passes while it answers; return what the command prints."""
        with ThreadPoolExecutor(1) as pool:
            profile = pool.submit(self.command, "control", "--profile", str(steps))
            while not profile.done():
                self.chat("profiled")
        return profile.result()

    @contextmanager
    def streaming(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        """Request a streamed answer whose first part has come; the client hangs up as the block ends."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {**body, "stream": True}
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json", **headers})
        response = connection.getresponse()
        try:
            assert response.readline().startswith(b"data: ")
            yield response
        finally:
            # The response keeps the socket open until it is closed itself.
            response.close()
            connection.close()

    def leave(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Request a streamed answer, and hang up after its first part."""
        with self.streaming(path, body, headers):
            pass

    @contextmanager
    def all_streaming(self, requests: Iterable[tuple[str, dict[str, Any], dict[str, str]]]) -> Iterator[None]:
        """Request streamed answers, each by path, body and headers: all have begun in the block, and are read
        to their ends after it.
        """
        with contextlib.ExitStack() as stack:
            answers = [stack.enter_context(self.streaming(*request)) for request in requests]
            yield
            for answer in answers:
                answer.read()

    def chat(self, text: str, *, headers: dict[str, str] | None = None, **options: Any) -> Answer:
        """One streamed greedy answer."""
        return self.chats([text], [headers or {}], **options)[0]

    def chats(
        self, texts: Sequence[str], headers: Sequence[dict[str, str]], *, max_tokens: int = 8
    ) -> list[Answer]:
        """Return the answers to concurrent streamed requests."""
        requests = [
            {
                "path": "/v1/chat/completions",
                "headers": head,
                "body": {
                    "model": "mini",
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            }
            for text, head in zip(texts, headers)
        ]
        results = self.exchange(requests)
        assert [result["status"] for result in results] == [200] * len(requests), results
        return [_answer(result) for result in results]

    def exchange(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Send all at once, by a client that records the times of the first parts (``streaming_client``)."""
        with self.exchanging(requests) as results:
            return results()

    @contextmanager
    def exchanging(self, requests: Sequence[dict[str, Any]]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
        """Run ``exchange`` during the block; yields a function that waits for the answers."""
        client = subprocess.Popen(
            [sys.executable, "-m", "tests.support.streaming_client", str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )
        assert client.stdin is not None
        client.stdin.write(json.dumps(requests))
        client.stdin.close()
        client.stdin = None
        answers: list[dict[str, Any]] = []

        def results() -> list[dict[str, Any]]:
            if not answers:
                output, errors = client.communicate(timeout=240)
                assert client.returncode == 0, errors
                answers.extend(json.loads(output))
            return answers

        try:
            yield results
            results()
        finally:
            client.kill()
            client.wait()


def _answer(result: dict[str, Any]) -> Answer:
    answer = Answer(**{name: value for name, value in result.items() if name.endswith("_ns")})
    for line in result["text"].splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[len("data: ") :])
        answer.rid = chunk["id"]
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"]:
            answer.text += choice["delta"].get("content") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return answer


_Server = TypeVar("_Server", bound=EngineServer)


@contextmanager
def start_server(
    kind: type[_Server],
    words: Sequence[str],
    port: int,
    log: Path,
    environment: dict[str, str],
    *,
    waits: bool = True,
) -> Iterator[_Server]:
    """The command ``words``, once it answers on ``port``; all of its processes are gone afterwards.

    Without ``waits`` it comes at once: see ``wait_until_ready``.

    Variables of sgl-aspects and OpenTelemetry that are set here are not handed on, ``environment`` is.
    """
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("SGL_ASPECTS", "ASPECTS_", "OTEL_"))
    }
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
            cwd=log.parent,
            start_new_session=True,
        )
    server = kind(port, process, log)
    try:
        if waits:
            wait_until_ready(server)
        server.start_seconds = time.monotonic() - start
        yield server
    finally:
        _end(process)


def wait_until_ready(server: EngineServer) -> None:
    """Wait until it answers; fails with the end of its log if it ends before that or takes too long."""
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
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(30)
    # All of its session: a server whose scheduler was killed may leave others behind.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
