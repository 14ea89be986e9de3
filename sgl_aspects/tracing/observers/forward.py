"""Level 3: the model's forward pass, with the time that the device itself took for it; level 4: sampling.

The device's events sit right around its work: around the launch of a graph where one is replayed, else
around the whole pass. They are read when the batch's result has been processed, never waited for.
"""

from __future__ import annotations

from time import time_ns
from typing import Any

from sgl_aspects.tracing.lifecycle import Step, Trackers
from sgl_aspects.tracing.observers.observation import Observation, error_type
from sgl_aspects.tracing.ring.format import (
    CHILD_FORWARD,
    CHILD_RUN_BATCH,
    CHILD_SAMPLE,
    FORWARD_END,
    FORWARD_START,
    RUN_END,
    SAMPLE_END,
    SAMPLE_START,
    STEP_GRAPH,
    STEP_LABEL,
    STEP_MODE,
)

_FAILED = 1 << CHILD_FORWARD
pack_label, LABEL = STEP_LABEL.pack_into, 8 * STEP_GRAPH
# An engine runs all its passes in one stream; whether it still does is asked this often, a mask of a count.
_PASSES_PER_STREAM = 63


class ForwardObserver:
    """Stores the moments of ``forward`` and ``sample`` in the step that runs, and takes the device's time.

    A pass inside a pass (a draft model's) belongs to it. Outside of a step (a warm-up, the capture of a
    graph) nothing is stored. Written for a decode step of a fast engine, whose caches are cold when it comes
    here: few instructions, few objects.
    """

    __slots__ = (
        "_device_text",
        "_eager_text",
        "_events",
        "_expects",
        "_graph_mode",
        "_has_begun",
        "_has_graphs",
        "_launches",
        "_met_runner",
        "_met_steps",
        "_mode",
        "_passes",
        "_platform",
        "_platform_of",
        "_recorder",
        "_replayed_text",
        "_runner",
        "_runner_at",
        "_step",
        "_stream",
        "_tracker",
    )

    def __init__(self, trackers: Trackers) -> None:
        engine = trackers.engine
        self._tracker, self._recorder = trackers.steps, trackers.recorder
        self._runner = engine.call_reader("forward", "model_runner")
        self._runner_at = engine.position("forward", "model_runner")
        self._platform_of = engine.reader("model_runner.platform")
        self._launches = "graph_launch" in engine.roles
        self._graph_mode = engine.call_reader("graph_mode", "graph")
        self._has_graphs = not engine.roles.keys().isdisjoint(("graph_launch", "graph_replay", "graph_mode"))
        self._eager_text = self._replayed_text = self._device_text = 0
        self._met_steps: Any = None
        self._met_runner: Any = None
        self._platform: Any = None
        #: The step whose pass runs, and its events; whether the first of them has been recorded.
        self._step: Step | None = None
        self._events: Any = None
        self._has_begun = False
        #: By mode, whether the last pass replayed a graph, or was to decide about one. An event costs the
        #: device as much as a small kernel: where the launch marks the begin, entering does not.
        self._expects: dict[int, bool] = {}
        self._mode = 0
        #: The stream of the passes: to ask for it takes longer than to mark a moment in it.
        self._stream: Any = None
        self._passes = 0

    def observations(self) -> list[Observation]:
        found = [
            Observation("forward", self._enter, self._exit, 3),
            Observation("graph_decision", None, self._decision_exit, 3),
            Observation("graph_mode", None, self._graph_mode_exit, 3),
            Observation("graph_launch", self._launch_enter, None, 3),
            Observation("sample", self._sample_enter, self._sample_exit, 4),
        ]
        if not self._launches:
            found.append(Observation("graph_replay", self._replay_enter, None, 3))
        return found

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        step = self._tracker.running
        if step is None or not step.id or self._step is not None:
            return None
        at = self._runner_at
        runner = args[at] if at < len(args) else self._runner(args, kwargs)
        if runner is not self._met_runner or step.steps is not self._met_steps:
            self._meet(runner, step)
        self._step = step
        step.child = CHILD_FORWARD
        block = step.block
        step.words[block + FORWARD_START] = time_ns()
        pack_label(step.steps.memory, step.offset + LABEL, self._eager_text, self._device_text)
        if self._platform is not None:
            self._events = self._tracker.take_events(self._platform)
            self._has_begun = False
            self._mode = step.words[block + STEP_MODE]
            if not self._expects.get(self._mode):
                self._begin_on_device()
        return step

    def _exit(self, step: Step | None, result: Any, error: BaseException | None) -> None:
        if step is None:
            return
        step.child = CHILD_RUN_BATCH
        self._step = None
        events = self._events
        if events is not None:
            self._events = None
            if self._has_begun:
                events[1].record(self._stream)
                step.events = events
            else:  # no graph was replayed, unlike the last time
                self._tracker.give_back_events(events)
                self._expects[self._mode] = False
        step.words[step.block + FORWARD_END] = time_ns()
        if error is not None:
            self._tracker.fail(step, _FAILED, error_type(error))

    def _decision_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if self._events is not None:
            self._expects[self._mode] = True
            if not result:
                self._begin_on_device()

    def _graph_mode_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        step, label = self._step, self._graph_mode((), {}, result)
        if step is not None and label is not None:
            step.words[step.block + STEP_GRAPH] = self._recorder.text(label)

    def _replay_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._step
        if step is not None:
            step.words[step.block + STEP_GRAPH] = self._replayed_text

    def _launch_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._step
        if step is None:
            return
        words, at = step.words, step.block + STEP_GRAPH
        if words[at] == self._replayed_text:
            return  # a further part of the same pass
        words[at] = self._replayed_text
        # While the host prepared the replay the device had nothing to do.
        if self._events is not None:
            self._expects[self._mode] = True
            self._begin_on_device()

    def _begin_on_device(self) -> None:
        self._passes += 1
        if not self._passes & _PASSES_PER_STREAM:
            self._stream = self._platform.current_stream()
        self._events[0].record(self._stream)
        self._has_begun = True

    def _sample_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        tracker = self._tracker
        step = tracker.running
        if step is None:  # what waits for the result before: it is of the batch that was launched last
            step = tracker.in_flight[-1] if tracker.in_flight else None
        if step is None or not step.id:
            return None
        step.words[step.block + SAMPLE_START] = time_ns()
        tracker.running, step.child = step, CHILD_SAMPLE
        return step

    def _sample_exit(self, step: Step | None, result: Any, error: BaseException | None) -> None:
        if step is None:
            return
        now, tracker = time_ns(), self._tracker
        step.words[step.block + SAMPLE_END] = now
        step.child = CHILD_RUN_BATCH
        if error is not None:
            tracker.fail(step, 1 << CHILD_SAMPLE, error_type(error))
        if step.words[step.block + RUN_END]:  # it was sampled after its launch
            tracker.running = None
            if error is not None:  # there will be no result to process
                tracker.take(step.batch, step.result)
                tracker.end(step, now)

    def _meet(self, runner: Any, step: Step) -> None:
        """Another runner, or another file for the texts."""
        text = self._recorder.text
        self._met_runner, self._met_steps = runner, step.steps
        self._platform = platform = self._platform_of(runner)
        if platform is not None:
            try:
                platform.create_event()
                self._stream = platform.current_stream()
            except NotImplementedError:
                self._platform = None
        name = getattr(platform, "device_name", None)
        self._eager_text = text("eager") if self._has_graphs else 0
        self._replayed_text = text("replayed")
        self._device_text = text(str(name)) if name else 0
        self._expects.clear()
