"""The embedded engine, attached to while it serves: requests under way are marked, and none fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.attachable import attaching, attribute_names, finish, running, spans_in
from tests.support.processes import wait_until
from tests.support.tiny_models import make_llama

pytestmark = [pytest.mark.attach, pytest.mark.usefixtures("ptrace")]

# The garbage collector is off: it would not see the objects of an engine that has frozen its heap either.
_ENGINE = """
import gc
from sgl_aspects.runtime import Engine, SamplingParams

gc.disable()

if __name__ == "__main__":
    params = SamplingParams(max_new_tokens=100, ignore_eos=True, temperature=0)
    with Engine(model_path=MODEL) as engine:
        first = engine.generate("the sea", params).text
        print("ready", flush=True)
        while engine.generate("the sea", params).text == first:
            print("answered", flush=True)
        print("wrong", flush=True)
"""


def _rings_held(process_id: int) -> dict[int, list[str]]:
    """The recordings that a program and its children still have in their memory."""
    children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    maps = {each: Path(f"/proc/{each}/maps").read_text() for each in [process_id, *map(int, children)]}
    return {
        each: found
        for each, text in maps.items()
        if (found := [line for line in text.splitlines() if ".ring" in line])
    }


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
        assert _rings_held(program.process.pid) == {}
    spans = spans_in(tmp_path / "spans.jsonl")
    requests = [span for span in spans if span["name"].startswith("text_completion")]
    assert any("sgl_aspects.attached" in attribute_names(span) for span in requests)
    assert any("sgl_aspects.detached" in attribute_names(span) for span in spans)
    whole = [
        span
        for span in requests
        if not attribute_names(span) & {"sgl_aspects.attached", "sgl_aspects.detached"}
    ]
    assert whole
    for request in whole:
        names = {span["name"] for span in spans if span["traceId"] == request["traceId"]}
        assert {"tokenize", "queue", "prefill", "decode"} <= names
    # Nothing was recorded in one process for which the other one had no hooks any more.
    last = max(int(span["startTimeUnixNano"]) for span in requests)
    steps = [span for span in spans if span["name"] == "scheduler.step"]
    assert [step for step in steps if int(step["startTimeUnixNano"]) > last and not step.get("links")] == []
    assert [span["name"] for span in spans if span.get("status", {}).get("code") == 2] == []
    assert {"scheduler.step", "decode"} <= {span["name"] for span in spans}
