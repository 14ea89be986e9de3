"""Activates the parts of SGLang's room in each SGLang process, as configured; imports nothing otherwise.

hooks that other plugins register with SGLang's registry    SGL_ASPECTS_ADOPT (on)
operator dispatch in its fused layers                       SGL_ASPECTS_OP_ATTACH
a vendor's communicator in its groups                       SGL_ASPECTS_COMMUNICATOR
calls of torch.cuda: reported with their callers            SGL_ASPECTS_DEVICE_REPORT
                     answered by the platform               SGL_ASPECTS_DEVICE_CALLS=platform
"""

from __future__ import annotations

from collections.abc import Callable

from sgl_aspects import env
from sgl_aspects.engines.sglang import adoption
from sgl_aspects.errors import AspectsError, Stop

OPERATORS_VARIABLE = "SGL_ASPECTS_OP_ATTACH"
COMMUNICATOR_VARIABLE = "SGL_ASPECTS_COMMUNICATOR"
CALLS_VARIABLE = "SGL_ASPECTS_DEVICE_CALLS"
REPORT_VARIABLE = "SGL_ASPECTS_DEVICE_REPORT"


def activate() -> Callable[[], None]:
    """Called in each process before the plugins; the result is called once their hooks are in place.

    :raises Stop: a configured part cannot work: the engine would serve without it.
    """
    try:
        adoption.adopt()
        if env.flag(OPERATORS_VARIABLE):
            from sgl_aspects.engines.sglang import operators

            operators.attach()
        if env.text(COMMUNICATOR_VARIABLE) is not None:
            from sgl_aspects.engines.sglang import communicator

            communicator.attach(str(env.text(COMMUNICATOR_VARIABLE)))
        if env.text(CALLS_VARIABLE) is not None or env.text(REPORT_VARIABLE) is not None:
            from sgl_aspects.engines.sglang import guards

            guards.attach()
    except AspectsError as error:
        raise Stop(error) from error
    return _hooks_are_in_place


def _hooks_are_in_place() -> None:
    adoption.apply_orphans()
    adoption.reach_children()
