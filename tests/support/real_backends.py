"""Phoenix and Prometheus, started on loopback, and queried by their own interfaces for what arrived."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes import end, free_port

_START_SECONDS = 180


def get_json(url: str, **query: str) -> Any:
    """The answer to a GET; None where there is none yet."""
    try:
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


@contextmanager
def _running(command: list[str], ready: str, folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A program from PATH, until it answers at ``ready``; it is gone afterwards."""
    program = shutil.which(command[0])
    assert program, f"{command[0]} is not on PATH: run `make test-integration`, which installs it"
    log = folder / f"{command[0]}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder), **environment},
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not _answers(ready):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield
    finally:
        end(process)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


class Phoenix:
    """``endpoints`` by protocol."""

    def __init__(self, http: int, grpc: int) -> None:
        self._url = f"http://127.0.0.1:{http}"
        self.endpoints = {"http/protobuf": self._url, "grpc": f"http://127.0.0.1:{grpc}"}

    def spans(self, project: str) -> list[dict[str, Any]]:
        """Everything that arrived for a project."""
        found: list[dict[str, Any]] = []
        query = {"limit": "1000"}
        while True:
            page = get_json(f"{self._url}/v1/projects/{project}/spans", **query)
            if page is None:
                return found
            found += page["data"]
            if not page.get("next_cursor"):
                return found
            query["cursor"] = page["next_cursor"]


@contextmanager
def phoenix(folder: Path) -> Iterator[Phoenix]:
    http, grpc = free_port(), free_port()
    environment = {
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http),
        "PHOENIX_GRPC_PORT": str(grpc),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with _running(["phoenix", "serve"], f"http://127.0.0.1:{http}/healthz", folder, environment):
        yield Phoenix(http, grpc)


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def value(self, query: str) -> float | None:
        """The present value of a query for one number; None if there is none."""
        answer = get_json(f"{self._url}/api/v1/query", query=query)
        results = answer["data"]["result"] if answer else []
        return float(results[0]["value"][1]) if results else None

    def types(self) -> dict[str, str]:
        """The kind of each metric that was scraped, by name."""
        answer = get_json(f"{self._url}/api/v1/metadata")
        return {name: entries[0]["type"] for name, entries in answer["data"].items()} if answer else {}


@contextmanager
def prometheus(folder: Path, scraped: int) -> Iterator[Prometheus]:
    """It scrapes the port ``scraped`` of loopback twice a second."""
    port = free_port()
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
        "scrape_configs:\n"
        "- job_name: engine\n"
        f"  static_configs: [{{targets: ['127.0.0.1:{scraped}']}}]\n"
    )
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--web.listen-address=127.0.0.1:{port}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    with _running(command, f"http://127.0.0.1:{port}/-/ready", folder, {}):
        yield Prometheus(port)
