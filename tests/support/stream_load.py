"""Streams requests to an engine's server until standard input ends; then prints their results as JSON.

python -m tests.support.stream_load PORT PATH STREAMS < pipe
"""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.threads import in_threads

_TOKENS = 64


@dataclass
class Request:
    """One request as its client saw it; times in nanoseconds since the epoch."""

    prompt: str
    begun_ns: int
    status: int = 0
    text: str = ""
    chunks_ns: list[int] = field(default_factory=list)
    error: str = ""

    @property
    def ended_ns(self) -> int:
        return self.chunks_ns[-1] if self.chunks_ns else self.begun_ns


class Load:
    """The load in a process of its own, so that its work does not disturb the test's clock."""

    def __init__(self, port: int, path: str, streams: int = 16) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.stream_load", str(port), path, str(streams)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )

    def end(self) -> list[Request]:
        """Lets the requests that are under way finish."""
        output, _ = self._process.communicate(timeout=300)
        assert self._process.returncode == 0
        return [Request(**found) for found in json.loads(output)]


def longest_gap(requests: list[Request], begin_ns: int, end_ns: int) -> float:
    """Return the longest time, in seconds, in which no stream got a chunk."""
    times = sorted(time for request in requests for time in request.chunks_ns if begin_ns <= time <= end_ns)
    return max((late - early for early, late in itertools.pairwise(times)), default=0) / 1e9


def median_gap(requests: list[Request], begin_ns: int, end_ns: int) -> float:
    """The median time, in seconds, between two chunks of a stream: a decode step."""
    gaps = sorted(
        late - early
        for request in requests
        for early, late in itertools.pairwise(request.chunks_ns)
        if begin_ns <= early and late <= end_ns
    )
    return gaps[len(gaps) // 2] / 1e9 if gaps else 0.0


def _ask(port: int, path: str, request: Request) -> None:
    chat = path.endswith("/completions")
    body: dict[str, Any] = {"stream": True}
    if chat:
        body |= {"model": "mini", "prompt": request.prompt, "max_tokens": _TOKENS, "temperature": 0}
    else:
        sampling = {"max_new_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"text": request.prompt, "sampling_params": sampling}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        request.status = response.status
        for line in response:
            if line.startswith(b"data: {"):
                request.chunks_ns.append(time.time_ns())
                found = json.loads(line[len("data: ") :])
                if chat:
                    request.text += found["choices"][0].get("text") or "" if found["choices"] else ""
                else:
                    request.text = found["text"]
    except (OSError, http.client.HTTPException, ValueError) as error:
        request.error = repr(error)
    finally:
        connection.close()


def main(port: int, path: str, streams: int) -> None:
    found: list[Request] = []
    is_over = threading.Event()

    def stream(number: int) -> None:
        while not is_over.is_set():
            request = Request(f"stream {number} tells of the sea and of {number * 7} ships", time.time_ns())
            found.append(request)
            _ask(port, path, request)

    with in_threads(*(partial(stream, number) for number in range(streams)), seconds=300):
        sys.stdin.read()
        is_over.set()
    json.dump([asdict(request) for request in found], sys.stdout)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
