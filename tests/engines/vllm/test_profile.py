"""The kernels of real vLLM's forward passes, on the CPU, while it answers (make test-vllm)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from sgl_aspects.analysis.sources import load_run
from sgl_aspects.tracing.schema import KERNEL_LAYER
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_kernels_and_details_are_below_forward_passes_that_are_there(tmp_path: Path) -> None:
    model, file = make_mini(tmp_path / "mini"), tmp_path / "traces.jsonl"
    command = [sys.executable, "-m", "sgl_aspects", "run", "--level", "4", "--file", str(file), "--"]
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    with serve(model, tmp_path / "log", prefix=command, environment=environment) as server:
        for _ in range(2):
            said = server.profile(3)
            assert "kernels in 3 forward passes" in said
            assert "  in LlamaForCausalLM\n" in said  # vLLM compiles the model as a whole
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


def test_the_kernels_of_a_model_that_is_not_compiled_have_their_layers(tmp_path: Path) -> None:
    model = make_mini(tmp_path / "mini")
    command = [
        sys.executable,
        "-m",
        "sgl_aspects",
        "run",
        "--level",
        "3",
        "--file",
        str(tmp_path / "t.jsonl"),
        "--",
    ]
    with serve(model, tmp_path / "log", prefix=command, more=["--enforce-eager"]) as server:
        assert "  in model.layers.*." in server.profile(3)
        spans = load_run(str(server.run_folder())).spans
    layers = {str(span.attributes.get(KERNEL_LAYER)) for span in spans if span.name == "kernel"}
    expected = {
        "model.embed_tokens",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.1.mlp.down_proj",
        "model.norm",
    }
    assert expected <= layers, layers
