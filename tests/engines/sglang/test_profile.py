"""The kernels of real SGLang's forward passes, on the CPU, while it answers (make test-sglang)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sgl_aspects.analysis.sources import load_run
from sgl_aspects.tracing.schema import KERNEL_LAYER
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


def test_the_kernels_of_forward_passes_are_below_them_with_their_layers(tmp_path: Path) -> None:
    model, file = make_mini(tmp_path / "mini"), tmp_path / "traces.jsonl"
    command = [sys.executable, "-m", "sgl_aspects", "run", "--level", "3", "--file", str(file), "--"]
    with serve(model, tmp_path / "log", prefix=command) as server:
        said = server.profile(3)
        assert "kernels in 3 forward passes" in said
        assert "in model.layers.*." in said
        spans = load_run(str(server.run_folder())).spans
    parents = {span.parent_id for span in spans if span.name == "kernel"}
    assert len(parents) == 3
    assert parents <= {span.span_id for span in spans if span.name == "forward"}
    layers = {str(span.attributes.get(KERNEL_LAYER)) for span in spans if span.name == "kernel"}
    assert {
        "model.embed_tokens",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.1.mlp.down_proj",
    } <= layers
    assert {"model.norm", "logits_processor"} <= layers
