"""A backend on loopback, in a process of its own, that counts the spans it is sent.

POST /NAME/v1/traces takes OTLP; GET / returns the counts as JSON, by name, and of all spans of requests:
"requests", and "refused" for those that were answered with 400. Other posts are only answered.
"""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmarks.turns import step_aside
from sgl_aspects.tracing.schema import STATUS_CODE

counts: collections.Counter[str] = collections.Counter()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(json.dumps(counts).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name, _, rest = self.path.lstrip("/").partition("/")
        if rest == "v1/traces":
            message = ExportTraceServiceRequest.FromString(body)
            scopes = [scope for resource in message.resource_spans for scope in resource.scope_spans]
            for span in (span for scope in scopes for span in scope.spans):
                counts[name] += 1
                if span.kind == span.SPAN_KIND_SERVER:
                    status = [each.value.int_value for each in span.attributes if each.key == STATUS_CODE]
                    counts["refused" if status == [400] else "requests"] += 1
            self._answer(b"")
        else:
            self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextmanager
def receiver() -> Iterator[str]:
    """A running receiver's URL."""
    command = [sys.executable, "-m", "benchmarks.receiver"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def counted(url: str) -> dict[str, int]:
    """Return the number of spans sent under each name."""
    with urllib.request.urlopen(url) as answer:
        found: dict[str, int] = json.load(answer)
        return found


if __name__ == "__main__":
    step_aside()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
