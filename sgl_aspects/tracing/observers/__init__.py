"""What watches an engine's functions and tells the trackers of requests and steps, whatever the engine.

An observer watches roles: for each a pair ``enter(args, kwargs) -> token``, ``exit(token, result, error)``.
They look and record; they cannot change what the engine does. The engine's room says which functions play the
roles and how to read what they got and gave; a role that it does not have is not watched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import sgl_aspects as aspects
from sgl_aspects import config
from sgl_aspects.engines import Engine, Role, find_engines
from sgl_aspects.tracing.context import OpenSpan, add_source, bridge_opentelemetry
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.alone import AloneObserver
from sgl_aspects.tracing.observers.calling import CallingObserver
from sgl_aspects.tracing.observers.detail import DetailObserver
from sgl_aspects.tracing.observers.detokenizer import DetokenizerObserver
from sgl_aspects.tracing.observers.exchanged import HTTP_ROLES, ExchangeObserver
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.function import FunctionObserver
from sgl_aspects.tracing.observers.observation import Observation
from sgl_aspects.tracing.observers.preparation import PreparationObserver
from sgl_aspects.tracing.observers.process import ProcessObserver
from sgl_aspects.tracing.observers.queue import QueueObserver
from sgl_aspects.tracing.observers.serving import ServingObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.observers.worker import WorkerObserver
from sgl_aspects.tracing.options import DEFAULTS, TraceOptions
from sgl_aspects.tracing.recorder import Recorder

logger = logging.getLogger(__name__)

_SOURCE = aspects.HookSource("tracing", "sgl-aspects")
#: These are woven whatever the level is: they see that it has changed.
_ALWAYS = 2


def weave_observers(recorder: Recorder, options: TraceOptions = DEFAULTS) -> list[Callable[[], None]]:
    """Weaves the observers for every engine that has a room, importing none of it.

    What it returns undoes it: call them last to first.
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
        except BaseException:  # a room may be anybody's
            logger.exception(
                "the room of the engine %s failed: it is not traced, the others are", engine.name
            )
            for step in reversed(own):
                step()
        else:
            undo += own
    # An engine that is called may have a server, too, and may be loaded beside one that serves.
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
    worker = WorkerObserver(trackers)
    woven = WovenLevels(engine, [*_observations(trackers), *worker.observations()])
    undo += [worker.flush, woven.remove, trackers.steps.flush]
    trackers.steps.on_level = woven.set_level
    woven.set_level(recorder.level)
    return trackers


class WovenLevels:
    """The observations of one engine, of which those of the levels that are on are woven."""

    def __init__(self, engine: Engine, observations: list[Observation]) -> None:
        self._advices: dict[int, list[aspects.Advice]] = {}
        self._lost: set[str] = set()
        self._engine = engine
        self._handles: dict[int, aspects.Handle] = {}
        for level in (_ALWAYS, 3, 4):
            own = [one for one in observations if max(one.level, _ALWAYS) == level]
            self._advices[level] = [*_advices(engine.roles, own, self._tell_lost)]

    def set_level(self, level: int) -> None:
        """Weaves what ``level`` asks for, and takes off what it does not."""
        for own, advices in self._advices.items():
            if own <= max(level, _ALWAYS) and own not in self._handles and advices:
                self._handles[own] = aspects.weave(*advices)
            elif own > max(level, _ALWAYS) and own in self._handles:
                self._handles.pop(own).remove()

    def _tell_lost(self, role: str, why: str) -> None:
        """A required role is not there: one error, and the engine goes on."""
        if role not in self._lost:
            self._lost.add(role)
            logger.error(
                "%s is not traced whole: it has no function for the role %s; looked for %s (%s). "
                "`sgl-aspects doctor --engine WHEEL` shows which roles a version has",
                self._engine.name,
                role,
                " | ".join(self._engine.roles[role].targets),
                why,
            )

    def remove(self) -> None:
        """Gives every original back."""
        while self._handles:
            self._handles.popitem()[1].remove()


def _is_called(engine: Engine) -> bool:
    """Whether a function of its own ends each request; else a generator serves it, by HTTP as a rule."""
    return "finish_request" in engine.roles


def _advices(
    roles: Mapping[str, Role],
    observations: Iterable[Observation],
    tell_lost: Callable[[str, str], None] | None = None,
) -> Iterator[aspects.Advice]:
    """Those whose role there is. ``tell_lost``: of a required one that the engine does not have, and why."""
    for observation in observations:
        role = roles.get(observation.role)
        if role is not None:
            target = aspects.Target.parse(role.targets)
            advice = aspects.Advice(target, aspects.HookType.OBSERVE, observation, source=_SOURCE)
            if role.required and tell_lost is not None:
                advice.on_lost = partial(tell_lost, observation.role)
            yield advice


def _observations(trackers: Trackers) -> Iterator[Observation]:
    engine = trackers.engine
    if _is_called(engine):
        yield from CallingObserver(trackers).observations()
    else:
        yield from ServingObserver(trackers).observations()
        yield from DetokenizerObserver(trackers).observations()
    yield from ProcessObserver(trackers).observations()
    yield from QueueObserver(trackers).observations()
    yield from AloneObserver(trackers).observations()
    yield from StepObserver(trackers).observations()
    yield from ForwardObserver(trackers).observations()
    yield from PreparationObserver(trackers).observations()
    yield from DetailObserver(trackers).observations()
    if engine.observers is not None:
        yield from engine.observers(trackers)


def _trace_declared(recorder: Recorder, all_trackers: list[Trackers]) -> Iterator[Callable[[], None]]:
    """Weaves the functions that the configuration file wants traced; yields what undoes it.

    One that cannot be is logged and stays in the report: the engine's own are traced all the same.
    """

    def span_of(rid: Any) -> OpenSpan | None:
        found = (trackers.span_of(rid) for trackers in all_trackers)
        return next((span for span in found if span is not None), None)

    for declared in config.from_environment().traces:
        target, observer = str(declared.target), FunctionObserver(recorder, declared, span_of)
        source = aspects.HookSource(declared.where)
        observe = aspects.HookType.OBSERVE
        aspects.HookRegistry.register(target, observer, observe, source=source, required=declared.required)
        yield partial(_unregister, target, observer)
    aspects.HookRegistry.apply_hooks()


def _unregister(target: str, observer: FunctionObserver) -> None:
    aspects.HookRegistry.unregister(target, observer, aspects.HookType.OBSERVE)
