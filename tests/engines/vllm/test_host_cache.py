"""Real vLLM with native offloading: what it loads from the host's memory and a disk, and writes back."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

#: Prompts, and those that are sent again: the host's memory has the latest four by then, the device two.
FIRST, *OTHERS = range(6)
FROM_DISK, FROM_HOST = AGAIN = {6: FIRST, 7: 3}
# Chunks of 64 KiB, two for a prompt.
TIERS = {"cpu_bytes_to_use": 8 << 16, "spec_name": "TieringOffloadingSpec"}
TOKENS = "sgl_aspects.prefix_cache."


def test_what_is_loaded_was_written_back(tmp_path: Path) -> None:
    (tmp_path / "plugin").mkdir()
    install_plugin(tmp_path / "plugin", "offloading", vllm_offloading.PLUGIN)
    path = os.pathsep.join([str(tmp_path / "plugin"), os.environ.get("PYTHONPATH", "")])
    disk = {**TIERS, "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "disk")}]}
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": disk,
    }
    with engine_receiver() as receiver:
        options = ["--dtype", "float32", "--enforce-eager", *vllm_offloading.OPTIONS]
        options += ["--kv-transfer-config", json.dumps(connector)]
        environment = {**traced(receiver), "SGL_ASPECTS_TRACE": "4", "PYTHONPATH": path}
        with serve(
            make_mini(tmp_path / "mini"), tmp_path / "log", more=options, environment=environment
        ) as server:
            answers = []
            for number in (FIRST, *OTHERS, *AGAIN):
                prompt = f"{AGAIN.get(number, number)} " + "fox " * 90
                body = {
                    "model": "mini",
                    "prompt": prompt,
                    "max_tokens": 4,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                answers.append(server.post("/v1/completions", body, parent(number))["choices"][0]["text"])
            ends = {trace_id(number) for number in AGAIN}
            receiver.wait_for(lambda spans: ends <= {s.trace_id for s in spans if s.parent_id == CALLER})
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
                metrics = response.read().decode()
    assert [answers[number] for number in AGAIN] == [answers[number] for number in AGAIN.values()]
    written, loaded = receiver.named("cache.write_back"), receiver.named("cache.load")
    counters = re.findall(r"^vllm:(\w+)\{.*\} (.*)$", metrics, re.MULTILINE)
    told = {name: float(value) for name, value in counters}
    moved = [sum(span.attributes["sgl_aspects.kv.bytes"] for span in spans) for spans in (written, loaded)]
    assert moved[0] > moved[1] > 0
    assert moved == [told[f"kv_offload_{way}_bytes_total"] for way in ("store", "load")]
    traces = by_trace(receiver.spans)
    assert orphans(traces) == []
    # Each tier by its own name, as vLLM counts them; the same in the queue, where they were found.
    by_source = dict(
        re.findall(r'^vllm:prompt_tokens_cached_by_source_total\{.*source="(\w+)"\} (.*)$', metrics, re.M)
    )
    for number, name, source in ((FROM_DISK, "storage", "disk"), (FROM_HOST, "host", "host")):
        spans = sorted(traces[trace_id(number)], key=lambda span: span.start)
        (root,) = (span for span in spans if span.parent_id == CALLER)
        queue = next(span for span in spans if span.name == "queue")
        for span in (root, queue):
            tiers = {key: value for key, value in span.attributes.items() if key.startswith(TOKENS)}
            assert tiers == {f"{TOKENS}{name}_tokens": float(by_source[source])}
        assert 0 < float(by_source[source]) <= root.attributes["gen_ai.usage.cache_read.input_tokens"]
    # In the forward pass of the worker that moves them; what a request waits for is loaded in an empty one.
    passes = {span.span_id for span in receiver.named("forward")}
    steps = {span.span_id for span in receiver.named("scheduler.step")}
    assert {span.parent_id for span in written} <= passes | steps
    for number, load in zip(AGAIN, sorted(loaded, key=lambda span: span.start), strict=True):
        assert load.parent_id in steps
        (wait,) = (span for span in traces[trace_id(number)] if span.name == "kv_transfer")
        assert wait.start < load.start < load.end < wait.end
        assert wait.attributes["sgl_aspects.kv_transfer.bytes"] == load.attributes["sgl_aspects.kv.bytes"]


def test_the_simple_connector_moves_blocks() -> None:
    """It has one function for both ways."""
    from vllm.v1.simple_kv_offload.copy_backend import DmaCopyBackend

    recorder = Memory()
    recorder.level = 4
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    trackers.steps.remote = 7, 8
    woven = WovenLevels(trackers.engine, DetailObserver(trackers).observations())
    woven.set_level(4)
    copies: Any = DmaCopyBackend()
    copies._queue = SimpleNamespace(put=lambda copy: None)
    copies._store_params = copies._load_params = SimpleNamespace(bpb=torch.tensor([6, 4]))
    copies.launch_copy([0, 1], [2, 3], is_store=False, event_idx=0, events_list=[])
    copies.launch_copy([4], [5], True, 0, [])
    woven.remove()
    moved = [(span.type.name, span.values[-1], span.parent_id) for span in recorder.ended]
    assert moved == [("cache.load", 20, 8), ("cache.write_back", 10, 8)]
