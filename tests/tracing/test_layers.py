"""Which module of a model launched a kernel; what others do with modules meanwhile is left alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from sgl_aspects import compat
from sgl_aspects.tracing.observers.kernels import ModuleRanges, kernels_of

COMPILED: Any = functools.partial(torch.compile, backend="eager", fullgraph=True)
ROW = torch.ones(1, 4)
ORIGINAL = nn.Module.__call__


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, row: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(row).relu())
        return down


class Model(nn.Module):
    def __init__(self, layers: int = 2, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = shared or nn.Linear(4, 4)

    def forward(self, row: Tensor) -> Tensor:
        for layer in self.layers:
            row = layer(row)
        logits: Tensor = self.head(row)
        return logits


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    assert nn.Module.__call__ is ORIGINAL


@torch.no_grad()
def layers_of(run: Callable[[], Any], *models: Any, during: Callable[[], None] | None = None) -> list[str]:
    """Return the layers of linear and relu operators that ``run`` calls, one after the other."""
    modules = ModuleRanges()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        modules.start()
        try:
            run()
            if during is not None:
                during()
        finally:
            modules.stop()
    events, name_of = compat.profiler_events(profiled), modules.names(models)
    (found,) = kernels_of(events, [(0, 1 << 63)], 1000, is_host=True, name_of=name_of)
    return [each.layer for each in found if each.operator in ("aten::linear", "aten::relu")]


def test_the_innermost_module_by_its_name_in_the_model() -> None:
    model = Model()
    block = ["up", "", "down"]
    names = [f"layers.{number}.{part}".rstrip(".") for number in range(2) for part in block]
    assert layers_of(lambda: model(ROW), model) == [*names, "head"]
    # As SGLang calls a model: its own forward is no call of a module.
    assert layers_of(lambda: model.forward(ROW), model) == [*names, "head"]


def test_a_module_of_no_known_model_has_the_name_in_the_outermost_one_with_its_class() -> None:
    model = Model(1)
    names = ["layers.0.up", "layers.0", "layers.0.down", "head"]
    assert layers_of(lambda: model(ROW)) == [f"Model.{name}" for name in names]
    assert layers_of(lambda: model(ROW), None, object()) == [f"Model.{name}" for name in names]
    assert layers_of(lambda: model.head(ROW)) == ["Linear"]
    assert layers_of(lambda: (model(ROW), ROW.relu())) == [*(f"Model.{name}" for name in names), ""]


def test_a_module_that_a_layer_makes_as_it_runs_is_that_layers() -> None:
    class Making(nn.Module):
        def forward(self, row: Tensor) -> Tensor:
            made: Tensor = nn.Sequential(nn.ReLU())(row)
            return made

    model = nn.Sequential(Making())
    assert layers_of(lambda: model(ROW), model) == ["0"]
    assert layers_of(lambda: model(ROW)) == ["Sequential.0"]


def test_models_side_by_side_are_told_apart() -> None:
    target = Model(1)
    draft = Model(1, shared=target.head)
    expected = ["layers.0.up", "layers.0", "layers.0.down"]
    found = layers_of(lambda: (target(ROW), draft(ROW)), target, draft)
    assert found == [
        *(f"Model#0:{name}" for name in (*expected, "head")),
        *(f"Model#1:{name}" for name in expected),
        "Model#0:head",
    ]


def test_a_module_that_fails_ends_its_range() -> None:
    class Failing(nn.Module):
        def forward(self, row: Tensor) -> Tensor:
            raise ValueError("no")

    def run() -> None:
        with pytest.raises(ValueError, match="no"):
            nn.Sequential(Failing())(ROW)
        ROW.relu()

    assert layers_of(run) == [""]


def test_modules_of_other_threads_work_and_are_nobodys_layer() -> None:
    model, results = Model(1), []

    class Waiting(nn.Module):
        def forward(self, row: Tensor) -> Tensor:
            thread = threading.Thread(target=lambda: results.append(model(row)))
            thread.start()
            thread.join()
            return row.relu()

    assert layers_of(lambda: Waiting()(ROW), model) == ["Waiting"]
    assert torch.equal(results[0], model(ROW))


# -- others' modules ----------------------------------------------------------------------------------------


def compilations(run: Callable[[], Any]) -> int:
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        run()
    return counters["stats"]["unique_graphs"] - before


@pytest.mark.parametrize("kind", ["wrapped", "in place", "function"])
def test_what_is_compiled_is_not_compiled_again(kind: str) -> None:
    inner = Block()
    model: Any = nn.Sequential(inner)
    run: Callable[[Tensor], Tensor] = inner
    if kind == "wrapped":
        model = nn.Sequential(COMPILED(inner))
    elif kind == "in place":
        inner.compile(backend="eager", fullgraph=True)
    else:
        run = COMPILED(lambda row: inner(row))
    call = run if kind == "function" else model
    assert compilations(lambda: call(ROW)) == 1
    seen = []
    found = layers_of(lambda: seen.append(compilations(lambda: call(ROW))), model)
    assert seen == [0]
    assert compilations(lambda: call(ROW)) == 0
    # Its own modules are compiled with it, so that none of them is called.
    assert set(found) == {"" if kind == "function" else "0"}


def test_what_is_compiled_meanwhile_has_no_part_of_it() -> None:
    model, seen = Model(1), []
    expected = model(ROW)
    compiled = COMPILED(lambda row: model(row))
    layers_of(lambda: seen.append(compilations(lambda: compiled(ROW))), model)
    assert seen == [1]
    assert torch.equal(compiled(ROW), expected)


def test_a_patch_on_top_stays_and_calls_modules_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def patch() -> None:
        below = nn.Module.__call__

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(type(self).__name__)
            return below(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, "__call__", theirs)

    model = Model(1)
    layers_of(lambda: model(ROW), model, during=patch)
    assert torch.equal(model(ROW), model.forward(ROW))
    assert calls[0] == "Model"
    monkeypatch.undo()
    nn.Module.__call__ = ORIGINAL  # type: ignore[method-assign]
