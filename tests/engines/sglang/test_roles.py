"""What SGLang's room reads of its objects, on stand-ins for them: needs no SGLang."""

from __future__ import annotations

from types import SimpleNamespace

from sgl_aspects.engines import SGLANG


def test_an_embedding_has_no_limit_of_tokens() -> None:
    """SGLang asks for 0 tokens where the caller wants an embedding: that is not what the request says."""
    read = SGLANG.reader("request.max_tokens")
    embedding = SimpleNamespace(sampling_params={"max_new_tokens": 0}, is_cross_encoder_request=False)
    assert read(embedding) is None
    assert read(SimpleNamespace(sampling_params={"max_new_tokens": 0})) == 0
    assert read(SimpleNamespace(sampling_params=[{"max_new_tokens": 7}])) == 7
