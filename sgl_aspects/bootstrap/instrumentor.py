"""The package as an instrumentor of OpenTelemetry's: `opentelemetry-instrument vllm serve MODEL` traces it.

`opentelemetry-instrument`, and the OpenTelemetry Operator with its annotation, load every entry point of the
group `opentelemetry_instrumentor` at the start of each Python process and call ``instrument``. The class is
not derived from OpenTelemetry's, so that nothing else has to be installed.
"""

from __future__ import annotations

import os

from sgl_aspects import env
from sgl_aspects.errors import Stop
from sgl_aspects.plugins import load_plugins
from sgl_aspects.terminal import say
from sgl_aspects.weaving import HookRegistry

_TRACE = "SGL_ASPECTS_TRACE"
_LEVEL = "1"


class Instrumentor:
    """Traces the engines of this process and of its children, at level 1 if no other is set."""

    def instrument(self, **options: object) -> None:
        """Weave the hooks of all plugins, once for each process, also below `sgl-aspects run`.

        A wrong setting, or a required hook that cannot be woven, ends the process with status 1.
        """
        os.environ.setdefault(env.spelled(_TRACE), _LEVEL)
        try:
            load_plugins()
        except Stop as stop:
            # Called while Python starts, which would turn the exception into a fatal error with a traceback.
            say(str(stop))
            os._exit(1)

    def uninstrument(self, **options: object) -> None:
        """Restore every woven function."""
        HookRegistry.reset()
