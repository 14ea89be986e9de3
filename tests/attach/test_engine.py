"""The embedded engine, attached to while it serves: requests under way are marked, and none fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.attachable import attaching, finish, running
from tests.support.processes import wait_until
from tests.support.tiny_models import make_llama

pytestmark = [pytest.mark.attach, pytest.mark.usefixtures("ptrace")]

_ENGINE = """
from sgl_aspects.runtime import Engine, SamplingParams

if __name__ == "__main__":
    params = SamplingParams(max_new_tokens=100, ignore_eos=True, temperature=0)
    with Engine(model_path=MODEL) as engine:
        first = engine.generate("the sea", params).text
        print("ready", flush=True)
        while engine.generate("the sea", params).text == first:
            print("answered", flush=True)
        print("wrong", flush=True)
"""


def _spans(file: Path) -> list[dict[str, Any]]:
    return [
        span
        for line in file.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _flags(span: dict[str, Any]) -> set[str]:
    return {one["key"] for one in span.get("attributes", ())}


def test_requests_under_way_are_marked_and_none_has_failed(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    source = _ENGINE.replace("MODEL", repr(str(tmp_path / "model")))
    with running(tmp_path, source=source) as program:
        wait_until(lambda: program.states.count("answered") > 1 or not program.lives())
        assert program.lives(), program.said
        output = finish(attaching(program, "--for", "3s"))
        assert "NOT" not in output, output
        assert output.count("originals are back") == 2, output  # the caller's process and the scheduler's
        before = program.states.count("answered")
        wait_until(lambda: program.states.count("answered") > before + 1)
        assert set(program.states) == {"ready", "answered"}
    spans = _spans(tmp_path / "spans.jsonl")
    requests = [span for span in spans if span["name"].startswith("text_completion")]
    assert any("sgl_aspects.attached" in _flags(span) for span in requests)
    assert any("sgl_aspects.detached" in _flags(span) for span in spans)
    assert any(not _flags(span) & {"sgl_aspects.attached", "sgl_aspects.detached"} for span in requests)
    assert [span["name"] for span in spans if span.get("status", {}).get("code") == 2] == []
    assert {"scheduler.step", "decode"} <= {span["name"] for span in spans}
