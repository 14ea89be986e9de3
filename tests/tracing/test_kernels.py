"""The kernels of a profile: which pass has them, why the device was idle, and what stays of them."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from sgl_aspects import compat
from sgl_aspects.cli import kernel_profile
from sgl_aspects.compat import ProfilerEvent
from sgl_aspects.runtime import ServerArgs
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.observers.kernels import RANGE, Kernel, kernels_of, summary_of
from tests.support.schedulers import run_in_process
from tests.support.tiny_models import make_llama


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
    assert idle == [(1, 0, 9), (6, 0, 4), (0, 0, 4), (0, 7, 1)]
    assert sum(each.duration_ns for each in found) + sum(map(sum, idle)) == 60


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
    assert [each.graph for each in (*first, *second)] == ["replayed"] * 3 + [None] * 2
    # The replay of the first pass ran until 49.
    assert [each.idle_host_ns + each.idle_launch_ns for each in second] == [6, 10]


def test_a_kernel_has_the_module_that_was_called_when_it_was_launched() -> None:
    def named(name: str, operator: int, start: int, duration: int, thread: int = 1) -> ProfilerEvent:
        return ProfilerEvent("operator", name, start, duration, 0, operator, 0, thread)

    events = [
        named(f"{RANGE}mlp", 1, 0, 50),
        named("aten::relu", 2, 5, 5),
        named(f"{RANGE}mlp.down", 3, 10, 20),
        named("aten::mm", 4, 12, 5),
        named("aten::add", 5, 35, 5),
        named("aten::sum", 6, 36, 2, thread=2),
        named("aten::mean", 7, 60, 5),
        *(launch(number, 12 + number) for number in range(1, 8)),
        *(device(f"k{number}", 100 + 10 * number, 5, number, operator=number) for number in range(1, 8)),
        launch(8, 55, "cudaGraphLaunch"),
        device("replayed", 200, 5, 8, operator=5),
        device("nobody's", 300, 5, 99),
    ]
    (found,) = kernels_of(events, [(0, 400)], most=20, name_of=lambda inner, outermost: inner + outermost)
    mlp, down = f"{RANGE}mlp{RANGE}mlp", f"{RANGE}mlp.down{RANGE}mlp"
    assert [(each.operator, each.layer) for each in found] == [
        ("k1", mlp),  # by no operator, as Triton's kernels are launched
        ("aten::relu", mlp),
        ("k3", down),
        ("aten::mm", down),
        ("aten::add", mlp),
        ("aten::sum", ""),  # in another thread, which called no module
        ("aten::mean", ""),
        ("replayed", "replayed graph"),
        ("nobody's", ""),
    ]


def test_layers_are_summed_up_over_their_numbers() -> None:
    layers = ["layers.0.mlp", "layers.11.mlp", "layers.0", "h2.norm", "experts.3.1.up", ""]
    kernels = [Kernel("k", "mm", 0, 10**9, 0, layer=layer) for layer in layers]
    expected = {"layers.*.mlp": 2.0, "layers.*": 1.0, "h2.norm": 1.0, "experts.*.*.up": 1.0, "no module": 1.0}
    assert summary_of(kernels)["layers"] == expected
    assert summary_of(kernels[-1:])["layers"] == {}
    assert summary_of(kernels, longest=2)["layers"] == {"layers.*.mlp": 2.0, "layers.*": 1.0, "others": 3.0}


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
    assert [(each.name, each.idle_host_ns) for each in found] == [("aten::linear", 10), ("aten::relu", 10)]


@pytest.mark.parametrize("steps", [2, 50], ids=["taken", "under way"])
def test_a_profiler_is_freed_also_where_garbage_is_never_collected(steps: int, tmp_path: Path) -> None:
    make_llama(tmp_path / "model", max_position_embeddings=1024)
    with attach(level=3, file=str(tmp_path / "traces.jsonl")) as session:
        assert session.recorder.open()
        asked = kernel_profile.ask(steps, session.run_folder)
        gc.collect()
        gc.disable()
        try:
            run_in_process(ServerArgs(tmp_path / "model"), [[1, 2, 3]], 6)
            answers = asked.answers()
            asked.close()
            session.close()
            left = [each for each in gc.get_objects() if type(each) is torch.profiler.profile]
        finally:
            gc.enable()
    assert left == []
    assert not compat.profiler_is_running()
    assert [answer.get("problem") for answer in answers.values()] == ["" if steps == 2 else None]
