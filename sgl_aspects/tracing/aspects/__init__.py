"""The aspects that trace an engine, each written against roles that a catalog fills.

An aspect is a set of observers: for a role, a pair ``enter(args, kwargs) -> token`` and
``exit(token, result, error)``. They look and record; they cannot change what the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import sgl_aspects as aspects
from sgl_aspects import config
from sgl_aspects.engines import CATALOGS
from sgl_aspects.tracing.aspects.detail import DetailAspect
from sgl_aspects.tracing.aspects.detokenizer import DetokenizerAspect
from sgl_aspects.tracing.aspects.exchanged import ExchangeAspect
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
    """Weaves the aspects for every engine that has a catalog, importing none of it.

    Those of all levels, because the level may change at any time: each looks at the recorder's with each
    request and step. What it returns undoes it: call them last to first.
    """
    undo: list[Callable[[], None]] = []
    advices: list[aspects.Advice] = []
    states: list[SchedulerState] = []
    for catalog in CATALOGS:
        state = SchedulerState(recorder)
        states.append(state)
        found: list[Observation] = []
        loop_is_a_function = "step" in catalog.roles
        if loop_is_a_function:
            found += RequestAspect(recorder, catalog, options).observations()
            found += ScheduledRequestAspect(recorder, catalog, state).observations()
        else:
            found += ExchangeAspect(catalog).observations()
            found += ServedRequestAspect(recorder, catalog, options).observations()
            found += DetokenizerAspect(recorder, catalog).observations()
            found += OverlappedRequestAspect(recorder, catalog, state).observations()
        step = StepAspect if loop_is_a_function else OverlappedStepAspect
        found += step(recorder, catalog, state, options).observations()
        found += PreparationAspect(recorder, catalog).observations()
        found += DetailAspect(recorder, catalog, state).observations()
        forward = ForwardAspect(recorder, catalog, state)
        undo.append(forward.flush)
        found += forward.observations()
        for observation in found:
            role = catalog.roles.get(observation.role)
            if role is not None:
                target = aspects.Target.parse(role.targets)
                advices.append(aspects.Advice(target, aspects.HookType.OBSERVE, observation, source=_SOURCE))
    undo.append(aspects.weave(*advices).remove)
    undo += _trace_declared(recorder, states)
    return undo


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
