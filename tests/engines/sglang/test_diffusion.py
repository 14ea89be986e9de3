"""SGLang's diffusion engine on the CPU, as a server and in a program: images of a tiny random model."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("diffusers", reason="SGLang's diffusion engine needs it: make sglang-env")

from tests.support.callers import Requests, by_trace, orphans, parent, trace_id
from tests.support.engine_server import EngineServer, start_server
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver, run_prefix
from tests.support.processes import free_port
from tests.support.sglang_models import make_diffusion, make_video_diffusion
from tests.support.sglang_server import SGLANG_SERVE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PATH = "/v1/images/generations"
STEPS = 4
BODY = {"prompt": "a fox", "size": "64x64", "num_inference_steps": STEPS, "response_format": "b64_json"}
PHASES = ["queue", "encode", "denoise", "decode_latents"]
#: Numbers of the requests: answered alone; in one batch; refused by the server; one that its pipeline fails
#: at (it makes one image for a prompt); one whose caller hangs up, and one behind it.
ALONE, TOGETHER, REFUSED, FAILED, LEFT, BEHIND = 1, (2, 3, 4), (5, 6), 7, 8, 9
#: A batch is run once it is full, or after a second.
BATCHES = ["--batching-max-size", str(len(TOGETHER)), "--batching-delay-ms", "1000"]
MODEL = ["--model-id", "Z-Image-Turbo", "--backend", "sglang"]
VIDEOS = ["--model-id", "Wan2.1-T2V-1.3B-Diffusers", "--backend", "diffusers"]
PROGRAM = """
if __name__ == "__main__":
    import sys
    from sglang.multimodal_gen import DiffGenerator

    arguments = {"model_id": "Z-Image-Turbo", "backend": "sglang", "num_gpus": 1}
    generator = DiffGenerator.from_pretrained(model_path=sys.argv[1], **arguments)
    sampling = {"prompt": "a fox", "height": 64, "width": 64, "num_inference_steps": 4}
    assert len(generator.generate({**sampling, "num_outputs_per_prompt": 2})) == 2
    assert not generator.generate({**sampling, "height": 66})  # its latents have an odd number of rows
    generator.shutdown()
"""


@dataclass
class Run(Requests):
    ids: dict[int, str]
    log: str


def hang_up(server: EngineServer, receiver: Receiver, number: int) -> None:
    """Request an image of many steps, and hang up after one of them."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    headers = {"content-type": "application/json", **parent(number)}
    connection.request("POST", PATH, json.dumps({**BODY, "num_inference_steps": 300}), headers)
    receiver.wait_for(lambda spans: any(is_for(span, number) for span in spans))
    connection.close()


def is_for(step: Span, number: int) -> bool:
    return trace_id(number) in {trace for trace, _ in step.links}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_diffusion(tmp_path_factory.mktemp("models") / "tiny")


@contextmanager
def serving(
    receiver: Receiver, folder: Path, model: Path, more: list[str], level: int
) -> Iterator[EngineServer]:
    port = free_port()
    words = [*run_prefix(receiver, level), *SGLANG_SERVE, "--model-path", str(model), *more]
    words += ["--host", "127.0.0.1", "--port", str(port), "--warmup-mode", "off"]
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # of 5 s, which is waited for
    with start_server(EngineServer, words, port, folder / "log", environment) as server:
        yield server


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with engine_receiver() as receiver:
        with serving(receiver, folder, model, [*MODEL, *BATCHES], level=3) as server:

            def ask(number: int) -> str:
                return str(server.post(PATH, BODY, parent(number))["id"])

            ids = {ALONE: ask(ALONE)}
            with ThreadPoolExecutor(len(TOGETHER)) as pool:
                ids |= zip(TOGETHER, pool.map(ask, TOGETHER))
            server.post(PATH, {**BODY, "num_inference_steps": -1}, parent(REFUSED[0]), status=400)
            server.post(PATH, {"size": "64x64"}, parent(REFUSED[1]), status=422)
            with pytest.raises(json.JSONDecodeError):  # HTTP 500 in plain text
                server.post(PATH, {**BODY, "n": 2}, parent(FAILED), status=500)
            hang_up(server, receiver, LEFT)
            ids[BEHIND] = ask(BEHIND)
            receiver.wait_for(lambda spans: has_root(spans, LEFT) and has_root(spans, BEHIND))
        yield Run(receiver, by_trace(receiver.spans), ids, (folder / "log").read_text())


def has_root(spans: list[Span], number: int) -> bool:
    return any(
        span.trace_id == trace_id(number) and "gen_ai.operation.name" in span.attributes for span in spans
    )


def test_no_span_is_an_orphan_and_no_observer_failed(run: Run) -> None:
    assert orphans(run.traces) == []
    assert "the call went on without it" not in run.log


@pytest.mark.parametrize("number", [ALONE, *TOGETHER, BEHIND])
def test_an_image_has_the_phases_of_its_pipeline_below_its_request(run: Run, number: int) -> None:
    root = run.root(number)
    assert root.name == "generate_content Z-Image-Turbo"
    expected = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.provider.name": "sglang",
        "gen_ai.output.type": "image",
        "gen_ai.response.id": run.ids[number],
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert {name: root.attributes.get(name) for name in expected} == expected
    spans = [span for span in run.of(number) if span is not root]
    assert [span.name for span in spans] == PHASES
    assert not any(span.is_error for span in [root, *spans])
    assert run.spans(number, "denoise")[0].attributes["sgl_aspects.denoise.steps"] == STEPS


def test_each_pass_of_the_denoising_model_is_a_step(run: Run) -> None:
    steps = run.receiver.named("scheduler.step")
    for number in (ALONE, *TOGETHER, BEHIND):
        own = sorted((step for step in steps if is_for(step, number)), key=lambda step: step.start)
        assert [step.attributes["sgl_aspects.step.id"] for step in own] == list(range(STEPS))
        (denoise,) = run.spans(number, "denoise")
        for step in own:
            assert step.attributes["sgl_aspects.batch.size"] == len(
                TOGETHER if number in TOGETHER else [number]
            )
            assert denoise.start <= step.start < step.end <= denoise.end
            assert step.attributes["sgl_aspects.forward.mode"] == "denoise"
            assert Counter(span.name for span in run.traces[step.trace_id])["forward"] == 1


def test_a_request_behind_another_batch_waits_for_the_queue(run: Run) -> None:
    (before,), (queue,) = run.spans(LEFT, "decode_latents"), run.spans(BEHIND, "queue")
    root = run.root(BEHIND)
    assert root.start < before.end <= queue.start
    waited = (queue.start - root.start) / 1e9
    assert root.attributes["sgl_aspects.latency.time_to_queue"] == pytest.approx(waited)


@pytest.mark.parametrize(("number", "status"), [*zip(REFUSED, (400, 422))])
def test_a_refused_request_ends_with_its_status(run: Run, number: int, status: int) -> None:
    (root,) = run.of(number)
    assert root.name == "generate_content"
    assert root.attributes["http.response.status_code"] == status
    assert not root.is_error  # its caller's mistake


def test_a_request_that_fails_is_an_error_in_the_phase_where_it_fails(run: Run) -> None:
    root = run.root(FAILED)
    assert root.is_error
    assert (root.attributes["error.type"], root.attributes["http.response.status_code"]) == ("error", 500)
    assert [span.name for span in run.of(FAILED) if span.is_error and span is not root] == ["denoise"]
    (step,) = [span for span in run.receiver.named("scheduler.step") if is_for(span, FAILED)]
    assert step.attributes["error.type"] == "ValueError"


def test_a_caller_that_hangs_up_aborts_its_request_whose_image_is_made(run: Run) -> None:
    assert run.root(LEFT).attributes["error.type"] == "abort"
    assert [span.name for span in run.of(LEFT)][1:] == PHASES


def test_the_loaded_model_is_recorded(run: Run) -> None:
    assert len(run.receiver.named("load_model")) == 1


def test_a_program_without_a_server_is_traced(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with engine_receiver() as receiver:
        words: list[Any] = [*run_prefix(receiver, level=2), sys.executable, program, model]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    answered, failed = [span for span in receiver.spans if "gen_ai.operation.name" in span.attributes]
    assert answered.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert not answered.is_error
    assert answered.attributes["gen_ai.request.choice.count"] == 2
    assert failed.attributes["error.type"] == "error"
    below = [span.name for span in receiver.spans if span.parent_id == answered.span_id]
    assert below == PHASES


def test_the_request_for_a_video_ends_with_its_job(tmp_path: Path) -> None:
    body = {"prompt": "a fox", "size": "64x64", "num_frames": 5, "num_inference_steps": 2}
    with engine_receiver() as receiver:
        with serving(receiver, tmp_path, make_video_diffusion(tmp_path / "wan"), VIDEOS, level=1) as server:
            job = server.post("/v1/videos", body, parent(1))["id"]
            receiver.wait_for(lambda spans: has_root(spans, 1))
        root, *phases = sorted(receiver.spans, key=lambda span: span.start)
    assert [span.name for span in phases] == ["queue", "denoise"]  # all of diffusers' pipeline is one stage
    assert root.attributes["gen_ai.response.id"] == job
    assert root.attributes["gen_ai.output.type"] == "video"
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.end >= phases[-1].end
