"""Tracing switched on in a process: hooks, recorder, and in the run's first process the collector."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from types import TracebackType
from typing import TYPE_CHECKING

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.collector import CollectorProcess
from sgl_aspects.run.folder import RunHold, hold_run, make_run_folder, remove_run_folder, seal_run
from sgl_aspects.tracing.collect.summary import TraceSummary
from sgl_aspects.tracing.logs import correlate_logs
from sgl_aspects.tracing.observers import weave_observers
from sgl_aspects.tracing.options import TraceOptions
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.settings import RUN, TraceSettings
from sgl_aspects.tracing.variables import LATEST_NAMES, warn_of_unknown

if TYPE_CHECKING:
    from sgl_aspects.tracing.sdk import SdkRecorder

logger = logging.getLogger(__name__)

_LEVEL, _METRICS = "SGL_ASPECTS_TRACE", "SGL_ASPECTS_TRACE_METRICS"
# Set for every process below `sgl-aspects run`.
_BELOW_RUN = "SGL_ASPECTS_RUN"
# Seconds that a collector needs beyond its flush: to start, to read the rest, to end.
_COLLECTOR_SECONDS = 10.0

_current: TraceSession | None = None


class TraceSession:
    """Tracing of this process and of the processes it starts from now on, until ``close()``.

    A context manager; after the block ``summary`` has the counts of its spans. Processes started before are
    not traced. ``recorder``: of this process's aspects.
    """

    def __init__(
        self,
        settings: TraceSettings,
        when_full: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.summary: TraceSummary | None = None
        self._joins = when_full is not None  # a process that ran before, and goes on afterwards
        self._process_id = os.getpid()
        self._collector: CollectorProcess | None = None
        self._hold: RunHold | None = None
        self._restore: dict[str, str | None] = {}
        self._undo: list[Callable[[], None]] = []
        self.run_folder = ""
        self.recorder: RingRecorder | SdkRecorder
        if settings.level and settings.recorder == "sdk":
            from sgl_aspects.tracing.sdk import SdkRecorder

            warn_of_unknown(settings.opted_in)
            self.recorder = SdkRecorder(settings.level)
            self._set_environment({_LEVEL: str(settings.level)})  # processes started later inherit it
            self._attach(_options(settings, measures=True))
            return
        if settings.level == 0:
            self.recorder = RingRecorder(self.run_folder, level=0)
            self.recorder.close()
            self.summary = TraceSummary()
            return
        sample = settings.sampler.ratio
        has_metrics = settings.has_metrics
        if settings.run_folder is not None and not self._joins:
            self._hold = hold_run(settings.run_folder)
            # The program that began the run has ended but this one goes on: it begins a run of its own, if
            # `sgl-aspects run` put the settings for that into the environment.
            if self._hold is None and env.flag(_BELOW_RUN):
                self.settings = settings = replace(settings, run_folder=None).checked()
        if settings.run_folder is not None:
            # A child of a traced process: it records from its first span on; the parent does the rest.
            self.run_folder = settings.run_folder
            self.recorder = RingRecorder(self.run_folder, settings.level, sample)
            self.recorder.when_full = when_full
        else:
            warn_of_unknown(settings.opted_in)
            if native.compiled is None and env.flag(native.VARIABLE, default=True):
                logger.warning("the compiled step path is %s; steps are recorded in Python", native.state())
            has_metrics = bool(settings.metric_exporters)
            if has_metrics:
                self.settings = settings = _without_taken_port(settings)
            self.run_folder = make_run_folder()
            self._hold = hold_run(self.run_folder)
            self.recorder = ring = RingRecorder(self.run_folder, settings.level, sample)
            try:
                ring.open()
                self._collector = CollectorProcess(
                    self.run_folder, settings.collector_environment(), settings.prints()
                )
            except BaseException:
                self._release()
                self.recorder.close()
                remove_run_folder(self.run_folder)
                raise
            self._set_environment(
                {_LEVEL: str(settings.level), RUN: self.run_folder, _METRICS: str(int(has_metrics))}
            )
        self._attach(_options(settings, has_metrics, self._joins))

    @property
    def collector_process_id(self) -> int | None:
        """The collector's process id; None in a process that did not start it."""
        return self._collector.process_id if self._collector else None

    def _attach(self, options: TraceOptions) -> None:
        self._undo = [*weave_observers(self.recorder, options), correlate_logs()]

    def detach(self) -> None:
        """Remove the hooks from this process's functions: they are the original objects again."""
        global _current
        if self._joins and isinstance(self.recorder, RingRecorder):
            self.recorder.detaching()
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()
        if _current is self:
            _current = None

    def close(self, timeout: float | None = None) -> TraceSummary:
        """Detach, end the run, and wait until its spans are delivered or given up.

        ``timeout`` in seconds; the default is the flush limit of the settings plus the collector's start and
        end. A second call returns the same summary. A child of a traced process has no collector to wait for:
        its summary is empty.
        """
        self.detach()
        if self.summary is not None:
            return self.summary
        self._set_environment(dict(self._restore))
        self._release()
        self.recorder.close(detaches=self._joins)
        self.summary = TraceSummary() if self._collector is None else self._reported(self._collector, timeout)
        return self.summary

    def _reported(self, collector: CollectorProcess, timeout: float | None) -> TraceSummary:
        """End the collector, and return its counts, or why there are none."""
        collector.ask_to_end()
        if not collector.can_report:
            return TraceSummary(
                problem="the counts of the run are not known: this process has closed the collector's pipe"
            )
        if timeout is None:
            timeout = self.settings.flush_seconds + _COLLECTOR_SECONDS
        report = collector.wait(timeout)
        problem = f"the trace collector (process {collector.process_id}) is still at work after {timeout:g} s"
        if report is None and collector.has_ended:
            problem = "the trace collector was killed, or has failed as it says above: its spans are lost"
            remove_run_folder(self.run_folder)
        collector.abandon()
        return TraceSummary(problem=problem) if report is None else TraceSummary.from_json(report)

    def leave(self) -> TraceSummary:
        """Close the session as this process ends; processes started in the background go on recording."""
        self._release()
        if self._collector is not None:
            sealed = seal_run(self.run_folder)
            # With a container's first process the kernel ends all others, the collector too.
            if sealed is None and os.getpid() != 1:
                self._collector.abandon()
                self._collector = None
            else:
                self._collector.ask_to_end()
            if sealed is not None:
                os.close(sealed)
        return self.close()

    def _release(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def close_at_exit(self) -> None:
        """Close the session at the end of this process, after its child processes have ended."""
        Finalize(self, _close_quietly, args=(self,), exitpriority=-100)

    def __enter__(self) -> TraceSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _set_environment(self, values: dict[str, str | None] | dict[str, str]) -> None:
        for name, value in values.items():
            name = env.spelled(name)
            self._restore[name] = os.environ.get(name)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _without_taken_port(settings: TraceSettings) -> TraceSettings:
    """Drop the Prometheus exporter if its port is in use, as by another program of the same command."""
    try:
        settings.require_port()
    except ConfigError as error:
        logger.error("%s; this program's traces are recorded nonetheless", error)
        left = tuple(name for name in settings.metric_exporters if name != "prometheus")
        environment = {**settings.environment, "OTEL_METRICS_EXPORTER": ",".join(left) or "none"}
        return replace(settings, metric_exporters=left, environment=environment)
    return settings


def _options(settings: TraceSettings, measures: bool, attached: bool = False) -> TraceOptions:
    parent_based, takes_context = settings.sampler.parent_based, settings.takes_context
    return TraceOptions(
        parent_based,
        measures,
        settings.content,
        takes_context,
        attached,
        settings.tenant or "",
        older_names=LATEST_NAMES not in settings.opted_in,
    )


def attach(
    level: int = 3,
    exporters: Sequence[str] | None = None,
    endpoint: str | None = None,
    file: str | None = None,
    service_name: str | None = None,
    prometheus: int | None = None,
) -> TraceSession:
    """Traces the engines of this process and of the processes it starts.

    ``level``: 1 request, 2 + scheduler, 3 + forward, 4 + operators. ``exporters``: of ``"otlp"``,
    ``"console"``, ``"perfetto"``, ``"otlp-json-file"`` (which writes ``file``) and those of installed
    packages; by default the one for a given ``endpoint`` or ``file``, else the environment's
    (:mod:`sgl_aspects.tracing.settings` lists the variables). ``endpoint``: the OTLP base URL.
    ``prometheus``: the port of a metrics page for it, on loopback. Raises ``ConfigError`` for a
    choice that cannot work, before anything is changed.
    """
    if _current is not None:
        raise ConfigError("tracing is already attached in this process: close that session first")
    settings = TraceSettings.chosen(
        os.environ,
        level=level,
        exporters=exporters,
        endpoint=endpoint,
        file=file,
        service_name=service_name,
        prometheus=prometheus,
    )
    return _start(settings)


def current() -> TraceSession | None:
    """Return the session of this process, however it was attached."""
    return _current


def attach_from_environment() -> TraceSession | None:
    """Attach as the environment configures; None if tracing is off. Called at each process's start."""
    if _current is not None:
        return None
    settings = TraceSettings.from_environment()
    if settings.level == 0 or (
        not (settings.exporters or settings.metric_exporters)
        and settings.run_folder is None
        and settings.recorder == "ring"
    ):
        return None
    session = _start(settings)
    session.close_at_exit()
    return session


def join_run(when_full: Callable[[str], None]) -> TraceSession:
    """Trace this process, which is already running, for the run named in the environment.

    ``when_full`` is called with the run folder for each record dropped because the ring is not read. Raises
    ``ConfigError`` if this process cannot write into the run folder.
    """
    settings = TraceSettings.from_environment()
    if settings.run_folder is None:
        raise ConfigError(f"{RUN} is not set: there is no run to join")
    session = _start(settings, when_full)
    if isinstance(session.recorder, RingRecorder) and not session.recorder.open():
        session.close()
        raise ConfigError(f"process {os.getpid()} cannot write its records into {settings.run_folder}")
    return session


def _start(settings: TraceSettings, when_full: Callable[[str], None] | None = None) -> TraceSession:
    global _current
    _current = TraceSession(settings, when_full)
    return _current


def _close_quietly(session: TraceSession) -> None:
    if session.summary is None and session._process_id == os.getpid():
        try:
            summary = session.leave()
            if summary.problem:
                logger.warning("%s", summary.problem)
        except (KeyboardInterrupt, SystemExit):
            # Ctrl-C or SIGTERM again: do not wait for the collector, which finishes alone.
            pass
        _keep_interrupted()


def _keep_interrupted() -> None:
    """End a process stopped by Ctrl-C with SIGINT, also after the wait for its collector.

    CPython stores an unhandled KeyboardInterrupt in a flag that code compiled from text clears: imports of
    other threads do so during the wait.
    """
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def _forget_in_child() -> None:
    """Keep hooks and recorder in a forked child; the collector belongs to its parent."""
    if _current is not None:
        _current._collector = None


os.register_at_fork(after_in_child=_forget_in_child)
