"""A profile of forward passes: wished for from outside, its kernels in trace, report and timeline."""

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

from sgl_aspects.analysis.sources import load_run
from sgl_aspects.analysis.spans import Span
from sgl_aspects.cli import kernel_profile
from sgl_aspects.cli.main import main
from sgl_aspects.compat import ProfilerEvent
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.control import Control, Wish, read_control, write_control, write_wish
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import attach, schema
from sgl_aspects.tracing.observers.kernels import kernels_of, summary_of
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from tests.support.other_user import NOBODY
from tests.support.processes import command
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
    done = served.profile(3)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"process \d+: \d+ kernels in 3 forward passes; the engine paused [\d.]+ .?s before", done.stdout
    )
    assert "aten::" in done.stdout
    assert "idle, host late" in done.stdout
    run = load_run(served.folder)
    passes = {span.span_id: span for span in run.spans if span.name == schema.FORWARD.name}
    found = kernels_by_pass(run.spans)
    assert len(found) == 3
    for span_id, kernels in found.items():
        forward = passes[span_id]
        assert len(kernels) > 5
        # Kernels and idle times together are the device's time.
        device_ns = kernels[-1].end_ns - kernels[0].start_ns
        busy_ns = sum(kernel.end_ns - kernel.start_ns for kernel in kernels)
        idle_ns = 1e9 * sum(kernel.number(name) for kernel in kernels for name in IDLE)
        assert busy_ns + idle_ns == pytest.approx(device_ns, rel=0.02)
        assert forward.start_ns <= kernels[0].start_ns + 50_000
        assert kernels[-1].end_ns <= forward.end_ns + 50_000
    for name, words in (("page.html", ()), ("timeline.json", ("--format", "perfetto"))):
        assert main(["report", served.folder, *words, "-o", str(tmp_path / name)]) == 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    on_timeline = [event for event in events if event.get("cat") == "kernel"]
    assert len(on_timeline) == sum(map(len, found.values()))
    (track,) = {event["tid"] for event in on_timeline}
    assert track not in {event["tid"] for event in events if event.get("cat") == "device"}


def test_each_wish_is_a_profile_of_its_own(served: Served) -> None:
    before = len(kernels_by_pass(load_run(served.folder).spans))
    for _ in range(2):
        assert "in 2 forward passes" in served.profile(2).stdout
    assert len(kernels_by_pass(load_run(served.folder).spans)) == before + 4


def test_a_profiler_that_runs_already_is_an_answer(served: Served, tmp_path: Path) -> None:
    (file,) = served.engine.start_profile(6, tmp_path)
    wished = kernel_profile.wish(1, served.folder)
    served.engine.generate("hello", SAMPLING)
    (answer,) = wished.ended().values()
    assert "a profiler runs already" in answer["problem"]
    assert "no profile: a profiler runs already" in kernel_profile.in_a_line(wished.ended())
    while not file.exists():  # the other profiler's is taken nonetheless
        served.engine.generate("hello", SAMPLING)


def test_a_wish_that_waits_is_withdrawn_by_ctrl_c(served: Served) -> None:
    words = [sys.executable, "-m", "sgl_aspects", "control", "--run", served.folder, "--profile", "7"]
    waiting = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None
    assert "waiting for 7 forward passes: an idle server makes none" in waiting.stderr.readline()
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 130
    assert "withdrawn: no profile is taken" in said
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
    wished = kernel_profile.wish(1, str(tmp_path))
    assert wished.ended() == {}
    recorder.close()
    assert not wished.lives()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_users_run_is_neither_read_nor_changed(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path))
    recorder.open()
    (ring,) = tmp_path.glob("*.ring")
    before = ring.read_bytes()
    for path in (tmp_path, ring):
        os.chown(path, NOBODY, NOBODY)
    assert "another user's" in refusal(tmp_path)
    with pytest.raises(PermissionError):
        write_wish(ring, Wish(1, 1))
    assert ring.read_bytes() == before
    recorder.close()


def test_a_wish_and_the_level_do_not_disturb_each_other(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path), level=3)
    recorder.open()
    (ring,) = tmp_path.glob("*.ring")
    write_wish(ring, Wish(5, 0xFFFF_FFFF))
    assert recorder.level == 3
    write_control(ring, Control(4, 4, 0.5))
    assert Wish.of_word(recorder.steps.words[32]) == Wish(5, 0xFFFF_FFFF)
    recorder.take_wish()
    assert recorder.steps.words[32] == recorder.level == read_control(ring).level == 4
    recorder.close()


# -- what the device did ------------------------------------------------------------------------------------


def device(name: str, start: int, duration: int, launch: int, operator: int = 0) -> ProfilerEvent:
    return ProfilerEvent("device", name, start, duration, launch, operator, 7, 0)


def launch(number: int, start: int, name: str = "cudaLaunchKernel") -> ProfilerEvent:
    return ProfilerEvent("launch", name, start, 1, number, 0, 0, 1)


def test_idle_time_has_its_reason() -> None:
    events = [
        ProfilerEvent("operator", "aten::mm", 0, 5, 0, 1, 0, 1),
        launch(1, 1),
        device("void gemm<float, 4>(int)", 10, 10, 1, operator=1),
        launch(2, 26),  # after the first has ended
        device("late", 30, 10, 2),
        launch(3, 35),
        device("slow", 44, 6, 3),
        launch(4, 36),
        device("Memcpy HtoD (Pageable -> Device)", 50, 7, 4),
        launch(5, 40),
        device("fed", 58, 2, 5),
    ]
    (found,) = kernels_of(events, [(0, 100)], most=10)
    assert [(each.name, each.operator) for each in found] == [
        ("gemm", "aten::mm"),
        ("late", "late"),
        ("slow", "slow"),
        ("fed", "fed"),
    ]
    idle = [(each.idle_host_ns, each.idle_transfer_ns, each.idle_launch_ns) for each in found]
    assert idle == [(0, 0, 0), (6, 0, 4), (0, 0, 4), (0, 7, 1)]
    assert sum(each.duration_ns for each in found) + sum(map(sum, idle)) == 60 - 10


def test_a_kernel_belongs_to_the_pass_that_launched_it() -> None:
    replay = launch(1, 5, "cudaGraphLaunch")
    events = [
        replay,
        ProfilerEvent("operator", "aten::copy_", 4, 3, 0, 9, 0, 1),
        *(device(f"step{number}", 20 + 10 * number, 9, 1, operator=9) for number in range(3)),
        launch(2, 35),
        device("next", 55, 5, 2),  # it overlaps: launched while the replay still ran
        device("unknown", 70, 5, 99),
        launch(3, 1000),
        device("outside", 1001, 5, 3),
    ]
    first, second = kernels_of(events, [(0, 30), (30, 80)], most=10)
    assert [each.operator for each in first] == ["step0", "step1", "step2"]
    assert [each.name for each in second] == ["next", "unknown"]


def test_many_kernels_are_summed_up_and_counted() -> None:
    events = [launch(1, 0), *(device(f"k{number}", number * 10, 1 + number % 5, 1) for number in range(100))]
    (all_of_them,) = kernels_of(events, [(0, 5000)], most=1000)
    (found,) = kernels_of(events, [(0, 5000)], most=10)
    assert len(found) == 10
    assert found[-1].count == 91
    assert sum(each.duration_ns for each in found) == sum(each.duration_ns for each in all_of_them)
    assert summary_of(found)["kernels"] == 100
    assert summary_of(found)["idle"] == summary_of(all_of_them)["idle"]


def test_on_the_host_the_outermost_operators_are_the_kernels() -> None:
    events = [
        ProfilerEvent("operator", "a range", 0, 100, 0, 1, 0, 1),
        ProfilerEvent("operator", "aten::linear", 10, 20, 0, 2, 0, 1),
        ProfilerEvent("operator", "aten::addmm", 12, 10, 0, 3, 0, 1),
        ProfilerEvent("operator", "aten::relu", 40, 5, 0, 4, 0, 1),
    ]
    (found,) = kernels_of(events, [(0, 100)], most=10, is_host=True)
    assert [(each.name, each.idle_host_ns) for each in found] == [("aten::linear", 0), ("aten::relu", 10)]
