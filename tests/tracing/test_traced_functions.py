"""`[[trace]]` in aspects.toml: spans of a user's own functions, declared without code."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_aspects import Target, config
from sgl_aspects.config import DeclaredTrace
from sgl_aspects.engines import EMBEDDED
from sgl_aspects.errors import ConfigError, HookError
from sgl_aspects.tracing.context import OpenSpan, innermost, leave
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.function import FunctionObserver
from sgl_aspects.tracing.options import TraceOptions
from tests.support.memory_recorder import Memory
from tests.support.otlp_receiver import Span
from tests.support.sessions import traced_program

pytestmark = pytest.mark.usefixtures("forked_schedulers")

WORK = """
import asyncio, enum, threading

class Mode(enum.Enum):
    FAST = 1

class Batch:
    def __init__(self, *reqs):
        self.reqs = reqs
        self.mode = Mode.FAST
        self.info = {"size": len(reqs), "names": [r for r in reqs]}
    @property
    def broken(self):
        raise ValueError("do not look")

class Worker:
    name = "w0"
    def outer(self, batch, *, limit=7):
        return [self.inner(req) for req in batch.reqs]
    def inner(self, req):
        return {"text": req * 600}
    def fail(self, secret):
        raise KeyError(secret)
    def stream(self, batch):
        for req in batch.reqs:
            yield req
    async def later(self, delay, name="x"):
        await asyncio.sleep(delay)
        return self.inner(name)

def free(*args, **kwargs):
    return len(args)
"""
PROGRAM = """
import asyncio, contextlib, threading
from sgl_aspects.plugins import load_plugins
load_plugins()
from work import Batch, Worker, free
worker = Worker()
worker.outer(Batch("a", "b"))
with contextlib.suppress(KeyError):
    worker.fail("xylophone")
for _ in worker.stream(Batch("c", "d")):
    worker.inner("between")
async def both():
    await asyncio.gather(worker.later(0.02, "one"), worker.later(0.01, name="two"))
asyncio.run(both())
free(1, 2, colour="red")
threads = [threading.Thread(target=worker.outer, args=(Batch(str(n)),)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
DECLARED = """
[[trace]]
target = "work:Worker.outer"
[trace.attributes]
"batch.size" = "batch.info.size"
"batch.mode" = "batch.mode"
"batch.names" = "batch.info.names"
"first" = "batch.reqs.0"
"limit" = "limit"
"worker" = "self.name"
"answer" = "result.0.text"
"nothing" = "batch.no.such.thing"
"broken" = "batch.broken"
"thing" = "batch"

[[trace]]
target = "work:Worker.inner"
name = "inner work"
[trace.attributes]
req = "req"

[[trace]]
target = ["work:Worker.not_there", "work:Worker.fail"]

[[trace]]
target = "work:Worker.stream"

[[trace]]
target = "work:Worker.later"
[trace.attributes]
name = "name"

[[trace]]
target = "work:free"
[trace.attributes]
count = "result"
second = "args.1"
colour = "kwargs.colour"

[[trace]]
target = "work:Batch.__init__"
name = "detail"
level = 4
"""


@pytest.fixture
def traced(tmp_path: Path) -> Callable[..., tuple[dict[str, list[Span]], str]]:
    """Runs a program under a configuration file; its spans by name, and what it logged."""

    def run(declared: str, program: str = PROGRAM, *options: str) -> tuple[dict[str, list[Span]], str]:
        (tmp_path / "work.py").write_text(WORK)
        return traced_program(tmp_path, declared, program, *options)

    return run


def test_declared_functions_get_spans_with_the_attributes_that_paths_lead_to(traced: Any) -> None:
    found, logged = traced(DECLARED)
    assert "Traceback" not in logged
    assert {name: len(spans) for name, spans in found.items()} == {
        "Worker.outer": 5,
        "inner work": 2 + 2 + 2 + 4,
        "Worker.fail": 1,
        "Worker.stream": 1,
        "Worker.later": 2,
        "free": 1,
    }
    outer = min(found["Worker.outer"], key=lambda span: span.start)
    ours = {k: v for k, v in outer.attributes.items() if "." not in k or k.startswith("batch.")}
    assert ours == {
        "batch.size": 2,
        "batch.mode": "fast",
        "batch.names": ["a", "b"],
        "first": "a",
        "limit": 7,
        "worker": "w0",
        "answer": "a" * 600,
    }
    free = found["free"][0].attributes
    assert (free["count"], free["second"], free["colour"]) == (2, 2, "red")


def test_a_path_to_an_attribute_that_is_not_there_is_told_once(traced: Any) -> None:
    _, logged = traced(DECLARED)
    assert logged.count("batch.no.such.thing is left out: 'Batch' object has no attribute 'no'") == 1


def test_spans_nest_as_calls_do_in_each_thread_and_task(traced: Any) -> None:
    found, _ = traced(DECLARED)
    by_id = {span.span_id: span for spans in found.values() for span in spans}

    def parent(span: Span) -> str | None:
        return by_id[span.parent_id].name if span.parent_id else None

    for name in ("Worker.outer", "Worker.fail", "Worker.stream", "Worker.later", "free"):
        assert {parent(span) for span in found[name]} == {None}
    by_req = {span.attributes["req"]: span for span in found["inner work"]}
    assert {req: parent(span) for req, span in by_req.items() if not req.isdecimal()} == {
        "a": "Worker.outer",
        "b": "Worker.outer",
        "between": None,  # called by whom the generator had handed an item, not by the generator
        "one": "Worker.later",
        "two": "Worker.later",
    }
    for name in ("one", "two"):
        assert by_id[by_req[name].parent_id].attributes["name"] == name
    for number in range(4):
        span = by_req[str(number)]
        assert by_id[span.parent_id].attributes["first"] == str(number)
        assert span.trace_id == by_id[span.parent_id].trace_id
    assert len({span.trace_id for span in found["Worker.outer"]}) == 5


def test_an_exception_is_named_by_its_type_and_its_text_kept_out(traced: Any) -> None:
    found, _ = traced(DECLARED)
    (failed,) = found["Worker.fail"]
    assert failed.is_error
    assert failed.attributes["error.type"] == "KeyError"
    assert "xylophone" not in repr(failed)


def test_a_generator_whose_reader_stops_early_has_not_failed(traced: Any) -> None:
    found, _ = traced(DECLARED, PROGRAM + "\nnext(worker.stream(Batch('e', 'f')))\n")
    assert [span.is_error for span in found["Worker.stream"]] == [False, False]


def test_what_an_attribute_holds_is_bounded(traced: Any) -> None:
    program = "from work import free\nfree([*range(5000)], ['x' * 5000] * 5000, text='y' * 5000)\n"
    found, _ = traced(
        """
        [[trace]]
        target = "work:free"
        [trace.attributes]
        numbers = "args.0"
        texts = "args.1"
        text = "kwargs.text"
        """,
        program,
    )
    attributes = found["free"][0].attributes
    assert attributes["numbers"] == [*range(256)]
    assert attributes["texts"] == ["x" * 1024] * 256
    assert attributes["text"] == "y" * 1024


def test_levels_hold_for_declared_functions_too(traced: Any) -> None:
    found, _ = traced(DECLARED, PROGRAM, "--level", "4")
    assert len(found["detail"]) == 6
    found, _ = traced(DECLARED, PROGRAM, "--level", "0")
    assert found == {}


def test_a_path_that_begins_with_no_parameter_fails_alone_and_lists_the_choices(traced: Any) -> None:
    faulty = '[[trace]]\ntarget = "work:Worker.inner"\nname = "faulty"\nattributes = {x = "rec.x"}\n'
    found, logged = traced(faulty + DECLARED)
    assert "faulty" not in found
    assert len(found["inner work"]) == 10
    assert "aspects.toml: trace 1" in logged
    assert "has no parameter 'rec'; choose from: self, req" in logged


def test_functions_inside_a_scheduler_step_are_children_of_what_runs_there(
    traced: Any, tmp_path: Path
) -> None:
    from tests.support.tiny_models import make_llama

    make_llama(tmp_path / "tiny", max_position_embeddings=256)
    program = (
        "from sgl_aspects.runtime.engine import Engine\n"
        "if __name__ == '__main__':\n"
        "    with Engine(model_path='tiny') as engine:\n"
        "        engine.generate('hello')\n"
    )
    declared = (
        "[[trace]]\ntarget = 'sgl_aspects.runtime.execution.model_runner:ModelRunner.forward'\n"
        "name = 'mine'\n"
        "attributes = {size = 'batch.batch_size', device = 'self.device.type'}\n"
    )
    found, _ = traced(declared, program, "--level", "3")
    runs = {span.span_id for span in found["run_batch"]}
    assert found["mine"]
    assert {span.parent_id for span in found["mine"]} <= runs
    assert found["mine"][0].attributes["size"] == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("target='a:b'\nname=''", ["name = ''", "leave it out"]),
        ("target='a:b'\nname=3", ["name = 3", "a text"]),
        ("target='a:b'\nlevel=5", ["level = 5", "1, 2, 3 or 4"]),
        ("target='a:b'\nlevel=true", ["level = True"]),
        ("target='a:b'\nattributes=['x']", ["attributes", "[trace.attributes]"]),
        ("target='a:b'\nattributes={x='f()'}", ["'x' = 'f()'", "parameter", "'result'"]),
        ("target='a:b'\nattributes={x='a.f()'}", ["'f()'", "no code"]),
        ("target='a:b'\nattributes={x=''}", ["'x' = ''"]),
        ("target='a:b'\nattribute={}", ["'attribute'", "attributes, required"]),
        ("name='x'", ["target = None"]),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_the_choices(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "aspects.toml"
    path.write_text(f"[[trace]]\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        config.read(path)
    for word in [f"{path}: trace 1", *words]:
        assert word in str(caught.value)


def test_arguments_are_read_through_decorators_that_hand_them_on() -> None:
    """Like SGLang's functions under ``torch.inference_mode``."""

    @torch.inference_mode()
    def forward(model: str, batch: Any, scale: float = 2.0) -> None: ...

    def checked(first: Any, *others: Any) -> None:
        """Has parameters of its own."""

    checked.__wrapped__ = forward  # type: ignore[attr-defined]
    recorder = Memory()
    paths = {"size": ("batch", "size"), "scale": ("scale",)}
    declared = DeclaredTrace(Target.parse("m:forward"), None, 1, (), paths, False, "aspects.toml")
    observer = FunctionObserver(recorder, declared).bound_to(forward)
    batch = SimpleNamespace(size=3)
    observer.exit(observer.enter(("model", batch), {"scale": 0.5}), None, None)
    (span,) = recorder.ended
    assert span.values == [3, 0.5]
    with pytest.raises(HookError, match="first"):
        FunctionObserver(recorder, declared).bound_to(checked)


def test_work_in_another_thread_belongs_to_the_request_that_it_names() -> None:
    """Where the thread was given no context; one that was nests as usual."""

    def work(task: Any) -> OpenSpan | None:
        return innermost()

    recorder = Memory()
    trackers = Trackers.of(EMBEDDED, recorder, TraceOptions())
    asked = SimpleNamespace(rid="r", is_chat=False, headers=None, prompt="x")
    call = trackers.calls.live["r"] = trackers.calls.begin(asked, None, 1)
    number: Any = 7  # an engine's ids may be numbers
    key, numbered = trackers.requests.queued("scheduled").key, trackers.requests.queued(number).key
    declared = DeclaredTrace(Target.parse("m:work"), None, 1, ("task", "rid"), {}, False, "aspects.toml")
    observer = FunctionObserver(recorder, declared, trackers.span_of).bound_to(work)

    def traced(rid: str) -> OpenSpan | None:
        args = (SimpleNamespace(rid=rid),)
        token = observer.enter(args, {})
        current = work(*args)
        observer.exit(token, None, None)
        return current

    with ThreadPoolExecutor() as pool:
        current = pool.submit(traced, "r").result()
        assert pool.submit(traced, "scheduled").result() is None  # its trace is unknown here
        pool.submit(traced, number).result()
        pool.submit(traced, "unknown").result()
        opened = trackers.calls.enter(call)
        pool.submit(contextvars.copy_context().run, traced, "unknown").result()
        leave(opened)
    spans = recorder.named(f"{work.__qualname__}")
    assert [span.parent_id for span in spans] == [call.span_id, key, numbered, 0, call.span_id]
    assert [span.root_id for span in spans] == [call.span_id, key, numbered, spans[3].span_id, call.span_id]
    assert current is not None
    assert (current.trace, current.span_id) == (call.origin, spans[0].span_id)
