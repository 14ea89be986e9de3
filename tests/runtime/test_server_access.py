"""Who may do what on a server without a key, such as pages in a browser; and the words of a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http_server import Server, serving
from tests.support.tiny_models import llama_fixture

model = llama_fixture()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server") / "log", forks=True) as server:
        yield server


CHANGES: dict[str, dict[str, object]] = {
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/start_profile": {"num_steps": 1},
}


@pytest.mark.parametrize("path", CHANGES)
def test_without_a_key_or_the_flag_weights_stay_and_no_profile_is_taken(path: str, server: Server) -> None:
    status, answer = server.request("POST", path, CHANGES[path])
    assert status == 403
    assert "--admin" in answer["error"]["message"]
    assert "SGL_ASPECTS_API_KEY" in answer["error"]["message"]


def test_with_a_key_or_the_flag_the_client_is_logged(model: Path, tmp_path: Path) -> None:
    for number, (flags, headers) in enumerate(
        [(["--admin"], {}), (["--api-key=k"], {"authorization": "Bearer k"})]
    ):
        log = tmp_path / f"log-{number}"
        with serving(model, log, *flags, forks=True) as server:
            status, answer = server.request(
                "POST", "/update_weights_from_disk", {"model_path": "/no\x1bwhere"}, headers
            )
            assert (status, answer["error"]["param"]) == (400, "model_path")
            assert server.request("POST", "/start_profile", {"num_steps": 1}, headers)[0] == 200
        text = log.read_text()
        assert "'/no\\x1bwhere' requested by 127.0.0.1:" in text
        assert "profile of 1 steps requested by 127.0.0.1:" in text
        assert "\x1b" not in text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1"])
def test_a_page_whose_name_leads_to_this_machine_gets_no_answer(host: str, server: Server) -> None:
    """As after DNS rebinding: the browser takes the server for the page's own."""
    for method, path in (("GET", "/v1/models"), ("GET", "/health"), ("POST", "/v1/completions")):
        status, answer = server.request(method, path, headers={"host": host})
        assert status == 421, answer
        assert "127.0.0.1" in answer["error"]["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8000", "127.0.0.2"])
def test_the_names_of_this_machine_are_answered(host: str, server: Server) -> None:
    assert server.request("GET", "/v1/models", headers={"host": host})[0] == 200


def test_with_a_key_any_name_is_answered(model: Path, tmp_path: Path) -> None:
    """As behind a proxy: a page does not have the key."""
    with serving(model, tmp_path / "log", "--api-key=k", forks=True) as server:
        headers = {"host": "llm.example", "authorization": "Bearer k"}
        assert server.request("GET", "/v1/models", headers=headers)[0] == 200


def test_the_document_has_the_models_name_and_the_need_of_a_key(
    model: Path, server: Server, tmp_path: Path
) -> None:
    _, document = server.request("GET", "/openapi.json")
    assert document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"] == ["tiny"]
    assert {"200", "4XX", "5XX"} == document["paths"]["/v1/completions"]["post"]["responses"].keys()
    assert "security" not in document
    key = {"authorization": "Bearer k"}
    with serving(model, tmp_path / "log", "--api-key=k", forks=True) as closed:
        assert closed.request("GET", "/openapi.json")[0] == 401
        _, document = closed.request("GET", "/openapi.json", None, key)
    assert document["security"] == [{"key": []}]
    assert document["paths"]["/health"]["get"]["security"] == []


def test_a_refusal_names_the_field_as_the_client_sent_it(server: Server) -> None:
    conversation = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    for given, message in (
        ({"max_tokens": 100_000}, " and max_tokens=100000 do not fit"),
        ({"max_completion_tokens": 100_000}, " and max_completion_tokens=100000 do not fit"),
        ({"stream_options": {"usage": True}}, "stream_options.usage: this field is not known"),
        ({"metadata": {"1": 5}}, "metadata.1=5: "),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema: this field is missing"),
    ):
        status, answer = server.request("POST", "/v1/chat/completions", conversation | given)
        assert (status, message in answer["error"]["message"]) == (400, True), answer


def test_a_body_that_is_said_to_be_of_any_size_is_refused_at_once(server: Server) -> None:
    assert server.request("POST", "/v1/completions", b"x", {"content-length": "9" * 20})[0] == 413
