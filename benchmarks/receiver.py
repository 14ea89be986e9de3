"""A backend on loopback, in a process of its own, that counts the spans it is sent.

python -m benchmarks.receiver PORT well|slow|refusing prints its port. POST /NAME/v1/traces takes OTLP, GET /
returns the counts by name as JSON; other posts (ddtrace has its own agent protocol) are answered but not
counted.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.turns import step_aside

counts: collections.Counter[str] = collections.Counter()
state = "well"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(json.dumps(counts).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if state == "slow":
            time.sleep(2)
        if state == "refusing":
            self.send_error(503)
            return
        name, _, rest = self.path.lstrip("/").partition("/")
        if rest == "v1/traces":
            message = ExportTraceServiceRequest.FromString(body)
            counts[name] += sum(
                len(scope.spans) for resource in message.resource_spans for scope in resource.scope_spans
            )
            self._answer(b"")
        else:
            self._answer(b"{}")

    def do_PUT(self) -> None:
        self.do_POST()

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def start(port: int = 0, state: str = "well") -> tuple[subprocess.Popen[str], int]:
    """A running receiver and its port, 0 for any that is free. ``state``: well, slow or refusing."""
    command = [sys.executable, "-m", "benchmarks.receiver", str(port), state]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


@contextmanager
def receiver() -> Iterator[str]:
    """A running receiver's URL."""
    process, port = start()
    with process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def counted(url: str) -> dict[str, int]:
    """Return the number of spans sent under each name."""
    with urllib.request.urlopen(url) as answer:
        found: dict[str, int] = json.load(answer)
        return found


if __name__ == "__main__":
    step_aside()
    port, state = int(sys.argv[1] if sys.argv[1:] else 0), sys.argv[2] if sys.argv[2:] else "well"
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
