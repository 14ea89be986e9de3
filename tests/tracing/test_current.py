"""A span of ours that covers code is the current one there: for other spans, clients and logs."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as otel_context
from opentelemetry.propagate import inject
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sgl_aspects.tracing import context
from sgl_aspects.tracing.collect.join import Joiner
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.logs import correlate_logs
from sgl_aspects.tracing.observers import weave_observers
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import SpanType
from sgl_aspects.tracing.sdk import SdkRecorder
from sgl_aspects.weaving import weaver
from tests.support.distributions import install
from tests.support.memory_recorder import enter
from tests.support.rings import poll
from tests.support.stand_ins import Engine, ForwardMode

MANAGER = """
    import asyncio
    look = lambda where, **more: None
    class TokenizerManager:
        served_model_name = "m"
        async def generate_request(self, obj, request=None):
            self._init_req_state(obj, request)
            look("generating")
            tokenized = await self._tokenize_one_request(obj)
            await self._send_one_request(tokenized)
            for piece in range(2):
                yield piece
        def _init_req_state(self, obj, request=None):
            pass
        async def _tokenize_one_request(self, obj):
            for turn in range(3):
                look("tokenize", rid=obj.rid)
                await asyncio.sleep(0)
            if obj.hangs:
                await asyncio.sleep(60)
            return obj
        async def _send_one_request(self, tokenized_obj):
            look("send", rid=tokenized_obj.rid)
    """
SCHEDULER = """
    look = lambda where, **more: None
    class Scheduler:
        runner = None
        def get_next_batch_to_run(self, running_batch=None, last_batch=None):
            return self.found
        def run_batch(self, batch, pp_proxy_tensors=None):
            look("run_batch")
            self.runner.forward(batch)
            self.runner.sample(None, batch)
            look("run_batch")
            return object()
        def process_batch_result(self, batch, result):
            look("process_result")
    """
RUNNER = """
    look = lambda where, **more: None
    class ModelRunner:
        def forward(self, forward_batch):
            look("forward")
        def sample(self, logits_output, forward_batch):
            look("sample")
    """


@dataclass
class Traced:
    """A fake engine with SGLang's names, traced; ``seen`` is what was current where it looked."""

    engine: Engine
    spans: Callable[[], dict[str, ReadableSpan]]
    seen: list[tuple[str, trace.SpanContext, str, str]]

    def load(self, name: str) -> Any:
        module = self.engine.load(name)
        module.look = self._look
        return module

    def _look(self, where: str, rid: str = "") -> None:
        headers: dict[str, str] = {}
        inject(headers)
        current = trace.get_current_span().get_span_context()
        self.seen.append((where, current, headers.get("traceparent", ""), rid))


def by_name(spans: Any) -> dict[str, ReadableSpan]:
    return {span.name: span for span in spans}


@pytest.fixture(params=["ring", "sdk"])
def traced(
    request: pytest.FixtureRequest, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Traced]:
    engine.write("sglang/srt/managers/tokenizer_manager.py", MANAGER)
    engine.write("sglang/srt/managers/scheduler.py", SCHEDULER)
    engine.write("sglang/srt/model_executor/model_runner.py", RUNNER)
    recorder: RingRecorder | SdkRecorder
    if request.param == "sdk":
        memory, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(memory))
        monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
        recorder = SdkRecorder(4)

        def spans() -> dict[str, ReadableSpan]:
            return by_name(memory.get_finished_spans())

    else:
        (run := tmp_path / "run").mkdir()
        recorder = RingRecorder(str(run))

        def spans() -> dict[str, ReadableSpan]:
            found: list[ReadableSpan] = []
            reader = RunReader(str(run))
            joiner = Joiner(Resource({}), lambda span: found.append(span.readable()))
            for writer, record in poll(reader):
                joiner.add(writer, record)
            joiner.finish()
            reader.close()
            return by_name(found)

    undo = weave_observers(recorder)
    yield Traced(engine, spans, [])
    for step in reversed(undo):
        step()
    recorder.close()


def asked(rid: str, number: int = 0xAB, hangs: bool = False) -> Any:
    headers = {"traceparent": f"00-{number:032x}-{0xCD:016x}-01"}
    return SimpleNamespace(
        rid=rid,
        is_single=True,
        stream=True,
        external_trace_header=headers,
        sampling_params={},
        received_time=None,
        hangs=hangs,
        input_ids=[1],
    )


def same(context_: trace.SpanContext, span: ReadableSpan) -> bool:
    found = span.get_span_context()
    assert found is not None
    return (context_.trace_id, context_.span_id) == (found.trace_id, found.span_id)


def test_each_span_of_a_step_is_current_in_its_turn(traced: Traced) -> None:
    scheduler = traced.load("sglang.srt.managers.scheduler").Scheduler()
    scheduler.runner = traced.load("sglang.srt.model_executor.model_runner").ModelRunner()
    batch = SimpleNamespace(reqs=[], forward_mode=ForwardMode.DECODE, batch_size=0)
    scheduler.found = batch
    scheduler.get_next_batch_to_run()
    scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    spans = traced.spans()
    assert [where for where, *_ in traced.seen] == [
        "run_batch",
        "forward",
        "sample",
        "run_batch",
        "process_result",
    ]
    for where, current, traceparent, _ in traced.seen:
        assert same(current, spans[where]), where
        assert traceparent.startswith(f"00-{current.trace_id:032x}-{current.span_id:016x}-")
    assert not trace.get_current_span().get_span_context().is_valid
    assert context.innermost() is None


async def _serve(manager: Any, request: Any) -> list[Any]:
    return [piece async for piece in manager.generate_request(request)]


def test_requests_at_once_keep_their_own_spans(traced: Traced) -> None:
    manager = traced.load("sglang.srt.managers.tokenizer_manager").TokenizerManager()

    async def all_at_once() -> None:
        await asyncio.gather(*(_serve(manager, asked(str(n), n)) for n in range(1, 6)))
        assert not trace.get_current_span().get_span_context().is_valid

    asyncio.run(all_at_once())
    for where, current, _, rid in traced.seen:
        if where != "generating":
            assert current.trace_id == int(rid), where
    assert len({current.span_id for where, current, *_ in traced.seen if where == "tokenize"}) == 5
    spans = traced.spans()
    assert {"tokenize", "text_completion m"} <= set(spans)
    tokenized = [current for where, current, *_ in traced.seen if where == "tokenize"]
    assert any(same(current, spans["tokenize"]) for current in tokenized)
    sent = [current for where, current, *_ in traced.seen if where == "send"]
    assert any(same(current, spans["text_completion m"]) for current in sent)


def test_the_reader_of_a_generator_keeps_its_own_span(traced: Traced) -> None:
    manager = traced.load("sglang.srt.managers.tokenizer_manager").TokenizerManager()
    mine = trace.NonRecordingSpan(trace.SpanContext(7, 8, False, trace.TraceFlags(1)))

    async def read() -> None:
        with trace.use_span(mine):
            async for _ in manager.generate_request(asked("r")):
                assert trace.get_current_span() is mine
            assert trace.get_current_span() is mine

    asyncio.run(read())


def test_a_request_that_is_cancelled_or_forgotten_leaves_nothing_open(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    manager = traced.load("sglang.srt.managers.tokenizer_manager").TokenizerManager()

    async def cancel() -> None:
        task = asyncio.ensure_future(_serve(manager, asked("r", hangs=True)))
        while len(traced.seen) < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert context.innermost() is None

    asyncio.run(cancel())
    # One that is run in a context of its own, and closed where it never ran.
    request = asked("s", hangs=True)
    loop = asyncio.new_event_loop()
    generator = manager.generate_request(request)
    waiting = loop.create_task(generator.__anext__())
    loop.run_until_complete(asyncio.wait([waiting], timeout=0.05))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(waiting)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    coroutine = manager._tokenize_one_request(request)
    contextvars.copy_context().run(coroutine.send, None)
    thread = threading.Thread(target=coroutine.close)  # another context
    thread.start()
    thread.join()
    del coroutine, generator, waiting
    gc.collect()
    assert "detach" not in caplog.text
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_an_unsampled_request_is_passed_on_as_such(traced: Traced) -> None:
    manager = traced.load("sglang.srt.managers.tokenizer_manager").TokenizerManager()
    request = asked("r", 0x77)
    request.external_trace_header = {
        "traceparent": f"00-{0x77:032x}-{0xCD:016x}-00",
        "tracestate": "vendor=1",
    }
    asyncio.run(_serve(manager, request))
    (sent,) = [traceparent for where, _, traceparent, _ in traced.seen if where == "send"]
    assert sent.startswith(f"00-{0x77:032x}-")
    assert sent.endswith("-00")


def test_log_records_carry_the_ids_of_what_is_open(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    undo = correlate_logs()
    logger = logging.getLogger("engine")
    opened = enter(5, 6)
    logger.warning("in a step")
    mine = trace.NonRecordingSpan(trace.SpanContext(7, 8, False, trace.TraceFlags(0)))
    with trace.use_span(mine):
        logger.warning("in a span of the user's")
    inner = enter(9, 10, context.TraceContext(11, sampled=False))
    logger.warning("in a request")
    context.leave(inner)
    context.leave(opened)
    logger.warning("outside")
    undo()
    logger.warning("afterwards")
    names = "otelTraceID", "otelSpanID"
    ids = [tuple(getattr(record, name, None) for name in names) for record in caplog.records]
    assert ids == [
        (f"{context.trace_id_of_root(5):032x}", f"{6:016x}"),
        (f"{7:032x}", f"{8:016x}"),
        (f"{11:032x}", f"{10:016x}"),
        ("0", "0"),
        (None, None),
    ]
    assert [getattr(record, "otelTraceSampled", None) for record in caplog.records] == [
        True,
        False,
        False,
        False,
        None,
    ]
    assert logging.getLogRecordFactory() is before


def test_log_correlation_is_removed_below_a_later_factory(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory()
    undo = correlate_logs()
    ours = logging.getLogRecordFactory()
    try:
        logging.setLogRecordFactory(lambda *args, **kwargs: ours(*args, **kwargs))
        undo()
        logging.getLogger("engine").warning("still well")
        assert not hasattr(caplog.records[-1], "otelTraceID")
    finally:
        logging.setLogRecordFactory(before)


def test_a_scheduler_without_opentelemetry_logs_its_steps(tmp_path: Path, forked_scheduler: None) -> None:
    """In a process of its own: the ids in the log are those of the exported spans."""
    import re

    from sgl_aspects.runtime.engine import Engine as EmbeddedEngine
    from sgl_aspects.runtime.sampling_params import SamplingParams
    from sgl_aspects.tracing import attach
    from tests.support.tiny_models import make_llama

    model, said = tmp_path / "tiny", tmp_path / "log"
    make_llama(model, max_position_embeddings=256)
    plugin = tmp_path / "plugin"
    plugin.mkdir()
    (plugin / "logging_plugin.py").write_text(
        "import logging, sys, sgl_aspects as aspects\n"
        "@aspects.before('sgl_aspects.runtime.execution.model_runner:ModelRunner.sample')\n"
        "def say(*args, **kwargs):\n"
        f"    handler = logging.FileHandler({str(said)!r})\n"
        "    handler.setFormatter(logging.Formatter('%(otelTraceID)s %(otelSpanID)s'))\n"
        "    record = logging.getLogRecordFactory()('engine', 20, '', 1, 'x', (), None)\n"
        "    handler.emit(record)\n"
        "    assert 'opentelemetry.sdk' not in sys.modules\n"
        "    handler.close()\n"
        "def activate():\n"
        "    aspects.weave(say)\n"
    )
    install(plugin, "logging-plugin", "[sgl_aspects.plugins]\nlogs = logging_plugin:activate\n")
    with pytest.MonkeyPatch.context() as patch:
        import os

        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(plugin), os.environ.get("PYTHONPATH")])))
        patch.syspath_prepend(str(plugin))
        with attach(file=str(tmp_path / "traces.jsonl")), EmbeddedEngine(model_path=model) as running:
            running.generate([5, 6], SamplingParams(max_new_tokens=2, ignore_eos=True))
    weaver.remove(weaver.advices)  # the plugin's, in this process
    text = (tmp_path / "traces.jsonl").read_text()
    logged = [tuple(line.split()) for line in said.read_text().splitlines()]
    assert len(logged) == 2
    for trace_id, span_id in logged:
        spans = re.findall(r'{[^{}]*"spanId":"' + span_id + r'"[^{}]*', text)
        assert any(f'"traceId":"{trace_id}"' in span for span in spans)


def innermost_id() -> int:
    found = context.innermost()
    return 0 if found is None else found.span_id


def test_an_unclosed_span_ends_with_the_enclosing_one() -> None:
    around = enter(5, 6)
    enter(5, 7)
    context.leave(around)
    assert innermost_id() == 0
    context.leave(around)  # once more changes nothing
    assert innermost_id() == 0


def test_a_span_that_is_closed_elsewhere_changes_nothing_there() -> None:
    elsewhere = contextvars.copy_context()
    foreign = elsewhere.run(enter, 5, 6)
    mine = enter(7, 8)
    context.leave(foreign)
    assert innermost_id() == 8
    assert trace.get_current_span().get_span_context().span_id == 8
    context.leave(mine)
    assert context.innermost() is None
    assert not trace.get_current_span().get_span_context().is_valid


CLOSED = SpanType("closed", {"number": int})


def current_ids() -> tuple[int, int]:
    found = trace.get_current_span().get_span_context()
    return found.trace_id, found.span_id


def test_a_context_that_was_captured_keeps_the_span_that_was_open() -> None:
    """Like instrumentation of thread pools and of callbacks: capture, carry elsewhere, attach there."""
    outside = otel_context.get_current()
    first = enter(5, 6)
    captured, ids = otel_context.get_current(), current_ids()
    inner = enter(5, 7)
    assert trace.get_current_span(captured).get_span_context().span_id == 6
    token = otel_context.attach(captured)  # inside a later span of ours
    assert current_ids() == ids
    otel_context.detach(token)
    assert current_ids()[1] == 7
    token = otel_context.attach(outside)  # what was current before all of them
    assert current_ids() == (0, 0)
    otel_context.detach(token)
    assert current_ids()[1] == 7
    context.leave(inner)
    context.leave(first)
    seen: list[tuple[int, int]] = []

    def elsewhere() -> None:
        seen.append(current_ids())
        token = otel_context.attach(captured)
        seen.append(current_ids())
        otel_context.detach(token)
        seen.append(current_ids())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [(0, 0), ids, (0, 0)]


def test_spans_and_baggage_of_the_user_s_between_ours() -> None:
    outer = enter(5, 6)
    token = otel_context.attach(baggage.set_baggage("tenant", "a"))
    assert current_ids()[1] == 6
    mine = trace.NonRecordingSpan(trace.SpanContext(7, 8, False, trace.TraceFlags(1)))
    with trace.use_span(mine):
        inner = enter(5, 9)
        assert (current_ids()[1], baggage.get_baggage("tenant")) == (9, "a")
        context.leave(inner)
        assert trace.get_current_span() is mine
        inner = enter(5, 10)
    # Theirs ended before ours did.
    assert (current_ids()[1], baggage.get_baggage("tenant")) == (10, "a")
    context.leave(inner)
    assert (current_ids()[1], baggage.get_baggage("tenant")) == (6, "a")
    otel_context.detach(token)
    assert (current_ids()[1], baggage.get_baggage("tenant")) == (6, None)
    context.leave(outer)
    assert current_ids() == (0, 0)
