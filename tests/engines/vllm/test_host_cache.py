"""Real vLLM with native offloading: what it loads from the host's memory and writes back to it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from sgl_aspects.engines import VLLM
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers import WovenLevels
from sgl_aspects.tracing.observers.detail import DetailObserver
from sgl_aspects.tracing.options import DEFAULTS
from tests.support import vllm_offloading
from tests.support.callers import CALLER, by_trace, orphans, parent, trace_id
from tests.support.distributions import install_plugin
from tests.support.memory_recorder import Memory
from tests.support.phases import engine_receiver
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import serve, traced

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FIRST, *OTHERS, AGAIN = range(6)


def test_what_is_loaded_was_written_back(tmp_path: Path) -> None:
    (tmp_path / "plugin").mkdir()
    install_plugin(tmp_path / "plugin", "offloading", vllm_offloading.PLUGIN)
    path = os.pathsep.join([str(tmp_path / "plugin"), os.environ.get("PYTHONPATH", "")])
    with engine_receiver() as receiver:
        options = ["--dtype", "float32", "--enforce-eager", *vllm_offloading.OPTIONS]
        environment = {**traced(receiver), "SGL_ASPECTS_TRACE": "4", "PYTHONPATH": path}
        with serve(
            make_mini(tmp_path / "mini"), tmp_path / "log", more=options, environment=environment
        ) as server:
            answers = []
            for number in (FIRST, *OTHERS, AGAIN):
                prompt = f"{FIRST if number == AGAIN else number} " + "fox " * 90
                body = {
                    "model": "mini",
                    "prompt": prompt,
                    "max_tokens": 4,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                answers.append(server.post("/v1/completions", body, parent(number)))
            receiver.wait_for(
                lambda spans: any(s.trace_id == trace_id(AGAIN) and s.parent_id == CALLER for s in spans)
            )
    assert answers[-1]["choices"][0]["text"] == answers[0]["choices"][0]["text"]
    written, loaded = receiver.named("cache.write_back"), receiver.named("cache.load")
    moved = [sum(span.attributes["sgl_aspects.kv.bytes"] for span in spans) for spans in (written, loaded)]
    assert moved[0] > moved[1] > 0
    traces = by_trace(receiver.spans)
    assert orphans(traces) == []
    (load,) = loaded
    (root,) = (span for span in traces[trace_id(AGAIN)] if span.parent_id == CALLER)
    tokens = root.attributes["sgl_aspects.prefix_cache.host_tokens"]
    assert 0 < tokens <= root.attributes["gen_ai.usage.cache_read.input_tokens"]
    # In the forward pass of the worker that moves them; what a request waits for is loaded in an empty one.
    passes = {span.span_id for span in receiver.named("forward")}
    steps = {span.span_id for span in receiver.named("scheduler.step")}
    assert {span.parent_id for span in written} <= passes | steps
    assert load.parent_id in steps
    (wait,) = (span for span in traces[trace_id(AGAIN)] if span.name == "kv_transfer")
    assert wait.start < load.start < load.end < wait.end


def test_the_simple_connector_s_worker_moves_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are called in each pass: where there is nothing to move, nothing is recorded."""
    from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata
    from vllm.v1.simple_kv_offload.worker import SimpleCPUOffloadWorker

    recorder = Memory()
    recorder.level = 4
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    trackers.steps.remote = 7, 8
    woven = WovenLevels(trackers, DetailObserver(trackers).observations())
    woven.set_level(4)
    worker = SimpleCPUOffloadWorker.__new__(SimpleCPUOffloadWorker)
    worker.gpu_kv_caches = {"a": torch.zeros(4, 10, dtype=torch.int8)}
    worker._backend = SimpleNamespace(launch_copy=lambda *args, **kwargs: None)
    worker._load_events = worker._store_events = []
    worker._store_compute_done = SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    blocks = {"load_gpu_blocks": [0, 1], "load_cpu_blocks": [0, 1], "store_gpu_blocks": [2]}
    for metadata in (SimpleCPUOffloadMetadata(), SimpleCPUOffloadMetadata(**blocks, store_cpu_blocks=[2])):
        worker._connector_metadata = metadata
        worker.start_load_kv()
        worker.wait_for_save()
    woven.remove()
    moved = [(span.type.name, span.values[-1], span.parent_id) for span in recorder.ended]
    assert moved == [("cache.load", 20, 8), ("cache.write_back", 10, 8)]
