"""A client in a process of its own that streams many answers at once, and prints when their first parts came.

python -m tests.support.streaming_client PORT < requests.json > answers.json

The kernel stamps what it receives (SO_TIMESTAMPNS), so that a client that waits for a processor does not see
its own waiting as the server's. But unread parts are joined and get the stamp of the last one: if several
are read at once, the first came between ``first_from_ns``, when there was nothing yet, and ``first_ns``;
otherwise the two are equal. Times are nanoseconds since the epoch; ``sent_ns`` and
``sent_until_ns`` are read around the system call that sends the request.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import selectors
import socket
import struct
import sys
import time
from typing import Any

SO_TIMESTAMPNS = 35  # Linux; the socket module has no name for it
_TIMESTAMP = struct.Struct("qq")


class Exchange:
    """One request and its response."""

    def __init__(self, port: int, request: dict[str, Any]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        body = json.dumps(request["body"]).encode()
        headers = {"content-type": "application/json", "connection": "close", "content-length": len(body)}
        lines = [f"{name}: {value}" for name, value in {**headers, **request["headers"]}.items()]
        self.message = (
            "\r\n".join([f"POST {request['path']} HTTP/1.1", "host: localhost", *lines, "", ""]).encode()
            + body
        )
        self.received = b""
        self.first_from_ns = self.first_ns = self.sent_ns = self.sent_until_ns = self.empty_ns = 0

    def send(self) -> None:
        self.sent_ns = time.time_ns()
        with contextlib.suppress(ConnectionError):  # a server may hang up on a bad request
            self.socket.sendall(self.message)
        self.sent_until_ns = self.empty_ns = time.time_ns()

    def receive(self) -> bool:
        """Return whether more is to come."""
        try:
            data, ancillary, *_ = self.socket.recvmsg(65536, 256)
        except ConnectionError:
            return False
        self.received += data
        parts = 0 if self.first_ns else self.received.count(b"data: {")
        if parts:
            stamps = [one[:16] for level, kind, one in ancillary if kind == SO_TIMESTAMPNS]
            seconds, nanoseconds = _TIMESTAMP.unpack(stamps[0]) if stamps else (0, time.time_ns())
            self.first_ns = seconds * 1_000_000_000 + nanoseconds
            self.first_from_ns = self.first_ns if parts == 1 else min(self.empty_ns, self.first_ns)
        return bool(data)

    def result(self) -> dict[str, Any]:
        names = ("sent_ns", "sent_until_ns", "first_from_ns", "first_ns")
        times = {name: getattr(self, name) for name in names}
        response = http.client.HTTPResponse(_Received(self.received))  # type: ignore[arg-type]
        try:
            response.begin()
            return {"status": response.status, "text": response.read().decode(), **times}
        except http.client.HTTPException as error:
            return {"status": 0, "text": type(error).__name__, **times}


class _Received:
    """The part of a socket that a response uses."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


def main() -> None:
    exchanges = [Exchange(int(sys.argv[1]), request) for request in json.load(sys.stdin)]
    with selectors.DefaultSelector() as selector:
        for exchange in exchanges:
            selector.register(exchange.socket, selectors.EVENT_READ, exchange)
        for exchange in exchanges:
            exchange.send()
        while selector.get_map():
            now = time.time_ns()
            ready = [key for key, _ in selector.select(120)]
            for key in {*selector.get_map().values()}.difference(ready):
                key.data.empty_ns = now
            for key in ready:
                if not key.data.receive():
                    selector.unregister(key.fileobj)
    print(json.dumps([exchange.result() for exchange in exchanges]))


if __name__ == "__main__":
    main()
