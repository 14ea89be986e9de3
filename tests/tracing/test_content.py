"""Prompts and answers: opt-in, truncated, redacted, and never recorded when that fails."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines import SGLANG
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.content import CAPTURE, INPUT, OUTPUT, REDACT, ContentCapture
from tests.support.tiny_models import llama_fixture

pytestmark = pytest.mark.usefixtures("forked_schedulers", "forked_collectors")

SECRET = "xylophone-quartz"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"my name is {SECRET}"}]


model = llama_fixture(max_position_embeddings=512)


@pytest.fixture
def redactions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"redactions_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        f"def hide(text): return text.replace({SECRET!r}, '***')\n"
        "def fail(text): raise ValueError(text)\n"
        "def odd(text): return text.encode()\n"
        "class Rules:\n"
        "    @staticmethod\n"
        "    def nothing(text): return ''\n"
        "constant = 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def roots(file: Path) -> list[dict[str, Any]]:
    """The attributes of the request spans."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    scopes = [scope for line in lines for one in line["resourceSpans"] for scope in one["scopeSpans"]]
    spans = [span for scope in scopes for span in scope["spans"] if span["kind"] == 2]
    return [{pair["key"]: pair["value"].get("stringValue") for pair in span["attributes"]} for span in spans]


def chat_and_generate(model: Path, file: Path) -> tuple[str, list[dict[str, Any]]]:
    """One conversation, one text and one list of tokens; gives what the first was answered, and the spans."""
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with attach(level=1, file=str(file)), Engine(model_path=model, max_total_tokens=512) as engine:
        answer = engine.generate(CHAT, sampling)
        engine.generate(f"{SECRET} again", sampling)
        engine.generate([5, 6, 7], sampling)
    return answer.text, roots(file)


def test_nothing_is_recorded_by_default(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    text, spans = chat_and_generate(model, file)
    assert len(spans) == 3
    assert SECRET not in file.read_text()
    assert not any(INPUT in attributes or OUTPUT in attributes for attributes in spans)
    assert text


def test_messages_in_the_form_of_the_conventions(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redactions: str
) -> None:
    monkeypatch.setenv(CAPTURE, "true")
    monkeypatch.setenv(REDACT, f"{redactions}:hide")
    file = tmp_path / "traces.jsonl"
    text, spans = chat_and_generate(model, file)
    chat, completion, tokens = spans
    assert json.loads(chat[INPUT]) == [
        {"role": "system", "parts": [{"type": "text", "content": "be brief"}]},
        {"role": "user", "parts": [{"type": "text", "content": "my name is ***"}]},
    ]
    assert json.loads(chat[OUTPUT]) == [
        {"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": "length"}
    ]
    assert json.loads(completion[INPUT])[0]["parts"][0]["content"] == "*** again"
    assert INPUT not in tokens
    assert OUTPUT in tokens
    assert SECRET not in file.read_text()


@pytest.mark.parametrize("name", ["fail", "odd", "constant", "missing", "Rules.missing"])
def test_where_the_redaction_fails_nothing_is_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, redactions: str, name: str
) -> None:
    monkeypatch.setenv(CAPTURE, "span_only")
    monkeypatch.setenv(REDACT, f"{redactions}:{name}")
    capture = ContentCapture.from_environment()
    assert capture is not None
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert capture.input([("user", SECRET)]) is None
            assert capture.output(SECRET, "stop") is None
    assert len(caplog.records) == 1
    assert REDACT in caplog.text
    assert SECRET not in caplog.text


def test_a_redaction_in_a_class_and_one_whose_module_is_missing(
    monkeypatch: pytest.MonkeyPatch, redactions: str
) -> None:
    assert ContentCapture(10, f"{redactions}:Rules.nothing").input([("user", SECRET)]) is not None
    assert ContentCapture(10, "no_such_module:function").input([("user", SECRET)]) is None


def test_the_redaction_sees_the_whole_text_and_the_span_holds_its_beginning(redactions: str) -> None:
    capture = ContentCapture(12, f"{redactions}:hide")
    found = capture.output(f"0123456789{SECRET}", "stop")
    assert found is not None
    assert json.loads(found)[0]["parts"][0]["content"] == "0123456789**"  # not a part of the secret


def test_of_a_long_conversation_the_last_messages_are_kept() -> None:
    capture = ContentCapture(10)
    found = capture.input([("user", "a" * 8), ("assistant", "b" * 8), ("user", "c" * 4)])
    assert found is not None
    contents = [message["parts"][0]["content"] for message in json.loads(found)]
    assert contents == ["b" * 6, "c" * 4]
    assert capture.input([]) == "[]"
    assert capture.input(None) is None


@pytest.mark.parametrize(
    ("value", "captures"),
    [
        ("", False),
        ("false", False),
        ("NO_CONTENT", False),
        ("event_only", False),
        ("True", True),
        ("SPAN_AND_EVENT", True),
    ],
)
def test_values_that_turn_content_on(monkeypatch: pytest.MonkeyPatch, value: str, captures: bool) -> None:
    monkeypatch.setenv(CAPTURE, value)
    assert (ContentCapture.from_environment() is not None) is captures


def test_sglang_s_prompts_and_pieces_are_read() -> None:
    read: Callable[[Any], Any] = SGLANG.reader("request.messages")
    assert read(SimpleNamespace(text="hello")) == [("user", "hello")]
    assert read(SimpleNamespace(text=["a", "b"])) == [("user", "a"), ("user", "b")]
    assert read(SimpleNamespace(text=None, input_ids=[1])) is None
    piece = SGLANG.reader("outputs.text")
    assert piece((SimpleNamespace(output_strs=["x", "y"]), 1)) == "y"
    assert piece((SimpleNamespace(), 0)) is None
