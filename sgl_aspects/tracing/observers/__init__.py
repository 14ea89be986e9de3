"""Observers: advice on an engine's functions that reports to the trackers of requests and steps.

An observer watches roles: for each a pair ``enter(args, kwargs) -> token``, ``exit(token, result, error)``.
It cannot change what the engine does. The engine's room maps roles to functions and defines how to read their
arguments and results; a role that the engine lacks is not watched.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import sgl_aspects as aspects
from sgl_aspects import env
from sgl_aspects.engines import Engine, Role, find_engines
from sgl_aspects.engines.base import is_at_hand
from sgl_aspects.engines.contract import WITHOUT_STEPS, Observation
from sgl_aspects.tracing.context import OpenSpan, add_source, bridge_opentelemetry
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.detail import DetailObserver
from sgl_aspects.tracing.observers.detokenizing import DetokenizerObserver
from sgl_aspects.tracing.observers.draft import DraftObserver
from sgl_aspects.tracing.observers.exchanged import HTTP_ROLES, ExchangeObserver, RpcObserver
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.process import PreparationObserver, ProcessObserver
from sgl_aspects.tracing.observers.profile import ProfileObserver
from sgl_aspects.tracing.observers.queue import QueueObserver
from sgl_aspects.tracing.observers.serving import CallingObserver, ServingObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.options import DEFAULTS, TraceOptions
from sgl_aspects.tracing.record.recorder import Recorder
from sgl_aspects.tracing.record.ring_recorder import RingRecorder

logger = logging.getLogger(__name__)

_SOURCE = aspects.HookSource("tracing", "sgl-aspects")
#: The observers of every engine, beside those of its callers' side.
_OBSERVERS: tuple[Callable[[Trackers], Any], ...] = (
    ProcessObserver,
    QueueObserver,
    StepObserver,
    PreparationObserver,
    DetailObserver,
)
#: The lowest level that is woven: its observers notice changes of the level.
_ALWAYS = 2


def weave_observers(recorder: Recorder, options: TraceOptions = DEFAULTS) -> list[Callable[[], None]]:
    """Weave the observers for every engine that has a room, importing none of the engines.

    Returns functions that undo it: call them last to first.
    """
    undo: list[Callable[[], None]] = []
    bridge_opentelemetry()
    all_trackers: list[Trackers] = []
    for engine in find_engines():
        own: list[Callable[[], None]] = []
        try:
            all_trackers.append(_weave_engine(engine, recorder, options, own))
        except KeyboardInterrupt:
            raise
        except BaseException:  # a room may be third-party code
            logger.exception("observing the engine %s failed: it is not traced, the others are", engine.name)
            for step in reversed(own):
                step()
        else:
            undo += own
    # An engine without a server of its own comes last, since it may be loaded beside one that serves.
    by_http = sorted(all_trackers, key=lambda trackers: _is_called(trackers.engine))
    exchanges = ExchangeObserver(by_http, options).observations()
    undo.append(aspects.weave(*_advices(HTTP_ROLES, exchanges)).remove)
    undo += _trace_declared(recorder, all_trackers)
    return undo


def _weave_engine(
    engine: Engine, recorder: Recorder, options: TraceOptions, undo: list[Callable[[], None]]
) -> Trackers:
    trackers = Trackers.of(engine, recorder, options)
    undo.append(add_source(trackers.steps.current_span))
    forward = ForwardObserver(trackers)
    drafts = DraftObserver(trackers, forward)
    own = [*_observations(trackers), *forward.observations(), *drafts.observations()]
    woven = WovenLevels(engine, own)
    undo += [forward.worker.flush, woven.remove, trackers.steps.flush]
    if isinstance(recorder, RingRecorder):  # others have no control block to ask in
        undo.append(ProfileObserver(trackers, recorder, forward, woven.weave).remove)
    trackers.steps.on_level = woven.set_level
    woven.set_level(recorder.level)
    return trackers


class WovenLevels:
    """The observations of one engine, woven by level."""

    def __init__(self, engine: Engine, observations: list[Observation]) -> None:
        self._engine = engine
        #: By level, and the package without which it is not woven.
        self._advices: dict[tuple[int, str], list[aspects.Advice]] = {}
        self._missing: set[str] = set()
        self._woven: set[tuple[int, str]] = set()
        self._asked = 0, False  # what set_level() was called with last
        self._changing = threading.Lock()
        roles = engine.every_role
        for one in observations:
            if one.role in roles:
                group = one.level and max(one.level, _ALWAYS), roles[one.role].package
                self._advices.setdefault(group, []).extend(_advices(roles, [one], self._log_missing))

    def set_level(self, level: int, has_passes: bool = False) -> None:
        """Weave the observations of ``level``, and remove those above it: each in one search of the heap.

        ``has_passes``: the passes of this process's steps run in it. If another thread weaves, as one that
        attaches does, it applies this level, too: this one does not wait.
        """
        self._asked = level, has_passes
        while (wanted := self._wanted()) != self._woven and self._changing.acquire(blocking=False):
            try:
                self._change(wanted - self._woven, aspects.weave)
                self._change(self._woven - wanted, _remove)
                self._woven = wanted
            finally:
                self._changing.release()

    def _wanted(self) -> set[tuple[int, str]]:
        level, has_passes = self._asked
        wanted = {own for own in self._advices if own[0] <= max(level, _ALWAYS) and is_at_hand(own[1])}
        if level < 3 and has_passes:
            wanted.discard((WITHOUT_STEPS, ""))
        return wanted

    def weave(self, observation: Observation) -> Callable[[], None]:
        """Weave one more observation, whatever the level; return a function that removes it."""
        return aspects.weave(*_advices(self._engine.every_role, [observation])).remove

    def _change(self, levels: set[tuple[int, str]], change: Callable[..., Any]) -> None:
        advices = [advice for level in sorted(levels) for advice in self._advices[level]]
        if advices:
            change(*advices)

    def _log_missing(self, role: str, why: str) -> None:
        """Log a missing required role, once; the engine goes on."""
        if role not in self._missing:
            self._missing.add(role)
            logger.error(
                "%s is traced in part only: it has no function for the role %s; looked for %s (%s). "
                "`sgl-aspects doctor --engine WHEEL` shows which roles a version has",
                self._engine.name,
                role,
                " | ".join(self._engine.every_role[role].targets),
                why,
            )

    def remove(self) -> None:
        """Remove the hooks permanently.

        Observers refer to this object and their hooks to them: without hooks here all of them are freed at
        once, also in an engine whose garbage collector does not look at objects as old as these.
        """
        with self._changing:
            self._change(self._woven, _remove)
            self._woven, self._advices = set(), {}


def _remove(*advices: aspects.Advice) -> None:
    aspects.Handle(advices).remove()


def _is_called(engine: Engine) -> bool:
    """Return whether the engine has a function that ends each request, rather than a generator that serves
    it.
    """
    return "finish_request" in engine.roles


def _advices(
    roles: Mapping[str, Role],
    observations: Iterable[Observation],
    on_missing: Callable[[str, str], None] | None = None,
) -> Iterator[aspects.Advice]:
    """Yield the advice for roles that exist. ``on_missing``: called with a missing required role and why."""
    for observation in observations:
        role = roles.get(observation.role)
        if role is not None:
            target = aspects.Target.parse(role.targets)
            advice = aspects.Advice(target, aspects.HookType.OBSERVE, observation, source=_SOURCE)
            advice.caller = observation.caller
            if role.required and on_missing is not None:
                advice.on_lost = partial(on_missing, observation.role)
            yield advice


def _observations(trackers: Trackers) -> Iterator[Observation]:
    engine = trackers.engine
    # Where one function does both, a request's last output is detokenized before it ends.
    answers = DetokenizerObserver, RpcObserver, ServingObserver
    callers = (CallingObserver,) if _is_called(engine) else answers
    for make in (*callers, *_OBSERVERS):
        yield from make(trackers).observations()
    if engine.observers is not None:
        yield from engine.observers(trackers)


def _trace_declared(recorder: Recorder, all_trackers: list[Trackers]) -> Iterator[Callable[[], Any]]:
    """Weave the functions that the configuration file declares; yield functions that undo it.

    A function that cannot be woven is logged and stays in the report; the engine's own are traced
    nonetheless.
    """
    if env.text("SGL_ASPECTS_CONFIG") is None:
        return
    from sgl_aspects import config
    from sgl_aspects.tracing.observers.function import FunctionObserver

    def span_of(rid: Any) -> OpenSpan | None:
        found = (trackers.span_of(rid) for trackers in all_trackers)
        return next((span for span in found if span is not None), None)

    for declared in config.from_environment().traces:
        target, observer = str(declared.target), FunctionObserver(recorder, declared, span_of)
        source = aspects.HookSource(declared.where)
        observe = aspects.HookType.OBSERVE
        aspects.HookRegistry.register(target, observer, observe, source=source, required=declared.required)
        yield partial(aspects.HookRegistry.unregister, target, observer, observe)
    aspects.HookRegistry.apply_hooks()
