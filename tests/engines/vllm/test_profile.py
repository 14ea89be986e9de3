"""The kernels of real vLLM's forward passes, on the CPU, while it answers (make test-vllm)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from sgl_aspects.analysis.sources import load_run
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_kernels_and_details_are_below_forward_passes_that_are_there(tmp_path: Path) -> None:
    model, file = make_mini(tmp_path / "mini"), tmp_path / "traces.jsonl"
    command = [sys.executable, "-m", "sgl_aspects", "run", "--level", "4", "--file", str(file), "--"]
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    with serve(model, tmp_path / "log", prefix=command, environment=environment) as server:
        for _ in range(2):
            assert "kernels in 3 forward passes" in server.profile(3)
    # vLLM may end without waiting for the collector, which writes the rest.
    deadline = time.monotonic() + 60
    while True:
        spans = load_run(str(file)).spans
        names = {span.span_id: span.name for span in spans}
        parents = {span.parent_id for span in spans if span.name == "kernel"}
        orphans = [span.name for span in spans if span.parent_id and span.parent_id not in names]
        if len(parents) == 6 and not orphans:
            break
        assert time.monotonic() < deadline, (parents, orphans)
        time.sleep(0.2)
    assert {names[parent] for parent in parents} == {"forward"}
