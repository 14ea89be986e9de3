"""The aspects that trace an engine, each written against roles that an engine's room fills.

An aspect is a set of observers: for a role, a pair ``enter(args, kwargs) -> token`` and
``exit(token, result, error)``. They look and record; they cannot change what the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import sgl_aspects as aspects
from sgl_aspects import config
from sgl_aspects.engines import Engine, Role, find_engines
from sgl_aspects.tracing.aspects.detail import DetailAspect
from sgl_aspects.tracing.aspects.detokenizer import DetokenizerAspect
from sgl_aspects.tracing.aspects.exchanged import HTTP_ROLES, ExchangeAspect
from sgl_aspects.tracing.aspects.forward import ForwardAspect
from sgl_aspects.tracing.aspects.function import FunctionAspect
from sgl_aspects.tracing.aspects.observer import Observation
from sgl_aspects.tracing.aspects.options import DEFAULTS, AspectOptions
from sgl_aspects.tracing.aspects.overlapped import OverlappedRequestAspect, OverlappedStepAspect
from sgl_aspects.tracing.aspects.preparation import PreparationAspect
from sgl_aspects.tracing.aspects.request import RequestAspect
from sgl_aspects.tracing.aspects.scheduled import ScheduledRequestAspect, SchedulerState
from sgl_aspects.tracing.aspects.served import ServedRequestAspect
from sgl_aspects.tracing.aspects.step import StepAspect
from sgl_aspects.tracing.recorder import Recorder

_SOURCE = aspects.HookSource("tracing", "sgl-aspects")


def weave_aspects(recorder: Recorder, options: AspectOptions = DEFAULTS) -> list[Callable[[], None]]:
    """Weaves the aspects for every engine that has a room, importing none of it.

    Those of all levels, because the level may change at any time: each looks at the recorder's with each
    request and step. What it returns undoes it: call them last to first.
    """
    undo: list[Callable[[], None]] = []
    advices: list[aspects.Advice] = []
    states: list[SchedulerState] = []
    by_http: list[Engine] = []
    for engine in find_engines():
        state = SchedulerState(recorder)
        states.append(state)
        found: list[Observation] = []
        loop_is_a_function = "step" in engine.roles
        if loop_is_a_function:
            found += RequestAspect(recorder, engine, options).observations()
            found += ScheduledRequestAspect(recorder, engine, state).observations()
        else:
            by_http.append(engine)
            found += ServedRequestAspect(recorder, engine, options).observations()
            found += DetokenizerAspect(recorder, engine).observations()
            found += OverlappedRequestAspect(recorder, engine, state).observations()
        step = StepAspect if loop_is_a_function else OverlappedStepAspect
        found += step(recorder, engine, state, options).observations()
        found += PreparationAspect(recorder, engine).observations()
        found += DetailAspect(recorder, engine, state).observations()
        forward = ForwardAspect(recorder, engine, state)
        undo.append(forward.flush)
        found += forward.observations()
        advices += _advices(engine.roles, found)
    exchanges = ExchangeAspect(recorder, by_http, options).observations()
    advices += _advices(HTTP_ROLES, exchanges)
    undo.append(aspects.weave(*advices).remove)
    undo += _trace_declared(recorder, states)
    return undo


def _advices(roles: Mapping[str, Role], observations: Sequence[Observation]) -> Iterator[aspects.Advice]:
    """Those whose role an engine has."""
    for observation in observations:
        role = roles.get(observation.role)
        if role is not None:
            target = aspects.Target.parse(role.targets)
            yield aspects.Advice(target, aspects.HookType.OBSERVE, observation, source=_SOURCE)


def _trace_declared(recorder: Recorder, states: Sequence[SchedulerState]) -> Iterator[Callable[[], None]]:
    """Weaves the functions that the configuration file wants traced; yields what undoes it.

    One that cannot be is logged and stays in the report: the engine's own are traced all the same.
    """
    for declared in config.from_environment().traces:
        target, aspect = str(declared.target), FunctionAspect(recorder, declared, states)
        source = aspects.HookSource(declared.where)
        observe = aspects.HookType.OBSERVE
        aspects.HookRegistry.register(target, aspect, observe, source=source, required=declared.required)
        yield partial(_unregister, target, aspect)
    aspects.HookRegistry.apply_hooks()


def _unregister(target: str, aspect: FunctionAspect) -> None:
    aspects.HookRegistry.unregister(target, aspect, aspects.HookType.OBSERVE)
