"""A client that stamps the parts of a streamed answer, and may be slow."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from tests.support.processes import wait_until


class Stream:
    """A streamed answer, read in a thread. ``stamps``: when its chunks came.

    ``rest``: seconds for which it reads nothing after the first chunk, with buffers as small as they can be:
    with small segments, the sender's are small, too.
    """

    def __init__(
        self, port: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str], rest: float
    ) -> None:
        self.stamps: list[float] = []
        self.problem, self._is_over, self._rest = "", threading.Event(), rest
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        if rest:
            slow = self._connection.sock = socket.socket()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            slow.connect(("127.0.0.1", port))
        self._ask = path, json.dumps(body), {"content-type": "application/json", **headers}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._connection.request("POST", *self._ask)
            response = self._connection.getresponse()
            if response.status != 200:
                self.problem = f"{response.status}: {response.read()[:500]!r}"
            while not self.problem and (line := response.readline()):
                if line.startswith(b"data: {"):
                    self.stamps.append(time.monotonic())
                    if len(self.stamps) == 1:
                        time.sleep(self._rest)
                if self._is_over.is_set():
                    response.close()
                    break
        except (OSError, http.client.HTTPException) as error:
            self.problem = "" if self._is_over.is_set() else repr(error)
        finally:
            self._connection.close()

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in pairwise(self.stamps)]

    def wait(self) -> None:
        wait_until(lambda: bool(self.stamps or self.problem), 120)
        assert not self.problem, self.problem

    def leave(self) -> None:
        """Hang up with the next chunk."""
        self._is_over.set()

    def read(self) -> None:
        self._thread.join(240)
        assert not self._thread.is_alive(), "no answer in four minutes"
        assert not self.problem, self.problem
