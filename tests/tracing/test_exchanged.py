"""The HTTP server's side of a request, whatever engine answers it."""

from __future__ import annotations

import pytest

from sgl_aspects.tracing.lifecycle.exchanges import operation_of


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/messages", "chat"),
        ("/v1/responses", "chat"),
        ("/api/chat", "chat"),
        ("/v1/completions", "text_completion"),
        ("/generate", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/encode", "embeddings"),
        ("/health", None),
        ("/v1/models", None),
        ("/tokenize", None),
    ],
)
def test_a_path_determines_the_operation(path: str, operation: str | None) -> None:
    assert operation_of(path) == operation
