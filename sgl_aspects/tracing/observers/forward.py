"""Level 3: the model's forward pass, with the device's time for it; level 4: sampling.

The device's events enclose its work: the launch of a graph if one is replayed (its launches, where a pass has
several), otherwise the whole pass. They are read when the batch's result has been processed, without waiting.
Recording and reading them takes longer than all else at level 3: of short replays one in eight has them; at
level 4 every pass.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import WITHOUT_STEPS, Observation
from sgl_aspects.tracing.lifecycle import Step, Trackers
from sgl_aspects.tracing.observers.device import TimedPasses
from sgl_aspects.tracing.observers.worker import WorkerPasses
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.records import error_type

_FAILED = 1 << layout.CHILD_FORWARD


class ForwardObserver(TimedPasses):
    """Stores the timestamps of ``forward`` and ``sample`` in the running step, with the device's time.

    A nested pass (a draft model's) belongs to the outer one. Outside a step (a warm-up, the capture of a
    graph) nothing is stored, except by ``worker`` where the step runs in another process. The compiled path,
    where available, handles plain passes and calls these methods for the others.
    """

    step: Step | None
    met_steps: Any

    def __init__(self, trackers: Trackers) -> None:
        super().__init__(trackers)
        engine = trackers.engine
        self.worker = WorkerPasses(trackers)
        self.is_joined = engine.has("batch.shared_id")
        self.runner_at = engine.position("forward", "model_runner")
        self._has_graphs = "graph_launch" in engine.roles
        self.eager_text = self.replayed_text = self.device_text = 0
        #: The step of the running pass; whether a draft or an encoder runs, whose graphs are not the pass's.
        self.step = self.met_steps = None
        self.is_beside = False
        #: A bit for each mode: whether the last pass replayed a graph, or could have. An event costs the
        #: device as much as a small kernel: where the launch marks the begin, entering does not.
        self.expects = 0
        self.replays = 0

    def observations(self) -> list[Observation]:
        # In a process without steps it detects changes of the level.
        level = WITHOUT_STEPS if self.is_joined else 3
        enter, leave, launch, launched = (
            (self._enter, self._exit, self._launch_enter, self._launch_exit)
            if native.compiled is None
            else (self.forward_enter, self.forward_exit, self.launch_enter, self.launch_exit)
        )
        return [
            Observation("forward", enter, leave, level, native.WatchedCall),
            Observation("graph_launch", launch, launched, 3, native.WatchedCall),
            Observation("run_encoder", self._encoder_enter, self._encoder_exit, 3),
            Observation("sample", self._sample_enter, self._sample_exit, 4),
        ]

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self.tracker.running
        if step is None and self.is_joined:
            return self.worker.forward_enter(args, kwargs)
        if step is not None and not self.tracker.has_passes:
            self.tracker.meet_pass()
        is_inner = self.is_beside or self.step is not None
        if step is None or not step.id or is_inner or self.tracker.level < 3:
            return None
        runner = self._runner(args, kwargs)
        if runner is not self.met_runner or step.steps is not self.met_steps:
            self._meet(runner, step)
        step.child = layout.CHILD_FORWARD
        block = step.block
        step.words[block + layout.FORWARD_START] = monotonic_ns()
        step.words[block + layout.STEP_GRAPH] = self.eager_text
        step.words[block + layout.STEP_DEVICE_NAME] = self.device_text
        if self.has_events:
            tracker, is_expected = self.tracker, self.expects & _mode_bit(step)
            self.replays += bool(is_expected)
            if not is_expected or tracker.level >= 4 or not self.replays & tracker.untimed:
                self._take_events()
            if not is_expected:
                self._begin_on_device()
        self.has_replayed = False
        self.step = step  # last: its exit, which releases it, comes only after this
        return step

    def _exit(self, step: Any, result: Any, error: BaseException | None) -> None:
        if step is None:
            return
        if not isinstance(step, Step):
            self.worker.forward_exit(step, error)
            return
        step.child = layout.CHILD_RUN_BATCH
        self.step = None
        events, self.events = self.events, None
        if events is not None and self.has_begun:
            if not self.has_ended or self.has_parts:
                events[1](self.stream)
            step.events = events
        else:
            if events is not None:
                self.tracker.spare_events.append(events)
            # Unlike the last pass of this mode, it replayed no graph.
            if step.words[step.block + layout.STEP_GRAPH] == self.eager_text:
                self.expects &= ~_mode_bit(step)
        step.words[step.block + layout.FORWARD_END] = monotonic_ns()
        if error is not None:
            self.tracker.fail(step, _FAILED, error_type(error))

    def _launch_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self.step
        if self.is_beside:
            return
        if step is None:
            self.worker.graph = "replayed"
            return
        words, at = step.words, step.block + layout.STEP_GRAPH
        if words[at] == self.replayed_text:
            self.has_parts = True
            return
        words[at] = self.replayed_text
        # The device was idle while the host prepared the replay.
        if self.events is not None:
            self.expects |= _mode_bit(step)
            self._begin_on_device()

    def _launch_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        # Work that the engine launches afterwards does not belong to the graph.
        is_pass = self.has_begun and not self.has_parts and not self.is_beside
        if self.events is not None and is_pass and error is None:
            self.events[1](self.stream)
            self.has_ended = True

    def _encoder_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.is_beside = True

    def _encoder_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        self.is_beside = False

    def _sample_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracker = self.tracker
        step = tracker.running
        if self.tracker.remote[0]:
            return self.worker.sample_enter()
        if step is None:  # a wait for the previous result: it belongs to the batch launched last
            step = tracker.in_flight[-1] if tracker.in_flight else None
        if step is None or not step.id:
            return None
        step.words[step.block + layout.SAMPLE_START] = monotonic_ns()
        tracker.running, step.child = step, layout.CHILD_SAMPLE
        return step

    def _sample_exit(self, step: Any, result: Any, error: BaseException | None) -> None:
        if step is None:
            return
        if not isinstance(step, Step):
            self.worker.sample_exit(step, error)
            return
        now, tracker = monotonic_ns(), self.tracker
        step.words[step.block + layout.SAMPLE_END] = now
        step.child = layout.CHILD_RUN_BATCH
        if error is not None:
            tracker.fail(step, 1 << layout.CHILD_SAMPLE, error_type(error))
        if step.words[step.block + layout.RUN_END]:  # sampled after its launch
            tracker.running = None
            if error is not None:  # there will be no result to process
                tracker.take(step.batch, step.result)
                tracker.end(step, now)

    def _meet(self, runner: Any, step: Step) -> None:
        """Take a new runner, or a new ring file for the texts."""
        self._meet_runner(runner)
        self.met_steps, text, name = step.steps, self._recorder.text, self.device_name
        self.eager_text = text("eager") if self._has_graphs else 0
        self.replayed_text = text("replayed")
        self.device_text = text(str(name)) if name else 0
        self.expects = 0


def _mode_bit(step: Step) -> int:
    return 1 << (step.words[step.block + layout.STEP_MODE] & 63)  # type: ignore[no-any-return]
