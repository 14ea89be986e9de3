"""The collector: follows the records of a run and exports them as OpenTelemetry spans.

    python -m sgl_aspects.collector RUN_FOLDER [REPORT_FD]

Started by the first process of a run, in a session of its own. One that is killed is restarted once (by
:mod:`sgl_aspects.run.keeper`), and later by hand: it reads the first one's settings from the run folder and
goes on after the last record whose span was delivered. A span that is sent twice has the same ids. It ends
when every process of the run is gone (or the run is closed), after one bounded flush, writes a summary as
JSON to ``REPORT_FD`` (or standard output), and removes the run folder.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.run import fleet
from sgl_aspects.run.cleaning import clean_up
from sgl_aspects.run.collector import collector_settings, forget_collector_settings, take_run
from sgl_aspects.run.folder import remove_run_folder, seal_run, woven_ns
from sgl_aspects.tracing.collect.join import Joiner
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.reported_metrics import CollectorMetrics
from sgl_aspects.tracing.collect.run_reader import Deliveries, RunReader
from sgl_aspects.tracing.collect.span_builder import engine_resource
from sgl_aspects.tracing.collect.summary import TraceSummary
from sgl_aspects.tracing.collect.token_gaps import TokenGaps
from sgl_aspects.tracing.export.exporters import make_pipeline, make_reader
from sgl_aspects.tracing.export.failures import quiet_exporters, report_line
from sgl_aspects.tracing.export.metrics import DECODE, STEP
from sgl_aspects.tracing.export.pipelines import NoExporter, Pipeline, close_all
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.records import ProcessDescribed, Record, SpanBegin, SpanEnd
from sgl_aspects.tracing.sampling import TailChoice
from sgl_aspects.tracing.schema import FOLLOWER
from sgl_aspects.tracing.settings import TraceSettings
from sgl_aspects.tracing.variables import (
    SpanLimits,
    normalise,
    refuses_connections,
    secrets,
    without_secrets,
)

_Made = TypeVar("_Made")
#: Makes what adds to joined spans, before they are exported; None: nothing does.
Explainer: TypeAlias = "Callable[[TraceSettings], Callable[[list[CollectedSpan]], None] | None]"

# The session's priority, as a nice value, while the collector keeps up.
_LOW = 10

POLL_SECONDS = 0.2
# Seconds that the engine has to end its spans after a second SIGTERM.
_TERM_SECONDS = 5.0
# Seconds that ending processes have to write their last records after a close.
_CLOSING_SECONDS = 0.5
# Seconds for the last metrics, even if the spans took all of their time.
_METRICS_SECONDS = 0.5


class SessionRank:
    """The priority of this session: Linux with autogroups ranks a process only within its session.

    Does nothing unless this process is alone in its session.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._may = sys.platform == "linux" and os.getsid(0) == os.getpid()

    def set(self, rank: int) -> None:
        """Set it, as a nice value; 0 is the default. If the kernel refuses, it is tried again next time."""
        if self._may and rank != self._rank:
            with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as session:
                session.write(str(rank))
                session.flush()
                self._rank = rank


class Collector:
    """Reads a run folder until the run ends."""

    def __init__(
        self,
        folder: str,
        settings: TraceSettings,
        *,
        explainer: Explainer | None = None,
        is_restarted: bool = False,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._explain = explainer and explainer(settings)
        self._is_restarted = is_restarted
        self._reader = RunReader(folder, keeps_all=settings.keep_run_folder)
        self._is_terminated = False
        self._end_by: float | None = None
        self._sealed: int | None = None
        faults: list[ConfigError] = []
        self._pipelines = [
            _unless_faulty(partial(make_pipeline, name, settings, append=is_restarted), faults)
            or Pipeline(name, NoExporter())
            for name in settings.exporters
        ]
        self._deliveries = Deliveries(self._pipelines)
        self._spans: list[CollectedSpan] = []
        self._gaps = TokenGaps()
        resource = engine_resource(folder)
        made = [
            _unless_faulty(partial(make_reader, one, settings), faults) for one in settings.metric_exporters
        ]
        readers = [reader for reader in made if reader is not None]
        if faults and len(faults) == len(self._pipelines) + len(made):
            raise faults[0]
        for fault in faults:
            report_line(f"{fault}; the other exporters go on")
        self._metrics = CollectorMetrics(folder, readers, resource, settings.targets) if readers else None
        self._joiner = Joiner(
            resource,
            self._spans.append,
            tail=_tail_choice(settings),
            on_request=None if self._metrics is None else self._metrics.engine.request_ended,
            on_forgotten=self._gaps.forget,
            limits=SpanLimits.from_environment(),
        )
        self._joiner.woven_ns = woven_ns(Path(folder))
        if is_restarted:
            self._joiner.replay(self._history(), set() if self._metrics is None else self._metrics.held)
        if self._metrics is not None:
            self._metrics.watch(self._reader, self._joiner.held, self._pipelines)
        rules = env.text(fleet.VARIABLE)
        self._fleet = rules and fleet.FleetControl(folder, rules, self._joiner.about_the_run, _report_rules)

    def end_soon(self) -> None:
        """Note a termination signal. The engine often gets the same one and finishes its answers first, so
        the run goes on until its processes have ended; after a second signal, for a few seconds at most.
        """
        if self._is_terminated:
            self._end_by = time.monotonic() + _TERM_SECONDS
        self._is_terminated = True

    def follow(self, rank: Callable[[int], None]) -> None:
        """Read until the run has ended: at low priority while the rings have room (on busy processors hardly
        at all then), at normal priority from when one fills until all are read.
        """
        rank(_LOW)
        while not self._has_ended():
            self._read()
            if not self._reader.has_more:
                rank(_LOW)
                time.sleep(POLL_SECONDS)
            elif self._reader.is_behind():
                rank(0)
        rank(0)  # the process that ended the run waits

    def finish(self) -> TraceSummary:
        """Export the rest; returns when everything is exported or given up."""
        if self._fleet:
            self._fleet.close()
        # A process that was alive a moment ago may have written since.
        self._read()
        while self._reader.has_more:
            self._read()
        for writer in self._reader.writers.values():
            self._joiner.writer_gone(writer)
        self._joiner.finish()
        self._offer()
        deadline = time.monotonic() + self._settings.flush_seconds
        is_absent = self._give_up_absent_backend()
        close_all(self._pipelines, self._settings.flush_seconds)
        reads_on = is_absent and self._settings.metric_exporters == ("otlp",)
        if self._metrics is not None and not reads_on:
            reads_on = not self._metrics.close(max(_METRICS_SECONDS, deadline - time.monotonic()))
        joiner = self._joiner
        summary = TraceSummary(
            spans_recorded=joiner.recorded,
            exported={pipeline.name: pipeline.exported for pipeline in self._pipelines},
            not_delivered={pipeline.name: pipeline.not_delivered for pipeline in self._pipelines},
            unfinished=joiner.unfinished,
            not_sampled=joiner.not_sampled,
            dropped=self._reader.dropped,
            unjoined=joiner.unjoined,
            damaged=self._reader.damaged,
            restarted=self._is_restarted,
        )
        if not reads_on:
            self._reader.close()
        return summary

    def _give_up_absent_backend(self) -> bool:
        """Do not wait for a backend that has taken nothing in this run, and where nothing listens now."""
        otlp = [pipeline for pipeline in self._pipelines if pipeline.name == "otlp"]
        endpoint = self._settings.otlp_endpoint()
        if not otlp or any(pipeline.exported for pipeline in otlp) or not refuses_connections(endpoint):
            return False
        for pipeline in otlp:
            pipeline.shutdown()
        report_line(f"nothing listens at {endpoint}: start a backend there, or choose --file FILE")
        return True

    def _offer(self) -> None:
        """Passes the joined spans on."""
        if self._explain is not None:
            try:
                self._explain(self._spans)
            except Exception as error:  # noqa: BLE001 - the spans go on without
                report_line(f"no causes on slow requests from here on: {type(error).__name__}: {error}")
                self._explain = None
        for pipeline in self._pipelines:
            pipeline.offer(self._spans)
        self._spans.clear()

    def _has_ended(self) -> bool:
        if self._end_by is not None and time.monotonic() > self._end_by:
            return True
        is_over = not (self._reader.living() or self._reader.has_more)
        if is_over and os.path.isdir(self._folder):
            # A process that starts from here on begins a run of its own, since this collector no longer
            # waits.
            self._sealed = seal_run(self._folder)
            is_over = self._sealed is not None
        if self._end_by is None and self._reader.is_closing:
            self._end_by = time.monotonic() + _CLOSING_SECONDS
        return is_over

    def _read(self) -> None:
        if self._joiner.woven_ns == math.inf:
            self._joiner.woven_ns = woven_ns(Path(self._folder))
        with self._reader.lock:
            read = list(self._reader.poll_rings())
            for writer in self._reader.writers.values():  # after reading: no record before it is missed
                if began := writer.detaching_ns:
                    self._joiner.detaching(began)
            for writer, records in read:
                self._joiner.add(writer, *records)
                self._measure(writer, records)  # afterwards: the trace of a request is known then
            for writer in self._reader.take_ended():
                self._joiner.writer_gone(writer)
                if self._metrics is not None:
                    self._metrics.engine.writer_gone(writer.name)
            is_complete = self._joiner.match_waiting(is_behind=self._reader.has_more)
        self._offer()
        if is_complete:
            self._deliveries.pass_ended(self._reader.positions())
        self._reader.commit(self._deliveries.positions)

    def _history(self) -> Iterator[tuple[RingReader, Record]]:
        """Restores the state that the earlier collector's records imply, and counts the rest."""
        for writer in self._reader.find():
            if self._metrics is not None:
                writer.counted = self._metrics.counted.get(writer.name, 0)
            for record in writer.history():
                self._measure(writer, [record])
                yield writer, record
            if self._metrics is not None and writer.overwritten:
                late = f"{writer.overwritten} records of process {writer.process_id}"
                report_line(f"{late} were overwritten before they came into metrics")

    def _measure(self, writer: RingReader, records: Sequence[Record]) -> None:
        if self._metrics is None:
            return
        engine = self._metrics.engine
        for record in records:
            if isinstance(record, ProcessDescribed) and FOLLOWER in record.attributes:
                engine.follow(writer.name)
            elif isinstance(record, (SpanBegin, SpanEnd)) and record.type.name in (STEP, DECODE):
                for key, gap_ns in self._gaps.take(record):
                    if not writer.is_counted:
                        engine.token_came(gap_ns, self._joiner.trace_of(key))
                if record.type.name == STEP and isinstance(record, SpanEnd):
                    engine.step_ended(writer.name, writer.process_id, record, is_counted=writer.is_counted)
                elif isinstance(record, SpanEnd) and not writer.is_counted:
                    engine.decode_ended(record)


def _unless_faulty(make: Callable[[], _Made], faults: list[ConfigError]) -> _Made | None:
    """Return the result of ``make``; None if it raises, which is added to ``faults``."""
    try:
        return make()
    except ConfigError as error:
        faults.append(ConfigError(without_secrets(str(error), secrets())))
    except Exception as error:  # noqa: BLE001  # whatever an exporter raises
        faults.append(_refused(error))
    return None


def _report_rules(text: str) -> None:
    report_line(without_secrets(text, secrets()))  # an address may have a user, a password or a token


def _refused(error: Exception) -> ConfigError:
    if isinstance(error, RuntimeError) and "new thread" in str(error):
        return ConfigError("it may start no more threads: raise ulimit -u, or the pids.max of its container")
    text = without_secrets(f"{type(error).__name__}: {error}", secrets())
    return ConfigError(f"OpenTelemetry refuses its settings ({text})")


def _tail_choice(settings: TraceSettings) -> TailChoice | None:
    """Return None if nothing is to be exported."""
    if settings.sampler.ratio == 0:
        return None
    return TailChoice(settings.keep_failed, settings.keep_slower_than, settings.sampler.parent_based)


def _let_the_engine_go_first() -> None:
    """Lower the priority of this thread and of those it starts; called before the exporters, which do most of
    the work, start.
    """
    with contextlib.suppress(OSError):
        os.nice(5)
        if sys.platform == "linux":
            # no preemption of other processes on wake-up
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _allow_many_open_files() -> None:
    """Raise the limit on open files: a run may have thousands of processes, each with a ring."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _collect_garbage_seldom() -> None:
    """Collect cycles seldom: there are many spans, none in a cycle, and it takes a sixth of the time."""
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)


def main(arguments: Sequence[str], explainer: Explainer | None = None) -> int:
    if not 1 <= len(arguments) <= 2:
        print(__doc__, file=sys.stderr)
        return 2
    folder = arguments[0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is a collector
    saved = collector_settings(folder)
    for name, value in saved.items():
        if value is not None:
            os.environ.setdefault(name, value)
    if missing := [name for name in saved if name not in os.environ]:
        report_line(f"not set, and not saved as it may be a secret: {', '.join(missing)}")
    normalise(os.environ)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # logged at every attempt; the errors report it too
    quiet_exporters()
    try:
        settings = TraceSettings.from_environment().checked()
        is_restarted = take_run(folder)
    except ConfigError as error:
        report_line(str(error))
        return 1
    try:
        _let_the_engine_go_first()
        _allow_many_open_files()
        _collect_garbage_seldom()
        # Not its own: closing any descriptor of its lock's file would unlock it.
        clean_up(folder)
        try:
            collector = Collector(folder, settings, explainer=explainer, is_restarted=is_restarted)
        except ConfigError:
            raise
        except Exception as error:
            raise _refused(error) from error
        signal.signal(signal.SIGTERM, lambda *_: collector.end_soon())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # Not ranked low sooner: on busy processors a short run would end before the collector starts.
        collector.follow(SessionRank().set)
        summary = collector.finish()
    except ConfigError as error:
        summary = TraceSummary(problem=f"the collector could not start: {error}")
    finally:
        forget_collector_settings(folder)
        if not settings.keep_run_folder:
            remove_run_folder(folder)
    if settings.prints_summary or summary.has_losses:
        report_line(str(summary))
    report = int(arguments[1]) if len(arguments) == 2 else sys.stdout.fileno()
    with contextlib.suppress(BrokenPipeError):
        os.write(report, summary.to_json().encode())
    return 1 if summary.problem else 0
