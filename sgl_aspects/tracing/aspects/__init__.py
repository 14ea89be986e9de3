"""The aspects that trace an engine, each written against roles that a catalog fills.

An aspect is a set of observers: for a role, a pair ``enter(args, kwargs) -> token`` and
``exit(token, result, error)``. They look and record; they cannot change what the engine does.
"""

from __future__ import annotations

from collections.abc import Callable

import sgl_aspects as aspects
from sgl_aspects.engines import CATALOGS
from sgl_aspects.tracing.aspects.detokenizer import DetokenizerAspect
from sgl_aspects.tracing.aspects.forward import ForwardAspect
from sgl_aspects.tracing.aspects.observer import Observation
from sgl_aspects.tracing.aspects.overlapped import OverlappedRequestAspect, OverlappedStepAspect
from sgl_aspects.tracing.aspects.request import RequestAspect
from sgl_aspects.tracing.aspects.scheduled import ScheduledRequestAspect, SchedulerState
from sgl_aspects.tracing.aspects.served import ServedRequestAspect
from sgl_aspects.tracing.aspects.step import StepAspect
from sgl_aspects.tracing.recorder import Recorder

_SOURCE = aspects.HookSource("tracing", "sgl-aspects")


def weave_aspects(recorder: Recorder) -> list[Callable[[], None]]:
    """Weaves the aspects for every engine that has a catalog, importing none of it.

    Those of all levels, because the level may change at any time: each looks at the recorder's with each
    request and step. What it returns undoes it: call them last to first.
    """
    undo: list[Callable[[], None]] = []
    advices: list[aspects.Advice] = []
    for catalog in CATALOGS:
        state = SchedulerState(recorder)
        found: list[Observation] = []
        loop_is_a_function = "step" in catalog.roles
        if loop_is_a_function:
            found += RequestAspect(recorder, catalog).observations()
            found += ScheduledRequestAspect(recorder, catalog, state).observations()
        else:
            found += ServedRequestAspect(recorder, catalog).observations()
            found += DetokenizerAspect(recorder, catalog).observations()
            found += OverlappedRequestAspect(recorder, catalog, state).observations()
        step = StepAspect if loop_is_a_function else OverlappedStepAspect
        found += step(recorder, catalog, state).observations()
        forward = ForwardAspect(recorder, catalog, state)
        undo.append(forward.flush)
        found += forward.observations()
        for observation in found:
            role = catalog.roles.get(observation.role)
            if role is not None:
                target = aspects.Target.parse(role.targets)
                advices.append(aspects.Advice(target, aspects.HookType.OBSERVE, observation, source=_SOURCE))
    undo.append(aspects.weave(*advices).remove)
    return undo
