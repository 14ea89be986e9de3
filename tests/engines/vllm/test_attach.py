"""Real vLLM under load, started without us: attached to and detached from, with unchanged answers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.support.attached_load import Streams
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_two_rounds_under_sixteen_streams(tmp_path: Path) -> None:
    make_mini(tmp_path / "mini")
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    with serve(
        tmp_path / "mini", tmp_path / "log", more=["--dtype", "float32"], environment=environment
    ) as server:
        streams = Streams.begin(server, "/v1/completions")
        for number in range(2):
            streams.attach(tmp_path / f"spans-{number}.jsonl")
        streams.end(processes=3)  # the API server, the engine core and its worker
