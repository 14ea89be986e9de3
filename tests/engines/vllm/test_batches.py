"""Readers of a batch in vLLM's room, on fakes of its messages: needs no vLLM."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_aspects.engines import VLLM
from sgl_aspects.engines.base import Role
from sgl_aspects.engines.vllm.batch import shared_id
from sgl_aspects.engines.vllm.scheduler import Scheduled
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.context import trace_id_of_root
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers import WovenLevels
from sgl_aspects.tracing.observers.detail import DetailObserver
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import SpanEnd
from sgl_aspects.tracing.schema import FORWARD, STEP
from tests.support.memory_recorder import Memory
from tests.support.phases import engine_receiver
from tests.support.rings import read_all
from tests.support.stepping import Loop
from tests.support.vllm_messages import batch


def test_each_batch_has_an_id_that_another_process_derives_too() -> None:
    steps = [batch(new={"a": 5}), *(batch(cached={"a": (5 + n, 1 + n)}, new={"b": 9}) for n in range(500))]
    ids = [shared_id(step) for step in steps]
    assert len(set(ids)) == len(ids)
    assert ids == [shared_id(step) for step in steps]
    for found in ids:
        assert found is not None
        assert found >> 63 == 1
        assert found >> layout.CHILD_SHIFT & 7 == 0  # room for the numbers of its children
    assert shared_id(batch()) is None


def test_a_request_that_gave_way_gives_another_id_than_before() -> None:
    assert shared_id(batch(new={"a": 5})) != shared_id(batch(cached={"a": (0, 7)}, resumed=("a",)))


@pytest.mark.parametrize(
    ("message", "mode"),
    [
        (batch(new={"a": 5}), "prefill"),
        (batch(cached={"a": (5, 1), "b": (7, 3)}), "decode"),
        (batch(new={"a": 5}, cached={"b": (7, 3)}), "mixed"),
        (batch(cached={"a": (64, 0)}, tokens={"a": 36}), "prefill"),
        (batch(cached={"a": (0, 9)}, resumed=("a",), tokens={"a": 14}), "prefill"),
        # The second chunk of a request that was preempted.
        (batch(cached={"a": (256, 300), "b": (7, 3)}, tokens={"a": 45}), "mixed"),
        (batch(cached={"a": (5, 1), "b": (7, 3)}, tokens={"a": 3}, guessed={"a": [8, 9]}), "decode"),
    ],
)
def test_the_mode_of_a_batch(message: Any, mode: str) -> None:
    assert VLLM.reader("mode.name")(VLLM.reader("batch.mode")(message)) == mode


def test_the_requests_of_a_batch_are_one_object_while_they_are_the_same() -> None:
    read = VLLM.reader("batch.reqs")

    def decode(*rids: str) -> Any:
        return batch(cached=dict.fromkeys(rids, (5, 1)))

    first = read(decode("a", "b"))
    assert read(decode("a", "b")) is first
    assert [*read(decode("a"))] == ["a"]
    assert {*read(batch(new={"c": 5}, cached={"a": (6, 2)}))} == {"a", "c"}
    assert read(batch()) == {}
    assert {*read(decode("a", "c"))} == {"a", "c"}
    assert read(decode("c", "a")) == read(decode("a", "c"))


MESSAGES = (
    batch(new={"a": 5}),
    batch(cached={"a": (5, 1)}, new={"b": 7}),
    *(batch(cached={"a": (5 + n, 1 + n), "b": (7 + n, n)}) for n in range(1, 4)),
    batch(),
    batch(cached={"b": (11, 4)}),
    batch(cached={"b": (12, 5)}, tokens={"b": 3}, guessed={"b": [8, 9]}),
    batch(cached={"b": (12, 5)}),
    batch(cached={"b": (0, 6)}, resumed=("b",), tokens={"b": 18}),
    batch(cached={"c": (64, 0)}),
    batch(cached={"c": (65, 1)}),
)


def test_a_summary_says_in_one_call_what_each_reader_says() -> None:
    mode, reqs, summary = (VLLM.reader(f"batch.{name}") for name in ("mode", "reqs", "summary"))
    for message in MESSAGES:
        expected = mode(message), dict.fromkeys(reqs(message))
        for _ in range(2):
            found = summary(message)
            if not message.num_scheduled_tokens:
                assert found is None
                continue
            assert (found[0], dict.fromkeys(found[1])) == expected


def recorded(folder: Path, *, in_c: bool) -> tuple[list[list[Any]], list[int]]:
    """Return mode, size and tokens of each message's step, and the messages that Python was given."""
    asked = []

    class Observer(StepObserver):
        def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            asked.append(MESSAGES.index(args[1]))
            return super()._run_enter(args, kwargs)

    recorder = RingRecorder(str(folder))
    recorder.open()
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    for rid in "abc":
        trackers.requests.resume(trackers.requests.queued(rid), 1)
    observer = Observer(trackers)
    scheduler = SimpleNamespace(waiting=[], running=[], kv_cache_manager=SimpleNamespace(usage=0.5))
    enter = observer.run_enter if in_c else observer._run_enter
    for message in MESSAGES:
        result = SimpleNamespace(sampled_token_ids=[])
        observer._run_exit(enter((None, message), {}), result, None)
        observer._process_exit(observer._process_enter((scheduler, message, result), {}), None, None)
    recorder.close()
    told = [each for each in read_all(RunReader(str(folder))) if isinstance(each, SpanEnd)]
    return [[*each.values[:3]] for each in told if each.type.name == STEP.name], asked


@pytest.mark.skipif(native.compiled is None, reason=native.state())
def test_a_batch_that_decodes_the_requests_of_the_one_before_is_recognized_in_c(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "python").mkdir()
    in_c, asked = recorded(tmp_path / "c", in_c=True)
    in_python, _ = recorded(tmp_path / "python", in_c=False)
    assert in_c == in_python
    assert len(in_c) == sum(bool(message.num_scheduled_tokens) for message in MESSAGES)
    assert [number for number in range(len(MESSAGES)) if number not in asked] == [3, 4, 7, 8]


@pytest.mark.parametrize("part", ["", "_"] if native.compiled is not None else ["_"])
def test_a_step_derives_no_id_where_its_passes_run_in_its_own_process_also_at_level_2(
    tmp_path: Path, part: str
) -> None:
    recorder = RingRecorder(str(tmp_path))
    recorder.open()
    recorder.steps.words[layout.WORD_LEVEL] = 2
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    steps, passes = StepObserver(trackers), ForwardObserver(trackers)
    enter = getattr(passes, "forward_enter" if part == "" else "_enter")
    scheduler = SimpleNamespace(waiting=[], running=[], kv_cache_manager=SimpleNamespace(usage=0.5))
    for message in (batch(cached={"a": (5 + n, 1 + n)}) for n in range(3)):
        token = getattr(steps, f"{part}run_enter")((None, message), {})
        assert enter((object(), message), {}) is None
        steps._run_exit(token, message, None)
        steps._process_exit(steps._process_enter((scheduler, message, message), {}), None, None)
    recorder.close()
    spans = [each for each in read_all(RunReader(str(tmp_path))) if isinstance(each, SpanEnd)]
    assert [each.span_id >> 63 for each in spans if each.type.name == STEP.name] == [1, 0, 0]


def test_prompts_are_known_chunk_by_chunk_though_decodes_are_mixed_in() -> None:
    scheduled = Scheduled()
    requests = {rid: SimpleNamespace(is_prefill_chunk=False, pooling_params=None) for rid in ("a", "b")}

    class Scheduler:
        def __init__(self) -> None:
            self.requests = requests

    scheduler = Scheduler()
    scheduled.meet(scheduler)

    def schedule(message: Any, **more_to_come: bool) -> list[tuple[str, int, bool]]:
        for rid, more in more_to_come.items():
            requests[rid].is_prefill_chunk = more
        return scheduled.prompts(message)

    assert schedule(batch(new={"a": 64}), a=True) == [("a", 64, False)]
    assert schedule(batch(cached={"a": (64, 0)}, new={"b": 3}, tokens={"a": 36}), a=False) == [
        ("b", 3, True),
        ("a", 36, True),
    ]
    assert schedule(batch(cached={"a": (100, 1), "b": (3, 1)})) == []
    assert schedule(batch(cached={"a": (0, 2)}, resumed=("a",), tokens={"a": 102})) == [("a", 102, True)]
    # Beside a prompt of one token are places for drafts.
    padded = batch(new={"b": 1}, tokens={"b": 5}, guessed={"b": [-1] * 4})
    assert schedule(padded) == [("b", 1, True)]


def test_a_pass_of_a_worker_is_in_the_trace_of_its_step_without_a_record_of_the_step() -> None:
    """For workers of a scheduler on another host: their collector never gets the step."""
    step = shared_id(batch(new={"a": 5}))
    assert step is not None
    run_id = layout.child_id(step, layout.CHILD_RUN_BATCH)
    with engine_receiver() as receiver:
        with attach(endpoint=receiver.endpoint) as session:
            now = time.monotonic_ns()
            write = session.recorder.spans(FORWARD)
            write(session.recorder.new_id(), step, run_id, now, now + 1000, ["decode", 1, 1])
        (span,) = receiver.named("forward")
    assert span.trace_id == f"{trace_id_of_root(step):032x}"
    assert span.parent_id == f"{run_id:016x}"
    assert session.close().unjoined == 0


def test_a_process_describes_itself() -> None:
    settings = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="mini"),
        parallel_config=SimpleNamespace(rank=5, tensor_parallel_size=4, data_parallel_rank=0),
    )
    said = {
        role: VLLM.call_reader(role, "description")((None, settings), {}, None)
        for role in ("describe_server", "describe_scheduler", "describe_worker")
    }
    assert said == {
        "describe_server": {"service": "mini"},
        "describe_scheduler": {"service": "mini", "rank": "dp0"},
        "describe_worker": {"service": "mini", "rank": "tp1 pp1 dp0"},
    }
    by_name = VLLM.call_reader("describe_scheduler", "description")
    assert by_name((None,), {"vllm_config": settings}, None) is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [("cmpl-mine-0", "cmpl-mine"), ("cmpl-7-12", "cmpl-7"), ("chatcmpl-7-12", "chatcmpl-7-12")],
)
def test_the_client_s_id_of_an_answer(given: str, expected: str) -> None:
    request = SimpleNamespace(request_id=f"{given}-a2f4ccef", external_req_id=given)
    assert VLLM.reader("request.response_id")(request) == expected
    of_rust = SimpleNamespace(request_id=f"{given}-a2f4ccef")
    assert VLLM.reader("request.response_id")(of_rust) == given


def copies(*sizes: int) -> Any:
    """The simple connector's copying of blocks that have so many bytes in each layer."""
    return SimpleNamespace(launch_copy=None, _store_params=SimpleNamespace(bpb=torch.tensor(sizes)))


def test_an_offloading_moves_the_blocks_of_each_group_of_layers() -> None:
    load, write_back = (VLLM.call_reader(role, "bytes") for role in ("cache_load", "cache_write_back"))
    layer = SimpleNamespace(page_size_bytes=10)
    handler = SimpleNamespace(layer_refs_per_group=[[layer, layer], [layer]])
    worker, device = SimpleNamespace(_load_handler=handler), SimpleNamespace(group_sizes=[3, 2])
    host = SimpleNamespace(block_ids=[0, 1, 2, 3, 4])
    assert load((worker, 1, host, device), {}) == load((worker,), {"dst_spec": device}) == 3 * 20 + 2 * 10
    assert write_back((worker, 1, device, host), {}) == 80
    simple = copies(12, 20)
    assert load((simple, [4, 5], [0, 1], False), {}) == 2 * (12 + 20)
    assert write_back((simple, [4, 5], [0, 1], False), {}) == 0


def test_what_a_worker_loads_and_writes_back_belongs_to_its_passes() -> None:
    """A load can run with an empty batch, while its request waits: it belongs to the step that comes next."""
    recorder = Memory()
    recorder.level = 4
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    observers = ForwardObserver(trackers), DetailObserver(trackers)
    loop = Loop(one for each in observers for one in each.observations())
    runner = SimpleNamespace(device="meta")
    load, store = (copies(12), [4], [0], False), (copies(12), [4], [0], True)
    for message, role, moved in (
        (batch(), "cache_load", load),
        (batch(new={"a": 5}), "cache_write_back", store),
    ):
        with loop.call("forward", runner, message), loop.call(role, *moved):
            pass
    for moved in (store, load):
        with loop.call("cache_write_back", *moved):
            pass
    step_id = shared_id(batch(new={"a": 5}))
    run_id = layout.child_id(step_id or 0, layout.CHILD_RUN_BATCH)
    (forward,) = recorder.named("forward")
    (loaded,), written = (recorder.named(name) for name in ("cache.load", "cache.write_back"))
    assert {span.root_id for span in (loaded, *written)} == {step_id}
    assert [span.parent_id for span in (loaded, *written)] == [step_id, forward.span_id, run_id]


def test_below_level_3_a_forward_pass_has_a_hook_only_where_no_step_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker detects there that the level has changed; a step's own process has its scheduler for it."""

    class Passes(ModuleType):
        class Runner:
            def execute_model(self, scheduler_output: Any) -> None: ...

        class Executor:
            def execute_model(self, scheduler_output: Any) -> object:
                Passes.Runner().execute_model(scheduler_output)
                return scheduler_output

    monkeypatch.setitem(sys.modules, "passes", Passes("passes"))
    of_batch = "batch:scheduler_output"
    roles = {
        "run_batch": Role(("passes:Executor.execute_model",), ("_", of_batch)),
        "forward": Role(("passes:Runner.execute_model",), ("model_runner:self", of_batch)),
    }
    original = Passes.Runner.execute_model
    recorder = RingRecorder(str(tmp_path))
    recorder.open()
    recorder.steps.words[layout.WORD_LEVEL] = 2
    trackers = Trackers.of(dataclasses.replace(VLLM, roles={**VLLM.roles, **roles}), recorder, DEFAULTS)
    observers = StepObserver(trackers), ForwardObserver(trackers)
    woven = WovenLevels(trackers.engine, [one for each in observers for one in each.observations()])
    trackers.steps.on_level = woven.set_level
    woven.set_level(2)
    is_hooked = []
    for number, level in enumerate((2, 2, 2, 3, 2, 2)):
        recorder.steps.words[layout.WORD_LEVEL] = level
        Passes.Executor().execute_model(batch(cached={"a": (5 + number, 1 + number)}))
        is_hooked.append(Passes.Runner.execute_model is not original)
    woven.remove()
    recorder.close()
    assert is_hooked == [True, False, False, True, False, False]
