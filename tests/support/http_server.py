"""`sgl-aspects serve` in a process of its own, and plain HTTP to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.forked_schedulers import ForkedProgram
from tests.support.processes import end, wait_until

START_SECONDS = 120
LOCAL = "127.0.0.1"


@dataclass
class Server:
    """``log`` holds its output; ``model`` is the name that it serves."""

    process: subprocess.Popen[bytes] | ForkedProgram
    log: Path
    model: str
    port: int = 0

    @property
    def base_url(self) -> str:
        return f"http://{LOCAL}:{self.port}/v1"

    @property
    def scheduler_pid(self) -> int:
        import psutil

        children = psutil.Process(self.process.pid).children()
        (scheduler,) = [child for child in children if any("spawn_main" in word for word in child.cmdline())]
        return int(scheduler.pid)

    def wait_until_serving(self) -> None:
        def found() -> bool:
            text = self.log.read_text()
            assert self.process.poll() is None, text
            match = re.search(r"serving \S+ at http://[^:]+:(\d+)/v1", text)
            self.port = int(match[1]) if match else 0
            return bool(self.port) and self.answers()

        wait_until(found, START_SECONDS)

    def answers(self) -> bool:
        try:
            return self.request("GET", "/health")[0] == 200
        except OSError:
            return False

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status, and the body, as JSON where it is."""
        if isinstance(body, Mapping):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode()
        sent = {"content-type": "application/json"} if body is not None else {}
        connection = http.client.HTTPConnection(LOCAL, self.port, timeout=60)
        try:
            connection.request(method, path, body, sent | dict(headers or {}))
            response = connection.getresponse()
            content = response.read()
            if response.headers.get_content_type() == "application/json":
                return response.status, json.loads(content)
            return response.status, content.decode()
        finally:
            connection.close()

    def metrics(self) -> dict[str, float]:
        status, text = self.request("GET", "/metrics")
        assert status == 200
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    def is_quiet(self) -> bool:
        """Return whether the engine's counts show no request, and every slot of the key-value cache free."""
        found = self.metrics()
        scheduler = "sgl_aspects_scheduler_"
        return (
            found[f"{scheduler}running_requests"] == found[f"{scheduler}waiting_requests"] == 0
            and found[f"{scheduler}kv_available_tokens"] == found[f"{scheduler}kv_total_tokens"]
        )

    def stop(self, number: int = signal.SIGTERM, seconds: float = 60) -> int:
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)


@contextmanager
def serving(
    model: Path,
    log: Path,
    *flags: str,
    prefix: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    wait: bool = True,
    forks: bool = False,
) -> Iterator[Server]:
    """A server of ``model`` at a free port; ``prefix`` goes before the command's own words.

    :param forks: its processes are forked from one that has torch (see ``forked_schedulers``).
    """
    words = ["serve", "--model", str(model), "--port", "0", *flags]
    env = {**os.environ, **(environment or {})}
    process: subprocess.Popen[bytes] | ForkedProgram
    if forks:
        log.touch()
        process = ForkedProgram(words, log, env)
    else:
        command = [*prefix, sys.executable, "-m", "sgl_aspects", *words]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
    server = Server(process, log, model.name)
    try:
        if wait:
            server.wait_until_serving()
        yield server
    finally:
        end(process)
