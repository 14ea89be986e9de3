"""Clients that ask for more work than their requests are worth: many faults in one body, an unread answer."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from sgl_aspects.runtime.server.protocol import ChatRequest, CompletionRequest
from tests.support.http_server import LOCAL, Server, serving
from tests.support.processes import wait_until
from tests.support.tiny_models import make_llama

MANY = 10_000
WORDS: dict[str, Any] = {str(number): 0 for number in range(MANY)}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "x"}
BODIES: dict[str, tuple[type[ChatRequest] | type[CompletionRequest], dict[str, Any]]] = {
    "prompt": (CompletionRequest, {"model": "m", "prompt": [1.5] * MANY}),
    "prompts": (CompletionRequest, {"model": "m", "prompt": [[1.5] * MANY]}),
    "messages": (ChatRequest, {"model": "m", "messages": [0] * MANY}),
    "parts": (ChatRequest, {"model": "m", "messages": [{"role": "user", "content": [{}] * MANY}]}),
    "stop": (ChatRequest, CHAT | {"stop": [0] * MANY}),
    "stop_token_ids": (ChatRequest, CHAT | {"stop_token_ids": [0.5] * MANY}),
    "unknown fields": (CompletionRequest, COMPLETION | WORDS),
    "fields of a message": (ChatRequest, {"model": "m", "messages": [CHAT["messages"][0] | WORDS]}),
    "metadata": (ChatRequest, CHAT | {"metadata": WORDS}),
    "logit_bias": (CompletionRequest, COMPLETION | {"logit_bias": dict.fromkeys(WORDS, "x")}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_with_many_faults_is_refused_for_the_first(name: str) -> None:
    """Collecting all of them stopped the server for a minute, and took 3 GB."""
    kind, body = BODIES[name]
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    assert refused.value.error_count() < 10


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits half a second for a request."""
    folder = tmp_path_factory.mktemp("impatient")
    make_llama(folder / "tiny")
    with serving(folder / "tiny", folder / "log", "--body-timeout", "0.5", forks=True) as server:
        yield server


def test_a_client_that_does_not_read_its_answers_is_hung_up_on(impatient: Server) -> None:
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((LOCAL, impatient.port))
        client.setblocking(False)
        request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"

        def is_hung_up_on() -> bool:
            try:
                client.send(request * 100)  # more than both sides hold unread, in the end
            except BlockingIOError:
                return False
            except OSError:
                return True
            return False

        wait_until(is_hung_up_on)
    wait_until(impatient.answers)


def test_connections_on_which_no_request_comes_are_closed(impatient: Server) -> None:
    """On busy processors, before this test has written to them, too: that is an error on its side."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    for part in (b"", head):
        with (
            socket.create_connection((LOCAL, impatient.port), timeout=60) as silent,
            contextlib.suppress(ConnectionError),
        ):
            silent.sendall(part)
            assert silent.recv(100) == b""
    body = json.dumps({**COMPLETION, "model": "tiny", "max_tokens": 500, "ignore_eos": True}).encode()
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)

    def is_answered() -> bool:
        """Unless this test got no processor for half a second after it had connected."""
        with (
            socket.create_connection((LOCAL, impatient.port), timeout=60) as waiting,
            contextlib.suppress(ConnectionError),
        ):
            waiting.sendall(head + body)
            return waiting.recv(100).startswith(b"HTTP/1.1 200 ")
        return False

    wait_until(is_answered)  # one that waits for its answer is not silent
