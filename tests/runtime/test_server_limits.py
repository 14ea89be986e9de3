"""Clients that ask for more work than their requests are worth: many faults in one body, an unread answer."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sgl_aspects.runtime.server.protocol import ChatRequest, CompletionRequest
from tests.support.http_server import LOCAL, serving
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


def test_a_client_that_does_not_read_its_answers_is_hung_up_on(tmp_path: Path) -> None:
    make_llama(tmp_path / "tiny")
    with serving(tmp_path / "tiny", tmp_path / "log", "--body-timeout", "1", forks=True) as server:
        client = socket.socket()
        with client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((LOCAL, server.port))
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
        assert server.answers()
