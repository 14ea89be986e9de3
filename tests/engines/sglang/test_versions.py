"""Other versions of SGLang than the installed one: their wheels, and servers of them.

SGLANG_WHEELS: a folder of wheels (make sglang-wheels); read, and their platform interfaces loaded.
SGLANG_VERSIONS: folders, separated by ``:``, each named by its version with that SGLang and what it needs in
other versions than the installed ones (make sglang-version VERSION=0.5.20); served from, before all others.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects import env
from sgl_aspects.engines import SGLANG
from sgl_aspects.engines.source import Source
from tests.support.callers import CALLER, parent, trace_id
from tests.support.processes import free_port, wait_until
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve
from tests.support.stand_ins import Engine

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

WHEELS = sorted(Path(env.text("SGLANG_WHEELS") or "/nowhere").glob("sglang-*.whl"))
VERSIONS = [Path(folder) for folder in (env.text("SGLANG_VERSIONS") or "").split(":") if folder]
SINCE_0_5_23 = {"retire_request", "abort_output"}  # optional: how requests end that never were in a batch
CHILDREN = ["tokenize", "queue", "prefill", "decode", "detokenize"]


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def texts(wheel: Path, folder: str = "sglang/srt") -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(folder) and name.endswith(".py")]
        return {name: archive.read(name).decode() for name in names}


@pytest.mark.skipif(not WHEELS, reason="SGLANG_WHEELS names no folder of wheels (make sglang-wheels)")
@pytest.mark.parametrize("wheel", WHEELS, ids=version_of)
def test_every_role_is_found_in_the_wheel(wheel: Path) -> None:
    found = {role.role: role.target for role in Source(wheel).find_roles(SGLANG)}
    assert {role for role, target in found.items() if target is None} <= SINCE_0_5_23
    assert len(found) > 30


def with_platforms() -> list[Path]:
    return [wheel for wheel in WHEELS if texts(wheel, "sglang/srt/platforms/interface")]


@pytest.mark.skipif(not WHEELS, reason="SGLANG_WHEELS names no folder of wheels (make sglang-wheels)")
@pytest.mark.parametrize("wheel", with_platforms(), ids=version_of)
def test_the_cpu_platform_answers_all_that_the_wheel_asks(wheel: Path, engine: Engine) -> None:
    """By its own interface: each method that it requires is implemented, and each that it calls exists."""
    for name, text in texts(wheel, "sglang/srt/platforms").items():
        engine.write(name, "" if name.endswith("__init__.py") else text)
    engine.write(
        "sglang/srt/environ.py",
        """
        class Variable:
            def get(self): return 0
        class Environment:
            def __getattr__(self, name): return Variable()
        envs = Environment()
        """,
    )
    interface = engine.load("sglang.srt.platforms.interface").SRTPlatform
    from sgl_aspects.platforms.cpu import CpuPlatform
    from sgl_aspects.platforms.sglang_bridge import bridged, interface_methods

    bridge: Any = bridged(CpuPlatform)
    assert issubclass(bridge, interface)
    sources = texts(wheel)
    # A method that only raises is one that SGLang requires from a platform.
    wanted = [
        name
        for name in interface_methods(interface)
        if any("NotImplementedError" in text for text in code_of(getattr(interface, name)))
    ]
    optional = re.compile(
        "speculative|compile_backend|piecewise_backend|graph_runner|communicator|quantization"
    )
    assert [name for name in wanted if name not in vars(bridge) and not optional.search(name)] == []
    asked = {
        name
        for path, text in sources.items()
        if "/platforms/" not in path and "multimodal" not in path
        for name in re.findall(r"\bcurrent_platform\.([a-z]\w*)", text)
    }
    assert asked
    assert sorted(name for name in asked if not hasattr(bridge, name)) == []
    platform = bridge()
    for name in ("get_default_attention_backend", "get_dispatch_key_name", "get_device_total_memory"):
        assert getattr(platform, name)()


def code_of(method: Any) -> list[str]:
    code = getattr(getattr(method, "__wrapped__", method), "__code__", None)
    return [] if code is None else list(code.co_names)


# What SGLang before 0.5.16 imports at its start on every device, and never calls on a CPU:
# these packages have no build for a plain one.
KERNELS = {"sgl_kernel": "kvcacheio", "vllm": "_custom_ops"}
ANY_NAME = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
"""


def stand_in_kernels(folder: Path) -> Path:
    for package, module in KERNELS.items():
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").touch()
        (folder / package / f"{module}.py").write_text(ANY_NAME)
    return folder


@pytest.mark.filterwarnings("ignore:Failed to load image Python extension")
@pytest.mark.skipif(not VERSIONS, reason="SGLANG_VERSIONS names no folders (make sglang-version VERSION=…)")
@pytest.mark.parametrize("folder", VERSIONS, ids=lambda folder: folder.name)
def test_a_server_of_that_version_is_traced(folder: Path, tmp_path: Path) -> None:
    doctor = [sys.executable, "-m", "sgl_aspects", "doctor", "--engine", str(folder)]
    told = subprocess.run(doctor, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    version = [int(number) for number in folder.name.split(".")[:3]]
    path, more = [str(folder), str(Path(__file__).resolve().parents[3])], []
    environment = {}
    if version < [0, 5, 16]:
        path.append(str(stand_in_kernels(tmp_path / "kernels")))
        # Left to itself it adds 10,000 to the HTTP server's port for this one.
        environment["SGLANG_GRPC_PORT"] = str(free_port())
    environment["PYTHONPATH"] = os.pathsep.join(path)
    if version < [0, 5, 12]:
        more = ["--disable-piecewise-cuda-graph"]  # which it would capture on a CPU, too
    model, file = make_mini(tmp_path / "model"), tmp_path / "spans.jsonl"
    run = [sys.executable, "-m", "sgl_aspects", "run", "--level", "3", "--file", str(file), "--"]
    prompts = [f"the quick brown fox number {number}" for number in range(4)]
    with serve(model, tmp_path / "log", prefix=run, more=more, environment=environment) as server:
        answers = server.chats(prompts, [parent(number) for number in range(4)])
        two = {"text": ["one", "and two"], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        server.post("/generate", two, parent(4))
        server.abort("/generate", parent(5), "aborted")
        samples = {"text": "samples", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True, "n": 2}}
        server.post("/generate", samples, parent(6))
        # Up to 0.5.16 it does not end by itself after the last one.
        wait_until(
            lambda: {trace_id(number) for number in range(7)} <= {root["traceId"] for root in roots(file)}
        )
    print(f"SGLang {folder.name}: start {server.start_seconds:.0f} s")
    spans = read(file)
    known = {span["spanId"] for span in spans} | {CALLER, ""}
    assert [span["name"] for span in spans if span.get("parentSpanId", "") not in known] == []
    names = {number: names_in(spans, number) for number in range(7)}
    for number, answer in enumerate(answers):
        assert names[number] == {"chat mini": 1, **dict.fromkeys(CHILDREN, 1)}
        (root_span,) = [span for span in roots(file) if span["traceId"] == trace_id(number)]
        attributes = {one["key"]: one["value"] for one in root_span["attributes"]}
        assert int(attributes["gen_ai.usage.output_tokens"]["intValue"]) == answer.usage["completion_tokens"]
        assert int(attributes["gen_ai.usage.input_tokens"]["intValue"]) == answer.usage["prompt_tokens"]
    assert names[4] == {"text_completion mini": 3, **dict.fromkeys(CHILDREN, 2)}
    assert names[5] == {"text_completion mini": 1, **dict.fromkeys(CHILDREN, 1)}
    # The prompt runs once more before its samples, for the cache.
    assert names[6]["text_completion mini"] == 4
    assert names[6]["decode"] == 2
    problems = [span["traceId"] for span in spans if span.get("status", {}).get("code") == 2]
    assert set(problems) == {trace_id(5)}  # the one that was aborted
    steps = Counter(span["name"] for span in spans)
    assert steps["scheduler.step"] == steps["run_batch"] == steps["forward"] == steps["process_result"] > 0
    for span in spans:
        if span["name"] == "forward":
            attributes = {one["key"]: one["value"] for one in span["attributes"]}
            assert attributes["sgl_aspects.forward.device_time"]["doubleValue"] > 0


def names_in(spans: list[dict[str, Any]], number: int) -> Counter[str]:
    return Counter(span["name"] for span in spans if span["traceId"] == trace_id(number))


def roots(file: Path) -> list[dict[str, Any]]:
    return [span for span in read(file) if span.get("parentSpanId") == CALLER]


def read(file: Path) -> list[dict[str, Any]]:
    # The last line may still be written.
    return [
        span
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
        for resource in json.loads(line).get("resourceSpans", [])
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
