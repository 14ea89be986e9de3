"""Attaches dispatch and communication where SGL_ASPECTS_OP_ATTACH or SGL_ASPECTS_COMMUNICATOR asks for it."""

from __future__ import annotations

from sgl_aspects import env
from sgl_aspects.errors import AspectsError, Stop

OPERATORS_VARIABLE = "SGL_ASPECTS_OP_ATTACH"
COMMUNICATOR_VARIABLE = "SGL_ASPECTS_COMMUNICATOR"


def activate() -> None:
    """Called in each process of an engine; imports nothing where nothing is asked for.

    :raises Stop: what is asked for cannot be: the engine would serve without it.
    """
    try:
        if env.flag(OPERATORS_VARIABLE):
            from sgl_aspects.engines.sglang import operators

            operators.attach()
        if env.text(COMMUNICATOR_VARIABLE) is not None:
            from sgl_aspects.engines.sglang import communicator

            communicator.attach(str(env.text(COMMUNICATOR_VARIABLE)))
    except AspectsError as error:
        raise Stop(error) from error
