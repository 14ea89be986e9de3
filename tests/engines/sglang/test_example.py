"""examples/trace_sglang.sh: real SGLang, traced by the command that is printed, and the page of its run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sgl_aspects.analysis.spans import read_spans
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "trace_sglang.sh"

# `serve` writes the whole command of a server; the script writes its beginning itself.
ADAPTER = """#!/bin/sh
shift 4
model=$1; shift
exec {script} "$model" spans.jsonl "$@"
"""


def test_the_script_traces_a_server(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.sh"
    adapter.write_text(ADAPTER.format(script=SCRIPT))
    adapter.chmod(0o755)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    model = make_mini(tmp_path / "model")
    with serve(model, tmp_path / "log", prefix=[str(adapter)], environment={"PATH": path}) as server:
        for text in ("the quick brown fox", "jumps over the lazy dog"):
            assert server.chat(text).usage["completion_tokens"] == 8
    spans = read_spans(tmp_path / "spans.jsonl")
    requests = [span for span in spans if span.is_server]
    assert len(requests) >= 2  # SGLang warms itself up with one
    chats = [span for span in requests if span.name == "chat mini"]
    assert len(chats) == 2
    steps = [span for span in spans if span.name == "scheduler.step"]
    for chat in chats:
        children = {span.name for span in spans if span.parent_id == chat.span_id}
        assert {"tokenize", "queue", "prefill", "decode", "detokenize"} <= children
        assert len([step for step in steps if chat.span_id in step.links]) >= 8
    command = [sys.executable, "-m", "sgl_aspects", "report", "spans.jsonl", "-o", "report.html"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"report.html: {len(requests)} requests")
