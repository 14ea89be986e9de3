"""A profile of the next forward passes, taken where `sgl-aspects control --profile` asks for one.

PyTorch's profiler runs in the engine's own process, and its kernels become spans below ``forward``. There is
a hook for it only while a profile is taken, or waited for.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sgl_aspects import compat
from sgl_aspects.engines.contract import Observation
from sgl_aspects.run import clock
from sgl_aspects.run.requests import Taken, take_requests
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.kernels import Kernel, ModuleRanges, kernels_of, summary_of
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import AttributeValue
from sgl_aspects.tracing.schema import KERNEL

logger = logging.getLogger(__name__)

# Cap on the kernels of one pass that become spans.
_MOST_KERNELS = 4000


_DETACHED = "the process is not traced any longer"


class ProfileObserver:
    """Takes requests to one engine's process, one at a time: a later one ends the one before.

    ``weave``: weaves an observation, and returns a function that removes it.
    """

    def __init__(
        self,
        trackers: Trackers,
        ring: RingRecorder,
        forward: ForwardObserver,
        weave: Callable[[Observation], Callable[[], None]],
    ) -> None:
        engine = trackers.engine
        self._tracker, self._ring, self._forward, self._weave = trackers.steps, ring, forward, weave
        self._runner = engine.call_reader("forward", "model_runner")
        self._platform_of = engine.reader("model_runner.platform")
        self._model_of = engine.reader("model_runner.model")
        self._modules, self._models = ModuleRanges(), dict[int, Any]()
        self._write = ring.spans(KERNEL)
        self._request: Taken | None = None
        self._unweave: Callable[[], None] | None = None
        self._profile: Any = None
        self._platform: Any = None
        self._thread = 0
        self._is_inside = self._is_host = self._is_removed = False
        #: Step, span, begin and end of each pass that was profiled.
        self._passes: list[tuple[int, int, int, int]] = []
        self._pause = 0.0
        self._most = 0
        trackers.steps.on_asked = self._asked

    def remove(self) -> None:
        """End a profile, and take no other: the tracker's reference back would keep the ring in memory."""
        self._tracker.on_asked = None
        if self._profile is None or self._thread == threading.get_ident():
            self._end(_DETACHED)
        else:  # its thread alone can stop the profiler: with its next pass
            self._is_removed = True
            self._modules.stop()

    def _asked(self) -> None:
        begin = time.perf_counter()
        self._most = self._ring.note_look() // 2
        try:
            found = [*take_requests(self._ring.folder)]
        except OSError as error:
            logger.warning("no profile is taken for who asks: %s", error)
            return
        for request in found:
            self._end("another profile was asked for")
            self._request, self._passes = request, []
            self._unweave = self._weave(Observation("forward", self._enter, self._exit, 3))
            self._pause = time.perf_counter() - begin

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return when the pass begins; 0 for one within another or a draft, or of an engine that starts."""
        if self._is_removed or (self._request is not None and self._request.is_withdrawn):
            self._end(_DETACHED)
        step = self._tracker.running
        # Without a step here it may be one of another process.
        is_step = not self._tracker.has_passes if step is None else bool(step.id)
        is_inner = self._is_inside or self._forward.is_beside
        if is_inner or self._request is None or self._tracker.level < 3 or not is_step:
            return 0
        runner = self._runner(args, kwargs)
        if self._profile is None:
            try:
                problem = _obstacle() or self._begin(self._platform_of(runner))
            except Exception as error:  # noqa: BLE001 - the engine goes on, and the command says why
                problem = f"{type(error).__name__}: {error}"
            if problem:
                self._end(problem)
                return 0
        model = self._model_of(runner)
        self._models[id(model)] = model
        self._is_inside = True
        return time.time_ns()

    def _begin(self, platform: Any) -> str:
        """Start the profiler; returns "", for no problem."""
        begin, profiler = time.perf_counter(), sys.modules["torch"].profiler
        self._platform = platform
        activities = [profiler.ProfilerActivity.CPU]
        if platform is not None:
            activities = platform.get_profiler_activities()
        self._is_host = len(activities) == 1
        self._wait()  # what was launched before does not belong to a profiled pass
        # With acc_events it would make a Python object of each event: a pause 60 times as long.
        running = profiler.profile(activities=activities)
        running.start()
        self._modules.start()
        self._profile, self._thread = running, threading.get_ident()
        self._pause += time.perf_counter() - begin
        self._tell(paused=self._pause)
        return ""

    def _exit(self, begin_ns: int, result: Any, error: BaseException | None) -> None:
        if not begin_ns:
            return
        self._is_inside = False
        step_id, span_id = self._tracker.remote[0], self._forward.worker.span_id
        if self._tracker.running is not None:
            step_id, _ = self._tracker.parent_of_detail()
            span_id = layout.child_id(step_id, layout.CHILD_FORWARD)
        if self._request is None or self._profile is None or not step_id:
            return
        self._passes.append((step_id, span_id, begin_ns, time.time_ns()))
        if len(self._passes) < self._request.values["steps"]:
            self._tell(paused=self._pause)
            return
        try:
            self._finish()
        except Exception as failure:  # noqa: BLE001 - as above
            self._end(f"{type(failure).__name__}: {failure}")

    def _finish(self) -> None:
        begin = time.perf_counter()
        self._wait()
        running, self._profile = self._profile, None
        running.stop()
        events = compat.profiler_events(running)
        _break_circle(running)
        most = min(_MOST_KERNELS, max(1, self._most // len(self._passes)))
        times = [each[2:] for each in self._passes]
        name_of = self._modules.names(self._models.values())
        found = kernels_of(events, times, most, is_host=self._is_host, name_of=name_of)
        offset = clock.unix_offset()
        for (step_id, span_id, _, _), kernels in zip(self._passes, found):
            for kernel in kernels:
                start = kernel.start_ns - offset
                ids = self._ring.new_id(), step_id, span_id
                self._write(*ids, start, start + kernel.duration_ns, _values(kernel))
        summary = summary_of(kernel for kernels in found for kernel in kernels)
        self._end(paused=self._pause, read=time.perf_counter() - begin, **summary)

    def _wait(self) -> None:
        if self._platform is not None:
            self._platform.synchronize()

    def _end(self, problem: str = "", **more: Any) -> None:
        """End the request, if there is one: its hook, the profiler, and the answer."""
        self._modules.stop()
        self._modules, self._models = ModuleRanges(), {}
        unweave, self._unweave = self._unweave, None
        running, self._profile = self._profile, None
        if unweave is not None:
            unweave()
            if running is not None:
                running.stop()
                _break_circle(running)
            self._tell(problem=problem, **more)
        self._request, self._platform, self._is_inside = None, None, False

    def _tell(self, **more: Any) -> None:
        """Answer the command, which reads whether there is a ``problem`` at the end."""
        if self._request is not None:
            self._request.answer(steps=len(self._passes), **more)


def _values(kernel: Kernel) -> list[AttributeValue]:
    """Return a span's values, in the order of its type."""
    idle = (kernel.idle_host_ns, kernel.idle_transfer_ns, kernel.idle_launch_ns)
    seconds = [ns / 1e9 if ns else None for ns in idle]
    return [
        kernel.name,
        kernel.operator,
        kernel.stream,
        *seconds,
        kernel.graph,
        kernel.count if kernel.count > 1 else None,
        kernel.layer or None,
    ]


def _obstacle() -> str:
    """Return why no profiler can be started in this process; "" if it can."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "this process has not loaded PyTorch"
    if not torch.profiler.kineto_available():
        return "this build of PyTorch has no Kineto, which records kernels"
    if compat.profiler_is_running():
        return "a profiler runs already; try again when it has ended"
    return ""


def _break_circle(profile: Any) -> None:
    """Free a profiler that was stopped, and its events, also in an engine that never collects garbage."""
    vars(profile).clear()
