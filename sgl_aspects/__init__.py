"""Attach, trace, replace: any function of an LLM inference engine, without editing the engine.

Importing this package loads wrapt and nothing else: neither torch nor OpenTelemetry.
"""

from sgl_aspects._version import __version__
from sgl_aspects.errors import AspectsError
from sgl_aspects.plugins import load_plugins
from sgl_aspects.weaving import (
    Advice,
    Aspect,
    Handle,
    HookRegistry,
    HookReport,
    HookSource,
    HookType,
    Observer,
    Report,
    Result,
    Stale,
    State,
    Target,
    after,
    around,
    before,
    explain,
    native,
    observe,
    plugin_hook,
    replace,
    report,
    weave,
    woven,
)

__all__ = [
    "Advice",
    "Aspect",
    "AspectsError",
    "Handle",
    "HookRegistry",
    "HookReport",
    "HookSource",
    "HookType",
    "Observer",
    "Report",
    "Result",
    "Stale",
    "State",
    "Target",
    "__version__",
    "after",
    "around",
    "before",
    "explain",
    "load_plugins",
    "native",
    "observe",
    "plugin_hook",
    "replace",
    "report",
    "weave",
    "woven",
]
