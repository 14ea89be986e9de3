"""Functions that tests run in other processes: spawned children import their targets by name from here.

Nothing here imports torch at once: most of these processes do not need it.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from sgl_aspects.cli.models import PackagedModel


def fetch_model(model: PackagedModel) -> str:
    """The sha256 of the file that ``ensure_model`` gives this process."""
    from sgl_aspects.cli.models import ensure_model

    return hashlib.sha256(ensure_model(model).read_bytes()).hexdigest()


def record_like_a_scheduler(folder: str, rids: list[str], ending: str) -> None:
    """Records queue and decode of each request, a whole step, and the beginning of another.

    ``ending``: "end" ends the process in order, "kill" by SIGKILL, "hang" not at all.
    """
    import os
    import signal
    import time

    from sgl_aspects.tracing.record.ring_recorder import RingRecorder
    from sgl_aspects.tracing.records import RequestSeen, SpanType

    recorder = RingRecorder(folder)
    step, queue = SpanType("scheduler.step", {"sgl_aspects.batch.size": int}), SpanType("queue")
    decode = SpanType("decode", {"gen_ai.usage.output_tokens": int})
    begin = time.monotonic_ns()
    step_id, keys = recorder.new_id(), []
    recorder.announce(step, step_id, step_id, 0, begin)
    for rid in rids:
        key = recorder.new_id()
        keys.append(key)
        recorder.write(RequestSeen(key, rid, begin))
        recorder.spans(queue)(recorder.new_id(), key, key, begin, begin + 1000)
        recorder.spans(decode)(recorder.new_id(), key, key, begin + 1000, time.monotonic_ns(), [len(rid)])
    recorder.spans(step)(step_id, step_id, 0, begin, time.monotonic_ns(), [len(rids)], links=keys)
    open_step = recorder.new_id()
    recorder.announce(step, open_step, open_step, 0, time.monotonic_ns())
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while ending == "hang":
        time.sleep(60)
    recorder.spans(step)(open_step, open_step, 0, begin, time.monotonic_ns(), [0])
    recorder.close()


def own_a_run(ready: Connection, file: str) -> None:
    """Attaches tracing, records an unfinished request, reports where, and waits to be killed."""
    import time

    from sgl_aspects.tracing import attach, context
    from sgl_aspects.tracing.records import RequestBegin

    session = attach(exporters=["otlp-json-file"], file=file)
    span_id = session.recorder.new_id()
    session.recorder.write(RequestBegin(span_id, "r", time.monotonic_ns(), *context.new(), "chat m", {}))
    ready.send((session.run_folder, session.collector_process_id))
    time.sleep(600)


def woven_in_a_scheduler_process(results: Connection) -> None:
    """Run the first steps of a scheduler process; return the functions that are not the originals then, and
    what else is there of tracing: hooks, finders of modules, and its own modules.
    """
    import importlib
    import sys

    import sgl_aspects
    from sgl_aspects.plugins import load_plugins

    load_plugins()
    from sgl_aspects.engines import EMBEDDED

    woven = []
    for name, role in EMBEDDED.roles.items():
        module, _, path = role.targets[0].partition(":")
        loaded = importlib.import_module(module)
        owner, _, attribute = path.partition(".")
        function = vars(getattr(loaded, owner.removesuffix("+")))[attribute]
        # An original function has the code of its module's file, and wraps nothing.
        if hasattr(function, "__wrapped__") or function.__code__.co_filename != loaded.__file__:
            woven.append(name)
    others = [str(hook) for hook in sgl_aspects.report().hooks]
    others += [finder for finder in map(repr, sys.meta_path) if "ModuleWatcher" in finder]
    ours = ("opentelemetry", "sgl_aspects.tracing.")
    others += [name for name in {*sys.modules} - {"sgl_aspects.tracing.plugin"} if name.startswith(ours)]
    results.send((woven, others))


def own_an_engine(ready: Connection, folder: str, busy: bool, fork: bool) -> None:
    """Makes an engine and waits to be killed. Prints the process ids of the scheduler and of its fork (or 0).

    The fork does nothing, but it holds everything open that this process holds open.
    """
    import os
    import time

    from sgl_aspects.runtime import Engine, SamplingParams

    engine = Engine(model_path=folder, max_total_tokens=20000)
    stream = engine.stream([5], SamplingParams(max_new_tokens=15000, ignore_eos=True)) if busy else None
    if stream is not None:
        next(stream)
    child = os.fork() if fork else 0
    if child or not fork:
        ready.send((engine.scheduler_pid, child))
    time.sleep(600)


def record_until_killed(folder: str, count: int) -> None:
    """Records spans 1, 2, 3 … and writes each one's number to ``count`` once it is finished."""
    from sgl_aspects.tracing.record.ring_recorder import RingRecorder
    from sgl_aspects.tracing.records import SpanType

    recorder = RingRecorder(folder)
    small = SpanType("small", {"number": int, "half": float, "mode": str})
    large = SpanType("large", {"number": int, "half": float, "mode": str, "list": list})
    writers = {type: recorder.spans(type) for type in (small, large)}
    recorder.open()
    os.set_blocking(count, False)
    number = 0
    while True:
        number += 1
        values: list[Any] = [number, number / 2, "decode"]
        type = small if number % 3 else large
        recorder.announce(type, number, 1, 1, 5)
        values = values if number % 3 else [*values, [number]]
        writers[type](number, 1, 1, 5, 5 + number, values)
        if number <= 4000:  # the capacity of a pipe
            os.write(count, number.to_bytes(8, "little"))


def record_spans(folder: str, first: int, count: int) -> None:
    """Records spans with the ids after ``first``."""
    from sgl_aspects.tracing.record.ring_recorder import RingRecorder
    from sgl_aspects.tracing.records import SpanType

    recorder = RingRecorder(folder)
    write = recorder.spans(SpanType("plain", {"number": int}))
    for number in range(first + 1, first + count + 1):
        write(number, 1, 1, 1, 2, [number])
    recorder.close()


def record_for_ever(folder: str) -> None:
    """Records spans 1, 2, 3 … as if a collector had taken all of them at once, until it is killed."""
    import time

    from sgl_aspects.tracing.record import format as ring_format
    from sgl_aspects.tracing.record.ring_recorder import RingRecorder
    from sgl_aspects.tracing.records import SpanType

    recorder = RingRecorder(folder)
    write = recorder.spans(SpanType("plain", {"number": int, "text": str}))
    recorder.open()
    number = 0
    while True:
        number += 1
        write(number, number, 0, number, number + 1, [number, f"text-{number % 7}"])
        if number % 1000 == 0:
            recorder.steps.words[ring_format.WORD_TAKEN] = number
            time.sleep(0.002)


def record_by_level(folder: str, ends: bool = False) -> None:
    """Makes a ring of level 3 in ``folder``, and waits to be killed unless it ``ends``."""
    import time

    from sgl_aspects.tracing.record.ring_recorder import RingRecorder

    recorder = RingRecorder(folder, 3)
    recorder.open()
    while not ends:
        time.sleep(60)


def serve_like_an_engine(folder: str, connection: Connection) -> None:
    """Records two finished requests, one under way, and their steps; ends on command."""
    import time

    from sgl_aspects.tracing import context
    from sgl_aspects.tracing.record.ring_recorder import RingRecorder
    from sgl_aspects.tracing.records import RequestBegin, RequestSeen, RequestSent, SpanType
    from sgl_aspects.tracing.schema import DECODE, PREFILL, QUEUE, REQUEST, STEP

    recorder = RingRecorder(folder, level=3)
    span, new_id, second = recorder.spans, recorder.new_id, 1_000_000_000
    now = time.monotonic_ns()
    for number, rid in enumerate(["quick", "slow\x1b[31m one", "open"]):
        request, key = new_id(), new_id()
        start = now - (2 + 3 * number) * second
        attributes: dict[str, Any] = {"gen_ai.request.model": "tiny", "gen_ai.request.id": rid}
        recorder.write(RequestBegin(request, rid, start, *context.new(), "chat tiny", attributes))
        recorder.write(RequestSent(request))
        recorder.write(RequestSeen(key, rid, start))
        span(QUEUE)(new_id(), key, key, start, start + second)
        span(PREFILL)(new_id(), key, key, start + second, start + second + second // 2, [100, 0])
        recorder.announce(DECODE, new_id(), key, key, start + second + second // 2)
        if rid == "open":
            continue
        span(DECODE)(new_id(), key, key, start + second + second // 2, now, [11, "stop"])
        values: list[Any] = [rid, ["stop"], 1.5, 100, 11, 25, 1.5, (now - start) / 1e9]
        span(REQUEST)(request, request, 0, start, now, values, "abort" if number else "")
    for number in range(20):
        step = new_id()
        mode, tokens = ("extend", 300) if number == 0 else ("decode", 3)
        end = now - number * second // 100
        span(SpanType("forward"))(new_id(), step, step, end - second // 50, end - second // 100)
        span(STEP)(step, step, 0, end - second // 50, end, [number, mode, 3, tokens, 2, 1, 0.5])
    connection.send("ready")
    connection.recv()
    recorder.close()
