"""The names of spans, attributes and metrics: those of the conventions, their older ones, and the table."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines import EMBEDDED
from sgl_aspects.tracing import attach, session
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.options import TraceOptions
from tests.support.otlp_receiver import Receiver
from tests.support.pages import made_by
from tests.support.processes import command, output_of
from tests.support.tree import ROOT

PAGE = ROOT / "docs" / "names" / "README.md"
OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"


def test_the_table_is_made_of_the_code() -> None:
    assert made_by("make_names").page() == PAGE.read_text(), "run python docs/make_names.py"


def test_the_names_of_the_conventions_are_theirs() -> None:
    folder = Path(
        pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes").__file__
    )
    text = "".join(path.read_text() for path in folder.parents[1].rglob("*.py"))
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.endswith("| conventions |")]
    names = [row[1].strip(" `") for row in rows if " " not in row[1].strip()]
    assert len(names) > 25
    templates = {"http.request.header.x-request-id": "http.request.header"}
    assert [name for name in names if f'"{templates.get(name, name)}"' not in text] == []


@pytest.mark.parametrize(
    ("opted_in", "has_older"),
    [("", True), ("http,database/dup", True), ("http, gen_ai_latest_experimental", False)],
)
def test_the_older_name_of_the_provider_is_kept_until_the_newest_are_asked_for(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, opted_in: str, has_older: bool
) -> None:
    monkeypatch.setenv(OPT_IN, opted_in)
    chosen: list[TraceOptions] = []

    def weave(_: object, options: TraceOptions) -> list[Any]:
        chosen.append(options)
        return []

    monkeypatch.setattr(session, "weave_observers", weave)
    with attach(endpoint=receiver.endpoint, level=1) as begun:
        calls = Trackers.of(EMBEDDED, begun.recorder, *chosen).calls
        calls.end(calls.begin(SimpleNamespace(), None, 1, rid="r", operation="chat"), "length")
    (span,) = receiver.spans
    (point,) = receiver.points("gen_ai.server.request.duration")
    for found in (span.attributes, point.attributes):
        assert found["gen_ai.provider.name"] == "sgl_aspects"
        assert found.get("gen_ai.system") == ("sgl_aspects" if has_older else None)


def test_a_value_that_nobody_knows_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPT_IN, "http/dup,gen_ai_newest")
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"
    done = command("run", "--file", tmp_path / "spans.jsonl", "--", sys.executable, "-c", program)
    output_of(done)
    told = f"{OPT_IN}: unknown gen_ai_newest; tracing reads gen_ai_latest_experimental"
    assert done.stderr.count(told) == 1
    assert "http/dup" not in done.stderr
