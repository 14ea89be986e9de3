"""Private names of other packages are where this package uses them; if one has moved, its test fails."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects import compat


def scripted(x: int) -> int:
    return x + 1


# -- the import system --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("how", ["import", "import_module", "reload"])
def test_every_search_passes_the_function_that_is_wrapped(folder: Path, how: str) -> None:
    (folder / "searched.py").write_text("")
    found: list[str] = []
    if how == "reload":
        importlib.import_module("searched")
    undo = compat.after_each_search(lambda spec: found.append(spec.name))
    try:
        if how == "import":
            exec("import searched")
        elif how == "import_module":
            importlib.import_module("searched")
        else:
            importlib.reload(sys.modules["searched"])
    finally:
        undo()
    importlib.reload(sys.modules["searched"])
    assert found == ["searched"]


GATE = "import threading\nreached, go_on = threading.Event(), threading.Event()\n"


def test_when_the_code_of_a_module_has_run(folder: Path) -> None:
    (folder / "gate.py").write_text(GATE)
    (folder / "slow.py").write_text("import gate\ngate.reached.set()\ngate.go_on.wait(60)\n")
    gate = importlib.import_module("gate")
    ready: list[str] = []
    thread = threading.Thread(target=importlib.import_module, args=("slow",))
    thread.start()
    assert gate.reached.wait(60)
    spec = sys.modules["slow"].__spec__
    assert compat.is_initializing(spec)
    compat.when_initialized(spec, lambda: ready.append("slow"))
    assert ready == []
    gate.go_on.set()
    thread.join(60)
    assert ready == ["slow"]
    assert not compat.is_initializing(spec)
    assert type(spec) is importlib.machinery.ModuleSpec


def test_opentelemetry_keeps_its_current_context_where_we_put_ours_on_top(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from opentelemetry import context

    assert compat.runtime_context_class() is not None
    monkeypatch.setattr(context, "_RUNTIME_CONTEXT", object())
    assert compat.runtime_context_class() is None  # moved: spans are recorded nonetheless


# -- torch.compile ------------------------------------------------------------------------------------------


def test_torch_compile_begins_anew_only_for_functions_that_it_has_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("torch._dynamo")

    class Layer:
        def inlined(self, x: object) -> object:
            return x

        def never(self, x: object) -> object:
            return x

    def outer(layer: Layer, x: object) -> object:
        return layer.inlined(x)

    resets: list[object] = []
    reset = torch._dynamo.reset
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(reset()))

    def is_reset_for(function: object) -> bool:
        before = len(resets)
        torch.compile(outer, backend="eager", fullgraph=True)(Layer(), torch.ones(2))
        compat.forget_compiled([Layer.never, function])
        return len(resets) > before

    assert compat.traced_code() is not None, "find another way in torch: each hook on a method costs a reset"
    assert not is_reset_for(Layer.never)
    for function in (outer, Layer.inlined, len):
        assert is_reset_for(function)
        before = len(resets)
        compat.forget_compiled([outer, Layer.inlined])
        assert len(resets) == before, "it had forgotten them already"


def test_torch_compile_takes_a_substitute_for_the_test_of_woven_functions() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch._dynamo")
    test = compat.compiling_test(torch.compiler)
    assert test is not torch.compiler.is_compiling, "find another way in torch: woven functions pay for it"
    traced = torch.compile(lambda number: number + int(test()), fullgraph=True, backend="eager")
    assert not test()
    assert int(traced(torch.zeros(()))) == 1


def test_torch_compile_finds_the_mark_of_a_constant_result() -> None:
    torch = pytest.importorskip("torch")

    def theirs() -> bool:
        return True

    def ours() -> bool:
        return True

    torch.compiler.assume_constant_result(theirs)
    assert vars(compat.assume_constant_result(ours)) == vars(theirs)


def test_opentelemetry_s_instrumentations_leave_a_thread_alone() -> None:
    from opentelemetry.context import Context, attach, detach, get_value

    token = attach(Context())
    try:
        compat.suppress_instrumentation()
        assert get_value(importlib.import_module("opentelemetry.context")._SUPPRESS_INSTRUMENTATION_KEY)
    finally:
        detach(token)


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_a_histogram_s_recorder_records_what_the_histogram_does(temporality: str) -> None:
    from opentelemetry.sdk.metrics import Histogram, MeterProvider
    from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader

    preferred = AggregationTemporality[temporality.upper()]
    metrics = InMemoryMetricReader(preferred_temporality={Histogram: preferred})
    provider = MeterProvider([metrics], shutdown_on_exit=False)
    theirs, ours = (provider.get_meter("m").create_histogram(name) for name in ("theirs", "ours"))
    of_mode = {"mode": "decode", "model": "é"}
    record, plain = (compat.histogram_recorder(ours, attributes) for attributes in (of_mode, {}))
    for turn in range(2):
        for amount in (0, 0.25 + turn, 3, 1e9):
            record(amount)
            plain(amount * 2)
            theirs.record(amount, of_mode)
            theirs.record(amount * 2, {})
        found: dict[str, list[object]] = {}
        read: Any = metrics.get_metrics_data()
        for metric in read.resource_metrics[0].scope_metrics[0].metrics:
            found[metric.name] = [
                (point.attributes, point.count, point.sum, point.bucket_counts, point.min, point.max)
                for point in sorted(metric.data.data_points, key=lambda point: len(point.attributes))
            ]
        assert found["ours"] == found["theirs"]
        assert len(found["ours"]) == 2
    # A reader of differences begins anew at each collection, with new points.
    assert (getattr(record, "func", None) == ours.record) == (temporality == "delta")
    provider.shutdown()


def test_the_events_of_a_profiler_have_their_kind_and_time() -> None:
    import time

    import torch
    from torch.profiler import ProfilerActivity, profile

    assert not compat.profiler_is_running()
    begin = time.time_ns()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert compat.profiler_is_running()
        with torch.profiler.record_function("a range"):
            torch.ones(3).add(1)
    end = time.time_ns()
    found = {event.name: event for event in compat.profiler_events(profiled)}
    assert found["aten::add"].kind == "operator"
    assert found["a range"].kind == ""
    assert begin - 10**6 <= found["aten::add"].start_ns <= end
    assert found["aten::add"].operator_id != found["aten::ones"].operator_id


def test_each_call_of_a_module_is_a_range_until_that_is_undone() -> None:
    import torch
    from torch.profiler import profile

    original = torch.nn.Module.__call__
    inner = torch.nn.Linear(2, 2)
    undo = compat.name_module_calls(lambda module: "inner" if module is inner else "outer")
    try:
        with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
            torch.nn.Sequential(inner)(torch.ones(1, 2))
    finally:
        undo()
    assert torch.nn.Module.__call__ is original
    found = {event.name: event for event in compat.profiler_events(profiled)}
    names = ["outer", "inner", "aten::linear"]
    begins = [found[name].start_ns for name in names]
    ends = [found[name].start_ns + found[name].duration_ns for name in names]
    assert begins == sorted(begins)
    assert ends == sorted(ends, reverse=True)
    assert [found[name].kind for name in names] == ["operator"] * 3
    assert len({found[name].operator_id for name in names}) == 3


def test_a_metric_reader_gathers_under_a_lock_and_sends_without() -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    lock, held = threading.Lock(), []

    class Reader(InMemoryMetricReader):
        def _receive_metrics(self, *args: Any, **options: Any) -> None:
            held.append(lock.locked())

    reader = Reader()
    MeterProvider([reader], shutdown_on_exit=False).get_meter("m").create_counter("c").add(1)
    compat.gather_under(reader, lock, lambda: held.append(lock.locked()))
    reader.collect()
    assert held == [True, False]
