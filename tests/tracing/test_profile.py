"""A profile of forward passes: asked for from outside, its kernels in trace, report and timeline."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sgl_aspects.analysis.sources import load_run
from sgl_aspects.analysis.spans import Span
from sgl_aspects.cli import kernel_profile
from sgl_aspects.cli.main import main
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.control import OFFSET, Control, read_control, write_asked, write_control
from sgl_aspects.run.requests import Request, take_requests
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import attach, schema
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from tests.support.other_user import NOBODY
from tests.support.processes import command, output_of
from tests.support.tiny_models import make_llama

SAMPLING = SamplingParams(max_new_tokens=4, ignore_eos=True)
IDLE = (schema.IDLE_HOST, schema.IDLE_TRANSFER, schema.IDLE_LAUNCH)


@dataclass
class Served:
    """A traced engine of the embedded runtime, and its run."""

    engine: Engine
    folder: str
    file: Path

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Serve one request after another in the block."""
        has_ended = threading.Event()

        def serve() -> None:
            while not has_ended.is_set():
                self.engine.generate("hello", SAMPLING)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()

    def profile(self, steps: int) -> subprocess.CompletedProcess[str]:
        with self.busy():
            return command("control", "--run", self.folder, "--profile", str(steps))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, forked_schedulers: None) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("profiled")
    make_llama(folder / "model", max_position_embeddings=1024)
    with (
        attach(level=3, file=str(folder / "traces.jsonl")) as session,
        Engine(model_path=folder / "model") as engine,
    ):
        engine.generate("hello", SAMPLING)
        yield Served(engine, session.run_folder, folder / "traces.jsonl")


def kernels_by_pass(spans: list[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        if span.name == schema.KERNEL.name:
            found.setdefault(span.parent_id, []).append(span)
    return found


def test_the_kernels_of_a_live_engine_are_below_its_forward_passes(served: Served, tmp_path: Path) -> None:
    printed = output_of(served.profile(3))
    assert re.search(
        r"process \d+: \d+ kernels in 3 forward passes; the engine paused [\d.]+ .?s before", printed
    )
    is_replayed = torch.cuda.is_available()  # a device has kernels of its own, and decode steps are graphs
    assert "aten::" in printed or is_replayed
    assert "idle, host late" in printed
    assert "in model.layers.*." in printed or is_replayed
    run = load_run(served.folder)
    passes = {span.span_id: span for span in run.spans if span.name == schema.FORWARD.name}
    found = kernels_by_pass(run.spans)
    assert len(found) == 3
    for span_id, kernels in found.items():
        forward = passes[span_id]
        assert len(kernels) > 5
        # Kernels and idle times together are the device's time. On a GPU, kernels may overlap.
        busy_ns, reached_ns = 0, kernels[0].start_ns
        for kernel in kernels:
            busy_ns += max(0, kernel.end_ns - max(reached_ns, kernel.start_ns))
            reached_ns = max(reached_ns, kernel.end_ns)
        device_ns = reached_ns - kernels[0].start_ns
        # That before the first is since the pass's begin.
        idle_ns = 1e9 * sum(kernel.number(name) for kernel in kernels[1:] for name in IDLE)
        assert busy_ns + idle_ns == pytest.approx(device_ns, rel=0.02)
        assert forward.start_ns <= kernels[0].start_ns + 50_000
        assert kernels[-1].end_ns <= forward.end_ns + 50_000
        in_layers = {str(kernel.attributes.get(schema.KERNEL_LAYER)) for kernel in kernels}
        names = {f"model.layers.{number}.mlp.down_proj" for number in range(2)}
        assert is_replayed or names | {"model.embed_tokens", "lm_head"} < in_layers
    for name, words in (("page.html", ()), ("timeline.json", ("--format", "perfetto"))):
        assert main(["report", served.folder, *words, "-o", str(tmp_path / name)]) == 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    on_timeline = [event for event in events if event.get("cat") == "kernel"]
    assert len(on_timeline) == sum(map(len, found.values()))
    assert is_replayed or "lm_head" in {event["args"].get(schema.KERNEL_LAYER) for event in on_timeline}
    (track,) = {event["tid"] for event in on_timeline}
    assert track not in {event["tid"] for event in events if event.get("cat") == "device"}


def test_each_request_is_a_profile_of_its_own(served: Served) -> None:
    before = len(kernels_by_pass(load_run(served.folder).spans))
    for _ in range(2):
        assert "in 2 forward passes" in served.profile(2).stdout
    assert len(kernels_by_pass(load_run(served.folder).spans)) == before + 4


def test_a_profiler_that_runs_already_is_an_answer(served: Served, tmp_path: Path) -> None:
    (file,) = served.engine.start_profile(6, tmp_path)
    asked = kernel_profile.ask(1, served.folder)
    served.engine.generate("hello", SAMPLING)
    (answer,) = asked.ended().values()
    assert "a profiler runs already" in answer["problem"]
    assert "no profile: a profiler runs already" in kernel_profile.in_a_line(asked.ended())
    asked.close()
    while not file.exists():  # the other profiler's is taken nonetheless
        served.engine.generate("hello", SAMPLING)


def test_a_request_that_waits_is_withdrawn_by_ctrl_c(served: Served) -> None:
    words = [sys.executable, "-m", "sgl_aspects", "control", "--run", served.folder, "--profile", "7"]
    waiting = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None
    assert "waiting for 7 forward passes: an idle server makes none" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert "withdrawn: no profile is taken" in said
    assert [*Path(served.folder).glob("*.request")] == []
    before = len(kernels_by_pass(load_run(served.folder).spans))
    served.engine.generate("hello", SAMPLING)
    assert len(kernels_by_pass(load_run(served.folder).spans)) == before


# -- who can be asked ---------------------------------------------------------------------------------------


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        kernel_profile.take(1, str(folder), process_id=None)
    return str(raised.value)


def test_a_run_without_forward_passes_is_named_with_the_next_step(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path), level=2)
    recorder.open()
    assert "level 2, and forward passes from level 3 on: sgl-aspects control --level 3" in refusal(tmp_path)
    recorder.close()
    assert "every process of" in refusal(tmp_path)
    assert (
        "start the engine under sgl-aspects run"
        in command("control", "--run", "/nowhere", "--profile", "1").stderr
    )


def test_a_process_that_ends_meanwhile_is_waited_for_no_longer(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path))
    recorder.open()
    asked = kernel_profile.ask(1, str(tmp_path))
    assert asked.ended() == {}
    recorder.close()
    assert not asked.lives()
    asked.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_users_run_is_neither_read_nor_changed(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path))
    recorder.open()
    (ring,) = tmp_path.glob("*.ring")
    before = ring.read_bytes()
    request = Request(tmp_path, os.getpid(), "profile", {"steps": 1})
    os.chown(tmp_path, NOBODY, NOBODY)
    assert "only its own user can profile a run" in refusal(tmp_path)
    os.chown(ring, NOBODY, NOBODY)
    assert "another user's" in refusal(tmp_path)
    with pytest.raises(PermissionError):
        write_asked(ring)
    with pytest.raises(PermissionError):  # nor does a process do what that user asks
        list(take_requests(str(tmp_path)))
    assert ring.read_bytes() == before
    request.remove()
    assert [*tmp_path.iterdir()] == [ring]
    recorder.close()


def test_a_request_and_the_level_do_not_disturb_each_other(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path), level=3)
    recorder.open()
    (ring,) = tmp_path.glob("*.ring")
    write_asked(ring)
    assert recorder.level == 3
    write_control(ring, Control(4, 4, 0.5))
    assert recorder.steps.words[OFFSET // 8] == 0x104
    recorder.note_look()
    assert recorder.steps.words[OFFSET // 8] == recorder.level == read_control(ring).level == 4
    recorder.close()


def test_a_process_answers_again_until_the_request_is_withdrawn(tmp_path: Path) -> None:
    request = Request(tmp_path, os.getpid(), "profile", {"steps": 7})
    (taken,) = take_requests(str(tmp_path))
    assert taken.values["steps"] == 7
    assert [*take_requests(str(tmp_path))] == []
    assert request.read() is None
    for steps in (1, 2):
        taken.answer(steps=steps)
        assert request.read() == {"steps": steps}
    request.remove()
    assert taken.is_withdrawn
    taken.answer(steps=3)
    assert [*tmp_path.iterdir()] == []
